"""What a task does when it is told to stop."""

from __future__ import annotations

import pytest
from airflow.providers.common.compat.sdk import AirflowTaskTimeout

from airflow_geneva.operators import ApplyOperator, CommitOperator, FinishOperator, PlanBackfillOperator

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
