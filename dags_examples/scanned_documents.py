"""Every hour: read new and changed scans, and make their text searchable; a repaired function runs on failed pages."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta
from typing import Any

import pyarrow as pa
from airflow.sdk import DAG, Param, task

from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

ANSWERS = Param("error", type="string", enum=["error", "recompute", "new_rows"])
ON_CODE_CHANGE = "{{ params.on_code_change }}"

with DAG(
    dag_id="scanned_documents",
    schedule="@hourly",
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    params={"on_code_change": ANSWERS, "question": Param("Who keeps the ledger?", type="string")},
    tags=["geneva"],
    doc_md=__doc__,
):
    define_pages = CreateMaterializedViewOperator(
        task_id="define_pages",
        view="scan_pages",
        table="scans",
        select={"path": "path", "page": {"udf": "scan_udfs:pages_of", "inputs": ["file"]}},
        explode="page",
    )
    split = RefreshTaskGroup("split", view="scan_pages", source="scans", on_code_change=ON_CODE_CHANGE)

    define_texts = CreateMaterializedViewOperator(
        task_id="define_texts",
        view="scan_texts",
        table="scan_pages",
        select={
            "path": "path",
            "number": "page.number",
            "text": {"udf": "scan_udfs:read_text", "inputs": ["page"]},
            "language": {"udf": "scan_udfs:language", "inputs": ["text"]},
        },
    )
    read = RefreshTaskGroup("read", view="scan_texts", source="scan_pages", on_code_change=ON_CODE_CHANGE)

    define_chunks = CreateMaterializedViewOperator(
        task_id="define_chunks",
        view="scan_chunks",
        table="scan_texts",
        where="text IS NOT NULL",
        select={
            "path": "path",
            "number": "number",
            "language": "language",
            "chunk": {"udf": "scan_udfs:chunks", "inputs": ["text"]},
        },
        explode="chunk",
    )
    cut = RefreshTaskGroup("cut", view="scan_chunks", source="scan_texts", on_code_change=ON_CODE_CHANGE)

    define_index = CreateMaterializedViewOperator(
        task_id="define_index",
        view="scan_index",
        table="scan_chunks",
        select={
            "path": "path",
            "number": "number",
            "language": "language",
            "text": "chunk.text",
            "embedding": {"udf": "scan_udfs:embed", "inputs": ["text"]},
        },
    )
    embed = RefreshTaskGroup("embed", view="scan_index", source="scan_chunks", on_code_change=ON_CODE_CHANGE)

    @task
    def search(params: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks that are nearest to the question, with the document and the page."""
        from scan_udfs import embed

        question = embed(pa.array([params["question"]]))[0].as_py()
        view = LanceHook().get_database().open_table("scan_index")
        columns = ["path", "number", "language", "text", "_distance"]
        nearest = {"column": "embedding", "q": question, "k": 3}
        return view.lance.to_table(columns=columns, nearest=nearest, filter="__is_set").to_pylist()

    define_pages >> split >> define_texts >> read >> define_chunks >> cut >> define_index >> embed >> search()
# --8<-- [end:example]
