"""Find the files beside a table that are no longer needed, and remove them."""

from __future__ import annotations

from airflow_geneva.engine.cleanup.find import find_garbage
from airflow_geneva.engine.cleanup.remove import collect

__all__ = ["collect", "find_garbage"]
