"""Compute all columns and views of a small database in one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import AssetAlias, Context

from airflow_geneva.assets import PRODUCER, lance_asset
from airflow_geneva.engine import api
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._lance_task import (
    LanceOperator,
    check_word,
    failing_at_once,
    push_error_to_xcom,
    required_text,
)
from airflow_geneva.operators._metrics import send_metrics_of_job

if TYPE_CHECKING:
    from airflow_geneva.engine.results import BackfillResult


class RefreshDatabaseOperator(LanceOperator):
    """Compute all columns and views of a database that are due, in order of their dependencies, in this process.

    It runs `Database.plan().run()`, and logs the plan first. It is for small databases: a `BackfillTaskGroup` or a
    `RefreshTaskGroup` for each column and view, started by assets, runs them in parallel, on Spark, and shows each by
    itself. What is blocked, such as a column whose code has changed, is logged and left out. If a job fails, what is
    computed from it is left out, the others run, and then the task fails. After a kill, the next try goes on from the
    checkpoints.

    It sends an event of the asset of each table and view that a job has changed.

    Returns the number of computed and failed rows by column and view, and what is blocked.

    Args:
        runner: `inline` computes in this process, `spark` on a local Spark session, `auto` chooses for each job.

    Example:
        ```python
        RefreshDatabaseOperator(task_id="refresh_all", lance_conn_id="lance_default")
        ```
    """

    template_fields: Sequence[str] = (*LanceOperator.template_fields, "runner")

    def __init__(self, *, runner: str = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_word(RunnerName, "runner", runner)
        self.runner = runner
        self._alias = AssetAlias(f"{self.dag_id}/{self.task_id}")
        self.outlets = [*self.outlets, self._alias]

    def execute(self, context: Context) -> dict[str, Any]:
        database, runner = self.open_database(), required_text("runner", self.runner)
        changed: dict[str, None] = {}
        with push_error_to_xcom(context), failing_at_once(InvalidInput):
            plan = database.plan()
            self.log.info("%s", plan)

            def on_result(name: str, result: BackfillResult) -> None:
                changed[table := plan[name].table] = None
                self.log.info("%s: %s", name, result)
                send_metrics_of_job(api.JobFolder.of(database.location(table).checkpoints, result.job_id))

            results = plan.run(runner, on_result)
        if context["ti"].try_number > 1:
            # Earlier tries changed tables, too, and a task that fails sends no events.
            changed = dict.fromkeys(target.table for target in plan.targets)
        conn_id = required_text("lance_conn_id", self.lance_conn_id)
        for table in changed:
            # `column` is None, because this event announces no commits of a job.
            event: dict[str, Any] = {"producer": PRODUCER, "table": table, "column": None}
            context["outlet_events"][self._alias].add(lance_asset(table, conn_id), extra=event)
        counts = {name: {"computed": one.rows_computed, "failed": one.rows_failed} for name, one in results.items()}
        return {"jobs": counts, "blocked": {one.name: one.blocked for one in plan.targets if one.blocked}}
