"""`table.history()`: who wrote which version."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa

from airflow_geneva import Table, udf
from tests.support.counting import triple
from tests.support.tables import MakeTable


def rows_of(table: Table, **options: Any) -> list[tuple[Any, ...]]:
    found = table.history(**options).to_pylist()
    return [(row["operation"], row["columns"], row["rows"], row["job_id"]) for row in found]


def test_a_job_is_named_with_its_column_and_rows(make_table: MakeTable) -> None:
    table = make_table(20, per_fragment=10)
    table.add_columns({"y": triple})
    first = table.backfill("y", runner="inline")
    table.add(pa.table({"x": [20, None, 22]}))
    second = table.backfill("y", runner="inline")
    table.lance.delete("x = 3")
    found = rows_of(table)
    assert found[0] == ("Delete", [], None, None)
    assert found[1] == ("DataReplacement", ["y"], 3, second.job_id)
    operation, columns, rows, job = found[2]
    assert (operation, set(columns) >= {"x"}, rows, job) == ("Append", True, 3, None)
    assert ("DataReplacement", ["y"], 20, first.job_id) in found
    assert rows_of(table, limit=2) == found[:2]


def test_a_column_of_structs_is_named(make_table: MakeTable) -> None:
    table = make_table(3)
    both = udf(data_type=pa.struct({"a": pa.int64(), "b": pa.list_(pa.int64())}), version="1", name="both")
    table.add_columns({"nested": both(lambda x: {"a": x, "b": [x]})})
    job = table.backfill("nested", runner="inline").job_id
    assert ("DataReplacement", ["nested"], 3, job) in rows_of(table)


def test_a_view_names_its_refreshes(make_table: MakeTable) -> None:
    view = make_table(20, per_fragment=10).query().select({"y": (triple, ["x"])}).create_materialized_view(name="v")
    result = view.refresh(runner="inline")
    assert ("Overwrite", 20, result.job_id) in [(operation, rows, job) for operation, _, rows, job in rows_of(view)]


def test_versions_that_were_cleaned_up_are_left_out(make_table: MakeTable) -> None:
    table = make_table(5)
    table.add(pa.table({"x": [5]}))
    table.lance.cleanup_old_versions(timedelta(0))
    (newest,) = table.history().to_pylist()
    assert newest["version"] == table.version
    assert abs(newest["time"] - datetime.now(timezone.utc)) < timedelta(minutes=10)
