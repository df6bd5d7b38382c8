"""Airflow operators."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_geneva.operators.application import SparkApplication, compute_shard, spark_application
    from airflow_geneva.operators.apply import ApplyOperator
    from airflow_geneva.operators.approve import ApproveOperator
    from airflow_geneva.operators.cleanup import CleanupCheckpointsOperator
    from airflow_geneva.operators.columns import AddColumnsOperator
    from airflow_geneva.operators.commit import CommitOperator
    from airflow_geneva.operators.finish import FinishOperator
    from airflow_geneva.operators.plan import PlanBackfillOperator
    from airflow_geneva.operators.plan_load import PlanLoadOperator
    from airflow_geneva.operators.plan_refresh import PlanRefreshOperator
    from airflow_geneva.operators.promote import PromoteColumnOperator
    from airflow_geneva.operators.refresh_database import RefreshDatabaseOperator
    from airflow_geneva.operators.views import CreateMaterializedViewOperator

__all__ = [
    "AddColumnsOperator",
    "ApplyOperator",
    "ApproveOperator",
    "CleanupCheckpointsOperator",
    "CommitOperator",
    "CreateMaterializedViewOperator",
    "FinishOperator",
    "PlanBackfillOperator",
    "PlanLoadOperator",
    "PlanRefreshOperator",
    "PromoteColumnOperator",
    "RefreshDatabaseOperator",
    "SparkApplication",
    "compute_shard",
    "spark_application",
]

# Lazy imports: a DAG that only plans does not load the Spark provider.
_HOMES = {
    "AddColumnsOperator": "airflow_geneva.operators.columns",
    "ApplyOperator": "airflow_geneva.operators.apply",
    "ApproveOperator": "airflow_geneva.operators.approve",
    "CleanupCheckpointsOperator": "airflow_geneva.operators.cleanup",
    "CommitOperator": "airflow_geneva.operators.commit",
    "CreateMaterializedViewOperator": "airflow_geneva.operators.views",
    "FinishOperator": "airflow_geneva.operators.finish",
    "PlanBackfillOperator": "airflow_geneva.operators.plan",
    "PlanLoadOperator": "airflow_geneva.operators.plan_load",
    "PlanRefreshOperator": "airflow_geneva.operators.plan_refresh",
    "PromoteColumnOperator": "airflow_geneva.operators.promote",
    "RefreshDatabaseOperator": "airflow_geneva.operators.refresh_database",
    "SparkApplication": "airflow_geneva.operators.application",
    "compute_shard": "airflow_geneva.operators.application",
    "spark_application": "airflow_geneva.operators.application",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
