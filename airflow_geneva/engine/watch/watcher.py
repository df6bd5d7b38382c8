"""Check a table for a sensor or trigger: which rows are new, whether they are enough, and when to check again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.table_versions import (
    VersionStamp,
    check_no_mem_wal,
    newest_stamp,
    reporting_cleaned_up,
    stamp_of,
)
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import DatabaseLocation, TableLocation, locate
from airflow_geneva.engine.storage.refusals import is_access_refused
from airflow_geneva.engine.storage.timeouts import panics_as_errors, with_short_timeouts
from airflow_geneva.engine.udf.definition import read_definition
from airflow_geneva.engine.views.definition import ViewDefinition, is_view
from airflow_geneva.engine.views.group_tables import UNKNOWN, GroupTables
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.engine.watch.conditions import WaitCondition
from airflow_geneva.engine.watch.new_rows import (
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
from airflow_geneva.errors import GenevaError, InvalidInput, NoSuchTable

if TYPE_CHECKING:
    import lance

_MOST_IDS = 100
"""Maximum number of fragment ids in an event, which Airflow stores in its database."""

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


def _read_stamp(version: int, commit: str, files: Sequence[str] | None, highest: int) -> VersionStamp:
    """Parse a stamp that Airflow stored."""
    return VersionStamp(int(version), str(commit), None if files is None else tuple(map(str, files)), int(highest))


@dataclass(frozen=True)
class Observation:
    """The result of checking a table version: whether it has new rows, and the event to send if they are enough.

    `again` is the time of the next check if the table does not change. `told` is the text for the log.
    """

    pending: bool
    event: dict[str, Any] | None
    seen: VersionStamp | None
    again: datetime | None
    told: str


def newest_versions(database: DatabaseLocation, wanted: WaitCondition) -> NewestVersions:
    """Return the newest versions without opening the tables; an unchanged table costs one listing."""
    uri, short = database.uri, with_short_timeouts(database.uri, database.options)
    names = [wanted.table] if wanted.view is None else [wanted.table, wanted.view]
    return NewestVersions(
        *Storage(uri, short).side_by_side(*(partial(_newest_stamp, uri, name, short) for name in names))
    )


def _newest_stamp(uri: str, name: str, options: tuple[tuple[str, str], ...]) -> VersionStamp | None:
    try:
        return newest_stamp(locate(uri, name, options))
    except NoSuchTable:
        return None


def observe(
    database: DatabaseLocation,
    wanted: WaitCondition,
    seen: VersionStamp | None,
    now: datetime,
    newest: NewestVersions | None = None,
) -> Observation:
    """Find the new rows of a table, since the last seen version if `wanted.since` is None.

    It may raise any exception; see :meth:`TableWatcher.is_permanent`.
    """
    newest = newest or newest_versions(database, wanted)
    if newest.table is None:
        return Observation(False, None, None, None, f"Table {wanted.table} does not exist yet.")
    location = locate(database.uri, wanted.table, database.options)
    dataset = location.open()
    check_no_mem_wal(location.name, dataset)
    with reporting_cleaned_up(location, dataset):
        return _Check(database, location, dataset, wanted, seen, newest).observe(now)


@dataclass(frozen=True)
class _Check:
    """One check of a table version against a condition, for an observer with a last seen version, or None."""

    database: DatabaseLocation
    location: TableLocation
    dataset: lance.LanceDataset
    wanted: WaitCondition
    seen: VersionStamp | None
    newest: NewestVersions

    def observe(self, now: datetime) -> Observation:
        dataset, wanted = self.dataset, self.wanted
        found = self._unseen()
        stamp = self._stamp_of(dataset.version)
        if stamp is not None and wanted.since is None:
            files, highest_fragment_id = sample_files(dataset)
            stamp = replace(stamp, files=files, highest_fragment_id=highest_fragment_id)
        text = f"Version {dataset.version} of table {wanted.table} has {_in_words(found)}{self._since()}"
        if not found:
            return Observation(False, None, stamp, None, f"{text}.")
        short, again = "", None
        if wanted.min_new_rows is not None and found.row_count < wanted.min_new_rows:
            short = f"required: {counted(wanted.min_new_rows, 'row')}"
        elif wanted.min_new_fragments is not None and len(found.rows) < wanted.min_new_fragments:
            short = f"required: {counted(wanted.min_new_fragments, 'fragment')}"
        elif wanted.quiet_period is not None:
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
        return Observation(True, self._event(found), stamp, None, f"{text}.")

    def _unseen(self) -> NewRows:
        dataset, seen = self.dataset, self.seen
        kind, name = self.wanted.parsed
        if kind == "view":
            return self._unseen_by_view(name)
        if kind == "column":
            if name not in dataset.schema.names:
                return all_rows_as_new(dataset)
            inputs = read_definition(self.wanted.table, dataset.schema, name).input_columns or ()
            return new_rows_for_column(dataset, self.location.checkpoints, inputs, name)
        if kind == "version":
            return new_rows_since(dataset, int(name), self.wanted.changed_rows)
        if seen is None:
            return all_rows_as_new(dataset)
        then = self._stamp_of(seen.version)
        # A missing version was cleaned up, or belongs to a table that was dropped and created again.
        if then is None:
            other = seen.files is not None and is_recreated(dataset, seen.files, seen.highest_fragment_id)
        else:
            other = then != seen
        return all_rows_as_new(dataset) if other else new_rows_since(dataset, seen.version, self.wanted.changed_rows)

    def _stamp_of(self, version: int) -> VersionStamp | None:
        if self.newest.table is not None and version == self.newest.table.version:
            return self.newest.table
        return stamp_of(self.location, version)

    def _unseen_by_view(self, name: str) -> NewRows:
        database, table = self.database, self.wanted.table
        if self.newest.view is None:
            return all_rows_as_new(self.dataset)
        location = locate(database.uri, name, database.options)
        view = location.open()
        if not is_view(view.schema.metadata):
            raise InvalidInput(f"since='view:{name}': {name!r} is a table and not a view.")
        definition = ViewDefinition.read(view.schema.metadata, name)
        if not definition.is_of(database.uri, table):
            raise InvalidInput(
                f"The source of view {name!r} is {definition.source_table!r} in {definition.source_database}, not "
                f"{table!r} in {database.uri}. Wait for the view's own source."
            )
        reads, shown = [column.name for column in definition.source_reads], CommittedViewState(location, view)
        if definition.grouping is None:
            return new_rows_for_view(self.dataset, reads, shown.snapshot, self.wanted.changed_rows)
        hidden = GroupTables.open(location)
        commit = hidden.commit_of(shown.source_version)
        known = hidden.state_for(definition, shown.snapshot) != UNKNOWN
        if hidden.shown is not None and known and hidden.rows_show(commit):
            return new_rows_for_view(self.dataset, reads, hidden.shown.snapshot, self.wanted.changed_rows)
        # A refresh began and did not end: the view does not show what its hidden tables do.
        if commit is None or commit.is_of_another(self.dataset):
            return all_rows_as_new(self.dataset)
        return new_rows_since(self.dataset, commit.source_version, self.wanted.changed_rows)

    def _event(self, found: NewRows) -> dict[str, Any]:
        return {
            "table": self.wanted.table,
            "since": self.wanted.since,
            "from_version": found.version or None,
            "version": int(self.dataset.version),
            "fragments": len(found.rows),
            "fragment_ids": list(found.fragments[:_MOST_IDS]),
            "new_rows": found.new_rows,
            "changed_rows": found.changed_rows,
            "deleted_rows": found.deleted_rows,
        }

    def _since(self) -> str:
        kind, name = self.wanted.parsed
        if kind in ("view", "column"):
            return f" that {kind} {name} has not seen"
        if kind == "version":
            return f" since version {name}"
        return "" if self.seen is None else f" since version {self.seen.version}"


def _in_words(found: NewRows) -> str:
    parts = [counted(found.new_rows, "row")] if found.new_rows or not found else []
    parts += [counted(found.changed_rows, "updated row")] if found.changed_rows else []
    lost = "perhaps deleted rows" if found.deleted_rows is None else counted(found.deleted_rows, "deleted row")
    parts += [lost] if found.deleted_rows != 0 else []
    return " and ".join(parts) + f" in {counted(len(found.rows), 'fragment')}"


class TableWatcher:
    """Checks a table repeatedly, and opens it only after a change; `settled` are the versions already reported."""

    def __init__(self, wanted: WaitCondition, settled: NewestVersions | None = None) -> None:
        self.wanted = wanted
        self.settled = settled
        self._waiting_at: NewestVersions | None = None
        self._again: datetime | None = None
        self._event: dict[str, Any] | None = None

    def step(self, database: DatabaseLocation, now: datetime) -> Observation | None:
        """Check the table if it may have new rows; None if nothing changed. Raises as :func:`observe` does."""
        with panics_as_errors(f"Table {self.wanted.table} in {database.uri}"):
            stamps = newest_versions(database, self.wanted)
            if stamps == self.settled or (stamps == self._waiting_at and not (self._again and self._again <= now)):
                return None
            found = observe(database, self.wanted, self.settled.table if self.settled else None, now, stamps)
        self._waiting_at, self._again = stamps, found.again
        if found.seen is not None and (found.event or not found.pending):
            self.settled = NewestVersions(found.seen, stamps.view)
        if found.event is not None and found.event == self._event:
            # The view changed, perhaps by the refresh that the event triggered, but still lacks the same rows.
            return replace(found, event=None)
        self._event = found.event
        return found

    def pause(self, longest: float, now: datetime) -> float:
        """Return the seconds until the next step."""
        if self._again is None:
            return longest
        return min(longest, max(0.0, (self._again - now).total_seconds()))

    @staticmethod
    def is_permanent(error: BaseException) -> bool:
        """Whether retrying is useless: the request is not valid, or the store denies access (not: is unreachable)."""
        chain = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        if any(is_access_refused(one) or "NoSuchBucket" in str(one) for one in chain):
            return True
        # An error of pylance about a table or store may be temporary; an InvalidInput of this package is not.
        passing = [one for one in chain if not isinstance(one, GenevaError) and isinstance(one, _TRANSIENT)]
        return isinstance(error, InvalidInput) and not passing
