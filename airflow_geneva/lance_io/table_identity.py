"""Check that a table is still the one that a job was planned on, and was not dropped and created again.

A table that is dropped and created again starts at version 1, and Lance commits to any table that it finds at the URI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_geneva.errors import InvalidInput, TableRemade
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors, is_failure
from airflow_geneva.lance_io.read_version import written_at
from airflow_geneva.lance_io.version_stamp import newest_stamp, stamp_of
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation

if TYPE_CHECKING:
    import lance


StorageOptions = tuple[tuple[str, str], ...]
_CLEANED_UP = "cleaned up"


@dataclass(frozen=True)
class PlannedTable:
    """The table version that a job was planned on; the job recognizes the table by it.

    Args:
        uri: normalized URI of the table.
        name: its name in its database.
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
        """Compare the reopened table with the planned one, without a request.

        Raises:
            TableRemade: it is another table.
        """
        same = dataset.version > self.version
        if not same and (dataset.version < self.version or written_at(dataset) != self.written):
            raise self._remade()

    def look(self, options: StorageOptions) -> None:
        """Check that the table is still the planned one; reads 64 bytes.

        Raises:
            TableRemade: it is another table, or it was dropped.
        """
        if not self._is_current(options):
            raise self._remade()

    def check_after_commit(
        self, options: StorageOptions, committed: lance.LanceDataset, transaction: lance.Transaction
    ) -> None:
        """Check the table immediately after a commit, and undo the commit if it reached another table.

        Raises:
            TableRemade: it is another table, or it was dropped.
        """
        if not self._is_current(options):
            self._take_back(options, int(committed.version), transaction)
            raise self._remade()

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
    """If the block fails and a table was dropped and created again, raise that instead of Lance's various errors.

    Raises:
        TableRemade: the block failed, and a table was dropped and created again.
    """
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
