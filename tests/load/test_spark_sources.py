"""Values are loaded from DataFrames and tables of Spark; Spark checks keys as this process does."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.load.request import LoadRequest, plan_from
from airflow_geneva.engine.run.choice import choose_runner
from airflow_geneva.engine.run.load import plan_load
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark.runner import SparkRunner
from airflow_geneva.table import Table
from tests.support.tables import MakeTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    return make_table(40, per_fragment=10)


def values(table: Table, column: str) -> list[Any]:
    return table.lance.to_table(columns=["id", column]).sort_by("id").column(column).to_pylist()


def captions(spark: SparkSession, ids: str = "id < 30") -> DataFrame:
    return spark.range(40).where(ids).selectExpr("id", "concat('c', id) as caption")


def test_a_dataframe_is_joined_where_it_is(table: Table, spark: SparkSession) -> None:
    table.lance.add_columns(pa.schema([("vector", pa.list_(pa.float32(), 2)), ("small", pa.int16())]))
    frame = spark.range(30).selectExpr(
        "id",
        "array(cast(id as float), 0.5f) as vector",
        "id as small",
        "concat('c', id) as `my caption`",
        "timestamp'2026-01-01 00:00:00 America/New_York' as at",
        "cast(id as decimal(10, 2)) as price",
        "named_struct('a', id, 'b', array('x')) as parts",
    )
    result = table.load_columns(frame, on="id")
    assert (result.rows_loaded, result.rows_missing) == (30, 10)
    job = connect(table.location.database_uri).job(result.job_id)
    assert job.runner == "spark"
    found = table.lance.to_table(filter="id = 7").to_pylist()[0]
    assert found["vector"] == [7.0, 0.5]
    assert (found["small"], found["my caption"], found["parts"]) == (7, "c7", {"a": 7, "b": ["x"]})
    assert found["at"] == datetime(2026, 1, 1, 5, tzinfo=timezone.utc)
    assert str(table.schema.field("at").type) == "timestamp[us, tz=UTC]"
    assert str(found["price"]) == "7.00"
    assert table.lance.count_rows("vector is null") == 10


def test_a_table_is_found_by_its_name_and_read_anew_by_each_load(table: Table, spark: SparkSession) -> None:
    captions(spark).write.mode("overwrite").saveAsTable("features")
    try:
        assert table.load_columns("default.features", on="id", format="spark").rows_loaded == 30
        captions(spark, "id >= 30").write.insertInto("features")
        assert table.load_columns("features", on="id", format="spark", runner="spark").rows_loaded == 10
        assert values(table, "caption") == [f"c{one}" for one in range(40)]
    finally:
        spark.sql("DROP TABLE features")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "inline"}, 'Only Spark has the rows of the DataFrame. Use runner="spark", or write them to files'),
        ({"on_duplicate": "last"}, "The rows of the DataFrame have no order, so there is no last one .* row_number"),
        ({"columns": ["other"]}, "a column to load 'other' is not in 'the DataFrame', which has id, caption"),
        ({"source": "no_such_table", "format": "spark"}, "(?s)Spark cannot read no_such_table: .*TABLE_OR_VIEW_NOT_F"),
        ({"on_duplicate": "any"}, "on_duplicate='any' is unknown"),
    ],
)
def test_what_does_not_fit_is_said_before_any_work(
    table: Table, spark: SparkSession, options: dict[str, Any], message: str
) -> None:
    version = table.version
    with pytest.raises(InvalidInput, match=message):
        table.load_columns(**{"source": captions(spark), "on": "id", **options})
    assert table.version == version


def test_columns_that_spark_cannot_tell_apart_are_refused_before_any_work(table: Table, spark: SparkSession) -> None:
    version = table.version
    with pytest.raises(InvalidInput, match=r"Spark cannot read the DataFrame: .*AMBIGUOUS_REFERENCE"):
        table.load_columns(spark.sql("SELECT 1L AS id, 'x' AS a, 'y' AS A"), on="id")
    assert table.version == version


def refusal(table: Table, source: Any, runner: str, **options: Any) -> str:
    with pytest.raises(InvalidInput) as refused:
        table.load_columns(source, runner=runner, **options)
    return str(refused.value)


MANY = [7, 7, 5, 5, 5, 3, 3, 1, 1, 9, 9, 8, 8, 2, None, None]
KEYS: dict[str, pa.Array] = {
    "numbers": pa.array(MANY, pa.uint64()),
    "texts": pa.array([None if one is None else f"é{one}" for one in MANY]),
    "times": pa.array(MANY, pa.timestamp("us", "UTC")),
    "dates": pa.array(MANY, pa.date32()),
    "halves": pa.array([None if one is None else np.float16(one / 2) for one in MANY], pa.float16()),
}


def test_spark_lists_the_same_keys_as_this_process(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = connect(tmp_path).create_table("docs", pa.table(KEYS), max_rows_per_file=5)
    given = pa.table({**KEYS, "v": pa.array(range(len(MANY)))})
    few, many = given.slice(0, 5), {"on": list(KEYS)[:2]}
    cases: list[tuple[pa.Table, dict[str, Any]]] = [
        *((given, {"on": name}) for name in ("texts", "times", "halves")),
        (few, many),
        (few, {"on": ["dates", "numbers"], "on_duplicate": "first", "on_missing": "error"}),
    ]
    here = [refusal(table, rows, "inline", columns=["v"], **options) for rows, options in cases]
    monkeypatch.setitem(sys.modules, "duckdb", None)
    on_spark = [refusal(table, rows, "spark", columns=["v"], **options) for rows, options in cases]
    assert here == on_spark
    assert "texts='é1' (2 rows); texts='é3' (2 rows); texts='é5' (3 rows)" in here[0]
    assert "; and 1 more. Remove them" in here[0]
    assert here[-1].startswith("11 rows of the table have keys that the rows that were given lacks, such as dates=")
    assert "v" not in table.schema.names


def test_spark_notes_the_keys_of_which_one_row_counts(table: Table, spark: SparkSession) -> None:
    given = pa.table({"id": [1, 2, 1], "caption": ["a", "b", "c"]})
    result = table.load_columns(given, on="id", on_duplicate="last", runner="spark")
    assert values(table, "caption")[1:3] == ["c", "b"]
    assert "1 keys of the source have several rows; the last counts." in result.notes


def test_duplicates_and_missing_keys_of_a_dataframe_are_found_on_spark(table: Table, spark: SparkSession) -> None:
    twice = captions(spark).union(captions(spark, "id in (3, 4)"))
    message = refusal(table, twice, "auto", on="id")
    assert message == "Several rows of the DataFrame have the same key: id=3 (2 rows); id=4 (2 rows). Remove them."
    message = refusal(table, captions(spark, "id < 39"), "auto", on="id", on_missing="error")
    assert message.startswith("1 rows of the table have keys that the DataFrame lacks, such as id=39.")


def saved(table: Table, request: LoadRequest) -> tuple[Any, PlannedJob]:
    plan = plan_from(table.location, request)
    return plan, PlannedJob(table.location, record_plan(plan, table.location), opened=plan.opened)


def test_a_plan_without_a_session_leaves_the_checks_to_the_task_on_spark(table: Table, spark: SparkSession) -> None:
    request = LoadRequest("features", "id", columns=["caption"], format="spark")
    with pytest.raises(InvalidInput, match=r"no session of Spark, and cannot see the columns of features. .* are x\. "):
        plan_from(table.location, request)
    table.lance.add_columns(pa.schema([("caption", pa.string())]))
    plan, job = saved(table, request)
    assert plan.notes == ("Spark checks the keys and the columns of the source before it stages anything.",)
    assert choose_runner(plan, Udfs({}), 10, try_new_code=False).runner == "spark"
    staged = set((Path(table.uri) / "data").iterdir())
    twice = captions(spark).union(captions(spark, "id = 3"))
    for frame, message in (
        (twice, "Several rows of features have the same key: id=3"),
        (captions(spark).withColumnRenamed("caption", "title"), "the column 'caption' is not in 'features'"),
        (captions(spark).selectExpr("id", "id as caption"), "'caption' of table 'docs' is string, and int64 in the s"),
    ):
        frame.createOrReplaceTempView("features")
        with pytest.raises(InvalidInput, match=message):
            job.apply_on(SparkRunner(spark), plan.shards[0])
    assert set((Path(table.uri) / "data").iterdir()) == staged
    captions(spark).createOrReplaceTempView("features")
    job.apply_on(SparkRunner(spark), plan.shards[0])
    assert job.finish([job.commit(plan.shards[0])]).rows_loaded == 30
    assert values(table, "caption")[28:31] == ["c28", "c29", None]
    spark.catalog.dropTempView("features")


def test_a_source_that_gets_duplicates_after_the_check_stops_the_load(table: Table, spark: SparkSession) -> None:
    captions(spark).createOrReplaceTempView("changing")
    plan = plan_load(table.location, LoadRequest("changing", "id", format="spark"), "auto", SparkRunner())[0]
    captions(spark).union(captions(spark, "id = 29")).createOrReplaceTempView("changing")
    job = PlannedJob(table.location, record_plan(plan, table.location), opened=plan.opened)
    with pytest.raises(InvalidInput, match="Several rows of the source have the same key, and had not when") as stopped:
        job.apply_on(SparkRunner(spark), plan.shards[0])
    assert "Traceback" not in str(stopped.value)
    spark.catalog.dropTempView("changing")


def test_a_dataframe_is_not_found_by_another_process(table: Table, spark: SparkSession) -> None:
    plan = plan_load(table.location, LoadRequest(captions(spark), "id"), "auto", SparkRunner())[0]
    job = PlannedJob(table.location, record_plan(plan, table.location))
    with pytest.raises(InvalidInput, match="The DataFrame was in the memory of the process that planned the load"):
        job.apply_on(SparkRunner(spark), plan.shards[0])
