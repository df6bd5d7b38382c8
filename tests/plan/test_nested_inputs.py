"""Inputs with nested fields: a value was computed from the fields that the input had then, by id and name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import UDF, udf
from airflow_geneva.engine.lance_io import fragments, table_versions
from airflow_geneva.errors import CodeChanged, InvalidInput, JobFailed
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_nothing_to_do_is_free, assert_right
from tests.support.tables import MakeTable

OTHER_INPUTS = "rows of version v1 with other input columns"


def joined(s: dict[str, Any]) -> int:
    return 1_000 * (s["a"] or 0) + (s["b"] or 0)


def of_struct(fails_at: int | None = None) -> UDF:
    def traced(s: dict[str, Any]) -> int:
        leave_trace([s["a"]])
        if s["a"] == fails_at:
            raise RuntimeError("not done yet")
        return joined(s)

    return udf(data_type=pa.int64(), name="joined", version="v1")(traced)


def run(table: Table, function: UDF | None = None, **options: Any) -> Any:
    return table.backfill("y", udf=function or of_struct(), runner="inline", **options)


def free(table: Table, trace: Trace) -> None:
    assert_nothing_to_do_is_free(table, "y", trace, udf=of_struct())


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    made = make_table(6, per_fragment=2, s=pa.array([{"a": at, "b": 10 * at} for at in range(6)]))
    made.add_columns({"y": of_struct()})
    return made


def swap_names(table: Table) -> None:
    for path, name in (("s.a", "other"), ("s.b", "a"), ("s.other", "b")):
        table.lance.alter_columns({"path": path, "name": name})


def drop_and_add(table: Table) -> None:
    table.lance.drop_columns(["s.b"])
    table.lance.add_columns(pa.schema({"s": pa.struct({"b": pa.int64()})}))


def drop_and_add_values(table: Table) -> None:
    table.lance.drop_columns(["s.b"])
    kind = pa.schema({"s": pa.struct({"b": pa.int64()})})
    values = pa.record_batch([pa.array([{"b": 7}] * 6)], schema=kind)
    table.lance.add_columns(pa.RecordBatchReader.from_batches(kind, [values]))


@pytest.mark.parametrize("change", [swap_names, drop_and_add, drop_and_add_values])
@pytest.mark.parametrize("compacted", ["before", "after", "never"])
def test_other_nested_fields_ask_first(
    table: Table, trace: Trace, change: Callable[[Table], None], compacted: str
) -> None:
    run(table)
    if compacted == "before":
        table.lance.optimize.compact_files()
    change(table)
    if compacted == "after":
        table.lance.optimize.compact_files()
    trace.clear()
    with pytest.raises(CodeChanged, match=f"6 {OTHER_INPUTS}"):
        run(table)
    run(table, on_code_change="recompute")
    assert len(trace) == 6
    assert_right(table, "y", joined, inputs=("s",))
    free(table, trace)


@pytest.mark.parametrize("change", [swap_names, drop_and_add, drop_and_add_values])
def test_rows_whose_nested_fields_change_during_a_run_are_left_for_the_next(
    table: Table, trace: Trace, change: Callable[[Table], None]
) -> None:
    changes = [change]

    def changing(s: dict[str, Any]) -> int:
        if changes:
            changes.pop()(table)
        return of_struct().func(s)

    result = run(table, udf(data_type=pa.int64(), name="joined", version="v1")(changing))
    assert (result.state, result.rows_left, result.commits) == ("PARTIAL", 6, ())
    assert table.to_arrow()["y"].null_count == 6
    assert run(table).rows_computed == 6
    assert_right(table, "y", joined, inputs=("s",))
    free(table, trace)


def test_rows_whose_nested_fields_change_during_a_commit_are_left_and_asked_about(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lance reports no conflict, so that the values are visible."""
    changes = {"commit.before": swap_names}
    monkeypatch.setattr(table_versions, "fault_point", lambda name: changes.pop(name, lambda _: None)(table))
    result = run(table)
    assert (result.state, result.rows_left, len(result.commits)) == ("PARTIAL", 6, 1)
    with pytest.raises(CodeChanged, match=f"6 {OTHER_INPUTS}"):
        run(table)
    run(table, on_code_change="recompute")
    assert_right(table, "y", joined, inputs=("s",))


def test_nested_fields_that_are_as_they_were_cost_nothing(table: Table, trace: Trace) -> None:
    run(table)
    computed = table.version
    swap_names(table)
    swap_names(table)
    free(table, trace)
    drop_and_add(table)
    with pytest.raises(CodeChanged):
        run(table)
    table.lance.checkout_version(computed).restore()
    free(table, trace)


def test_a_moved_row_is_not_compared_with_a_version_that_had_other_nested_fields(table: Table, trace: Trace) -> None:
    """The row gets the values that it had there under the same names, and its output is that of other values."""
    run(table)
    computed = table.version
    drop_and_add(table)
    run(table, where="id = 5", on_code_change="recompute")
    table.lance.checkout_version(computed).restore()
    table.lance.update({"s": "named_struct('a', 1, 'b', cast(NULL as bigint))"}, where="id = 1")
    trace.clear()
    run(table)
    assert len(trace) == 1
    assert_right(table, "y", joined, inputs=("s",))


def test_checkpoints_of_other_nested_fields_are_not_used(table: Table, trace: Trace) -> None:
    with pytest.raises(JobFailed, match="not done yet"):
        run(table, of_struct(fails_at=5), checkpoint_size=1)
    swap_names(table)
    run(table)
    assert_right(table, "y", joined, inputs=("s",))


@pytest.mark.parametrize("condition", ["s.b >= 30", "t.b >= 30"])
def test_a_filter_is_evaluated_again_for_other_nested_fields(
    make_table: MakeTable, trace: Trace, condition: str
) -> None:
    values = pa.array([{"a": 10 * at, "b": at} for at in range(6)])
    table = make_table(6, per_fragment=2, s=values, t=values)
    table.add_columns({"y": of_struct()})
    run(table, where=condition)
    for column in "st":
        table.lance.alter_columns({"path": f"{column}.a", "name": "other"})
        table.lance.alter_columns({"path": f"{column}.b", "name": "a"})
        table.lance.alter_columns({"path": f"{column}.other", "name": "b"})
    trace.clear()
    run(table, where=condition)
    assert len(trace) == 3
    assert_right(table, "y", joined, inputs=("s",), where="id >= 3")


def test_an_input_that_gets_the_field_id_of_a_dropped_one_was_not_computed_from(
    make_table: MakeTable, trace: Trace
) -> None:
    """Lance gives a field id away again once compaction has removed every file that held it."""
    table = make_table(6, per_fragment=2)
    table.add_columns({"y": udf(data_type=pa.int64(), name="joined", version="v1")(lambda x: x)})
    table.lance.add_columns({"s": "named_struct('a', id, 'b', 10 * id)"})
    table.alter_columns({"y": (of_struct(), ["s"])})
    run(table)
    text = fragments.columns_of(table.lance, ("s",), (), "y").inputs_text
    table.lance.drop_columns(["s.b"])
    table.lance.optimize.compact_files()
    table.lance.add_columns(pa.schema({"s": pa.struct({"b": pa.int64()})}))
    assert fragments.columns_of(table.lance, ("s",), (), "y").inputs_text == text
    run(table, on_code_change="recompute")
    assert_right(table, "y", joined, inputs=("s",))


def of_field(name: str = "of_field") -> UDF:
    def traced(a: int) -> int:
        leave_trace([a])
        return 0 if a is None else 2 * a

    return udf(data_type=pa.int64(), name=name, version="v1")(traced)


@pytest.fixture
def by_field(make_table: MakeTable) -> Table:
    made = make_table(6, per_fragment=2, s=pa.array([*({"a": at, "b": 10 * at} for at in range(5)), None]))
    made.add_columns({"y": (of_field(), ["s.a"])})
    return made


def compute(table: Table, **options: Any) -> Any:
    return table.backfill("y", udf=of_field(), runner="inline", **options)


def test_a_field_of_a_struct_is_an_input_that_is_due_by_its_own_values(by_field: Table, trace: Trace) -> None:
    assert compute(by_field, where="id < 4").rows_computed == 4
    assert compute(by_field).rows_computed == 2
    assert by_field.to_arrow()["y"].to_pylist() == [0, 2, 4, 6, 8, 0]
    trace.clear()
    by_field.lance.update({"s": "named_struct('a', s.a, 'b', 7)"}, where="id IN (1, 4)")
    assert compute(by_field).rows_computed == 0
    by_field.lance.optimize.compact_files()
    assert compute(by_field).rows_computed == 0
    assert trace.rows() == []
    by_field.lance.update({"s": "named_struct('a', 50, 'b', s.b)"}, where="id = 3")
    assert compute(by_field).rows_computed == 1
    assert trace.rows() == [50]
    assert sorted(by_field.to_arrow()["y"].to_pylist()) == [0, 0, 2, 4, 8, 100]


def test_another_field_of_the_struct_asks_first(by_field: Table) -> None:
    compute(by_field)
    by_field.alter_columns({"y": (of_field(), ["s.b"])})
    with pytest.raises(CodeChanged, match="6 rows of version v1 with other input columns"):
        compute(by_field)
    compute(by_field, on_code_change="recompute")
    assert by_field.to_arrow()["y"].to_pylist() == [0, 20, 40, 60, 80, 0]


def test_the_struct_of_an_input_can_be_renamed_and_not_dropped(by_field: Table, trace: Trace) -> None:
    compute(by_field)
    trace.clear()
    with pytest.raises(InvalidInput, match=r"cannot be dropped: .*'y' \(from \['s'\]\)"):
        by_field.drop_columns(["s"])
    by_field.rename_column("s", "t")
    assert by_field.definition("y").input_columns == ("t.a",)
    assert compute(by_field).rows_computed == 0
    with pytest.raises(
        InvalidInput, match=r"\['t.c'\] which are not found .* give a field of a struct as 'column.field'"
    ):
        by_field.add_columns({"z": (of_field("z"), ["t.c"])})
