"""Refresh the view `long_verses` as soon as `verses` has rows from any writer that the view has not seen."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_geneva.assets import new_fragments, one_run_per_batch, watched_lance_asset
from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import RefreshTaskGroup

new_verses = watched_lance_asset("verses", since="view:long_verses", changed_rows=True, poll_interval=60)

on_code_change = Param("error", type="string", enum=["error", "recompute", "new_rows"])

with DAG(
    dag_id="refresh_on_arrival",
    schedule=one_run_per_batch(new_verses),
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    params={"on_code_change": on_code_change},
    tags=["geneva"],
    doc_md=__doc__,
):

    @task
    def arrived(triggering_asset_events: Any = None) -> list[dict[str, Any] | None]:
        """Only for display in the run: the refresh finds out itself what to compute."""
        return [new_fragments(event) for events in triggering_asset_events.values() for event in events]

    define = CreateMaterializedViewOperator(
        task_id="define",
        view="long_verses",
        table="verses",
        where="length(text) > 100",
        select={"text": "text", "embedding": {"udf": "embedding_udfs:embed", "inputs": ["text"]}},
    )
    refresh = RefreshTaskGroup(view="long_verses", source="verses", on_code_change="{{ params.on_code_change }}")
    arrived() >> define >> refresh
# --8<-- [end:example]
