"""Staged data files on their way into a table: each is opened once, and looked for again when that was a while ago."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_geneva.lance_io.data_file import LanceFile
from airflow_geneva.storage.files import in_threads

if TYPE_CHECKING:
    import lance
    from lance.fragment import DataFile

_FRESH_SECONDS = 10.0
# A listing costs a request per 1,000 files, one after another.
_LISTED_FROM, _LISTED_FACTOR = 64, 10
_FOOTER, _BUFFER = 40, 16


@dataclass(frozen=True)
class _Opened:
    """What a finished file says of itself, and when it was last seen.

    Args:
        layout: equal for files whose columns are stored in the same places.
    """

    rows: int
    bytes: int
    layout: tuple[Any, ...]
    seen: float

    @staticmethod
    def of(metadata: Any) -> _Opened:
        buffers = len(metadata.global_buffers)
        parts = metadata.num_data_bytes + metadata.num_column_metadata_bytes + metadata.num_global_buffer_bytes
        layout = metadata.schema, len(metadata.columns), buffers, metadata.major_version, metadata.minor_version
        return _Opened(metadata.num_rows, parts + buffers * _BUFFER + _FOOTER, layout, time.monotonic())


class StagedFiles:
    """Data files that no version of the table names yet. They never change, but a cleanup may remove them."""

    def __init__(self) -> None:
        self._opened: dict[str, _Opened | None] = {}

    def count_rows(self, dataset: lance.LanceDataset, name: str) -> int | None:
        """Return the rows of a file; None if it is missing or damaged. It is opened at the first call only."""
        found = self._opened.get(name)
        if found is not None and time.monotonic() - found.seen > _FRESH_SECONDS:
            there = LanceFile.of_table(dataset, name).exists()
            found = replace(found, seen=time.monotonic()) if there else None
        elif found is None:
            metadata = LanceFile.of_table(dataset, name).metadata()
            found = None if metadata is None else _Opened.of(metadata)
        self._opened[name] = found
        return None if found is None else found.rows

    def look_again(self, dataset: lance.LanceDataset, names: Sequence[str]) -> None:
        """Forget the files that are not there any more; many are looked for in one listing."""
        folder = LanceFile.of_table(dataset, "").folder
        listed = len(names) >= _LISTED_FROM and not folder.local
        if listed and dataset.stats.dataset_stats()["num_fragments"] < _LISTED_FACTOR * len(names):
            there = set(folder.list_files())
            gone = [name for name in names if name not in there]
        else:
            found = in_threads(lambda name: LanceFile(folder, name).exists(), names)
            gone = [name for name, there in zip(names, found, strict=True) if not there]
        for name in names:
            if (opened := self._opened.get(name)) is not None:
                self._opened[name] = None if name in gone else replace(opened, seen=time.monotonic())

    def data_files(self, dataset: lance.LanceDataset, names: Sequence[str]) -> list[DataFile]:
        """Describe files for a commit. pylance opens the first one for that, and files that are not like it."""
        from lance.fragment import DataFile

        def create(name: str) -> DataFile:
            return DataFile.create(copy.copy(dataset), name)  # a copy, which a thread has for itself

        if not names:
            return []
        first = create(names[0])
        model = self._opened.get(names[0])
        known = model is not None and model.bytes == first.file_size_bytes

        def describe(name: str) -> DataFile:
            if self.count_rows(dataset, name) is None:
                return create(name)  # which says what is wrong with it
            found = self._opened[name]
            if not known or found is None or model is None or found.layout != model.layout:
                return create(name)
            versions = first.file_major_version, first.file_minor_version
            return DataFile(name, first.fields, first.column_indices, *versions, found.bytes)

        return [first, *in_threads(describe, names[1:])]
