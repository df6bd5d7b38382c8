"""What the task groups share: the tasks of each shard of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseOperator, task_group

from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators.apply import ApplyOperator
from airflow_geneva.operators.commit import CommitOperator
from airflow_geneva.operators.finish import FinishOperator


def given(**arguments: Any) -> dict[str, Any]:
    """Those arguments of a group that were given; the tasks have `default_args` and defaults for the others."""
    return {name: value for name, value in arguments.items() if value is not None}


def add_shards(
    plan: BaseOperator, finish: FinishOperator, place: Mapping[str, Any], max_active_shards: int, **apply: Any
) -> None:
    """Put `shards.apply` and `shards.commit`, mapped over a plan's shards, between it and `finish`.

    Args:
        place: connection and database.
        max_active_shards: how many shards are computed at once.
        apply: more arguments for `ApplyOperator`.

    Raises:
        InvalidInput: no shard could ever be computed.
    """
    group = plan.task_group
    if group is not None and next(group.iter_mapped_task_groups(), None) is not None:
        raise InvalidInput(
            f"The group of task {plan.task_id!r} is inside of a mapped task group. It maps its own shards, and Airflow "
            "runs no mapped group inside of another. Make a group for each table in a loop of Python, or trigger a DAG "
            "for each: TriggerDagRunOperator.partial(...).expand(conf=...)."
        )
    if isinstance(max_active_shards, int) and max_active_shards < 1:
        raise InvalidInput(f"max_active_shards={max_active_shards} makes no sense. Give at least 1.")

    # One mapped group, and not two mapped tasks: with those, one failed apply keeps every commit from running.
    @task_group(group_id="shards")
    def compute(shard: Any) -> None:
        applied = ApplyOperator(
            task_id="apply", shard=shard, max_active_tis_per_dagrun=max_active_shards, **place, **apply
        )  # fmt: skip
        applied >> CommitOperator(task_id="commit", shard=shard, **place)

    compute.expand(shard=plan.output) >> finish
