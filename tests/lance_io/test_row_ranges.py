"""Sets of row offsets behave like Python sets."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given, strategies as st

from airflow_geneva.engine.lance_io.row_ranges import Ranges, from_lists, to_lists

OFFSETS = st.sets(st.integers(0, 60), max_size=40)
PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def as_set(ranges: Ranges) -> set[int]:
    return {offset for start, end in ranges for offset in range(start, end)}


def assert_canonical(ranges: Ranges) -> None:
    """Sorted, not empty, and never touching: otherwise equal sets would compare as different."""
    pairs = list(ranges)
    assert all(start < end for start, end in pairs)
    assert all(before[1] < after[0] for before, after in pairwise(pairs))


@given(OFFSETS, OFFSETS)
def test_union_intersection_and_difference_are_those_of_sets(left: set[int], right: set[int]) -> None:
    a, b = Ranges.from_offsets(sorted(left)), Ranges.from_offsets(sorted(right))
    for made, wanted in ((a | b, left | right), (a & b, left & right), (a - b, left - right)):
        assert as_set(made) == wanted
        assert_canonical(made)
        assert made == Ranges.from_offsets(sorted(wanted))
        assert hash(made) == hash(Ranges.from_offsets(sorted(wanted)))


@given(st.lists(st.none() | OFFSETS, max_size=4))
def test_lists_of_bounds_hold_sets_and_none(members: list[set[int] | None]) -> None:
    sets = [None if one is None else Ranges.from_offsets(sorted(one)) for one in members]
    for kind in (pa.list_(pa.int64()), pa.list_(pa.uint32())):
        stored = to_lists(sets, kind)
        assert stored.type == kind
        assert stored.to_pylist() == [None if s is None else [at for pair in s for at in pair] for s in sets]
        kept = stored.filter(stored.is_valid())
        assert list(from_lists(kept)) == [s for s in sets if s is not None]


@given(PAIRS)
def test_pairs_in_any_order_overlapping_or_reversed_make_their_union(pairs: list[tuple[int, int]]) -> None:
    made = Ranges.from_pairs(pairs)
    assert as_set(made) == {offset for start, end in pairs for offset in range(start, end)}
    assert_canonical(made)
    assert Ranges.from_pairs(made.pairs()) == made


@given(st.lists(st.integers(0, 60), max_size=40))
def test_offsets_in_any_order_and_repeated_make_a_set(offsets: list[int]) -> None:
    made = Ranges.from_offsets(offsets)
    assert as_set(made) == set(offsets)
    assert made.offsets().tolist() == sorted(set(offsets))
    assert len(made) == len(set(offsets))
    assert bool(made) == bool(offsets)


@given(OFFSETS, st.lists(st.integers(0, 70), max_size=20), st.integers(0, 60), st.integers(0, 60))
def test_mask_within_and_contains_ask_what_sets_would_answer(
    members: set[int], asked: list[int], start: int, end: int
) -> None:
    made = Ranges.from_offsets(sorted(members))
    assert made.mask(np.array(asked, np.int64)).tolist() == [offset in members for offset in asked]
    assert as_set(made.within(start, end)) == {offset for offset in members if start <= offset < end}
    assert made.contains(Ranges.from_offsets(asked)) == (set(asked) <= members)


def test_an_empty_range_is_no_range() -> None:
    assert Ranges.of(5, 5) == Ranges.of(7, 3) == Ranges.empty() == Ranges.from_offsets([]) == Ranges.from_pairs([])
    assert not Ranges.empty()


def test_touching_ranges_become_one() -> None:
    assert (Ranges.of(0, 5) | Ranges.of(5, 9)).pairs() == [[0, 9]]
    assert not Ranges.of(0, 5) & Ranges.of(5, 9)


@given(
    st.integers(0, 1 << 40),
    st.lists(st.tuples(st.integers(1, 3), st.one_of(st.integers(1, 4), st.integers(1, 2000))), min_size=1, max_size=20),
    st.integers(1, 200),
)
def test_a_set_goes_through_json_and_pickle_however_scattered(
    first: int, pieces: list[tuple[int, int]], times: int
) -> None:
    bounds = np.cumsum(np.array([first, *(step for _ in range(times) for piece in pieces for step in piece)]))
    rows = Ranges(bounds[0:-1:2].copy(), bounds[1::2].copy())
    assert Ranges.from_json(json.loads(json.dumps(rows.to_json()))) == rows
    assert pickle.loads(pickle.dumps(rows)) == rows


def test_every_other_row_takes_few_bytes() -> None:
    rows = Ranges.from_offsets(np.arange(7, 1_000_007, 2))
    assert len(pickle.dumps(rows)) < 2_000
    scattered = Ranges.from_offsets(np.random.default_rng(1).choice(1_000_000, 500_000, replace=False))
    assert len(pickle.dumps(scattered)) < 140_000


@given(st.integers(1, 4), st.integers(0, 1 << 40), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_sets_of_very_many_ranges_are_combined_like_sets(put_slots: int, first: int, left: int, right: int) -> None:
    one, other = (
        Ranges.from_offsets(first + np.flatnonzero(np.random.default_rng(seed).random(4_000) < 1 / put_slots))
        for seed in (left, right)
    )
    for mine, theirs in ((one | other, as_set(one) | as_set(other)), (one & other, as_set(one) & as_set(other))):
        assert_canonical(mine)
        assert as_set(mine) == theirs
    assert as_set(one - other) == as_set(one) - as_set(other)
