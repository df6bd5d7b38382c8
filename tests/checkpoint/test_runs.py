"""Rows in run-length form, and the shorter form in which they are stored."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from airflow_geneva.engine.checkpoint.records import decode_runs, encode_runs, pack_runs, unpack_runs


@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 700]), st.sampled_from([0, 0, 0, 0, -40, 5])), max_size=60),
    st.integers(0, 1 << 40),
)
def test_runs_are_read_back_as_they_were(steps: list[tuple[int, int]], shift: int) -> None:
    offsets = np.cumsum(np.array([step for step, _ in steps], np.int64))
    ids = (offsets + (1 << 41) + shift + np.cumsum(np.array([move for _, move in steps], np.int64))).astype(np.uint64)
    runs = encode_runs(offsets, ids)
    assert np.array_equal(unpack_runs(*pack_runs(runs)), runs)
    again = decode_runs(unpack_runs(*pack_runs(runs)))
    assert np.array_equal(again[0], offsets)
    assert np.array_equal(again[1], ids)


def test_every_other_row_is_stored_as_bits() -> None:
    offsets = np.arange(0, 1_000_000, 2)
    stretches, bits = pack_runs(encode_runs(offsets, offsets.astype(np.uint64)))
    assert (len(stretches), len(bits)) == (1, 125_000)


def test_a_few_runs_are_stored_as_they_are() -> None:
    offsets = np.array([0, 1, 2, 500_000, 900_000])
    runs = encode_runs(offsets, offsets.astype(np.uint64))
    assert pack_runs(runs) == (runs, b"")
    assert len(runs) == 3
