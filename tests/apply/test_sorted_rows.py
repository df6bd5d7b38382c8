"""Rows that do not fit into memory are sorted through a file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies as st

from airflow_geneva.engine.apply import sorted_rows
from airflow_geneva.engine.apply.sorted_rows import Order, sort_batches

VALUES = {
    "number": pa.array([3, None, 1, 3, -7], pa.int64()),
    "text": pa.array(["b", "", None, "a", "b"], pa.large_string()),
    "word": pa.array(["x", "y", None, "x", "z"]).dictionary_encode(),
    "real": pa.array([1.5, float("nan"), None, -0.0, 0.0]),
}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_come_in_order_whatever_fits_into_memory(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 40), max_size=12))
    total = sum(lengths)
    names = data.draw(st.lists(st.sampled_from(list(VALUES)), max_size=3, unique=True))
    ways = st.sampled_from(["ascending", "descending"])
    by: Order = [*((name, data.draw(ways)) for name in names), ("id", "ascending")]
    chosen = data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    ids = data.draw(st.permutations(range(total)))
    columns: dict[str, Any] = {name: values.take(pa.array(chosen, pa.int64())) for name, values in VALUES.items()}
    rows = pa.record_batch({**columns, "id": pa.array(ids, pa.int64())})
    ends = np.cumsum([0, *lengths])
    batches = [rows[start:end] for start, end in pairwise(ends)]
    made = list(sort_batches(batches, by, data.draw(st.sampled_from([1, 200, 4_000, 1 << 20]))))
    plain = pa.table({**columns, "id": rows["id"], "word": columns["word"].dictionary_decode()})
    expected = plain.take(pc.sort_indices(plain, sort_keys=list(by)))
    assert [str(row) for batch in made for row in batch.to_pylist()] == [
        str({name: row[name] for name in rows.schema.names}) for row in expected.to_pylist()
    ]
    assert all(batch.schema == rows.schema for batch in made)


@pytest.mark.parametrize("way", ["as they come", "the other way round", "mixed"])
def test_few_rows_are_held_and_each_is_sorted_a_few_times(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, limit, wide = 8_000, 1 << 15, 96
    ids = np.arange(count)
    values = {"as they come": ids, "the other way round": -ids, "mixed": np.random.default_rng(3).permutation(count)}
    sorted_rows_of = list[int]()
    order_of = sorted_rows.order_of

    def counting(rows: pa.RecordBatch, by: Order) -> Any:
        sorted_rows_of.append(rows.num_rows)
        return order_of(rows, by)

    monkeypatch.setattr(sorted_rows, "order_of", counting)

    def batches() -> Iterator[pa.RecordBatch]:
        for at in range(0, count, 50):
            here = slice(at, at + 50)
            yield pa.record_batch({"x": values[way][here], "id": ids[here], "text": ["t" * wide] * 50})

    at, most = 0, 0
    first, step = int(values[way].min()), 1
    for batch in sort_batches(batches(), [("x", "ascending"), ("id", "ascending")], limit):
        assert batch["x"].to_numpy().tolist() == list(range(first + at, first + at + batch.num_rows, step))
        at, most = at + batch.num_rows, max(most, batch.nbytes)
    assert at == count
    # Of each of some hundred runs a block of one row is held, too.
    assert most < 8 * limit
    assert sum(sorted_rows_of) < 5 * count


def test_rows_that_fit_are_written_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    (rows,) = sort_batches([pa.record_batch({"x": [2, 1]})], [("x", "descending")], 1 << 20)
    assert rows["x"].to_pylist() == [2, 1]
    assert list(sort_batches([], [("x", "descending")], 1 << 20)) == []
