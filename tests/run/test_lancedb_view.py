"""Materialized views that LanceDB made are refreshed in its layout; `test_beside_lancedb` compares with LanceDB."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from airflow_geneva import Table, View, connect
from airflow_geneva.engine.lance_io.table_versions import written_at
from airflow_geneva.engine.run import lancedb_view
from airflow_geneva.engine.views.lancedb_query import LancedbQuery, _parse
from airflow_geneva.errors import InvalidInput
from tests.support.commands import run as run_command
from tests.udfs_for_tests import samples

QUERY = "SELECT id, x * 2 AS d, upper(t) AS `U p` FROM docs WHERE x % 2 = 0"
SCHEMA = [("id", pa.int64()), ("d", pa.int64()), ("U p", pa.string())]


def rows(start: int, count: int) -> pa.Table:
    numbers = list(range(start, start + count))
    return pa.table({"id": numbers, "x": numbers, "t": [f"t{number}" for number in numbers]})


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return connect(tmp_path).create_table("docs", rows(0, 20), max_rows_per_file=5)


def declare(table: Table, query: str = QUERY, schema: Any = SCHEMA, **definition: Any) -> View:
    """Create a view as LanceDB does, without data."""
    folder = Path(table.uri).parent
    fields = [
        *(pa.field(name, kind) for name, kind in schema),
        pa.field("__source_row_id", pa.uint64(), nullable=False),
    ]
    stored = json.dumps({"format": 1, "kind": "query", "query": query, **definition})
    empty = pa.schema(fields, {"mv.definition": stored, "mv.incarnation": "1"}).empty_table()
    lance.write_dataset(empty, str(folder / "v.lance"), enable_stable_row_ids=True, data_storage_version="2.2")
    return connect(folder).open_view("v")


def shown(view: View) -> list[dict[str, Any]]:
    return view.lance.to_table(columns=["id", "d", "U p"]).sort_by("id").to_pylist()


def queried(table: Table, version: int | None = None) -> list[dict[str, Any]]:
    columns = {"id": "id", "d": "x * 2", "U p": "upper(t)"}
    source = table.lance if version is None else table.lance.checkout_version(version)
    return source.to_table(columns=columns, filter="x % 2 = 0").sort_by("id").to_pylist()


def test_a_view_may_have_a_column_with_one_value(table: Table) -> None:
    schema = [("id", pa.int64()), ("y", pa.string())]
    view = declare(table, "SELECT id, 'constant' AS y FROM docs WHERE true", schema)
    assert view.refresh().rows_computed == 20
    assert view.lance.to_table(columns=["y"])["y"].unique().to_pylist() == ["constant"]


def test_only_rows_that_differ_are_written(table: Table) -> None:
    view = declare(table)
    first = view.refresh()
    assert (first.state, first.rows_computed, len(first.commits)) == ("DONE", 10, 2)
    assert shown(view) == queried(table)
    assert view.refresh().commits == ()
    table.add(rows(20, 4))
    table.lance.update({"x": "x + 2"}, where="id = 4")
    table.lance.update({"t": "'odd'"}, where="id = 3")
    table.lance.delete("id IN (6, 7)")
    changed = view.refresh()
    assert (changed.rows_computed, changed.rows_run) == (3, 6)
    assert shown(view) == queried(table)
    about = view.lance.schema.metadata
    assert about[b"mv.source_version"] == str(table.version).encode()
    assert about[b"mv.source_version_ts"] == str(written_at(table.lance)).encode()
    assert about[b"mv.view_version"] == str(view.version).encode()
    assert about[b"mv.incarnation"] == b"1"


def test_a_view_that_loses_all_rows_is_noted_as_it_is(table: Table) -> None:
    view = declare(table)
    view.refresh()
    table.lance.delete("true")
    assert len(view.refresh().commits) == 2
    assert shown(view) == []
    assert view.refresh().commits == ()
    table.add(rows(20, 4))
    assert view.refresh().rows_computed == 2


def test_a_compaction_and_other_columns_write_no_rows(table: Table) -> None:
    view = declare(table)
    view.refresh()
    table.lance.optimize.compact_files()
    assert view.refresh().rows_computed == 0
    table.lance.add_columns({"more": "x + 1"})
    assert (again := view.refresh()).rows_run == 0
    assert len(again.commits) == 1
    view.lance.optimize.compact_files()
    assert view.refresh().rows_computed == 0
    assert shown(view) == queried(table)


def test_values_that_a_backfill_replaced_are_followed(table: Table) -> None:
    table.add_columns({"n": (samples.length, ["t"])})
    view = declare(table, "SELECT id, n AS d, upper(t) AS `U p` FROM docs WHERE n IS NULL OR n > 2")
    view.refresh()
    for where in ("id < 7", None):
        table.backfill("n", where=where, runner="inline")
        assert view.refresh().rows_run <= 15
        columns = {"id": "id", "d": "n", "U p": "upper(t)"}
        wanted = table.lance.to_table(columns=columns, filter="n IS NULL OR n > 2").sort_by("id").to_pylist()
        assert shown(view) == wanted


def test_a_column_that_is_called_like_a_function_of_the_query_may_be_added(table: Table) -> None:
    view = declare(table)
    view.refresh()
    table.lance.add_columns({"upper": "'x'"})
    assert view.refresh().rows_computed == 0


def test_a_source_that_was_made_again_is_followed(table: Table) -> None:
    view = declare(table)
    view.refresh()
    database = connect(Path(table.uri).parent)
    database.drop_table("docs")
    again = database.create_table("docs", rows(6, 20), max_rows_per_file=5)
    view.refresh()
    assert shown(view) == queried(again)


def test_a_restore_and_an_earlier_version_are_followed(table: Table) -> None:
    view = declare(table)
    before = table.version
    table.lance.delete("id < 3")
    table.lance.update({"x": "x + 2"}, where="id = 8")
    view.refresh()
    table.lance.checkout_version(before).restore()
    assert view.refresh().rows_computed == 3
    assert shown(view) == queried(table)
    view.refresh(src_version=before + 2)
    assert shown(view) == queried(table, before + 2)


def test_rows_that_others_changed_or_doubled_are_put_right(table: Table) -> None:
    view = declare(table)
    view.refresh()
    doubled = view.lance.to_table().slice(0, 3)
    lance.write_dataset(doubled, view.uri, mode="append")
    view.lance.delete("id = 18")
    view.lance.update({"d": "7"}, where="id = 16")
    assert view.refresh().rows_computed == 2
    assert shown(view) == queried(table)


@pytest.mark.parametrize("empty", [True, False])
def test_two_refreshes_at_a_time_add_no_row_twice(table: Table, monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    view = declare(table)
    if not empty:
        view.refresh()
        table.add(rows(20, 4))
    original = lancedb_view.without_rows

    def others_first(*given: Any) -> Any:
        monkeypatch.setattr(lancedb_view, "without_rows", original)
        view.refresh()
        return original(*given)

    monkeypatch.setattr(lancedb_view, "without_rows", others_first)
    view.refresh()
    assert shown(view) == queried(table)
    assert view.refresh().commits == ()
    if not empty:
        for version in range(1, view.version + 1):
            ids = view.lance.checkout_version(version).to_table()["id"].to_pylist()
            assert len(ids) == len(set(ids))


def test_a_process_that_ends_between_the_two_commits_leaves_a_view_that_the_next_refresh_completes(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = declare(table)
    with monkeypatch.context() as patched:
        patched.setattr(lancedb_view, "_note", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            view.refresh()
    assert shown(view) == queried(table)
    assert view.refresh().rows_computed == 0
    assert view.refresh().commits == ()


def test_searches_by_an_index_find_new_rows_and_no_old_ones(table: Table) -> None:
    view = declare(table)
    view.refresh()
    view.lance.create_scalar_index("d", "BTREE")
    table.lance.update({"x": "100"}, where="id = 4")
    table.add(rows(20, 4))
    view.refresh()
    found = view.lance.to_table(columns=["id"], filter="d IN (8, 40, 200)").column("id").to_pylist()
    assert sorted(found) == [4, 20]


@pytest.mark.parametrize("seed", range(4))
def test_a_view_equals_its_query_after_any_history(table: Table, seed: int) -> None:
    chance, view = random.Random(seed), declare(table)
    for step in range(12):
        number = chance.randrange(9)
        changes: list[Any] = [
            lambda: table.add(rows(100 * (step + 1), chance.randint(1, 6))),  # noqa: B023
            lambda: table.lance.update({"x": "x + 1"}, where=f"id % 5 = {number % 5}"),  # noqa: B023
            lambda: table.lance.update({"t": "concat(t, '!')"}, where=f"id % 7 = {number % 7}"),  # noqa: B023
            lambda: table.lance.delete(f"id % 11 = {number}"),  # noqa: B023
            lambda: table.lance.optimize.compact_files(),
            lambda: view.lance.optimize.compact_files(),
            lambda: table.lance.checkout_version(chance.randint(1, table.version)).restore(),
        ]
        for change in chance.sample(changes, chance.randint(0, 3)):
            change()
        view.refresh()
        assert shown(view) == queried(table), step


@pytest.mark.parametrize(
    ("query", "definition"),
    [
        ("SELECT id, count(x) AS d, t AS `U p` FROM docs GROUP BY id", {"format": 2}),
        ("SELECT id, x AS d, t AS `U p` FROM docs LIMIT 3", {}),
        ("SELECT id, x AS d, a AS `U p` FROM docs, UNNEST(l) AS a", {}),
        ("SELECT id, x AS d, t AS `U p` FROM ns.docs", {}),
        ("SELECT id, x AS d FROM docs", {}),
        ("SELECT * FROM docs", {}),
        ("SELECT DISTINCT id AS id, x AS d, t AS `U p` FROM docs", {}),
        (QUERY, {"format": 5}),
        (QUERY, {"kind": "dedup"}),
    ],
)
def test_another_query_is_refused_by_name(table: Table, query: str, definition: dict[str, Any]) -> None:
    view = declare(table, query, **definition)
    with pytest.raises(
        InvalidInput, match="Table 'v' is a materialized view of LanceDB that only LanceDB refreshes: SEL"
    ):
        view.refresh()
    assert view.version == 1


@pytest.mark.parametrize("query", [QUERY, "SELECT id, id AS d, t AS `U p` FROM docs WHERE x % 2 = 0"])
def test_a_view_whose_column_was_dropped_is_not_said_to_be_refreshed(table: Table, query: str) -> None:
    view = declare(table, query)
    view.refresh()
    version = view.version
    table.drop_columns(["x"])
    with pytest.raises(
        InvalidInput, match=r"View 'v' of LanceDB cannot be refreshed here: x .* from table 'docs': .* x"
    ):
        view.refresh()
    assert view.version == version


def test_an_expression_that_pylance_does_not_know_is_refused(table: Table) -> None:
    view = declare(table, "SELECT id, CASE WHEN x > 1 THEN 1 END AS d, t AS `U p` FROM docs")
    with pytest.raises(InvalidInput, match=r"cannot be refreshed here: CASE WHEN .* refresh the view by LanceDB"):
        view.refresh()
    assert view.version == 1


def test_values_that_no_longer_fit_the_view_are_refused(table: Table) -> None:
    view = declare(table, schema=[("id", pa.int8()), *SCHEMA[1:]])
    view.refresh()
    table.add(rows(1_000, 2))
    with pytest.raises(
        InvalidInput, match=r"column 'id' of the view, which is int8, are now int64: .* Create the view"
    ):
        view.refresh()
    assert len(shown(view)) == 10


@pytest.mark.parametrize(
    ("text", "columns", "where"),
    [
        ("SELECT a FROM t", {"a": "a"}, None),
        ("SELECT `B b` FROM t", {"B b": "`B b`"}, None),
        ("SELECT s.a AS f, x AS `From` FROM t", {"f": "s.a", "From": "x"}, None),
        ("SELECT 'a, FROM' AS q FROM t WHERE a = ' LIMIT '", {"q": "'a, FROM'"}, "a = ' LIMIT '"),
        ("SELECT a IS DISTINCT FROM b AS q FROM t", {"q": "a IS DISTINCT FROM b"}, None),
        ("SELECT CAST(a AS DOUBLE) AS q, l[1] AS r FROM t", {"q": "CAST(a AS DOUBLE)", "r": "l[1]"}, None),
        ("SELECT coalesce(a, b) AS q FROM t WHERE a IN (1, 2)", {"q": "coalesce(a, b)"}, "a IN (1, 2)"),
        ("SELECT a AS `x``y` FROM `t`", {"x`y": "a"}, None),
    ],
)
def test_a_query_is_split_into_its_parts(text: str, columns: dict[str, str], where: str | None) -> None:
    assert _parse(text) == LancedbQuery("t", columns, where)


def test_the_command_refreshes_it(table: Table) -> None:
    view = declare(table)
    assert "10 rows computed" in run_command("refresh", str(Path(table.uri).parent), "v")
    assert shown(view) == queried(table)


def test_all_else_is_refused_by_name(table: Table) -> None:
    view = declare(table)
    view.refresh()
    assert view.to_arrow().num_rows == 10
    assert "a view of LanceDB: SELECT id" in repr(view)
    for call in (view.plan_refresh, view.refresh_async, view.source, lambda: view.add(rows(0, 1))):
        with pytest.raises(InvalidInput, match=r"db\.open_view\('v'\)\.refresh\(\), in a DAG in a @task"):
            call()
    with pytest.raises(InvalidInput, match="refreshed in this process"):
        view.refresh(runner="spark")
    unstable = connect(Path(table.uri).parent).create_table("other", rows(0, 2), enable_stable_row_ids=False)
    assert not unstable.lance.has_stable_row_ids
    (Path(table.uri).parent / "v.lance").rename(Path(table.uri).parent / "gone")
    with pytest.raises(InvalidInput, match="Table 'other' has no stable row ids"):
        declare(table, QUERY.replace("docs", "other")).refresh()
