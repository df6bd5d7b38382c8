"""Find the files beside a table that are no longer needed, and remove them."""

from __future__ import annotations

from datetime import timedelta

from airflow_geneva.engine.cleanup.find import find_garbage
from airflow_geneva.engine.cleanup.garbage import Garbage
from airflow_geneva.engine.cleanup.remove import collect, remove_old_versions
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.hidden import hidden_tables

__all__ = ["clean_up", "collect", "find_garbage"]


def clean_up(location: TableLocation, ttl: timedelta | str, dry_run: bool) -> Garbage:
    """Remove the garbage beside a table that is older than `ttl`, and return it; with `dry_run` only return it.

    Of a view with hidden tables, also clean these up, and remove their versions that are older than `ttl`.

    Raises:
        StorageError: files or jobs cannot be listed, or a file cannot be removed.
    """
    found = [_clean_up(location, ttl, dry_run)]
    for hidden in hidden_tables(location):
        found.append(_clean_up(hidden, ttl, dry_run).below(hidden.uri.removeprefix(f"{location.uri}/")))
        if not dry_run:
            remove_old_versions(hidden, ttl)
    return Garbage.joined(found)


def _clean_up(location: TableLocation, ttl: timedelta | str, dry_run: bool) -> Garbage:
    garbage = find_garbage(location, ttl)
    return garbage if dry_run else collect(location, garbage)
