"""Values that pylance takes in one form only: slices of nested arrays, JSON, bfloat16, and what it cannot store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.arrow import bfloat16_array

from airflow_geneva import connect, udf
from airflow_geneva.engine.lance_io.arrays import check_storable, rows_at
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table

MakeTable = Callable[..., Table]

FLAGGED = pa.struct([("n", pa.int64()), ("b", pa.bool_())])
STRUCTS = {
    "struct in struct": pa.array([{"s": {"n": at, "b": True}} for at in range(40)], pa.struct([("s", FLAGGED)])),
    "nullable struct with a boolean": pa.array([{"n": at, "b": True} if at % 3 else None for at in range(40)], FLAGGED),
    "list of nullable structs": pa.array([[{"n": at, "b": None}, None] for at in range(40)], pa.list_(FLAGGED)),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRUCTS)
def test_structs_are_written_in_slices(make_table: MakeTable, kind: str) -> None:
    table = make_table(40, s=STRUCTS[kind])

    @udf(data_type=STRUCTS[kind].type, version="1")
    def part(s: pa.Array) -> pa.Array:
        return pa.concat_arrays([s, s]).slice(len(s))

    table.add_columns({"y": part})
    table.backfill("y", udf=part, runner="inline", checkpoint_size=7)
    assert table.to_arrow()["y"].to_pylist() == STRUCTS[kind].to_pylist()
    view = table.query().select(["id", "s"]).create_materialized_view(name="v")
    view.refresh(runner="inline", checkpoint_size=7)
    assert view.to_arrow()["s"].to_pylist() == STRUCTS[kind].to_pylist()


JSON = pa.array([f'{{"n":{at}}}' if at % 5 else None for at in range(40)]).cast(pa.json_())


def test_json_is_read_back_and_written_again(make_table: MakeTable) -> None:
    calls: list[int] = []

    @udf(data_type=pa.json_(), version="1", name="again")
    def breaks(x: int, j: str | None) -> str | None:
        if x == 17 and not calls:
            calls.append(x)
            raise ValueError("once")
        return j

    table = make_table(40, j=JSON)
    table.add_columns({"halves": breaks, "resumed": breaks})
    with pytest.raises(JobFailed, match="once"):
        table.backfill("resumed", udf=breaks, runner="inline", checkpoint_size=3)
    table.backfill("resumed", udf=breaks, runner="inline", checkpoint_size=3)
    table.backfill("halves", udf=breaks, where="id % 2 = 0", runner="inline")
    table.backfill("halves", udf=breaks, runner="inline")
    found = table.to_arrow()
    assert found["resumed"].to_pylist() == found["halves"].to_pylist() == JSON.to_pylist()


@pytest.mark.parametrize(("shuffled", "most"), [(True, None), (False, 7)])
def test_json_of_a_view_is_arranged(make_table: MakeTable, shuffled: bool, most: int | None) -> None:
    query = make_table(40, j=JSON).query()
    view = (query.shuffle(seed=1) if shuffled else query).create_materialized_view(name="v")
    view.refresh(runner="inline", max_rows_per_fragment=most)
    found = view.to_arrow().sort_by("id")
    assert found["j"].to_pylist() == JSON.to_pylist()


@pytest.mark.parametrize("nested", [False, True])
def test_a_scalar_udf_gives_back_the_bfloat16_it_was_given(make_table: MakeTable, nested: bool) -> None:
    halves: pa.Array = bfloat16_array([1.5, None, -2.0, *range(37)])
    given = pa.StructArray.from_arrays([halves], ["h"]) if nested else halves

    @udf(data_type=given.type, version="1")
    def same(h: Any) -> Any:
        return h

    table = make_table(40, h=given)
    table.add_columns({"y": same})
    table.backfill("y", udf=same, runner="inline")
    found = table.to_arrow()
    assert found["y"].combine_chunks() == found["h"].combine_chunks() == given


REFUSED = {
    "Unsupported data type: Decimal32": pa.decimal32(5, 2),
    "Unsupported data type: Interval": pa.month_day_nano_interval(),
    "Unsupported data type: ListView": pa.list_view(pa.int32()),
    "Unsupported data type: RunEndEncoded": pa.run_end_encoded(pa.int32(), pa.string()),
    "compute_stat should only be called once": pa.list_(pa.string(), 2),
    "Unsupported data type: FixedSizeList": pa.list_(pa.list_(pa.int32()), 2),
    "dimension must be a positive integer": pa.list_(pa.int32(), 0),
    "cannot read columns of differing lengths": pa.list_(FLAGGED, 2),
    "Empty structs with rep/def information": pa.struct([]),
    "keys_sorted=true": pa.map_(pa.string(), pa.int32(), keys_sorted=True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_pylance_cannot_store_is_refused_by_name(make_table: MakeTable, reason: str) -> None:
    @udf(data_type=REFUSED[reason], version="1")
    def odd(x: Any) -> Any:
        return None

    table = make_table(4)
    with pytest.raises(InvalidInput, match=r"Column 'y' of table 'docs' cannot be .*pylance cannot store") as refused:
        table.add_columns({"y": odd})
    assert reason in str(refused.value)
    with pytest.raises(InvalidInput, match=r"Column 'y' of a view of table 'docs' cannot be .*pylance cannot store"):
        table.query().add_columns({"y": odd}).definition()


@pytest.mark.parametrize(
    ("version", "data_type", "reason"),
    [
        ("2.1", lance.blob_field("p").type, "blobs need storage version 2.2 or later, and the table has 2.1"),
        ("2.0", lance.blob_field("p").type, "blobs need storage version 2.2 or later, and the table has 2.0"),
        ("2.0", pa.struct({"a": pa.int32()}), "does not encode struct validity"),
        ("legacy", pa.string(), "cannot add empty columns to tables of the legacy storage version 0.1"),
    ],
)
def test_a_column_that_needs_a_newer_storage_version_is_refused_with_the_copy_that_takes_it(
    tmp_path: Path, version: str, data_type: pa.DataType, reason: str
) -> None:
    @udf(data_type=data_type, version="1")
    def newer(x: int) -> Any:
        return None

    db = connect(tmp_path / "db")
    table = db.create_table("docs", pa.table({"x": [1, 2]}), data_storage_version=version)
    with pytest.raises(InvalidInput, match=r"Column 'y' of table 'docs' cannot be .*pylance cannot store") as refused:
        table.add_columns({"y": newer})
    assert reason in str(refused.value)
    assert "db.copy_table(..., rewrite=True)" in str(refused.value)
    db.copy_table("docs", "newer", rewrite=True).add_columns({"y": newer})
    view = table.query().add_columns({"y": newer}).create_materialized_view(db, "view")
    assert view.refresh(runner="inline").rows_run == 2


ITEMS = pa.list_(pa.field("item", pa.float64(), nullable=False), 1)


@pytest.mark.parametrize(
    "data_type",
    [
        pa.struct([pa.field("inner", pa.struct([pa.field("items", ITEMS)]), nullable=False)]),
        pa.list_(pa.struct([pa.field("items", ITEMS)]), 1),
        pa.struct([pa.field("items", ITEMS, nullable=False)]),
    ],
)
def test_a_null_on_every_level_is_tried(data_type: pa.DataType) -> None:
    with pytest.raises(InvalidInput, match=r"cannot store it .*non-nullable child of type Float64 contains nulls"):
        check_storable([pa.field("y", data_type)], "2.2", "table 'docs'")


def test_values_that_pylance_cannot_store_are_named_and_not_the_disk(make_table: MakeTable) -> None:
    @udf(data_type=pa.json_(), version="1")
    def broken(x: int) -> str:
        return "{" if x == 17 else "{}"

    table = make_table(20)
    table.add_columns({"y": broken})
    with pytest.raises(
        JobFailed, match=r"pylance cannot store the values of 'y' \(extension<arrow.json>\): .*JSON"
    ) as failed:
        table.backfill("y", udf=broken, runner="inline")
    assert "space" not in str(failed.value)


def test_rows_with_extension_types_inside_can_be_none(make_table: MakeTable) -> None:
    """The first call fails alone, so that there is nothing before it."""
    kind = pa.struct([("u", pa.uuid())])

    @udf(data_type=kind, version="1")
    def broken(x: pa.Array) -> pa.Array:
        raise ValueError("on every row")

    table = make_table(4)
    table.add_columns({"y": broken})
    with pytest.raises(JobFailed, match="on every row"):
        table.backfill("y", udf=broken, runner="inline")


def test_a_text_view_is_stored_as_text_and_names_inside_of_maps_do_not_matter(make_table: MakeTable) -> None:
    kind = pa.struct([("t", pa.string_view()), ("m", pa.map_(pa.string(), pa.field("item", pa.binary_view())))])

    @udf(data_type=kind, version="1")
    def viewed(x: pa.Array) -> pa.Array:
        return pa.array([{"t": str(at), "m": [("k", b"v")]} for at in x.to_pylist()], kind)

    table = make_table(8, per_fragment=5)
    table.add_columns({"y": viewed})
    table.backfill("y", udf=viewed, where="id < 3", runner="inline")
    table.backfill("y", udf=viewed, runner="inline")
    assert table.to_arrow()["y"].to_pylist() == [{"t": str(at), "m": [("k", b"v")]} for at in range(8)]


def test_items_of_fixed_size_lists_may_be_declared_not_null(make_table: MakeTable) -> None:
    kind = pa.struct([("v", pa.list_(pa.field("item", pa.float32(), nullable=False), 2))])

    @udf(data_type=kind, version="1")
    def vector(x: pa.Array) -> pa.Array:
        return pa.array([{"v": [at, at]} for at in x.to_pylist()], kind)

    table = make_table(8, per_fragment=5)
    table.add_columns({"y": vector})
    table.backfill("y", udf=vector, runner="inline")
    assert table.to_arrow()["y"].to_pylist() == [{"v": [at, at]} for at in range(8)]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([[[i, -i], [i + 0.5, i]] for i in range(9)], pa.list_(pa.list_(pa.float64(), 2), 2)),
        pa.array([{"a": [[i], [-i]]} for i in range(9)], pa.struct([("a", pa.list_(pa.list_(pa.int16(), 1), 2))])),
        pa.array([None, *"bcdefghi"], pa.string_view()),
        pa.array([b"%d" % i for i in range(9)], pa.binary_view()),
    ],
    ids=["list", "struct", "texts", "bytes"],
)
def test_rows_of_layouts_that_pyarrow_does_not_take_are_those_that_were_asked_for(values: pa.Array) -> None:
    plain = values.to_pylist()
    part = values.slice(3, 4)
    assert rows_at(part, pa.array([2, None, 0])).to_pylist() == [plain[5], None, plain[3]]
    batch = pa.record_batch({"row": pa.array(range(4)), "v": part})
    for rows in (batch, pa.Table.from_batches([batch, batch])):
        taken = rows_at(rows, pa.array([3, 1]))
        assert taken.to_pylist() == [{"row": at, "v": plain[3 + at]} for at in (3, 1)]
        assert taken.schema == batch.schema
