"""A running Airflow with a triggerer: whoever writes into a table, its view follows, and nobody starts a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva import Database
from airflow_geneva.assets import new_fragments
from tests.airflow.stack import COMPONENTS, RUN_SECONDS, START_SECONDS, Stack, start_stack, wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
WATCHER, DEFERRED = "refresh_on_arrival", "refresh_when_settled"
QUICKER = {
    # The examples as they are shown, but minutes are seconds.
    "refresh_on_arrival.py": [("poll_interval=60", "poll_interval=1")],
    "refresh_when_settled.py": [
        ("quiet_period=timedelta(minutes=2)", "quiet_period=4"),
        ("poke_interval=60", "poke_interval=2"),
    ],
    # Names the asset of the table without a watcher, which must not end the watching.
    "chained_views.py": [],
}
UDFS = """
from __future__ import annotations

import numpy as np
import pyarrow as pa

from airflow_geneva import udf


@udf(data_type=pa.list_(pa.float32(), 2))
def embed(text: pa.StringArray) -> np.ndarray:
    return np.array([[len(one), one.count("e")] for one in text.to_pylist()], np.float32).reshape(-1, 2)
"""
LONG = " and there was light upon the deep, and it went on like this for a hundred letters and for a few more letters."


def verses(*numbers: int) -> pa.Table:
    return pa.table({"id": numbers, "text": [f"{number}{LONG if number % 3 else ''}" for number in numbers]})


@dataclass
class Site:
    stack: Stack
    database: Database
    took: list[str] = field(default_factory=list)

    @property
    def uri(self) -> str:
        return f"{self.database.uri}/verses.lance"

    def equal(self) -> bool:
        """Whether the view is its query, by plain pyarrow."""
        if "long_verses" not in self.database.table_names():
            return False
        texts = lance.dataset(self.uri).to_table()["text"].to_pylist()
        expected = sorted((text, [len(text), text.count("e")]) for text in texts if len(text) > 100)
        rows = self.database.open_table("long_verses").to_arrow().to_pylist()
        return expected == sorted((row["text"], row["embedding"]) for row in rows)

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        found = self.stack.call("GET", f"/dags/{dag_id}/dagRuns?limit=100")["dag_runs"]
        assert not [run for run in found if run["state"] == "failed"], self.stack.logs()
        return list(found)

    def quiet(self, dag_id: str) -> bool:
        return all(run["state"] == "success" for run in self.runs(dag_id))

    def follows(self, dag_id: str, what: str) -> None:
        """Wait for the view to be equal to its query again, and then for the end of the run."""
        began = time.monotonic()
        wait_for(lambda: bool(self.runs(dag_id)) and self.equal(), RUN_SECONDS, f"the view after {what}")
        self.took.append(f"{what} {time.monotonic() - began:.1f} s")

    def waits(self) -> bool:
        """Whether the newest run of the sensor's DAG is in the triggerer."""
        newest = max(self.runs(DEFERRED), key=lambda run: run["run_after"], default=None)
        tasks = [] if newest is None else self.stack.tasks(DEFERRED, newest["dag_run_id"])
        return any(task["task_id"] == "wait" and task["state"] == "deferred" for task in tasks)

    def said(self) -> list[dict[str, Any]]:
        """What the watcher's events say, oldest first."""
        events = self.stack.call("GET", "/assets/events?limit=100&order_by=timestamp")["asset_events"]
        return [said for event in events if (said := new_fragments(event["extra"]))]


@pytest.fixture
def site(new_airflow_db: Path, tmp_path: Path) -> Iterator[Site]:
    files = {"embedding_udfs.py": UDFS, ".airflowignore": "embedding_udfs"}
    for name, quicker in QUICKER.items():
        files[name] = (EXAMPLES / name).read_text()
        for shown, short in quicker:
            assert shown in files[name]
            files[name] = files[name].replace(shown, short)
    connections = {
        "AIRFLOW_CONN_LANCE_DEFAULT": json.dumps({"conn_type": "lance", "host": str(tmp_path / "db")}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
    }
    database = airflow_geneva.connect(tmp_path / "db")
    with start_stack(tmp_path / "home", new_airflow_db, files, connections, (*COMPONENTS, "triggerer")) as stack:
        yield Site(stack, database)


def test_a_view_follows_its_table_by_itself(site: Site) -> None:
    site.stack.unpause(WATCHER)
    # The table comes later than those who watch it.
    lance.write_dataset(verses(*range(300)), site.uri, enable_stable_row_ids=True, max_rows_per_file=100)
    site.follows(WATCHER, "the first rows")
    wait_for(lambda: site.quiet(WATCHER), RUN_SECONDS, "the end of the run")
    [first], [run] = site.said(), site.runs(WATCHER)
    assert (first["new_rows"], first["fragment_ids"], first["since"]) == (300, [0, 1, 2], "view:long_verses")
    place = f"/dags/{WATCHER}/dagRuns/{run['dag_run_id']}/taskInstances/arrived/xcomEntries/return_value"
    assert site.stack.call("GET", place)["value"] == [first]

    lance.write_dataset(verses(*range(300, 330)), site.uri, mode="append")
    table = lance.dataset(site.uri)
    table.update({"text": "concat('7', text)"}, where="id < 20")
    table.delete("id >= 20 AND id < 40")
    site.follows(WATCHER, "an append, an update and a deletion")
    wait_for(lambda: site.quiet(WATCHER), RUN_SECONDS, "the end of the run")

    # What the view does not care about starts nothing.
    before = len(site.runs(WATCHER)), len(site.said())
    table.optimize.compact_files()
    table.update_config({"some": "thing"})
    time.sleep(5)
    assert (len(site.runs(WATCHER)), len(site.said())) == before

    site.stack.pause(WATCHER)
    site.stack.unpause(DEFERRED)
    wait_for(site.waits, START_SECONDS, "the sensor in the triggerer")
    lance.write_dataset(verses(*range(400, 430)), site.uri, mode="append")
    site.follows(DEFERRED, "an append that the sensor waited for")
    assert "Trigger exited with error" not in site.stack.logs()
    print("; ".join(site.took))
