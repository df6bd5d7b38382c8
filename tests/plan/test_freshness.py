"""How columns and views stand: the same rows pending as a plan finds, without the code that a plan needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from lance import LanceDataset

from airflow_geneva import connect, udf
from airflow_geneva.database import Database
from airflow_geneva.engine.plan.freshness import Freshness, column_freshness, view_freshness
from airflow_geneva.engine.udf.definition import UDF_KEY
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import triple
from tests.support.tables import MakeTable
from tests.udfs_for_tests.picky import skipping
from tests.udfs_for_tests.views import plus


def standing(table: Table, column: str = "y") -> Freshness:
    inputs = table.definition(column).input_columns or ()
    return column_freshness(table.lance, table.location.checkpoints, inputs, column)


def counts(found: Freshness) -> tuple[str, int, int, int]:
    return found.state, found.pending, found.failed, found.given_up


def add(table: Table, rows: int, start: int = 1000) -> None:
    table.add([{"id": start + row, "x": start + row} for row in range(rows)])


def update(dataset: LanceDataset) -> None:
    dataset.update({"x": "x + 1"}, where="id % 10 = 0")


CHANGES: dict[str, Callable[[LanceDataset], Any]] = {
    "nothing": lambda dataset: None,
    "deletes": lambda dataset: dataset.delete("id % 7 = 0"),
    "updates of inputs": update,
    "compaction": lambda dataset: dataset.optimize.compact_files(target_rows_per_fragment=1000),
    "restore": lambda dataset: dataset.checkout_version(2).restore(),
}


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_as_many_rows_of_a_column_are_pending_as_a_plan_finds(
    make_table: MakeTable, change: str, stable: bool
) -> None:  # fmt: skip
    table = make_table(100, stable=stable)
    table.add_columns({"y": triple})
    assert counts(standing(table)) == (Freshness.NEVER, 100, 0, 0)
    table.backfill("y", runner="inline", where="id < 60")
    assert counts(standing(table)) == (Freshness.STALE, 40, 0, 0)
    table.backfill("y", runner="inline")
    assert counts(standing(table)) == (Freshness.UP_TO_DATE, 0, 0, 0)
    CHANGES[change](table.lance)
    add(table, 5)
    assert standing(table).pending == table.plan_backfill("y", on_code_change="new_rows").rows_pending
    assert standing(table).rows == table.count_rows()


@pytest.mark.slow
def test_rows_that_fail_are_pending_until_they_are_given_up(make_table: MakeTable) -> None:
    table = make_table([*range(20), 999, 1999])
    table.add_columns({"y": skipping})
    for _ in range(2):
        table.backfill("y", runner="inline")
        assert counts(standing(table)) == (Freshness.STALE, 2, 2, 0)
        assert table.plan_backfill("y").rows_pending == 2
    table.backfill("y", runner="inline")
    assert counts(standing(table)) == (Freshness.UP_TO_DATE, 0, 2, 2)
    assert standing(table).versions == {"1": 20}


@pytest.mark.slow
def test_rows_that_were_given_up_and_are_gone_or_changed_since_are_not_counted(make_table: MakeTable) -> None:
    table = make_table([*range(20), 999, 1999, 2999])
    table.add_columns({"y": skipping})
    for _ in range(3):
        table.backfill("y", runner="inline")
    assert counts(standing(table)) == (Freshness.UP_TO_DATE, 0, 3, 3)
    table.lance.delete("x = 999")
    table.lance.update({"x": "7"}, where="x = 1999")
    for pending in (1, 0):
        assert counts(standing(table))[1:] == (pending, 1, 1)
        assert standing(table).versions == {"1": 21 - pending}
        plan = table.plan_backfill("y")
        assert plan.rows_pending == pending
        assert "given up after 3 runs: 1 row." in str(plan)
        table.backfill("y", runner="inline")


def test_values_of_older_code_count_as_computed_and_are_told_apart(make_table: MakeTable) -> None:
    table = make_table(50)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    newer = udf(data_type=pa.int64(), version="newer", name="triple")(lambda x: 3 * x + 2)
    table.alter_columns({"y": newer})
    add(table, 10)
    assert counts(standing(table)) == (Freshness.STALE, 10, 0, 0)
    table.backfill("y", udf=newer, runner="inline", on_code_change="new_rows")
    found = standing(table)
    assert (found.state, sorted(found.versions.values())) == (Freshness.UP_TO_DATE, [10, 50])
    assert found.versions["newer"] == 10


def test_a_column_whose_code_is_gone_is_counted_all_the_same(make_table: MakeTable) -> None:
    table = make_table(50)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    stored = table.definition("y").to_json().replace("tests.support.counting:triple", "gone.with:the_wind")
    table.lance.update_field_metadata({"y": {UDF_KEY: stored}})
    add(table, 3)
    with pytest.raises(Exception, match="gone"):
        table.plan_backfill("y")
    assert counts(standing(table)) == (Freshness.STALE, 3, 0, 0)


@pytest.fixture
def database(tmp_path: Any) -> Database:
    made = connect(tmp_path / "db")
    rows = {"id": pa.array(range(100), pa.int64()), "x": pa.array(range(100), pa.int64())}
    made.create_table("source", pa.table(rows), max_rows_per_file=25)
    return made


def of_view(view: View) -> Freshness:
    return view_freshness(view.source().lance, view.view_definition, CommittedViewState(view.location, view.lance))


QUERIES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda query: query,
    "filtered": lambda query: query.where("x % 2 = 0"),
    "cut": lambda query: query.where("x % 2 = 0").shuffle(seed=3).limit(20),
}


@pytest.mark.parametrize("query", QUERIES)
def test_as_many_rows_of_a_view_are_pending_as_a_plan_finds(database: Database, query: str) -> None:
    source = database.open_table("source")
    view = (
        QUERIES[query](source.query())
        .select(["id", "x"]).add_columns({"p": plus}).create_materialized_view(database, "view")
    )  # fmt: skip

    def check(state: str) -> None:
        found = of_view(view)
        assert (found.state, found.pending) == (state, view.plan_refresh().rows_pending)

    check(Freshness.NEVER)
    view.refresh(runner="inline")
    check(Freshness.UP_TO_DATE)
    source.lance.delete("id = 7")  # 7 is odd: a view with the filter never had it
    check(Freshness.STALE if query == "whole" else Freshness.UP_TO_DATE)
    view.refresh(runner="inline")
    source.lance.update({"x": "x + 2"}, where="id < 60")
    check(Freshness.STALE)
    add(source, 8)
    check(Freshness.STALE)
    view.refresh(runner="inline")
    check(Freshness.UP_TO_DATE)
    source.lance.optimize.compact_files(target_rows_per_fragment=1000)
    check(Freshness.UP_TO_DATE)


@pytest.mark.slow
def test_rows_of_a_view_that_fail_are_pending_until_they_are_given_up(database: Database) -> None:
    source = database.open_table("source")
    source.add([{"id": 100, "x": 999}])
    view = source.query().select(["id"]).add_columns({"y": skipping}).create_materialized_view(database, "view")
    view.refresh(runner="inline")
    for _ in range(2):
        assert counts(of_view(view)) == (Freshness.STALE, 1, 1, 0)
        view.refresh(runner="inline")
    assert counts(of_view(view)) == (Freshness.UP_TO_DATE, 0, 1, 1)


def test_a_view_of_a_source_that_was_made_again_is_not_up_to_date(make_table: MakeTable) -> None:
    table = make_table(20)
    database = connect(table.location.database_uri)
    view = table.query().select(["id"]).create_materialized_view(database, "v")
    view.refresh(runner="inline")
    version = table.version
    database.drop_table(table.name)
    table = database.create_table(table.name, [{"id": 1000 + row, "x": row} for row in range(20)])
    while table.version < version:
        table.lance.update_config({"again": str(table.version)})
    assert table.version == version
    found = view_freshness(table.lance, view.view_definition, CommittedViewState(view.location, view.lance))
    assert found.pending == 20
    assert view.refresh(runner="inline").rows_computed == 20
