"""Clusters of rows, compared with a search through the graph of all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.duplicates import clusters as search
from airflow_geneva.engine.duplicates.clusters import Clusters, Forest, HashedRows

BANDS = 3

# A text is a few letters; two texts share a band if their letters at a place are equal, and are similar if at most one
# letter differs.
Text = tuple[int, ...]
TEXTS = st.one_of(st.none(), st.tuples(*[st.integers(0, 2)] * BANDS))
ROWS = st.dictionaries(st.integers(0, 30), TEXTS, max_size=20)


def similar(left: Text, right: Text) -> bool:
    return sum(a != b for a, b in zip(left, right, strict=True)) <= 1 and any(
        a == b for a, b in zip(left, right, strict=True)
    )


def wanted(rows: dict[int, Text | None]) -> dict[int, int]:
    """Return the smallest row id of each row's cluster."""
    found: dict[int, int] = {}
    for start in sorted(rows):
        if start in found:
            continue
        reached = [start]
        for one in reached:
            found[one] = start
            text = rows[one]
            for other, its in rows.items():
                if text is not None and its is not None and other not in reached and similar(text, its):
                    reached.append(other)
    return found


class Search:
    """Finds clusters of rows, and counts the pairs that it compares."""

    def __init__(self) -> None:
        self.compared: list[tuple[int, int]] = []

    def find(self, rows: dict[int, Text | None], known: Clusters, order: int = 0) -> Clusters:
        ids = np.array(sorted(rows, key=lambda one: (one * 7919 + order) % 31 if order else one), np.int64)
        texts = [rows[int(one)] for one in ids]
        codes = np.array([-1 if text is None else hash_of(text) for text in texts], np.int64)
        has_value = np.array([text is not None for text in texts], np.bool_)

        bands = [np.array([text[at] if text else 0 for text in texts], np.int64) for at in range(BANDS)]
        return Clusters.find(HashedRows(ids, codes, codes + 1, has_value), bands, known, Comparing(self, ids, rows))


@dataclass
class Comparing:
    search: Search
    ids: npt.NDArray[np.int64]
    rows: dict[int, Text | None]

    def possible(self, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.ones(len(left), np.bool_)

    def similar(self, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        pairs = list(zip(self.ids[left].tolist(), self.ids[right].tolist(), strict=True))
        self.search.compared += pairs
        return np.array([similar(self.rows[a] or (), self.rows[b] or ()) for a, b in pairs], np.bool_)

    def among(self, rows: npt.NDArray[np.int64]) -> Among:
        return Among(self, rows)


@dataclass
class Among:
    """Some rows, by their positions among them."""

    all: Comparing
    rows: npt.NDArray[np.int64]

    def possible(self, some: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        pairs = [(one, other) for one in some for other in range(len(self.rows)) if one != other]
        left, right = np.array(pairs, np.int64).reshape(-1, 2).T
        return left, right

    def similar(self, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return self.all.similar(self.rows[left], self.rows[right])


def hash_of(text: Text) -> int:
    return sum((letter + 1) * 10**at for at, letter in enumerate(text))


def found(clusters: Clusters) -> dict[int, int]:
    assert clusters.ids.tolist() == sorted(clusters.ids.tolist())
    return dict(zip(clusters.ids.tolist(), clusters.first.tolist(), strict=True))


@pytest.fixture(params=[1, 1_000], ids=["groups are large", "groups are small"], autouse=True)
def _size_of_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_LARGE", request.param)


@given(ROWS, st.integers(0, 30))
def test_clusters_are_the_components_of_the_graph_of_pairs(rows: dict[int, Text | None], order: int) -> None:
    clusters = Search().find(rows, Clusters.none(), order)
    assert found(clusters) == wanted(rows)
    several = [one for one in rows if list(wanted(rows).values()).count(wanted(rows)[one]) > 1]
    assert sorted(clusters.ids[clusters.several].tolist()) == sorted(several)


@given(st.lists(ROWS, min_size=2, max_size=5))
def test_what_is_known_of_other_rows_changes_no_cluster(versions: list[dict[int, Text | None]]) -> None:
    known = Clusters.none()
    for order, rows in enumerate(versions):
        known = Search().find(rows, known, order)
        assert found(known) == wanted(rows)
        assert Clusters.from_batch(known.to_batch()).equals(known)


@given(ROWS, ROWS)
def test_only_pairs_are_compared_of_which_a_row_is_new_or_in_a_cluster_that_lost_one(
    before: dict[int, Text | None], after: dict[int, Text | None]
) -> None:
    known = Search().find(before, Clusters.none())
    search = Search()
    search.find(after, known)
    new = {one for one in after if one not in before or before[one] != after[one]}
    first = wanted(before)
    lost = {first[one] for one in before if one not in after or before[one] != after[one]}
    for pair in search.compared:
        assert set(pair) & new or all(first[one] in lost for one in pair)


def test_nothing_is_compared_if_nothing_changed() -> None:
    rows: dict[int, Text | None] = {1: (0, 0, 0), 2: (0, 0, 1), 3: None}
    known = Search().find(rows, Clusters.none())
    search = Search()
    assert search.find(rows, known).equals(known)
    assert search.compared == []


def test_rows_that_are_alike_are_compared_once_and_not_with_each_other() -> None:
    """Of a thousand rows with two texts, which are not similar and share a band, one pair is compared."""
    rows: dict[int, Text | None] = {at: (0, 1, 1) if at % 2 else (0, 2, 2) for at in range(31)}
    search = Search()
    assert set(found(search.find(rows, Clusters.none())).values()) == {0, 1}
    assert len(search.compared) == 1


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40))
def test_a_forest_joins_sets(size: int, pairs: list[tuple[int, int]]) -> None:
    pairs = [(a % size, b % size) for a, b in pairs]
    forest, sets = Forest(size), {at: {at} for at in range(size)}
    for some in chunks(pairs):
        forest.join(*(np.array(side, np.int64) for side in zip(*some, strict=True)))
        for a, b in some:
            joined = sets[a] | sets[b]
            sets |= dict.fromkeys(joined, joined)
        assert forest.roots(np.arange(size)).tolist() == [min(sets[at]) for at in range(size)]


def chunks(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    for start in range(0, len(pairs), 7):
        yield pairs[start : start + 7]


@pytest.mark.parametrize(
    "batch",
    [
        pa.record_batch({"ids": [1], "high": [2]}),
        pa.record_batch({"ids": ["1"], "high": [2], "first": [1]}),
        pa.record_batch({"ids": pa.array([None], pa.int64()), "high": [2], "first": [1]}),
    ],
)
def test_other_data_are_no_clusters(batch: pa.RecordBatch) -> None:
    with pytest.raises((KeyError, ValueError)):
        Clusters.from_batch(batch)
