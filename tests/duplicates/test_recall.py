"""The numbers of the page on duplicates are what texts of the Bible give."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.duplicates.minhash import bands_for
from airflow_geneva.engine.duplicates.texts import ShingleSets, normalized
from dags_examples.demo.verses import read_books

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "remove-near-duplicates.md"
PAIRS = 20_000


def test_the_curves_of_the_page_are_measured() -> None:
    dice = np.random.default_rng(1)
    verses = [text for book in read_books() for text in book["text"].to_pylist() if len(text) > 60]
    left = [verses[at] for at in dice.integers(0, len(verses), PAIRS)]

    def changed(text: str) -> str:
        letters = list(text)
        for _ in range(dice.integers(1, 14)):
            letters[dice.integers(len(letters))] = "abcdefghij"[dice.integers(10)]
        return "".join(letters)

    one, other = (normalized(pa.array(texts)) for texts in (left, map(changed, left)))
    sets = ShingleSets.of(pa.concat_arrays([one, other]))
    similarity = sets.similarity(np.arange(PAIRS), np.arange(PAIRS) + PAIRS)
    rows = re.findall(r"^\| (0\.\d+) \| ([\d |]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [float(row) for row, _ in rows] == [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    for at, threshold in enumerate((0.5, 0.7, 0.8, 0.9, 0.95)):
        bands = bands_for(threshold)
        shared = (bands.hashes(one) == bands.hashes(other)).any(axis=0)
        for row, numbers in rows:
            near = np.abs(similarity - float(row)) < 0.015
            said = int(numbers.split(" | ")[at]) / 100
            # Four standard deviations, of a tenth of the pairs of the page.
            assert abs(shared[near].mean() - said) < 0.01 + 4 * np.sqrt(max(said * (1 - said), 0.01) / near.sum())
