"""Which table and which version a job reads: open it, and check that the table was not dropped and created again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from airflow_geneva.errors import InvalidInput, StorageError, TableRemade
from airflow_geneva.faults import fault_point
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors, is_engine_error, is_failure
from airflow_geneva.lance_io.fragments import FragmentFiles, row_ids
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.lance_io.version_stamp import newest_stamp, stamp_of
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation

if TYPE_CHECKING:
    import lance


StorageOptions = tuple[tuple[str, str], ...]
_CLEANED_UP = "cleaned up"


def open_version(dataset: lance.LanceDataset, version: int) -> lance.LanceDataset:
    """Check a version out."""

    def gone(error: BaseException) -> InvalidInput:
        return InvalidInput(
            f"Version {version} of the table does not exist; it has versions up to {dataset.latest_version}, and "
            "cleaned-up ones are gone. Choose another version, or leave it out to read the newest."
        )

    with engine_errors(gone):
        return dataset.checkout_version(version)


def open_version_or_none(dataset: lance.LanceDataset, version: int) -> lance.LanceDataset | None:
    """Check a version out; None if it was cleaned up."""
    try:
        with engine_errors():
            return dataset.checkout_version(version)
    except EngineError:
        return None


def written_at(dataset: lance.LanceDataset) -> int:
    """Return when the open version was written, in nanoseconds, from its manifest; `versions()` opens every version."""
    return cast(int, dataset._ds.current_version()["timestamp"])


def version_exists(dataset: lance.LanceDataset, version: int) -> bool:
    """Whether a version still exists; lists the table's versions."""
    return any(int(reference["version"]) == version for reference in dataset.version_refs())


@contextmanager
def reporting_cleaned_up(location: TableLocation, dataset: lance.LanceDataset) -> Iterator[None]:
    """If a read in this block fails because the version was cleaned up meanwhile, raise an error that says so."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, (InvalidInput, LookupError)) and not is_engine_error(error):
            raise
        if version_exists(location.open(), dataset.version):
            raise
        raise StorageError(
            f"Version {dataset.version} of table {location.name!r} was cleaned up while it was being read. Nothing was "
            "started: run again, and the newest version is read."
        ) from error


class RowsAtVersion:
    """Finds rows that existed at the requested version."""

    def __init__(self, dataset: lance.LanceDataset, version: int | None) -> None:
        self.dataset = dataset
        self.version = dataset.version if version is None else version

    def among(self, files: FragmentFiles, rows: Ranges) -> Ranges:
        """Return the rows of a fragment among the given ones that existed at the version."""
        if self.version >= self.dataset.version:
            return rows
        if self._physical_rows.get(files.id) == files.physical_rows:
            return rows
        if not self.dataset.has_stable_row_ids:
            return Ranges.empty()
        return rows & Ranges.from_offsets(row_ids(self.dataset, files.id, created_by=self.version)[0])

    @cached_property
    def _physical_rows(self) -> dict[int, int]:
        """Number of physical rows of each fragment at that version."""
        then = open_version(self.dataset, self.version)
        return {fragment.fragment_id: fragment.metadata.physical_rows for fragment in then.get_fragments()}


@dataclass(frozen=True)
class PlannedTable:
    """The table version that a job was planned on; the job recognizes the table by it.

    Args:
        written: when the version was written, in nanoseconds, from its manifest; another table has another time.
        commit: its version stamp; "" if the job commits nothing to the table.
    """

    uri: str
    name: str
    version: int
    written: int
    commit: str = ""

    @staticmethod
    def of(location: TableLocation, dataset: lance.LanceDataset) -> PlannedTable:
        """Describe the open version, without a request."""
        return PlannedTable(location.uri, location.name, int(dataset.version), written_at(dataset))

    def stamped(self, options: StorageOptions) -> PlannedTable:
        """Add the version's stamp when a job begins; later checks compare with it."""
        stamp = stamp_of(*self._place(options), self.version)
        return replace(self, commit=_CLEANED_UP if stamp is None else stamp.commit)

    def check(self, dataset: lance.LanceDataset) -> None:
        """Compare the reopened table with the planned one, without a request."""
        same = dataset.version > self.version
        if not same and (dataset.version < self.version or written_at(dataset) != self.written):
            raise self._remade()

    def look(self, options: StorageOptions) -> None:
        """Check that the table is still the planned one; reads 64 bytes."""
        if not self._is_current(options):
            raise self._remade()

    def commit_transaction(
        self, options: StorageOptions, transaction: lance.Transaction, before: str, after: str
    ) -> lance.LanceDataset:
        """Commit a transaction; check the table immediately before and after, and undo a commit to another table.

        Args:
            before, after: the fault points around the commit.

        Raises:
            TableRemade: it is another table, or it was dropped.
            OSError: pylance's own, for example because another writer committed first.
        """
        import lance

        self.look(options)
        fault_point(before)
        committed = lance.LanceDataset.commit(self.uri, transaction, storage_options=dict(options) or None)
        fault_point(after)
        if not self._is_current(options):
            self._take_back(options, int(committed.version), transaction)
            raise self._remade()
        return committed

    def _place(self, options: StorageOptions) -> tuple[Storage, str]:
        folder, _, name = self.uri.rpartition("/")
        return Storage(folder, options), name.removesuffix(".lance")

    def _is_current(self, options: StorageOptions) -> bool:
        now = stamp_of(*self._place(options), self.version)
        if now is not None:
            return self.commit in ("", now.commit)
        # The version was cleaned up, or a new table has not reached it.
        newest = newest_stamp(*self._place(options))
        return newest is not None and newest.version > self.version

    def _take_back(self, options: StorageOptions, version: int, transaction: lance.Transaction) -> None:
        try:
            with engine_errors():
                now = TableLocation(self.uri, self.name, options).open()
                found = now.read_transaction(version) if now.version >= version else None
        except (InvalidInput, EngineError):  # dropped again
            return
        if found is None or found.uuid != transaction.uuid:
            return
        if now.version == version:
            undone = self._restore(options, version, version - 1)
            if undone == version + 1:
                return
            # Lance reported no conflict, but our restore also undid another writer's commit: undo the restore.
            self._restore(options, undone, undone - 1)
        raise TableRemade(
            f"{self._remade()} But its version {version} is a commit of this job, and others have committed since: "
            f"restore version {version - 1} and repeat their commits, or compute the column or the view again."
        )

    def _restore(self, options: StorageOptions, newest: int, version: int) -> int:
        import lance

        restore = lance.Transaction(newest, lance.LanceOperation.Restore(version))
        return int(lance.LanceDataset.commit(self.uri, restore, storage_options=dict(options) or None).version)

    def _remade(self) -> TableRemade:
        return TableRemade(
            f"Table {self.name!r} at {self.uri} was dropped and made again after the job was planned on version "
            f"{self.version} of it; the new table is left as it is. Plan again: clear the plan task with its "
            "downstream tasks; outside of Airflow, run the backfill or the refresh again."
        )


@contextmanager
def reporting_remade(tables: Sequence[PlannedTable], options: StorageOptions) -> Iterator[None]:
    """If the block fails and a table was dropped and created again, raise that instead of Lance's various errors."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, TableRemade) or not is_failure(error):
            raise
        for table in tables:
            with suppress(OSError):
                try:
                    table.look(options)
                except TableRemade as remade:
                    raise remade from error
        raise
