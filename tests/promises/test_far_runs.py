"""Runs on a store that loses answers, refuses requests and is slow: they are killed, and looked at meanwhile."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_geneva import connect
from airflow_geneva.database import Database
from airflow_geneva.engine.storage import write_behind
from airflow_geneva.engine.storage.write_behind import WriteBehind
from airflow_geneva.errors import JobFailed
from tests.support import within
from tests.support.counting import Trace, triple
from tests.support.harness import STORE, Figures, check, random_history
from tests.support.latency import SlowProxy, Trouble
from tests.support.object_store import Bucket, numbers, options_of

pytestmark = pytest.mark.crash

HISTORIES = int(os.environ.get("GENEVA_FAR_HISTORIES", "1"))
SOAK_SECONDS = float(os.environ.get("GENEVA_SOAK_SECONDS", "1800"))
WORLDS = ("harmed", "unharmed", "")


@pytest.fixture(scope="module")
def troubled(endpoint: str) -> Iterator[SlowProxy]:
    """A store on which one request of fifty goes wrong."""
    dice = random.Random(0)

    def trouble(method: str, path: str) -> Trouble:
        return dice.choice(("unavailable", "lost", "slow")) if dice.random() < 0.02 else ""

    with SlowProxy(endpoint, 0.002, trouble=trouble).running() as proxy:
        yield proxy


def on(proxy: SlowProxy, folder: Path) -> Path:
    """Have the worlds of a history made on the store."""
    bucket = Bucket(proxy.endpoint)
    for world in WORLDS:
        (folder / world).mkdir(parents=True, exist_ok=True)
        told = {"uri": f"{bucket.uri}/{world or 'within'}", "options": options_of(proxy.url)}
        (folder / world / STORE).write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_runs_on_a_store_are_killed_as_if_nobody_had_been(tmp_path: Path, troubled: SlowProxy, seed: int) -> None:
    check(random_history(20_000 + seed), on(troubled, tmp_path / "history"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_thread_that_writes_behind_fails_the_run_and_the_next_one_goes_on(
    db: Database, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = db.create_table("docs", numbers(*range(40)), max_rows_per_file=10)
    table.add_columns({"y": triple})
    write, crashes = WriteBehind._write, list[str]()

    def crash(self: WriteBehind, name: str, content: bytes) -> None:
        if threading.current_thread().name == "geneva-write-behind" and not crashes:
            crashes.append(name)
            raise MemoryError
        write(self, name, content)

    with monkeypatch.context() as crashing:
        crashing.setattr(WriteBehind, "_write", crash)
        crashing.setattr(write_behind, "_EVERY_SECONDS", 0.0)
        with pytest.raises(JobFailed, match=r"thread that writes the documents of .* has crashed: MemoryError\(\)"):
            table.backfill("y", runner="inline", checkpoint_size=5)
    assert db.jobs(table="docs")[0].state == "FAILED"
    ran = len(trace)
    assert table.backfill("y", runner="inline", checkpoint_size=5).state == "DONE"
    assert len(trace) - ran <= 40 - ran + 10
    assert table.to_arrow()["y"].null_count == 0


def test_what_is_said_of_a_run_is_never_more_than_what_is_visible(db: Database, troubled: SlowProxy) -> None:
    table = db.create_table("docs", numbers(*range(80)), max_rows_per_file=10)
    table.add_columns({"y": triple})
    far = connect(db.uri, storage_options=options_of(troubled.url))
    running = far.open_table("docs").backfill_async("y", runner="inline", shard_size=1, checkpoint_size=5)
    said = list[int]()
    while not running.done():
        job = db.job(running.job_id)
        visible = table.lance.count_rows("y IS NOT NULL")
        assert job.rows_committed <= visible
        assert job.state != "DONE" or visible == 80
        said.append(job.rows_committed)
    assert said == sorted(said)
    assert len(set(said)) > 2
    assert running.result().rows_computed == 80
    assert db.job(running.job_id).rows_committed == 80


@pytest.mark.soak
def test_kills_on_a_store(tmp_path: Path, troubled: SlowProxy, capsys: pytest.CaptureFixture[str]) -> None:
    until, seed, figures, more = time.monotonic() + SOAK_SECONDS, 30_000, Figures(), 0
    while time.monotonic() < until:
        figures += check(random_history(seed), on(troubled, tmp_path / f"{seed}"))
        more += within.check(seed, on(troubled, tmp_path / f"within-{seed}"), within.Inline())
        seed += 1
    with capsys.disabled():
        print(f"\n{figures}; {more:,} kills in runs within which the table changed")
