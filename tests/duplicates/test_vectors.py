"""Cosines and hashes of vectors, compared with plain numbers; neither depends on what is computed beside them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.duplicates.signatures import Signature
from airflow_geneva.engine.duplicates.vectors import (
    CHOICES,
    are_similar,
    bits_set,
    corners_for,
    most_sides,
    unit_vectors,
)
from airflow_geneva.engine.views.deduplication import Deduplication

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "remove-near-duplicates.md"
Numbers = npt.NDArray[np.float64]


def column(vectors: Any, kind: pa.DataType = pa.float64()) -> pa.Array:  # noqa: B008
    dtype = kind.to_pandas_dtype()
    return pa.FixedSizeListArray.from_arrays(pa.array(np.asarray(vectors, dtype).ravel()), len(vectors[0]))


def pairs(cosine: float, size: int, count: int, dice: np.random.Generator) -> tuple[Numbers, Numbers]:
    one, other = dice.standard_normal((2, count, size))
    one /= np.linalg.norm(one, axis=1, keepdims=True)
    other -= (one * other).sum(axis=1, keepdims=True) * one
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    return one, cosine * one + math.sqrt(1 - cosine**2) * other


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("size", [1, 3, 64, 768])
def test_the_cosine_is_that_of_plain_numbers(kind: pa.DataType, size: int) -> None:
    dice = np.random.default_rng(size)
    left = dice.standard_normal((200, size))
    right = left + dice.uniform(0, 1, (200, 1)) * dice.standard_normal((200, size))
    one, other = column(left, kind), column(right * 1_000, kind)
    found = are_similar(unit_vectors(one)[0], unit_vectors(other)[0], 0.9)
    for at, (a, b) in enumerate(zip(one.to_pylist(), other.to_pylist(), strict=True)):
        cosine = math.fsum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
        assert abs(cosine - 0.9) < 2e-6 or found[at] == (cosine > 0.9)


def test_neither_cosine_nor_hash_depends_on_what_is_computed_beside_them() -> None:
    """Of pairs whose cosine is the threshold, sums that are rounded in another order would tell some apart."""
    dice = np.random.default_rng(5)
    left, right = (unit_vectors(column(side))[0] for side in pairs(0.95 - 1e-6, 300, 400, dice))
    together = are_similar(left, right, 0.95)
    assert 0 < together.sum() < len(together)
    for start, size in ((0, 1), (3, 7), (100, 250)):
        part = slice(start, start + size)
        assert np.array_equal(are_similar(left[part], right[part], 0.95), together[part])
        assert np.array_equal(are_similar(np.asfortranarray(left[part]), right[part], 0.95), together[part])
    corners = corners_for(0.95)
    hashes, words = corners.hashes(left)
    for start, size in ((0, 1), (17, 5), (100, 300)):
        some, of_sketch = corners.hashes(left[start : start + size])
        assert np.array_equal(some, hashes[:, start : start + size])
        assert np.array_equal(of_sketch, words[:, start : start + size])


HASHES = [[5417947437555123138, 8780068225068562015], [5386102968818269085, 4168997038140632100]]
WORDS = [-4987150516167820662, 4555477484070411457]


def test_the_hashes_are_the_same_on_every_machine() -> None:
    """They are stored beside views: if they change, `_VERSION` has to change."""
    hashes, words = corners_for(0.99).hashes(unit_vectors(column([[1.0, -2.0, 3.0], [0.5, 0.25, 0.0]]))[0])
    assert hashes[[0, 16]].tolist() == HASHES
    assert words[0].tolist() == WORDS


def test_vectors_without_a_direction_are_not_compared() -> None:
    values = [1.0, 2.0, 0.0, -0.0, math.nan, 1.0, math.inf, 1.0, None, 1.0, 5e-324, 0.0, 1e308, 1e308]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), 2, mask=pa.array([False] * 6 + [True]))
    _, directed = unit_vectors(vectors)
    assert directed.tolist() == [True, False, False, False, False, True, False]
    function = Signature.of(Deduplication.of("v", "cosine", 0.9, "first")).function
    whole = pa.RecordBatch.from_arrays([vectors], names=["v"])
    hashed = function(whole)
    assert hashed.field("high").is_valid().to_pylist() == directed.tolist()
    assert function(whole.slice(3, 3)).equals(hashed.slice(3, 3))
    assert len(function(whole.slice(0, 0))) == 0


def test_vectors_of_one_direction_are_equal_for_their_hash_if_their_numbers_are_multiples_by_two() -> None:
    function = Signature.of(Deduplication.of("v", "cosine", 1, "first")).function
    vectors = [[0.1, 0.7], [0.2, 1.4], [0.1 * 2.0**-1040, 0.7 * 2.0**-1040], [-0.1, -0.7], [0.7, 0.1]]
    high = function(pa.RecordBatch.from_arrays([column(vectors)], names=["v"])).field("high").to_pylist()
    assert high[0] == high[1]
    assert len({high[0], high[3], high[4]}) == 3
    units, _ = unit_vectors(column([[0.1, 0.7], [0.3, 2.1]]))
    assert are_similar(units[:1], units[1:], 1.0).tolist() == [True]


@given(st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 4), max_size=8))
def test_set_bits_are_counted(rows: list[tuple[int, ...]]) -> None:
    words = np.array(rows, np.uint64).reshape(-1, 4)
    assert bits_set(words).tolist() == [sum(word.bit_count() for word in row) for row in rows]


SIMILARITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def test_the_curves_of_the_page_are_measured() -> None:
    rows = re.findall(r"^\| cosine (0\.\d+) \| ([\d |]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [float(row) for row, _ in rows] == list(SIMILARITIES)
    dice, count = np.random.default_rng(1), 2_000
    for row, numbers in rows:
        left, right = (unit_vectors(column(side))[0] for side in pairs(float(row), 256, count, dice))
        for threshold, number in zip(CHOICES, numbers.split(" | "), strict=True):
            said = int(number) / 100
            # Four standard deviations.
            assert abs(found_of(left, right, threshold) - said) < 0.01 + 4 * math.sqrt(
                max(said * (1 - said), 0.01) / count
            )


def found_of(left: Numbers, right: Numbers, threshold: float) -> float:
    """Return the share of pairs that share a band, and whose sketches do not rule them out."""
    (one, its), (other, of_other) = (corners_for(threshold).hashes(side) for side in (left, right))
    near = bits_set(np.ascontiguousarray((its ^ of_other).T).view(np.uint64)) <= most_sides(threshold)
    return float(((one == other).any(axis=0) & near).mean())


@pytest.mark.parametrize("size", [64, 384])
def test_vectors_of_one_direction_are_found_though_their_numbers_were_rounded(size: int) -> None:
    dice = np.random.default_rng(size)
    left = dice.standard_normal((3_000, size)).astype(np.float16)
    one, other = (unit_vectors(column(side, pa.float16()))[0] for side in (left, 3 * left))
    similar = are_similar(one, other, 1.0)
    assert similar.sum() > 2_500
    assert found_of(one[similar], other[similar], 1.0) > 0.999
