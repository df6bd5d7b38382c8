"""Check a table for a sensor or trigger: which rows are new, whether they are enough, and when to check again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_geneva.commit.view_state import CommittedViewState
from airflow_geneva.database import Database
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.lance_io.table_versions import VersionStamp, newest_stamp, reporting_cleaned_up, stamp_of
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.timeouts import panics_as_errors, with_short_timeouts
from airflow_geneva.storage.uri import without_credentials
from airflow_geneva.table import Table
from airflow_geneva.view import View
from airflow_geneva.watch.conditions import WaitCondition
from airflow_geneva.watch.new_rows import (
    NewRows,
    all_rows_as_new,
    committed_at,
    first_version,
    is_recreated,
    new_rows_for_column,
    new_rows_for_view,
    new_rows_since,
    sample_files,
)

if TYPE_CHECKING:
    import lance

_MOST_IDS = 100
"""Maximum number of fragment ids in an event, which Airflow stores in its database."""

_ACCESS_DENIED = re.compile(
    r"lacked (the necessary privileges|valid authentication)|status(?: code)?:? (401|403)\b|permission denied"
    r"|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|NoSuchBucket",
    re.IGNORECASE,
)

_TRANSIENT = (OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class NewestVersions:
    """The newest versions of a table and, if one is watched, of a view; None if it does not exist."""

    table: VersionStamp | None
    view: VersionStamp | None = None

    def to_json(self) -> list[list[Any] | None]:
        return [
            None if stamp is None else [stamp.version, stamp.commit, stamp.files, stamp.highest_fragment_id]
            for stamp in (self.table, self.view)
        ]

    @staticmethod
    def from_json(document: Any) -> NewestVersions:
        return NewestVersions(*(None if found is None else _read_stamp(*found) for found in document))


def _read_stamp(
    version: Any, commit: Any, files: Sequence[Any] | None = None, highest_fragment_id: Any = -1
) -> VersionStamp:
    """Parse a stamp that Airflow stored; older versions of this package wrote no files."""
    return VersionStamp(
        int(version), str(commit), None if files is None else tuple(map(str, files)), int(highest_fragment_id)
    )


@dataclass(frozen=True)
class Observation:
    """The result of checking a table.

    Args:
        pending: whether there is something new.
        event: the event to send; None to wait longer.
        seen: the version that was checked.
        again: when to check again even if the table does not change; None for never.
        told: for the log.
    """

    pending: bool
    event: dict[str, Any] | None
    seen: VersionStamp | None
    again: datetime | None
    told: str


def newest_versions(database: Database, wanted: WaitCondition) -> NewestVersions:
    """Return the newest versions without opening the tables."""
    place = Storage(database.uri, with_short_timeouts(database.uri, database.options))
    view = None if wanted.view is None else newest_stamp(place, wanted.view)
    return NewestVersions(newest_stamp(place, wanted.table), view)


def observe(database: Database, wanted: WaitCondition, seen: VersionStamp | None, now: datetime) -> Observation:
    """Find out what is new in a table, since the last seen version if `wanted.since` is None.

    Raises:
        Exception: anything; see :func:`is_permanent`.
    """
    with panics_as_errors(f"Table {wanted.table} in {database.uri}"):
        if newest_stamp(_place(database), wanted.table) is None:
            return Observation(False, None, None, None, f"Table {wanted.table} does not exist yet.")
        table = Table(database.location(wanted.table))
        dataset = table.lance
        with reporting_cleaned_up(table.location, dataset):
            return _look(database, table, dataset, wanted, seen, now)


def _look(
    database: Database,
    table: Table,
    dataset: lance.LanceDataset,
    wanted: WaitCondition,
    seen: VersionStamp | None,
    now: datetime,
) -> Observation:
    found = _unseen(database, table, dataset, wanted, seen)
    stamp = stamp_of(_place(database), wanted.table, dataset.version)
    if stamp is not None and wanted.since is None:
        files, highest_fragment_id = sample_files(dataset)
        stamp = replace(stamp, files=files, highest_fragment_id=highest_fragment_id)
    text = f"Version {dataset.version} of table {wanted.table} has {_in_words(found)}{_since(wanted, seen)}"
    if not found:
        return Observation(False, None, stamp, None, f"{text}.")
    short, again = _unmet_condition(found, wanted), None
    if not short and wanted.quiet_period is not None:
        quiet_at = committed_at(dataset, dataset.version) + timedelta(seconds=wanted.quiet_period)
        if quiet_at > now:
            short, again = f"the table has changed within {wanted.quiet_period:g} s", quiet_at
    if short and wanted.max_wait is not None:
        over_at = committed_at(dataset, first_version(dataset, found)) + timedelta(seconds=wanted.max_wait)
        if over_at <= now:
            text, short = f"{text}, some of it for {wanted.max_wait:g} s and more", ""
        else:
            again = over_at if again is None else min(again, over_at)
    if short:
        return Observation(True, None, stamp, again, f"{text}, but {short}: waiting for more.")
    return Observation(True, _event(dataset, wanted, found), stamp, None, f"{text}.")


def _place(database: Database) -> Storage:
    return Storage(database.uri, database.options)


def _unseen(
    database: Database, table: Table, dataset: lance.LanceDataset, wanted: WaitCondition, seen: VersionStamp | None
) -> NewRows:  # fmt: skip
    kind, name = wanted.parsed
    if kind == "view":
        return _unseen_by_view(database, table, dataset, name, wanted.changed_rows)
    if kind == "column":
        return _unseen_by_column(table, dataset, name)
    if kind == "version":
        return new_rows_since(dataset, int(name), wanted.changed_rows)
    if seen is None:
        return all_rows_as_new(dataset)
    then = stamp_of(_place(database), wanted.table, seen.version)
    # A missing version was cleaned up, or belongs to a table that was dropped and created again.
    if then is None:
        other = seen.files is not None and is_recreated(dataset, seen.files, seen.highest_fragment_id)
    else:
        other = then != seen
    if other:
        return all_rows_as_new(dataset)
    return new_rows_since(dataset, seen.version, wanted.changed_rows)


def _unseen_by_view(
    database: Database, table: Table, dataset: lance.LanceDataset, name: str, changed_rows: bool
) -> NewRows:  # fmt: skip
    if not database.location(name).exists():
        return all_rows_as_new(dataset)
    view = database.open_table(name)
    if not isinstance(view, View):
        raise InvalidInput(f"since='view:{name}': {name!r} is a table and not a view.")
    definition = view.view_definition
    if (definition.source_table, definition.source_database) != (table.name, without_credentials(database.uri)):
        raise InvalidInput(
            f"The source of view {name!r} is {definition.source_table!r} in {definition.source_database}, not "
            f"{table.name!r} in {database.uri}. Wait for the view's own source."
        )
    reads = [column.name for column in definition.reads]
    return new_rows_for_view(dataset, reads, CommittedViewState(view.location, view.lance).snapshot, changed_rows)


def _unseen_by_column(table: Table, dataset: lance.LanceDataset, column: str) -> NewRows:
    if column not in dataset.schema.names:
        return all_rows_as_new(dataset)
    inputs = table.definition(column, dataset).input_columns or ()
    return new_rows_for_column(dataset, table.location.checkpoints, inputs, column)


def _unmet_condition(found: NewRows, wanted: WaitCondition) -> str:
    if wanted.min_new_rows is not None and found.row_count < wanted.min_new_rows:
        return f"{wanted.min_new_rows:,} rows are required"
    if wanted.min_new_fragments is not None and len(found.rows) < wanted.min_new_fragments:
        return f"{wanted.min_new_fragments:,} fragments are required"
    return ""


def _event(dataset: lance.LanceDataset, wanted: WaitCondition, found: NewRows) -> dict[str, Any]:
    return {
        "table": wanted.table,
        "since": wanted.since,
        "from_version": found.version or None,
        "version": int(dataset.version),
        "fragments": len(found.rows),
        "fragment_ids": list(found.fragments[:_MOST_IDS]),
        "new_rows": found.new_rows,
        "changed_rows": found.changed_rows,
        "deleted_rows": found.deleted_rows,
    }


def _in_words(found: NewRows) -> str:
    parts = [f"{found.new_rows:,} rows"] if found.new_rows or not found else []
    parts += [f"{found.changed_rows:,} updated rows"] if found.changed_rows else []
    lost = "perhaps deleted rows" if found.deleted_rows is None else f"{found.deleted_rows:,} deleted rows"
    parts += [lost] if found.deleted_rows != 0 else []
    return " and ".join(parts) + f" in {len(found.rows):,} fragments"


def _since(wanted: WaitCondition, seen: VersionStamp | None) -> str:
    kind, name = wanted.parsed
    if kind in ("view", "column"):
        return f" that {kind} {name} has not seen"
    if kind == "version":
        return f" since version {name}"
    return "" if seen is None else f" since version {seen.version}"


class TableWatcher:
    """Checks a table repeatedly, and opens it only if it may have something new.

    `settled` are the versions up to which everything was reported.
    """

    def __init__(self, wanted: WaitCondition, settled: NewestVersions | None = None) -> None:
        self.wanted = wanted
        self.settled = settled
        self._waiting_at: NewestVersions | None = None
        self._again: datetime | None = None
        self._event: dict[str, Any] | None = None

    def step(self, database: Database, now: datetime) -> Observation | None:
        """Check the table if it may have something new; None if nothing changed. Raises as :func:`observe`."""
        stamps = newest_versions(database, self.wanted)
        if stamps == self.settled or (stamps == self._waiting_at and not (self._again and self._again <= now)):
            return None
        found = observe(database, self.wanted, self.settled.table if self.settled else None, now)
        self._waiting_at, self._again = stamps, found.again
        if found.seen is not None and (found.event or not found.pending):
            self.settled = NewestVersions(found.seen, stamps.view)
        if found.event is not None and found.event == self._event:
            # The view changed, perhaps by the refresh that the event triggered, and still lacks the same rows.
            return replace(found, event=None)
        self._event = found.event
        return found

    def pause(self, longest: float, now: datetime) -> float:
        """Seconds until the next step."""
        if self._again is None:
            return longest
        return min(longest, max(0.0, (self._again - now).total_seconds()))


def is_permanent(error: BaseException) -> bool:
    """Whether waiting does not help: the request is not valid, or the store denies access (not: is unreachable)."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(one, PermissionError) or _ACCESS_DENIED.search(str(one)) for one in chain):
        return True
    # An error of pylance about a table or store may be temporary; an InvalidInput of this package is not.
    passing = [one for one in chain if not isinstance(one, GenevaError) and isinstance(one, _TRANSIENT)]
    return isinstance(error, InvalidInput) and not passing
