"""Exactly the work: rows that are new or whose inputs or output changed by value, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import airflow_geneva
from airflow_geneva import udf

ROWS = 10_000
ran: list[int] = []


@udf(data_type=pa.int64(), version="1")
def double(x: pa.Int64Array) -> pa.Int64Array:
    ran.append(len(x))
    return pc.multiply(x, 2)


@pytest.fixture
def table(tmp_path: Path) -> airflow_geneva.Table:
    data = pa.table({"id": range(ROWS), "x": range(ROWS), "u": range(ROWS)})
    table = airflow_geneva.connect(tmp_path / "db").create_table("docs", data, max_rows_per_file=ROWS // 10)
    table.add_columns({"y": double})
    backfill(table, ROWS)
    return table


def backfill(table: airflow_geneva.Table, expected: int) -> None:
    ran.clear()
    before = table.version
    result = table.backfill("y", udf=double, runner="inline", on_unknown_values="recompute")
    assert sum(ran) == result.rows_computed == expected
    assert table.version - before == (1 if expected else 0), "nothing to do writes no version"
    values = table.to_arrow()
    assert pc.all(pc.equal(values["y"], pc.multiply(values["x"], 2))).as_py()
    assert table.plan_backfill("y", udf=double).rows_pending == 0


def compact(table: airflow_geneva.Table) -> None:
    table.lance.optimize.compact_files(target_rows_per_fragment=4_000)


def upsert_in_place(table: airflow_geneva.Table) -> None:
    rows = pa.table({"id": [5, 6], "u": [0, 0]})
    merge = table.lance.merge_insert("id").when_matched_update_all()
    merge.execute(rows)


CHANGES: dict[str, tuple[Callable[[airflow_geneva.Table], object], int]] = {
    "compaction": (compact, 0),
    "an unrelated column": (lambda t: t.lance.add_columns({"unrelated": "id + 1"}), 0),
    "an update of an unrelated column": (lambda t: t.lance.update({"u": "u + 1"}, "id % 100 = 3"), 0),
    "an update that changes nothing": (lambda t: t.lance.update({"x": "x"}, "id % 100 = 3"), 0),
    "an update of the input": (lambda t: t.lance.update({"x": "x + 1"}, "id % 100 = 3"), ROWS // 100),
    "a foreign write to the column": (lambda t: t.lance.update({"y": "7"}, "id = 5"), 1),
    "an upsert of a part of the columns": (upsert_in_place, 0),
    "deletes": (lambda t: t.lance.delete("id % 7 = 0"), 0),
    "rows": (lambda t: t.add([{"id": -1, "x": -1, "u": 0}, {"id": -2, "x": -2, "u": 0}]), 2),
    "rows with a value for the column": (lambda t: t.add([{"id": -1, "x": -1, "u": 0, "y": -2}]), 1),
    "a restore": (lambda t: (t.lance.delete("id < 500"), t.lance.checkout_version(3).restore()), 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_rows_that_changed_by_value_are_run(table: airflow_geneva.Table, change: str) -> None:
    act, expected = CHANGES[change]
    act(table)
    backfill(table, expected)


@pytest.mark.parametrize("change", CHANGES)
def test_moves_and_compactions_around_a_change_cost_nothing(table: airflow_geneva.Table, change: str) -> None:
    act, expected = CHANGES[change]
    table.lance.update({"u": "u + 1"}, "id % 100 = 4")
    act(table)
    if change != "a restore":
        table.lance.update({"u": "u + 1"}, "id % 100 = 5")
    compact(table)
    backfill(table, expected)


def test_a_zero_that_becomes_a_negative_zero_is_a_change(tmp_path: Path) -> None:
    @udf(data_type=pa.float64(), version="1")
    def inverse(x: pa.DoubleArray) -> pa.DoubleArray:
        return pc.divide(1.0, x)

    data = pa.table({"id": range(4), "x": [0.0, 0.0, float("nan"), 1.0]})
    table = airflow_geneva.connect(tmp_path / "db").create_table("docs", data)
    table.add_columns({"y": inverse})
    assert table.backfill("y", udf=inverse, runner="inline").rows_computed == 4
    changed = pa.table({"id": [0, 1, 2], "x": [-0.0, 0.0, float("nan")]})
    changed = changed.append_column("y", pa.array([float("inf"), float("inf"), float("nan")]))
    table.lance.merge_insert("id").when_matched_update_all().execute(changed)
    assert table.backfill("y", udf=inverse, runner="inline").rows_computed == 1
    assert table.lance.to_table(columns=["y"], filter="id = 0")["y"].to_pylist() == [float("-inf")]


def test_everything_at_once(table: airflow_geneva.Table) -> None:
    table.add(pa.table({"id": range(ROWS, ROWS + 100), "x": range(100), "u": range(100)}))
    compact(table)
    table.lance.update({"x": "x + 1"}, f"id % 100 = 77 AND id < {ROWS}")
    table.lance.add_columns({"unrelated": "id + 1"})
    backfill(table, 100 + ROWS // 100)
    backfill(table, 0)


@pytest.mark.parametrize("undone", ["delete", "change"])
def test_rows_that_a_restore_brings_back_and_an_update_moves_are_known(
    table: airflow_geneva.Table, undone: str
) -> None:
    computed, rows = table.version, "id >= 0 AND id < 10"
    if undone == "delete":
        table.lance.delete(rows)
    for number in range(2):  # the four newest versions that jobs looked at lack the rows, or have them changed
        if undone == "change":
            table.lance.update({"x": "x + 1000"}, rows)
        table.add([{"id": -1 - number, "x": -number, "u": 0}])
        backfill(table, 1 + 10 * (undone == "change"))
    table.lance.checkout_version(computed).restore()
    table.lance.update({"x": "x"}, rows)
    backfill(table, 0)


def test_a_recomputed_input_column_makes_only_its_changed_rows_due(table: airflow_geneva.Table) -> None:
    @udf(data_type=pa.int64(), version="1")
    def negative(y: pa.Int64Array) -> pa.Int64Array:
        ran.append(len(y))
        return pc.negate(y)

    table.add_columns({"z": negative})
    table.backfill("z", udf=negative, runner="inline")
    table.lance.update({"x": "x + 1"}, "id = 17")
    backfill(table, 1)
    ran.clear()
    result = table.backfill("z", udf=negative, runner="inline")
    assert (sum(ran), result.rows_computed) == (1, 1)


def test_jobs_are_on_record(table: airflow_geneva.Table, tmp_path: Path) -> None:
    backfill(table, 0)
    database = airflow_geneva.connect(tmp_path / "db")
    newest, first = database.jobs()
    assert [(job.state, job.rows_computed) for job in (newest, first)] == [("DONE", 0), ("DONE", ROWS)]
    assert database.job(first.id).ended == first.ended
    with pytest.raises(ValueError, match=r"There is no job 'x'.*db.jobs\(\)"):
        database.job("x")
