"""Views as they are created: which placeholders, in which order, at once or not at all, and how they are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva import Database, Table, View, connect
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views import rows as placeholders
from airflow_geneva.engine.views.rows import CREATED_FROM, RowIdArray
from airflow_geneva.errors import InvalidInput
from tests.support.queries import splitmix64
from tests.udfs_for_tests import samples

MakeTable = Callable[..., Table]


def model(rows: list[tuple[int, int]], least: int, seed: int | None, limit: int | None, offset: int) -> list[int]:
    """The ids a query gives, in plain Python; rows are (row id, x)."""
    ids = sorted(row_id for row_id, x in rows if x >= least)
    if seed is not None:
        numbers = list(islice(splitmix64(next(splitmix64(seed))), max(ids, default=0) + 1))
        ids.sort(key=lambda row_id: (numbers[row_id], row_id))
    return ids[offset:] if limit is None else ids[offset : offset + limit]


def rows_of(table: Table) -> list[tuple[int, int]]:
    found = table.lance.to_table(columns=["x"], with_row_id=True)
    return list(zip(found["_rowid"].to_pylist(), found["x"].to_pylist(), strict=True))


def ids_of(view: View) -> list[int]:
    ids: list[int] = view.lance.to_table()["__source_row_id"].to_pylist()
    return ids


@given(
    values=st.lists(st.integers(0, 9), max_size=60),
    updated=st.sets(st.integers(0, 59), max_size=5),
    deleted=st.sets(st.integers(0, 59), max_size=5),
    compact=st.booleans(),
    least=st.integers(0, 10),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    limit=st.none() | st.integers(0, 70),
    offset=st.integers(0, 70),
    size=st.integers(1, 40),
)
def test_placeholders_are_the_querys_rows_in_its_order(
    values: list[int],
    updated: set[int],
    deleted: set[int],
    compact: bool,
    least: int,
    seed: int | None,
    limit: int | None,
    offset: int,
    size: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        db = connect(folder)
        data = pa.table({"id": pa.array(range(len(values)), pa.int64()), "x": pa.array(values, pa.int64())})
        table = db.create_table("docs", data, max_rows_per_file=7)
        for row in updated & set(range(len(values))):
            table.lance.update({"x": "9 - x"}, where=f"id = {row}")
        table.lance.delete(f"id IN ({','.join(map(str, [-1, *deleted]))})")
        if compact:
            table.lance.optimize.compact_files(target_rows_per_fragment=20)
        query = table.query().where(f"x >= {least}").offset(offset)
        query = query if seed is None else query.shuffle(seed)
        query = query if limit is None else query.limit(limit)
        view = query.create_materialized_view(db, "v", max_rows_per_fragment=size)
        expected = model(rows_of(table), least, seed, limit, offset)
        assert ids_of(view) == expected
        sizes = [fragment.physical_rows for fragment in view.lance.get_fragments()]
        assert sizes == [size] * (len(expected) // size) + [len(expected) % size] * bool(len(expected) % size)
        by_id = dict(rows_of(table))
        assert query.select(["x"]).to_arrow()["x"].to_pylist() == [by_id[row_id] for row_id in expected]


def database_of(table: Table) -> Database:
    return connect(Path(table.uri).parent)


def test_a_new_view_has_the_seeds_form_and_no_values(make_table: MakeTable) -> None:
    table = make_table(10)
    query = table.query().where("x > 6").add_columns({"y": (samples.double, ["x"])})
    view = query.create_materialized_view(database_of(table), "v")
    raw = view.lance
    assert raw.to_table().to_pylist() == [
        {"__source_row_id": i, "__is_set": False, "id": None, "x": None, "y": None} for i in (7, 8, 9)
    ]
    assert [field.type for field in raw.schema][:2] == [pa.int64(), pa.bool_()]
    assert (raw.version, raw.has_stable_row_ids) == (1, True)
    assert {name: value for name, value in raw.schema.metadata.items() if name != b"geneva::view::query"} == {
        b"geneva::view::base_table": b"docs",
        b"geneva::view::base_table_db_uri": os.path.dirname(table.uri).encode(),
        b"geneva::view::base_table_version": b"0",
        b"geneva::view::version": b"2",
    }
    assert raw.read_transaction(1).transaction_properties[CREATED_FROM] == str(table.version)
    # Columns without values cost no file.
    assert [list(file.fields) for fragment in raw.get_fragments() for file in fragment.metadata.files] == [[0, 1]]


def test_a_view_is_read_without_what_is_not_computed(make_table: MakeTable) -> None:
    table = make_table(10)
    made = table.query().create_materialized_view(name="v")
    view = database_of(table).open_table("v")
    assert isinstance(view, View)
    assert view == made
    assert view.to_arrow().num_rows == view.count_rows() == view.query().to_arrow().num_rows == 0
    view.lance.update({"__is_set": "true", "id": "__source_row_id", "x": "1"}, where="__source_row_id >= 8")
    assert view.to_arrow().to_pylist() == [{"id": 8, "x": 1}, {"id": 9, "x": 1}]
    assert view.schema.names == ["id", "x"]
    assert (view.count_rows(), view.count_rows("id > 8"), view.count_rows("id = 8 OR id = 9")) == (2, 1, 2)
    with pytest.raises(InvalidInput, match="The filter 'nope > 8' is not valid"):
        view.count_rows("nope > 8")
    assert view.query().where("id > 8 OR id < 0").to_arrow().to_pylist() == [{"id": 9, "x": 1}]
    assert view.source() == table


def test_a_view_on_a_view_counts_its_computed_rows_only(make_table: MakeTable) -> None:
    table = make_table(10)
    first = table.query().create_materialized_view(name="first")
    first.lance.update({"__is_set": "true", "x": "__source_row_id"}, where="__source_row_id < 4")
    second = first.query().where("x > 1 OR x < 1").create_materialized_view(name="second")
    assert second.view_definition.where == "(__is_set) AND (x > 1 OR x < 1)"
    assert [read.name for read in second.view_definition.reads] == ["__is_set", "id", "x"]
    assert len(ids_of(second)) == 3
    assert second.source() == first
    third = second.query().create_materialized_view(name="third")
    assert third.schema.names == ["id", "x"]
    assert ids_of(third) == []


def test_a_view_in_another_database_finds_its_source(make_table: MakeTable, tmp_path: Path) -> None:
    table = make_table(10)
    other = connect(tmp_path / "other")
    view = table.search(None).where("x > 3").create_materialized_view(conn=other, view_name="v")
    assert other.table_names() == ["v"]
    assert view.view_definition.source_database == str(tmp_path.resolve() / "db")
    assert view.source().count_rows() == 10


def test_columns_of_every_kind_can_be_null_and_are_not_inherited_as_computed(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("key", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"}),
            pa.field("text", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), 4)),
            pa.field("nested", pa.struct([pa.field("must", pa.int32(), nullable=False)])),
            pa.field("mapped", pa.map_(pa.string(), pa.int32())),
            pa.field("coded", pa.dictionary(pa.int32(), pa.string())),
            lance.blob_field("blob"),
        ]
    )
    row = {"key": 1, "text": "a", "vector": [0.0] * 4, "nested": {"must": 1}, "mapped": [("a", 1)], "coded": "c"}
    data = pa.table([*(pa.array([row[f.name]], f.type) for f in list(schema)[:-1]), lance.blob_array([b"b"])], schema)
    table = connect(tmp_path / "db").create_table("docs", data, data_storage_version="2.2")
    view = table.query().create_materialized_view(name="v")
    [found] = view.lance.to_table(columns=view.schema.names).to_pylist()
    assert set(found.values()) == {None}
    assert view.schema.types == table.schema.types
    table.lance.add_columns(pa.schema([pa.field("n", pa.int64(), metadata={"geneva::udf": "{}"})]))
    again = table.query().create_materialized_view(name="again")
    assert not again.schema.field("n").metadata


def test_a_source_without_stable_row_ids_makes_a_view_of_version_1_and_warns(make_table: MakeTable) -> None:
    table = make_table(10, per_fragment=5, stable=False)
    with pytest.warns(UserWarning, match="has no stable row ids, so view 'v' can only ever be refreshed to version 1"):
        view = table.query().where("x IN (1, 7)").create_materialized_view(name="v")
    assert view.view_definition.version == "1"
    assert view.lance.schema.metadata[b"geneva::view::version"] == b"1"
    assert ids_of(view) == [1, (1 << 32) + 2]


def test_a_source_with_stable_row_ids_does_not_warn(make_table: MakeTable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_table(3).query().create_materialized_view(name="v")


@pytest.mark.parametrize(
    "sql", ["now() > timestamp '2020-01-01 00:00:00'", "random() > 0.5", "x > 1 AND current_date > date '2020-01-01'"]
)
def test_a_view_has_to_come_out_the_same_whenever_it_is_computed(make_table: MakeTable, sql: str) -> None:
    table = make_table(3)
    for query in (table.query().where(sql), table.query().select({"c": sql})):
        with pytest.raises(InvalidInput, match="returns another value at every call"):
            query.create_materialized_view(name="v")
    literal = table.query().where("x < 2 AND 'now()' <> 'random()'").create_materialized_view(name="v")
    assert len(ids_of(literal)) == 2


def test_a_name_that_is_taken_is_refused_and_what_is_there_stays(make_table: MakeTable) -> None:
    table = make_table(3)
    table.query().create_materialized_view(name="v")
    for name in ("docs", "v"):
        with pytest.raises(InvalidInput, match=f"Table '{name}' already exists"):
            table.query().create_materialized_view(name=name)
    for name in ("", "a/b", None):
        with pytest.raises(InvalidInput):
            table.query().create_materialized_view(name=name)
    assert table.version == 1
    with pytest.raises(InvalidInput, match="two names for one parameter"):
        table.query().create_materialized_view(name="w", view_name="w")
    with pytest.raises(InvalidInput, match="max_rows_per_fragment=0 is not valid"):
        table.query().create_materialized_view(name="w", max_rows_per_fragment=0)


@pytest.mark.parametrize(("batch", "noticed"), [(0, True), (1, True), (1, False)])
def test_a_table_that_comes_into_being_meanwhile_is_kept(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, batch: int, noticed: bool
) -> None:
    db = database_of(make_table(3))

    def interrupted() -> Iterator[RowIdArray]:
        for number in range(2):
            if number == batch:
                db.create_table("v", pa.table({"theirs": [1, 2]}))
            yield np.arange(3)

    if not noticed:
        # It comes after the last look and before the commit.
        monkeypatch.setattr(TableLocation, "exists", lambda location: False)
    with pytest.raises(InvalidInput, match="Table 'v' already exists"):
        placeholders.create_view(db.location("v"), pa.schema([pa.field("x", pa.int64())]), interrupted(), 10, 1)
    assert db.open_table("v").to_arrow().to_pylist() == [{"theirs": 1}, {"theirs": 2}]


@pytest.mark.crash
def test_a_killed_creation_leaves_no_view_and_the_next_one_makes_it(make_table: MakeTable) -> None:
    table = make_table(10)
    script = "import sys; from airflow_geneva import connect; t = connect(sys.argv[1]).open_table('docs')"
    command = [
        sys.executable,
        "-c",
        f"{script}; t.query().create_materialized_view(name='v')",
        os.path.dirname(table.uri),
    ]
    killed = subprocess.run(command, env={**os.environ, "AIRFLOW_GENEVA_FAULT": "view.staged"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert database_of(table).table_names() == ["docs"]
    with pytest.raises(InvalidInput, match="There is no table 'v'"):
        database_of(table).open_table("v")
    subprocess.run(command, check=True)
    view = database_of(table).open_table("v")
    assert isinstance(view, View)
    assert ids_of(view) == list(range(10))


def test_what_only_its_query_may_change_is_refused(make_table: MakeTable) -> None:
    view = make_table(3).query().create_materialized_view(name="v")
    refused: list[Callable[[], object]] = [
        lambda: view.add([{"id": 1}]),
        lambda: view.rename_column("x", "y"),
        lambda: view.backfill("x", runner="inline"),
        lambda: view.plan_backfill("x"),
    ]
    for attempt in refused:
        with pytest.raises(InvalidInput, match=r"its query|cannot be renamed"):
            attempt()
    assert view.version == 1


def test_a_view_of_another_system_is_refused_by_name(make_table: MakeTable) -> None:
    table = make_table(3)
    table.lance.replace_schema_metadata({"geneva::view::query": '{"table": "users", "columns": ["id"]}'})
    view = database_of(table).open_table("docs")
    assert isinstance(view, View)
    with pytest.raises(InvalidInput, match="View 'docs' was made by another system"):
        _ = view.view_definition


def test_a_view_whose_source_was_dropped_names_both(make_table: MakeTable) -> None:
    table = make_table(3)
    view = table.query().create_materialized_view(name="v")
    database_of(table).drop_table("docs")
    with pytest.raises(InvalidInput, match=r"^View 'v' is computed from 'docs'\. There is no table 'docs' in .*: v\."):
        view.refresh(runner="inline")


def test_a_dropped_view_leaves_nothing_to_the_next_of_its_name(make_table: MakeTable) -> None:
    table = make_table(3)
    view = table.query().create_materialized_view(name="v")
    view.location.checkpoints.write_json("left/over.json", {})
    database_of(table).drop_table("v")
    assert database_of(table).table_names() == ["docs"]
    view.location.checkpoints.write_json("left/over.json", {})
    again = table.query().create_materialized_view(name="v")
    assert again.location.checkpoints.list_files() == []
    with pytest.raises(InvalidInput, match="There is no table 'w'"):
        database_of(table).drop_table("w")
