"""Open a table version for a job, and recognize a table that was dropped and created again.

A table that was created again starts at version 1, and Lance commits to any table that it finds at the URI.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.conflicts import is_undecided
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.storage.catalogs import catalog_uri, options_in
from airflow_geneva.engine.storage.engine_errors import (
    EngineError,
    engine_errors,
    is_engine_error,
    is_failure,
    is_unavailable,
)
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.outages import StorageOptions
from airflow_geneva.engine.storage.places import allowed_places, check_manifest, with_places
from airflow_geneva.engine.storage.refusals import is_access_refused
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError, TableRemade

if TYPE_CHECKING:
    import lance

_CLEANED_UP = "cleaned up"
_MEM_WAL = "__lance_mem_wal"
_LANCE_RETRIES = 20  # pylance's own default
_RUN_AGAIN = (
    "Renew the credentials, or correct what they permit, and run again: the run finds what is visible, and commits the "
    "rest."
)
_MANIFEST = re.compile(r"(\d+)\.manifest")
_LAST = 2**64 - 1
"""Lance names a manifest by this number minus its version, so that the newest sorts first; older tables by version."""
_KEPT: ProcessMemo[str, bool] = ProcessMemo(4096)
"""Whether the Lance session of this process keeps the newest manifest of a table on an object store, by its URI."""
_VERSIONS = "_versions"
_MOST_KEPT_FRAGMENTS = 20_000
_START = 64
"""Bytes to read from a manifest: it begins with its transaction, which begins with a unique id."""


@dataclass(frozen=True)
class VersionStamp:
    """Identifies one version of one table.

    Args:
        commit: hash of the commit; the same version of a table that was created again has another hash.
        files: suffixes of the names of some data files, None if the table was not opened. While one of these files
            exists, it is still the same table, even if the version was cleaned up.
        highest_fragment_id: its highest fragment id, -1 for none; a table that is created again starts from 0.
    """

    version: int
    commit: str
    files: tuple[str, ...] | None = field(default=None, compare=False)
    highest_fragment_id: int = field(default=-1, compare=False)


def newest_stamp(location: TableLocation) -> VersionStamp | None:
    """Return the stamp of a table's newest version, or None.

    On an object store, this costs one listing until there is a new version: pylance compares the ETag in the listing
    with that of the manifest in memory. Very large manifests are not kept in memory; 64 bytes of them are read instead.
    """
    place = location.uri
    folder = Storage(place, location.options)
    with suppress(FileNotFoundError, InvalidInput):  # the table was dropped or cannot be opened: see below
        if not folder.local and _KEPT.get(place) is not False and (place in _KEPT or location.exists()):
            newest = location.open()
            _KEPT[place] = newest.stats.dataset_stats()["num_fragments"] <= _MOST_KEPT_FRAGMENTS
            return _stamp_of(location, int(newest.version), written_at(newest))
    if _KEPT.get(place):
        _KEPT.pop(place, None)
    versions: dict[int, str] = {}
    for name in folder.list_folder(_VERSIONS)[1]:
        if number := _MANIFEST.fullmatch(name):
            version = int(number[1])
            versions[_LAST - version if len(number[1]) == 20 else version] = name
    with suppress(FileNotFoundError):  # dropped meanwhile
        if versions:
            last = max(versions)
            return VersionStamp(last, _commit(folder, versions[last]))
    return None


@functools.lru_cache(maxsize=1024)
def _stamp_of(location: TableLocation, version: int, _written: int) -> VersionStamp:
    """Return the stamp of a version, cached by its time of writing; FileNotFoundError if it does not exist."""
    if (found := stamp_of(location, version)) is None:
        raise FileNotFoundError(location.uri)
    return found


def stamp_of(location: TableLocation, version: int) -> VersionStamp | None:
    """Return the stamp of a version of a table; None if it does not exist or was cleaned up."""
    folder = Storage(location.uri, location.options)
    for name in (f"{_LAST - version:020}.manifest", f"{version}.manifest"):
        with suppress(FileNotFoundError):
            return VersionStamp(version, _commit(folder, name))
    return None


def _commit(table: Storage, name: str) -> str:
    return sha256(table.read_part(f"{_VERSIONS}/{name}", 0, _START)).hexdigest()[:16]


def open_version(dataset: lance.LanceDataset, version: int) -> lance.LanceDataset:
    def gone(error: BaseException) -> InvalidInput:
        return InvalidInput(
            f"Version {version} of the table does not exist; it has versions up to {dataset.latest_version}, and "
            "cleaned-up ones are gone. Choose another version, or leave it out to read the newest."
        )

    with engine_errors(gone):
        return open_version_to_read(dataset, version)


def open_version_or_none(dataset: lance.LanceDataset, version: int) -> lance.LanceDataset | None:
    """Check a version out; None if it was cleaned up, or names a folder that must not be opened."""
    try:
        with engine_errors():
            return open_version_to_read(dataset, version)
    except InvalidInput:
        return None
    except EngineError as error:
        if is_unavailable(error):
            raise
        return None


def open_version_to_read(dataset: lance.LanceDataset, version: int) -> lance.LanceDataset:
    """Check a version out; raises pylance's exceptions, and `InvalidInput` as `check_manifest` does."""
    return check_manifest(dataset.checkout_version(version))


def manifest_of(dataset: lance.LanceDataset, version: int | tuple[str, None]) -> lance.LanceDataset:
    """Check out a version, or the newest of a branch, of which only the manifest is read; pylance's exceptions."""
    return dataset.checkout_version(version)


def check_no_mem_wal(table: str, dataset: lance.LanceDataset) -> None:
    """Raise `InvalidInput` if a table has a MemWAL, whose rows no version shows before they are merged; no request."""
    with engine_errors():
        if dataset.mem_wal_index_details() is None:
            return
    raise InvalidInput(
        f"Table {table!r} has a MemWAL (its index {_MEM_WAL}): rows of LSM writes lie in _mem_wal/, outside of all "
        "fragments, and would be left out. Flush them (in LanceDB table.close_lsm_writers(), in pylance "
        "writer.close()), merge each flushed generation into the table (dataset.merge_insert(KEY) with "
        f'mark_sstables_as_compacted), and end the MemWAL: dataset.drop_index("{_MEM_WAL}"), in LanceDB '
        "table.unset_lsm_write_spec()."
    )


def read_transaction(dataset: lance.LanceDataset, version: int) -> lance.Transaction | None:
    """Read the transaction of a version; also works for a compaction of a table with an index."""
    import lance

    # pylance 14.0.2 passes only two of the five fields of a `RewrittenIndex`, and raises a TypeError.
    if not lance.LanceOperation.RewrittenIndex.__init__.__defaults__:
        lance.LanceOperation.RewrittenIndex.__init__.__defaults__ = ("", b"", 0)
    return dataset.read_transaction(version)


def version_exists(dataset: lance.LanceDataset, version: int) -> bool:
    """Whether a version still exists; lists the table's versions."""
    return any(int(reference["version"]) == version for reference in dataset.version_refs())


@contextmanager
def reporting_cleaned_up(location: TableLocation, dataset: lance.LanceDataset) -> Iterator[None]:
    """Raise an explicit error if a read in this block fails because the version was cleaned up meanwhile."""
    try:
        yield
    except BaseException as error:  # a panic of pylance is no Exception
        if not isinstance(error, (InvalidInput, EngineError)) and not is_engine_error(error):
            raise
        if version_exists(location.open(), dataset.version):
            raise
        raise StorageError(
            f"Version {dataset.version} of table {location.name!r} was cleaned up while it was being read. Nothing was "
            "started: run again, and the newest version is read."
        ) from error


@dataclass(frozen=True)
class PlannedTable:
    """The table version that a job was planned on; the job recognizes the table by it.

    `written` is the time of the version in nanoseconds, which differs in another table. `commit` is the hash in the
    version's stamp; "" if the job commits nothing to the table. `catalog` is the URI of the table's catalog; "" in a
    folder. `places` are those that the planning process allowed, for tasks that know less.
    """

    uri: str
    name: str
    version: int
    written: int
    commit: str = ""
    catalog: str = ""
    places: tuple[str, ...] = ()

    @staticmethod
    def of(location: TableLocation, dataset: lance.LanceDataset) -> PlannedTable:
        """Describe an opened table; `InvalidInput` if it has a MemWAL, with rows outside of its versions."""
        check_no_mem_wal(location.name, dataset)
        catalog = catalog_uri(location.options) or ""
        version, written, places = int(dataset.version), written_at(dataset), allowed_places(location.options)
        return PlannedTable(location.uri, location.name, version, written, catalog=catalog, places=places)

    def stamped(self, options: StorageOptions) -> PlannedTable:
        """Add the version's stamp when a job begins; later checks compare with it."""
        stamp = stamp_of(self.location(options), self.version)
        return replace(self, commit=_CLEANED_UP if stamp is None else stamp.commit)

    def check(self, dataset: lance.LanceDataset) -> None:
        """Raise an error if the reopened table is not the planned one; sends no request."""
        same = dataset.version > self.version
        if not same and (dataset.version < self.version or written_at(dataset) != self.written):
            raise self._remade()

    def assert_same_table(self, options: StorageOptions) -> None:
        """Raise an error if the table at the URI is no longer the planned one; reads 64 bytes."""
        if not self._is_current(options):
            raise self._remade()

    def commit_transaction(
        self,
        options: StorageOptions,
        transaction: Callable[[], lance.Transaction],
        before: str,
        after: str,
        first: Callable[[], object] = lambda: None,
        then: Callable[[lance.LanceDataset], object] = lambda committed: None,
        at_once: bool = False,
    ) -> lance.LanceDataset:
        """Commit between two fault points; undo the commit and raise `TableRemade` if it reached another table.

        A commit that the store answered with an error counts as committed if it landed.

        Args:
            transaction: makes the transaction.
            first: a call that must finish before the commit.
            then: a call with the committed version, for checks after the commit.
            at_once: conflict with every commit since the version that the transaction has read.

        Raises:
            StorageError: the commit landed, or may have, and the store refuses to tell more.
        """
        import lance

        place = self.location(options)
        _, made, _ = place.checkpoints.side_by_side(first, transaction, partial(self.assert_same_table, options))
        fault_point(before)
        # A commit on an older version would restore that version in place of a table that was created again.
        newest = place.open()
        try:
            retries = 0 if at_once else _LANCE_RETRIES
            committed = lance.LanceDataset.commit(newest, made, max_retries=retries, **place.access)
        except OSError as error:
            if is_undecided(error):
                raise
            committed = self._landed(place, int(newest.version), made, error)
        fault_point(after)
        try:
            current, _ = place.checkpoints.side_by_side(
                partial(self._is_current, options), lambda: then(check_manifest(committed))
            )
        except OSError as error:
            if not is_access_refused(error):
                raise
            raise StorageError(
                f"Version {committed.version} of table {self.name!r} is committed and its values are visible, but "
                f"{self.uri} refused the checks after the commit: {error}. {_RUN_AGAIN}"
            ) from error
        if not current:
            self._take_back(options, int(committed.version), made)
            raise self._remade()
        return committed

    def location(self, options: StorageOptions) -> TableLocation:
        """Return where the table lies, with its credentials from the storage options of the job."""
        return TableLocation(self.uri, self.name, with_places(options_in(options, self.catalog), self.places))

    def _is_current(self, options: StorageOptions) -> bool:
        if not self.location(options).is_named():
            return False
        now = stamp_of(self.location(options), self.version)
        if now is not None:
            return self.commit in ("", now.commit)
        # The version was cleaned up, or a new table has not reached its number yet.
        newest = newest_stamp(self.location(options))
        return newest is not None and newest.version > self.version

    def _landed(
        self, place: TableLocation, before: int, transaction: lance.Transaction, error: OSError
    ) -> lance.LanceDataset:
        """Return the version that a failed commit wrote after all; raise its error if it wrote none."""
        try:
            with engine_errors():
                now = place.open()
                for version in range(before + 1, int(now.version) + 1):
                    found = read_transaction(now, version)
                    if found is not None and found.uuid == transaction.uuid:
                        return open_version_to_read(now, version)
        except GenevaError as unknown:
            raise StorageError(
                f"A commit to table {self.name!r} may have landed: {self.uri} answered it with an error, {error}, and "
                f"does not tell its newest version: {unknown} {_RUN_AGAIN}"
            ) from error
        raise error

    def _take_back(self, options: StorageOptions, version: int, transaction: lance.Transaction) -> None:
        try:
            with engine_errors():
                place = self.location(options).where_committed()
                now = place.open()
                found = read_transaction(now, version) if now.version >= version else None
        except (InvalidInput, EngineError):  # dropped again
            return
        if found is None or found.uuid != transaction.uuid:
            return
        if now.version == version:
            others = (int(reference["version"]) for reference in now.version_refs())
            undone = self._restore(place, version, max((other for other in others if other < version), default=0))
            if undone == version + 1:
                return
            # Lance reported no conflict, but our restore also undid another writer's commit: undo the restore.
            self._restore(place, undone, undone - 1)
        raise TableRemade(
            f"{self._remade()} But its version {version} is a commit of this job, and others have committed since: "
            f"restore version {version - 1} and repeat their commits, or compute the column or the view again."
        )

    def _restore(self, place: TableLocation, newest: int, version: int) -> int:
        import lance

        restore = lance.Transaction(newest, lance.LanceOperation.Restore(version))
        return int(lance.LanceDataset.commit(place.uri, restore, **place.access).version)

    def _remade(self) -> TableRemade:
        moved = " In a catalog, it may also have been moved, renamed or dropped." if self.catalog else ""
        return TableRemade(
            f"Table {self.name!r} at {self.uri} was dropped and made again after the job was planned on version "
            f"{self.version} of it; the new table is left as it is.{moved} Plan again: clear the plan task with its "
            "downstream tasks; outside of Airflow, run the backfill or the refresh again."
        )


@contextmanager
def reporting_remade(tables: Sequence[PlannedTable], options: StorageOptions) -> Iterator[None]:
    """Raise `TableRemade` instead of Lance's various errors if the block fails because a table was created again."""
    try:
        yield
    except BaseException as error:  # a panic of pylance is no Exception
        if isinstance(error, TableRemade) or not is_failure(error):
            raise
        for table in tables:
            with suppress(OSError):
                try:
                    table.assert_same_table(options)
                except TableRemade as remade:
                    raise remade from error
        raise
