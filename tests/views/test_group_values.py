"""Values of groups: a view holds what its query makes, of every type, and says which column does not fit."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.errors import JobFailed

KEYS = [1, 2, 1, None, 2, 1]
NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.timezone.utc)
COMPARED: dict[str, pa.Array] = {
    "int8": pa.array([1, None, 3, 4, 5, 6], pa.int8()),
    "uint64": pa.array([1, 2, 3, 4, 5, 1 << 63], pa.uint64()),
    "half": pa.array([1.5, 2, None, 2, 3, 4], pa.float16()),
    "float": pa.array([1.5, 2, None, 2, 3, 4], pa.float32()),
    "decimal": pa.array([Decimal(at) / 100 for at in range(6)], pa.decimal128(5, 2)),
    "text": pa.array(["a", "b", None, "d", "e", "f"]),
    "bytes": pa.array([b"a", b"", None, b"d", b"e", b"f"]),
    "two": pa.array([b"ab", b"cd", None, b"xx", b"ee", b"ff"], pa.binary(2)),
    "zoned": pa.array([NOON + datetime.timedelta(days=at) for at in range(6)], pa.timestamp("us", "UTC")),
    "day": pa.array([NOON.date() + datetime.timedelta(days=at) for at in range(6)]),
    "time": pa.array([datetime.time(at) for at in range(6)], pa.time64("us")),
    "duration": pa.array([datetime.timedelta(at) for at in range(6)], pa.duration("us")),
    "bool": pa.array([True, False, None, True, True, False]),
    "dictionary": pa.array(["x", "y", None, "x", "z", "y"]).dictionary_encode(),
}
KEPT: dict[str, pa.Array] = {
    "list": pa.array([[1], [2, 3], None, [], [4], [5]], pa.list_(pa.int64())),
    "struct": pa.array([{"a": at, "b": "x"} for at in range(6)]),
    "vector": pa.array([[at, 1] for at in range(6)], pa.list_(pa.float32(), 2)),
}


def of_group(key: int | None, values: pa.Array) -> list[Any]:
    return [value for one, value in zip(KEYS, values.to_pylist(), strict=True) if one == key]


def test_a_view_of_groups_holds_values_of_every_type(tmp_path: Path) -> None:
    columns = COMPARED | KEPT
    table = connect(tmp_path / "db").create_table("events", pa.table({"key": KEYS, **columns}))
    wanted = {
        f"{name}_{function}": f"{function}({name})" for name in columns for function in ("count", "first", "last")
    }
    wanted |= {f"{name}_{function}": f"{function}({name})" for name in COMPARED for function in ("min", "max")}
    wanted |= {f"{name}_distinct": f"count(DISTINCT {name})" for name in COMPARED}
    query = table.query().group_by("key").agg({**wanted, "left": "first(left(text, 1))", "field": "max(struct.b)"})
    view = query.create_materialized_view(name="v")
    view.refresh(runner="inline")
    shown = view.to_arrow()
    assert shown.sort_by("key").to_pylist() == query.to_arrow().sort_by("key").to_pylist()
    rows = {row["key"]: row for row in shown.to_pylist()}
    assert sorted(map(str, rows)) == ["1", "2", "None"]
    for key, row in rows.items():
        assert (row["left"], row["field"]) == (of_group(key, COMPARED["text"])[0], "x")
        for name, values in columns.items():
            group = of_group(key, values)
            known = [value for value in group if value is not None]
            assert row[f"{name}_count"] == len(known)
            assert (row[f"{name}_first"], row[f"{name}_last"]) == (group[0], group[-1])
            if name in COMPARED:
                assert row[f"{name}_distinct"] == len(set(known))
                assert (row[f"{name}_min"], row[f"{name}_max"]) == ((min(known), max(known)) if known else (None, None))
            types = {shown.schema.field(f"{name}_{one}").type for one in ("first", "last")}
            assert types == {table.schema.field(name).type}


def test_functions_get_values_of_every_type(tmp_path: Path) -> None:
    columns = COMPARED | KEPT

    @udf(data_type=pa.list_(pa.string()))
    def arrays(*values: pa.Array) -> list[str]:
        return [f"{one.type} {one.to_pylist()}" for one in values]

    @udf(data_type=pa.list_(pa.string()))
    def lists(*values: list[Any]) -> list[str]:
        return [str(one) for one in values]

    @udf(data_type=pa.list_(pa.string()), input_columns=list(columns))
    def batches(parts: Iterator[pa.RecordBatch]) -> list[str]:
        table = pa.Table.from_batches(parts)
        return [f"{one.type} {one.to_pylist()}" for one in table.columns]

    table = connect(tmp_path / "db").create_table("events", pa.table({"key": KEYS, **columns}))
    specs = {"arrays": (arrays, list(columns)), "lists": (lists, list(columns)), "batches": batches}
    view = table.query().group_by("key").agg(specs).create_materialized_view(name="v")
    view.refresh(runner="inline")
    for row in view.to_arrow().to_pylist():
        groups = {name: of_group(row["key"], values) for name, values in columns.items()}
        assert row["lists"] == [str(group) for group in groups.values()]
        assert row["arrays"] == [f"{table.schema.field(name).type} {group}" for name, group in groups.items()]
        assert row["batches"] == row["arrays"]


def test_a_sum_that_does_not_fit_fails_the_refresh_and_leaves_the_view(tmp_path: Path) -> None:
    table = connect(tmp_path / "db").create_table("events", pa.table({"key": [1, 2], "x": [1 << 62, 1]}))
    view = table.query().group_by("key").agg({"total": "sum(x)"}).create_materialized_view(name="v")
    view.refresh(runner="inline")
    table.add(pa.table({"key": [1], "x": [1 << 62]}))
    with pytest.raises(JobFailed, match=r"Column 'total': sum\(x\) of a group, of up to 2 rows, does not fit int64"):
        view.refresh(runner="inline")
    assert view.to_arrow().sort_by("key").to_pydict() == {"key": [1, 2], "total": [1 << 62, 1]}
