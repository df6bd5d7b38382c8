"""Shared code of the task groups: the tasks of each shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseOperator, task_group

from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators.apply import ApplyOperator
from airflow_geneva.operators.commit import CommitOperator
from airflow_geneva.operators.finish import FinishOperator


def not_none(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None; `default_args` and the tasks' defaults apply to the others."""
    return {name: value for name, value in arguments.items() if value is not None}


def add_shards(
    plan: BaseOperator, finish: FinishOperator, place: Mapping[str, Any], max_active_shards: int, **apply: Any
) -> None:
    """Add `shards.apply` and `shards.commit`, mapped over the plan's shards, before `finish`.

    Args:
        place: connection and database.
        max_active_shards: maximum number of shards that are computed at once.
        apply: more arguments for `ApplyOperator`.

    Raises:
        InvalidInput: no shard could run.
    """
    group = plan.task_group
    if group is not None and next(group.iter_mapped_task_groups(), None) is not None:
        raise InvalidInput(
            f"The group of task {plan.task_id!r} is inside a mapped task group. It maps its own shards, and Airflow "
            "runs no mapped group inside another. Create a group for each table in a Python loop, or trigger a DAG "
            "for each: TriggerDagRunOperator.partial(...).expand(conf=...)."
        )
    if isinstance(max_active_shards, int) and max_active_shards < 1:
        raise InvalidInput(f"max_active_shards={max_active_shards} is not valid. Give at least 1.")

    # One mapped group, not two mapped tasks: with two, one failed apply would block every commit.
    @task_group(group_id="shards")
    def compute(shard: Any) -> None:
        applied = ApplyOperator(
            task_id="apply", shard=shard, max_active_tis_per_dagrun=max_active_shards, **place, **apply
        )  # fmt: skip
        applied >> CommitOperator(task_id="commit", shard=shard, **place)

    compute.expand(shard=plan.output) >> finish
