"""Answer programs that ask Airflow, as a namespace of Lance, to backfill a column, or to create or refresh a view."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_geneva.operators import CreateMaterializedViewOperator
from airflow_geneva.task_groups import BackfillTaskGroup, RefreshTaskGroup

CONNECTION = "{{ params.lance_conn_id }}"
SIZES = ("concurrency", "intra_applier_concurrency", "task_size")
CHECKPOINTS = ("checkpoint_size", "min_checkpoint_size", "max_checkpoint_size", "checkpoint_interval")


def params(*needed: str, optional: tuple[str, ...]) -> dict[str, Param]:
    """Declare what a request may give."""
    given = {name: Param(type="string") for name in needed}
    return {**given, **{name: Param(None, type=["null", "string", "number"]) for name in optional}}


def given(*names: str) -> dict[str, str]:
    return {name: f"{{{{ params.{name} if params.{name} is not none else '' }}}}" for name in names}


FILTERS = ("where", "read_version", "num_frags", "commit_granularity")

with DAG(
    dag_id="geneva_backfill",
    schedule=None,
    params=params("lance_conn_id", "table", "column", optional=(*FILTERS, *SIZES, *CHECKPOINTS)),
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    BackfillTaskGroup(
        table="{{ params.table }}",
        column="{{ params.column }}",
        lance_conn_id=CONNECTION,
        **given(*FILTERS, *SIZES, *CHECKPOINTS),
    )

with DAG(
    dag_id="geneva_refresh",
    schedule=None,
    params=params("lance_conn_id", "view", optional=("src_version", "max_rows_per_fragment", *SIZES)),
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    RefreshTaskGroup(
        view="{{ params.view }}",
        lance_conn_id=CONNECTION,
        **given("src_version", "max_rows_per_fragment", *SIZES),
    )

with DAG(
    dag_id="geneva_create_view",
    schedule=None,
    params={
        **params("lance_conn_id", "view", "source_query", optional=("output_schema",)),
        "with_no_data": Param(True, type="boolean"),
    },
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    create = CreateMaterializedViewOperator(
        task_id="create",
        view="{{ params.view }}",
        lance_conn_id=CONNECTION,
        **given("source_query", "output_schema"),
    )

    @task.short_circuit
    def wants_data(params: dict[str, Any]) -> bool:
        return not params["with_no_data"]

    create >> wants_data() >> RefreshTaskGroup(view="{{ params.view }}", lance_conn_id=CONNECTION)
# --8<-- [end:example]
