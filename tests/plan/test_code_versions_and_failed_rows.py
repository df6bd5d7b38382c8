"""Promises where error policies, code changes and the table's own history meet."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import UDF, Skip, udf
from airflow_geneva.errors import CodeChanged
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact, assert_honest, assert_nothing_to_do_is_free, assert_right
from tests.support.tables import MakeTable


def scaled(factor: int) -> UDF:
    """Version ``v<factor>`` of one UDF."""

    def scale(x: pa.Int64Array) -> pa.Int64Array:
        leave_trace(x)
        return pa.array([factor * value for value in x.to_pylist()], pa.int64())

    return udf(data_type=pa.int64(), name="scale", version=f"v{factor}")(scale)


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    made = make_table(100)
    made.add_columns({"y": scaled(2)})
    return made


def run(table: Table, function: UDF, **arguments: Any) -> Any:
    return table.backfill("y", udf=function, runner="inline", **arguments)


@pytest.mark.parametrize("how", [{"on_code_change": "new_rows"}, {"continue_from": "v2"}])
def test_rows_that_were_left_as_they_are_stay_so_in_fragments_of_which_other_rows_were_computed(
    table: Table, trace: Trace, how: dict[str, str]
) -> None:
    run(table, scaled(2))
    table.add([{"id": 100, "x": 100}])
    table.lance.optimize.compact_files()
    trace.clear()
    assert_honest(run(table, scaled(3), **how), table, rows_run=1)
    assert_exact(trace, [100])
    assert_nothing_to_do_is_free(table, "y", trace, udf=scaled(3))
    assert_right(table, "y", lambda x: (2 if x < 100 else 3) * x)
    trace.clear()
    run(table, scaled(3), recompute_mixed=True)
    assert_exact(trace, range(100))
    assert_right(table, "y", lambda x: 3 * x)


def test_rows_at_stake_are_counted_once_however_many_versions_left_them_as_they_are(table: Table) -> None:
    run(table, scaled(2))
    for version in (3, 4):
        run(table, scaled(version), on_code_change="new_rows")
    plan = table.plan_backfill("y", udf=scaled(5), on_code_change="new_rows")
    assert plan.rows_by_other_version == (("v2", 100),)
    with pytest.raises(CodeChanged, match="Recompute 100 rows"):
        table.plan_backfill("y", udf=scaled(5))
    plan = table.plan_backfill("y", udf=scaled(4))
    assert plan.rows_by_other_version == (("v2", 100),)


def test_going_back_to_the_code_that_computed_all_rows_leaves_no_row_of_other_code(table: Table) -> None:
    run(table, scaled(2))
    run(table, scaled(3), on_code_change="new_rows")
    assert table.plan_backfill("y", udf=scaled(2)).rows_by_other_version == ()


@pytest.mark.parametrize("limit", [{"max_count": 2}, {"max_fraction": 0.02}])
def test_rows_that_a_limit_let_through_do_not_fail_the_jobs_that_try_them_again(
    table: Table, trace: Trace, limit: dict[str, Any]
) -> None:
    def picky(x: int) -> int:
        leave_trace([x])
        if x in (3, 30):
            raise ValueError(x)
        return 2 * x

    function = udf(data_type=pa.int64(), name="scale", version="v2", on_error=[Skip(ValueError, **limit)])(picky)
    for rows in (100, 2, 2, 0):
        trace.clear()
        result = run(table, function, shard_size=1)
        assert_honest(result, table)
        assert (len(trace), result.rows_failed) == (rows, 2 if rows else 0)


def test_a_row_on_which_two_columns_failed_is_one_failed_row(make_table: MakeTable) -> None:
    def never(x: int) -> int:
        raise ValueError(x)

    table = make_table(2)
    function = udf(data_type=pa.int64(), name="never", version="1", on_error="skip")(never)
    table.add_columns({"y": function, "z": function})
    for column in ("y", "z"):
        table.backfill(column, udf=function, runner="inline")
    assert table.get_failed_row_addresses() == [0, 1]
