"""The stored definition of a view: read back whole, compared in words, checked against a source that changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Query, Table, connect
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.engine.views.definition import OutputColumn, SourceColumn, ViewDefinition
from airflow_geneva.errors import InvalidInput
from tests.udfs_for_tests import samples


@pytest.fixture
def table(tmp_path: Path) -> Table:
    rows = {"id": range(4), "x": range(4), "text": ["a"] * 4, "unread": range(4), "st": [{"a": 1, "b": 2}] * 4}
    return connect(tmp_path / "db").create_table("docs", pa.table({k: list(v) for k, v in rows.items()}))


@pytest.fixture
def query(table: Table) -> Query:
    columns = {"id": "id", "y": "x + 1", "n": (samples.length, ["text"]), "d": (samples.double, ["y"]), "st": "st"}
    return table.query().select(columns).where("id > 0").shuffle(3).limit(10).offset(1)


def test_a_definition_is_read_back_whole(query: Query) -> None:
    definition = query.definition()
    assert ViewDefinition.from_json(definition.to_json()) == definition
    read = ViewDefinition.read({k.encode(): v.encode() for k, v in definition.metadata().items()})
    assert read == definition


def test_it_holds_what_a_refresh_needs(query: Query, tmp_path: Path) -> None:
    definition = query.definition()
    assert definition.source_table == "docs"
    assert definition.source_database == str((tmp_path / "db").resolve())
    assert (definition.source_version, definition.stable_row_ids, definition.version) == (1, True, "2")
    assert (definition.where, definition.shuffle_seed, definition.limit, definition.offset) == ("id > 0", 3, 10, 1)
    udf = definition.column("n").udf
    assert udf is not None
    assert udf.import_path == "tests.udfs_for_tests.samples:length"
    assert udf.version == samples.length.code_version
    assert [read.name for read in definition.reads] == ["id", "x", "text", "st"]
    assert definition.reads[0] == SourceColumn("id", (0,), "int64")
    assert definition.reads[-1] == SourceColumn("st", (4, 5, 6), "struct<a: int64, b: int64>")


def test_its_form_is_what_earlier_versions_wrote() -> None:
    column = OutputColumn("y", "sql", "int64", "x + 1")
    reads = (SourceColumn("x", (1,), "int64"),)
    definition = ViewDefinition("docs", "s3://b/db", 7, True, None, (column,), False, None, 5, 0, None, reads)
    assert json.loads(definition.to_json()) == {
        "made_by": "airflow_geneva",
        "format": 1,
        "source_table": "docs",
        "source_database": "s3://b/db",
        "source_version": 7,
        "stable_row_ids": True,
        "where": None,
        "columns": [{"name": "y", "kind": "sql", "type": "int64", "expression": "x + 1"}],
        "all_columns": False,
        "shuffle_seed": None,
        "limit": 5,
        "offset": 0,
        "explode": None,
        "reads": [{"name": "x", "fields": [1], "type": "int64"}],
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"table": "users", "columns": ["name"], "where": "age > 21"}', "'v' was made by another system"),
        ("\x80binary", "'v' was made by another system"),
        ("[]", "'v' was made by another system"),
        ('{"made_by": "airflow_geneva", "format": 2}', "format 2; this version of airflow-geneva reads format 1"),
        ('{"made_by": "airflow_geneva", "format": 1}', "is damaged"),
    ],
)
def test_what_this_version_did_not_write_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        ViewDefinition.from_json(text, "v")


def test_a_table_is_no_view(table: Table) -> None:
    with pytest.raises(InvalidInput, match="'docs' is not a materialized view"):
        ViewDefinition.read(table.schema.metadata, "docs")


def test_the_same_query_does_not_differ(query: Query, table: Table) -> None:
    definition = query.definition()
    table.add([{"id": 9}])
    assert definition.differences(query.definition()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q: q.where("x > 1"), "the filter is 'id > 0' and would be '(id > 0) AND (x > 1)'"),
        (lambda q: replace(q, conditions=()), "the filter is 'id > 0' and would be none"),
        (lambda q: q.shuffle(4), "the shuffle seed is 3 and would be 4"),
        (lambda q: q.limit(9), "the limit is 10 and would be 9"),
        (lambda q: q.offset(0), "the offset is 1 and would be 0"),
        (lambda q: q.add_columns({"z": "x"}), "column 'z' would be new: source column x -> int64"),
        (
            lambda q: replace(q, selected=tuple((n, s if n != "y" else "x + 2") for n, s in q.selected or ())),
            "column 'y' is SQL x + 1 -> int64 and would be SQL x + 2 -> int64",
        ),
        (
            lambda q: replace(q, selected=(q.selected or ())[::-1][:1] + (q.selected or ())[:-1]),
            "the columns are in the order id, y, n, d, st and would be in the order st, id, y, n, d",
        ),
        (lambda q: replace(q, selected=(q.selected or ())[:-1]), "column 'st' would be removed"),
        (
            lambda q: replace(
                q, selected=tuple((n, s if n != "d" else (samples.Counter, ["y"])) for n, s in q.selected or ())
            ),
            "column 'd' is UDF tests.udfs_for_tests.samples:double of (y) -> int64 and would be UDF "
            "tests.udfs_for_tests.samples:Counter of (y) -> int64",
        ),
    ],
)
def test_a_difference_is_said_in_words(query: Query, change: Callable[[Query], Query], says: str) -> None:
    assert query.definition().differences(change(query).definition()) == [says]


def test_another_code_version_is_no_difference(query: Query) -> None:
    definition = query.definition()
    udf = definition.column("n").udf
    assert udf is not None
    changed = replace(definition.column("n"), udf=replace(udf, version="other", batch_size=7))
    columns = tuple(changed if column.name == "n" else column for column in definition.columns)
    assert definition.differences(replace(definition, columns=columns)) == []


def test_columns_that_the_source_gained_are_no_difference_to_a_view_of_all(table: Table) -> None:
    definition = table.query().add_columns({"n": samples.length}).definition()
    table.lance.add_columns(pa.schema([pa.field("new", pa.int64())]))
    wanted = table.query().add_columns({"n": samples.length}).definition()
    assert definition.differences(wanted) == []
    assert definition.gained_columns(wanted) == ["new"]
    named = table.query().select(["id"]).definition()
    assert named.differences(table.query().select(["id", "new"]).definition()) != []


def test_a_source_that_changed_elsewhere_still_fits(query: Query, table: Table) -> None:
    definition = query.definition()
    table.lance.drop_columns(["unread"])
    table.lance.add_columns(pa.schema([pa.field("new", pa.int64())]))
    table.lance.optimize.compact_files()
    definition.check_source(table.lance)


def drop_and_add(table: Table) -> None:
    table.lance.drop_columns(["x"])
    table.lance.add_columns({"x": "id"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.lance.drop_columns(["x"]), "column 'x' was dropped"),
        (lambda t: t.lance.alter_columns({"path": "x", "name": "z"}), "column 'x' is now called 'z': rename it back"),
        (drop_and_add, "column 'x' was dropped and added again"),
        (
            lambda t: t.lance.drop_columns(["st.b"]),
            "column 'st' was struct<a: int64, b: int64> and is struct<a: int64>",
        ),
    ],
)
def test_a_source_that_no_longer_fits_says_what_changed(
    query: Query, table: Table, change: Callable[[Table], Any], says: str
) -> None:
    definition = query.definition()
    change(table)
    with pytest.raises(InvalidInput, match=says):
        definition.check_source(table.lance)


def test_a_column_of_another_type_no_longer_fits(query: Query, table: Table) -> None:
    definition = query.definition()
    table.lance.alter_columns({"path": "x", "data_type": pa.int32()})
    with pytest.raises(InvalidInput, match="column 'x' was"):
        definition.check_source(table.lance)


@pytest.mark.parametrize(
    ("uri", "stored"),
    [
        ("/a/path@home:1", "/a/path@home:1"),
        ("s3://bucket/db", "s3://bucket/db"),
        ("s3://key:secret@bucket/db", "s3://bucket/db"),
        ("https://host/db?sig=secret", "https://host/db"),
        ("abfss://container@account.dfs.core.windows.net/db", "abfss://container@account.dfs.core.windows.net/db"),
    ],
)
def test_a_stored_uri_has_no_credentials(uri: str, stored: str) -> None:
    assert without_credentials(uri) == stored
