"""What the task groups share: the tasks of each shard of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseOperator, task_group

from airflow_geneva.operators.apply import ApplyOperator
from airflow_geneva.operators.commit import CommitOperator
from airflow_geneva.operators.finish import FinishOperator


def add_shards(
    plan: BaseOperator, finish: FinishOperator, place: Mapping[str, Any], max_active_shards: int, **apply: Any
) -> None:
    """Put `shards.apply` and `shards.commit`, mapped over a plan's shards, between it and `finish`.

    Args:
        place: connection and database.
        max_active_shards: how many shards are computed at once.
        apply: more arguments for `ApplyOperator`.
    """

    # One mapped group, and not two mapped tasks: with those, one failed apply keeps every commit from running.
    @task_group(group_id="shards")
    def compute(shard: Any) -> None:
        applied = ApplyOperator(
            task_id="apply", shard=shard, max_active_tis_per_dagrun=max_active_shards, **place, **apply
        )  # fmt: skip
        applied >> CommitOperator(task_id="commit", shard=shard, **place)

    compute.expand(shard=plan.output) >> finish
