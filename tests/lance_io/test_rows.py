"""Rows that a user gives become Arrow data: each value as it is, or an error that names the column."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.lance_io.rows import as_rows, fit_schema
from airflow_geneva.errors import InvalidInput

DAY = datetime.datetime(2024, 1, 1)


def read(data: Any, kind: pa.DataType | None = None) -> list[Any]:
    rows = as_rows(data, None if kind is None else pa.schema({"x": kind}))
    values: list[Any] = (rows if isinstance(rows, pa.Table) else rows.read_all()).column("x").to_pylist()
    return values


@pytest.mark.parametrize("kind", [None, pa.int64(), pa.int32()], ids=str)
@pytest.mark.parametrize(
    "make", [iter, lambda values: (one for one in values), tuple, lambda values: dict.fromkeys(values).keys()]
)
def test_a_column_is_read_from_every_iterable(make: Callable[[Any], Any], kind: pa.DataType | None) -> None:
    assert read({"x": make([1, 2, 3])}, kind) == [1, 2, 3]


@pytest.mark.parametrize("values", [[[1], [2]], [DAY, None], [{"a": 1}]], ids=str)
def test_a_column_from_a_generator_has_all_its_rows(values: list[Any]) -> None:
    def rows() -> Iterator[Any]:
        yield from values

    assert read({"x": rows()}) == values


# A line for each: an array, and a type that cannot hold its values.
CHANGED: list[tuple[Any, pa.DataType]] = [
    (pd.Series([DAY]).dt.tz_localize("Asia/Tokyo"), pa.timestamp("us")),
    (pd.Series([DAY]), pa.timestamp("us", "Asia/Tokyo")),
    (pd.Series([DAY + datetime.timedelta(hours=5)]), pa.date32()),
    (np.array(["2024-01-01T05"], "M8[s]"), pa.date32()),
    (np.array([1], "M8[ns]"), pa.timestamp("s")),
    (pa.array([1], pa.timestamp("us", "Asia/Tokyo")), pa.timestamp("us")),
    (pa.array([86_400_000_001], pa.timestamp("us")), pa.date32()),
    (pa.array([1.55]), pa.decimal128(10, 1)),
    (pa.array([Decimal(123456789012345678)]), pa.float64()),
    (pa.array([2049]), pa.float16()),
    (pa.array([1.5]), pa.int64()),
    (pa.array([5]), pa.bool_()),
    (pa.array(["1e-999999999"]), pa.decimal128(10, 2)),
]


@pytest.mark.parametrize(("values", "kind"), CHANGED, ids=lambda value: str(getattr(value, "dtype", value))[:40])
def test_an_array_is_not_changed_by_the_schema(values: Any, kind: pa.DataType) -> None:
    with pytest.raises(InvalidInput):
        read({"x": values}, kind)
    with pytest.raises(InvalidInput, match=r"Column 'x' of type .* does not fit"):
        fit_schema(pa.table({"x": values}), pa.schema({"x": kind}))


@pytest.mark.parametrize(
    ("values", "kind", "plain"),
    [
        (pd.Series([DAY]), pa.timestamp("s"), [DAY]),
        (pd.Series([DAY, None]), pa.date32(), [DAY.date(), None]),
        (pd.Series([1, None], dtype="Int64"), pa.int32(), [1, None]),
        (np.array([1.0, 2.0]), pa.int64(), [1, 2]),
        (pa.chunked_array([[1], [2]]), pa.int8(), [1, 2]),
        (pa.array(["2024-01-01"]), pa.timestamp("s"), [DAY]),
        (pa.array([[1.5]]), pa.list_(pa.float32(), 1), [[1.5]]),
        (pa.array(["a"]), pa.dictionary(pa.int8(), pa.string()), ["a"]),
    ],
    ids=lambda value: str(getattr(value, "dtype", value))[:40],
)  # fmt: skip
def test_an_array_is_stored_as_the_type_of_the_schema(values: Any, kind: pa.DataType, plain: list[Any]) -> None:
    assert read({"x": values}, kind) == plain
    fitted = fit_schema(pa.table({"x": values}), pa.schema({"x": kind}))
    assert isinstance(fitted, pa.Table)
    assert fitted.column("x").to_pylist() == plain


@pytest.mark.parametrize(
    "values", [[pd.NaT, DAY], [pd.NA, 1], [2**70], [Decimal("1e-999999999")], ["\ud800"], [1, "a"]], ids=ascii
)
def test_rows_that_are_no_arrow_values_are_an_invalid_input(values: list[Any]) -> None:
    for data in ({"x": values}, [{"x": value} for value in values]):
        with pytest.raises(InvalidInput, match="cannot be converted to Arrow"):
            read(data)


ID = uuid.UUID(int=7)
EXTENDED = {
    "list of json": (pa.list_(pa.json_()), ['{"a":1}', None]),
    "struct of json": (pa.struct({"j": pa.json_()}), {"j": '{"a":1}'}),
    "list of uuid": (pa.list_(pa.uuid()), [ID, None]),
    "struct of uuid": (pa.struct({"u": pa.uuid()}), {"u": ID}),
    "list of structs of both": (pa.list_(pa.struct({"j": pa.json_(), "u": pa.uuid()})), [{"j": "[]", "u": ID}]),
}


@pytest.mark.parametrize("kind", EXTENDED)
def test_rows_are_added_beside_nested_extension_types(tmp_path: Path, kind: str) -> None:
    data_type, value = EXTENDED[kind]
    schema = pa.schema({"id": pa.int64(), "v": data_type})
    table = connect(tmp_path / "db").create_table("docs", [{"id": 0, "v": value}], schema=schema)
    for row in ({"id": 1}, {"id": 2, "v": None}, {"id": 3, "v": value}):
        table.add([row])
    assert table.to_arrow()["v"].to_pylist() == [value, None, None, value]
