"""Sets of physical row offsets, stored as sorted disjoint half-open ranges."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.storage.documents import expand
from airflow_geneva.errors import InvalidInput

Offsets = npt.NDArray[np.int64]
RowIds = npt.NDArray[np.uint64]

MOST_RANGES = 1 << 23
"""The most ranges of the rows of a fragment that a document holds, 16 bytes each."""

MOST_RANGES_OF_TABLE = 1 << 26
"""The most ranges of the rows of a table that a plan holds."""


@dataclass(frozen=True, eq=False)
class Ranges:
    """A set of row offsets within one fragment, as ascending ranges that neither overlap nor touch."""

    starts: Offsets
    ends: Offsets

    @staticmethod
    def empty() -> Ranges:
        return _EMPTY

    @staticmethod
    def of(start: int, end: int) -> Ranges:
        if end <= start:
            return _EMPTY
        return Ranges(np.array([start], np.int64), np.array([end], np.int64))

    @staticmethod
    def from_pairs(pairs: Iterable[Sequence[int]]) -> Ranges:
        """Return the union of half-open pairs, in any order, overlapping or not."""
        return Ranges.from_bounds(*np.array(list(pairs), np.int64).reshape(-1, 2).T.copy())

    @staticmethod
    def from_bounds(starts: Offsets, ends: Offsets) -> Ranges:
        """Return the union of many half-open ranges, given as arrays in any order."""
        keep = ends > starts
        if not keep.all():
            starts, ends = starts[keep], ends[keep]
        starts, ends = starts.astype(np.int64, copy=False), ends.astype(np.int64, copy=False)
        if len(starts) == 0:
            return _EMPTY
        if (starts[1:] > ends[:-1]).all():
            return Ranges(starts, ends)
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        first = np.concatenate(([0], np.flatnonzero(starts[1:] > reach[:-1]) + 1))
        return Ranges(starts[first], reach[np.concatenate((first[1:] - 1, [len(reach) - 1]))])

    @staticmethod
    def union(parts: Iterable[Ranges]) -> Ranges:
        group = [part for part in parts if part]
        if len(group) < 2:
            return group[0] if group else _EMPTY
        return Ranges.from_bounds(np.concatenate([p.starts for p in group]), np.concatenate([p.ends for p in group]))

    @staticmethod
    def from_offsets(offsets: npt.ArrayLike) -> Ranges:
        """Return the set of the given offsets, which may be in any order and repeat."""
        sorted_offsets = np.asarray(offsets, np.int64)
        if len(sorted_offsets) == 0:
            return _EMPTY
        steps = np.diff(sorted_offsets)
        if len(steps) and steps.min() <= 0:
            # Most inputs are a few ascending runs, where a stable (merge) sort is faster than `np.unique`.
            sorted_offsets = np.sort(sorted_offsets, kind="stable")
            sorted_offsets = sorted_offsets[np.diff(sorted_offsets, prepend=sorted_offsets[0] - 1) != 0]
            steps = np.diff(sorted_offsets)
        breaks = np.flatnonzero(steps != 1)
        starts = sorted_offsets[np.concatenate(([0], breaks + 1))]
        ends = sorted_offsets[np.concatenate((breaks, [len(sorted_offsets) - 1]))] + 1
        return Ranges(starts, ends)

    def __len__(self) -> int:
        """Number of offsets, not of ranges."""
        return self._count

    @cached_property
    def _count(self) -> int:
        return int(self.ends.sum() - self.starts.sum())

    def __bool__(self) -> bool:
        return len(self.starts) > 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ranges):
            return NotImplemented
        if self is other:
            return True
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.ends, other.ends)

    def __hash__(self) -> int:
        return hash((self.starts.tobytes(), self.ends.tobytes()))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts.tolist(), self.ends.tolist(), strict=True)

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges.union((self, other))

    def __and__(self, other: Ranges) -> Ranges:
        if not self or not other:
            return _EMPTY
        if len(self.starts) == 1:
            return other._clipped(int(self.starts[0]), int(self.ends[0]))
        if len(other.starts) == 1:
            return self._clipped(int(other.starts[0]), int(other.ends[0]))
        return _intersection(self, other)

    def _clipped(self, start: int, end: int) -> Ranges:
        if start <= self.starts[0] and self.ends[-1] <= end:
            return self
        low = int(np.searchsorted(self.ends, start, side="right"))
        high = int(np.searchsorted(self.starts, end, side="left"))
        if low >= high:
            return _EMPTY
        if high - low == len(self.starts) and start <= self.starts[0] and self.ends[-1] <= end:
            return self
        starts, ends = self.starts[low:high].copy(), self.ends[low:high].copy()
        starts[0], ends[-1] = max(int(starts[0]), start), min(int(ends[-1]), end)
        return Ranges(starts, ends)

    def __sub__(self, other: Ranges) -> Ranges:
        if not self or not other:
            return self
        low, high = int(self.starts[0]), int(self.ends[-1])
        if (len(other.starts) == 1 and other.covers(low, high)) or self == other:
            return _EMPTY
        gap_starts = np.concatenate(([min(low, int(other.starts[0]))], other.ends))
        gap_ends = np.concatenate((other.starts, [max(high, int(other.ends[-1]))]))
        keep = gap_ends > gap_starts
        return self & Ranges(gap_starts[keep], gap_ends[keep])

    def offsets(self) -> Offsets:
        lengths = self.ends - self.starts
        if len(lengths) == 0:
            return np.empty(0, np.int64)
        before = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(self.starts - before, lengths)

    def mask(self, offsets: Offsets | RowIds) -> npt.NDArray[np.bool_]:
        """Return for each given offset or row id whether it is in the set."""
        offsets = offsets.view(np.int64)
        if not self:
            return np.zeros(len(offsets), np.bool_)
        if len(self.starts) == 1:
            single: npt.NDArray[np.bool_] = (offsets >= self.starts[0]) & (offsets < self.ends[0])
            return single
        at = np.searchsorted(self.starts, offsets, side="right") - 1
        return (at >= 0) & (offsets < self.ends[np.maximum(at, 0)])

    def bitmap(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Return for each offset of ``[start, end)``, in which all ranges lie, whether it is in the set."""
        edges = np.zeros(end - start + 1, np.bool_)
        edges[self.starts - start] = True
        edges[self.ends - start] = True
        inside: npt.NDArray[np.bool_] = np.logical_xor.accumulate(edges[:-1])
        return inside

    def within(self, start: int, end: int) -> Ranges:
        return self & Ranges.of(start, end)

    def covers(self, start: int, end: int) -> bool:
        """Whether ``[start, end)`` lies in one range."""
        if len(self.starts) == 1:
            return bool(self.starts[0] <= start and end <= self.ends[0])
        at = int(np.searchsorted(self.starts, start, side="right")) - 1
        return at >= 0 and end <= int(self.ends[at])

    def contains(self, other: Ranges) -> bool:
        return not (other - self)

    def pairs(self) -> list[list[int]]:
        """Return the ranges as a list of ``[start, end]``, for JSON."""
        return [[start, end] for start, end in self]

    def to_json(self, most: int = MOST_RANGES) -> list[list[int]] | str:
        """Convert to JSON: pairs, or for many ranges a compressed text; `InvalidInput` for more than `most` ranges."""
        if len(self.starts) <= _MOST_PAIRS:
            return self.pairs()
        limit = most * _BOUNDS_A_RANGE // 16 if self._lie_apart else most
        if len(self.starts) > limit:
            raise InvalidInput(
                f"The rows {int(self.starts[0]):,} to {int(self.ends[-1]):,} are {len(self.starts):,} ranges that lie "
                f"apart, and a document holds {limit:,}. Write the table with fewer rows in a fragment."
            )
        return base64.b64encode(self._packed()).decode()

    @staticmethod
    def from_json(document: Any, most: int = MOST_RANGES) -> Ranges:
        """Convert from JSON; `ValueError` if it is not what `to_json` returns, or has more than `most` ranges."""
        try:
            if isinstance(document, str):
                return _unpacked(base64.b64decode(document), most)
            return Ranges.from_pairs(document)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"it is not a set of rows: {error}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        if len(self.starts) <= _MOST_PAIRS:
            return Ranges, (self.starts, self.ends)
        return _unpacked, (self._packed(),)

    @property
    def _lie_apart(self) -> bool:
        return int(self.ends[-1] - self.starts[0]) > _PLACES_A_RANGE * len(self.starts)

    def _packed(self) -> bytes:
        """Compress the set: a bitmap if ranges are close together, else the differences between bounds."""
        first, places = int(self.starts[0]), int(self.ends[-1] - self.starts[0])
        if self._lie_apart:
            bounds = np.stack([self.starts, self.ends], 1).ravel()
            return b"s" + zlib.compress(np.diff(bounds, prepend=np.int64(0)).astype("<i8").tobytes(), 1)
        bits = np.packbits(self.bitmap(first, first + places))
        return b"b" + np.array([first], "<i8").tobytes() + zlib.compress(bits.tobytes(), 1)


def _unpacked(data: bytes, most: int = 1 << 31) -> Ranges:
    """Restore a set; `ValueError` if the bytes are damaged, or more than `most` ranges."""
    if data[:1] == b"s":
        bounds = np.frombuffer(expand(data[1:], _BOUNDS_A_RANGE * most), "<i8").cumsum(dtype=np.int64)
        starts, ends = bounds[0::2].copy(), bounds[1::2].copy()
        del bounds
        return _checked(starts, ends)
    if data[:1] != b"b" or len(data) < 9:
        raise ValueError("it is not a packed set of rows")
    first = int.from_bytes(data[1:9], "little", signed=True)
    bitmap = np.frombuffer(expand(data[9:], _BITMAP_A_RANGE * most), np.uint8)
    # A part at a time, because each bit becomes a byte.
    parts = [(at, bitmap[at : at + _PART]) for at in range(0, len(bitmap), _PART)]
    count, before = 0, np.int8(0)
    for _, part in parts:
        bits = np.unpackbits(part).view(np.int8)
        count += int((np.diff(bits, prepend=before) > 0).sum())
        before = bits[-1]
    if count > most:
        raise ValueError(f"it has more than {most:,} ranges")
    starts, ends, begun, ended, before = np.empty(count, np.int64), np.empty(count, np.int64), 0, 0, np.int8(0)
    for at, part in parts:
        bits = np.unpackbits(part).view(np.int8)
        steps = np.diff(bits, prepend=before)
        up, down = np.flatnonzero(steps > 0), np.flatnonzero(steps < 0)
        starts[begun : begun + len(up)], ends[ended : ended + len(down)] = up + 8 * at, down + 8 * at
        begun, ended, before = begun + len(up), ended + len(down), bits[-1]
    ends[ended:] = 8 * len(bitmap)
    starts += first
    ends += first
    return _checked(starts, ends)


def _checked(starts: Offsets, ends: Offsets) -> Ranges:
    if len(starts) != len(ends) or (len(starts) and starts[0] < -_FARTHEST):
        raise ValueError("it is not a set of rows")
    if len(starts) and (not (ends > starts).all() or not (starts[1:] > ends[:-1]).all() or ends[-1] > _FARTHEST):
        raise ValueError("it is not a set of rows")
    return Ranges(starts, ends)


_BITMAP_A_RANGE = 16
"""The bytes of a bitmap for each range, which are fewer if ranges are close together: see `_PLACES_A_RANGE`."""
_BOUNDS_A_RANGE = 4
"""As ranges that lie apart are stored as 16 bytes each, there may be a quarter of them."""
_PART = 1 << 18
_FARTHEST = 1 << 62
_PLACES_A_RANGE = 128
_MOST_PAIRS = 256
_EMPTY = Ranges(np.empty(0, np.int64), np.empty(0, np.int64))


def _intersection(left: Ranges, right: Ranges) -> Ranges:
    low = min(int(left.starts[0]), int(right.starts[0]))
    places = max(int(left.ends[-1]), int(right.ends[-1])) - low
    if places <= _PLACES_A_RANGE * (len(left.starts) + len(right.starts)) and len(left.starts) > _MOST_PAIRS:
        # The ranges are close together: counting per offset is faster than sorting the bounds.
        counts = np.zeros(places + 1, np.int8)
        for part in (left, right):
            counts[part.starts - low] += 1
            counts[part.ends - low] -= 1
        edges = np.flatnonzero(np.diff(np.cumsum(counts, dtype=np.int8) == 2, prepend=False))
        return Ranges(edges[0::2] + low, edges[1::2] + low)
    points = np.concatenate((left.starts, right.starts, left.ends, right.ends))
    steps = np.concatenate((np.ones(len(left.starts) + len(right.starts)), -np.ones(len(left.ends) + len(right.ends))))
    # At equal points sort ends before starts: ranges that only touch have no offset in common.
    order = np.lexsort((steps, points))
    points, inside = points[order], np.cumsum(steps[order]) == 2
    edges = np.flatnonzero(np.diff(inside, prepend=False))
    return Ranges(points[edges[0::2]], points[edges[1::2]])


def to_lists(sets: Iterable[Ranges | None], data_type: pa.ListType) -> pa.Array:
    """Store each set as a list of its bounds, and None as NULL."""
    found = list(sets)
    bounds = np.concatenate(
        [np.stack([s.starts, s.ends], 1).ravel() for s in found if s is not None] or [_EMPTY.starts]
    )
    cuts = np.cumsum([0, *(0 if s is None else 2 * len(s.starts) for s in found)])
    offsets = pa.array(cuts, pa.int32(), mask=np.array([*(s is None for s in found), False]))
    return pa.ListArray.from_arrays(offsets, pa.array(bounds).cast(data_type.value_type), data_type)


def from_lists(lists: pa.ListArray) -> Iterator[Ranges]:
    """Read the sets that `to_lists` stored; none may be NULL."""
    bounds, cuts = lists.values.to_numpy().astype(np.int64), lists.offsets.to_pylist()
    for low, high in itertools.pairwise(cuts):
        yield Ranges.from_bounds(bounds[low:high:2], bounds[low + 1 : high : 2])
