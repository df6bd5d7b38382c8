"""Plan a backfill: find out what is left to compute in a column."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context

from airflow_geneva.errors import CodeChanged, InvalidInput
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.outbox import OutboxEntry, write_outbox
from airflow_geneva.job.record import job_ids
from airflow_geneva.lance_io.task_memory import task_memory_bytes
from airflow_geneva.links.job import JobLink
from airflow_geneva.operators._configuration import Configuration
from airflow_geneva.operators._lance_task import LanceOperator
from airflow_geneva.operators._templated import optional_float, optional_int, optional_text, parse_bool, required_text
from airflow_geneva.plan.model import BackfillSpec, Plan, Sizing
from airflow_geneva.plan.request import BackfillRequest, plan_request
from airflow_geneva.plan.saved_plan import SavedPlan, plan_name, shard_summaries
from airflow_geneva.run.column_stages import record_job
from airflow_geneva.storage.files import Storage
from airflow_geneva.table import Table
from airflow_geneva.udf import load_udf

SUMMARY = "summary"
"""XCom key of the plan's summary; the return value is the list of shards."""

_DEFAULT = Sizing()


class PlanBackfillOperator(LanceOperator):
    """Plan a backfill: which rows of a column are due, and why, cut into shards.

    Returns one dict per shard, to expand `ApplyOperator` and `CommitOperator` over, and pushes a `summary`. If no row
    is due, the list is empty, so no task is expanded. A retried or cleared task plans again, and uses what was computed
    meanwhile.

    All fields but the task's own are templated; empty text means None, and numbers may be text.

    Args:
        table: the table's name.
        column: the computed column.
        udf: import path `"module:name"`; by default the column's own UDF.
        where: SQL filter on the rows; `now()` and similar functions return the DAG run's `run_after`.
        read_version: compute only rows that existed at this table version.
        on_code_change: `error`, `recompute` or `new_rows`, when rows hold another UDF version's value.
        continue_from: other versions of the UDF whose values are kept, separated by commas.
        errors_only: compute only rows the UDF failed on, however often.
        recompute_mixed: compute only rows whose value comes from another version.
        ignore_checkpoints: do not use what earlier runs computed and did not commit.
        concurrency: Spark task slots per spark-submit; by default `[geneva] concurrency`, which is 8.
        intra_applier_concurrency: threads per slot.
        batch_size: rows per UDF call.
        checkpoint_size, min_checkpoint_size, max_checkpoint_size: rows per checkpoint.
        checkpoint_interval: seconds between two checkpoints of a task.
        task_size: rows per Spark task.
        task_shuffle_diversity: number of stretches of the table that neighboring tasks are drawn from.
        shard_size: fragments per shard.
        commit_granularity: fragments per Lance commit; by default as many as keep a backfill at about 100 commits.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.

    Example:
        ```python
        plan = PlanBackfillOperator(task_id="plan", table="docs", column="n", where="{{ params.where or '' }}")
        ```
    """

    template_fields: Sequence[str] = (
        *LanceOperator.template_fields,
        "table",
        "column",
        "udf",
        "where",
        "read_version",
        "on_code_change",
        "continue_from",
        "errors_only",
        "recompute_mixed",
        "ignore_checkpoints",
        "sizing",
    )
    operator_extra_links = (JobLink(),)

    def __init__(
        self,
        *,
        table: str,
        column: str,
        udf: str | None = None,
        where: str | None = None,
        read_version: int | str | None = None,
        on_code_change: str = "error",
        continue_from: str | None = None,
        errors_only: bool | str = False,
        recompute_mixed: bool | str = False,
        ignore_checkpoints: bool | str = False,
        concurrency: int | str | None = None,
        intra_applier_concurrency: int | str = _DEFAULT.intra_applier_concurrency,
        batch_size: int | str | None = None,
        checkpoint_size: int | str | None = None,
        min_checkpoint_size: int | str | None = None,
        max_checkpoint_size: int | str | None = None,
        checkpoint_interval: float | str = _DEFAULT.checkpoint_interval,
        task_size: int | str | None = None,
        task_shuffle_diversity: int | str | None = None,
        shard_size: int | str | None = None,
        commit_granularity: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.column = column
        self.udf = check_import_path(udf)
        self.where = where
        self.read_version = read_version
        self.on_code_change = on_code_change
        self.continue_from = continue_from
        self.errors_only = errors_only
        self.recompute_mixed = recompute_mixed
        self.ignore_checkpoints = ignore_checkpoints
        self.sizing = {
            "concurrency": concurrency,
            "intra_applier_concurrency": intra_applier_concurrency,
            "batch_size": batch_size,
            "checkpoint_size": checkpoint_size,
            "min_checkpoint_size": min_checkpoint_size,
            "max_checkpoint_size": max_checkpoint_size,
            "checkpoint_interval": checkpoint_interval,
            "task_size": task_size,
            "task_shuffle_diversity": task_shuffle_diversity,
            "shard_size": shard_size,
            "commit_granularity": commit_granularity,
        }

    def execute(self, context: Context) -> list[dict[str, Any]]:
        began = time.monotonic()
        configured = Configuration.read()
        table = self.open_database().open_table(required_text("table", self.table))
        try:
            plan = self._plan(table, context, configured)
        except CodeChanged as error:
            raise AirflowFailException(str(error)) from error
        ti = context["ti"]
        plan, saved = record_job(
            plan,
            table.location,
            run=run_text(context),
            ship_code=True,
            about=about_run(context),
        )
        work = plan.work
        if plan.shards:
            write_outbox(table.location.checkpoints, work.outbox, OutboxEntry(work.job_id, work.version))
        job = JobFolder.of(table.location.checkpoints, work.job_id)
        self.log.info("%s", plan)
        summary = summarize(plan, saved, job.storage.path(plan_name(saved.fingerprint)))
        summary["lance_conn_id"] = required_text("lance_conn_id", self.lance_conn_id)
        ti.xcom_push(SUMMARY, {**summary, "seconds": round(time.monotonic() - began, 3)})
        return shard_summaries(plan, saved, job.storage)

    def _plan(self, table: Table, context: Context, configured: Configuration) -> Plan:
        column = required_text("column", self.column)
        definition = table.definition(column)
        path = optional_text(self.udf)
        udf = load_udf(path) if path else table.column_udf(column, definition)
        own_inputs = definition.input_columns if udf.name == definition.name else None
        run_after = getattr(context["dag_run"], "run_after", None)
        request = BackfillRequest(
            column=column,
            where=optional_text(self.where),
            read_version=optional_int("read_version", self.read_version),
            on_code_change=optional_text(self.on_code_change) or "error",
            continue_from=optional_text(self.continue_from),
            errors_only=parse_bool("errors_only", self.errors_only),
            recompute_mixed=parse_bool("recompute_mixed", self.recompute_mixed),
            ignore_checkpoints=parse_bool("ignore_checkpoints", self.ignore_checkpoints),
            run_after=run_after,
            job_id=job_id_of(context, table.location.checkpoints),
            sizing=read_sizing(self.sizing, configured),
        )
        return plan_request(table.location, request, udf, own_inputs)


def read_sizing(given: dict[str, Any], configured: Configuration) -> dict[str, Any]:
    """Return the given sizes as numbers; for an empty one the default, which may be configured."""
    kinds = {
        size.name: optional_float if size.name == "checkpoint_interval" else optional_int for size in fields(Sizing)
    }
    found = {name: kinds[name](name, value) for name, value in given.items()}
    sizes = {name: value for name, value in found.items() if value is not None}
    memory = task_memory_bytes(configured.task_memory_bytes)
    return {"concurrency": configured.concurrency, "task_memory_bytes": memory, **sizes}


def check_import_path(udf: Any) -> str | None:
    """Check a UDF argument: an import path, or a template.

    Raises:
        InvalidInput: it is the function itself, which another process cannot find.
    """
    if udf is None or isinstance(udf, str) or hasattr(udf, "resolve"):  # the output of another task, or a param
        return udf  # type: ignore[no-any-return]
    path = getattr(udf, "import_path", None)
    hint = f"udf={path!r}" if path else 'udf="my_project.udfs:embed"'
    raise InvalidInput(f"udf={udf!r:.80} is not text. Tasks run in other processes: give its import path, {hint}.")


def job_id_of(context: Context, checkpoints: Storage) -> str:
    """Return the job id: the same for all tries of a task, so that they are one job, and sorted by start time.

    The dates of the run do not give the start time: `airflow backfill create` makes runs for past days.
    """
    ti = context["ti"]
    about = "\0".join([ti.dag_id, ti.run_id, ti.task_id, str(ti.map_index)])
    ending = f"-{hashlib.sha256(about.encode()).hexdigest()[:10]}"
    if ti.try_number > 1:
        for name in job_ids(checkpoints):
            if name.endswith(ending):
                return name
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}{ending}"


def run_text(context: Context) -> str:
    """Return text that identifies one try of a plan task."""
    ti = context["ti"]
    return f"{ti.dag_id}/{ti.task_id}/{ti.run_id}/{ti.map_index}/{ti.try_number}"


def about_run(context: Context) -> dict[str, Any]:
    """Return the fields of a job's record about the Airflow run."""
    ti = context["ti"]
    return {"airflow": {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id, "try": ti.try_number}}


def summarize(plan: Plan, saved: SavedPlan, plan_uri: str) -> dict[str, Any]:
    """Return the XCom `summary` of a plan."""
    work = plan.work
    return {
        "plan_uri": plan_uri,
        "fingerprint": saved.fingerprint,
        "job_id": work.job_id,
        "table": work.table_name,
        "column": work.column if isinstance(work, BackfillSpec) else None,
        "udf": work.identity.udf,
        "udf_version": work.udf_version,
        "where": work.where,
        "version": work.version,
        "read_version": work.read_version,
        "shards": len(plan.shards),
        "rows_total": plan.rows_total,
        "rows_pending": plan.rows_pending,
        "rows_to_run": plan.rows_to_run,
        "rows_skipped": plan.rows_skipped,
        "reasons": {tally.reason: {"fragments": tally.fragments, "rows": tally.rows} for tally in plan.reason_counts},
        "notes": list(plan.notes),
    }
