"""Airflow sensors."""

from __future__ import annotations

from airflow_geneva.sensors.new_fragments import NewFragmentsSensor

__all__ = ["NewFragmentsSensor"]
