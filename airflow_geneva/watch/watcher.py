"""Check a table for a sensor or trigger: which rows are new, whether they are enough, and when to check again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_geneva.commit.view_state import ViewContents
from airflow_geneva.database import Database
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.lance_io.read_version import reading
from airflow_geneva.lance_io.version_stamp import Stamp, newest_stamp, stamp_of
from airflow_geneva.plan.new_rows import (
    Unseen,
    committed_at,
    everything,
    first_version,
    is_other_table,
    some_files,
    unseen_by_column,
    unseen_by_view,
    unseen_since,
)
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.timeouts import impatient, without_panics
from airflow_geneva.storage.uri import without_credentials
from airflow_geneva.table import Table
from airflow_geneva.view import View
from airflow_geneva.watch.conditions import Wanted

if TYPE_CHECKING:
    import lance

_MOST_IDS = 100
"""Maximum number of fragment ids in an event, which Airflow stores in its database."""

_REFUSED = re.compile(
    r"lacked (the necessary privileges|valid authentication)|status(?: code)?:? (401|403)\b|permission denied"
    r"|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|NoSuchBucket",
    re.IGNORECASE,
)

_PASSING = (OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Stamps:
    """The newest versions of a table and, if one is watched, of a view.

    Args:
        table: None if the table does not exist.
        view: None if the view does not exist, or none is watched.
    """

    table: Stamp | None
    view: Stamp | None = None

    def to_json(self) -> list[list[Any] | None]:
        return [
            None if stamp is None else [stamp.version, stamp.commit, stamp.files, stamp.highest]
            for stamp in (self.table, self.view)
        ]

    @staticmethod
    def from_json(document: Any) -> Stamps:
        return Stamps(*(None if found is None else _read_stamp(*found) for found in document))


def _read_stamp(version: Any, commit: Any, files: Sequence[Any] | None = None, highest: Any = -1) -> Stamp:
    """Parse a stamp that Airflow stored; older versions of this package wrote no files."""
    return Stamp(int(version), str(commit), None if files is None else tuple(map(str, files)), int(highest))


@dataclass(frozen=True)
class Look:
    """The result of checking a table.

    Args:
        pending: whether there is something new.
        event: the event to send; None to wait longer.
        seen: the version that was checked.
        again: when to check again even if the table does not change; None for never.
        told: a description for the log.
    """

    pending: bool
    event: dict[str, Any] | None
    seen: Stamp | None
    again: datetime | None
    told: str


def peek(database: Database, wanted: Wanted) -> Stamps:
    """Return the newest versions without opening the tables."""
    place = Storage(database.uri, impatient(database.uri, database.options))
    view = None if wanted.view is None else newest_stamp(place, wanted.view)
    return Stamps(newest_stamp(place, wanted.table), view)


def look(database: Database, wanted: Wanted, seen: Stamp | None, now: datetime) -> Look:
    """Find out what is new in a table.

    Args:
        seen: the last seen version, used if `wanted.since` is None.

    Raises:
        Exception: anything; see :func:`is_hopeless`.
    """
    with without_panics(f"Table {wanted.table} in {database.uri}"):
        return _look(database, wanted, seen, now)


def _look(database: Database, wanted: Wanted, seen: Stamp | None, now: datetime) -> Look:
    if newest_stamp(_place(database), wanted.table) is None:
        return Look(False, None, None, None, f"Table {wanted.table} does not exist yet.")
    table = Table(database.location(wanted.table))
    dataset = table.lance
    with reading(table.location, dataset):
        return _look_at(database, table, dataset, wanted, seen, now)


def _look_at(
    database: Database, table: Table, dataset: lance.LanceDataset, wanted: Wanted, seen: Stamp | None, now: datetime
) -> Look:
    found = _unseen(database, table, dataset, wanted, seen)
    stamp = stamp_of(_place(database), wanted.table, dataset.version)
    if stamp is not None and wanted.since is None:
        files, highest = some_files(dataset)
        stamp = replace(stamp, files=files, highest=highest)
    text = f"Version {dataset.version} of table {wanted.table} has {_in_words(found)}{_since(wanted, seen)}"
    if not found:
        return Look(False, None, stamp, None, f"{text}.")
    short, again = _too_little(found, wanted), None
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
        return Look(True, None, stamp, again, f"{text}, but {short}: waiting for more.")
    return Look(True, _event(dataset, wanted, found), stamp, None, f"{text}.")


def _place(database: Database) -> Storage:
    return Storage(database.uri, database.options)


def _unseen(
    database: Database, table: Table, dataset: lance.LanceDataset, wanted: Wanted, seen: Stamp | None
) -> Unseen:  # fmt: skip
    kind, name = wanted.parsed
    if kind == "view":
        return _unseen_by_view(database, table, dataset, name, wanted.changed_rows)
    if kind == "column":
        return _unseen_by_column(table, dataset, name)
    if kind == "version":
        return unseen_since(dataset, int(name), wanted.changed_rows)
    if seen is None:
        return everything(dataset)
    then = stamp_of(_place(database), wanted.table, seen.version)
    # A missing version was cleaned up, or belongs to a table that was dropped and created again.
    if then is None:
        other = seen.files is not None and is_other_table(dataset, seen.files, seen.highest)
    else:
        other = then != seen
    if other:
        return everything(dataset)
    return unseen_since(dataset, seen.version, wanted.changed_rows)


def _unseen_by_view(
    database: Database, table: Table, dataset: lance.LanceDataset, name: str, changed_rows: bool
) -> Unseen:  # fmt: skip
    if not database.location(name).exists():
        return everything(dataset)
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
    return unseen_by_view(dataset, reads, ViewContents(view.location, view.lance).snapshot, changed_rows)


def _unseen_by_column(table: Table, dataset: lance.LanceDataset, column: str) -> Unseen:
    if column not in dataset.schema.names:
        return everything(dataset)
    inputs = table.definition(column, dataset).input_columns or ()
    return unseen_by_column(dataset, table.location.checkpoints, inputs, column)


def _too_little(found: Unseen, wanted: Wanted) -> str:
    if wanted.min_new_rows is not None and found.row_count < wanted.min_new_rows:
        return f"{wanted.min_new_rows:,} rows are required"
    if wanted.min_new_fragments is not None and len(found.rows) < wanted.min_new_fragments:
        return f"{wanted.min_new_fragments:,} fragments are required"
    return ""


def _event(dataset: lance.LanceDataset, wanted: Wanted, found: Unseen) -> dict[str, Any]:
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


def _in_words(found: Unseen) -> str:
    parts = [f"{found.new_rows:,} rows"] if found.new_rows or not found else []
    parts += [f"{found.changed_rows:,} updated rows"] if found.changed_rows else []
    lost = "perhaps deleted rows" if found.deleted_rows is None else f"{found.deleted_rows:,} deleted rows"
    parts += [lost] if found.deleted_rows != 0 else []
    return " and ".join(parts) + f" in {len(found.rows):,} fragments"


def _since(wanted: Wanted, seen: Stamp | None) -> str:
    kind, name = wanted.parsed
    if kind in ("view", "column"):
        return f" that {kind} {name} has not seen"
    if kind == "version":
        return f" since version {name}"
    return "" if seen is None else f" since version {seen.version}"


class Watch:
    """Checks a table repeatedly, and opens it only if it may have something new.

    Args:
        wanted: the condition to wait for.
        settled: the versions up to which everything was reported; None at the beginning.
    """

    def __init__(self, wanted: Wanted, settled: Stamps | None = None) -> None:
        self.wanted = wanted
        self.settled = settled
        self._waiting_at: Stamps | None = None
        self._again: datetime | None = None
        self._event: dict[str, Any] | None = None

    def step(self, database: Database, now: datetime) -> Look | None:
        """Check the table if it may have something new; None if nothing changed.

        Raises:
            Exception: anything; see :func:`is_hopeless`.
        """
        stamps = peek(database, self.wanted)
        if stamps == self.settled or (stamps == self._waiting_at and not (self._again and self._again <= now)):
            return None
        found = look(database, self.wanted, self.settled.table if self.settled else None, now)
        self._waiting_at, self._again = stamps, found.again
        if found.seen is not None and (found.event or not found.pending):
            self.settled = Stamps(found.seen, stamps.view)
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


def is_hopeless(error: BaseException) -> bool:
    """Whether waiting does not help: the request is not valid, or the store denies access (not: is unreachable)."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(one, PermissionError) or _REFUSED.search(str(one)) for one in chain):
        return True
    # An error of pylance about a table or store may be temporary; an InvalidInput of this package is not.
    passing = [one for one in chain if not isinstance(one, GenevaError) and isinstance(one, _PASSING)]
    return isinstance(error, InvalidInput) and not passing
