"""Once: compute the embeddings of `verses` with a new model, beside the live ones, and let a person promote them."""

from __future__ import annotations

# --8<-- [start:example]
from datetime import timedelta

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, task

from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators import AddColumnsOperator, PromoteColumnOperator
from airflow_geneva.task_groups import BackfillTaskGroup

with DAG(
    dag_id="change_model",
    schedule=None,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
    tags=["geneva"],
    doc_md=__doc__,
):
    define = AddColumnsOperator(
        task_id="define", table="verses", columns={"embedding_v2": "embedding_udfs.second:embed"}
    )
    backfill = BackfillTaskGroup(table="verses", column="embedding_v2", indexes="update")

    @task
    def index() -> None:
        """Index the candidate like the live column, if that has an index."""
        dataset = LanceHook().get_database().open_table("verses").lance
        indexed = {name for one in dataset.describe_indices() for name in one.field_names}
        if "embedding" in indexed and "embedding_v2" not in indexed:
            dataset.create_index("embedding_v2", "IVF_FLAT", num_partitions=1)

    # --8<-- [start:promote]
    promote = PromoteColumnOperator(
        task_id="promote",
        table="verses",
        column="embedding_v2",
        to="embedding",
        keep_as="embedding_v1",
        approve=True,
    )
    # --8<-- [end:promote]
    no_way_back = ApprovalOperator(task_id="no_way_back", subject="Drop the column of the model before?")

    @task
    def drop() -> None:
        table = LanceHook().get_database().open_table("verses")
        if "embedding_v1" in table.schema.names:
            table.drop_columns(["embedding_v1"])

    define >> backfill >> index() >> promote >> no_way_back >> drop()
# --8<-- [end:example]
