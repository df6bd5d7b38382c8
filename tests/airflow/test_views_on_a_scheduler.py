"""A view and a view on it, kept up by a running Airflow while others change the source: nobody starts a run by hand."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import airflow_geneva
from airflow_geneva import Database
from airflow_geneva.assets import new_fragments
from tests.support.stack import COMPONENTS, POLL_SECONDS, RUN_SECONDS, Stack, start_stack

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
HOURLY, ON_NEW_DATA, ON_ARRIVAL, WHEN_SETTLED, ON_THE_VIEW = DAGS = (
    "hourly_refresh", "refresh_on_new_data", "refresh_on_arrival", "refresh_when_settled", "refresh_verses_of_light",
)  # fmt: skip
QUICKER = {
    # The examples as they are shown, but for the clock: an hour is ten seconds, and minutes are seconds.
    "hourly_refresh.py": {'schedule="@hourly"': 'schedule="* * * * * */10"'},
    "refresh_on_new_data.py": {"poke_interval=300": "poke_interval=3"},
    "refresh_on_arrival.py": {"poll_interval=60": "poll_interval=1"},
    "refresh_when_settled.py": {
        "quiet_period=timedelta(minutes=2)": "quiet_period=4",
        "poke_interval=60": "poke_interval=2",
    },
    # Names the asset of the source without a watcher, which must not end the watching.
    "chained_views.py": {},
}

# In the place of the model, under its name: it notes what it is asked for, and a judge can do without it.
UDFS = """
from __future__ import annotations

import numpy as np
import pyarrow as pa

from airflow_geneva import udf


@udf(data_type=pa.list_(pa.float32(), 2))
def embed(text: pa.StringArray) -> np.ndarray:
    with open({calls!r}, "ab", buffering=0) as calls:
        calls.write("".join(f"{{one}}\\n" for one in text.to_pylist()).encode())
    return np.array([[len(one), one.count("e")] for one in text.to_pylist()], np.float32).reshape(-1, 2)
"""

LIGHT = " and there was light upon the deep, and it went on like this for a hundred letters and for a few letters more."
DARK = (
    " and nothing at all was upon the deep, and it went on like this for a hundred letters and for a few of them more."
)
SHORT = " and a little light."
# Two thirds of them are long: too many for the task itself, so that the first refresh runs on Spark.
FIRST_ROWS = 1_600


@dataclass
class Site:
    stack: Stack
    database: Database
    calls: Path
    known: dict[int, str] = field(default_factory=dict)
    collected: set[str] = field(default_factory=set)

    @property
    def uri(self) -> str:
        """The source, for those who have nothing but pylance."""
        return f"{self.database.uri}/verses.lance"

    def versions(self) -> list[int]:
        return [self.database.open_table(view).version for view in ("long_verses", "verses_of_light")]

    def shown(self, view: str) -> list[Any]:
        if view not in self.database.table_names():
            return []
        rows = self.database.open_table(view).to_arrow()
        return sorted(
            (text, *two) for text, two in zip(*(rows[n].to_pylist() for n in ("text", "embedding")), strict=True)
        )

    def are_equal(self) -> bool:
        first, second = expected(lance.dataset(self.uri).to_table())
        return self.shown("long_verses") == first and self.shown("verses_of_light") == second

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        return list(self.stack.call("GET", f"/dags/{dag_id}/dagRuns?limit=100&order_by=id")["dag_runs"])

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + RUN_SECONDS
        while not ready():
            in_vain = self.stack.call("GET", "/dags/~/dagRuns?state=failed")["dag_runs"] or time.monotonic() > until
            assert not in_vain, f"{what} did not come\n{self.stack.logs()}"
            time.sleep(POLL_SECONDS)

    def wait_for_sensor(self, dag_id: str, state: str) -> None:
        """Wait until the sensor of the newest run is off its slot."""

        def is_off() -> bool:
            runs = self.runs(dag_id)
            tasks = self.stack.tasks(dag_id, runs[-1]["dag_run_id"]) if runs else []
            return any((task["task_id"], task["state"]) == ("wait", state) for task in tasks)

        self.wait(is_off, f"{state} of the sensor")

    def wait_for_end(self, dag_id: str) -> None:
        self.wait(lambda: all(run["state"] == "success" for run in self.runs(dag_id)), f"the end of {dag_id}")

    def _events(self) -> list[dict[str, Any]]:
        return list(self.stack.call("GET", "/assets/events?limit=100&order_by=timestamp")["asset_events"])

    def events(self, view: str) -> list[dict[str, Any]]:
        return [event["extra"] for event in self._events() if event["name"] == f"lance_default/{view}"]

    def arrivals(self) -> list[dict[str, Any]]:
        """What the watcher's events say, oldest first."""
        return [found for event in self._events() if (found := new_fragments(event["extra"]))]

    def finished(self, dag_id: str) -> list[dict[str, Any]]:
        """What the refreshes returned that ended since this was asked last."""
        results = []
        for run in self.runs(dag_id):
            task = f"/dags/{dag_id}/dagRuns/{run['dag_run_id']}/taskInstances/refresh.finish"
            if task not in self.collected and self.stack.call("GET", task)["state"] == "success":
                self.collected.add(task)
                results.append(self.stack.call("GET", f"{task}/xcomEntries/return_value")["value"])
        return results

    def asked_for(self) -> Counter[str]:
        """The texts that the UDF was asked for since this was asked last."""
        found = Counter(self.calls.read_text().splitlines() if self.calls.exists() else ())
        self.calls.unlink(missing_ok=True)
        return found


@pytest.fixture
def site(java_home: str, new_airflow_db: Path, tmp_path: Path) -> Iterator[Site]:
    calls = tmp_path / "calls"
    files = {"embedding_udfs.py": UDFS.format(calls=str(calls)), ".airflowignore": "embedding_udfs"}
    for name, quicker in QUICKER.items():
        files[name] = (EXAMPLES / name).read_text()
        for shown, short in quicker.items():
            assert shown in files[name]
            files[name] = files[name].replace(shown, short)
    settings = {
        "AIRFLOW_CONN_LANCE_DEFAULT": json.dumps({"conn_type": "lance", "host": str(tmp_path / "db")}),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        # Small views are made without Spark; later runs know what a row takes.
        "AIRFLOW__GENEVA__INLINE_BELOW_ROWS": "1000",
    }
    database = airflow_geneva.connect(tmp_path / "db")
    with start_stack(tmp_path / "home", new_airflow_db, files, settings, (*COMPONENTS, "triggerer")) as stack:
        for dag_id in DAGS:
            stack.wait_for_dag(dag_id)
        yield Site(stack, database, calls)


def verses(numbers: Iterable[int], kinds: tuple[str, ...] = (LIGHT, DARK, SHORT)) -> pa.Table:
    return pa.Table.from_pylist([{"id": n, "text": f"{n}{kinds[n % len(kinds)]}"} for n in numbers])


def expected(source: pa.Table) -> tuple[list[Any], list[Any]]:
    """The rows of both views by plain pyarrow."""
    texts = source["text"].filter(pc.greater(pc.utf8_length(source["text"]), 100))
    columns = (texts, pc.utf8_length(texts), pc.count_substring(texts, "e"))
    rows = sorted(zip(*(column.to_pylist() for column in columns), strict=True))
    return rows, [row for row in rows if "light" in row[0]]


def follow(site: Site, dag_id: str, change: Callable[[str], None]) -> None:
    """Change the source and wait for what Airflow makes of it: equal views, and not a row run that was not due."""
    before = site.known
    change(site.uri)
    source = lance.dataset(site.uri).to_table()
    site.known = dict(zip(source["id"].to_pylist(), source["text"].to_pylist(), strict=True))
    site.wait(site.are_equal, "the equality of both views")
    site.wait_for_end(ON_THE_VIEW)

    due = Counter(text for key, text in site.known.items() if len(text) > 100 and before.get(key) != text)
    assert site.asked_for() == due
    first, second = (site.finished(name) for name in (dag_id, ON_THE_VIEW))
    assert sum(result["rows_computed"] for result in first) == due.total()
    assert sum(result["rows_computed"] for result in second) == sum("light" in text for text in due)
    assert {result["state"] for result in first + second} == {"DONE"}


def create(uri: str) -> None:
    lance.write_dataset(verses(range(FIRST_ROWS)), uri, enable_stable_row_ids=True, max_rows_per_file=400)


def append(uri: str, numbers: Iterable[int]) -> None:
    lance.write_dataset(verses(numbers), uri, mode="append")


def append_update_and_delete(uri: str) -> None:
    append(uri, range(3_000, 3_030))
    source = lance.dataset(uri)
    light, dark, gone = (f"id >= {start} AND id < {start + 30}" for start in (300, 330, 360))
    source.update({"text": f"replace(text, '{DARK}', '{LIGHT}')"}, where=light)
    source.update({"text": f"concat(id, '{DARK}')"}, where=dark)
    source.delete(gone)


def compact_and_upsert(uri: str) -> None:
    source = lance.dataset(uri)
    assert source.optimize.compact_files().fragments_removed > 1
    # Verses as they are already, other words for verses that are there, and new ones.
    as_they_are, others = verses(range(90, 120)), verses([*range(120, 150), *range(4_000, 4_030)], (DARK, LIGHT))
    upsert = source.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    upsert.execute(pa.concat_tables([as_they_are, others]))
    append(uri, range(5_000, 5_030))


@pytest.mark.shows(
    "Run", "let something write to the source all the time, under an hourly DAG, a sensor and a view on the view"
)
@pytest.mark.shows(
    "Run",
    "write to a table that a [triggerer watches](arrival.md#let-the-triggerer-watch) for a view, and do nothing else",
)
def test_a_chain_of_views_follows_its_source_by_a_watcher_by_the_hour_and_by_sensors(site: Site) -> None:
    for dag_id in (ON_THE_VIEW, ON_ARRIVAL):
        site.stack.unpause(dag_id)
    site.stack.read_again(ON_ARRIVAL)
    # The source comes later than those who watch it.
    follow(site, ON_ARRIVAL, create)
    site.wait_for_end(ON_ARRIVAL)
    [first], [run] = site.arrivals(), site.runs(ON_ARRIVAL)
    assert (first["new_rows"], first["fragment_ids"], first["since"]) == (1_600, [0, 1, 2, 3], "view:long_verses")
    place = f"/dags/{ON_ARRIVAL}/dagRuns/{run['dag_run_id']}/taskInstances/arrived/xcomEntries/return_value"
    assert site.stack.call("GET", place)["value"] == [first]
    follow(site, ON_ARRIVAL, append_update_and_delete)
    site.wait_for_end(ON_ARRIVAL)
    # What the view does not care about starts nothing.
    before = len(site.runs(ON_ARRIVAL)), len(site.arrivals())
    source = lance.dataset(site.uri)
    assert source.optimize.compact_files().fragments_removed > 1
    source.update_config({"some": "thing"})
    time.sleep(5)
    assert (len(site.runs(ON_ARRIVAL)), len(site.arrivals())) == before
    site.stack.pause(ON_ARRIVAL)

    shown = site.versions(), site.events("long_verses"), site.events("verses_of_light")
    site.stack.unpause(HOURLY)
    nothing_new: list[dict[str, Any]] = []
    site.wait(lambda: bool(nothing_new.extend(site.finished(HOURLY)) or nothing_new), "an hour without changes")
    assert all(result["event"] is None for result in nothing_new)
    assert (site.versions(), site.events("long_verses"), site.events("verses_of_light")) == shown
    follow(site, HOURLY, lambda uri: append(uri, range(2_000, 2_030)))
    site.stack.pause(HOURLY)

    site.stack.unpause(ON_NEW_DATA)
    site.wait_for_sensor(ON_NEW_DATA, "up_for_reschedule")
    follow(site, ON_NEW_DATA, compact_and_upsert)
    site.stack.pause(ON_NEW_DATA)

    site.stack.unpause(WHEN_SETTLED)
    site.wait_for_sensor(WHEN_SETTLED, "deferred")
    follow(site, WHEN_SETTLED, lambda uri: append(uri, range(6_000, 6_030)))
    assert "Trigger exited with error" not in site.stack.logs()

    kinds = {dag_id: {run["run_type"] for run in site.runs(dag_id)} for dag_id in DAGS}
    on_assets = {ON_ARRIVAL, ON_THE_VIEW}
    assert kinds == {dag_id: {"asset_triggered" if dag_id in on_assets else "scheduled"} for dag_id in DAGS}
    for view in ("long_verses", "verses_of_light"):
        told = site.events(view)
        assert [event["from_version"] for event in told[1:]] == [event["to_version"] for event in told[:-1]]
