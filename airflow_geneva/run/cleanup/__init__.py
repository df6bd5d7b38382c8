"""Find what nothing needs any more beside a table, and remove it."""

from __future__ import annotations

from airflow_geneva.run.cleanup.removal import collect
from airflow_geneva.run.cleanup.search import find_garbage

__all__ = ["collect", "find_garbage"]
