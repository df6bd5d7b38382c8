"""Airflow task groups."""

from __future__ import annotations

from airflow_geneva.task_groups.backfill import BackfillTaskGroup
from airflow_geneva.task_groups.refresh import RefreshTaskGroup

__all__ = ["BackfillTaskGroup", "RefreshTaskGroup"]
