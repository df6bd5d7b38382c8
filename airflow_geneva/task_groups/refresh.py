"""A refresh of a view as a task group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import TaskGroup

from airflow_geneva.assets import lance_asset
from airflow_geneva.operators._templated import is_template
from airflow_geneva.operators.finish import FinishOperator
from airflow_geneva.operators.plan_refresh import PlanRefreshOperator
from airflow_geneva.plan.model import Sizing
from airflow_geneva.task_groups._shards import add_shards, not_none

_DEFAULT = Sizing()


class RefreshTaskGroup(TaskGroup):
    """Update a view to its source: `plan`, `shards.apply` and `shards.commit` per shard, then `finish`.

    Each shard can be retried, cleared and watched separately; the view changes once, in `finish`, when all shards are
    verified. With nothing to compute the shards are skipped, and `finish` only removes rows that are no longer in the
    query's result. With nothing to do it writes no version and sends no event; tasks downstream of the group run.

    Text parameters are templated. Empty text means None, and numbers may be text. Connections, `database` and
    `inline_below_rows` may come from `default_args`.

    Args:
        group_id: id of the group.
        view: the view's name.
        src_version: the source version to refresh to, which may be an earlier one; by default the newest.
        source: name of the view's source table or view, which Airflow shows as the inlet of the view's asset, unless
            it or the connection is a template.
        max_rows_per_fragment: rows of each new fragment of the view.
        concurrency: Spark task slots per spark-submit; by default `[geneva] concurrency`, which is 8.
        intra_applier_concurrency: threads per slot.
        batch_size: rows per UDF call.
        checkpoint_size, min_checkpoint_size, max_checkpoint_size: rows per checkpoint.
        checkpoint_interval: seconds between two checkpoints of a task.
        task_size: rows per Spark task.
        task_shuffle_diversity: number of stretches of the source that neighboring tasks are drawn from.
        shard_size: source fragments per shard.
        on_code_change: `error`, `recompute` or `new_rows`, when the view holds another UDF version's values.
        ignore_checkpoints: do not use what earlier runs computed.
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
        with DAG("long_docs", schedule=lance_asset("docs")):
            RefreshTaskGroup(view="long_docs", source="docs")
        ```
    """

    def __init__(
        self,
        group_id: str = "refresh",
        *,
        view: str,
        src_version: int | str | None = None,
        source: str | None = None,
        max_rows_per_fragment: int | str | None = None,
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
        on_code_change: str = "error",
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
            plan = PlanRefreshOperator(
                task_id="plan",
                view=view,
                src_version=src_version,
                max_rows_per_fragment=max_rows_per_fragment,
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
                on_code_change=on_code_change,
                ignore_checkpoints=ignore_checkpoints,
                **place,
            )
            # An asset must be known while Airflow parses the DAG.
            unknown = source is None or is_template(source) or is_template(plan.lance_conn_id)
            inlets = [] if unknown else [lance_asset(str(source), plan.lance_conn_id)]
            finish = FinishOperator(task_id="finish", plan_task_id=plan.task_id, table=view, inlets=inlets, **place)
            add_shards(
                plan,
                finish,
                place,
                max_active_shards,
                **not_none(spark_conn_id=spark_conn_id, inline_below_rows=inline_below_rows),
                **(spark_submit or {}),
            )
