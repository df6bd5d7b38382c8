"""Find the files beside a table that are no longer needed, and remove them."""

from __future__ import annotations

from airflow_geneva.run.cleanup.removal import collect
from airflow_geneva.run.cleanup.search import find_garbage

__all__ = ["collect", "find_garbage"]
