"""Compare the stored values of two columns, of every kind of type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva import udf
from airflow_geneva.engine.run.column_comparison import ColumnComparison
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from tests.support.tables import MakeTable

VECTOR = pa.list_(pa.float32(), 2)


@udf(data_type=VECTOR, version="1", cost=0.5)
def circle(x: int) -> list[float]:
    return [float(np.cos(x / 30)), float(np.sin(x / 30))]


@udf(data_type=VECTOR, version="1", on_error="skip")
def same_circle(x: int) -> list[float]:
    if x == 3:
        raise ValueError(x)
    return [2 * float(np.cos(x / 30)), 2 * float(np.sin(x / 30))]


@udf(data_type=VECTOR, version="1")
def line(x: int) -> list[float]:
    return [float(x * 37 % 100), 0.0]


@udf(data_type=pa.list_(pa.float32(), 3), version="1")
def wide(x: int) -> list[float]:
    return [float(np.cos(x / 30)), float(np.sin(x / 30)), 0.0]


def compared(table: Table, *arguments: Any, **options: Any) -> ColumnComparison:
    found = table.compare(*arguments, **options)
    assert isinstance(found, ColumnComparison)
    return found


@pytest.fixture
def table(make_table: MakeTable) -> Table:
    table = make_table(100)
    table.add_columns({"a": circle, "b": same_circle, "c": line, "w": wide})
    table.backfill(["a", "b", "c", "w"], runner="inline")
    return table


def test_a_column_may_be_called_difference(make_table: MakeTable) -> None:
    table = make_table(2)
    table.add_columns({"difference": circle, "other": circle})
    table.backfill(["difference", "other"], runner="inline")
    found = compared(table, "difference", "other")
    assert found.to_arrow().column_names == ["_rowid", "difference", "other", "_difference"]
    assert found.in_both == 2
    assert "cosine similarity 1 on average" in str(found)


@pytest.mark.slow
def test_vectors(table: Table) -> None:
    table.lance.delete("id = 4")
    found = compared(table, "a", "b")
    assert (found.rows, found.rows_total) == (99, 99)
    assert (found.in_both, found.only_in_first, found.only_in_second) == (98, 1, 0)
    assert found.measure == "cosine similarity 1 on average, from 1 to 1"
    assert found.overlap is not None
    # The same directions with other lengths have the same neighbors.
    assert found.overlap.share == pytest.approx(1.0, abs=0.02)
    assert (found.overlap.queries, found.overlap.by) == (98, "by brute force among the 99 sampled rows")
    first, second = found.sides
    assert first.norms == pytest.approx((1.0, 1.0, 1.0))
    assert second.norms == pytest.approx((2.0, 2.0, 2.0))
    assert first.freshness is not None
    assert second.freshness is not None
    assert (first.freshness.failed, second.freshness.failed) == (0, 1)
    assert first.cost_per_row == 0.5
    assert second.cost_per_row is None
    assert second.seconds_per_row is not None
    text = str(found)
    assert "value in both: 98, only in 'a': 1, only in 'b': 0, in neither: 0" in text
    assert "'b': 1 of 99 rows due, 1 failed, norms 2 to 2, median 2, " in text
    assert found.to_arrow().column_names == ["_rowid", "a", "b", "difference"]


@pytest.mark.slow
def test_vectors_with_other_neighbors(table: Table) -> None:
    found = compared(table, "a", "c", neighbors=5)
    expected = brute_force(table, "a", "c", 5)
    assert found.overlap is not None
    assert found.overlap.share == pytest.approx(expected)
    assert expected < 0.5
    assert "farthest apart:\n    row " in str(found)
    assert compared(table, "a", "c", neighbors=0).overlap is None


def brute_force(table: Table, first: str, second: str, k: int) -> float:
    shares = []
    vectors = [np.array(table.to_arrow([name])[name].to_pylist(), np.float64) for name in (first, second)]
    for at in range(len(vectors[0])):
        near = [set((np.argsort(((of - of[at]) ** 2).sum(1), kind="stable")[1 : k + 1]).tolist()) for of in vectors]
        shares.append(len(near[0] & near[1]) / k)
    return float(np.mean(shares))


@pytest.mark.slow
def test_neighbors_by_indexes(table: Table) -> None:
    for name in ("a", "w"):
        table.lance.create_index(name, "IVF_FLAT", num_partitions=1)
    found = compared(table, "a", "w", sample=20)
    assert found.measure == "vectors of 2 and 3 numbers cannot be compared one by one"
    assert found.overlap is not None
    assert (found.overlap.share, found.overlap.queries, found.overlap.by) == (1.0, 20, "by their indexes")


@pytest.mark.slow
def test_queries_are_computed_by_both_functions(table: Table) -> None:
    for name in ("a", "c"):
        table.lance.create_index(name, "IVF_FLAT", num_partitions=1)
    found = compared(table, "a", "w", queries=[10, (20,)])
    assert found.overlap is not None
    assert (found.overlap.share, found.overlap.queries) == (1.0, 2)
    # By the index: the two nearest of x=10 on the circle are 10 and one beside it; by line, others.
    assert compared(table, "a", "c", neighbors=1, queries=[10]).overlap.share == 1.0  # type: ignore[union-attr]
    assert compared(table, "a", "c", neighbors=3, queries=[10]).overlap.share < 1.0  # type: ignore[union-attr]


def test_other_types(make_table: MakeTable) -> None:
    table = make_table(
        4,
        n=pa.array([1, 2, None, 4], pa.int32()),
        f=pa.array([1.5, 2.0, 3.0, None], pa.float64()),
        s=pa.array(["a", "bb", None, "d"]),
        t=pa.array(["a", "b", "c", None]),
        l=pa.array([["a"], ["b"], [], None]),
        m=pa.array([["a"], ["c"], [], None]),
    )
    numbers = compared(table, "n", "f")
    assert numbers.measure == "distance 0.25 on average, from 0 to 0.5, values of 1 of 2 rows differ"
    assert (numbers.only_in_first, numbers.only_in_second) == (1, 1)
    assert numbers.to_arrow()["difference"].to_pylist()[:2] == [0.5, 0.0]
    texts = compared(table, "s", "t")
    assert texts.measure == "values of 1 of 2 rows differ, texts of 1.333 and 1 characters on average"
    assert compared(table, "l", "m").measure == "values of 1 of 3 rows differ"
    assert compared(table, "n", "s").measure == "'n' is int32 and 's' is string, which cannot be compared"
    assert "'s': plain values" in str(texts)


@pytest.mark.slow
def test_the_sample_is_bounded_and_repeatable(table: Table) -> None:
    some, again = (compared(table, "a", "b", sample=10) for _ in range(2))
    assert some.rows == 10
    assert some.to_arrow() == again.to_arrow()
    assert "on 10 of 100 rows" in str(some)


@pytest.mark.slow
def test_after_a_promotion_costs_are_found_under_the_former_name(table: Table) -> None:
    table.lance.delete("id = 3")
    table.promote_column("a", to="b", keep_as="old", require_index=False)
    found = compared(table, "b", "old")
    assert found.sides[0].cost_per_row == 0.5
    assert found.sides[0].seconds_per_row is not None


@pytest.mark.slow
def test_bad_input_is_refused(table: Table) -> None:
    for arguments, options, why in [
        (("a", "a"), {}, "names one column twice"),
        (("a", "none"), {}, "has no columns .'none'."),
        (("none", "a"), {}, "has no columns .'none'."),
        (("a", "b"), {"sample": 0}, "sample=0 is not valid"),
        (("a", "b"), {"neighbors": -1}, "neighbors=-1 is not valid"),
        (("a", "b"), {"queries": "text"}, "queries='text' is not valid"),
        (("a", "b"), {"queries": []}, "queries=.* is not valid"),
        (("id", "x"), {"queries": [1]}, "queries are for columns of vectors"),
        (("a", line), {"queries": [1]}, "queries are for two columns of vectors"),
    ]:
        with pytest.raises(InvalidInput, match=why):
            table.compare(*arguments, **options)
