"""How long rows will take, by how long the rows before them took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace, nlargest

_MOST_PARTS = 8
_LEAST_PARTS = 3
_MOST_OF_A_PART = 2.0
_NOISE = 3.0
_MOST_CHANGE = 1.5
_LATE = 0.2


def seconds_per_row(samples: Sequence[tuple[float, int]], rows_left: int) -> float | None:
    """Estimate how long each of the rows that are left takes; None while only the first rows are there.

    It is the average, in which a stretch of rows counts at most twice as much as the middle one. If the cost of a row
    rises or falls, it goes on as it did: as far as that stands out of the noise, and at most half as far again from
    the average.

    Args:
        samples: after how many seconds there were how many rows, from the first rows on; both rise. How long the
            first rows took does not count, because they may have waited for a model.
    """
    if len(samples) < 2:
        return None
    import numpy as np  # the dag processor imports this module

    seconds, rows = np.array(samples, dtype=float).T
    span = rows[-1] - rows[0]
    parts = min(len(samples) - 1, _MOST_PARTS)
    if parts < _LEAST_PARTS:
        return float((seconds[-1] - seconds[0]) / span)
    costs = np.diff(np.interp(np.linspace(rows[0], rows[-1], parts + 1), rows, seconds)) * parts / span
    costs = np.minimum(costs, _MOST_OF_A_PART * np.median(costs))
    average = np.mean(costs)
    places = np.arange(parts) - (parts - 1) / 2
    spread = places @ places
    slope = places @ costs / spread
    noise = np.sum((costs - average - slope * places) ** 2) / (parts - 2) / spread
    trust = max(1 - _NOISE * noise / slope**2, 0.0) if slope else 0.0
    ahead = (span + rows_left) / 2 * parts / span  # from the middle of the rows that are done to that of the others
    return float(np.clip(average + trust * slope * ahead, average / _MOST_CHANGE, average * _MOST_CHANGE))


def rows_of_longest_line(begun: Iterable[int], waiting: Iterable[int], slots: int) -> int:
    """Return how many rows the slot with most has before it, if each takes the next task when it is free.

    Args:
        begun, waiting: the rows that tasks still have.
    """
    lines = nlargest(slots, [*begun, *[0] * slots])
    heapify(lines)
    for rows in waiting:
        heapreplace(lines, lines[0] + rows)
    return max(lines)


def rest_of(expected: float, passed: float) -> float:
    """Return what is left of an expected time; what takes longer is not expected to end at once."""
    return max(expected - passed, _LATE * passed)
