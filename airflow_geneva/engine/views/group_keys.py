"""The keys of groups: compared by value, hashed for look-ups, and stored in one form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import is_binary, is_string, rows_at
from airflow_geneva.errors import InvalidInput

Hashes: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_GAMMA, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_NULL = np.uint64(0xD6E8FEB86659FD93)
_BYTES_AT_ONCE = 1 << 20


def key_type(column: str, data_type: pa.DataType) -> pa.DataType:
    """Return the type in which the key of a group is stored; `InvalidInput` for a type that cannot be a key."""
    if pt.is_dictionary(data_type):
        return key_type(column, data_type.value_type)
    if pt.is_string_view(data_type):
        return pa.string()
    if pt.is_binary_view(data_type):
        return pa.binary()
    scalar = (pt.is_primitive(data_type) and not pt.is_interval(data_type)) or pt.is_decimal(data_type)
    if isinstance(data_type, pa.BaseExtensionType) or not (scalar or is_string(data_type) or is_binary(data_type)):
        raise InvalidInput(
            f"group_by({column!r}): the column is {data_type}. Group by columns of numbers, booleans, texts, bytes, "
            "dates, times or decimals; store another value in a column of such a type first."
        )
    return data_type


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of rows, one array a column. Equal keys have equal values: NaN has one form, and -0.0 is 0.0."""

    columns: tuple[pa.Array, ...]

    @staticmethod
    def of(columns: Iterable[pa.Array | pa.ChunkedArray]) -> Keys:
        """Return the keys of rows, given as they are read from a table."""
        return Keys(tuple(_in_one_form(column) for column in columns))

    @staticmethod
    def joined(parts: Sequence[Keys]) -> Keys:
        return Keys(tuple(map(pa.concat_arrays, zip(*(part.columns for part in parts), strict=True))))

    def __len__(self) -> int:
        return len(self.columns[0])

    def take(self, rows: npt.NDArray[np.int64]) -> Keys:
        at = pa.array(rows)
        return Keys(tuple(rows_at(column, at) for column in self.columns))

    def equals(self, other: Keys) -> Mask:
        """Return for each row whether its key is that of the same row of other keys; NULL is a key like others."""
        same = np.ones(len(self), np.bool_)
        for ours, theirs in zip(self.columns, other.columns, strict=True):
            same &= _same(ours, theirs)
        return same

    def as_tuples(self) -> list[tuple[object, ...]]:
        """Return the keys as tuples that are equal if the keys are."""
        return list(zip(*map(_plain, self.columns), strict=True))


def hash_keys(keys: Keys) -> Hashes:
    """Hash each key; the same on every machine and in every version, because tables store the hashes."""
    found = np.zeros(len(keys), np.uint64)
    for column in keys.columns:
        null = np.asarray(column.is_null())
        for words in _words(column):
            found += _GAMMA
            found ^= np.where(null, _NULL, _mixed(words + _GAMMA))
            found = _mixed(found)
        found += null * _NULL
    return _mixed(found).view(np.int64)


@dataclass(frozen=True, eq=False)
class CountedKeys:
    """Different keys, sorted by their hashes; each with a number of rows, and the least of its rows' ids."""

    keys: Keys
    hashes: Hashes
    counts: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.hashes)

    @staticmethod
    def of_rows(keys: Keys, ids: npt.NDArray[np.int64]) -> CountedKeys:
        """Count the rows of each key."""
        return CountedKeys._added(keys, hash_keys(keys), np.ones(len(ids), np.int64), ids)

    @staticmethod
    def joined(parts: Sequence[CountedKeys]) -> CountedKeys:
        """Add up the rows of equal keys."""
        joined = (np.concatenate([getattr(part, name) for part in parts]) for name in ("hashes", "counts", "first"))
        return CountedKeys._added(Keys.joined([part.keys for part in parts]), *joined)

    @staticmethod
    def _added(
        keys: Keys, hashes: Hashes, counts: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
    ) -> CountedKeys:  # fmt: skip
        if not len(hashes):
            return CountedKeys(keys, hashes, counts, ids)
        order = np.argsort(hashes, kind="stable")
        ordered, sorted_hashes = keys.take(order), hashes[order]
        first = np.flatnonzero(np.concatenate(([True], sorted_hashes[1:] != sorted_hashes[:-1])))
        lengths = np.diff(np.append(first, len(order)))
        same = ordered.equals(ordered.take(np.repeat(first, lengths)))
        if not same.all():
            order, first = _apart(ordered, order, first, lengths, same)
        starts = order[first]
        added, least = np.add.reduceat(counts[order], first), np.minimum.reduceat(ids[order], first)
        return CountedKeys(keys.take(starts), hashes[starts], added, least)

    def where(self, kept: Mask) -> CountedKeys:
        found = self.keys.take(np.flatnonzero(kept))
        return CountedKeys(found, self.hashes[kept], self.counts[kept], self.first[kept])

    def in_order(self) -> CountedKeys:
        """Return the keys in the order of their first rows; then they are not sorted by hash."""
        return self.take(np.argsort(self.first, kind="stable"))

    def take(self, order: npt.NDArray[np.int64]) -> CountedKeys:
        """Return some of the keys in another order, so that they are not sorted by hash."""
        return CountedKeys(self.keys.take(order), self.hashes[order], self.counts[order], self.first[order])

    def positions(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the position of each of other keys, all of which are among these."""
        at = np.searchsorted(self.hashes, hash_keys(keys))
        while not (found := self.keys.take(at).equals(keys)).all():
            at = at + ~found
        return at

    @property
    def shared(self) -> Mask:
        """Return for each key whether another one has the same hash."""
        hashes, counts = np.unique(self.hashes, return_counts=True)
        found: Mask = counts[np.searchsorted(hashes, self.hashes)] > 1
        return found


def _apart(
    ordered: Keys,
    order: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    same: Mask,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Separate different keys with one hash; return the order of the rows, and where each key begins."""
    mixed = np.logical_or.reduceat(~same, first)
    parts: list[list[int]] = []
    for start, length, is_mixed in zip(first.tolist(), lengths.tolist(), mixed.tolist(), strict=True):
        rows = range(start, start + length)
        if not is_mixed:
            parts.append(list(rows))
            continue
        by_key: dict[tuple[object, ...], list[int]] = {}
        some = ordered.take(np.arange(start, start + length))
        for row, key in zip(rows, some.as_tuples(), strict=True):
            by_key.setdefault(key, []).append(row)
        parts.extend(by_key.values())
    begins = np.cumsum([0, *map(len, parts)])[:-1]
    return order[np.array([row for part in parts for row in part])], begins


def _plain(values: pa.Array) -> list[object]:
    if is_string(values.type) or is_binary(values.type):
        return list(values.to_pylist())
    words = zip(*(part.tolist() for part in _words(values)), strict=True)
    return [None if null else found for null, found in zip(values.is_null().to_pylist(), words, strict=True)]


def _in_one_form(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
        values = values if isinstance(values, pa.Array) else pa.concat_arrays(values.chunks)
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pt.is_string_view(values.type) or pt.is_binary_view(values.type):
        values = values.cast(key_type("", values.type))
    if not pt.is_floating(values.type):
        return values
    wide = values.cast(pa.float32()) if pt.is_float16(values.type) else values
    wide = pc.add(wide, pa.scalar(0.0, wide.type))  # -0.0 becomes 0.0
    return pc.if_else(pc.is_nan(wide), pa.scalar(float("nan"), wide.type), wide).cast(values.type)


def _same(ours: pa.Array, theirs: pa.Array) -> Mask:
    null, other = np.asarray(ours.is_null()), np.asarray(theirs.is_null())
    if is_string(ours.type) or is_binary(ours.type):
        equal = np.asarray(pc.fill_null(pc.equal(ours, theirs), False))
    else:
        equal = np.ones(len(ours), np.bool_)
        for one, two in zip(_words(ours), _words(theirs), strict=True):
            equal &= one == two
    return np.where(null | other, null & other, equal)


def _words(values: pa.Array) -> list[Words]:
    """Return the values as integers of 64 bits, one or more for each; anything for NULL."""
    kind = values.type
    if is_string(kind) or is_binary(kind):
        return [_hashed_bytes(values)]
    if pt.is_boolean(kind):
        return [_words(values.cast(pa.uint8()))[0]]
    if pt.is_float16(kind) or pt.is_float32(kind):
        return _words(values.cast(pa.float64()))
    width = kind.bit_width // 8
    data = np.frombuffer(values.buffers()[1] or b"", np.uint8)[
        values.offset * width : (values.offset + len(values)) * width
    ]
    if width >= 8:
        words = data.view(np.uint64).reshape(len(values), width // 8)
        return [np.ascontiguousarray(words[:, at]) for at in range(words.shape[1])]
    signed = not pt.is_unsigned_integer(kind)
    narrow = data.view(np.dtype(f"{'i' if signed else 'u'}{width}"))
    return [narrow.astype(np.int64 if signed else np.uint64).view(np.uint64)]


def _hashed_bytes(values: pa.Array) -> Words:
    """Hash texts or bytes: the sum over all bytes, each times a number that depends on its position."""
    values = values.cast(pa.large_binary())
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    found = np.diff(offsets).astype(np.uint64)
    at = 0
    while at < len(values):
        until = max(int(np.searchsorted(offsets, offsets[at] + _BYTES_AT_ONCE, "right")) - 1, at + 1)
        start, end = int(offsets[at]), int(offsets[until])
        lengths = np.diff(offsets[at : until + 1])
        places = np.arange(start, end) - np.repeat(offsets[at:until], lengths)
        weights = _WEIGHTS[places % len(_WEIGHTS)] ^ (places // len(_WEIGHTS)).astype(np.uint64)
        weighted = (data[start:end].astype(np.uint64) + np.uint64(1)) * weights
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)))
        bounds = offsets[at : until + 1] - start
        found[at:until] += sums[bounds[1:]] - sums[bounds[:-1]]
        at = until
    return found


def _mixed(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


_WEIGHTS = _mixed(np.arange(1, 4097, dtype=np.uint64) * _GAMMA)
"""By which the bytes of a text are multiplied, by their positions."""
