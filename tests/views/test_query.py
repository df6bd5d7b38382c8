"""Queries: what they accept, what they refuse and say, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva import Query, Table, connect, udf
from airflow_geneva.engine.views.rows import order_row_ids, row_ids_of, shuffle_hashes
from airflow_geneva.errors import InvalidInput, UdfError
from tests.support.queries import WORD, splitmix64
from tests.udfs_for_tests import samples

ORDER_OF_SEED_1 = [2, 8, 4, 9, 7, 0, 6, 5, 3, 1]
HASHES_OF_SEED_1 = [6791897765849424158, 4555703879086989499, 385125812468360887]


def test_the_reference_generator_gives_the_published_numbers() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [number for number, _ in zip(splitmix64(1234567), published, strict=False)] == published


@pytest.mark.parametrize("seed", [0, 1, 42, WORD - 1])
def test_the_shuffle_hash_is_a_fixed_sequence(seed: int) -> None:
    expected = [number for number, _ in zip(splitmix64(next(splitmix64(seed))), range(100), strict=False)]
    assert shuffle_hashes(seed, np.arange(100)).tolist() == expected


def test_the_shuffled_order_never_changes() -> None:
    assert order_row_ids(np.arange(10), 1).tolist() == ORDER_OF_SEED_1
    assert shuffle_hashes(1, np.array([0, 7, 1 << 40])).tolist() == HASHES_OF_SEED_1


@given(st.integers(0, WORD - 1), st.lists(st.integers(0, (1 << 63) - 1), unique=True))
def test_row_ids_come_back_from_their_hashes(seed: int, ids: list[int]) -> None:
    assert row_ids_of(seed, shuffle_hashes(seed, np.array(ids, np.int64))).tolist() == ids


@pytest.fixture
def table(tmp_path: Path) -> Table:
    rows = {
        "id": pa.array(range(10), pa.int64()),
        "x": pa.array([i * 3 for i in range(10)], pa.int64()),
        "text": ["t" * i for i in range(10)],
        "meta": [{"lang": "en"}] * 10,
    }
    schema = pa.table(rows).schema.set(0, pa.field("id", pa.int64(), nullable=False))
    return connect(tmp_path / "db").create_table("docs", pa.table(rows, schema=schema), max_rows_per_file=4)


def test_every_call_gives_a_new_query_and_leaves_the_old_one(table: Table) -> None:
    first = table.query()
    later = first.where("x > 3").select(["id"]).shuffle(1).limit(2).offset(1)
    assert first == Query(table)
    assert later.conditions == ("x > 3",)


def test_without_select_all_columns_come_and_may_be_null(table: Table) -> None:
    schema = table.query().output_schema()
    assert schema.names == ["id", "x", "text", "meta"]
    assert all(field.nullable for field in schema)
    assert not table.schema.field("id").nullable


def test_conditions_are_joined_as_wholes(table: Table) -> None:
    query = table.query().where("x = 3 OR x = 6").where("id > 1 OR id < 0")
    assert query.to_arrow()["id"].to_pylist() == [2]


def test_the_order_of_the_calls_does_not_matter(table: Table) -> None:
    one = table.query().where("x > 3").shuffle(7).offset(2).limit(3).select(["id"])
    other = table.query().select(["id"]).limit(3).offset(2).shuffle(7).where("x > 3")
    assert one.to_arrow().equals(other.to_arrow())
    assert one.to_arrow().num_rows == 3


def test_columns_feed_one_another_in_their_order(table: Table) -> None:
    query = table.query().select(["id"]).add_columns({"y": "x + 1", "d": (samples.double, ["y"])})
    query = query.add_columns({"dd": (samples.double, ["d"])}).add_column(samples.length).limit(2)
    query = query.add_columns({"n": (samples.length, ["text"])})
    assert query.add_columns({"l": "meta.lang"}).to_arrow().to_pylist() == [
        {"id": 0, "y": 1, "d": 2, "dd": 4, "length": 0, "n": 0, "l": "en"},
        {"id": 1, "y": 4, "d": 8, "dd": 16, "length": 1, "n": 1, "l": "en"},
    ]


def test_a_field_of_a_struct_is_an_input(table: Table) -> None:
    @udf(data_type=pa.struct([("n", pa.int64()), ("in", pa.struct([("word", pa.string())]))]), version="1")
    def parts(x: int) -> dict[str, Any] | None:
        return None if x == 3 else {"n": x, "in": {"word": "w" * x}}

    wanted = {"lang": (samples.length, ["meta.lang"]), "both": (parts, ["x"])}

    @udf(data_type=pa.int64(), version="1")
    def letters(word: str | None) -> int | None:
        return None if word is None else len(word)

    later = {"word": (letters, ["both.in.word"]), "n": (samples.double, ["both.n"])}
    query = table.query().select({**wanted, **later})
    found = query.to_arrow()
    assert found["lang"].to_pylist() == [2] * 10
    assert found["word"].to_pylist() == [0, None, *(3 * i for i in range(2, 10))]
    assert found["n"].to_pylist() == [0, None, *(6 * i for i in range(2, 10))]
    view = query.create_materialized_view(name="lengths")
    view.refresh(runner="inline")
    assert view.to_arrow().select(["lang", "word"]).equals(found.select(["lang", "word"]))
    table.lance.update({"meta": "named_struct('lang', 'deu')"}, where="id = 1")
    assert view.refresh(runner="inline").rows_computed == 1
    assert sorted(view.to_arrow()["lang"].to_pylist()) == [2] * 9 + [3]
    with pytest.raises(InvalidInput, match=r"there is no column \['meta\.nope'\]"):
        table.query().select({"n": (samples.length, ["meta.nope"])}).output_schema()
    with pytest.raises(InvalidInput, match=r"Type mismatch for column 'meta\.lang'"):
        table.query().select({"n": (samples.double, ["meta.lang"])}).output_schema()


def test_once_a_column_fails_no_other_is_computed(table: Table) -> None:
    ran: list[int] = []

    @udf(data_type=pa.int64())
    def fails(x: int) -> int:
        return x // (x - 6)

    @udf(data_type=pa.int64())
    def later(fails: int) -> int:
        ran.append(fails)
        return fails

    with pytest.raises(UdfError, match="ZeroDivisionError on row 2"):
        table.query().select({"fails": fails, "later": later}).to_arrow()
    assert ran == []


def test_a_column_of_the_query_hides_the_tables_column_from_later_ones_only(table: Table) -> None:
    query = table.query().select({"before": (samples.double, ["x"]), "x": "x + 100", "after": (samples.double, ["x"])})
    assert query.limit(1).offset(1).to_arrow().to_pylist() == [{"before": 6, "x": 103, "after": 206}]


def test_a_udf_of_whole_batches_is_given_the_tables_columns(table: Table) -> None:
    @udf(data_type=pa.string())
    def names(batch: pa.RecordBatch) -> pa.Array:
        return pa.array([",".join(batch.schema.names)] * batch.num_rows)

    assert table.query().select({"n": names}).limit(1).to_arrow()["n"].to_pylist() == ["id,x,text,meta"]


def test_constants_and_empty_results_have_their_types(table: Table) -> None:
    query = table.query().select({"one": "1", "n": (samples.length, ["text"])})
    assert query.limit(1).to_arrow().to_pylist() == [{"one": 1, "n": 0}]
    none = query.where("x < 0").to_arrow()
    assert none.num_rows == 0
    assert none.schema.types == [pa.int64(), pa.int64()]
    assert table.query().limit(0).to_arrow().num_rows == 0


OLD_BLOB = pa.field("picture", pa.large_binary(), metadata={"lance-encoding:blob": "true"})


@pytest.mark.parametrize(("version", "field"), [("2.1", OLD_BLOB), ("2.2", lance.blob_field("picture"))])
def test_blobs_stay_blobs_and_are_read_as_bytes(tmp_path: Path, version: str, field: pa.Field) -> None:
    @udf(data_type=pa.int64())
    def size(picture: bytes | None) -> int | None:
        return None if picture is None else len(picture)

    pictures = [None if i == 2 else b"p" * i for i in range(5)]
    column = pa.array(pictures, pa.large_binary()) if version == "2.1" else lance.blob_array(pictures)
    rows = pa.table([pa.array(range(5)), column], schema=pa.schema([pa.field("id", pa.int64()), field]))
    table = connect(tmp_path / "db").create_table("docs", rows, data_storage_version=version)
    query = table.query().select({"copy": "picture"}).add_column(size).shuffle(3)
    assert query.output_schema().field("copy").type == lance.blob_field("any").type
    order = order_row_ids(np.arange(5), 3).tolist()
    assert query.to_arrow()["copy"].to_pylist() == [pictures[i] for i in order]
    assert query.to_arrow()["size"].to_pylist() == [None if i == 2 else i for i in order]


def test_search_is_query_under_another_name(table: Table) -> None:
    assert table.search(None) == table.query()
    with pytest.raises(InvalidInput, match=r"Only search\(None\)"):
        table.search("word")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q: q.select(["nope"]), r"Column 'nope' is not in table 'docs', which has: id, x, text, meta"),
        (lambda q: q.select({"n": "nope"}), "No field named nope"),
        (lambda q: q.select({"n": "sum(x)"}), r": it calls sum\(\), and a row's value .* without aggregates\.$"),
        (lambda q: q.select({"n": "count(*)"}), r": it calls count\(\), and a row's value .* without aggregates\.$"),
        (lambda q: q.select({"n": "row_number() over ()"}), r": it calls row_number\(\), and a row's value"),
        (lambda q: q.select({"n": "x / 1000000.0"}), r"Write 'CAST\(x AS DOUBLE\) / 1000000\.0'\."),
        (lambda q: q.where("`x` > 1.5"), r"Write 'CAST\(`x` AS DOUBLE\) > 1\.5'\."),
        (lambda q: q.select({"n": "cast(x as blah)"}), "Unsupported data type. Write it as"),
        (lambda q: q.select({"n": "NULL"}), r"CAST\(NULL AS BIGINT\)"),
        (lambda q: q.select({"n": ""}), "The expression of column 'n' is ''"),
        (lambda q: q.select({"n": 3}), "Column 'n' is given 3"),
        (lambda q: q.select([]), "has no columns"),
        (lambda q: q.select(["id", "id"]), r"columns \['id'\] twice"),
        (lambda q: q.add_columns({"id": "x"}), r"columns \['id'\] twice"),
        (lambda q: q.select({"__is_set": "x > 1"}), "'__is_set' cannot be the name"),
        (lambda q: q.select({"__SOURCE_ROW_ID": "x"}), "'__SOURCE_ROW_ID' cannot be the name"),
        (lambda q: q.select({"_rowid": "x"}), "'_rowid' cannot be the name"),
        (lambda q: q.select({"a": "_rowid + 1"}), r"reads \['_rowid'\]"),
        (lambda q: q.where("_rowaddr > 3"), r"reads \['_rowaddr'\]"),
        (lambda q: q.where("nope > 3"), "The filter 'nope > 3' is not valid"),
        (lambda q: q.where("x > 3) OR (x < 3"), "closes a bracket"),
        (lambda q: q.add_columns({"n": (samples.length, ["x"])}), "Type mismatch for column 'x'"),
        (lambda q: q.add_columns({"n": (samples.length, ["nope"])}), r"there is no column \['nope'\]"),
        (
            lambda q: q.add_columns({"n": (samples.length, ["n"])}),
            r"put \['n'\] before 'n', and no column feeds itself",
        ),
        (
            lambda q: q.add_columns({"a": (samples.double, ["b"]), "b": (samples.double, ["a"])}),
            r"put \['b'\] before 'a'",
        ),
        (lambda q: q.add_columns({"n": (samples.double, ["x", "id"])}), "takes the parameters"),
        (lambda q: q.add_columns({"n": samples.undecorated}), "Give a column's name or an SQL expression"),
    ],
)
def test_a_query_that_does_not_fit_says_so(table: Table, change: Callable[[Query], Query], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        change(table.query()).output_schema()


@pytest.mark.parametrize(
    ("method", "value"),
    [
        *(("limit", value) for value in (-1, 1.5, True, "3", None)),
        *(("offset", value) for value in (-1, 1.5, None)),
        *(("shuffle", value) for value in (-1, WORD, 0.5, None)),
        *(("where", value) for value in ("", None, 3)),
        *(("select", value) for value in ("id", 3, [3])),
        *(("add_columns", value) for value in (["id"], None)),
        *(("add_column", value) for value in ("id", samples.undecorated)),
    ],
)
def test_nonsense_is_refused_where_it_is_given(table: Table, method: str, value: Any) -> None:
    with pytest.raises(InvalidInput):
        getattr(table.query(), method)(value)
