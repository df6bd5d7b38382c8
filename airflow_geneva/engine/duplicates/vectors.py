"""Compare vectors by the angle between them, and hash them so that similar ones probably share a hash.

Whether two vectors are similar, and which hashes one has, must depend on these vectors alone: not on the machine, or on
the vectors that are computed at once. A matrix product rounds its sums in an order that depends on both. So all factors
are whole numbers, of which every sum is exact.

A hash follows Andoni and others, "Practical and Optimal LSH for Angular Distance" (2015): a vector is projected on a
few random directions, and its *corner* is the one, or the opposite of one, to which it is nearest. A *band* joins
several corners into one hash.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import acos, ceil, pi, sqrt

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.duplicates.texts import HashArray, mixed
from airflow_geneva.engine.lance_io.row_ranges import Offsets

Mask = npt.NDArray[np.bool_]
Units = npt.NDArray[np.float64]
"""Vectors of length 1, as whole numbers of `1 / _UNIT`, in rows."""

CORNERS, _DIRECTIONS = 128, 8
WORDS = 4
"""Numbers of 64 bits in a sketch: each bit says on which side of a plane a vector lies."""

_UNIT, _EXACT_IN_SINGLE = 1 << 26, 1 << 24
_LARGEST_FACTOR = 8
_TOLERANCE = 1e-6
_PIECE_BYTES = 2 << 20
_SEED = np.uint64(0x9E3779B97F4A7C15)
_DEVIATIONS = 4


def unit_vectors(vectors: pa.Array) -> tuple[Units, Mask]:
    """Return vectors of length 1, and which of them have a direction; those that have none are zero.

    NULL, vectors of zeros, and those with a NaN, an infinite or a missing number have none.

    Args:
        vectors: lists of one size, of floating-point numbers.
    """
    size = vectors.type.list_size
    values = vectors.values[vectors.offset * size : (vectors.offset + len(vectors)) * size]
    found = values.to_numpy(zero_copy_only=False).astype(np.float64).reshape(len(vectors), size)
    largest = np.abs(found).max(axis=1, initial=0)
    directed: Mask = vectors.is_valid().to_numpy(zero_copy_only=False) & np.isfinite(largest) & (largest > 0)
    found[~directed] = 0
    _, exponents = np.frexp(np.where(directed, largest, 1))
    np.ldexp(found, -exponents[:, None], out=found)
    # Sums in the order of the columns; np.sum has another one on another machine.
    lengths = np.sqrt(np.cumsum(found * found, axis=1)[:, -1:]) if size else np.ones((len(found), 1))
    found *= _UNIT / np.where(lengths > 0, lengths, 1)
    return np.rint(found, out=found), directed


def are_similar(left: Units, right: Units, threshold: float) -> Mask:
    """Return which pairs of vectors, row by row, have at least a cosine; it is exact to six digits."""
    found: Mask = np.einsum("ij,ij->i", left, right) >= _least(threshold)
    return found


def _least(threshold: float) -> float:
    return (threshold - _TOLERANCE) * _UNIT**2


@dataclass(frozen=True)
class Corners:
    """How many corners a band joins, and how many bands there are."""

    joined: int
    bands: int

    def hashes(self, units: Units) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the hash of each band (rows) of each vector (columns), and the words of each vector's sketch."""
        hashes = np.empty((self.bands, len(units)), np.int64)
        words = np.empty((WORDS, len(units)), np.int64)
        for part in pieces(len(units), units.shape[1]):
            hashes[:, part], words[:, part] = self._of_piece(units[part])
        return hashes, words

    def _of_piece(self, units: Units) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        projected = _projected(units)
        corners = _corners(projected)
        found = np.empty((self.bands, len(units)), np.uint64)
        for band, of_band in enumerate(_choice(self.joined, self.bands)):
            joined: HashArray = np.full(len(units), np.uint64(band), np.uint64)
            for corner in of_band:
                joined *= np.uint64(2 * _DIRECTIONS)
                joined += corners[corner]
            found[band] = mixed(joined)
        signs = np.packbits(projected.reshape(len(units), -1)[:, : WORDS * 64] > 0, axis=1)
        return found.view(np.int64), np.ascontiguousarray(signs).view("<i8").T.astype(np.int64)


CHOICES = {
    0.8: Corners(3, 48),
    0.9: Corners(4, 35),
    0.95: Corners(6, 42),
    0.98: Corners(7, 20),
    0.99: Corners(9, 17),
}
"""The corners by the smallest threshold for which they are used. At it, 99 of 100 similar pairs share a band."""


def corners_for(threshold: float) -> Corners:
    """Return the corners for a threshold, which is at least the smallest of `CHOICES`."""
    return CHOICES[max(least for least in CHOICES if least <= threshold)]


def most_sides(threshold: float) -> int:
    """Return by how many bits the sketches of two vectors differ at most, if they are similar.

    Of a million similar pairs, about 30 differ by more; they are not found.
    """
    share, bits = acos(threshold - _TOLERANCE) / pi, 64 * WORDS
    return ceil(bits * share + _DEVIATIONS * sqrt(bits * share * (1 - share)))


def bits_set(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return how many bits of the words of each row are 1; overwrites them."""
    words -= (words >> np.uint64(1)) & np.uint64(0x5555555555555555)
    words[:] = (words & np.uint64(0x3333333333333333)) + ((words >> np.uint64(2)) & np.uint64(0x3333333333333333))
    words += words >> np.uint64(4)
    words &= np.uint64(0x0F0F0F0F0F0F0F0F)
    words *= np.uint64(0x0101010101010101)
    words >>= np.uint64(56)
    found: npt.NDArray[np.uint64] = words.sum(axis=1)
    return found


def pieces(rows: int, size: int) -> Iterator[slice]:
    """Cut vectors of a size where they fill some megabytes."""
    step = max(_PIECE_BYTES // (8 * max(size, 1)), 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _projected(units: Units) -> npt.NDArray[np.float32]:
    """Project vectors on all directions: by vector, number of the direction, and corner."""
    size = units.shape[1]
    most = _EXACT_IN_SINGLE // (_LARGEST_FACTOR * max(size, 1))
    largest = np.abs(units).max(axis=1, initial=0)[:, None]
    rounded = np.rint(units * (most / np.where(largest > 0, largest, 1))).astype(np.float32)
    found: npt.NDArray[np.float32] = rounded @ _directions(size)
    return found.reshape(len(units), _DIRECTIONS, CORNERS)


def _corners(projected: npt.NDArray[np.float32]) -> HashArray:
    """Return the number of each corner (rows) of each vector (columns)."""
    best = np.abs(projected[:, 0])
    found = (projected[:, 0] > 0).astype(np.uint8)
    for direction in range(1, _DIRECTIONS):
        length = np.abs(projected[:, direction])
        nearer = length > best
        np.copyto(best, length, where=nearer)
        side = (projected[:, direction] > 0).astype(np.uint8)
        np.copyto(found, side + np.uint8(2 * direction), where=nearer)
    return found.T.astype(np.uint64)


@lru_cache(8)
def _directions(size: int) -> npt.NDArray[np.float32]:
    """Return the directions for vectors of a size in columns: whole numbers, nearly normally distributed."""
    count = size * CORNERS * _DIRECTIONS
    drawn = mixed(np.arange(1, count + 1, dtype=np.uint64) * _SEED)
    bits = np.unpackbits(drawn.astype("<u8").view(np.uint8).reshape(count, 8)[:, :2], axis=1)
    found: npt.NDArray[np.float32] = (bits.sum(axis=1, dtype=np.int64) - _LARGEST_FACTOR).astype(np.float32)
    return found.reshape(size, CORNERS * _DIRECTIONS)


def _choice(joined: int, bands: int) -> list[Offsets]:
    """Return the corners of each band: all are used once before one is used again."""
    found: list[Offsets] = []
    while len(found) < bands:
        drawn = mixed(np.arange(1, CORNERS + 1, dtype=np.uint64) * _SEED + np.uint64(len(found)))
        order = np.argsort(drawn, kind="stable")
        found += [order[at : at + joined] for at in range(0, CORNERS - joined + 1, joined)]
    return found[:bands]
