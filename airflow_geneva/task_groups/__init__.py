"""Airflow task groups."""

from __future__ import annotations

from airflow_geneva.task_groups.groups import BackfillTaskGroup, RefreshTaskGroup

__all__ = ["BackfillTaskGroup", "RefreshTaskGroup"]
