"""UDFs of a notebook, a script or a function: the process that made them finds them, no other one does."""

from __future__ import annotations

import linecache
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import CodeChanged, InvalidInput
from airflow_geneva.table import Table
from tests.support.tables import MakeTable

DEFINE = """
import pyarrow as pa
from airflow_geneva import udf

@udf(data_type=pa.int64())
def grow(x: int) -> int:
    return x + {by}
"""
ELSEWHERE = """
import sys
from airflow_geneva import connect
db = connect(sys.argv[1])
for name, run in (("docs", lambda t: t.backfill("n")), ("grown", lambda v: v.refresh())):
    try:
        run(db.open_table(name))
    except Exception as error:
        print(name, type(error).__name__, error)
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Runs a cell of a notebook."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(source: str) -> Any:
        filename = f"<cell {hash(source)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec", dont_inherit=True), vars(main))
        return main

    return run


def values(table: Table, column: str = "n") -> list[int]:
    return sorted(table.to_arrow()[column].to_pylist())


def add_view(table: Table, function: UDF) -> Any:
    return table.query().select(["id"]).add_columns({"n": (function, ["x"])}).create_materialized_view(name="grown")


def test_a_notebook_uses_what_its_cells_define(make_table: MakeTable, cell: Callable[[str], Any]) -> None:
    table, main = make_table(10), cell(DEFINE.format(by=1))
    table.add_columns({"n": main.grow})
    assert table.backfill("n", runner="inline").rows_computed == 10
    assert values(table) == list(range(1, 11))
    view = add_view(table, main.grow)
    assert view.refresh(runner="inline").rows_computed == 10
    assert values(view) == list(range(1, 11))


def test_a_cell_that_ran_again_with_other_code_is_a_change_of_the_code(
    make_table: MakeTable, cell: Callable[[str], Any]
) -> None:
    table, main = make_table(10), cell(DEFINE.format(by=1))
    table.add_columns({"n": main.grow})
    view = add_view(table, main.grow)
    table.backfill("n", runner="inline")
    view.refresh(runner="inline")
    cell(DEFINE.format(by=2))
    for run in (table.plan_backfill, lambda _: view.plan_refresh()):
        with pytest.raises(CodeChanged):
            run("n")
    table.backfill("n", on_code_change="recompute", runner="inline")
    view.refresh(on_code_change="recompute", runner="inline")
    assert values(table) == values(view) == list(range(2, 12))


@pytest.mark.slow
def test_another_kernel_finds_it_once_the_cell_that_defines_it_has_run(
    make_table: MakeTable, cell: Callable[[str], Any], tmp_path: Path
) -> None:
    table, main = make_table(10), cell(DEFINE.format(by=1))
    table.add_columns({"n": main.grow})
    add_view(table, main.grow)
    script = tmp_path / "script.py"
    command = [sys.executable, str(script), str(tmp_path / "db")]
    script.write_text(ELSEWHERE)
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[:2] for line in told] == [["docs", "InvalidInput"], ["grown", "InvalidInput"]]
    assert all("'grow'" in line and "not in this process" in line for line in told)
    script.write_text(DEFINE.format(by=1) + ELSEWHERE)
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


def test_functions_of_one_factory_and_lambdas_are_told_apart(make_table: MakeTable) -> None:
    def adding(more: int) -> UDF:
        @udf(data_type=pa.int64())
        def add(x: int) -> int:
            return x + more

        return add

    table = make_table(3)
    table.add_columns({"a": adding(1), "b": adding(2), "c": udf(data_type=pa.int64())(lambda x: x * 3)})
    for name in "abc":
        table.backfill(name, runner="inline")
    assert [values(table, name) for name in "abc"] == [[1, 2, 3], [2, 3, 4], [0, 3, 6]]


def test_two_functions_of_one_name_and_version_are_refused_when_the_second_is_given(
    make_table: MakeTable, cell: Callable[[str], Any]
) -> None:
    def adding(more: int, version: str = "1") -> UDF:
        return udf(data_type=pa.int64(), name="add", version=version)(lambda x: x + more)

    table = make_table(3)
    table.add_columns({"a": adding(1), "same": adding(1)})
    with pytest.raises(InvalidInput, match=r"'add' with version '1' .* column 'a' of .*, column 'same'.* name= or ver"):
        table.add_columns({"b": adding(2)})
    with pytest.raises(InvalidInput, match="'add' with version '1'"):
        add_view(table, adding(2))
    assert "b" not in table.schema.names
    table.add_columns({"b": adding(2, version="2")})
    for name in ("a", "b"):
        table.backfill(name, runner="inline")
    assert [values(table, name) for name in ("a", "b")] == [[1, 2, 3], [2, 3, 4]]
    # The other code for once, as udf=: the columns keep their own.
    table.backfill("b", udf=adding(3), on_code_change="recompute", runner="inline")
    table.backfill("same", runner="inline")
    assert [values(table, name) for name in ("b", "same")] == [[3, 4, 5], [1, 2, 3]]
    table.alter_columns({"same": adding(2, version="2")})
    table.alter_columns({"a": adding(4)})  # no other column has that function any more
    table.backfill("a", where="x = 1", runner="inline")


def test_databases_may_have_functions_of_one_name_and_version(tmp_path: Path) -> None:
    def adding(more: int) -> UDF:
        return udf(data_type=pa.int64(), name="add", version="1")(lambda x: x + more)

    tables = [connect(tmp_path / name).create_table("docs", {"id": [0], "x": [0]}) for name in "ab"]
    for more, table in enumerate(tables, 1):
        table.add_columns({"n": adding(more)})
    views = [add_view(table, table.column_udf("n")) for table in tables]
    for table, view in zip(tables, views, strict=True):
        table.backfill("n", runner="inline")
        view.refresh(runner="inline")
    assert [values(one) for one in (*tables, *views)] == [[1], [2], [1], [2]]
    for table, view, more in zip(tables, views, (1, 2), strict=True):
        there = connect(tmp_path / f"copies {more}")
        copied, shown = there.copy_table(table), there.copy_table(view)
        copied.add({"id": [1], "x": [1]})
        copied.backfill("n", runner="inline")
        shown.refresh(runner="inline")
        assert values(copied) == values(shown) == [more, 1 + more]
        for one in (table, view):
            with pytest.raises(InvalidInput, match="A function 'add' with version '1' and other code"):
                connect(tmp_path / "ba"[more - 1]).copy_table(one, "copied")
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    with pytest.raises(InvalidInput, match="cannot be found"):
        connect(tmp_path / "moved").open_table("docs").backfill("n", where="x = 1", runner="inline")


def test_a_cell_that_runs_again_takes_the_place_of_its_function_in_all_columns(
    make_table: MakeTable, cell: Callable[[str], Any]
) -> None:
    define = DEFINE.replace("int64()", 'int64(), version="1"')
    table, main = make_table(3), cell(define.format(by=1))
    table.add_columns({"a": (main.grow, ["x"])})
    main = cell(define.format(by=2))
    table.add_columns({"b": (main.grow, ["x"])})
    for name in ("a", "b"):
        table.backfill(name, runner="inline")
    assert values(table, "a") == values(table, "b") == [2, 3, 4]


@pytest.mark.spark
def test_they_travel_to_a_session_under_a_policy_too(
    spark: object, make_table: MakeTable, cell: Callable[[str], Any]
) -> None:
    table = make_table(20)
    main = cell(DEFINE.replace("int64()", 'int64(), on_error="skip"').format(by=1))
    table.add_columns({"n": main.grow})
    view = add_view(table, main.grow)
    assert table.backfill("n", runner="spark").rows_computed == 20
    assert view.refresh(runner="spark").rows_computed == 20
    assert values(table) == values(view) == list(range(1, 21))


def test_a_task_of_airflow_refuses_them(make_table: MakeTable, cell: Callable[[str], Any]) -> None:
    from airflow_geneva.engine.run.prepare import Udfs

    table, main = make_table(3), cell(DEFINE.format(by=1))
    table.add_columns({"n": main.grow})
    with pytest.raises(InvalidInput, match="no import path"):
        Udfs.planned(table.plan_backfill("n").spec)
