"""Staged data files that a commit will add to a table.

The process wrote each file or opens it once. It checks again that a file exists if the last check was a while ago.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.lance_io.data_file import FOOTER_BYTES, DataFileWriter, LanceFile
from airflow_geneva.engine.runtime import Future, time
from airflow_geneva.engine.storage.files import AT_A_TIME, in_threads
from airflow_geneva.engine.storage.timeouts import StoreThreads

if TYPE_CHECKING:
    import lance
    from lance.fragment import DataFile

_FRESH_SECONDS = 10.0
# A listing costs a request per 1,000 files, one after another.
_LISTED_FROM, _LISTED_FACTOR = 64, 10
_BUFFER = 16
_AHEAD = StoreThreads("geneva-ahead")
_COUNTS = struct.Struct("<IIHH4s")
"""The end of a footer: numbers of global buffers and of columns, the version of the format, and `LANC`."""


@dataclass(frozen=True)
class _Known:
    """The properties of a finished file, and when the file was last known to exist.

    Args:
        layout: equal for files whose columns are stored in the same places.
    """

    rows: int
    size: int
    layout: tuple[Any, ...]
    seen: float

    @staticmethod
    def of(metadata: Any) -> _Known:
        buffers = len(metadata.global_buffers)
        parts = metadata.num_data_bytes + metadata.num_column_metadata_bytes + metadata.num_global_buffer_bytes
        layout = metadata.schema, len(metadata.columns), buffers, metadata.major_version, metadata.minor_version
        return _Known(metadata.num_rows, parts + buffers * _BUFFER + FOOTER_BYTES, layout, time.monotonic())

    @staticmethod
    def by_footer(footer: bytes, rows: int, size: int) -> _Known:
        """Return the properties of a file from its footer and its recorded rows and size."""
        return _Known(rows, size, _COUNTS.unpack(footer[-_COUNTS.size :]), time.monotonic())


class StagedFiles:
    """Data files that no version of the table names yet. They never change, but a cleanup may remove them."""

    def __init__(self) -> None:
        self._known: dict[str, _Known | None] = {}
        self._described: dict[str, Future[DataFile]] = {}

    def add(self, writer: DataFileWriter) -> None:
        """Remember a file that this process has just written completely."""
        if writer.size_bytes:
            layout = writer.schema, writer.dataset.data_storage_version
            self._known[writer.file] = _Known(writer.rows, writer.size_bytes, layout, time.monotonic())

    def forget(self, name: str) -> None:
        """Release what is known of a file; the next call that needs it opens the file again."""
        self._known.pop(name, None)

    def count_rows(self, dataset: lance.LanceDataset, name: str, rows: int = 0, size: int = 0) -> int | None:
        """Return the number of rows of a file; None if it is missing or damaged. Only the first call opens it.

        Args:
            rows, size: the values in its checkpoint; a size of 0 is unknown.
        """
        found = self._known.get(name)
        if found is not None and time.monotonic() - found.seen > _FRESH_SECONDS:
            there = LanceFile.of_table(dataset, name).exists()
            found = replace(found, seen=time.monotonic()) if there else None
        elif found is None:
            file = LanceFile.of_table(dataset, name)
            if size > FOOTER_BYTES and not file.folder.local:
                footer = file.footer(size)
                found = None if footer is None else _Known.by_footer(footer, rows, size)
            else:
                metadata = file.metadata()
                found = None if metadata is None else _Known.of(metadata)
        self._known[name] = found
        return None if found is None else found.rows

    def look_if_old(self, dataset: lance.LanceDataset, names: Sequence[str]) -> None:
        """Check many files with one listing if the last check was a while ago; `count_rows` would check one by one."""
        now = time.monotonic()
        old = [name for name in names if (known := self._known.get(name)) and now - known.seen > _FRESH_SECONDS]
        if len(old) >= _LISTED_FROM:
            self.look_again(dataset, old)

    def look_again(self, dataset: lance.LanceDataset, names: Sequence[str]) -> None:
        """Mark files that no longer exist as missing; many files are checked with one listing."""
        folder = LanceFile.of_table(dataset, "").folder
        listed = len(names) >= _LISTED_FROM and not folder.local
        if listed and dataset.stats.dataset_stats()["num_fragments"] < _LISTED_FACTOR * len(names):
            there = set(folder.list_files())
            gone = [name for name in names if name not in there]
        else:
            found = in_threads(lambda name: LanceFile(folder, name).exists(), names)
            gone = [name for name, there in zip(names, found, strict=True) if not there]
        for name in names:
            if (known := self._known.get(name)) is not None:
                self._known[name] = None if name in gone else replace(known, seen=time.monotonic())

    def describe(self, dataset: lance.LanceDataset, name: str) -> DataFile:
        """Return the description of a file for a commit; pylance opens the file.

        Raises:
            FileNotFoundError: the file was removed; it is missing from now on.
        """
        from lance.fragment import DataFile

        begun = self._described.pop(name, None)
        if begun is not None:
            with suppress(Exception):  # raised again below
                return begun.result()
        try:
            return DataFile.create(copy.copy(dataset), name)  # a copy for this thread only
        except ValueError as error:
            if LanceFile.of_table(dataset, name).exists():
                raise
            self._known[name] = None
            raise FileNotFoundError(
                f"Another process removed data file {name} before its commit, as "
                "cleanup_old_versions(delete_unverified=True) does. Run again: nothing is lost."
            ) from error

    def describe_ahead(self, dataset: lance.LanceDataset, name: str) -> None:
        """Start describing, in the background, a file that will probably be the first of a commit."""
        if name not in self._described:
            from lance.fragment import DataFile

            self._described[name] = _AHEAD.submit(dataset.uri, partial(DataFile.create, copy.copy(dataset), name))

    def data_files(self, dataset: lance.LanceDataset, names: Sequence[str]) -> list[DataFile]:
        """Return descriptions for a commit. pylance opens the first file, and each file with another layout."""
        from lance.fragment import DataFile

        if not names:
            return []
        first = self.describe(dataset, names[0])
        model = self._known.get(names[0])
        known = model is not None and model.size == first.file_size_bytes

        def like_first(name: str) -> DataFile:
            if self.count_rows(dataset, name) is None:
                return self.describe(dataset, name)  # raises an error that describes the damage
            found = self._known[name]
            if not known or found is None or model is None or found.layout != model.layout:
                return self.describe(dataset, name)
            versions = first.file_major_version, first.file_minor_version
            return DataFile(name, first.fields, first.column_indices, *versions, found.size)

        local = LanceFile.of_table(dataset, "").folder.local
        return [first, *in_threads(like_first, names[1:], 1 if local else AT_A_TIME)]
