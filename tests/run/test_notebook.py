"""What a notebook shows of tables, plans and results, and how it reads tables, makes them and fills several columns."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from airflow_geneva import Database, connect, udf
from airflow_geneva.engine.plan.request import BackfillOptions, SizingOptions
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from tests.support.tables import MakeTable
from tests.udfs_for_tests import samples

ROWS = {"id": [1, 2, 3], "text": ["a", None, "ccc"]}


@udf(data_type=pa.int64())
def plus(x: int) -> int:
    return x + 1


@pytest.fixture
def db(tmp_path: Path) -> Database:
    return connect(tmp_path / "library")


def stream() -> pa.RecordBatchReader:
    return pa.table(ROWS).to_reader(max_chunksize=1)


class Frame:
    """A data frame of another library, such as polars."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return stream().__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        [{"id": 1, "text": "a"}, {"id": 2}, {"text": "ccc", "id": 3}],
        pd.DataFrame(ROWS, index=[7, 8, 9]),
        pa.table(ROWS),
        stream(),
        Frame(),
        (row for row in pa.table(ROWS).to_pylist()),
    ],
    ids=["dict", "dicts", "pandas", "Arrow", "stream", "frame", "generator"],
)
def test_a_table_is_made_of_rows_in_any_form(db: Database, data: Any) -> None:
    table = db.create_table("docs", data)
    assert table.to_arrow().to_pydict() == ROWS
    assert table.schema.metadata is None


def test_a_named_index_of_pandas_is_a_column(db: Database) -> None:
    frame = pd.DataFrame({"x": [1, 2]}, index=pd.Index(["a", "b"], name="key"))
    assert db.create_table("docs", frame).to_arrow().to_pydict() == {"x": [1, 2], "key": ["a", "b"]}


def test_a_schema_gives_types_and_fields_that_the_values_do_not(db: Database) -> None:
    vectors = pa.schema([pa.field("v", pa.list_(pa.float32(), 2), metadata={"unit": "m"}), ("n", pa.int16())])
    for name, data in (("a", {"v": [[1, 2]], "n": [None]}), ("b", pd.DataFrame({"v": [[1.0, 2.0]], "n": [None]}))):
        table = db.create_table(name, data, schema=vectors)
        assert table.schema.equals(vectors)
        assert table.schema.field("v").metadata == {b"unit": b"m"}
        table.add({"v": [[3, 4]]})
        assert table.to_arrow().to_pydict() == {"v": [[1, 2], [3, 4]], "n": [None, None]}


def test_a_stream_is_written_in_files_of_the_size_that_was_asked_for(db: Database) -> None:
    batches = (pa.record_batch({"x": range(at, at + 7), "l": [[at]] * 7}) for at in range(0, 35, 7))
    schema = pa.schema([("x", pa.int64()), ("l", pa.list_(pa.int64()))])
    table = db.create_table("docs", pa.RecordBatchReader.from_batches(schema, batches), max_rows_per_file=10)
    assert [fragment.count_rows() for fragment in table.lance.get_fragments()] == [10, 10, 10, 5]
    assert table.to_arrow().to_pydict() == {"x": list(range(35)), "l": [[x // 7 * 7] for x in range(35)]}


@pytest.mark.parametrize("data", [7, "text", [1, 2], {"a": [1, "x"]}, {"a": [1], "b": [1, 2]}, {"a": 1}, [], {}])
def test_what_are_no_rows_is_refused(db: Database, data: Any) -> None:
    with pytest.raises(InvalidInput, match=r"are no rows|cannot be converted|the data have none"):
        db.create_table("docs", data)
    assert db.table_names() == []


SCHEMA = pa.schema([pa.field("id", pa.int32(), nullable=False), ("text", pa.string())])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pa.table({"id": ["a"]}), "Column 'id' of type string does not fit int32"),
        (pa.table({"id": ["1", "a"]}).to_reader(max_chunksize=1), "Column 'id' of type string does not fit int32"),
        (pa.table({"id": [1], "more": [1]}), r"the columns \['more'\], which the schema lacks"),
        ({"id": [1, None]}, "rows do not fit table 'docs': .*non-nullable but contains null values$"),
        ([{"text": "a"}], "rows do not fit table 'docs': .*non-nullable"),
    ],
)
def test_a_table_has_the_schema_that_was_given_or_says_what_does_not_fit(db: Database, data: Any, said: str) -> None:
    made = db.create_table("made", pa.table({"id": [1]}), schema=SCHEMA)
    assert (made.schema, made.to_arrow().to_pylist()) == (SCHEMA, [{"id": 1, "text": None}])
    with pytest.raises(InvalidInput, match=said):
        db.create_table("docs", data, schema=SCHEMA)
    with pytest.raises(InvalidInput, match="rows do not fit table 'made'"):
        made.add(pa.table({"id": ["a"]}))
    assert db.table_names() == ["made"]


def test_a_table_that_exists_is_opened_or_overwritten_if_asked(make_table: MakeTable, tmp_path: Path) -> None:
    table, db = make_table(10), connect(tmp_path / "db")
    table.add_columns({"n": plus})
    view = table.query().select(["id"]).add_columns({"m": (plus, ["x"])}).create_materialized_view(name="v")
    table.backfill("n", runner="inline")
    view.refresh(runner="inline")
    assert db.create_table("docs", {"id": [0], "x": [0]}, exist_ok=True).count_rows() == 10
    with pytest.raises(InvalidInput, match=r"It has x: int64, not string; y: no such column\."):
        db.create_table("docs", pa.table({"id": [0], "x": ["a"], "y": [0]}), exist_ok=True)
    with pytest.raises(InvalidInput, match="exist_ok=True"):
        db.create_table("docs", {"id": [0], "x": [0]})
    with pytest.raises(InvalidInput, match="is a view"):
        db.create_table("v", {"id": [0]}, mode="overwrite")
    with pytest.raises(InvalidInput, match="'append'"):
        db.create_table("docs", {"id": [0]}, mode="append")
    assert db.create_table("new", {"id": [0]}, mode="overwrite").version == 1
    assert db.create_table("copy", view.to_arrow()).add({"id": [99]}) is None
    assert len(db.open_table("copy")) == 11
    day = pa.schema({"n": pa.int64(), "d": pa.date32()})
    db.create_table("days", [{"n": 2.0, "d": datetime(2026, 1, 1)}], day)
    for n, moment in ((2.9, datetime(2026, 1, 1)), (2, datetime(2026, 1, 1, 5))):
        with pytest.raises(InvalidInput, match="cannot be converted to Arrow"):
            db.open_table("days").add([{"n": n, "d": moment}])
    with pytest.raises(InvalidInput, match="was created with stable row ids, which overwriting"):
        db.create_table("new", {"id": [0]}, None, {"new_table_enable_stable_row_ids": "false"}, "overwrite")
    again = db.create_table("docs", {"id": [0, 1, 2], "x": [10, 1, 2]}, mode="overwrite")
    assert again.to_arrow().to_pydict() == {"id": [0, 1, 2], "x": [10, 1, 2]}
    again.add_columns({"n": plus})
    assert again.backfill("n", runner="inline").rows_computed == 3
    assert again.to_arrow()["n"].to_pylist() == [11, 2, 3]
    view.refresh(runner="inline")
    assert view.to_arrow().sort_by("id").to_pydict() == {"id": [0, 1, 2], "m": [11, 2, 3]}


@pytest.mark.parametrize("inside", ["", "db", "some/db"])
def test_a_file_is_no_database(tmp_path: Path, inside: str) -> None:
    file = tmp_path / "data.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(InvalidInput, match=rf"{file} is a file. Give a folder of tables"):
        connect(file / inside)


def test_a_table_is_read_in_part(make_table: MakeTable) -> None:
    table = make_table(30, per_fragment=10)
    view = table.query().where("x < 7").select(["x"]).create_materialized_view(name="v")
    assert len(view) == 0
    view.refresh(runner="inline")
    assert (len(table), len(view)) == (30, 7)
    assert bool(view)
    assert table.to_arrow(["x"], limit=3).to_pydict() == {"x": [0, 1, 2]}
    assert table.head().num_rows == 5
    assert table.head(3) == table.to_arrow(limit=3)
    assert pa.table(table.head(2)).to_pydict() == {"id": [0, 1], "x": [0, 1]}
    assert table.head(2)["x"].to_pylist() == [0, 1]
    assert pickle.loads(pickle.dumps(table.head(2))) == table.head(2)
    assert view.head(2).column_names == ["x"]
    assert list(view.to_pandas(limit=2)["x"]) == [0, 1]
    batches = list(table.to_batches("id", batch_size=4))
    assert max(batch.num_rows for batch in batches) == 4
    assert pa.Table.from_batches(batches)["id"].to_pylist() == list(range(30))
    for read in (table, view):
        with pytest.raises(InvalidInput, match="has no columns"):
            read.to_arrow(["__is_set"])


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda table: table.head("x"), "n='x' is not valid: give a whole number of at least 0"),
        (lambda table: table.to_pandas(limit=-1), "limit=-1 is not valid: give a whole number of at least 0"),
        (lambda table: next(table.to_batches(batch_size=0)), "batch_size=0 is not valid"),
        (lambda table: table.count_rows(5), "The filter 5 is not valid: give an SQL condition as text"),
        (lambda table: table.backfill("y", concurrency="2"), "concurrency='2' is not valid: give a whole number"),
    ],
)
def test_a_number_of_rows_that_is_none_is_named(tmp_path: Path, read: Callable[[Table], Any], message: str) -> None:
    table = connect(tmp_path).create_table("docs", pa.table({"x": [1]}))
    table.add_columns({"y": plus})
    with pytest.raises(InvalidInput, match=re.escape(message)):
        read(table)


def test_the_first_rows_of_nested_data_are_a_grid(tmp_path: Path) -> None:
    rows = [
        {"n": {"a": i, "b": {"c": [1, 2, 3] * i, "d": "x" * 200}}, "v": [0.1234567] * 40, "t": "a\nb", "f": 1.5}
        for i in range(3)
    ]
    table = connect(tmp_path).create_table("t", rows)
    text = repr(table.head())
    assert [len(line) <= 200 for line in text.split("\n")] == [True] * 5
    assert "{a: 2, b: {c: [1, 2, 3, 1, … 6 values], d: xxxxxxx" in text
    assert "[0.123457, 0.123457, 0.123457, 0.123457, … 40 values]" in text
    assert "{a: 2, b: {c: [1, 2, 3, 1, … 6 values], d: xxxxxxx" in table.head()._repr_html_()


def test_one_column_feeds_another_and_both_are_filled_in_one_call(make_table: MakeTable) -> None:
    table = make_table(5)
    table.add_columns({"n": plus, "m": (plus, ["n"])})
    results = table.backfill(["n", "m"], runner="inline")
    first, second = results
    assert f"\nn: {first}\nm: {second}" in repr(results)
    assert "n: DONE: 5 rows computed" in results._repr_html_()
    assert (first.rows_computed, second.rows_computed) == (5, 5)
    assert table.to_arrow()["m"].to_pylist() == [2, 3, 4, 5, 6]
    with pytest.raises(InvalidInput, match="'typo' is not defined"):
        table.backfill(["n", "typo"], runner="inline")
    with pytest.raises(InvalidInput, match="computes one column"):
        table.backfill(["n", "m"], udf=plus)  # type: ignore[call-overload]


def test_an_import_path_does_in_place_of_a_function(make_table: MakeTable) -> None:
    path = f"{samples.__name__}:add_five"
    table = make_table(3)
    table.add_columns({"n": (path, ["x"])})
    table.backfill("n", udf=path, runner="inline")
    assert table.to_arrow()["n"].to_pylist() == [5, 6, 7]
    query = table.query().select(["id"]).add_columns({"n": (path, ["x"])})
    assert query.to_arrow()["n"].to_pylist() == [5, 6, 7]
    with pytest.raises(InvalidInput, match="malformed"):
        table.add_columns({"m": "add_five"})


def test_the_options_that_a_type_checker_knows_are_those_of_a_backfill() -> None:
    own = set(inspect.signature(Table.backfill).parameters) - {"self", "column", "udf", "sizing"}
    assert own == set(BackfillOptions.__annotations__) - set(SizingOptions.__annotations__)


def test_what_is_in_it_is_shown(make_table: MakeTable, tmp_path: Path) -> None:
    table, db = make_table(3, word=["<b>", "x" * 500, None]), connect(tmp_path / "db")
    table.add_columns({"n": plus})
    view = table.query().select({"id": "id", "twice": "x * 2"}).create_materialized_view(name="v")
    assert "0 rows, a view of 'docs', never refreshed" in repr(view)
    plan = table.plan_backfill("n")
    result = table.backfill("n", runner="inline")
    view.refresh(runner="inline")
    lines = repr(table).splitlines()
    assert lines[0] == f"Table 'docs' in {tmp_path}/db: 3 rows, version {table.version}"
    assert f"  n     int64   computed by {plus.import_path}(x), version {plus.code_version}" in lines
    assert "3 rows, a view of 'docs', refreshed to its version" in repr(view)
    assert "SQL x * 2" in repr(view)
    assert repr(db).splitlines()[0] == f"Database {tmp_path}/db: 2 tables"
    assert f"  docs  3 rows, version {table.version}" in repr(db).splitlines()
    (job, *_) = db.jobs()
    for shown, text in ((plan, str(plan)), (result, str(result)), (job, str(job))):
        assert text.partition("\n")[0] in repr(shown)
        assert escape(text.splitlines()[1]) in shown._repr_html_()
    assert "\n" not in repr([result, job])
    html = table._repr_html_()
    assert "<td>&lt;b&gt;</td>" in html
    assert "<b>" not in html.replace("<div><b>", "")
    assert "x" * 80 + "…" in html
    assert "__is_set" not in view._repr_html_()


def test_what_is_large_is_shown_in_part_with_the_number_of_the_rest(tmp_path: Path) -> None:
    db = connect(tmp_path / "db")
    wide = db.create_table("t000", pa.table({f"c{number:03}": [number] * 100 for number in range(300)}))
    for number in range(1, 30):
        shutil.copytree(wide.uri, Path(db.uri, f"t{number:03}.lance"))
    for shown, more, cells in (
        (db, "and 10 more", 2 * 21),
        (wide, "and 250 more", 3 * 51 + 20 * 5),
        (wide.head(100), "… and 50 more rows and 280 more columns", 20 * 50),
    ):
        html = shown._repr_html_()
        assert more in html
        assert html.count("<td>") <= cells
        assert more in repr(shown)
        assert max(map(len, repr(shown).splitlines())) < 400
    assert len(wide.head(100)) == 100


def test_what_cannot_be_read_says_so_instead_of_failing(
    make_table: MakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, db = make_table(3), connect(tmp_path / "db")
    db.drop_table("docs")
    for shown in (repr(table), table._repr_html_()):
        assert "cannot be opened" in shown
    far = connect("s3://lake/db", {"azure_storage_account_name": "a"})
    with monkeypatch.context() as unreachable:
        unreachable.setattr(Database, "table_names", lambda self: 1 // 0)
        assert repr(far) == "Database s3://lake/db"  # without a look at the store
        assert "Database s3://lake/db: integer division" in far._repr_html_()


def test_a_folder_that_does_not_exist_is_said_where_it_matters(tmp_path: Path) -> None:
    (tmp_path / "library1" / "docs.lance").mkdir(parents=True)
    (tmp_path / "documents").mkdir()
    with pytest.warns(UserWarning, match="Did you mean .*/library1"):
        typo = connect(tmp_path / "libary1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("library1", "library2", "new", "document"):
            connect(tmp_path / name)
    assert "there is no such folder yet" in repr(typo)
    assert "there is no such folder yet" in typo._repr_html_()
    with pytest.raises(InvalidInput, match="there is no such folder"):
        typo.open_table("docs")
    assert not os.path.exists(typo.uri)
