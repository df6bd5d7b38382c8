"""Batch APIs: rows are submitted once, whatever dies, and their values are there when the service has answered."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import BatchFailed, Table, connect, report, udf
from airflow_geneva.engine.checkpoint import submissions
from airflow_geneva.engine.job.meter import JobMeter
from airflow_geneva.engine.run import caps, waiting
from airflow_geneva.engine.udf import UDF, Retry, Skip
from airflow_geneva.errors import InvalidInput, JobFailed
from tests.support.openai_server import OpenAIServer, embedding_of

ROOT = Path(__file__).parents[2]
SNIPPET = ROOT / "docs" / "snippets" / "batch_api.py"


@dataclass
class Service:
    """Answers batches when they were asked for twice, as its `broken` inputs say.

    Args:
        batches: the numbers of each submitted batch, by handle.
        keys: the handle by key.
        broken: what is answered to a number instead of ten times the number.
        refuses: raised by `poll` until it is None.
        given: what `fetch` returns of the values of a batch.
        ready: what `poll` returns when it was asked so often.
    """

    batches: dict[str, list[int]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    broken: dict[int, Any] = field(default_factory=dict)
    refuses: BaseException | None = None
    handle: Any = None
    given: Callable[[list[Any]], Any] = list
    ready: Callable[[int], Any] = (1).__lt__

    @property
    def paid(self) -> list[int]:
        return sorted(x for numbers in self.batches.values() for x in numbers)


SERVICE = Service()


@pytest.fixture(autouse=True)
def service() -> Service:
    SERVICE.__init__()  # type: ignore[misc]
    return SERVICE


class TenTimes:
    def submit(self, batch: pa.RecordBatch, key: str) -> Any:
        handle = f"batch-{len(SERVICE.batches)}"
        SERVICE.batches[handle], SERVICE.keys[key] = batch["x"].to_pylist(), handle
        return SERVICE.handle or handle

    def poll(self, handle: str) -> bool:
        if SERVICE.refuses is not None:
            raise SERVICE.refuses
        SERVICE.asked[handle] = SERVICE.asked.get(handle, 0) + 1
        return SERVICE.ready(SERVICE.asked[handle])

    def fetch(self, handle: str) -> Any:
        report(cost=0.25)
        return SERVICE.given([SERVICE.broken.get(x, 10 * x) for x in SERVICE.batches[handle]])

    def find(self, key: str) -> str | None:
        return SERVICE.keys.get(key)


def ten_times(cls: type = TenTimes, **settings: Any) -> UDF:
    given = {"data_type": pa.int64(), "input_columns": ["x"], "batch_size": 40, "version": "1"}
    given |= {"poll_interval": 0.01, "visible_after": 0.05}
    return udf(**{**given, **settings})(cls)


def numbers(folder: Path, function: UDF | None = None, rows: int = 100, fragments: int = 2) -> Table:
    table = connect(folder).create_table(
        "t", pa.table({"x": range(rows)}), max_rows_per_file=-(-rows // fragments)
    )  # fmt: skip
    table.add_columns({"y": function or ten_times()})
    return table


def values(table: Table) -> dict[int, Any]:
    found = table.to_arrow(columns=["x", "y"])
    return dict(zip(found["x"].to_pylist(), found["y"].to_pylist(), strict=True))


def left_behind(table: Table) -> list[str]:
    folder = Path(table.uri, "_checkpoints", "batches")
    return [str(path) for path in folder.rglob("*") if path.is_file()]


def test_every_row_is_submitted_once_in_batches_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=lambda seconds: shown.append(str(JobMeter.current()))))
    table = numbers(tmp_path)
    result = table.backfill("y", runner="inline")
    assert len(shown) == 2
    assert all(re.fullmatch(r"waiting for a service, \d s, 0 of 100 rows", text) for text in shown)
    assert (result.state, result.rows_computed) == ("DONE", 100)
    assert (result.usage.cost, result.rows_run) == (4 * 0.25, 100)
    assert values(table) == {x: 10 * x for x in range(100)}
    assert sorted(map(len, SERVICE.batches.values())) == [10, 10, 40, 40]
    assert left_behind(table) == []
    table.add(pa.table({"x": [7, 8]}))
    assert table.backfill("y").rows_computed == 2
    assert SERVICE.paid == sorted([*range(100), 7, 8])


def test_all_batches_are_submitted_before_the_first_is_waited_for(tmp_path: Path) -> None:
    table = numbers(tmp_path)
    SERVICE.refuses = ConnectionError("down")
    with pytest.raises(JobFailed, match=r"ConnectionError in poll: down. The batch is kept: run again"):
        table.backfill("y", runner="inline")
    assert SERVICE.paid == list(range(100))
    SERVICE.refuses = None
    assert table.backfill("y", runner="inline").rows_computed == 100
    assert SERVICE.paid == list(range(100))
    assert left_behind(table) == []


class FirstIsLast(TenTimes):
    def poll(self, handle: str) -> bool:
        first = handle == "batch-0"
        time.sleep(0.2 * first)
        return super().poll(handle) and not (first and SERVICE.asked[handle] == 2)


def test_threads_wait_for_the_batches_that_are_not_answered(tmp_path: Path) -> None:
    """Fragments end in another order than they begin."""
    table = numbers(tmp_path, ten_times(FirstIsLast), rows=80, fragments=8)
    result = table.backfill("y", runner="inline", intra_applier_concurrency=4)
    assert (result.state, result.rows_computed, len(SERVICE.batches)) == ("DONE", 80, 8)
    assert values(table) == {x: 10 * x for x in range(80)}


@pytest.mark.parametrize("cap", [{"max_seconds": 100.0}, {"max_cost": 101.0, "price_per_slot_hour": 3600.0}])
def test_waiting_for_the_service_does_not_count_for_a_cap(
    tmp_path: Path, cap: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr(caps, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(waited)))
    table = numbers(tmp_path, ten_times(poll_interval=1000.0), rows=80, fragments=2)
    assert table.backfill("y", runner="inline", **cap).state == "DONE"
    assert waited


def test_rows_of_many_batches_are_not_all_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "_MOST_OPEN_ROWS", 30)
    table = numbers(tmp_path, rows=300)
    SERVICE.ready = (3).__lt__
    assert table.backfill("y", runner="inline", concurrency=2, intra_applier_concurrency=2).rows_computed == 300
    assert values(table) == {x: 10 * x for x in range(300)}
    assert SERVICE.paid == list(range(300))
    assert left_behind(table) == []


def test_a_batch_that_several_jobs_collect_is_forgotten_when_all_rows_are_taken(tmp_path: Path) -> None:
    table = numbers(tmp_path, rows=40, fragments=1)
    SERVICE.refuses = ConnectionError("down")
    with pytest.raises(JobFailed):
        table.backfill("y", runner="inline")
    SERVICE.refuses = None
    assert table.backfill("y", where="x < 30", runner="inline").rows_computed == 30
    assert left_behind(table)
    assert table.backfill("y", runner="inline").rows_computed == 10
    assert SERVICE.paid == list(range(40))
    assert left_behind(table) == []


def test_a_damaged_note_of_a_submitted_batch_is_an_error(tmp_path: Path) -> None:
    table = numbers(tmp_path, rows=40, fragments=1)
    SERVICE.refuses = ConnectionError("down")
    with pytest.raises(JobFailed):
        table.backfill("y", runner="inline")
    SERVICE.refuses = None
    [rows] = [name for name in left_behind(table) if name.endswith(".lance")]
    Path(rows).write_bytes(b"damaged")
    with pytest.raises(JobFailed, match=rf"{re.escape(rows)} is damaged: .* remove it, and the rows are submitted"):
        table.backfill("y", runner="inline")
    assert SERVICE.paid == list(range(40))


def test_rows_that_moved_while_they_waited_are_not_submitted_again(tmp_path: Path) -> None:
    table = numbers(tmp_path)
    SERVICE.refuses = ConnectionError("down")
    with pytest.raises(JobFailed):
        table.backfill("y", runner="inline")
    table.lance.delete("x % 10 = 3")
    table.lance.update({"x": "x + 1000"}, where="x = 5")
    table.lance.optimize.compact_files()
    SERVICE.refuses = None
    assert table.backfill("y", runner="inline").rows_left == 0
    expected = {x: 10 * x for x in [*range(100), 1005] if x % 10 != 3 and x != 5}
    assert values(table) == expected
    assert SERVICE.paid == [*range(100), 1005]


def test_a_failed_row_fails_the_job_and_only_it_is_submitted_again(tmp_path: Path) -> None:
    table = numbers(tmp_path)
    SERVICE.broken = {7: ValueError("no seven"), 9: ValueError("no nine")}
    with pytest.raises(JobFailed, match=r"ValueError on row 7 .*no seven"):
        table.backfill("y", runner="inline")
    SERVICE.broken = {}
    assert table.backfill("y", runner="inline").state == "DONE"
    assert values(table) == {x: 10 * x for x in range(100)}
    assert SERVICE.paid == sorted([*range(100), 7, 9])


def test_a_skipped_row_is_listed_and_submitted_again_by_the_next_run(tmp_path: Path) -> None:
    table = numbers(tmp_path, ten_times(on_error=[Skip(ValueError)]))
    SERVICE.broken = {7: ValueError("no seven")}
    result = table.backfill("y", runner="inline")
    assert (result.state, result.rows_failed, values(table)[7]) == ("DONE", 1, None)
    assert [error.message for error in table.get_errors()] == ["no seven"]
    SERVICE.broken = {}
    assert table.backfill("y", runner="inline").rows_computed == 1
    assert values(table)[7] == 70
    assert SERVICE.paid == sorted([*range(100), 7])


def test_a_retry_submits_a_failed_row_again_in_the_same_job(tmp_path: Path) -> None:
    class Later(TenTimes):
        def fetch(self, handle: str) -> Any:
            found = super().fetch(handle)
            return [ValueError("busy") if x == 7 and len(found) > 1 else 10 * x for x in SERVICE.batches[handle]]

    table = numbers(tmp_path, ten_times(Later, on_error=[Retry(ValueError, attempts=2, backoff=0), Skip(ValueError)]))
    assert table.backfill("y", runner="inline").rows_failed == 0
    assert SERVICE.paid == sorted([*range(100), 7])


def test_a_batch_that_the_service_gives_up_fails_its_rows(tmp_path: Path) -> None:
    class Lost(TenTimes):
        def poll(self, handle: str) -> bool:
            if handle == "batch-0":
                raise BatchFailed("it is gone")
            return True

    table = numbers(tmp_path, ten_times(Lost, on_error="skip"))
    result = table.backfill("y", runner="inline")
    assert (result.rows_failed, values(table)[0], values(table)[99]) == (40, None, 990)
    assert table.backfill("y", runner="inline").rows_failed == 0
    assert values(table) == {x: 10 * x for x in range(100)}


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"handle": {1, 2}}, "submit returned .*, which is no handle"),
        ({"broken": {3: "three"}}, "fetch returned values that are no int64"),
        ({"given": lambda found: dict(enumerate(found))}, r"fetch returned \{0: 0, .* for a batch of 40 rows"),
        ({"ready": lambda asked: "in_progress"}, "poll returned 'in_progress'. Return True"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, broken: dict[str, Any], text: str) -> None:
    vars(SERVICE).update(broken)
    with pytest.raises(JobFailed, match=text):
        numbers(tmp_path).backfill("y", runner="inline")


def test_values_for_other_rows_than_were_submitted_are_refused(tmp_path: Path) -> None:
    class Short(TenTimes):
        def fetch(self, handle: str) -> Any:
            return pa.array([1, 2])

    with pytest.raises(JobFailed, match="fetch returned 2 values for a batch of 40 rows"):
        numbers(tmp_path, ten_times(Short)).backfill("y", runner="inline")


def test_a_view_asks_the_service_before_it_calls_other_functions(tmp_path: Path) -> None:
    called: list[int] = []

    def own(x: int) -> int:
        called.append(x)
        return -x

    table = connect(tmp_path).create_table("t", pa.table({"x": range(100)}))
    query = table.query().where("x % 2 = 0").select(["x"])
    query = query.add_columns({"z": udf(version="1")(own), "y": ten_times()})
    fed = query.add_columns({"w": (ten_times(input_columns=["z"]), ["z"])})
    with pytest.raises(InvalidInput, match=r"is a batch API, and takes \['z'\]"):
        fed.create_materialized_view(connect(tmp_path), "w")
    view = query.create_materialized_view(connect(tmp_path), "v")
    assert view.refresh(runner="inline").rows_computed == 50
    rows = view.to_arrow().sort_by("x").to_pylist()
    assert [(row["y"], row["z"]) for row in rows] == [(10 * x, -x) for x in range(0, 100, 2)]
    assert sorted(called) == SERVICE.paid == list(range(0, 100, 2))
    assert sorted(map(len, SERVICE.batches.values())) == [10, 40]


def test_batch_apis_of_a_view_wait_for_each_other_and_are_paid_once(tmp_path: Path) -> None:
    class Slower(TenTimes):
        def poll(self, handle: str) -> bool:
            return super().poll(handle) and SERVICE.asked[handle] > 4

    table = connect(tmp_path).create_table("t", pa.table({"x": range(100)}))
    query = table.query().select(["x"]).add_columns({"y": ten_times(), "z": ten_times(Slower)})
    view = query.create_materialized_view(connect(tmp_path), "v")
    assert view.refresh(runner="inline").rows_computed == 100
    rows = view.to_arrow().sort_by("x").to_pylist()
    assert [(row["y"], row["z"]) for row in rows] == [(10 * x, 10 * x) for x in range(100)]
    assert SERVICE.paid == sorted([*range(100)] * 2)


def test_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"is a batch API, .*cannot be tried on a sample"):
        numbers(tmp_path).plan_backfill("y").estimate(sample=5)


def test_a_class_that_does_not_fit_is_refused() -> None:
    class NoBatch(TenTimes):
        def submit(self, x: int) -> str:  # type: ignore[override]
            return ""

    class Plain(TenTimes):
        def submit(self, batch):  # type: ignore[no-untyped-def, override]
            return ""

    assert not ten_times(Plain).signature.takes_key

    class Waits(TenTimes):
        async def poll(self, handle: str) -> bool:  # type: ignore[override]
            return True

    for cls, method in ((NoBatch, "submit"), (Waits, "poll")):
        with pytest.raises(InvalidInput, match=f"its methods \\['{method}'\\] do not fit"):
            ten_times(cls)
    with pytest.raises(InvalidInput, match="cannot have timeout=3, dedup=True"):
        ten_times(timeout=3, dedup=True, deterministic=True)
    with pytest.raises(InvalidInput, match="is no batch API"):
        udf(data_type=pa.int64(), poll_interval=3)(lambda x: x)
    with pytest.raises(InvalidInput, match=r"visible_after=3, and is no batch API, .* Leave visible_after out"):
        udf(data_type=pa.int64(), visible_after=3)(lambda x: x)
    with pytest.raises(InvalidInput, match=r"give at most 43,200 seconds"):
        ten_times(poll_interval=50_000)
    with pytest.raises(InvalidInput, match="which a job calls"):
        ten_times()(pa.record_batch({"x": [1]}))


@pytest.fixture(scope="module")
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(batch_seconds=0.1) as running:
        yield running


def run_snippet(folder: Path, server: OpenAIServer, fault: str = "") -> int:
    environment = {**os.environ, "OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": "any", "PYTHONPATH": str(ROOT)}
    command = f"import runpy; runpy.run_path({str(SNIPPET)!r})"
    if fault:
        return subprocess.run(
            [sys.executable, "-c", command], cwd=folder, env={**environment, "AIRFLOW_GENEVA_FAULT": fault}, check=False
        ).returncode  # fmt: skip
    return 0


@pytest.mark.crash
@pytest.mark.parametrize("fault", ["batch.submitted", "apply.step:2"])
def test_a_kill_never_submits_twice(
    tmp_path: Path, server: OpenAIServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reset()
    assert run_snippet(tmp_path, server, fault) == -signal.SIGKILL
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    source = SNIPPET.read_text().replace("db.create_table(", "db.open_table('docs') if db.table_names() else (")
    source = source.replace('table.add_columns({"vector": EmbedLater})', "")
    source = source.replace('backfill("vector")', 'backfill("vector", udf=EmbedLater)')
    Path("again.py").write_text(source)
    found = runpy.run_path("again.py")
    counts = server.counts()
    assert (counts.batches, counts.rows) == (3, 60), "rows were paid again"
    rows = found["table"].to_arrow().to_pylist()
    assert all(row["vector"] == pytest.approx(embedding_of(row["text"])) for row in rows)
    assert left_behind(found["table"]) == []


def test_without_find_a_batch_that_may_be_there_is_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "_SUBMITTING_SECONDS", 0.0)

    class Blind:
        submit, poll, fetch = TenTimes.submit, TenTimes.poll, TenTimes.fetch

    class Killed(Blind):
        def submit(self, batch: pa.RecordBatch, key: str) -> Any:
            super().submit(batch, key)
            raise KeyboardInterrupt

    table = numbers(tmp_path, ten_times(Killed, name="blind"))
    with pytest.raises(KeyboardInterrupt):
        table.backfill("y", runner="inline")
    with pytest.raises(JobFailed, match="a process was killed while it submitted 40 rows") as failed:
        table.backfill("y", udf=ten_times(Blind, name="blind"), runner="inline")
    assert len(SERVICE.batches) == 1
    [named] = [name for name in left_behind(table) if name in str(failed.value)]
    Path(named).unlink()
    assert table.backfill("y", udf=ten_times(Blind, name="blind"), runner="inline").state == "DONE"
    assert values(table) == {x: 10 * x for x in range(100)}


def test_a_batch_that_the_service_lists_late_is_not_submitted_again(tmp_path: Path) -> None:
    """The process is killed while its request is at the service."""
    asked = list[str]()

    class Late(TenTimes):
        def find(self, key: str) -> str | None:
            asked.append(key)
            return super().find(key) if len(asked) > 3 else None

    class Killed(TenTimes):
        def submit(self, batch: pa.RecordBatch, key: str) -> Any:
            super().submit(batch, key)
            raise KeyboardInterrupt

    table = numbers(tmp_path, ten_times(Killed, name="late"), rows=40, fragments=1)
    with pytest.raises(KeyboardInterrupt):
        table.backfill("y", runner="inline")
    result = table.backfill("y", udf=ten_times(Late, name="late", visible_after=60.0), runner="inline")
    assert (result.state, len(asked), SERVICE.paid) == ("DONE", 4, list(range(40)))
    assert values(table) == {x: 10 * x for x in range(40)}
    assert left_behind(table) == []


def test_a_batch_that_the_service_never_got_is_submitted_again_with_its_key(tmp_path: Path) -> None:
    given = list[tuple[str, list[int]]]()

    class Keyed(TenTimes):
        def submit(self, batch: pa.RecordBatch, key: str) -> Any:
            given.append((key, batch["x"].to_pylist()))
            if len(given) == 1:
                raise KeyboardInterrupt
            return super().submit(batch, key)

    table = numbers(tmp_path, ten_times(Keyed), rows=40, fragments=1)
    with pytest.raises(KeyboardInterrupt):
        table.backfill("y", runner="inline")
    began = time.monotonic()
    assert table.backfill("y", udf=ten_times(Keyed, visible_after=0.2), runner="inline").state == "DONE"
    assert time.monotonic() - began >= 0.2
    assert (len(given), given[0]) == (2, given[1])
    assert re.fullmatch(r"[A-Za-z0-9-]{16,255}", given[0][0])
    assert SERVICE.paid == list(range(40))
    assert left_behind(table) == []


def test_a_submit_that_failed_is_made_again_when_the_service_would_list_the_first(tmp_path: Path) -> None:
    asked, tried = list[str](), list[str]()

    class Broken(TenTimes):
        def submit(self, batch: pa.RecordBatch, key: str) -> Any:
            tried.append(key)
            handle = super().submit(batch, key)
            if len(tried) == 1:
                raise ConnectionError("the answer was lost")
            return handle

        def find(self, key: str) -> str | None:
            asked.append(key)
            return super().find(key) if len(asked) > 2 else None

    policy = [Retry(ConnectionError, attempts=3, backoff=0.0)]
    table = numbers(tmp_path, ten_times(Broken, on_error=policy, visible_after=60.0), rows=40, fragments=1)
    assert table.backfill("y", runner="inline").state == "DONE"
    assert (len(tried), len(asked), SERVICE.paid) == (1, 3, list(range(40)))


def test_rows_that_are_submitted_again_count_for_the_cap(tmp_path: Path) -> None:
    class Unreported(TenTimes):
        def fetch(self, handle: str) -> Any:
            return [SERVICE.broken.get(x, 10 * x) for x in SERVICE.batches[handle]]

    function = ten_times(Unreported, on_error=[Retry(ConnectionError, attempts=5, backoff=0.0)], cost=1.0)
    table = numbers(tmp_path, function, rows=20, fragments=1)
    SERVICE.broken = dict.fromkeys(range(4), ConnectionError("busy"))
    result = table.backfill("y", udf=function, runner="inline", max_cost=4.0)
    assert (result.state, len(SERVICE.paid), result.rows_run) == ("PARTIAL", 4, 4)
    SERVICE.broken = {}
    done = table.backfill("y", udf=function, runner="inline", max_cost=20.0)
    assert (done.state, done.rows_computed) == ("DONE", 20)
