"""Airflow task groups."""

from __future__ import annotations

from airflow_geneva.task_groups.backfill import BackfillTaskGroup

__all__ = ["BackfillTaskGroup"]
