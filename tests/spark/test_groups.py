"""Groups computed on a SparkSession."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import airflow_geneva
from airflow_geneva.engine.run import groups as groups_run
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.spark import shuffle, tasks
from airflow_geneva.spark.signs import DriverSigns
from tests.spark import spark_udfs
from tests.spark.spark_udfs import seen

pytestmark = pytest.mark.spark


@pytest.fixture
def shuffles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a shuffle bring the rows of all groups together, however few they are; return the groups of each."""
    monkeypatch.setattr(groups_run, "_ROWS_WORTH_A_SHUFFLE", 0)
    seen, collect = list[int](), tasks._collect_shuffled

    def counting(session: Any, runner: Any, groups: int) -> Any:
        seen.append(groups)
        return collect(session, runner, groups)

    monkeypatch.setattr(tasks, "_collect_shuffled", counting)
    return seen


def test_a_shuffle_brings_the_rows_of_groups_together_also_to_a_task_that_dies(
    spark: object, tmp_path: Path, shuffles: list[int]
) -> None:
    log, rows = str(tmp_path / "log"), 4_200
    data = pa.table(
        {
            "g": [0 if x % 2 else x % 700 for x in range(rows)],
            "x": [x * 7919 % 1_009 for x in range(rows)],
            "word": pa.array([f"w{x % 5}" for x in range(rows)]).dictionary_encode(),
            "time": pa.array(range(rows), pa.timestamp("ns", "Europe/Berlin")),
            "wide": pa.array(range(rows), pa.uint64()),
            "log": [log] * rows,
        }
    )
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=900)
    table.lance.delete("x < 5")
    columns = {
        "n": "count(*)", "word": "last(word)", "time": "first(time)", "wide": "max(wide)",
        "total": (spark_udfs.total_that_dies_once, ["g", "x", "log"]), "batches": (spark_udfs.total_of_batches, ["x"]),
    }  # fmt: skip
    query = table.query().where("x <> 500").group_by("g").agg(columns, order_by=["x desc"])
    view = query.create_materialized_view(name="v")
    assert "On Spark, a shuffle brings the rows of 350 groups together." in str(view.plan_refresh())
    result = view.refresh(runner="spark", task_size=60, task_memory_bytes=16_384)
    assert (result.state, result.rows_computed) == ("DONE", 350)
    assert len(shuffles) == 1
    assert max(Counter(seen(log)).values()) <= 2
    assert view.to_arrow().sort_by("g").to_pylist() == query.to_arrow().sort_by("g").to_pylist()
    Path(log).unlink()
    table.lance.update({"x": "x + 1"}, where="g = 6")
    assert view.refresh(runner="spark").rows_computed == 1
    assert (len(shuffles), seen(log)) == (1, [6])


def test_a_task_that_sends_rows_stops_between_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo:
        def send(self, pieces: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, bytes]]:
            return ((0, str(piece[0]).encode()) for piece in pieces)

    progress, numbers = Storage(str(tmp_path)), [pa.record_batch({"id": [0, 1, 2]})]
    monkeypatch.setattr(shuffle.SendTask, "_sender", lambda self: (Echo(), [(0, 0)]))
    sends = shuffle.SendTask(("stops",), object, list, progress, (5,), ((7, 0, 1), (8, 0, 1), (9, 0, 1)))
    messages = sends.send(numbers)
    assert next(messages).to_pylist() == [{"key": 5, "unit": 0, "rows": b"7"}]
    DriverSigns(progress).write(stop=True)
    assert list(messages) == []


@pytest.mark.slow
def test_a_shuffle_is_done_again_where_its_executor_was_lost(java_home: str, tmp_path: Path) -> None:
    """The executor dies with the rows that it holds for others, so Spark sends these again, too."""
    command = [sys.executable, "-m", "tests.support.losing_executor", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "Lost executor" in done.stderr, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"state": "DONE", "rows": 700, "right": True}
    calls = Counter(seen(str(tmp_path / "log")))
    assert (len(calls), max(calls.values()), calls[350]) == (700, 2, 2)
    assert sum(calls.values()) - 700 < 2 * 60, "what other tasks have computed is not computed again"


@pytest.mark.core
def test_touched_groups_are_computed_once_by_the_tasks(spark: object, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    data = pa.table({"g": [x % 700 for x in range(4_200)], "x": range(4_200), "log": [log] * 4_200})
    table = airflow_geneva.connect(tmp_path / "db").create_table("numbers", data, max_rows_per_file=1_000)
    columns = {"n": "count(*)", "most": "max(x)", "total": (spark_udfs.logged_total, ["g", "x", "log"])}
    columns["batches"] = (spark_udfs.total_of_batches, ["x"])
    view = table.query().group_by("g").agg(columns).create_materialized_view(name="v")

    def right() -> dict[int, tuple[int, ...]]:
        rows = table.to_arrow().group_by("g").aggregate([("x", "count"), ("x", "max"), ("x", "sum")]).to_pylist()
        return {row["g"]: (row["x_count"], row["x_max"], row["x_sum"], row["x_sum"]) for row in rows}

    def shown() -> dict[int, tuple[int, ...]]:
        return {row.pop("g"): tuple(row.values()) for row in view.to_arrow().to_pylist()}

    result = view.refresh(runner="spark", task_size=200)
    assert (result.state, result.rows_run, result.rows_computed) == ("DONE", 2 * 700, 700)
    assert sorted(seen(log)) == list(range(700))
    assert shown() == right()
    Path(log).unlink()
    table.lance.update({"x": "x + 1"}, where="x < 30")
    table.lance.delete("g = 5")
    result = view.refresh(runner="spark")
    assert (result.rows_run, result.rows_computed) == (2 * 29, 29)
    assert sorted(seen(log)) == [g for g in range(30) if g != 5]
    assert shown() == right()
