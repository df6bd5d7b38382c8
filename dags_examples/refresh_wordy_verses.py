"""Whenever `verses` changes, create or refresh a view of its long verses."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.sdk import DAG

from airflow_geneva.assets import lance_asset, one_run_per_batch
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

with DAG(
    dag_id="refresh_wordy_verses",
    schedule=one_run_per_batch(lance_asset("verses")),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    define = CreateMaterializedViewOperator(
        task_id="define",
        view="wordy_verses",
        table="verses",
        where="length(text) > 150",
        select={
            "place": "book || ' ' || chapter || ':' || verse",
            "text": "text",
            "embedding": "embedding",
            "words": {"udf": "embedding_udfs.counted:counted_words", "inputs": ["text"]},
        },
    )
    define >> RefreshTaskGroup(view="wordy_verses", source="verses", inline_below_rows=20_000)
# --8<-- [end:example]
