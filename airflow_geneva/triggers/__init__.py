"""Airflow triggers."""

from __future__ import annotations

from airflow_geneva.triggers.new_fragments import NewFragmentsTrigger

__all__ = ["NewFragmentsTrigger"]
