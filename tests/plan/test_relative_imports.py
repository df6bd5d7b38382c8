"""Code with relative imports: two packages with the same text have two versions, and earlier versions still count."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva import UDF
from airflow_geneva.engine.code_hash import hasher
from airflow_geneva.engine.plan import due_rows
from airflow_geneva.errors import CodeChanged, JobFailed
from airflow_geneva.table import Table
from tests.support.counting import Trace
from tests.support.invariants import assert_nothing_to_do_is_free, assert_right
from tests.support.tables import MakeTable

UDFS = """
import pyarrow as pa
from airflow_geneva import udf
from .helpers import by

@udf(data_type=pa.int64())
def scale(x: int) -> int:
    return by(x)
"""
HELPERS = """
from pathlib import Path
from tests.support.counting import leave_trace

def by(x):
    leave_trace([x])
    if x == 5 and Path({stop!r}).exists():
        raise RuntimeError("not done yet")
    return {factor} * x
"""
Deploy = Callable[[str], UDF]


@pytest.fixture
def deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deploy:
    """Imports the UDF of a package anew; packages differ in their helpers only."""
    monkeypatch.syspath_prepend(tmp_path)
    for package, factor in (("doubling", 2), ("tripling", 3)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "udfs.py").write_text(UDFS)
        (tmp_path / package / "helpers.py").write_text(HELPERS.format(stop=str(tmp_path / "stop"), factor=factor))

    def load(package: str) -> UDF:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        found: Any = importlib.import_module(f"{package}.udfs").scale
        assert isinstance(found, UDF)
        return found

    return load


@pytest.fixture
def before() -> Iterator[pytest.MonkeyPatch]:
    """Hashes relative imports as they are written, until it is undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hasher, "absolute_name", lambda level, name, package: "." * level + name)
        yield patch


@pytest.fixture
def table(make_table: MakeTable, before: pytest.MonkeyPatch, deploy: Deploy) -> Table:
    """A table that earlier code computed."""
    made = make_table(6, per_fragment=2)
    made.add_columns({"y": deploy("doubling")})
    return made


def run(table: Table, **options: Any) -> Any:
    return table.backfill("y", runner="inline", **options)


def test_the_same_text_in_another_package_is_other_code(make_table: MakeTable, deploy: Deploy, trace: Trace) -> None:
    table = make_table(6)
    table.add_columns({"y": deploy("doubling")})
    run(table)
    table.alter_columns({"y": deploy("tripling")})
    with pytest.raises(CodeChanged):
        run(table)
    run(table, on_code_change="recompute")
    assert_right(table, "y", lambda x: 3 * x)


def test_values_of_the_version_of_before_are_kept_and_the_plan_says_so_once(
    table: Table, before: pytest.MonkeyPatch, deploy: Deploy, trace: Trace
) -> None:
    run(table)
    before.undo()
    now = deploy("doubling")
    trace.clear()
    said = due_rows.renamed_code((str(now.as_written),), (now.code_version,))
    assert said in str(table.plan_backfill("y"))
    assert_nothing_to_do_is_free(table, "y", trace)
    table.add([{"id": 6, "x": 6}])
    assert said not in str(table.plan_backfill("y"))
    run(table, on_code_change="recompute")
    assert trace.rows() == [6]
    table.alter_columns({"y": now})
    assert_nothing_to_do_is_free(table, "y", trace)
    table.alter_columns({"y": deploy("tripling")})
    with pytest.raises(CodeChanged, match=f"7 rows of version {now.code_version}"):
        run(table)


def test_values_of_before_are_not_those_of_another_package(
    table: Table, before: pytest.MonkeyPatch, deploy: Deploy, trace: Trace
) -> None:
    run(table)
    before.undo()
    table.alter_columns({"y": deploy("tripling")})
    with pytest.raises(CodeChanged):
        run(table)
    with pytest.raises(CodeChanged):
        run(table, udf=deploy("tripling"))


def test_checkpoints_of_the_version_of_before_are_used(
    table: Table, before: pytest.MonkeyPatch, deploy: Deploy, trace: Trace, tmp_path: Path
) -> None:
    (tmp_path / "stop").touch()
    with pytest.raises(JobFailed):
        run(table, checkpoint_size=1)
    before.undo()
    (tmp_path / "stop").unlink()
    deploy("doubling")
    trace.clear()
    run(table)
    assert trace.rows() == [5]
    assert_right(table, "y", lambda x: 2 * x)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_a_view_keeps_the_values_of_the_version_of_before(
    make_table: MakeTable, before: pytest.MonkeyPatch, deploy: Deploy, trace: Trace
) -> None:
    table = make_table(6, per_fragment=2)
    query = table.query().select(["id"]).add_columns({"n": (deploy("doubling"), ["x"])})
    view = query.create_materialized_view(name="scaled")
    view.refresh(runner="inline")
    before.undo()
    now = deploy("doubling")
    trace.clear()
    said = due_rows.renamed_code((str(now.as_written),), (now.code_version,))
    assert said in str(view.plan_refresh())
    view.refresh(runner="inline")
    table.add([{"id": 6, "x": 6}])
    assert said not in str(view.plan_refresh())
    view.refresh(runner="inline", on_code_change="recompute")
    assert trace.rows() == [6]
    assert sorted(view.to_arrow()["n"].to_pylist()) == [2 * x for x in range(7)]
