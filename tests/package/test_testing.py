"""`airflow_geneva.testing`: it finds what is not up to date, and its service answers and fails as it is told."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from airflow_geneva import Database, udf
from airflow_geneva.errors import JobFailed
from airflow_geneva.functions import chat, embeddings
from airflow_geneva.testing import ModelService, assert_up_to_date, geneva_database, model_service

__all__ = ["geneva_database", "model_service"]


@udf(data_type=pa.int64(), version="1")
def double(x: int) -> int:
    return 2 * x


@udf(data_type=pa.int64(), version="1", name="double")
def other(x: int) -> int:
    return 3 * x


def test_what_is_not_computed_or_computed_otherwise_is_found(geneva_database: Database) -> None:
    table = geneva_database.create_table("t", pa.table({"x": [1, 2, 0]}))
    table.add_columns({"y": (double, ["x"])})
    view = table.query().select({"y": (double, ["x"])}).create_materialized_view(geneva_database, "v")
    with pytest.raises(AssertionError, match="3 rows of column 'y' are not computed"):
        assert_up_to_date(table, "y")
    with pytest.raises(AssertionError, match="3 rows of view 'v' are not up to date"):
        assert_up_to_date(view)
    table.backfill("y", runner="inline")
    view.refresh(runner="inline")
    assert_up_to_date(table, "y")
    assert_up_to_date(view)
    table.backfill("y", udf=other, ignore_checkpoints=True, runner="inline")
    table.lance.update({"y": "7"}, where="x = 2")
    with pytest.raises(AssertionError, match="'y'"):
        assert_up_to_date(table, "y")


def test_rows_that_a_view_should_have_no_more_are_found(geneva_database: Database) -> None:
    table = geneva_database.create_table("t", pa.table({"x": [1, 2], "y": [4, 5], "other": [0, 0]}))
    of_rows = table.query().select(["x"]).create_materialized_view(geneva_database, "of_rows")
    of_groups = (
        table.query().group_by("y").agg({"n": "count(*)"}).create_materialized_view(geneva_database, "of_groups")
    )
    for view in (of_rows, of_groups):
        view.refresh(runner="inline")
    table.lance.update({"other": "7"}, where="x = 2")
    for view in (of_rows, of_groups):
        assert_up_to_date(view)
    table.lance.delete("x = 1")
    for view in (of_rows, of_groups):
        with pytest.raises(AssertionError, match=f"view '{view.name}' has rows that its query no longer gives"):
            assert_up_to_date(view)


@udf(data_type=pa.struct([("low", pa.int64()), ("high", pa.int64())]), version="1")
def around(x: int) -> dict[str, int]:
    return {"low": x - 1, "high": x + 1}


def test_of_columns_that_one_call_fills_each_is_compared_with_its_field(geneva_database: Database) -> None:
    table = geneva_database.create_table("t", pa.table({"x": [1, 2]}))
    table.add_columns({("low", "high"): around})
    table.backfill("low", runner="inline")
    assert_up_to_date(table, "low")
    assert_up_to_date(table, "high")


@udf(data_type=pa.int64(), version="1", on_error="skip")
def halve(x: int) -> int:
    return 10 // x


def test_rows_that_failed_are_told_apart_from_rows_that_are_not_computed(geneva_database: Database) -> None:
    table = geneva_database.create_table("t", pa.table({"x": [1, 2, 0]}))
    table.add_columns({"y": (halve, ["x"])})
    view = table.query().select({"y": (halve, ["x"])}).create_materialized_view(geneva_database, "v")
    table.backfill("y", runner="inline")
    view.refresh(runner="inline")
    table.add(pa.table({"x": [4, 5]}))
    with pytest.raises(AssertionError) as of_column:
        assert_up_to_date(table, "y")
    assert str(of_column.value) == (
        "2 rows of column 'y' are not computed, and 1 row failed and is tried again: table.get_errors(column_name='y') "
        "says why. Backfill it."
    )
    table.backfill("y", runner="inline")
    with pytest.raises(AssertionError, match=r"^1 row of column 'y' failed and is tried again: table\.get_errors"):
        assert_up_to_date(table, "y")
    view.refresh(runner="inline")
    with pytest.raises(AssertionError, match=r"^1 row of view 'v' failed and is tried again: view\.get_errors\(\)"):
        assert_up_to_date(view)


def test_the_service_answers_and_counts_and_fails_once(geneva_database: Database, model_service: ModelService) -> None:
    table = geneva_database.create_table("t", pa.table({"text": ["a", "bbb"]}))
    table.add_columns({"v": (embeddings("m", 4), ["text"]), "said": (chat("m", "Shout."), ["text"])})
    model_service.dimensions = 4
    model_service.failures.append(500)
    table.backfill("v", runner="inline")
    assert table.to_arrow()["v"].to_pylist() == [[1.0] * 4, [3.0] * 4]
    assert (model_service.texts, len(model_service.requests)) == (["a", "bbb"] * 2, 2)
    model_service.answer = str.upper
    table.backfill("said", runner="inline")
    assert table.to_arrow()["said"].to_pylist() == ["A", "BBB"]
    model_service.failures += [401] * 10
    table.add_columns({"w": (embeddings("other", 4), ["text"])})
    with pytest.raises(JobFailed, match="as the test asked for"):
        table.backfill("w", runner="inline")


def test_the_environment_is_as_before_when_the_service_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "before")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with ModelService():
        assert os.environ["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert (os.environ["OPENAI_API_KEY"], os.environ.get("OPENAI_BASE_URL")) == ("before", None)
