"""Join rows into clusters: those that share a hash, and are found similar when they are compared.

A cluster is a component of the graph whose edges are the pairs of rows that share the hash of a band and are similar.
Whether two rows have an edge depends on these two rows only. So when rows change, only pairs with a changed row are
compared, and, because a cluster may fall apart, those within the clusters that have lost a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.duplicates.texts import spread
from airflow_geneva.engine.lance_io.row_ranges import Offsets

Mask: TypeAlias = npt.NDArray[np.bool_]
Hashes: TypeAlias = npt.NDArray[np.int64]
"""The hashes of a band, one for each row."""


class Members(Protocol):
    """Compares the rows of a group, by their positions in it."""

    def possible(self, rows: Offsets) -> tuple[Offsets, Offsets]:
        """Return the pairs of some rows and others that may be similar; a pair may be there several times."""

    def similar(self, left: Offsets, right: Offsets) -> Mask:
        """Return which pairs are similar."""


class Comparison(Protocol):
    """Compares rows, by their positions."""

    def possible(self, left: Offsets, right: Offsets) -> Mask:
        """Return which pairs may be similar, without reading rows."""

    def similar(self, left: Offsets, right: Offsets) -> Mask:
        """Return which pairs are similar."""

    def among(self, rows: Offsets) -> Members:
        """Return what compares these rows with each other."""


_NEW, _LOOSE, _KNOWN = 0, 1, 2
"""A row that is new or has changed; one of a cluster that has lost a row; and every other one."""

_SPARSE = 32
_LARGE = 32
"""Rows of a group that are read together: else each would be read again for each row with which it is compared."""
_BLOCK = 1 << 20
"""About the most pairs of such a group that are looked at together."""


@dataclass(frozen=True, eq=False)
class HashedRows:
    """Some rows, with a hash of what is compared; it has 128 bits, so rows with one hash are equal.

    Args:
        ids: their row ids, which are different.
        has_value: whether a row is compared; one whose text is NULL is not.
    """

    ids: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    low: npt.NDArray[np.int64]
    has_value: Mask

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Clusters:
    """The clusters of some rows. What it says about them stays true: rows with other values are other rows.

    Args:
        ids: the row ids, ascending.
        high: the upper half of their hashes.
        first: the smallest row id in the cluster of each row, which is the row's own if it is alone.
    """

    ids: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    @staticmethod
    def none() -> Clusters:
        nothing = np.empty(0, np.int64)
        return Clusters(nothing, nothing, nothing)

    @staticmethod
    def find(rows: HashedRows, bands: Iterable[Hashes], known: Clusters, comparison: Comparison) -> Clusters:
        """Find the clusters of rows.

        Args:
            bands: the hashes of each band, one for each row; not asked for if no row is new or lost.
            known: the clusters of these and other rows, as they were before.
        """
        search = _Search.begin(rows, known, comparison)
        if search.open.any():
            search.join_equal()
            for hashes in bands:
                search.join_similar(hashes)
        return search.clusters()

    @cached_property
    def several(self) -> Mask:
        """The rows that are not alone in their clusters."""
        several: Mask = self.first != self.ids
        several[np.searchsorted(self.ids, np.sort(self.first[several]))] = True
        return several

    def told(self, before: Clusters) -> str:
        """Say how many clusters of several rows are not what they were, and which is the largest.

        A cluster is named by the smallest row id in it.
        """
        several = self.several
        rows, (names, of_row, sizes) = self.ids[several], _named(self.first[several])
        names_then, _, sizes_then = _named(before.first[before.several])
        stays = np.zeros(len(rows), np.bool_)
        if len(before.ids):
            at = np.minimum(np.searchsorted(before.ids, rows), len(before.ids) - 1)
            stays = (before.ids[at] == rows) & (before.high[at] == self.high[several])
            stays &= before.first[at] == self.first[several]
        known = same = _contains(names_then, names)
        if len(names_then):
            at = np.minimum(np.searchsorted(names_then, names), len(names_then) - 1)
            same = known & (np.bincount(of_row, stays, len(names)) == sizes) & (sizes_then[at] == sizes)
        told = f"{counted(int((~known).sum()), 'new cluster')}, {int((known & ~same).sum()):,} with other rows"
        gone = int((~_contains(names, names_then)).sum())
        told += f", {gone:,} no longer there" if gone else ""
        if not len(names):
            return told
        largest, total = int(sizes.argmax()), len(self.ids)
        size = f"{int(sizes[largest]):,} of {counted(total, 'row')} ({sizes[largest] / total:.1%})"
        return f"{told}; the largest of {counted(len(names), 'cluster')}, that of row id {names[largest]}, has {size}"

    def equals(self, other: Clusters) -> bool:
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in ("ids", "high", "first"))

    def to_batch(self) -> pa.RecordBatch:
        return pa.record_batch({name: getattr(self, name) for name in ("ids", "high", "first")})

    @staticmethod
    def from_batch(batch: pa.RecordBatch) -> Clusters:
        """Read what `to_batch` made; KeyError or ValueError for anything else."""
        columns = [batch.column(name) for name in ("ids", "high", "first")]
        if any(column.type != pa.int64() or column.null_count for column in columns):
            raise ValueError("The columns of clusters are whole numbers.")
        return Clusters(*(column.to_numpy() for column in columns))


@dataclass(eq=False)
class _Search:
    """A search for clusters.

    Args:
        state: `_NEW`, `_LOOSE` or `_KNOWN` for each row.
        open: the rows that are compared with others; their clusters are not known.
        refuted: pairs that were compared and are not similar, as numbers, ascending.
    """

    rows: HashedRows
    comparison: Comparison
    forest: Forest
    state: npt.NDArray[np.int8]
    open: Mask
    refuted: npt.NDArray[np.int64]

    @staticmethod
    def begin(rows: HashedRows, known: Clusters, comparison: Comparison) -> _Search:
        state = np.full(len(rows), _NEW, np.int8)
        forest = Forest(len(rows))
        if len(known.ids):
            if np.array_equal(known.ids, rows.ids[: len(known.ids)]):  # as after an append: no search
                at = np.arange(len(rows))
            else:
                at = np.searchsorted(known.ids, rows.ids)
            at = np.minimum(at, len(known.ids) - 1)
            same = (known.ids[at] == rows.ids) & (known.high[at] == rows.high)
            here = np.zeros(len(known.ids), np.bool_)
            here[at[same]] = True
            first = known.first[at]
            loose = _distinct(known.first[~here])
            state[same] = np.where(np.isin(first[same], loose), _LOOSE, _KNOWN)
            joined = np.flatnonzero((state == _KNOWN) & known.several[at])
            _, one, of = np.unique(first[joined], return_index=True, return_inverse=True)
            forest.join(joined, joined[one[of.reshape(-1)]])
        is_open = (state != _KNOWN) & rows.has_value
        return _Search(rows, comparison, forest, state, is_open, np.empty(0, np.int64))

    def join_equal(self) -> None:
        """Join the rows that have the same hash."""
        high, low = self.rows.high, self.rows.low
        found = np.flatnonzero(self.rows.has_value & _among(high, high[self.open]))
        found = found[np.lexsort((low[found], high[found]))]
        left, right = found[:-1], found[1:]
        same = (high[left] == high[right]) & (low[left] == low[right])
        self.forest.join(left[same], right[same])

    def join_similar(self, hashes: npt.NDArray[np.int64]) -> None:
        """Join the similar rows among those that share the hash of a band.

        One row of a group after the other is compared with those after it, until all are in one cluster.
        """
        found, begins, ends = self._groups(hashes)
        split = self._are_split(found, begins, ends)
        large = split & (ends - begins > _LARGE)
        if large.any():
            for begin, end in zip(begins[large].tolist(), ends[large].tolist(), strict=True):
                self._join_group(found[begin:end])
        begins, ends = begins[split & ~large], ends[split & ~large]
        pivots = begins.copy()
        while len(begins):
            counts = ends - pivots - 1
            right = spread(found, pivots + 1, counts)
            left = np.repeat(found[pivots], counts)
            apart = self.forest.roots(left) != self.forest.roots(right)
            apart &= (self.state[left] == _NEW) | (self.state[right] != _KNOWN)
            self._compare(left[apart], right[apart])
            pivots += 1
            going = (pivots < ends - 1) & (self.state[found[np.minimum(pivots, len(found) - 1)]] != _KNOWN)
            begins, ends, pivots = begins[going], ends[going], pivots[going]
            split = self._are_split(found, begins, ends)
            begins, ends, pivots = begins[split], ends[split], pivots[split]

    def _are_split(self, found: Offsets, begins: Offsets, ends: Offsets) -> Mask:
        """Return which groups of rows are not in one cluster."""
        if not len(begins):
            return np.empty(0, np.bool_)
        sizes = ends - begins
        roots, starts = self.forest.roots(spread(found, begins, sizes)), np.cumsum(sizes) - sizes
        split: Mask = np.minimum.reduceat(roots, starts) != np.maximum.reduceat(roots, starts)
        return split

    def _join_group(self, group: Offsets) -> None:
        """Join the similar rows of one large group, as `join_similar` does."""
        members, state = self.comparison.among(group), self.state[group]
        pivots, size = np.flatnonzero(state[:-1] != _KNOWN), 1
        while len(pivots):
            roots = self.forest.roots(group)
            if (roots == roots[0]).all():
                return
            left, right = members.possible(pivots[:size])
            looked_at = max(len(left), len(pivots[:size]) * len(group))
            apart = (left < right) & (roots[left] != roots[right])
            apart &= (state[left] == _NEW) | (state[right] != _KNOWN)
            left, right = np.divmod(_distinct(left[apart] * len(group) + right[apart]), len(group))
            similar = members.similar(left, right)
            self.forest.join(group[left[similar]], group[right[similar]])
            # Most groups that are one cluster are found to be so by the first rows.
            pivots, size = pivots[size:], min(2 * size, max(_BLOCK * len(pivots[:size]) // looked_at, 1))

    def _groups(self, hashes: npt.NDArray[np.int64]) -> tuple[Offsets, Offsets, Offsets]:
        """Return rows by groups that share a hash, one of those that are equal, and where the groups begin and end.

        The rows of a group whose clusters are not known come first; there is at least one.
        """
        found = np.flatnonzero(self.rows.has_value & _among(hashes, hashes[self.open]))
        found = found[np.argsort(hashes[found], kind="stable")]
        found = found[_shared(hashes[found])]
        # Of equal rows, the one whose cluster is known stands for all.
        high, low = self.rows.high, self.rows.low
        found = found[np.lexsort((-self.state[found], low[found], high[found], hashes[found]))]
        unlike = np.ones(len(found), np.bool_)
        unlike[1:] = np.any([key[found[1:]] != key[found[:-1]] for key in (hashes, high, low)], axis=0)
        found = found[unlike]
        found = found[np.lexsort((self.state[found], hashes[found]))]
        found = found[_shared(hashes[found])]
        values = hashes[found]
        begins = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(found) else found
        ends = np.append(begins[1:], len(found))[: len(begins)]
        unknown = self.state[found[begins]] != _KNOWN
        return found, begins[unknown], ends[unknown]

    def _compare(self, left: Offsets, right: Offsets) -> None:
        possible = self.comparison.possible(left, right)
        left, right = left[possible], right[possible]
        pairs = _distinct(np.minimum(left, right) * len(self.rows) + np.maximum(left, right))
        pairs = pairs[~_contains(self.refuted, pairs)]
        if not len(pairs):
            return
        left, right = np.divmod(pairs, len(self.rows))
        similar = self.comparison.similar(left, right)
        self.forest.join(left[similar], right[similar])
        self.refuted = np.union1d(self.refuted, pairs[~similar])

    def clusters(self) -> Clusters:
        ids = self.rows.ids
        roots = self.forest.roots(np.arange(len(ids)))
        if (ids[1:] > ids[:-1]).all():
            return Clusters(ids, self.rows.high, ids[roots])
        first = np.full(len(ids), np.iinfo(np.int64).max)
        np.minimum.at(first, roots, ids)
        order = np.argsort(ids, kind="stable")
        return Clusters(ids[order], self.rows.high[order], first[roots][order])


class Forest:
    """Sets of positions, which are joined: each position has a parent, and the smallest of a set has itself."""

    def __init__(self, size: int) -> None:
        self._parents = np.arange(size)

    def roots(self, places: Offsets) -> Offsets:
        """Return the smallest position in the set of each of these positions."""
        found = self._parents[places]
        while not np.array_equal(above := self._parents[found], found):
            found = above
        self._parents[places] = found
        return found

    def join(self, left: Offsets, right: Offsets) -> None:
        """Join the sets of pairs of positions."""
        while len(left):
            left, right = self.roots(left), self.roots(right)
            apart = left != right
            left, right = left[apart], right[apart]
            np.minimum.at(self._parents, np.maximum(left, right), np.minimum(left, right))


def _among(values: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> Mask:
    """Return which values may be wanted ones: all of them if there are too many wanted ones to search for."""
    if 2 * len(wanted) > len(values):
        return np.ones(len(values), np.bool_)
    table = np.zeros(1 << max(int(len(wanted) * _SPARSE).bit_length(), 16), np.bool_)
    places = len(table) - 1
    table[wanted & places] = True
    found: Mask = table[values & places]
    at = np.flatnonzero(found)
    found[at] = _contains(_distinct(wanted), values[at])
    return found


def _shared(values: npt.NDArray[np.int64]) -> Mask:
    """Return which of some ascending values are not alone."""
    shared = np.zeros(len(values), np.bool_)
    same = values[1:] == values[:-1]
    shared[1:] |= same
    shared[:-1] |= same
    return shared


def _named(first: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Offsets, Offsets]:
    """Return the names of clusters, the number of the cluster of each row, and the numbers of rows of the clusters."""
    names, of_row, sizes = np.unique(first, return_inverse=True, return_counts=True)
    return names, of_row.reshape(-1), sizes


def _distinct(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the different values, ascending; np.unique takes several times as long."""
    values = np.sort(values)
    other = np.ones(len(values), np.bool_)
    other[1:] = values[1:] != values[:-1]
    return values[other]


def _contains(ascending: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> Mask:
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: Mask = ascending[at] == values
    return found
