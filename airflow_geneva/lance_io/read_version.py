"""Open the table version that a plan reads, and find out which rows existed at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, cast

from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors, is_engine_error
from airflow_geneva.lance_io.fragments import FragmentFiles, row_ids
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.storage.location import TableLocation

if TYPE_CHECKING:
    import lance


def open_version(dataset: lance.LanceDataset, version: int) -> lance.LanceDataset:
    """Check a version out.

    Raises:
        InvalidInput: the version never existed or was cleaned up.
    """

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
    """If a read in this block fails because the version was cleaned up meanwhile, raise an error that says so.

    Args:
        location: the table.
        dataset: the table at the version that the block reads.

    Raises:
        StorageError: the version was cleaned up; running again reads the newest version.
    """
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
    """Finds rows that existed at the requested version.

    Args:
        dataset: the table at the planned version.
        version: the requested version; None: the planned version.
    """

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
