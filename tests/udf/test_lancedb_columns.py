"""Columns that LanceDB declares by SQL are computed as if a UDF were theirs; other kinds are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table


def declare(table: Table, name: str, data_type: pa.DataType, sql: str, *inputs: str, **other: str) -> None:
    """Add a column as LanceDB 0.40 does."""
    about = {"kind": "sql", "expression": sql, "inputs": json.dumps(inputs)} | other
    metadata = {"computed_column": "true", **{f"computed_column.{key}": value for key, value in about.items()}}
    metadata["computed_refresh.source_signature"] = "{}"
    table.lance.add_columns(pa.schema([pa.field(name, data_type, metadata=metadata)]))


@pytest.fixture
def table(tmp_path: Any) -> Table:
    rows = {
        "id": pa.array(range(6), pa.int64()), "X y": pa.array([1, 2, None, 4, 5, 6], pa.int64()),
        "s": [{"a": at, "b": "q"} for at in range(6)], "l": [[1, 2], [], None, [3], [4], [5]],
    }  # fmt: skip
    return connect(tmp_path / "db").create_table("docs", pa.table(rows), max_rows_per_file=3)


@pytest.mark.parametrize(
    ("kind", "sql", "inputs", "expected"),
    [
        (pa.int64(), "id * 2", ["id"], [0, 2, 4, 6, 8, 10]),
        (pa.int64(), "ID + 1", ["id"], [1, 2, 3, 4, 5, 6]),
        (pa.int64(), "coalesce(`X y`, 7)", ["X y"], [1, 2, 7, 4, 5, 6]),
        (pa.int64(), "s.a + id", ["s.a", "id"], [0, 2, 4, 6, 8, 10]),
        (pa.uint64(), "array_length(l)", ["l"], [2, 0, None, 1, 1, 1]),
        (pa.bool_(), "id % 2 = 0", ["id"], [True, False] * 3),
        (pa.struct([("a", pa.int64()), ("b", pa.string())]), "s", ["s"], [{"a": at, "b": "q"} for at in range(6)]),
        (pa.string(), "'lit'", [], ["lit"] * 6),
    ],
)
def test_an_expression_is_computed_as_lancedb_computes_it(
    table: Table, kind: pa.DataType, sql: str, inputs: list[str], expected: list[Any]
) -> None:
    declare(table, "y", kind, sql, *inputs)
    result = table.backfill("y", runner="inline")
    assert (result.rows_computed, table.to_arrow(["y"])["y"].to_pylist()) == (6, expected)
    assert table.backfill("y", runner="inline").rows_computed == 0


def test_only_changed_rows_are_computed_again_and_columns_may_build_on_each_other(table: Table) -> None:
    declare(table, "y", pa.int64(), "id * 2", "id")
    declare(table, "z", pa.int64(), "y + 1", "y")
    table.backfill(["y", "z"], runner="inline")
    table.lance.update({"id": "100"}, where="id = 3")
    again = table.backfill(["y", "z"], runner="inline")
    assert sorted(table.to_arrow(["z"])["z"].to_pylist()) == [1, 3, 5, 9, 11, 201]
    assert [one.rows_computed for one in again] == [1, 1]
    assert "sql('id * 2')(id)" in repr(table)


@pytest.mark.spark
def test_executors_evaluate_the_expression(table: Table, spark: Any) -> None:
    declare(table, "y", pa.int64(), "id * 2", "id")
    table.backfill("y", runner="spark")
    assert table.to_arrow(["y"])["y"].to_pylist() == [0, 2, 4, 6, 8, 10]


def test_a_plan_is_carried_out_by_another_process(table: Table) -> None:
    from airflow_geneva.engine.udf import lancedb_columns, load_stored_udf

    declare(table, "y", pa.int64(), "id * 2", "id")
    path = table.definition("y").import_path
    assert path is not None
    vars(lancedb_columns).pop(path.partition(":")[2])
    made = load_stored_udf(path)
    assert made.code_version == table.definition("y").version
    assert made.import_path == path


def test_other_kinds_are_refused_by_name(table: Table) -> None:
    declare(table, "y", pa.int64(), "", "id", kind="function", function="embed")
    with pytest.raises(
        InvalidInput, match=r"declared by LanceDB as .*\"kind\": \"function\".* Refresh it with LanceDB"
    ):
        table.backfill("y", runner="inline")
    declare(table, "z", pa.int64(), "id * 2", inputs="[")
    with pytest.raises(InvalidInput, match="declared by LanceDB as"):
        table.backfill("z", runner="inline")


def test_columns_that_an_expression_names_keep_their_names(table: Table) -> None:
    declare(table, "y", pa.int64(), "id * 2", "id")
    with pytest.raises(InvalidInput, match=r"LanceDB computes 'y' from it"):
        table.rename_column("id", "key")
    with pytest.raises(InvalidInput, match="other columns are computed from them"):
        table.drop_columns(["id"])


def test_a_udf_takes_the_place_of_an_expression(table: Table) -> None:
    @udf(data_type=pa.int64(), version="1")
    def negative(id: int) -> int:
        return -id

    declare(table, "y", pa.int64(), "id * 2", "id")
    table.alter_columns({"y": negative})
    assert not any(key.startswith(b"computed_") for key in table.lance.schema.field("y").metadata)
    table.backfill("y", runner="inline")
    assert table.to_arrow(["y"])["y"].to_pylist() == [0, -1, -2, -3, -4, -5]
