"""Processes that share a limit of a service are killed: what they had paid for is not paid again."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_geneva import connect
from bench import limits

KILLS = 2


@pytest.mark.crash
def test_only_what_was_in_flight_at_a_kill_is_paid_again(tmp_path: Path) -> None:
    found = limits.measure(str(tmp_path), rows=900, processes=3, kills=KILLS, per_minute=3_000)
    assert (found["computed"], found["kills"], found["refused"]) == (900, KILLS, 0)
    # Ten rows are in a request, and each request has a checkpoint of its own.
    assert found["paid_again"] <= 10 * KILLS
    assert found["requests"] <= 90 + KILLS
    assert connect(tmp_path).table_names() == ["docs0", "docs1", "docs2"]
