"""What a run costs on an object store: its requests, and how many of them had to wait for another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import connect, udf
from tests.support.latency import SlowProxy
from tests.support.object_store import Bucket, numbers

pytestmark = pytest.mark.slow

FRAGMENTS = 8


@udf(data_type=pa.int64())
def doubled(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 2)


@pytest.fixture
def proxy(endpoint: str) -> Iterator[SlowProxy]:
    with SlowProxy(endpoint, 0.02).running() as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "first", "nothing", "one_row"),
    [("column", (76, 38), (6, 5), (46, 28)), ("view", (86, 52), (9, 7), (56, 39))],
)
def test_a_run_makes_no_more_requests_than_it_did(
    bucket: Bucket,
    proxy: SlowProxy,
    options: dict[str, str],
    kind: str,
    first: tuple[int, int],
    nothing: tuple[int, int],
    one_row: tuple[int, int],
) -> None:
    """Most requests, and most that wait for another; they fall as runs get better, and never rise."""
    db = connect(f"s3://{bucket.name}/db", storage_options=options)
    table = db.create_table("docs", numbers(*range(FRAGMENTS * 10)), max_rows_per_file=10)
    if kind == "column":
        table.add_columns({"y": doubled})
    else:
        table.query().select({"id": "id", "y": (doubled, ["x"])}).create_materialized_view(db, "v")

    def measured(most: tuple[int, int]) -> Any:
        through = connect(f"s3://{bucket.name}/db", storage_options={**options, "aws_endpoint": proxy.url})
        with proxy.counting() as requests:
            if kind == "column":
                opened = through.open_table("docs")
                result = opened.backfill("y", runner="inline")
            else:
                result = through.open_view("v").refresh(runner="inline")
        told = "\n".join(map(str, requests))
        assert len(requests) <= most[0], f"{len(requests)} requests:\n{told}"
        assert requests.depth <= most[1], f"depth {requests.depth}:\n{told}"
        return result

    assert measured(first).rows_computed == FRAGMENTS * 10
    assert measured(nothing).rows_computed == 0
    table.add(numbers(1_000))
    assert measured(one_row).rows_computed == 1
