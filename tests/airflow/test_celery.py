"""The demo's DAG on two Celery workers that share no folder, one of which is lost: `make test-all CELERY=1`."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from airflow_geneva import Database
from dags_examples.demo.stack import DemoHome, write_spark_conf
from dags_examples.demo.upkeep import BACKFILL
from dags_examples.demo.verses import COLUMN, SCHEMA, TABLE, read_books
from tests.support.object_store import SECRET, Bucket
from tests.support.run_examples import EXAMPLES
from tests.support.servers import run_postgresql, run_redis
from tests.support.stack import RUN_SECONDS, START_SECONDS, Stack, make_home, start_stack, wait_for

pytest.importorskip("airflow.providers.celery")

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow, pytest.mark.crash]

BOOKS, CHECKPOINT = 8, 40
FOLDER = "GENEVA_WORKER_FOLDER"
APPLY = "backfill.shards.apply"

# Notes each verse; at one in the middle of the last book it waits while its worker's gate is shut.
GATED = f'''
import os
import time
from pathlib import Path

import pyarrow as pa

from airflow_geneva import udf
from embedding_udfs import embed

GATE = "And there appeared a great wonder in heaven"


@udf(data_type=embed.data_type, batch_size=20, checkpoint_size={CHECKPOINT})
def gated_embed(text: pa.StringArray) -> pa.FixedSizeListArray:
    folder, verses = Path(os.environ["{FOLDER}"]), text.to_pylist()
    with (folder / "calls").open("a") as calls:
        calls.writelines(f"{{verse}}\\n" for verse in verses)
    if any(verse.startswith(GATE) for verse in verses) and (folder / "shut").exists():
        (folder / "reached").touch()
        while True:
            time.sleep(0.1)
    return embed(text)
'''

FILES = {
    "backfill_embeddings.py": (EXAMPLES / "backfill_embeddings.py").read_text(),
    "embedding_udfs/__init__.py": (EXAMPLES / "embedding_udfs" / "__init__.py").read_text(),
    "embedding_udfs/gated.py": GATED,
}

# How soon a lost worker is noticed, and its task tried again: 300 seconds each unless set.
NOTICED_AFTER = 60
SETTINGS = {
    "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
    "AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "1",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": str(NOTICED_AFTER),
    "AIRFLOW__GENEVA__INLINE_BELOW_SECONDS": "10",
}


@dataclass(frozen=True)
class Worker:
    """A Celery worker with folders of its own: its AIRFLOW_HOME, temporary files, DAGs, and what the function notes."""

    name: str
    home: Path

    def start(self, stack: Stack) -> None:
        variables = make_home(self.home, FILES)
        place = DemoHome(self.home)
        place.counts.mkdir()
        write_spark_conf(place, {FOLDER: str(place.counts)})
        variables |= {"SPARK_CONF_DIR": str(place.spark_conf), FOLDER: str(place.counts)}
        command = f"celery worker --celery-hostname {self.name}@%h --concurrency 2 --skip-serve-logs"
        stack.start(self.name, *command.split(), **variables)

    def wait(self, stack: Stack) -> None:
        wait_for(lambda: " ready." in said(stack, self.name), START_SECONDS, f"worker {self.name}")

    def note(self, name: str) -> Path:
        return DemoHome(self.home).counts / name

    @property
    def is_at_the_gate(self) -> bool:
        return self.note("reached").exists()

    def calls(self) -> Counter[str]:
        calls = self.note("calls")
        return Counter(calls.read_text().splitlines() if calls.exists() else ())

    def tries(self, task: str) -> list[str]:
        """The tries of a task that ran here, by their logs."""
        return sorted(log.stem for log in (self.home / "logs").rglob(f"task_id={task}/**/attempt=*.log"))

    def logs(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in (self.home / "logs").rglob("*.log"))


@dataclass(frozen=True)
class Platform:
    stack: Stack
    database: Database
    workers: list[Worker]


@pytest.fixture
def platform(
    java_home: str,
    bucket: Bucket,
    db: Database,
    options: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Platform]:
    home = tmp_path / "airflow"
    with run_postgresql() as database, run_redis(tmp_path) as broker:
        addresses = {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database, "AIRFLOW__CELERY__BROKER_URL": broker}
        with start_stack(home, None, FILES, {**SETTINGS, **addresses}, ()) as stack:
            stack.airflow("db", "migrate")
            for component in ("api-server", "scheduler", "dag-processor", "triggerer"):
                stack.start(component)
            monkeypatch.syspath_prepend(str(home / "dags"))
            table = db.create_table(TABLE, schema=SCHEMA)
            for book in read_books()[-BOOKS:]:
                table.add(book)
            table.add_columns({COLUMN: importlib.import_module("embedding_udfs.gated").gated_embed})
            stack.wait()
            lance = {"conn_type": "lance", "host": db.uri, "extra": json.dumps({"storage_options": options})}
            spark = {"conn_type": "spark", "host": "local[1]", "extra": json.dumps({"deploy-mode": "client"})}
            for name, connection in (("lance_default", lance), ("spark_default", spark)):
                stack.call("POST", "/connections", {"connection_id": name, **connection})
            workers = [Worker(name, tmp_path / name) for name in ("first", "second")]
            for worker in workers:
                worker.start(stack)
                worker.note("shut").touch()
            for worker in workers:
                worker.wait(stack)
            yield Platform(stack, db, workers)


def said(stack: Stack, component: str) -> str:
    return (stack.home / f"{component}.out").read_text(errors="replace")


def test_a_run_whose_worker_is_lost_ends_right_on_the_other_one(platform: Platform) -> None:
    stack, table = platform.stack, platform.database.open_table(TABLE)
    texts = Counter(table.to_arrow()["text"].to_pylist())
    run = stack.trigger(BACKFILL)
    wait_for(lambda: any(worker.is_at_the_gate for worker in platform.workers), RUN_SECONDS, "the gate")
    other, lost = sorted(platform.workers, key=lambda worker: worker.is_at_the_gate)
    assert lost.tries(APPLY) == ["attempt=1"]
    other.note("shut").unlink()
    kept = lost.calls()
    assert CHECKPOINT < kept.total() < texts.total()
    stack.lose(lost.name)
    lost_at = time.time()
    shutil.rmtree(lost.home)

    assert stack.finish(BACKFILL, run) == "success", stack.logs() + other.logs()
    seen = kept + other.calls()
    assert seen.keys() == texts.keys()
    assert not texts - seen
    again = (seen - texts).total()
    assert again <= CHECKPOINT
    stored = table.to_arrow()
    from embedding_udfs import embed  # type: ignore[import-not-found]

    assert stored[COLUMN].combine_chunks() == embed(stored["text"].combine_chunks())
    [job] = platform.database.jobs()
    assert job.state == "DONE"
    assert other.tries(APPLY) == ["attempt=2"]
    tries = {task["task_id"]: task["try_number"] for task in stack.tasks(BACKFILL, run)}
    assert tries == {"backfill.plan": 1, APPLY: 2, "backfill.shards.commit": 1, "backfill.finish": 1}
    [event] = stack.call("GET", "/assets/events")["asset_events"]
    assert (event["name"], event["extra"]["to_version"]) == ("lance_default/verses", max(job.commits))
    assert "Detected a task instance without a heartbeat" in said(stack, "scheduler")
    assert SECRET not in stack.logs() + other.logs()
    print(report(stack, run, lost_at, texts.total(), again))


def report(stack: Stack, run: str, lost_at: float, rows: int, again: int) -> str:
    """What ran, and what the loss of the worker did."""
    place = f"/dags/{BACKFILL}/dagRuns/{run}"
    whole = stack.call("GET", place)
    first, second = stack.call("GET", f"{place}/taskInstances/{APPLY}/0/tries")["task_instances"]
    failed, begun = (moment(found) - lost_at for found in (first["end_date"], second["start_date"]))
    took = moment(whole["end_date"]) - moment(whole["start_date"])
    packages = ("apache-airflow", "apache-airflow-providers-celery", "celery", "pyspark", "pylance")
    ran = [f"{name} {version(name)}" for name in packages]
    ran += [subprocess.check_output([name, "--version"], text=True).strip() for name in ("redis-server", "postgres")]
    return "\n".join(
        [
            ", ".join(ran),
            f"The scheduler failed the first try of {APPLY} {failed:.0f} s after its worker was lost.",
            f"The second try began on the other worker after {begun:.0f} s.",
            f"The run took {took:.0f} s: {rows} rows, {again} of them twice.",
        ]
    )


def moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
