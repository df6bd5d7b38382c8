"""Values that others computed are loaded by key, through the same plan, checkpoints and commits as a backfill."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs as pfs
import pyarrow.parquet as pq
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.load import join, stores
from airflow_geneva.engine.load.request import LoadRequest, plan_from
from airflow_geneva.engine.load.source import open_source
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table
from tests.support.tables import MakeTable

VECTOR = pa.list_(pa.float32(), 3)


def rows(table: Table, *columns: str) -> list[dict[str, Any]]:
    return table.lance.to_table(columns=["id", *columns]).sort_by("id").to_pylist()


def source(ids: list[int | None], **columns: Any) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), **columns})


def captions(ids: list[int | None]) -> pa.Table:
    return source(ids, caption=[f"c{one}" for one in ids], vector=pa.array([[one or 0] * 3 for one in ids], VECTOR))


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    return make_table(40, per_fragment=10)


def test_columns_that_are_not_there_are_made_and_filled_by_one_file_a_fragment(table: Table) -> None:
    result = table.load_columns(captions(list(range(5, 40))), on="id", runner="inline")
    assert (result.state, result.rows_loaded, result.rows_missing, result.rows_skipped) == ("DONE", 35, 5, 0)
    assert table.schema.field("vector").type == VECTOR
    found = rows(table, "caption", "vector")
    assert found[4] == {"id": 4, "caption": None, "vector": None}
    assert found[39] == {"id": 39, "caption": "c39", "vector": [39.0] * 3}
    fields = [field.id() for field in table.lance.lance_schema.fields()][-2:]
    files = [list(file.fields) for fragment in table.lance.get_fragments() for file in fragment.metadata.files]
    assert sum(fields == one[:2] for one in files) >= 4 or sum(set(fields) <= set(one) for one in files) == 4


def test_a_second_delivery_writes_only_the_fragments_whose_values_differ(table: Table) -> None:
    table.load_columns(captions(list(range(40))), on="id", runner="inline")
    before, version = [f.metadata.files[-1].path for f in table.lance.get_fragments()], table.version
    again = table.load_columns(captions(list(range(40))), on="id", runner="inline")
    assert (again.rows_loaded, again.rows_skipped, again.commits, table.version) == (0, 40, (), version)
    changed = captions(list(range(40))).to_pylist()
    changed[25]["caption"] = "other"
    result = table.load_columns(pa.Table.from_pylist(changed, schema=captions([1]).schema), on="id", runner="inline")
    after = [f.metadata.files[-1].path for f in table.lance.get_fragments()]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, True]
    assert (result.rows_loaded, rows(table, "caption")[25]["caption"]) == (1, "other")


@pytest.mark.parametrize("columns", [("x", "c"), ("c", "x"), ("d", "c"), ("c", "d"), None])
def test_columns_are_loaded_in_any_order(table: Table, columns: tuple[str, ...] | None) -> None:
    table.lance.add_columns(pa.schema([pa.field("c", pa.int64()), pa.field("d", pa.int64())]))
    given = source([3], d=[30], c=[20], x=[10])
    result = table.load_columns(given, on="id", columns=columns, runner="inline")
    assert (result.state, result.rows_loaded) == ("DONE", 1)
    expected = (
        {"x": 10, "c": 20, "d": 30}
        if columns is None
        else {name: {"x": 10, "c": 20, "d": 30}[name] for name in columns}
    )
    assert rows(table, *expected)[3] == {"id": 3, **expected}


def wide(table: Table) -> Table:
    """Return a table whose data files hold several columns: `id`, `a`, `b` and the row's number in `s.n`."""
    count = table.count_rows()
    data = {"id": range(count), "a": ["old"] * count, "b": [2.5] * count, "s": [{"n": one} for one in range(count)]}
    return connect(table.location.database_uri).create_table("wide", pa.table(data), max_rows_per_file=10)


@pytest.mark.parametrize("columns", [("a", "c"), ("c", "a"), ("c", "s", "d"), ("a", "b", "s", "c")])
def test_a_column_beside_others_in_its_file_is_loaded_together_with_a_new_one(
    table: Table, columns: tuple[str, ...]
) -> None:
    """Lance replaces columns of which a fragment has none, or all, but not a mixture."""
    table, ids = wide(table), list(range(5, 40))
    new = {
        "a": [f"a{one}" for one in ids],
        "b": [float(one) for one in ids],
        "c": [{"x": one} for one in ids],
        "d": ids,
        "s": [{"n": -one} for one in ids],
    }
    before = rows(table, "a", "b", "s")
    table.lance.create_scalar_index("a", "BTREE")
    given = source(ids, **{name: new[name] for name in columns})
    result = table.load_columns(given, on="id", columns=columns, runner="inline")
    assert (result.state, result.rows_loaded, result.rows_missing, len(result.commits)) == ("DONE", 35, 5, 1)
    expected = [
        {
            **dict.fromkeys(columns),
            **old,
            **({} if one < 5 else {name: new[name][one - 5] for name in columns}),
        }
        for one, old in enumerate(before)
    ]
    assert rows(table, *expected[0].keys() - {"id"}) == expected
    for value in ("old", "a7"):
        found = table.lance.to_table(columns=["id"], filter=f"a = '{value}'")["id"].to_pylist()
        assert sorted(found) == [row["id"] for row in expected if row["a"] == value]
    table.lance.validate()
    changed = table.lance.to_table(columns=["_row_last_updated_at_version"], filter="id = 17")
    assert changed.column(0).to_pylist() == [result.commits[0]]
    again = table.load_columns(given, on="id", columns=columns, runner="inline")
    assert (again.rows_loaded, again.rows_skipped, again.commits) == (0, 35, ())


@pytest.mark.parametrize("change", ["append", "delete", "update", "other column"])
def test_what_others_write_while_such_columns_are_loaded_stays(
    table: Table, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = wide(table)
    table.lance.add_columns(pa.field("e", pa.int64()))
    changes = {
        "append": lambda: table.add(pa.table({"id": [40], "a": ["new"]})),
        "delete": lambda: table.lance.delete("id in (7, 8)"),
        "update": lambda: table.lance.update({"b": "7.5"}, where="id = 7"),
        "other column": lambda: table.load_columns(source([7], e=[70]), on="id", runner="inline"),
    }

    def meanwhile(at: str) -> None:
        if at == "commit.before" and changes:
            act = changes.pop(change)
            changes.clear()
            act()

    monkeypatch.setattr("airflow_geneva.engine.lance_io.table_versions.fault_point", meanwhile)
    given = source(list(range(40)), a=[f"a{one}" for one in range(40)], c=list(range(40)))
    result = table.load_columns(given, on="id", runner="inline")
    assert (result.state, result.rows_left) == ("DONE", 0)
    found = {row["id"]: row for row in rows(table, "a", "b", "c", "e")}
    plain = {one: {"id": one, "a": f"a{one}", "b": 2.5, "c": one, "e": None} for one in range(40)}
    if change == "append":
        plain[40] = {"id": 40, "a": "new", "b": None, "c": None, "e": None}
    elif change == "delete":
        del plain[7], plain[8]
    elif change == "update":
        plain[7]["b"] = 7.5
    else:
        plain[7]["e"] = 70
    assert found == plain
    table.lance.validate()


def test_a_loaded_column_that_rows_added_since_lack_is_loaded_again_with_another(table: Table) -> None:
    table = wide(table)
    table.load_columns(source([1, 2], c=[1, 2]), on="id", runner="inline")
    table.add(pa.table({"id": [40], "a": ["new"]}))
    result = table.load_columns(source([1, 40], a=["x", "y"], c=[10, 400]), on="id", runner="inline")
    assert (result.state, result.rows_loaded) == ("DONE", 2)
    found = rows(table, "a", "c")
    assert (found[1], found[40]) == ({"id": 1, "a": "x", "c": 10}, {"id": 40, "a": "y", "c": 400})


@pytest.mark.parametrize("format", ["parquet", "csv", "jsonl", "lance", "folder", "glob"])
def test_files_and_tables_are_sources(table: Table, tmp_path: Path, format: str) -> None:
    data = source([3, 1, 2], caption=["x3", "x1", "x2"])
    place: Any = tmp_path / f"values.{format}"
    if format == "csv":
        pyarrow.csv.write_csv(data, place)
    elif format == "jsonl":
        place.write_text("\n".join(json.dumps(row) for row in data.to_pylist()))
    elif format == "lance":
        place = connect(tmp_path).create_table("values", data)
    elif format in ("folder", "glob"):
        (tmp_path / "in").mkdir()
        pq.write_table(data.slice(0, 2), tmp_path / "in" / "a.parquet")
        pq.write_table(data.slice(2), tmp_path / "in" / "b.parquet")
        (tmp_path / "in" / "_SUCCESS").touch()
        place = tmp_path / "in" if format == "folder" else str(tmp_path / "in" / "*.parquet")
    else:
        pq.write_table(data, place)
    assert table.load_columns(place, on="id", runner="inline").rows_loaded == 3
    assert [row["caption"] for row in rows(table, "caption")[:5]] == [None, "x1", "x2", "x3", None]


@pytest.mark.slow
def test_a_view_is_a_source_of_its_computed_rows_and_not_of_its_system_columns(make_table: MakeTable) -> None:
    table = make_table(4)
    given = connect(table.location.database_uri).create_table("given", source([1, 2, 3], caption=["x1", "x2", "x3"]))
    view = given.query().where("id > 1").create_materialized_view(connect(table.location.database_uri), "some")
    view.refresh(runner="inline")
    given.add(source([4, 0], caption=["x4", "x0"]))
    for _ in table.load_columns(view, on="id", runner="inline"), table.load_columns(view.uri, on="id", runner="inline"):
        assert table.schema.names == ["id", "x", "caption"]
        assert [row["caption"] for row in rows(table, "caption")] == [None, None, "x2", "x3"]


@pytest.mark.parametrize("format", ["parquet", "csv"])
@pytest.mark.parametrize("lacking", ["id", "caption"])
def test_a_file_that_lacks_a_column_of_the_first_one_is_refused_before_values_are_lost(
    make_table: MakeTable, tmp_path: Path, format: str, lacking: str
) -> None:
    table = make_table(3, caption=["a", "b", "c"])
    (tmp_path / "in").mkdir()
    write = {"csv": pyarrow.csv.write_csv, "parquet": pq.write_table}[format]
    write(source([1], caption=["x1"]), tmp_path / "in" / f"1.{format}")
    write(source([2], caption=["x2"]).drop_columns([lacking]), tmp_path / "in" / f"2.{format}")
    with pytest.raises((InvalidInput, JobFailed), match=rf"2\.{format}' has no column '{lacking}', which the first"):
        table.load_columns(tmp_path / "in", on="id", runner="inline")
    assert [row["caption"] for row in rows(table, "caption")] == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["csv", "json"])
def test_texts_of_several_lines_and_of_megabytes_are_read_from_csv_and_json(
    make_table: MakeTable, tmp_path: Path, format: str
) -> None:
    table, place = make_table(2_000, per_fragment=1_000), tmp_path / f"values.{format}"
    texts = ["a" * 3_000_000, *("\n".join(f"{row} {line}, x" for line in range(90)) for row in range(1, 2_000))]
    with place.open("w", newline="") as file:
        if format == "csv":
            csv.writer(file).writerows([("id", "caption"), *enumerate(texts)])
        else:
            file.writelines(json.dumps({"id": row, "caption": text}) + "\n" for row, text in enumerate(texts))
    assert table.load_columns(place, on="id", runner="inline").rows_loaded == 2_000
    assert [row["caption"] for row in rows(table, "caption")] == texts


@pytest.mark.parametrize("format", ["csv", "json"])
def test_files_without_a_byte_have_no_rows(table: Table, tmp_path: Path, format: str) -> None:
    text = {"csv": "id,caption\n3,three\n", "json": '{"id": 3, "caption": "three"}\n'}[format]
    for name, content in (("0", ""), ("1", text), ("2", "")):
        (tmp_path / f"{name}.{format}").write_text(content)
    assert table.load_columns(tmp_path / f"*.{format}", on="id", runner="inline").rows_loaded == 1
    with pytest.raises(InvalidInput, match="Cannot read"):
        table.load_columns(tmp_path / f"0.{format}", on="id", runner="inline")


def test_fields_that_only_a_later_file_or_the_last_line_of_json_has_are_not_lost(
    make_table: MakeTable, tmp_path: Path
) -> None:
    table = make_table(4)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"id": 1, "caption": "x1"}\n')
    (tmp_path / "in" / "2.json").write_text('{"id": 2}\n{"id": 3, "caption": "x3"}')
    table.load_columns(tmp_path / "in", on="id", runner="inline")
    assert [row["caption"] for row in rows(table, "caption")] == [None, "x1", None, "x3"]


@pytest.mark.parametrize("format", ["csv", "json"])
def test_numbers_of_texts_that_a_double_would_round_are_exact(tmp_path: Path, format: str) -> None:
    keys, price = [2**63 + 1, 2**63 + 3, 5], Decimal("12345678901234567.89")
    data = pa.table({"id": pa.array(keys, pa.uint64()), "price": pa.nulls(3, pa.decimal128(20, 2))})
    table, place = connect(tmp_path).create_table("docs", data), tmp_path / f"values.{format}"
    given = list(zip((*keys[:2], "5.0"), (price, price, "0.1"), strict=True))
    lines = [f"{key},{value}" if format == "csv" else f'{{"id": {key}, "price": {value}}}' for key, value in given]
    place.write_text("\n".join([*(["id,price"] if format == "csv" else []), *lines]))
    table.load_columns(place, on="id", runner="inline")
    assert [row["price"] for row in rows(table, "price")] == [Decimal("0.1"), price, price]


def test_several_keys_and_keys_without_a_value(make_table: MakeTable) -> None:
    table = make_table(4, kind=pa.array(["a", "b", None, "a"]))
    given = source([0, 0, 2, 3], kind=["a", "b", None, "a"], score=[1.5, 2.5, 3.5, 4.5])
    result = table.load_columns(given, on=["id", "kind"], columns=["score"], runner="inline")
    assert (result.rows_loaded, result.rows_missing) == (2, 2)
    assert [row["score"] for row in rows(table, "score")] == [1.5, None, None, 4.5]


@pytest.mark.parametrize(("on_missing", "left"), [("keep", "c7"), ("null", None)])
def test_rows_without_a_match_keep_or_lose_their_values(table: Table, on_missing: str, left: str | None) -> None:
    table.load_columns(captions(list(range(40))), on="id", runner="inline")
    result = table.load_columns(
        source([1], caption=["new"]), on="id", columns=["caption"], on_missing=on_missing, runner="inline"
    )
    assert result.rows_missing == 39
    found = rows(table, "caption", "vector")
    assert (found[1]["caption"], found[7]["caption"], found[7]["vector"]) == ("new", left, [7.0] * 3)


def test_missing_keys_stop_a_load_before_anything_is_written(table: Table) -> None:
    version = table.version
    ids: list[int | None] = [one for one in range(40) if one not in (3, 7)]
    with pytest.raises(InvalidInput, match=r"2 rows of the table have keys that .* lacks, such as id=3; id=7"):
        table.load_columns(captions(ids), on="id", on_missing="error", runner="inline")
    assert (table.version, "caption" in table.schema.names) == (version, False)


def test_duplicates_are_listed_or_one_of_them_counts(table: Table) -> None:
    twice = source([1, 2, 1, 2, 3, None, None], caption=["a", "b", "c", "d", "e", "f", "g"])
    with pytest.raises(InvalidInput, match=r"id=1 \(2 rows\); id=2 \(2 rows\)"):
        table.load_columns(twice, on="id", runner="inline")
    assert "caption" not in table.schema.names
    for which, expected in (("first", ["a", "b", "e"]), ("last", ["c", "d", "e"])):
        result = table.load_columns(twice, on="id", on_duplicate=which, runner="inline")
        assert [row["caption"] for row in rows(table, "caption")[1:4]] == expected
        assert f"2 keys of the source have several rows; the {which} counts." in result.notes


def test_where_chooses_the_rows_of_the_table(table: Table) -> None:
    result = table.load_columns(captions(list(range(40))), on="id", where="id < 12", runner="inline")
    assert (result.rows_loaded, result.rows_skipped) == (12, 28)
    assert [row["caption"] is None for row in rows(table, "caption")] == [False] * 12 + [True] * 28


TWICE = pa.Table.from_arrays([pa.array([1]), pa.array(["a"]), pa.array(["b"])], names=["id", "caption", "caption"])


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("nowhere.parquet", {}, "There is no file at"),
        ("/etc/hostname", {}, "format .* is not known"),
        (source([1], caption=["x"]), {"on": "key"}, "the key 'key' is not in"),
        (source([1], caption=["x"]), {"columns": ["other"]}, "a column to load 'other' is not in"),
        (source([1], caption=["x"]), {"columns": ["id"]}, "are keys"),
        (source([1], caption=["x"]), {"on_missing": "drop"}, "on_missing='drop' is unknown"),
        (source([1], caption=["x"]), {"on_duplicate": "any"}, "on_duplicate='any' is unknown"),
        (source([1], caption=["x"]), {"where": "nothing ="}, "The filter 'nothing =' is not valid"),
        (source([1], x=["text"]), {}, "is int64, and string in the source"),
        (pa.table({"id": ["1"], "caption": ["x"]}), {}, "The key 'id' is int64 in table"),
        (source([1], caption=["x"]), {"adopt": True}, "adopt=True is for computed columns"),
        (source([1], _rowid=["x"]), {}, "cannot be the name of a column"),
        (
            source([1], x=pa.array([[1]], pa.list_view(pa.int8()))),
            {"on": "id"},
            "'x' of table 'docs' is int64, and list_v",
        ),
        (source([1], v=pa.array([[1]], pa.list_view(pa.int8()))), {}, "'v' of table 'docs' cannot be list_view"),
        (source([1]), {}, "the rows that were given has no column but the keys"),
        (TWICE, {}, "the rows that were given has several columns 'caption'"),
        (TWICE, {"on": "caption"}, "the rows that were given has several columns 'caption'"),
        ("https://host/values.parquet", {}, "Cannot read https://host/values.parquet: .* Check the files"),
        (pa.table({"id": [1.5], "caption": ["x"]}), {}, "^Values of column 'id' .* cannot be loaded as int64: [^\n]*$"),
    ],
)
def test_what_does_not_fit_is_said_before_any_work(
    make_table: MakeTable, given: Any, options: dict[str, Any], message: str
) -> None:
    table = make_table(4, **({"caption": list("abcd")} if given is TWICE else {}))
    version = table.version
    with pytest.raises(InvalidInput, match=message):
        table.load_columns(given, **{"on": "id", "runner": "inline", **options})
    assert table.version == version


def test_without_duckdb_a_load_in_this_process_stops_before_any_work_and_says_what_to_install(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    version = table.version
    with pytest.raises(InvalidInput, match=r"pip install 'airflow-geneva\[load\]'\. .* runner=\"spark\" does both"):
        table.load_columns(captions([1]), on="id", runner="inline")
    assert table.version == version


calls: list[int] = []


@udf(version="1")
def doubled(x: int) -> int:
    calls.append(x)
    return 2 * x


def test_a_computed_column_is_loaded_only_as_its_functions_values(table: Table) -> None:
    calls.clear()
    table.add_columns({"y": doubled})
    given = source(list(range(30)), y=[2 * one for one in range(30)])
    with pytest.raises(InvalidInput, match="adopt=True"):
        table.load_columns(given, on="id", runner="inline")
    assert table.load_columns(given, on="id", adopt=True, runner="inline").rows_loaded == 30
    result = table.backfill("y", runner="inline")
    assert (result.rows_computed, sorted(calls)) == (10, list(range(30, 40)))
    table.lance.update({"x": "100"}, where="id = 3")
    table.lance.optimize.compact_files()
    assert table.backfill("y", runner="inline").rows_computed == 1
    assert rows(table, "y")[3]["y"] == 200


def test_values_that_are_there_already_count_as_computed_when_they_are_adopted(table: Table) -> None:
    calls.clear()
    given = source(list(range(40)), y=[2 * one for one in range(40)])
    table.add_columns({"y": doubled})
    table.lance.update({"y": "2 * x"})
    version = table.version
    assert table.load_columns(given, on="id", adopt=True, runner="inline").commits == ()
    assert table.version == version
    assert table.backfill("y", runner="inline").rows_computed == 0
    assert calls == []


def test_a_backfill_refuses_a_loaded_column_by_name(table: Table) -> None:
    table.load_columns(captions(list(range(40))), on="id", runner="inline")
    with pytest.raises(InvalidInput, match="Column 'caption' of table 'docs' has no UDF"):
        table.backfill("caption", runner="inline")


def test_types_that_joins_do_not_know_come_through(make_table: MakeTable) -> None:
    table = make_table(5)
    half = pa.array(np.array([0, 1, 2.5, 3, 4], np.float16))
    given = source(
        list(range(5)),
        half=half,
        when=pa.array([1, 2, None, 4, 5], pa.timestamp("us", "UTC")),
        parts=pa.array([[{"a": 1}], [], None, [{"a": None}], [{"a": 5}]], pa.list_(pa.struct({"a": pa.int32()}))),
        raw=pa.array([b"\0", b"", None, b"x", b"y"], pa.large_binary()),
    )
    table.load_columns(given, on="id", runner="inline")
    assert table.lance.to_table(columns=given.schema.names).sort_by("id").to_pylist() == given.to_pylist()


def test_deleted_and_moved_rows(table: Table) -> None:
    table.lance.delete("id = 4 or id = 39")
    table.lance.update({"x": "7"}, where="id = 8")
    table.load_columns(captions(list(range(40))), on="id", runner="inline")
    assert [row["caption"] for row in rows(table, "caption")] == [f"c{one}" for one in range(40) if one not in (4, 39)]


def begun(table: Table, given: Any) -> tuple[Plan, PlannedJob]:
    """A load whose fragments are staged, and not yet committed."""
    plan = plan_from(table.location, LoadRequest(given, "id"))
    job = PlannedJob(table.location, record_plan(plan, table.location), opened=plan.opened)
    for shard in plan.shards:
        job.apply(shard, Udfs({}))
    return plan, job


def committed(plan: Plan, job: PlannedJob) -> BackfillResult:
    return job.finish([job.commit(shard) for shard in plan.shards])


def test_rows_whose_keys_change_during_a_load_are_left(table: Table) -> None:
    plan, job = begun(table, captions(list(range(40))))
    table.lance.update({"id": "id + 100"}, where="id in (3, 25)")
    result = committed(plan, job)
    assert (result.state, result.rows_loaded, result.rows_left) == ("PARTIAL", 38, 2)
    assert [row["caption"] for row in rows(table, "caption")] == [
        *(f"c{one}" for one in range(40) if one not in (3, 25)), None, None
    ]  # fmt: skip


def test_rows_that_are_moved_or_deleted_during_a_load_get_their_values(table: Table) -> None:
    plan, job = begun(table, captions(list(range(40))))
    table.lance.update({"x": "-x"}, where="id in (3, 25)")
    table.lance.delete("id = 7")
    table.lance.optimize.compact_files()
    result = committed(plan, job)
    assert (result.state, result.rows_loaded, result.rows_left) == ("DONE", 39, 0)
    assert [row["caption"] for row in rows(table, "caption")] == [f"c{one}" for one in range(40) if one != 7]


@pytest.mark.parametrize(
    ("change", "loaded", "missing", "left"),
    [
        (lambda table: table.lance.optimize.compact_files(), 27, 5, 0),
        (lambda table: table.lance.delete("id in (7, 8)"), 26, 4, 0),
        (lambda table: table.lance.delete("id = 33"), 27, 4, 0),
        (lambda table: table.lance.update({"x": "-x"}, where="id in (7, 8, 33)"), 27, 5, 0),
        (lambda table: table.lance.update({"id": "id + 100"}, where="id in (7, 33)"), 27, 3, 2),
    ],
    ids=["compaction", "delete", "delete in a fragment that stays", "update of another column", "update of keys"],
)
def test_rows_without_a_match_are_counted_where_they_are_when_the_load_ends(
    table: Table, change: Callable[[Table], object], loaded: int, missing: int, left: int
) -> None:
    table.load_columns(captions(list(range(40))), on="id", runner="inline")
    given = captions([one for one in range(40) if one not in (3, 7, 15, 33, 34)])
    new = pa.array([f"n{one}" if one < 30 else f"c{one}" for one in given["id"].to_pylist()])
    plan, job = begun(table, given.set_column(1, "caption", new))
    change(table)
    result = committed(plan, job)
    assert (result.rows_loaded, result.rows_missing, result.rows_left) == (loaded, missing, left)
    assert result.state == ("PARTIAL" if left else "DONE")
    assert loaded + missing + left + result.rows_skipped == 40


def test_a_load_tells_what_it_did(table: Table) -> None:
    result = table.load_columns(captions([1]), on="id", runner="inline")
    job = connect(table.location.database_uri).job(result.job_id)
    assert (job.kind, job.column, job.columns, job.state) == ("load", "caption", ("caption", "vector"), "DONE")
    assert "the source lacks the keys of 39 rows" in str(result)


def test_files_are_read_from_where_they_are_now_and_not_from_memory(table: Table, tmp_path: Path) -> None:
    place = tmp_path / "values.parquet"
    pq.write_table(source([1], caption=["old"]), place)
    table.load_columns(place, on="id", runner="inline")
    pq.write_table(source([1], caption=["new"]), place)
    os.utime(place, (1, 1))
    assert table.load_columns(place, on="id", runner="inline").rows_loaded == 1
    assert rows(table, "caption")[1]["caption"] == "new"


def test_files_that_changed_since_the_plan_are_refused_and_those_of_a_staged_shard_may_go(
    table: Table, tmp_path: Path
) -> None:
    place = tmp_path / "in.parquet"
    pq.write_table(captions([1]), place)
    plan = plan_from(table.location, LoadRequest(place, "id"))
    job = PlannedJob(table.location, record_plan(plan, table.location), opened=plan.opened)
    pq.write_table(captions([1, 2]), place)
    with pytest.raises(InvalidInput, match=r"in\.parquet' has changed since the load was planned\. Plan it again"):
        job.apply(plan.shards[0], Udfs({}))
    plan, job = begun(table, place)
    place.unlink()
    for shard in plan.shards:
        job.apply(shard, Udfs({}))
    assert committed(plan, job).rows_loaded == 2


def test_a_lance_table_that_was_made_again_is_another_source(table: Table) -> None:
    db = connect(table.location.database_uri)
    given = db.create_table("given", source([1], caption=["old"]))
    plan, job = begun(table, given)
    db.drop_table("given")
    given = db.create_table("given", source([1], caption=["new"]))
    late = plan_from(table.location, LoadRequest(given, "id"))
    job = PlannedJob(table.location, record_plan(late, table.location), opened=late.opened)
    db.drop_table("given")
    given = db.create_table("given", source([1, 1], caption=["newer", "twice"]))
    with pytest.raises(InvalidInput, match=r"given\.lance' has changed since the load was planned"):
        job.apply(late.shards[0], Udfs({}))
    db.drop_table("given")
    given = db.create_table("given", source([1], caption=["newest"]))
    assert (plan.spec.version, given.version) == (table.version, 1)
    table.load_columns(given, on="id", runner="inline")
    assert rows(table, "caption")[1]["caption"] == "newest"


def test_blobs_of_a_source_are_refused_before_any_work(table: Table) -> None:
    blobs = pa.schema(
        [("id", pa.int64()), pa.field("raw", pa.large_binary(), metadata={"lance-encoding:blob": "true"})]
    )
    given = connect(table.location.database_uri).create_table("given", pa.table({"id": [1], "raw": [b"x"]}, blobs))
    version = table.version
    with pytest.raises(InvalidInput, match=r"Column 'raw' of .*given\.lance holds blobs"):
        table.load_columns(given, on="id", runner="inline")
    assert table.version == version


def test_a_file_whose_name_has_the_letters_of_a_glob_is_found(table: Table, tmp_path: Path) -> None:
    pq.write_table(captions([1]), tmp_path / "values[1].parquet")
    assert table.load_columns(tmp_path / "values[1].parquet", on="id", runner="inline").rows_loaded == 1


def test_keys_that_are_durations(tmp_path: Path) -> None:
    keys = pa.array([1, 2, None], pa.duration("ns"))
    table = connect(tmp_path).create_table("t", pa.table({"id": keys, "x": [1, 2, 3]}))
    table.load_columns(pa.table({"id": keys.slice(1), "y": ["b", "c"]}), on="id", runner="inline")
    assert table.lance.to_table(columns=["y"]).column("y").to_pylist() == [None, "b", None]


def test_a_source_without_rows_is_joined_by_batches_and_not_row_by_row(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = list[int]()

    def counted(batch: pa.RecordBatch, *others: Any) -> pa.RecordBatch:
        joined.append(batch.num_rows)
        return with_values(batch, *others)

    with_values = join._with_values
    monkeypatch.setattr(join, "_with_values", counted)
    assert table.load_columns(captions([]), on="id", runner="inline").rows_missing == 40
    assert joined == [40]


@pytest.mark.parametrize(
    ("kind", "fits", "given"),
    [
        (pa.decimal128(10, 2), 0.07, [1.239]),
        (pa.float16(), 0.1, [1e6]),
        (pa.float32(), 0.1, [1e300]),
        (pa.list_(pa.float32(), 2), [0.1, 2.0], [[1.0, 1e300], None]),
    ],
)
def test_values_that_arrow_would_round_or_make_infinite_are_refused(
    make_table: MakeTable, kind: pa.DataType, fits: Any, given: list[Any]
) -> None:
    table = make_table(3, v=pa.nulls(3, kind))
    values = pa.array([fits, *given], None if isinstance(fits, float) else pa.list_(pa.float64(), 2))
    table.load_columns(source([0], v=values.slice(0, 1)), on="id", runner="inline")
    before = rows(table, "v")
    assert before[0]["v"] is not None
    with pytest.raises(JobFailed, match=r"cannot be loaded as .*: Casting would round values, or make them infinite"):
        table.load_columns(source(list(range(len(values))), v=values), on="id", runner="inline")
    assert rows(table, "v") == before


def test_a_key_that_would_be_rounded_matches_nothing(tmp_path: Path) -> None:
    keys = pa.array([Decimal("1.00"), Decimal("2.30")], pa.decimal128(10, 2))
    table = connect(tmp_path).create_table("t", pa.table({"id": keys}))
    for number in pa.array([2.3]), pa.array([2.3], pa.float32()):
        table.load_columns(pa.table({"id": number, "y": ["b"]}), on="id", runner="inline")
    assert table.lance.to_table(columns=["y"]).column("y").to_pylist() == [None, "b"]
    with pytest.raises(InvalidInput, match=r"Values of column 'id' .* Casting would round values"):
        table.load_columns(pa.table({"id": [1.004], "y": ["a"]}), on="id", runner="inline")


def test_keys_of_half_precision(tmp_path: Path) -> None:
    keys = pa.array(np.array([0, 1, 2.5], np.float16))
    table = connect(tmp_path).create_table("t", pa.table({"id": keys, "x": [1, 2, 3]}))
    table.load_columns(pa.table({"id": keys.take([2, 0]), "y": ["c", "a"]}), on="id", runner="inline")
    assert table.lance.to_table(columns=["y"]).column("y").to_pylist() == ["a", None, "c"]


@pytest.mark.spark
@pytest.mark.parametrize("on_duplicate", ["error", "last"])
def test_spark_joins_and_writes_the_same(table: Table, tmp_path: Path, on_duplicate: str) -> None:
    ids: list[int | None] = [one for one in range(40) if one % 7]
    given = captions(ids).append_column("when", pa.array(ids, pa.timestamp("us", "UTC")))
    given = given.append_column("half", pa.array(np.array(ids, np.float16)))
    if on_duplicate == "last":
        given = pa.concat_tables(
            [captions(ids).set_column(1, "caption", pa.array(["old"] * len(ids))), given], promote_options="default"
        )
    place = tmp_path / "in"
    place.mkdir()
    for at in range(3):
        pq.write_table(given.slice(at * 30, 30), place / f"{at}.parquet")
    result = table.load_columns(place, on="id", on_duplicate=on_duplicate, runner="spark")
    assert (result.rows_loaded, result.rows_missing) == (34, 6)
    expected = {row["id"]: row for row in given.to_pylist()}
    names = ["caption", "vector", "when", "half"]
    for row in rows(table, *names):
        assert row == expected.get(row["id"], {"id": row["id"], **dict.fromkeys(names)})
    again = table.load_columns(place, on="id", on_duplicate=on_duplicate, where="id > 20", runner="spark")
    assert (again.rows_loaded, again.commits) == (0, ())


def test_values_that_exceed_the_memory_of_the_join_are_loaded(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_MEMORY", "30MB")
    count, width = 20_000, 768
    table = make_table(count, per_fragment=5_000)
    ids = np.random.default_rng(0).permutation(count)
    flat = np.repeat(ids.astype(np.float32), width)
    given = pa.table({"id": ids, "wide": pa.FixedSizeListArray.from_arrays(pa.array(flat), width)})
    assert table.load_columns(given, on="id", runner="inline").rows_loaded == count
    found = table.lance.to_table(columns=["id", "wide"])
    wide = found["wide"].combine_chunks().flatten().to_numpy().reshape(count, width)
    assert (wide == found["id"].to_numpy()[:, None]).all()


@pytest.mark.parametrize("name", ["1.parquet", "*.parquet", ""])
@pytest.mark.parametrize("bucket", ["gs://bucket", "abfss://bucket@account.dfs.core.windows.net"])
def test_files_of_other_stores_are_found_by_the_paths_that_arrow_gives_them(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str, name: str
) -> None:
    (tmp_path / "bucket" / "in").mkdir(parents=True)
    pq.write_table(captions([1, 2]), tmp_path / "bucket" / "in" / "1.parquet")
    store = pfs.SubTreeFileSystem(str(tmp_path), pfs.LocalFileSystem())
    given = list[str]()

    class FileSystem:
        @staticmethod
        def from_uri(uri: str) -> tuple[pfs.FileSystem, str]:
            given.append(uri)
            return store, uri

    monkeypatch.setattr(stores, "pfs", SimpleNamespace(FileSystem=FileSystem, LocalFileSystem=pfs.LocalFileSystem))
    assert table.load_columns(f"{bucket}/in/{name}", on="id", runner="inline").rows_loaded == 2
    assert {uri.partition("/in")[0] for uri in given} == {bucket}


@pytest.mark.parametrize("format", ["parquet", "lance"])
def test_wide_rows_of_a_source_are_read_in_batches_that_fit_into_the_budget(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setenv("GENEVA_TASK_MEMORY_BYTES", str(1 << 20))
    given = source(list(range(1_000)), raw=pa.array([bytes([row % 251]) * 10_000 for row in range(1_000)]))
    if format == "lance":
        place = connect(tmp_path / "in").create_table("given", given, max_rows_per_file=400).uri
    else:
        place = str(tmp_path / "given.parquet")
        pq.write_table(given, place, row_group_size=700)
    found = open_source(place, None, ())
    batches = [batch for part in range(found.parts()) for batch in found.read(part, given.schema, ())]
    assert pa.Table.from_batches(batches) == given
    assert max(batch.nbytes for batch in batches) <= 1 << 19


def test_credentials_that_would_not_be_used_are_refused_by_name(tmp_path: Path) -> None:
    options = {"google_service_account_key": "a-secret", "aws_access_key_id": "k", "aws_region": "r"}
    table = connect(tmp_path, options).create_table("docs", pa.table({"id": [1]}))
    message = r"Files at gs:// are read with .* and not with the storage options \['google_service_account_key'\]"
    with pytest.raises(InvalidInput, match=message) as refused:
        table.load_columns("gs://bucket/values.parquet", on="id", runner="inline")
    assert "a-secret" not in str(refused.value)
