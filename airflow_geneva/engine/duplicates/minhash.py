"""Hash texts so that similar ones probably share a hash: MinHash, in bands.

A *minhash* of a text is the smallest value that a permutation gives one of its shingles. Two texts have the same
minhash with a probability of their Jaccard similarity `s`. A *band* joins `rows` of them into one hash, so two texts
share at least one of `bands` with a probability of `1 - (1 - s ** rows) ** bands`: a curve that rises at a threshold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.duplicates.texts import HashArray, mixed, pieces, shingle_hashes

_GAMMA, _WORD = 0x9E3779B97F4A7C15, 1 << 64


@dataclass(frozen=True)
class Bands:
    """How many bands there are, and how many minhashes each of them joins."""

    rows: int
    bands: int

    def recall(self, similarity: float) -> float:
        """Return the probability with which two texts of a similarity share a band."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)

    def hashes(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """Return the hash of each band (rows) of each text (columns).

        Args:
            texts: normalized, none of them NULL.
        """
        found = [self._of_piece(piece) for piece in pieces(texts)]
        return np.concatenate(found, axis=1) if found else np.empty((self.bands, 0), np.int64)

    def _of_piece(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        hashes, offsets = shingle_hashes(texts)
        shingles, starts = (hashes >> np.uint64(32)).astype(np.uint32), offsets[:-1]
        permuted = np.empty_like(shingles)
        permutations = iter(_PERMUTATIONS)
        found = np.empty((self.bands, len(texts)), np.uint64)
        for band in range(self.bands):
            joined: HashArray = np.full(len(texts), (band + 1) * _GAMMA % _WORD, np.uint64)
            for _ in range(self.rows):
                flipped, factor = next(permutations)
                np.bitwise_xor(shingles, flipped, out=permuted)
                np.multiply(permuted, factor, out=permuted)
                joined ^= np.minimum.reduceat(permuted, starts)
                joined = mixed(joined)
            found[band] = joined
        return found.view(np.int64)


CHOICES = {
    0.3: Bands(2, 49),
    0.5: Bands(3, 35),
    0.7: Bands(4, 17),
    0.8: Bands(6, 16),
    0.9: Bands(10, 11),
    0.95: Bands(16, 8),
}
"""The bands by the smallest threshold for which they are used. At it, 99 of 100 similar pairs share a band."""


def bands_for(threshold: float) -> Bands:
    """Return the bands for a threshold, which is at least the smallest of `CHOICES`."""
    return CHOICES[max(least for least in CHOICES if least <= threshold)]


def _permutations() -> Iterator[tuple[np.uint32, np.uint32]]:
    """Yield fixed permutations of 32-bit numbers: bits to flip, and an odd factor."""
    state = 0
    while True:
        state = (state + _GAMMA) % _WORD
        (drawn,) = mixed(np.array([state], np.uint64)).tolist()
        yield np.uint32(drawn >> 32), np.uint32(drawn & 0xFFFFFFFF | 1)


_PERMUTATIONS = tuple(islice(_permutations(), max(one.rows * one.bands for one in CHOICES.values())))
