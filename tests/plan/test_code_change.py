"""Code that changes behind a column, after a job and in the middle of one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import UDF, udf
from airflow_geneva.engine.udf.definition import MIXED_VERSIONS_KEY
from airflow_geneva.errors import CodeChanged, InvalidInput, JobFailed
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact, assert_honest, assert_nothing_to_do_is_free, assert_right
from tests.support.tables import MakeTable


def scaled(factor: int, fails_from: int | None = None, version: str | None = None, **settings: Any) -> UDF:
    """A UDF that breaks at some row, as code under development does."""

    @udf(data_type=pa.int64(), name="scaled", version=version or f"v{factor}", **settings)
    def function(x: int) -> int:
        leave_trace([x])
        if fails_from is not None and x >= fails_from:
            raise RuntimeError("not done yet")
        return factor * x

    return function


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    made = make_table(100)
    made.add_columns({"y": scaled(2)})
    return made


def run(table: Table, function: UDF, **arguments: Any) -> Any:
    return table.backfill("y", udf=function, runner="inline", **{"commit_granularity": 1, **arguments})


def break_off(table: Table, function: UDF, **arguments: Any) -> None:
    with pytest.raises(JobFailed, match="not done yet"):
        run(table, function, **arguments)


def note(table: Table) -> str | None:
    found = (table.schema.field("y").metadata or {}).get(MIXED_VERSIONS_KEY.encode())
    return None if found is None else found.decode()


def mixed(x: int) -> int:
    return 2 * x if x < 60 else 3 * x


def test_checkpoints_of_other_code_are_not_used_and_one_line_says_what_they_would_save(
    table: Table, trace: Trace
) -> None:
    break_off(table, scaled(2, fails_from=60))
    plan = table.plan_backfill("y", udf=scaled(3))
    assert 'checkpointed by UDF version v2: 60 rows, which continue_from="v2" would save.' in str(plan)
    assert plan.rows_to_run == 100
    trace.clear()
    result = run(table, scaled(3))
    assert_exact(trace, range(100))
    assert result.notes == ()
    assert_right(table, "y", lambda x: 3 * x)
    assert "continue_from" not in str(table.plan_backfill("y", udf=scaled(3)))


def test_continuing_takes_over_what_was_computed_and_says_so(table: Table, trace: Trace) -> None:
    break_off(table, scaled(2, fails_from=60))
    trace.clear()
    result = run(table, scaled(3), continue_from="v2")
    assert_exact(trace, range(60, 100))
    assert (result.rows_computed, result.rows_reused) == (40, 60)
    assert_honest(result, table)
    assert_right(table, "y", mixed)
    assert note(table) == "mixed:v2,v3"
    assert_nothing_to_do_is_free(table, "y", trace, udf=scaled(3))
    assert "values of UDF version v2: 60 rows" in str(table.plan_backfill("y", udf=scaled(3)))


def test_what_was_taken_over_can_be_computed_later(table: Table, trace: Trace) -> None:
    break_off(table, scaled(2, fails_from=60))
    run(table, scaled(3), continue_from="v2")
    table.lance.optimize.compact_files()
    trace.clear()
    result = run(table, scaled(3), recompute_mixed=True)
    assert_exact(trace, range(60))
    assert_honest(result, table, rows_run=60)
    assert_right(table, "y", lambda x: 3 * x)
    assert note(table) is None
    assert_nothing_to_do_is_free(table, "y", trace, udf=scaled(3), recompute_mixed=True)
    assert_nothing_to_do_is_free(table, "y", trace, udf=scaled(3))


def test_recompute_recomputes_what_was_taken_over_too(table: Table, trace: Trace) -> None:
    break_off(table, scaled(2, fails_from=60))
    run(table, scaled(3), continue_from="v2")
    trace.clear()
    run(table, scaled(3), on_code_change="recompute")
    assert_exact(trace, range(60))
    assert_right(table, "y", lambda x: 3 * x)


def test_continuing_covers_what_the_old_code_made_visible(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(100)
    table.add_columns({"y": scaled(2)})
    run(table, scaled(2), where="x < 25")
    break_off(table, scaled(2, fails_from=60))
    with pytest.raises(CodeChanged, match="25 rows of version v2"):
        table.plan_backfill("y", udf=scaled(3))
    trace.clear()
    result = run(table, scaled(3), continue_from="v2")
    assert_exact(trace, range(60, 100))
    assert_honest(result, table, rows_run=40)
    assert_right(table, "y", mixed)
    assert_nothing_to_do_is_free(table, "y", trace, udf=scaled(3))
    trace.clear()
    run(table, scaled(3), recompute_mixed=True)
    assert_exact(trace, range(60))
    assert_right(table, "y", lambda x: 3 * x)


def test_continuing_is_killed_and_continued(table: Table, trace: Trace) -> None:
    break_off(table, scaled(2, fails_from=30))
    break_off(table, scaled(3, fails_from=70), continue_from=["v2"])
    trace.clear()
    result = run(table, scaled(4), continue_from="v2, v3")
    assert_exact(trace, range(70, 100))
    assert_right(table, "y", lambda x: (2 if x < 30 else 3 if x < 70 else 4) * x)
    assert_honest(result, table, rows_run=30)
    assert note(table) == "mixed:v2,v3,v4"


def test_what_was_taken_over_is_remembered_as_such_when_it_moved_before_it_was_committed(
    table: Table, trace: Trace
) -> None:
    break_off(table, scaled(2, fails_from=60))
    break_off(table, scaled(3, fails_from=99), continue_from="v2")
    table.lance.optimize.compact_files()
    run(table, scaled(3), continue_from="v2")
    assert_right(table, "y", mixed)
    assert note(table) == "mixed:v2,v3"
    trace.clear()
    run(table, scaled(3), recompute_mixed=True)
    assert_exact(trace, range(60))
    assert_right(table, "y", lambda x: 3 * x)


@pytest.mark.parametrize(
    ("then", "now", "because"),
    [
        ({"deps": ["weights-1"]}, {"deps": ["weights-2"]}, "output type or its declared deps"),
        ({"where": "x < 90"}, {}, "its where was 'x < 90' and is None"),
        ({}, {"input_columns": ["id"]}, "its inputs was"),
    ],
)
def test_values_that_do_not_belong_together_are_not_mixed(
    make_table: MakeTable, trace: Trace, then: dict[str, Any], now: dict[str, Any], because: str
) -> None:
    table = make_table(100)
    filters = {key: value for key, value in then.items() if key == "where"}
    settings = {key: value for key, value in then.items() if key != "where"}
    table.add_columns({"y": scaled(2, **settings)})
    break_off(table, scaled(2, fails_from=60, **settings), **filters)
    new = scaled(3, **now)
    if now:
        table.alter_columns({"y": new})
    version = table.version
    trace.clear()
    with pytest.raises(InvalidInput, match=because):
        run(table, new, continue_from="v2")
    assert (len(trace), table.version) == (0, version)


def test_a_version_nobody_knows_is_refused(table: Table, trace: Trace) -> None:
    run(table, scaled(2))
    with pytest.raises(InvalidInput, match=r"continue_from='v9': no job of that version is recorded. .*: v2"):
        table.plan_backfill("y", udf=scaled(3), continue_from="v9")
    with pytest.raises(InvalidInput, match="that is the current version"):
        table.plan_backfill("y", udf=scaled(2), continue_from="v2")


def test_new_rows_is_remembered(table: Table, trace: Trace) -> None:
    run(table, scaled(2))
    table.add([{"id": 100, "x": 100}])
    trace.clear()
    run(table, scaled(3), on_code_change="new_rows")
    assert_exact(trace, [100])
    table.lance.optimize.compact_files()
    table.add([{"id": 101, "x": 101}])
    trace.clear()
    run(table, scaled(3))
    assert_exact(trace, [101])
    assert_right(table, "y", lambda x: (2 if x < 100 else 3) * x)
    with pytest.raises(CodeChanged, match="2 rows of version v3"):
        table.plan_backfill("y", udf=scaled(4), continue_from="v2")
    trace.clear()
    run(table, scaled(3), recompute_mixed=True)
    assert_exact(trace, range(100))
    assert_right(table, "y", lambda x: 3 * x)


@pytest.mark.parametrize("way", ["variable", "argument"])
def test_starting_over_uses_no_checkpoint(
    table: Table, trace: Trace, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    break_off(table, scaled(2, fails_from=60))
    trace.clear()
    if way == "variable":
        monkeypatch.setenv("GENEVA_IGNORE_CHECKPOINTS", "1")
        run(table, scaled(2))
    else:
        run(table, scaled(2), ignore_checkpoints=True)
    assert_exact(trace, range(100))
    monkeypatch.setenv("GENEVA_IGNORE_CHECKPOINTS", "perhaps")
    with pytest.raises(InvalidInput, match="perhaps"):
        table.plan_backfill("y", udf=scaled(2))


AGAIN = "column 'x', which 'y' reads, was removed and added again"


def test_an_input_that_was_removed_and_added_again_is_not_said_to_be_other_code(table: Table, trace: Trace) -> None:
    run(table, scaled(2), where="id < 60")
    table.lance.drop_columns(["x"])
    table.lance.add_columns({"x": "id + 1000"})
    trace.clear()
    with pytest.raises(CodeChanged, match=AGAIN[1:]) as caught:
        run(table, scaled(2))
    assert str(caught.value) == (
        "Column 'x', which 'y' reads, was removed and added again: 60 rows of table 'docs' were computed from the "
        'column that was there before. Recompute 60 rows with on_code_change="recompute", or leave the old values and '
        'compute only new rows with on_code_change="new_rows".'
    )
    kept = table.plan_backfill("y", udf=scaled(2), on_code_change="new_rows")
    assert f"  {AGAIN}: 60 rows were computed from the column that was there before" in str(kept)
    assert "UDF version" not in str(kept)
    plan = table.plan_backfill("y", udf=scaled(2), on_code_change="recompute")
    assert plan.reasons == {AGAIN: 75, "never computed": 25}
    assert "UDF version" not in str(plan)
    run(table, scaled(2), on_code_change="recompute")
    assert_exact(trace, range(1000, 1100))
    assert_right(table, "y", lambda x: 2 * x)


def test_other_code_is_told_apart_from_an_input_that_was_removed_and_added_again(table: Table) -> None:
    run(table, scaled(2))
    table.lance.drop_columns(["x"])
    table.lance.add_columns({"x": "id"})
    with pytest.raises(CodeChanged, match="100 rows of version v2 with other input columns"):
        run(table, scaled(3))


@pytest.mark.parametrize("between", ["nothing", "compaction", "unrelated update", "dropped input"])
def test_other_input_columns_ask_first(make_table: MakeTable, trace: Trace, between: str) -> None:
    table = make_table(100)
    table.lance.add_columns({"other": "id"})
    table.add_columns({"y": scaled(2)})
    run(table, scaled(2))

    @udf(data_type=pa.int64(), name="scaled", version="v5")
    def of_id(id: int) -> int:
        leave_trace([id])
        return 5 * id

    table.alter_columns({"y": of_id})
    if between == "compaction":
        table.lance.optimize.compact_files()
    if between == "unrelated update":
        table.lance.update({"other": "1"}, where="id < 30")
    if between == "dropped input":
        table.lance.drop_columns(["x"])
    version = table.version
    trace.clear()
    with pytest.raises(CodeChanged, match="100 rows of version v2 with other input columns"):
        run(table, of_id)
    assert (len(trace), table.version) == (0, version)
    table.lance.insert(pa.table({"id": pa.array([100], pa.int64())}), mode="append")
    result = run(table, of_id, on_code_change="new_rows")
    assert_exact(trace, [100])
    assert_honest(result, table, rows_run=1)
    trace.clear()
    run(table, of_id)
    assert_exact(trace, [])
    run(table, of_id, on_code_change="recompute")
    assert_exact(trace, range(100))
    assert_right(table, "y", lambda value: 5 * value, inputs=("id",))
    assert_nothing_to_do_is_free(table, "y", trace, udf=of_id)
