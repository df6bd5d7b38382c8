"""What a task does when it is told to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from airflow.providers.common.compat.sdk import AirflowTaskTimeout

from airflow_geneva import udf
from airflow_geneva.operators import ApplyOperator, CommitOperator, FinishOperator, PlanBackfillOperator
from tests.support.tables import MakeTable

pytestmark = pytest.mark.airflow

OPERATORS = [
    PlanBackfillOperator(task_id="plan", table="docs", column="n"),
    ApplyOperator(task_id="apply", shard={}),
    CommitOperator(task_id="commit", shard={}),
    FinishOperator(task_id="finish", plan_task_id="plan", table="docs"),
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.task_id)
@pytest.mark.shows("Stop, kill, restart", "stop any task")
def test_it_ends_at_the_statement_it_is_at_and_may_be_retried(operator: PlanBackfillOperator) -> None:
    """Airflow retries a task that exits, and lets one that carries on do so for seconds."""
    with pytest.raises(SystemExit, match="continues from here"):
        operator.on_kill()


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.task_id)
@pytest.mark.shows("Stop, kill, restart", "set an `execution_timeout`")
def test_a_timeout_stays_a_timeout(operator: PlanBackfillOperator) -> None:
    def run_too_long() -> None:
        try:
            raise AirflowTaskTimeout("too long")
        except AirflowTaskTimeout:
            operator.on_kill()
            raise

    with pytest.raises(AirflowTaskTimeout):
        run_too_long()


@pytest.fixture
def stops_at_signal() -> Iterator[None]:
    """Airflow's handler of SIGTERM in the process of a task."""

    def on_term(number: int, frame: object) -> None:
        OPERATORS[0].on_kill()

    before = signal.signal(signal.SIGTERM, on_term)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("form", "policy"), [("scalar", "fail"), ("array", "fail"), ("scalar", "skip")])
@pytest.mark.shows("Stop, kill, restart", "stop any task")
def test_a_function_that_is_stopped_has_not_failed_and_earlier_rows_are_kept(
    make_table: MakeTable, stops_at_signal: None, tmp_path: Path, form: str, policy: str
) -> None:
    task, once = os.getpid(), tmp_path / "once"
    once.touch()

    def scalar(x: int) -> int:
        if x == 30 and once.exists():
            once.unlink()
            os.kill(task, signal.SIGTERM)
            time.sleep(60 * (policy == "skip"))  # its own process is ended
        return x

    def array(x: pa.Array) -> pa.Array:
        return pa.array([scalar(one) for one in x.to_pylist()], pa.int64())

    function = udf(data_type=pa.int64(), version="1", on_error=policy)({"scalar": scalar, "array": array}[form])
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": function})
    with pytest.raises(SystemExit, match="continues from here"):
        table.backfill("y", udf=function, runner="inline", batch_size=5)
    assert table.get_errors() == []
    again = table.backfill("y", udf=function, runner="inline", batch_size=5)
    assert (again.state, again.rows_reused, again.rows_computed) == ("DONE", 30, 70)
