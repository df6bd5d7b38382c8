"""Airflow task groups."""

from __future__ import annotations

from airflow_geneva.task_groups.groups import BackfillTaskGroup, LoadColumnsTaskGroup, RefreshTaskGroup

__all__ = ["BackfillTaskGroup", "LoadColumnsTaskGroup", "RefreshTaskGroup"]
