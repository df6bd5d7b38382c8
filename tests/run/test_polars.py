"""Data frames of polars and pandas from tables, queries and views."""

from __future__ import annotations

import sys

import polars as pl
import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.errors import InvalidInput
from tests.support.tables import MakeTable


@udf(data_type=pa.int64(), version="1")
def double(x: int) -> int:
    return 2 * x


def test_tables_queries_and_views_are_read_into_data_frames(make_table: MakeTable) -> None:
    table = make_table(6)
    database = connect(table.location.database_uri)
    query = table.query().where("x > 2").select({"x": "x", "twice": (double, ["x"])})
    view = query.create_materialized_view(database, "doubled")
    view.refresh(runner="inline")
    expected = pl.DataFrame({"x": [3, 4, 5], "twice": [6, 8, 10]})
    assert query.to_polars().equals(expected)
    assert query.to_pandas()["twice"].tolist() == [6, 8, 10]
    assert view.to_polars(["x", "twice"]).equals(expected)
    assert isinstance(view.to_polars(), pl.DataFrame)
    assert table.to_polars(["x"], limit=2).equals(pl.DataFrame({"x": [0, 1]}))
    with pytest.raises(InvalidInput, match=r"has no columns \['y'\]"):
        table.to_polars(["y"])


def test_without_polars_an_error_says_what_to_install(make_table: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(1)
    monkeypatch.setitem(sys.modules, "polars", None)
    for read in (table.to_polars, table.query().to_polars):
        with pytest.raises(InvalidInput, match=r"pip install polars\. to_arrow works without it"):
            read()
