"""Find the rows that a deduplicated query keeps, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.duplicates.minhash import bands_for
from airflow_geneva.engine.duplicates.texts import CHARACTERS
from airflow_geneva.engine.duplicates.vectors import corners_for, most_sides, unit_vectors
from airflow_geneva.query import Query

Row = Mapping[str, Any]
MASK = (1 << 64) - 1

_BASE = (
    "In the beginning God created the heaven and the earth, and the earth was without form, and void",
    "And God said, Let there be light: and there was light, and God saw the light, that it was good",
    "The words of the Preacher, the son of David, king in Jerusalem, vanity of vanities",
    "a time to weep, and a time to laugh; a time to mourn, and a time to dance",
)


def text_of(number: int) -> str | None:
    """Return a text of which others are copies, or differ by a few characters; None for one of 40 numbers."""
    if number % 40 == 0:
        return None
    base = _BASE[number % len(_BASE)]
    at, edits = 11 * (number // 4 % 5), number // 20 % 3
    text = base[:at] + "xyz"[:edits] * edits + base[at + edits :]
    return text.upper() if number % 7 == 0 else text.replace(" ", "  \n") if number % 11 == 0 else text


def vector_of(number: int) -> list[float] | None:
    """Return a vector of which others are multiples, or differ by a small angle; None for one of 40 numbers."""
    if number % 40 == 0:
        return None
    if number % 41 == 0:
        return [0.0] * 8 if number % 2 else [math.nan] * 8
    base, angle, at = number % 5, 0.12 * (number // 5 % 6), number // 30 % 3
    found = [math.cos(angle) * 2.0 ** (number % 3) if place == base else 0.0 for place in range(8)]
    found[5 + at] = math.sin(angle) * 2.0 ** (number % 3)
    return found


@dataclass(frozen=True)
class Clean:
    """A deduplicated query, for this package and in plain Python."""

    on: tuple[str, ...] = ("text",)
    threshold: float | None = 0.8
    keep: str = "first"
    where: str | None = None

    def of(self, query: Query) -> Query:
        query = query if self.where is None else query.where(self.where)
        method = "equal" if self.threshold is None else "cosine" if self.on == ("vector",) else "minhash"
        return query.deduplicate(list(self.on), method, self.threshold, self.keep)

    def kept(self, rows: Mapping[int, Row], passes: Callable[[Row], bool] = lambda row: True) -> list[int]:
        """Return the row ids that are kept of rows by row id."""
        rows = {row_id: row for row_id, row in rows.items() if passes(row)}
        return sorted({self._best(rows, of) for of in self._clusters(rows).values()})

    def duplicates(
        self, rows: Mapping[int, Row], passes: Callable[[Row], bool] = lambda row: True
    ) -> list[tuple[int, int, int | None]]:
        """Return the rows of clusters of several: id, smallest id in the cluster, and that of the row kept instead."""
        rows = {row_id: row for row_id, row in rows.items() if passes(row)}
        found = []
        for of in sorted({min(of): of for of in self._clusters(rows).values() if len(of) > 1}.items()):
            best = self._best(rows, of[1])
            found += [
                (one, of[0], None if one == best else best) for one in sorted(of[1], key=lambda one: (one != best, one))
            ]
        return found

    def _clusters(self, rows: Mapping[int, Row]) -> dict[int, set[int]]:
        cluster = {row_id: {row_id} for row_id in rows}
        for left, right in self._pairs(rows):
            joined = cluster[left] | cluster[right]
            cluster |= dict.fromkeys(joined, joined)
        return cluster

    def _best(self, rows: Mapping[int, Row], cluster: set[int]) -> int:
        if self.keep == "first":
            return min(cluster)
        column, sign = self.keep[4:-1], -1 if self.keep.startswith("max") else 1
        valued = {one: sign * rows[one][column] for one in cluster if rows[one][column] is not None}
        return min(valued, key=lambda one: (valued[one], one)) if valued else min(cluster)

    def _pairs(self, rows: Mapping[int, Row]) -> list[tuple[int, int]]:
        if self.threshold is None:
            keys = {row_id: tuple(row[name] for name in self.on) for row_id, row in rows.items()}
            return [(a, b) for a, b in combinations(rows, 2) if keys[a] == keys[b]]
        if self.on == ("vector",):
            return self._pairs_of_vectors(rows, self.threshold)
        texts = {row_id: plain(row[self.on[0]]) for row_id, row in rows.items() if row[self.on[0]] is not None}
        values = pa.array(list(texts.values()), pa.large_string())
        bands = dict(zip(texts, bands_for(self.threshold).hashes(values).T.tolist(), strict=True))
        sets = {row_id: shingles(text) for row_id, text in texts.items()}
        return [
            (a, b)
            for a, b in combinations(texts, 2)
            if any(x == y for x, y in zip(bands[a], bands[b], strict=True))
            and len(sets[a] & sets[b]) / len(sets[a] | sets[b]) >= self.threshold
        ]

    def _pairs_of_vectors(self, rows: Mapping[int, Row], threshold: float) -> list[tuple[int, int]]:
        vectors = {one: row["vector"] for one, row in rows.items() if has_direction(row["vector"])}
        data = pa.array([*vectors.values()], pa.list_(pa.float32(), 8))
        hashes, words = (found.T.tolist() for found in corners_for(threshold).hashes(unit_vectors(data)[0]))
        bands, sketches = dict(zip(vectors, hashes, strict=True)), dict(zip(vectors, words, strict=True))
        return [
            (a, b)
            for a, b in combinations(vectors, 2)
            if (found := cosine(vectors[a], vectors[b])) > 1 - 1e-12
            or (
                found >= threshold
                and any(x == y for x, y in zip(bands[a], bands[b], strict=True))
                and sum(((x ^ y) & MASK).bit_count() for x, y in zip(sketches[a], sketches[b], strict=True))
                <= most_sides(threshold)
            )
        ]


def has_direction(vector: list[float] | None) -> bool:
    return vector is not None and any(vector) and all(map(math.isfinite, vector))


def cosine(left: list[float], right: list[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True)) / (math.hypot(*left) * math.hypot(*right))


def plain(text: str) -> str:
    """Return a text of ASCII as it is compared."""
    return " ".join(text.lower().split())


def shingles(text: str) -> set[str]:
    return {text[at : at + CHARACTERS] for at in range(max(len(text) - CHARACTERS + 1, 1))}
