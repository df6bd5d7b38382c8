"""Tests of the functions and DAGs of the quick start, without a scheduler, Spark or a paid service."""

# --8<-- [start:function]
from pathlib import Path

import pyarrow as pa
import text_udfs
from text_udfs import count_words

from airflow_geneva import Database
from airflow_geneva.functions import embeddings
from airflow_geneva.testing import ModelService, assert_up_to_date


def test_the_function() -> None:
    assert count_words("the quick brown fox") == 4


# --8<-- [end:function]


# --8<-- [start:column]
def test_new_rows_are_computed_and_others_are_not(geneva_database: Database) -> None:
    table = geneva_database.create_table("docs", pa.table({"text": ["a b", "c"]}))
    table.add_columns({"words": count_words})
    assert table.backfill("words", runner="inline").rows_computed == 2
    table.add(pa.table({"text": ["d e f"]}))
    assert table.backfill("words", runner="inline").rows_computed == 1
    assert table.to_arrow()["words"].to_pylist() == [2, 1, 3]
    assert_up_to_date(table, "words")


# --8<-- [end:column]


# --8<-- [start:dag]
def test_the_dag_can_be_parsed() -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(Path(text_udfs.__file__).with_name("count_words.py")))
    assert not bag.import_errors
    assert {"define", "backfill.plan", "backfill.finish"} <= set(bag.dags["count_words"].task_ids)


# --8<-- [end:dag]


# --8<-- [start:service]
def test_embeddings_without_paying(geneva_database: Database, model_service: ModelService) -> None:
    model_service.dimensions = 4
    table = geneva_database.create_table("docs", pa.table({"text": ["a", "bbb"]}))
    table.add_columns({"embedding": (embeddings("text-embedding-3-small", 4), ["text"])})
    assert table.backfill("embedding", runner="inline").rows_computed == 2
    assert table.to_arrow()["embedding"].to_pylist() == [[1.0] * 4, [3.0] * 4]
    assert model_service.texts == ["a", "bbb"]


# --8<-- [end:service]
