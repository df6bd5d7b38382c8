"""Answer programs that ask Airflow, as a namespace of Lance, to backfill a column or to refresh a view."""

from __future__ import annotations

# --8<-- [start:example]
from airflow.sdk import DAG, Param

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
    default_args={"retries": 2},
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
    default_args={"retries": 2},
    tags=["geneva"],
    doc_md=__doc__,
):
    RefreshTaskGroup(
        view="{{ params.view }}",
        lance_conn_id=CONNECTION,
        **given("src_version", "max_rows_per_fragment", *SIZES),
    )
# --8<-- [end:example]
