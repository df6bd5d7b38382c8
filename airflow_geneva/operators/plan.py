"""Plan a backfill: determine which rows of a column are due."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException, SkipMixin
from airflow.sdk import Context

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import OnCodeChange, OnUnknownValues
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.runtime import time, utc_now
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import CodeChanged, ExpectationFailed, InvalidInput, UnknownValues
from airflow_geneva.hooks.openai import openai_connection
from airflow_geneva.links.job import JobLink
from airflow_geneva.operators._lance_task import (
    Configuration,
    LanceOperator,
    cause_first,
    check_import_path,
    check_word,
    failing_at_once,
    is_template,
    optional_float,
    optional_int,
    optional_rows,
    optional_text,
    parse_bool,
    push_error_to_xcom,
    required_text,
)
from airflow_geneva.operators._metrics import send_metrics_of_plan

if TYPE_CHECKING:
    from lance import LanceDataset

    from airflow_geneva.table import Table

LIMIT_ROWS = "limit_rows"
"""Field of a job's record: the rows that fractions of `Skip` refer to."""
REJECTED = "rejected"
"""XCom key of the task that asks: who rejected the plan."""
SUMMARY = "summary"
"""XCom key of the plan's summary; the return value is the list of shards."""


class PlanOperator(LanceOperator, SkipMixin):
    """Base of the two plan operators: arguments for sizes, and what is done with a plan.

    The arguments are those of :class:`airflow_geneva.task_groups.groups.BackfillTaskGroup`.
    """

    template_fields: Sequence[str] = (
        *LanceOperator.template_fields,
        "openai_conn_id",
        "on_code_change",
        "on_unknown_values",
        "ignore_checkpoints",
        "approve_above",
        "max_failed",
        "indexes",
        "sizing",
    )
    operator_extra_links = (JobLink(),)
    shard_tasks: Sequence[str] = ()
    """The tasks that need a shard; a group sets it."""

    def __init__(
        self,
        *,
        on_code_change: str = "error",
        on_unknown_values: str = "error",
        ignore_checkpoints: bool | str = False,
        approve_above: Mapping[str, float | str] | None = None,
        max_failed: float | str | None = None,
        indexes: str | None = None,
        openai_conn_id: str | None = None,
        concurrency: int | str | None = None,
        intra_applier_concurrency: int | str | None = None,
        batch_size: int | str | None = None,
        checkpoint_size: int | str | None = None,
        min_checkpoint_size: int | str | None = None,
        max_checkpoint_size: int | str | None = None,
        checkpoint_interval: float | str | None = None,
        checkpoint_cost: float | str | None = None,
        task_size: int | str | None = None,
        task_shuffle_diversity: int | str | None = None,
        shard_size: int | str | None = None,
        num_frags: int | str | None = None,
        skip_frags: int | str | None = None,
        max_rows: int | str | None = None,
        max_seconds: float | str | None = None,
        max_cost: float | str | None = None,
        num_cpus: float | str | None = None,
        num_gpus: float | str | None = None,
        memory: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        given = locals()  # includes the given sizes, under the names of the fields of Sizing
        super().__init__(**kwargs)
        self.on_code_change = on_code_change
        self.on_unknown_values = on_unknown_values
        self.ignore_checkpoints = ignore_checkpoints
        self.approve_above = check_limits(approve_above)
        self.max_failed = max_failed
        self.indexes = indexes
        self.openai_conn_id = openai_conn_id
        self.sizing = {size.name: given[size.name] for size in fields(api.Sizing) if size.name in given}
        _check_constants(self)

    def execute(self, context: Context) -> list[dict[str, Any]]:
        with push_error_to_xcom(context):
            return self._execute(context)

    def _execute(self, context: Context) -> list[dict[str, Any]]:
        began = time.monotonic()
        configured = Configuration.read()
        table, newest = self.open_database().open_newest(self._target())
        job_id = _job_id_of(context, table.location.checkpoints)
        job = api.JobFolder.of(table.location.checkpoints, job_id)
        # The job id of a first attempt is new, so no other process writes the documents of the job.
        with job.written_by_this_process(others_go_on=True) if context["ti"].try_number == 1 else nullcontext():
            return self._plan_and_compute(context, configured, table, newest, job, began)

    def _plan_and_compute(
        self,
        context: Context,
        configured: Configuration,
        table: Table,
        newest: LanceDataset,
        job: api.JobFolder,
        began: float,
    ) -> list[dict[str, Any]]:
        from airflow_geneva.engine.udf.stored import udf_modules
        from airflow_geneva.spark.runner import SparkRunner

        asked = {
            "on_code_change": optional_text(self.on_code_change) or "error",
            "on_unknown_values": optional_text(self.on_unknown_values) or "error",
            "ignore_checkpoints": parse_bool("ignore_checkpoints", self.ignore_checkpoints),
            "max_failed": optional_rows("max_failed", self.max_failed),
            "indexes": optional_text(self.indexes),
            "job_id": job.job_id,
            "sizing": read_sizing(self.sizing, configured),
        }
        earlier = job.record if context["ti"].try_number > 1 else {}
        with failing_at_once(CodeChanged, UnknownValues), udf_modules(configured.udf_modules):
            plan, since = self._plan(table, newest, context, asked)
        # Failed rows of earlier attempts count towards the limits of `Skip`, so the total includes the rows of these
        # attempts.
        rows = max(plan.spec.rows, int(earlier.get(LIMIT_ROWS, 0)))
        plan = plan.with_work(rows=rows)
        udfs = api.Udfs.planned(plan.spec) if plan.shards else api.Udfs({})
        below = configured.inline_below_seconds
        plan, choice, expected = api.choose(plan, table.location, udfs, "auto", below, False, SparkRunner())
        above = expected.above(self._limits()) if plan.shards else ""
        if above:
            choice = api.RunnerChoice("spark", f"an approval is asked for: {above}")
        run, about = _about_run(context)
        about |= {LIMIT_ROWS: rows, "expected": expected.pace()} | ({api.APPROVAL: above} if above else {})
        planned = api.record_job(
            plan, table.location, choice, about, run, elsewhere=True, announces_since=since, folder=job, before=earlier
        )
        spec = planned.spec
        send_metrics_of_plan(plan)
        self.log.info("%s%s", plan, f"\n  Estimate: {expected}\n  Computed {choice}." if plan.shards else "")
        summary = {
            "plan_uri": planned.uri,
            **self._summarize(plan, planned),
            "lance_conn_id": required_text("lance_conn_id", self.lance_conn_id),
            **choice.describe(),
            "estimate": expected.to_json(),
            **({api.APPROVAL: _question(plan, expected, above)} if above else {}),
            "seconds": round(time.monotonic() - began, 3),
        }
        # `finish` also records a job that fails here, and needs the summary for it.
        context["ti"].xcom_push(SUMMARY, summary)
        if choice.runner == "inline":
            try:
                with (
                    failing_at_once(ExpectationFailed),
                    cause_first(self.log),
                    configured.retrying_commits(),
                    openai_connection(optional_text(self.openai_conn_id), spec.connections),
                ):
                    planned.apply_and_commit(plan.shards, udfs)
                return self._no_shards(context)
            except api.TooSlow as slow:
                choice = api.RunnerChoice("spark", str(slow))
                self.log.info("The rest of %s is computed %s.", spec.target, choice)
                job.update_record(**choice.describe())
                context["ti"].xcom_push(SUMMARY, {**summary, **choice.describe()})
        return planned.summarize_shards(plan) or self._no_shards(context)

    def _no_shards(self, context: Context) -> list[dict[str, Any]]:
        """Return no shards, and skip the tasks that need one: the scheduler takes up to a second for each.

        After an earlier try they may be mapped already. Then the scheduler removes them, or skips them.
        """
        ti = context["ti"]
        if self.shard_tasks and ti.try_number == 1:
            ti.xcom_push("return_value", [])
            self.skip(ti, [self.dag.get_task(task_id) for task_id in self.shard_tasks])
        return []

    def _limits(self) -> dict[str, float]:
        given = ((name, optional_float(f"approve_above {name}", limit)) for name, limit in self.approve_above.items())
        limits = {name: limit for name, limit in given if limit is not None}
        if bad := {name: limit for name, limit in limits.items() if not 0 <= limit < inf}:
            raise AirflowFailException(f"approve_above={bad} is not valid: give numbers of at least 0.")
        return limits

    @abstractmethod
    def _target(self) -> str:
        """Return the name of the table or view that is planned."""

    @abstractmethod
    def _plan(
        self, table: Table, newest: LanceDataset, context: Context, asked: Mapping[str, Any]
    ) -> tuple[api.Plan, int | None]:
        """Plan; also return the version after which commits must be announced, or None if there will be none.

        Args:
            newest: the table's or view's newest version.
            asked: the fields that the requests of both operators share.
        """

    def _summarize(self, plan: api.Plan, planned: api.PlannedJob) -> dict[str, Any]:
        spec = planned.spec
        return {
            "fingerprint": planned.saved.fingerprint,
            "job_id": spec.job_id,
            "table": spec.table_name,
            "column": spec.column,
            "udf": spec.identity.udf,
            "udf_version": spec.udf_version,
            "where": spec.where,
            "version": spec.rows_of.version,
            "read_version": spec.read_version,
            "shards": len(plan.shards),
            "rows_total": plan.rows_total,
            "rows_pending": plan.rows_pending,
            "rows_to_run": plan.rows_to_run,
            "rows_skipped": plan.rows_skipped,
            "reasons": {
                count.reason: {"fragments": count.fragments, "rows": count.rows} for count in plan.reason_counts
            },
            "notes": list(plan.notes),
        }


class PlanBackfillOperator(PlanOperator):
    """Plan a backfill: determine the due rows of a column, with reasons, and divide them into shards.

    Returns one dict per shard, to expand `ApplyOperator` and `CommitOperator` over, and pushes a `summary`. If no row
    is due, the list is empty, so no task is expanded. A small job is computed and committed here, and the list is empty
    too: see `[geneva] inline_below_seconds`. A retried or cleared task plans again, and reuses rows that were computed
        meanwhile.

    All fields but the task's own are templated; empty text means None, and numbers may be text.

    The arguments are those of :class:`airflow_geneva.task_groups.groups.BackfillTaskGroup`.

    Example:
        ```python
        plan = PlanBackfillOperator(task_id="plan", table="docs", column="n", where="{{ params.where or '' }}")
        ```
    """

    template_fields: Sequence[str] = (
        *PlanOperator.template_fields,
        *("table", "column", "udf", "where", "read_version", "continue_from", "errors_only", "recompute_mixed"),
    )

    def __init__(
        self,
        *,
        table: str,
        column: str,
        udf: str | None = None,
        where: str | None = None,
        read_version: int | str | None = None,
        continue_from: str | None = None,
        errors_only: bool | str = False,
        recompute_mixed: bool | str = False,
        commit_granularity: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.column = column
        self.udf = check_import_path(udf)
        self.where = where
        self.read_version = read_version
        self.continue_from = continue_from
        self.errors_only = errors_only
        self.recompute_mixed = recompute_mixed
        self.sizing["commit_granularity"] = commit_granularity

    def _target(self) -> str:
        return required_text("table", self.table)

    def _plan(
        self, table: Table, newest: LanceDataset, context: Context, asked: Mapping[str, Any]
    ) -> tuple[api.Plan, int | None]:

        request = api.BackfillRequest(
            column=required_text("column", self.column),
            where=optional_text(self.where),
            read_version=optional_int("read_version", self.read_version),
            continue_from=optional_text(self.continue_from),
            errors_only=parse_bool("errors_only", self.errors_only),
            recompute_mixed=parse_bool("recompute_mixed", self.recompute_mixed),
            run_after=getattr(context["dag_run"], "run_after", None),
            **asked,
        )
        plan, _ = table._plan(request, optional_text(self.udf), dataset=newest)
        return plan, plan.spec.version if plan.shards else None


def read_sizing(given: dict[str, Any], configured: Configuration) -> dict[str, Any]:
    """Return the given sizes as numbers; for an empty one the default, which may be configured."""
    names = [size.name for size in fields(api.Sizing)]
    kinds = {name: optional_int if api.Sizing.is_whole(name) else optional_float for name in names}
    found = {
        name: optional_text(value) if name == "memory" and isinstance(value, str) else kinds[name](name, value)
        for name, value in given.items()
    }
    sizes = {name: value for name, value in found.items() if value is not None}
    common = {
        "concurrency": configured.concurrency,
        "task_memory_bytes": api.Sizing.task_memory(configured.task_memory_bytes),
    }
    return {**common, "price_per_slot_hour": configured.price_per_slot_hour or None, **sizes}


def check_limits(given: Any) -> dict[str, Any]:
    """Refuse an invalid threshold; its numbers may be templates."""
    if given is not None and not (isinstance(given, Mapping) and given and set(given) <= set(api.Estimate.LIMITS)):
        raise InvalidInput(
            f"approve_above={given!r:.200} is not valid. Give numbers by {', '.join(api.Estimate.LIMITS)}."
        )
    return dict(given or {})


def _check_constants(task: PlanOperator) -> None:
    """Raise InvalidInput while the DAG is parsed for a word or number that is not valid, and is no template."""
    check_word(OnCodeChange, "on_code_change", task.on_code_change)
    check_word(OnUnknownValues, "on_unknown_values", task.on_unknown_values)
    indexes = task.indexes
    if isinstance(indexes, bool) or (not is_template(indexes) and optional_text(indexes) not in (None, "update")):
        raise InvalidInput(f'indexes={task.indexes!r} is unknown. Use "update", or leave it out.')
    for name, size in task.sizing.items():
        if isinstance(size, (int, float)):  # others are known, or checked, at run time
            api.Sizing.check_number(name, size)


def check_number(name: str, given: Any, least: int) -> None:
    """Raise InvalidInput for a number below the least one; what is known only at run time is checked then."""
    if isinstance(given, bool) or (isinstance(given, (int, float)) and not given >= least):
        raise InvalidInput(f"{name}={given!r} is not valid: give a number of at least {least}.")


def _question(plan: api.Plan, expected: api.Estimate, above: str) -> dict[str, str]:
    """Return the text that a person reviews before the plan is computed."""
    # Airflow renders Markdown, and joins the lines of a code block.
    text = f"{plan}\n  Estimate: {expected.summary()}".replace("`", "'")
    lines = [f"- `{line.strip()}`" for line in text.splitlines()]
    return {
        "subject": f"Compute {counted(expected.rows, 'row')} of {plan.spec.target}?",
        "body": "\n".join([f"It is asked because {above}.\n", *lines]),
    }


def _job_id_of(context: Context, checkpoints: Storage) -> str:
    """Return the job id: the same for all attempts of a task, so that they are one job, and sorted by start time.

    The dates of the run do not give the start time: `airflow backfill create` makes runs for past days.
    """
    ti = context["ti"]
    about = "\0".join([ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index)])
    ending = f"-{hashlib.sha256(about.encode()).hexdigest()[:10]}"
    if ti.try_number > 1:
        for name, _ in api.JobList.of({"": checkpoints}).ids:
            if name.endswith(ending):
                return name
    return f"{utc_now():%Y%m%dT%H%M%S%f}{ending}"


def _about_run(context: Context) -> tuple[str, dict[str, Any]]:
    """Return a text that identifies one attempt of a plan task, and the description of its run for the job's record."""
    ti, dag_run = context["ti"], context["dag_run"]
    run = f"{ti.dag_id}/{ti.task_id}/{ti.run_id}/{ti.map_index}/{ti.try_number}"
    by = f" by {dag_run.triggering_user_name}" if dag_run.triggering_user_name else ""
    task = {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id, "try": ti.try_number}
    return run, {"airflow": task, "started_by": f"{getattr(dag_run.run_type, 'value', dag_run.run_type)} run{by}"}
