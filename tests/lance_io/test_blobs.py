"""Blob columns as outputs and as inputs: bytes on the way in and out, whatever Lance keeps in between."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import lance
import pyarrow as pa
import pytest

from airflow_geneva import udf
from airflow_geneva.errors import JobFailed
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact, assert_honest, assert_nothing_to_do_is_free

MakeTable = Callable[..., Table]

BLOB = lance.blob_field("any").type


def drawn(x: int | None) -> bytes | None:
    return None if x is None or x % 7 == 5 else b"picture %d " % x * (x % 4 * 3_000)


@udf(data_type=BLOB, version="1")
def draw(x: int | None) -> bytes | None:
    leave_trace([x])
    return drawn(x)


def assert_drawn(table: Table, where: str | None = None) -> None:
    rows = table.lance.scanner(columns=["x", "p"], filter=where, blob_handling="all_binary").to_table()
    wrong = [x for x, blob in zip(rows["x"].to_pylist(), rows["p"].to_pylist(), strict=True) if blob != drawn(x)]
    assert not wrong


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    made = make_table([*range(39), None], per_fragment=20)
    made.add_columns({"p": draw})
    return made


def test_blobs_are_computed_kept_and_appended_to(table: Table, trace: Trace) -> None:
    result = table.backfill("p", udf=draw, runner="inline")
    assert_honest(result, table, rows_run=40)
    assert_drawn(table)
    assert_nothing_to_do_is_free(table, "p", trace, udf=draw)
    table.lance.delete("id IN (3, 25)")
    table.add([{"id": 500, "x": 501}])
    trace.clear()
    table.backfill("p", udf=draw, runner="inline")
    assert_exact(trace, [501])
    assert_drawn(table)
    assert table.lance.take_blobs("p", indices=[2])[0].readall() == drawn(2)


def test_blobs_that_a_compaction_moves_within_a_run_become_visible(table: Table, trace: Trace) -> None:
    """Single blobs cannot be read from a staged file, so these rows are drawn again."""
    changes = [table.lance.optimize.compact_files]

    @udf(data_type=BLOB, version="1")
    def draw_meanwhile(x: int | None) -> bytes | None:
        if x == 30 and changes:
            changes.pop()()
        leave_trace([x])
        return drawn(x)

    result = table.backfill("p", udf=draw_meanwhile, runner="inline")
    assert (result.state, result.rows_computed, result.rows_left) == ("DONE", 40, 0)
    assert_drawn(table)
    assert_nothing_to_do_is_free(table, "p", trace, udf=draw_meanwhile)


def test_blobs_that_a_filter_does_not_select_keep_their_bytes(table: Table, trace: Trace) -> None:
    table.lance.delete("id = 4")
    table.backfill("p", udf=draw, where="id % 2 = 0", runner="inline")
    assert_drawn(table, where="id % 2 = 0")
    table.backfill("p", udf=draw, runner="inline")
    assert_exact(trace, [*range(4), *range(5, 39), None])
    assert_drawn(table)


def test_blobs_are_put_together_from_checkpoints(table: Table, trace: Trace) -> None:
    @udf(data_type=BLOB, version="1", name="draw")
    def breaks(x: int | None) -> bytes | None:
        if x == 30:
            raise ValueError("no ink")
        leave_trace([x])
        return drawn(x)

    with pytest.raises(JobFailed, match="no ink"):
        table.backfill("p", udf=breaks, runner="inline", checkpoint_size=3)
    table.lance.optimize.compact_files()
    result = table.backfill("p", udf=draw, runner="inline")
    assert_drawn(table)
    assert_honest(result, table)
    assert set(trace.counts()) == {*range(39), None}


def test_blobs_of_a_dropped_column_are_drawn_again(table: Table, trace: Trace) -> None:
    table.backfill("p", udf=draw, runner="inline")
    table.lance.drop_columns(["p"])
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    table.add_columns({"p": draw})
    table.backfill("p", udf=draw, runner="inline")
    assert_drawn(table)


def test_a_blob_input_reaches_the_udf_as_bytes(table: Table, trace: Trace) -> None:
    @udf(data_type=pa.int64(), version="1")
    def size(p: bytes | None) -> int:
        return -1 if p is None else len(p)

    table.backfill("p", udf=draw, runner="inline")
    table.add_columns({"n": size})
    table.backfill("n", udf=size, where="x < 10", runner="inline")
    table.backfill("n", udf=size, runner="inline")
    rows = table.lance.to_table(columns=["x", "n"]).to_pylist()
    for row in rows:
        blob = drawn(row["x"])
        assert row["n"] == (-1 if blob is None else len(blob))


def test_a_blob_input_of_the_same_size_and_place_is_a_new_input(make_table: MakeTable, trace: Trace) -> None:
    """What a plain read shows of a blob is where it lies, which can be the same for other bytes."""

    @udf(data_type=pa.int64(), version="1")
    def first(p: bytes) -> int:
        return p[0]

    table = make_table(1, p=lance.blob_array([b"a"]))
    table.add_columns({"n": first})
    table.backfill("n", udf=first, runner="inline")
    data = pa.table({"id": pa.array([0], pa.int64()), "x": pa.array([0], pa.int64()), "p": lance.blob_array([b"b"]),
                     "n": pa.array([97], pa.int64())})  # fmt: skip
    table.lance.merge_insert("id").when_matched_update_all().execute(data)
    table.backfill("n", udf=first, runner="inline")
    assert table.to_arrow()["n"].to_pylist() == [98]


@pytest.mark.parametrize("cut", [None, 15], ids=["shuffled", "cut too"])
def test_a_shuffled_view_holds_the_blobs_of_its_source(table: Table, cut: int | None) -> None:
    table.backfill("p", udf=draw, runner="inline")
    view = table.query().select(["x", "p"]).shuffle(seed=1).create_materialized_view(name="v")
    result = view.refresh(runner="inline", max_rows_per_fragment=cut)
    assert (result.state, result.rows_computed) == ("DONE", 40)
    rows = view.lance.scanner(columns=["x", "p"], blob_handling="all_binary").to_table().to_pylist()
    assert [row for row in rows if row["p"] != drawn(row["x"])] == []
    assert len(rows) == 40
    assert view.lance.take_blobs("p", indices=[next(at for at, row in enumerate(rows) if row["p"])])
