"""Compare the texts, or the vectors, of rows that are read from their table."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.duplicates.clusters import Comparison, Mask, Members
from airflow_geneva.engine.duplicates.texts import ShingleSets, SimilarSets, normalized
from airflow_geneva.engine.duplicates.vectors import (
    Units,
    are_similar,
    bits_set,
    most_sides,
    pieces,
    unit_vectors,
)
from airflow_geneva.engine.lance_io.row_ranges import Offsets
from airflow_geneva.engine.lance_io.rows_by_id import rows_in_order
from airflow_geneva.engine.views.deduplication import Deduplication
from airflow_geneva.engine.views.rows import RowIdArray

if TYPE_CHECKING:
    import lance

_PAIRS, _TEXT_BYTES, _GROUP_BYTES = 2_000, 4 << 20, 32 << 20
"""Pairs of texts that are compared at first, the bytes of texts that are compared at once, and those of a group."""


@dataclass(frozen=True)
class _Rows:
    """The values that a query compares.

    Args:
        ids: the row ids; the values of rows are read by their positions among these.
    """

    source: lance.LanceDataset
    name: str
    ids: RowIdArray

    def read(self, rows: Offsets, most_bytes: float = inf) -> pa.Array | None:
        """Read the values of rows, in this order; None if they have more bytes."""
        found = rows_in_order(self.source, self.ids[rows], (self.name,), most_bytes)
        return None if found is None else found.column(0)

    def of_pairs(self, left: Offsets, right: Offsets) -> tuple[pa.Array, Offsets, Offsets]:
        """Read the values of pairs once, and say where those of each pair are among them."""
        rows, numbers = np.unique(np.concatenate([left, right]), return_inverse=True)
        first, second = np.split(numbers.reshape(-1), 2)
        return self.read(rows), first, second


@dataclass(frozen=True)
class Texts:
    """Compares the texts of rows by their shingles."""

    rows: _Rows
    least: float

    @staticmethod
    def of(source: lance.LanceDataset, deduplicate: Deduplication, ids: RowIdArray) -> Texts:
        name = deduplicate.on[0]
        return Texts(_Rows(source, name, ids), deduplicate.threshold or 0.0)

    def possible(self, left: Offsets, right: Offsets) -> Mask:
        return np.ones(len(left), np.bool_)

    def similar(self, left: Offsets, right: Offsets) -> Mask:
        found, size, at = np.zeros(len(left), np.bool_), _PAIRS, 0
        while at < len(left):
            part = slice(at, at + size)
            values, first, second = self.rows.of_pairs(left[part], right[part])
            texts = normalized(values)
            found[part] = ShingleSets.of(texts).similarity(first, second) >= self.least
            at += size
            size = max(1, min(2 * size, size * _TEXT_BYTES // max(int(texts.nbytes), 1)))
        return found

    def among(self, rows: Offsets) -> Members:
        texts = self.rows.read(rows, _GROUP_BYTES)
        if texts is None:
            return _Unread(self, rows)
        return SimilarSets.of(ShingleSets.of(normalized(texts)), self.least)


@dataclass(frozen=True, eq=False)
class Vectors:
    """Compares the vectors of rows by their cosine.

    Args:
        words: the sketch of each row.
    """

    rows: _Rows
    threshold: float
    words: npt.NDArray[np.uint64]

    @staticmethod
    def of(
        source: lance.LanceDataset, deduplicate: Deduplication, ids: RowIdArray, words: npt.NDArray[np.uint64]
    ) -> Vectors:
        name = deduplicate.on[0]
        return Vectors(_Rows(source, name, ids), deduplicate.threshold or 0.0, words)

    def possible(self, left: Offsets, right: Offsets) -> Mask:
        found: Mask = bits_set(self.words[left] ^ self.words[right]) <= most_sides(self.threshold)
        return found

    def similar(self, left: Offsets, right: Offsets) -> Mask:
        found = np.zeros(len(left), np.bool_)
        for part in pieces(len(left), self._size):
            vectors, first, second = self.rows.of_pairs(left[part], right[part])
            units, _ = unit_vectors(vectors)
            found[part] = are_similar(units[first], units[second], self.threshold)
        return found

    def among(self, rows: Offsets) -> Members:
        small = 8 * self._size * len(rows) <= _GROUP_BYTES
        return _ReadVectors(self, rows, unit_vectors(self.rows.read(rows))[0]) if small else _Unread(self, rows)

    @property
    def _size(self) -> int:
        return int(self.rows.source.schema.field(self.rows.name).type.list_size)


@dataclass(frozen=True, eq=False)
class _Unread:
    """Compares the rows of a group that is too large to be read as a whole."""

    comparison: Comparison
    group: Offsets

    def possible(self, rows: Offsets) -> tuple[Offsets, Offsets]:
        left, right = np.repeat(rows, len(self.group)), np.tile(np.arange(len(self.group)), len(rows))
        found = (left != right) & self.comparison.possible(self.group[left], self.group[right])
        return left[found], right[found]

    def similar(self, left: Offsets, right: Offsets) -> Mask:
        return self.comparison.similar(self.group[left], self.group[right])


@dataclass(frozen=True, eq=False)
class _ReadVectors(_Unread):
    """Compares the vectors of a group."""

    comparison: Vectors
    units: Units

    def similar(self, left: Offsets, right: Offsets) -> Mask:
        found = np.zeros(len(left), np.bool_)
        for part in pieces(len(left), self.units.shape[1]):
            found[part] = are_similar(self.units[left[part]], self.units[right[part]], self.comparison.threshold)
        return found
