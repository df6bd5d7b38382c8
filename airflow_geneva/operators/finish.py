"""Finish a backfill or refresh: record it, swap a view, and send the asset event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowSkipException
from airflow.sdk import Asset, AssetAlias, Context

from airflow_geneva.assets import PRODUCER, announced_version, lance_asset
from airflow_geneva.engine import api
from airflow_geneva.engine.choices import OnPartial, undecided
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.results import PARTIAL, BackfillResult, ShardResult
from airflow_geneva.errors import InvalidInput
from airflow_geneva.links.job import JobLink
from airflow_geneva.operators._lance_task import (
    Configuration,
    LanceOperator,
    check_word,
    failing_at_once,
    is_template,
    load_job,
    required_text,
)
from airflow_geneva.operators._metrics import send_metrics_of_job
from airflow_geneva.operators.plan import REJECTED, SUMMARY

_KEPT_OF_COLUMN = "What the other shards committed is recorded, and announced by the next run that finishes."
_KEPT_OF_VIEW = "The view is unchanged, and computed rows are kept."
_LEFT_OF_COLUMN = "Left for the next run: {}{}"
_LEFT_OF_VIEW = "The view is unchanged, with {} due; the next run reuses what this one computed{}"


class FinishOperator(LanceOperator):
    """Record how a backfill or refresh ended, and send one asset event if something changed.

    It runs even if earlier tasks failed. It reads the current plan of the plan task, the results of the plan's shards,
    and the table's commits. If the plan or a shard is missing, it records the available results and then fails. If
    nothing changed and no earlier commit is unannounced, it succeeds without an event.

    It swaps a view in one commit when all shards are verified. If another refresh replaced the view's rows meanwhile,
    it logs a warning and leaves the view to the next run.

    Args:
        plan_task_id: id of the plan task, including its groups.
        table: the table's or view's name; an outlet of the task unless it is a template.
        approve_task_id: id of the task that asks for an approval; after a rejection this task is skipped.
        on_partial: what this task does if rows are left for the next run; see `OnPartial`.
            By default `[geneva] on_partial`, which is `warn`.
    """

    template_fields: Sequence[str] = (*LanceOperator.template_fields, "table", "on_partial")
    operator_extra_links = (JobLink(),)

    def __init__(
        self,
        *,
        plan_task_id: str,
        table: str,
        approve_task_id: str | None = None,
        on_partial: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_word(OnPartial, "on_partial", on_partial)
        # One at a time, so that no two runs announce the same commits.
        super().__init__(**{"trigger_rule": "all_done", "max_active_tis_per_dag": 1, **kwargs})
        self.plan_task_id = plan_task_id
        self.approve_task_id = approve_task_id
        self.table = table
        self.on_partial = on_partial
        self._finished: tuple[api.PlannedJob, BackfillResult] | None = None
        # The asset of a template is known only at run time; an alias can stand for any asset.
        templated = is_template(table) or is_template(self.lance_conn_id)
        self._alias = AssetAlias(f"{self.dag_id}/{self.task_id}") if templated else None
        self.outlets = [*self.outlets, self._alias or lance_asset(table, self.lance_conn_id)]

    def execute(self, context: Context) -> dict[str, Any]:
        summary, plan_failed = self._summary(context)
        configured = Configuration.read()
        with failing_at_once(InvalidInput):
            on_partial = check_word(OnPartial, "on_partial", self.on_partial) or configured.on_partial
            job = load_job(self.open_database(), summary)
        job.choice = api.RunnerChoice(summary.get("runner", "spark"), summary.get("runner_reason", ""))
        if rejected := self._rejected(context):
            _record_rejection(job, rejected)
            raise AirflowSkipException(f"Not approved, by {rejected}: nothing was computed.")
        indexes = range(len(job.saved.shards))
        with failing_at_once(InvalidInput):
            committed = job.read_for_finish()
        there = [shard for shard in committed if shard is not None]
        with configured.retrying_commits(), failing_at_once(InvalidInput):
            result = job.finish(there, _seconds(job, summary, there))
        self._finished = (job, result)
        send_metrics_of_job(job.folder)
        of_view = job.spec.of_view
        self.log.info("%s: %s", job.spec.target, result)
        missing = [index for index in indexes if committed[index] is None]
        if missing:
            raise AirflowFailException(
                f"{job.missing_error(missing)} {_KEPT_OF_VIEW if of_view else _KEPT_OF_COLUMN} Clear "
                f"{'the failed shards' if job.choice.runner == 'spark' else 'the plan task'} and what is downstream; "
                "after a change of the function, the plan task."
            )
        if why := job.why_failed(there):
            raise AirflowFailException(why)
        if plan_failed:
            raise AirflowFailException(
                f"Task {self.plan_task_id!r} failed, so rows may be due that no plan has. Clear it with its downstream "
                "tasks."
            )
        if result.state == PARTIAL:
            message = _LEFT_OF_VIEW if of_view else _LEFT_OF_COLUMN
            left = message.format(counted(result.rows_left, "row"), "".join(f"; {note}" for note in result.notes))
            match on_partial:
                case OnPartial.WARN:
                    self.log.warning("%s", left)
                case OnPartial.FAIL:
                    # Before the event: Airflow drops the events of a task that fails, and the next finish sends them.
                    then = "" if of_view else " What this run committed is visible, and the next finish announces it."
                    raise AirflowFailException(
                        f'The job is PARTIAL, and on_partial="fail" fails this task. {left}.{then} Clear '
                        f"{self.plan_task_id!r} with its downstream tasks to compute what is left."
                    )
                case _:
                    undecided(on_partial)
        event = self._announce(job, result, context)
        checked = [asdict(one.without_values()) for one in result.checked]
        lists = {"commits": list(result.commits), "notes": list(result.notes), "checked": checked}
        return {**result.to_json(), **lists, "event": event}

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Return lineage for OpenLineage, if its provider is installed."""
        from airflow_geneva.operators._openlineage import lineage_of

        return None if self._finished is None else lineage_of(*self._finished)

    def _summary(self, context: Context) -> tuple[Mapping[str, Any], bool]:
        """Return the summary of the plan task's last plan, and whether the task failed; an XCom outlives a clear.

        Raises:
            AirflowSkipException: the plan task was skipped.
            AirflowFailException: there is no plan.
        """
        state = _state_of(self.plan_task_id, context)
        if state == "skipped":
            raise AirflowSkipException(f"Task {self.plan_task_id!r} was skipped: there is nothing to finish.")
        summary = context["ti"].xcom_pull(task_ids=self.plan_task_id, key=SUMMARY)
        if self.has_dag() and not self.dag.has_task(self.plan_task_id):  # type: ignore[no-untyped-call]
            raise AirflowFailException(
                f"There is no task {self.plan_task_id!r} in the DAG. Give plan_task_id= the task_id of its plan task, "
                "with the group's id if it is in a group: 'backfill.plan'."
            )
        if not isinstance(summary, Mapping) or state == "upstream_failed":
            raise AirflowFailException(
                f"There is no plan: task {self.plan_task_id!r} is {state or 'not there'}. "
                "Clear it with its downstream tasks."
            )
        return summary, state == "failed"

    def _rejected(self, context: Context) -> str | None:
        """Return the user who rejected the plan, or None."""
        if self.approve_task_id is None or _state_of(self.approve_task_id, context) in ("failed", "upstream_failed"):
            return None
        found = context["ti"].xcom_pull(task_ids=self.approve_task_id, key=REJECTED)
        return None if found is None else str(found)

    def _announce(self, job: api.PlannedJob, result: BackfillResult, context: Context) -> dict[str, Any] | None:
        """Send one event for all unannounced commits, of this job and earlier jobs."""
        spec = job.spec
        asset = lance_asset(required_text("table", self.table), required_text("lance_conn_id", self.lance_conn_id))
        found = api.find_unannounced(job, partial(announced_version, asset, spec.column))
        if found is None:
            self.outlets = [outlet for outlet in self.outlets if outlet != asset]
            return None
        event: dict[str, Any] = {
            "producer": PRODUCER,
            "table": spec.table_name,
            "column": spec.column,
            "from_version": found.from_version,
            "to_version": found.to_version,
            "commit": found.commit,
            "job_id": spec.job_id,
            "state": result.state,
            "rows_computed": result.rows_computed,
            "rows_reused": result.rows_reused,
            "rows_failed": result.rows_failed,
            "rows_left": result.rows_left,
        }
        if spec.of_view:
            event |= {"source": spec.source_name, "source_version": spec.rows_of.version}
        if self._alias is None:
            context["outlet_events"][asset].extra = event
        else:
            context["outlet_events"][self._alias].add(Asset(name=asset.name, uri=asset.uri), extra=event)
        return event


def _record_rejection(job: api.PlannedJob, by: str) -> None:
    result = job.publisher.result(())
    result = replace(result, state=PARTIAL, notes=(*result.notes, f"not approved, by {by}"))
    job.folder.write_result(result.state, result.to_json(), plan=job.saved.fingerprint)


def _state_of(task_id: str, context: Context) -> str | None:
    ti = context["ti"]
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[task_id], run_ids=[ti.run_id])
    return states.get(ti.run_id, {}).get(task_id)  # type: ignore[no-any-return]


def _seconds(job: api.PlannedJob, summary: Mapping[str, Any], committed: Sequence[ShardResult]) -> dict[str, float]:
    """Return the seconds of planning, of all spark-submits and of all commits, without waiting times."""
    return {
        "plan": float(summary.get("seconds", 0.0)),
        "apply": sum(float(document.get("seconds", 0.0)) for document in job.applied),
        "commit": sum(shard.seconds for shard in committed),
    }
