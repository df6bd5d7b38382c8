"""Shingles and their similarity, compared with sets of plain Python strings."""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.duplicates.minhash import CHOICES, Bands, bands_for
from airflow_geneva.engine.duplicates.texts import (
    CHARACTERS,
    ShingleSets,
    SimilarSets,
    normalized,
    pieces,
    shingle_hashes,
)
from airflow_geneva.engine.lance_io.row_ranges import Offsets
from tests.support.duplicates import shingles

ALPHABET = "abAB \t\n\x0b\u00a0\u2003éßЖ語😀"
TEXTS = st.lists(st.text(alphabet=ALPHABET, max_size=24), max_size=12)


def plain(text: str) -> str:
    """Normalize a text as `normalized` does."""
    spaced = "".join(" " if c in "\t\n\x0b\x0c\r" or unicodedata.category(c)[0] == "Z" else c for c in text)
    return " ".join(filter(None, spaced.lower().split(" ")))


@given(TEXTS)
def test_texts_are_normalized_as_documented(texts: list[str]) -> None:
    assert normalized(pa.array(texts, pa.string())).to_pylist() == [plain(text) for text in texts]


@given(TEXTS)
def test_each_text_has_the_hashes_of_its_shingles(texts: list[str]) -> None:
    """Texts that are cut out of a larger array have the same ones."""
    found = normalized(pa.array(["before", *texts], pa.string()))[1:]
    hashes, offsets = shingle_hashes(found)
    by_shingle: dict[str, int] = {}
    for at, text in enumerate(found.to_pylist()):
        own = hashes[offsets[at] : offsets[at + 1]].tolist()
        runs = [text[place : place + CHARACTERS] for place in range(max(len(text) - CHARACTERS + 1, 1))]
        assert len(own) == len(runs)
        for run, value in zip(runs, own, strict=True):
            assert by_shingle.setdefault(run, value) == value
    assert len(set(by_shingle.values())) == len(by_shingle)


@given(TEXTS.filter(len))
def test_similarity_is_that_of_the_sets(texts: list[str]) -> None:
    found = normalized(pa.array(texts, pa.string()))
    sets = [shingles(text) for text in found.to_pylist()]
    pairs = [(a, b) for a in range(len(sets)) for b in range(len(sets))]
    left, right = (np.array(side, np.int64) for side in zip(*pairs, strict=True))
    wanted = [len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a, b in pairs]
    assert ShingleSets.of(found).similarity(left, right).tolist() == wanted
    every = np.arange(len(sets))
    for least in (0.3, 0.5, 0.8, 1.0):
        search = SimilarSets.of(ShingleSets.of(found), least)
        near = {(int(a), int(b)) for a, b in zip(*similar_pairs(search, every), strict=True)}
        assert near == {pair for pair, similarity in zip(pairs, wanted, strict=True) if similarity >= least}
        assert len(similar_pairs(search, every[:0])[0]) == 0


def similar_pairs(search: SimilarSets, some: Offsets) -> tuple[Offsets, Offsets]:
    left, right = np.unique(np.stack(search.possible(some)), axis=1)
    similar = search.similar(left, right)
    return left[similar], right[similar]


@given(st.lists(st.text(alphabet="ab", max_size=24), min_size=1, max_size=12), st.integers(30, 100))
def test_similar_texts_are_found_by_their_rare_shingles(texts: list[str], percent: int) -> None:
    sets, every = ShingleSets.of(normalized(pa.array(texts, pa.string()))), np.arange(len(texts))
    search = SimilarSets.of(sets, percent / 100)
    left, right = np.divmod(np.arange(len(texts) ** 2), len(texts))
    wanted = sets.similarity(left, right) >= percent / 100
    found = similar_pairs(search, every)
    assert (found[0].tolist(), found[1].tolist()) == (left[wanted].tolist(), right[wanted].tolist())


def test_texts_of_one_template_are_not_compared_with_each_other() -> None:
    template = "the {} of this long sentence which all of these texts share with every other one"
    texts = normalized(pa.array([template.format(f"{at * 7_919 % 10_007:05} {at:04}" * 2) for at in range(300)]))
    every = np.arange(300)
    left, right = SimilarSets.of(ShingleSets.of(texts), 0.8).possible(every)
    assert set(every.tolist()) <= set(left[left == right].tolist())
    assert len(set(zip(left.tolist(), right.tolist(), strict=True))) < 300 * 30


def test_no_pairs_have_no_similarity() -> None:
    none = np.empty(0, np.int64)
    assert len(ShingleSets.of(pa.array([], pa.large_string())).similarity(none, none)) == 0


def test_texts_are_cut_where_they_fill_a_cache() -> None:
    texts = pa.array(["x" * 100_000] * 7 + ["y" * 1_000_000, "", "z"])
    parts = [len(part) for part in pieces(texts)]
    assert parts == [2, 2, 2, 1, 1, 2]
    assert pa.chunked_array(list(pieces(texts))).to_pylist() == texts.to_pylist()


def test_the_hashes_of_bands_do_not_depend_on_how_texts_are_cut() -> None:
    texts = normalized(pa.array(["some text " * 40_000, "another one", "", "a", "some text"]))
    together = Bands(2, 3).hashes(texts)
    assert together.shape == (3, 5)
    alone = [Bands(2, 3).hashes(texts[at : at + 1]) for at in range(len(texts))]
    assert np.array_equal(together, np.concatenate(alone, axis=1))
    assert len(set(together.ravel().tolist())) == together.size


@pytest.mark.parametrize(("threshold", "bands"), [*CHOICES.items(), (0.85, CHOICES[0.8]), (1.0, CHOICES[0.95])])
def test_similar_texts_share_a_band_as_often_as_the_curve_says(threshold: float, bands: Bands) -> None:
    """Random sets of shingles: texts of characters that occur once, of which a part is the same."""
    assert bands_for(threshold) == bands
    dice = np.random.default_rng(7)
    pairs, length = 600, 200
    for wanted in (threshold, threshold * 0.6):
        shared = round(2 * length * wanted / (1 + wanted))
        base = dice.integers(0x4E00, 0x9FFF, (pairs, length))
        others = base.copy()
        others[:, shared:] = dice.integers(0x4E00, 0x9FFF, (pairs, length - shared))
        left, right = (pa.array(["".join(map(chr, row)) for row in rows], pa.large_string()) for rows in (base, others))
        both = ShingleSets.of(pa.concat_arrays([left, right]))
        similarity = both.similarity(np.arange(pairs), np.arange(pairs) + pairs)
        share = (bands.hashes(left) == bands.hashes(right)).any(axis=0)
        expected = np.mean([bands.recall(one) for one in similarity])
        assert abs(share.mean() - expected) < 4 * 0.5 / np.sqrt(pairs)
    assert bands.recall(threshold) >= 0.99
