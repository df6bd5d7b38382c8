"""Compare texts by their shingles: all runs of a few consecutive characters.

Texts are compared without regard to case, and to the amount and kind of white space. A text that is shorter than a
shingle has one, and so has an empty one: texts that are equal are always similar.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.lance_io.row_ranges import Offsets

HashArray: TypeAlias = npt.NDArray[np.uint64]

CHARACTERS = 7
"""Characters of a shingle. In English, two long texts about different subjects share few runs of this length."""

_GAPS = r"[\s\x0b\p{Z}]+"
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_CACHED_BYTES = 256 << 10
_ASCII = 128
_NUMBERS = (1 << 32) - 1


def normalized(texts: pa.Array) -> pa.Array:
    """Return texts in lower case, with one space for each run of white space between words; NULL stays NULL."""
    lower = pc.utf8_lower(texts.cast(pa.large_string()))
    return pc.utf8_trim(pc.replace_substring_regex(lower, _GAPS, " "), " ")


def pieces(texts: pa.Array) -> Iterator[pa.Array]:
    """Cut texts where they fill a processor's cache."""
    ends = np.cumsum(pc.binary_length(texts).to_numpy(zero_copy_only=False)) if len(texts) else np.empty(0)
    start = 0
    while start < len(texts):
        before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, before + _CACHED_BYTES, "right")), start + 1)
        yield texts[start:end]
        start = end


def shingle_hashes(texts: pa.Array) -> tuple[HashArray, Offsets]:
    """Return the hashes of the shingles of each text, one text after another, and where those of each one begin.

    Args:
        texts: normalized, none of them NULL.
    """
    characters, bounds = _characters(texts)
    starts, lengths = bounds[:-1], np.diff(bounds)
    counts = np.maximum(lengths - (CHARACTERS - 1), 1)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    # 0 stands for what is behind the end of a text.
    padded = np.zeros(len(characters) + 1 + CHARACTERS, np.uint64)
    padded[: len(characters)] = characters
    padded[: len(characters)] += np.uint64(1)
    runs = np.zeros(len(characters) + 1, np.uint64)
    for at in range(CHARACTERS):
        runs *= _FACTOR
        runs += padded[at : at + len(runs)]
    found = runs[places]
    short = np.flatnonzero(lengths < CHARACTERS)
    if len(short):
        whole = np.zeros(len(short), np.uint64)
        for at in range(CHARACTERS):
            whole *= _FACTOR
            whole += np.where(at < lengths[short], padded[starts[short] + at], np.uint64(0))
        found[offsets[short]] = whole
    return mixed(found), offsets


def mixed(values: HashArray) -> HashArray:
    """Overwrite values so that each bit depends on all bits of the value before."""
    values ^= values >> np.uint64(30)
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values


def _characters(texts: pa.Array) -> tuple[npt.NDArray[np.uint8] | npt.NDArray[np.uint32], Offsets]:
    """Return the code points of all texts, and where those of each text begin."""
    _, ends, data = texts.buffers()
    bounds = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    found = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    bounds = bounds - bounds[0]
    if not len(found) or found.max() < _ASCII:
        return found, bounds
    begun = np.zeros(len(found) + 1, np.int64)
    np.cumsum((found & 0xC0) != 0x80, out=begun[1:])
    return np.frombuffer(found.tobytes().decode().encode("utf-32-le"), np.uint32), begun[bounds]


@dataclass(frozen=True, eq=False)
class ShingleSets:
    """The sets of shingles of some texts.

    Args:
        keys: a number for each shingle of each text, ascending: the text, then the shingle.
        bounds: where those of each text begin.
    """

    keys: npt.NDArray[np.int64]
    bounds: Offsets

    @staticmethod
    def of(texts: pa.Array) -> ShingleSets:
        """Make the sets of normalized texts, none of which is NULL."""
        hashes, offsets = shingle_hashes(texts)
        _, numbers = np.unique(hashes, return_inverse=True)
        of_text = np.repeat(np.arange(len(texts)), np.diff(offsets))
        keys = np.sort((of_text << 32) | numbers.reshape(-1))
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
        return ShingleSets(keys, np.searchsorted(keys, np.arange(len(texts) + 1) << 32))

    def similarity(self, left: Offsets, right: Offsets) -> npt.NDArray[np.float64]:
        """Return the Jaccard similarity of pairs of texts: the shingles that both have, of those that either has."""
        sizes = np.diff(self.bounds)
        swap = sizes[left] > sizes[right]
        left, right = np.where(swap, right, left), np.where(swap, left, right)
        counts = sizes[left]
        ends = np.cumsum(counts)
        wanted = (spread(self.keys, self.bounds[left], counts) & _NUMBERS) | np.repeat(right << 32, counts)
        at = np.minimum(np.searchsorted(self.keys, wanted), max(len(self.keys) - 1, 0))
        shared = np.add.reduceat((self.keys[at] == wanted).astype(np.int64), ends - counts) if len(ends) else counts
        found: npt.NDArray[np.float64] = shared / (counts + sizes[right] - shared)
        return found


@dataclass(frozen=True, eq=False)
class _Lists:
    """The first shingles of each text, and for each shingle the texts that have it among these.

    Args:
        counts: how many shingles of each text are its first ones.
        texts: by shingle.
        bounds: where the texts of each shingle begin.
    """

    counts: Offsets
    texts: Offsets
    bounds: Offsets

    @staticmethod
    def of(sets: ShingleSets, shingles: Offsets, distinct: int, share: float) -> _Lists:
        """List the texts by enough of their shingles that a set with a share of all has one of these.

        Args:
            shingles: those of each text, the rarest ones first.
        """
        sizes, texts = np.diff(sets.bounds), sets.keys >> 32
        # A rounding error must not drop one.
        counts = sizes - np.ceil(sizes * share - 1e-6).astype(np.int64) + 1
        first = np.arange(len(texts)) - sets.bounds[texts] < counts[texts]
        shingles, texts = shingles[first], texts[first]
        order = np.argsort(shingles, kind="stable")
        return _Lists(counts, texts[order], np.searchsorted(shingles[order], np.arange(distinct + 1)))


@dataclass(frozen=True, eq=False)
class SimilarSets:
    """Finds the similar ones of some texts without comparing each with each.

    The shingles of each text are sorted, those that few texts have first. Of two similar texts, the shorter one has a
    shingle among its first `n - 2t / (1 + t) n + 1` that the other one has among its first `m - t m + 1`, if `n` and
    `m` are the numbers of their shingles, and `t` is the threshold: if all of these were missing in the other text,
    too few would be left. Texts of one template, which begin with what differs, are so told apart without a comparison.

    Args:
        shingles: those of each text, in this order, as numbers.
        early, late: the texts by these two numbers of shingles.
    """

    sets: ShingleSets
    least: float
    shingles: Offsets
    early: _Lists
    late: _Lists

    @staticmethod
    def of(sets: ShingleSets, least: float) -> SimilarSets:
        numbers = sets.keys & _NUMBERS
        distinct = int(numbers.max(initial=-1)) + 1
        rank = np.empty(distinct, np.int64)
        rank[np.argsort(np.bincount(numbers, minlength=distinct), kind="stable")] = np.arange(distinct)
        shingles = np.sort((sets.keys & ~_NUMBERS) | rank[numbers]) & _NUMBERS
        early, late = (_Lists.of(sets, shingles, distinct, share) for share in (2 * least / (1 + least), least))
        return SimilarSets(sets, least, shingles, early, late)

    def possible(self, texts: Offsets) -> tuple[Offsets, Offsets]:
        """Return the pairs of some texts and others that may be similar, some of them several times."""
        ways = ((self.early, self.late), (self.late, self.early))
        left, right = zip(*(self._listed(texts, *way) for way in ways), strict=True)
        return np.concatenate(left), np.concatenate(right)

    def similar(self, left: Offsets, right: Offsets) -> npt.NDArray[np.bool_]:
        """Return which pairs of texts are similar."""
        return self.sets.similarity(left, right) >= self.least

    def _listed(self, texts: Offsets, own: _Lists, others: _Lists) -> tuple[Offsets, Offsets]:
        counts = own.counts[texts]
        shingles = spread(self.shingles, self.sets.bounds[texts], counts)
        lengths = others.bounds[shingles + 1] - others.bounds[shingles]
        left = np.repeat(np.repeat(texts, counts), lengths)
        return left, spread(others.texts, others.bounds[shingles], lengths)


def spread(values: Offsets, begins: Offsets, counts: Offsets) -> Offsets:
    """Return as many values from each beginning on, one run after another."""
    ends = np.cumsum(counts)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - (ends - counts), counts)
    found: Offsets = values[places]
    return found
