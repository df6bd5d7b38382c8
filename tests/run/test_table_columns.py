"""Columns that several runs define at once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva.engine.run.table_columns import TableColumns
from airflow_geneva.errors import InvalidInput
from tests.support.counting import double, triple
from tests.support.tables import MakeTable


@pytest.mark.parametrize("other", ["the same column", "other rows"])
def test_columns_are_defined_in_spite_of_other_writers(
    other: str, make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, add = make_table(3), TableColumns.add
    calls: list[Any] = []

    def meanwhile(columns: TableColumns, specs: Any) -> None:
        calls.append(specs)
        if len(calls) == 1 and other == "the same column":
            add(columns, specs)
        if len(calls) == 1 and other == "other rows":
            raise OSError("Commit conflict for version 2")
        add(columns, specs)

    monkeypatch.setattr(TableColumns, "add", meanwhile)
    found = TableColumns(table.location).define({"y": triple})
    assert (found, len(calls)) == ((([], []), 1) if other == "the same column" else ((["y"], []), 2))
    assert TableColumns(table.location).define({"y": double, "z": (double, ["y"])}) == (["z"], ["y"])
    assert table.schema.field("z").type == pa.int64()


def test_what_no_other_writer_explains_is_an_error(make_table: MakeTable) -> None:
    with pytest.raises(InvalidInput, match="x"):
        TableColumns(make_table(3).location).define({"x": triple})
