"""A backfill as a task group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import TaskGroup

from airflow_geneva.operators.finish import FinishOperator
from airflow_geneva.operators.plan import PlanBackfillOperator
from airflow_geneva.plan.model import Sizing
from airflow_geneva.task_groups._shards import add_shards, not_none

_DEFAULT = Sizing()


class BackfillTaskGroup(TaskGroup):
    """Compute the missing values of a column: `plan`, `shards.apply` and `shards.commit` per shard, then `finish`.

    Each shard can be retried, cleared and watched separately, and its rows are visible as soon as it is committed. With
    nothing to do the shards are skipped, `finish` succeeds, and tasks downstream of the group run.

    Text parameters are templated. Empty text means None, so `where="{{ params.where or '' }}"` is no filter unless one
    is given; numbers may be text. Connections, `database` and `inline_below_rows` may come from `default_args`.

    Args:
        group_id: id of the group.
        table: the table's name.
        column: the computed column.
        udf: import path `"module:name"`; by default the column's own UDF.
        where: SQL filter on the rows.
        read_version: compute only rows that existed at this table version.
        concurrency: Spark task slots per spark-submit; by default `[geneva] concurrency`, which is 8.
        intra_applier_concurrency: threads per slot.
        batch_size: rows per UDF call.
        checkpoint_size, min_checkpoint_size, max_checkpoint_size: rows per checkpoint.
        checkpoint_interval: seconds between two checkpoints of a task.
        task_size: rows per Spark task.
        task_shuffle_diversity: number of stretches of the table that neighboring tasks are drawn from.
        shard_size: fragments per shard.
        commit_granularity: fragments per Lance commit; by default as many as keep a backfill at about 100 commits.
        on_code_change: `error`, `recompute` or `new_rows`, when rows hold another UDF version's value.
        continue_from: other versions of the UDF whose values are kept, separated by commas.
        errors_only: compute only rows the UDF failed on, however often.
        recompute_mixed: compute only rows whose value comes from another version.
        ignore_checkpoints: do not use what earlier runs computed and did not commit.
        lance_conn_id: the Airflow connection of the database; by default `lance_default`.
        database: another URI to use with that connection's storage options.
        spark_conn_id: the Airflow connection of the Spark master; by default `spark_default`.
        max_active_shards: maximum number of shards that are computed at once.
        spark_submit: arguments for `ApplyOperator`, which are those of `SparkSubmitOperator`.
        inline_below_rows: a shard with fewer rows to run is computed in its task, without Spark; by default
            `[geneva] inline_below_rows`, which is 0.
        kwargs: as for `TaskGroup`.

    Example:
        ```python
        with DAG("docs", schedule="@hourly", catchup=False, params={"where": Param(None, type=["null", "string"])}):
            BackfillTaskGroup(table="docs", column="n", where="{{ params.where or '' }}")
        ```
    """

    def __init__(
        self,
        group_id: str = "backfill",
        *,
        table: str,
        column: str,
        udf: str | None = None,
        where: str | None = None,
        read_version: int | str | None = None,
        concurrency: int | str | None = None,
        intra_applier_concurrency: int | str = _DEFAULT.intra_applier_concurrency,
        batch_size: int | str | None = None,
        checkpoint_size: int | str | None = None,
        min_checkpoint_size: int | str | None = None,
        max_checkpoint_size: int | str | None = None,
        checkpoint_interval: float | str = _DEFAULT.checkpoint_interval,
        task_size: int | str | None = None,
        task_shuffle_diversity: int | str | None = None,
        shard_size: int | str | None = None,
        commit_granularity: int | str | None = None,
        on_code_change: str = "error",
        continue_from: str | None = None,
        errors_only: bool | str = False,
        recompute_mixed: bool | str = False,
        ignore_checkpoints: bool | str = False,
        lance_conn_id: str | None = None,
        database: str | None = None,
        spark_conn_id: str | None = None,
        max_active_shards: int = 1,
        spark_submit: Mapping[str, Any] | None = None,
        inline_below_rows: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group_id=group_id, **kwargs)
        place = not_none(lance_conn_id=lance_conn_id, database=database)
        with self:
            plan = PlanBackfillOperator(
                task_id="plan",
                table=table,
                column=column,
                udf=udf,
                where=where,
                read_version=read_version,
                concurrency=concurrency,
                intra_applier_concurrency=intra_applier_concurrency,
                batch_size=batch_size,
                checkpoint_size=checkpoint_size,
                min_checkpoint_size=min_checkpoint_size,
                max_checkpoint_size=max_checkpoint_size,
                checkpoint_interval=checkpoint_interval,
                task_size=task_size,
                task_shuffle_diversity=task_shuffle_diversity,
                shard_size=shard_size,
                commit_granularity=commit_granularity,
                on_code_change=on_code_change,
                continue_from=continue_from,
                errors_only=errors_only,
                recompute_mixed=recompute_mixed,
                ignore_checkpoints=ignore_checkpoints,
                **place,
            )

            finish = FinishOperator(task_id="finish", plan_task_id=plan.task_id, table=table, **place)
            add_shards(
                plan,
                finish,
                place,
                max_active_shards,
                **not_none(spark_conn_id=spark_conn_id, inline_below_rows=inline_below_rows),
                **(spark_submit or {}),
            )
