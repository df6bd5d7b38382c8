"""Whether a table is still the one that a job was planned on, and not another one that was made in its place.

A table that is dropped and made again begins to count its versions anew, and Lance commits to whatever table it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from airflow_geneva.errors import InvalidInput, TableRemade
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors, is_failure
from airflow_geneva.location import TableLocation
from airflow_geneva.storage import Storage
from airflow_geneva.version_stamp import newest_stamp, stamp_of

if TYPE_CHECKING:
    import lance


StorageOptions = tuple[tuple[str, str], ...]
_CLEANED_UP = "cleaned up"


@dataclass(frozen=True)
class PlannedTable:
    """A version of a table by which a job knows the table again.

    Args:
        uri: normalized URI of the table.
        name: its name in its database.
        version: the version.
        written: when it was written, in nanoseconds, as its manifest says; that of another table says another time.
        commit: its :class:`airflow_geneva.version_stamp.Stamp`; "" where nothing is to be committed.
    """

    uri: str
    name: str
    version: int
    written: int
    commit: str = ""

    @staticmethod
    def of(location: TableLocation, dataset: lance.LanceDataset) -> PlannedTable:
        """The version that is open; costs no request."""
        return PlannedTable(location.uri, location.name, int(dataset.version), _written(dataset))

    def stamped(self, options: StorageOptions) -> PlannedTable:
        """Read the stamp, once a job is to begin: a table that :meth:`check` knows later is the one that had it."""
        stamp = stamp_of(*self._place(options), self.version)
        return replace(self, commit=_CLEANED_UP if stamp is None else stamp.commit)

    def check(self, dataset: lance.LanceDataset) -> None:
        """Hold the table, opened again, against this one, as far as that costs no request.

        Raises:
            TableRemade: it is another table.
        """
        same = dataset.version > self.version
        if not same and (dataset.version < self.version or _written(dataset) != self.written):
            raise self._remade()

    def look(self, options: StorageOptions) -> None:
        """Look whether the table is still this one: one read of 64 bytes.

        Raises:
            TableRemade: it is another table, or gone.
        """
        if not self._stands(options):
            raise self._remade()

    def settle(self, options: StorageOptions, committed: lance.LanceDataset, transaction: lance.Transaction) -> None:
        """Look immediately after a commit, and take it back if it reached another table.

        Raises:
            TableRemade: it is another table, or gone.
        """
        if not self._stands(options):
            self._take_back(options, int(committed.version), transaction)
            raise self._remade()

    def _place(self, options: StorageOptions) -> tuple[Storage, str]:
        folder, _, name = self.uri.rpartition("/")
        return Storage(folder, options), name.removesuffix(".lance")

    def _stands(self, options: StorageOptions) -> bool:
        now = stamp_of(*self._place(options), self.version)
        if now is not None:
            return self.commit in ("", now.commit)
        # The version was cleaned up, or the table has not come so far again.
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
            # Lance lets a restore undo what others have just committed, without a conflict.
            self._restore(options, undone, undone - 1)
        raise TableRemade(
            f"{self._remade()} But its version {version} is a commit of this job, and others have committed since: "
            f"restore version {version - 1} and repeat their commits, or compute the column or the view anew."
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


def _written(dataset: lance.LanceDataset) -> int:
    return cast(int, dataset._ds.current_version()["timestamp"])


@contextmanager
def naming_remade(tables: Sequence[PlannedTable], options: StorageOptions) -> Iterator[None]:
    """Let what fails because a table was made again say so: its files are gone, which Lance says in many ways.

    Raises:
        TableRemade: the body failed, and a table was made again.
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
