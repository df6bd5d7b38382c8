"""The order of a query's rows: by row id, or shuffled by a fixed hash of seed and row id.

The generator is SplitMix64 (Steele, Lea, Flood, 2014). Its first output for the seed, as an unsigned 64-bit number, is
its initial state; the hash of a row is output number ``row id`` of that sequence, counted from 0. The hash depends only
on seed and row id, so rows that are added later get their place among the existing rows, on every machine and in every
version. For one seed no two rows have the same hash, and the row id can be computed back from it: sorting needs no more
memory than the ids themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

RowIdArray: TypeAlias = npt.NDArray[np.int64]
HashArray: TypeAlias = npt.NDArray[np.uint64]

_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_CHUNK = 1 << 16


def shuffle_hashes(seed: int, row_ids: RowIdArray) -> HashArray:
    """Return the hash of each row id, by which a shuffled query is ordered.

    Args:
        seed: 0 to 2**64 - 1.
        row_ids: row ids; not modified.
    """
    return _hashed(seed, row_ids.copy())


def row_ids_of(seed: int, hashes: HashArray) -> RowIdArray:
    """Return the row ids for these hashes; overwrites the array."""
    start = np.uint64((_mixed_seed(seed) + _GAMMA) % _WORD)
    inverse = np.uint64(pow(_GAMMA, -1, _WORD))
    for part in _parts(hashes):
        _unmix(part)
        part -= start
        part *= inverse
    return hashes.view(np.int64)


def order_row_ids(
    row_ids: RowIdArray, shuffle_seed: int | None, limit: int | None = None, offset: int = 0
) -> RowIdArray:
    """Return row ids in a query's order, cut to its limit and offset.

    Args:
        row_ids: the matching rows, in any order; the array is overwritten.
        shuffle_seed: seed of the shuffled order; None: by row id.
        limit: maximum number of rows; None for all.
        offset: rows to skip first.
    """
    stop = len(row_ids) if limit is None else min(offset + limit, len(row_ids))
    if offset >= stop:
        return row_ids[:0]
    keys: RowIdArray | HashArray = row_ids if shuffle_seed is None else _hashed(shuffle_seed, row_ids)
    if stop < len(keys):
        keys.partition(stop - 1)
        keys = keys[:stop].copy()
    keys.sort()
    chosen = keys[offset:]
    return chosen.view(np.int64) if shuffle_seed is None else row_ids_of(shuffle_seed, chosen.view(np.uint64))


def _hashed(seed: int, row_ids: RowIdArray) -> HashArray:
    hashes = row_ids.view(np.uint64)
    start = np.uint64((_mixed_seed(seed) + _GAMMA) % _WORD)
    for part in _parts(hashes):
        part *= np.uint64(_GAMMA)
        part += start
        _mix(part)
    return hashes


def _mixed_seed(seed: int) -> int:
    state = np.array([(seed + _GAMMA) % _WORD], np.uint64)
    _mix(state)
    return int(state[0])


def _parts(values: HashArray) -> Iterator[HashArray]:
    """Split an array into views that fit into the processor's cache."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def _mix(values: HashArray) -> None:
    values ^= values >> np.uint64(30)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_SECOND)
    values ^= values >> np.uint64(31)


def _unmix(values: HashArray) -> None:
    values ^= (values >> np.uint64(31)) ^ (values >> np.uint64(62))
    values *= np.uint64(pow(_SECOND, -1, _WORD))
    values ^= (values >> np.uint64(27)) ^ (values >> np.uint64(54))
    values *= np.uint64(pow(_FIRST, -1, _WORD))
    values ^= (values >> np.uint64(30)) ^ (values >> np.uint64(60))
