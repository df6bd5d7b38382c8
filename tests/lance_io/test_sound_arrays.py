"""Arrow arrays from outside: those that are not valid are found with their rows, and no others are refused."""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.lance_io.sound_arrays import aligned, missing_field, sound, unsound_rows
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError
from tests.support.arrow_values import FAMILIES, make_array, make_type
from tests.udfs_for_tests.odd import SPOILED, spoiled

TEXT = spoiled("text", [0, 1, 2, 4])
CODES = spoiled("dictionary", [0, 1, 2, 3])
OUTSIDE = pa.py_buffer(np.array([0, 100, 2, 2, 2], np.int32).tobytes())
# A line for each: an array, and its rows that are not valid.
ARRAYS: list[tuple[str, pa.Array, list[int]]] = [
    ("text", TEXT, [1]),
    ("slice of text", TEXT.slice(1), [0]),
    ("valid slice of text", TEXT.slice(2), []),
    ("text view", TEXT.cast(pa.binary(), safe=False).cast(pa.binary_view()).view(pa.string_view()), [1]),
    ("codes", CODES, [1, 3]),
    ("slice of codes", CODES.slice(1), [0, 2]),
    ("codes without values", pa.DictionaryArray.from_arrays([0, None], pa.array([], pa.string()), safe=False), [0]),
    ("list", pa.ListArray.from_arrays([0, 1, 3, 4, 4], TEXT), [1]),
    ("slice of a list", pa.ListArray.from_arrays([0, 1, 3, 4], TEXT).slice(1), [0]),
    ("items of no list", pa.ListArray.from_arrays([2, 3, 4], TEXT), []),
    ("struct", pa.StructArray.from_arrays([TEXT, CODES], ["a", "b"]), [1, 3]),
    ("slice of a struct", pa.StructArray.from_arrays([TEXT, CODES], ["a", "b"]).slice(1, 2), [0]),
    ("fixed list", pa.FixedSizeListArray.from_arrays(TEXT, 2), [0]),
    ("map", pa.MapArray.from_arrays([0, 1, 3, 4], pa.array(list("abcd")), CODES), [1, 2]),
    ("dictionary of text", pa.DictionaryArray.from_arrays([0, 1, 2, 1], TEXT), [1, 3]),
    ("json", pa.ExtensionArray.from_storage(pa.json_(), TEXT), [1]),
    ("offsets", pa.Array.from_buffers(pa.list_(pa.int64()), 4, [None, OUTSIDE], children=[pa.array([1, 2])]), [0, 1]),
    ("decimal", pa.Array.from_buffers(pa.decimal128(3, 0), 1, [None, pa.py_buffer(b"\xff" * 8 + bytes(8))]), [0]),
    ("time", pa.array([1, 86_400], pa.int32()).view(pa.time32("s")), [1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "rows"), ARRAYS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_rows_of_an_array_that_are_not_valid_are_found(name: str, values: pa.Array, rows: list[int]) -> None:
    assert unsound_rows(values).tolist() == rows
    if rows:
        with pytest.raises(pa.ArrowInvalid):
            sound(values)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_valid_passes_as_it_is(family: str) -> None:
    dice = Random(family)
    for _ in range(5):
        try:
            values = make_array(dice, make_type(dice, family), 10)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            continue
        assert sound(values).equals(values)
        assert unsound_rows(values).tolist() == []


def moved(values: pa.Array, by: int) -> pa.Array:
    """Copy an array to buffers that begin `by` bytes after an address that is a multiple of 64."""
    buffers = []
    for buffer in values.buffers():
        if buffer is None:
            buffers.append(None)
            continue
        room = np.zeros(buffer.size + 128, np.uint8)
        start = -room.ctypes.data % 64 + by
        room[start : start + buffer.size] = np.frombuffer(buffer, np.uint8)
        buffers.append(pa.py_buffer(room).slice(start, buffer.size))
    return pa.Array.from_buffers(values.type, len(values), buffers)


UNALIGNED = [
    pa.array([Decimal("1.5"), None], pa.decimal128(20, 3)),
    pa.array([Decimal("1.5"), None], pa.decimal256(50, 3)),
    pa.array([1, None], pa.int64()),
    pa.array([1.5, None], pa.float32()),
    pa.array(["a", None], pa.string()),
    pa.array(["a" * 30, None], pa.string_view()),
]


@pytest.mark.parametrize("by", [1, 4, 8])
@pytest.mark.parametrize("values", UNALIGNED, ids=lambda values: str(values.type))
def test_unaligned_buffers_are_written(values: pa.Array, by: int, tmp_path: Path) -> None:
    given = moved(values, by)
    assert aligned(given).equals(values)
    table = connect(tmp_path).create_table(
        "t", pa.table({"x": given, "in": pa.StructArray.from_arrays([given], ["x"])})
    )
    table.add(pa.table({"x": given, "in": pa.StructArray.from_arrays([given], ["x"])}))
    assert table.to_arrow()["x"].to_pylist() == values.to_pylist() * 2


def test_an_aligned_array_is_not_copied() -> None:
    values = pa.array([1, 2])
    assert sound(values) is values


@pytest.mark.parametrize("kind", SPOILED)
def test_rows_with_an_array_that_is_not_valid_are_refused(kind: str, tmp_path: Path) -> None:
    database, bad, good = connect(tmp_path), spoiled(kind, [0, 1, 2]), spoiled(kind, [0, 2, 4])
    table = database.create_table("good", pa.table({"x": good}))
    stream = pa.RecordBatchReader.from_batches(pa.schema({"x": bad.type}), [pa.record_batch({"x": bad})])
    for data in (pa.table({"x": bad}), pa.record_batch({"x": bad}), {"x": bad}, stream):
        with pytest.raises(InvalidInput, match="array of column 'x' is not valid, first in row 1 of its batch"):
            database.create_table("bad", data)
    with pytest.raises(InvalidInput, match="array of column 'x' is not valid, first in row 1 of its batch"):
        table.add({"x": bad})
    assert database.table_names() == ["good"]
    assert table.to_arrow().num_rows == 3


# A line for each: rows, the type of their column, if it is given, and what the error says.
REFUSED: list[tuple[Any, pa.DataType | None, str]] = [
    ({"": [1]}, None, "Column 1 of the rows has the name ''.*Give it another name"),
    ([{"a": 1, "": 2}], None, "Column 2 of the rows has the name ''"),
    (pa.table({"": [1]}), None, "has the name ''"),
    ([{"x": Decimal("1.5")}], pa.int64(), "column 'x', row 0: a Decimal is not int64: it has a fraction"),
    ([{"x": 1}, {"x": 1.5}], pa.int64(), "truncated"),
    ([{"x": [1]}, {"x": [1.5]}], pa.list_(pa.int64()), "row 1: a float is not int64"),
    ([{"x": "\ud800"}], pa.string(), "column 'x', row 0"),
    ([{"x": np.datetime64(1, "ns")}], pa.timestamp("s"), "finer than the column's unit"),
]


@pytest.mark.parametrize(("data", "kind", "says"), REFUSED, ids=lambda value: str(value)[:30])
def test_rows_that_lance_could_not_hold_are_refused(data: Any, kind: pa.DataType, says: str, tmp_path: Path) -> None:
    database = connect(tmp_path)
    with pytest.raises(InvalidInput, match=says):
        database.create_table("t", data, schema=None if kind is None else pa.schema({"x": kind}))
    assert database.table_names() == []


def test_datetimes_with_and_without_a_zone_are_not_mixed(tmp_path: Path) -> None:
    rows = [{"x": datetime(2024, 1, 1)}, {"x": datetime(2024, 1, 1, tzinfo=timezone.utc)}]
    with pytest.raises(InvalidInput, match=r"row 1: .* has a time zone"):
        connect(tmp_path).create_table("t", rows)


def test_a_panic_of_pylance_is_an_error_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_geneva.engine.lance_io.rows.sound_columns", lambda batch: batch)
    with pytest.raises(StorageError, match="Cannot write rows to table 't': pylance panicked"):
        connect(tmp_path).create_table("t", pa.table({"x": moved(UNALIGNED[0], 8)}))


def test_a_file_with_text_that_is_not_utf_8_is_not_loaded(tmp_path: Path) -> None:
    table = connect(tmp_path / "db").create_table("t", pa.table({"id": [0, 1, 2, 3]}))
    pq.write_table(pa.table({"id": [0, 1, 2, 3], "text": TEXT}), tmp_path / "values.parquet")
    with pytest.raises(GenevaError, match="array of column 'text' is not valid, first in row 1 of its batch"):
        table.load_columns(tmp_path / "values.parquet", on="id", runner="inline")
    assert table.to_arrow().num_rows == 4


@pytest.mark.parametrize("of", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 1)])
def test_lists_of_lists_of_an_extension_type_may_all_be_null(of: Any) -> None:
    required = pa.list_(pa.field("item", pa.bool8(), nullable=False))
    assert missing_field(pa.nulls(1, of(required))) is None
