"""The order of a query's rows: by row id, or shuffled by a fixed hash of seed and row id.

The hash is number ``row id``, counted from 0, of the sequence that the generator SplitMix64 (Steele, Lea, Flood, 2014)
gives from the state that is its own first number for the seed, as an unsigned 64-bit number. It depends on nothing but
seed and row id, so rows that come later take their place among those that are there, on every machine and for good. For
one seed no two rows have the same hash, and the row id can be had back from it: sorting needs no more memory than the
ids themselves.
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
    """The hash of each row id, by which a shuffled query is ordered.

    Args:
        seed: 0 to 2**64 - 1.
        row_ids: any number of them; left as they are.
    """
    return _hashed(seed, row_ids.copy())


def row_ids_of(seed: int, hashes: HashArray) -> RowIdArray:
    """The row ids that have these hashes; the array is taken over and must not be used any more."""
    start = np.uint64((_mixed_seed(seed) + _GAMMA) % _WORD)
    inverse = np.uint64(pow(_GAMMA, -1, _WORD))
    for part in _parts(hashes):
        _unmix(part)
        part -= start
        part *= inverse
    return hashes.view(np.int64)


def in_order(row_ids: RowIdArray, shuffle_seed: int | None, limit: int | None = None, offset: int = 0) -> RowIdArray:
    """Row ids in a query's order, cut to its limit and offset.

    Args:
        row_ids: the matching rows, in any order; the array is taken over and must not be used any more.
        shuffle_seed: None: by row id.
        limit: most rows to give; None for all.
        offset: rows to leave out before.
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
    """Views that stay in the processor's cache while they are worked on."""
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
