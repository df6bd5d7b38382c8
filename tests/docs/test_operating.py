"""The DAG of the page on operating is what the page says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.airflow
def test_only_the_apply_tasks_of_the_sized_dag_are_in_the_pool() -> None:
    dag = runpy.run_path(str(ROOT / "docs" / "snippets" / "sizing_dag.py"))["dag"]
    assert {task.task_id for task in dag.tasks if task.pool == "spark"} == {"backfill.shards.apply"}
    apply = dag.get_task("backfill.shards.apply")
    assert (apply.priority_weight, apply.max_active_tis_per_dagrun, apply.retries) == (10, 2, 2)
    assert dag.get_task("backfill.plan").sizing["shard_size"] == 500
