"""Every hour: cut new and changed documents into passages, embed these at a service, and search them."""

from __future__ import annotations

import asyncio

# --8<-- [start:example]
from datetime import timedelta
from typing import Any

import pyarrow as pa
from airflow.sdk import DAG, Param, task

from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.hooks.openai import openai_connection
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

SERVICE = "openai_default"

with DAG(
    dag_id="search_documents",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    params={"question": Param("Who said, let there be light?", type="string")},
    tags=["geneva"],
    doc_md=__doc__,
):
    passages = CreateMaterializedViewOperator(
        task_id="define_passages",
        view="passages",
        table="documents",
        select={"id": "id", "passage": {"udf": "passage_udfs:passages", "inputs": ["text"]}},
        explode="passage",
    )
    cut = RefreshTaskGroup("cut", view="passages", source="documents")

    embedded = CreateMaterializedViewOperator(
        task_id="define_embedded",
        view="embedded_passages",
        table="passages",
        select={
            "id": "id",
            "text": "passage.text",
            "embedding": {"udf": "passage_udfs:embed", "inputs": ["text"]},
        },
    )
    # --8<-- [start:embed]
    embed = RefreshTaskGroup("embed", view="embedded_passages", source="passages", openai_conn_id=SERVICE, max_cost=1.0)
    # --8<-- [end:embed]

    @task
    def search(params: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the passages that are nearest to the question."""
        from passage_udfs import embed

        with openai_connection(SERVICE):
            question = asyncio.run(embed(pa.array([params["question"]])))[0].as_py()
        view = LanceHook().get_database().open_table("embedded_passages")
        nearest = {"column": "embedding", "q": question, "k": 3}
        return view.lance.to_table(columns=["id", "text", "_distance"], nearest=nearest, filter="__is_set").to_pylist()

    passages >> cut >> embedded >> embed >> search()
# --8<-- [end:example]
