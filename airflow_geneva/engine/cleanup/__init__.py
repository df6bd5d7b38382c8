"""Find the files beside a table that are no longer needed, and remove them."""

from __future__ import annotations

from datetime import timedelta

from airflow_geneva.engine.cleanup.find import find_garbage
from airflow_geneva.engine.cleanup.garbage import Garbage
from airflow_geneva.engine.cleanup.remove import collect
from airflow_geneva.engine.storage.location import TableLocation

__all__ = ["clean_up", "collect", "find_garbage"]


def clean_up(location: TableLocation, ttl: timedelta | str, dry_run: bool) -> Garbage:
    """Remove the garbage beside a table that is older than `ttl`, and return it; with `dry_run` only return it.

    Raises:
        StorageError: files or jobs cannot be listed, or a file cannot be removed.
    """
    garbage = find_garbage(location, ttl)
    return garbage if dry_run else collect(location, garbage)
