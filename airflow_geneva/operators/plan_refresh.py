"""Plan a refresh: find out which rows a view lacks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context

from airflow_geneva.errors import CodeChanged, InvalidInput
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.outbox import OutboxEntry, write_outbox
from airflow_geneva.links.job import JobLink
from airflow_geneva.operators._configuration import Configuration
from airflow_geneva.operators._lance_task import LanceOperator
from airflow_geneva.operators._templated import optional_int, optional_text, parse_bool, required_text
from airflow_geneva.operators.plan import SUMMARY, about_run, job_id_of, read_sizing, run_text, summarize
from airflow_geneva.plan.model import Plan, Sizing
from airflow_geneva.plan.request import RefreshRequest, check_sizing
from airflow_geneva.plan.saved_plan import plan_name, shard_summaries
from airflow_geneva.run.refresh import plan, record_refresh
from airflow_geneva.view import View
from airflow_geneva.views.definition import ViewDefinition

_DEFAULT = Sizing()


class PlanRefreshOperator(LanceOperator):
    """Plan a refresh: which source rows a view lacks, and which of its rows must be removed, cut into shards.

    Returns one dict per shard, to expand `ApplyOperator` and `CommitOperator` over, and pushes a `summary`. If no row
    must be computed, the list is empty, so no task is expanded; `FinishOperator` still removes rows that are no longer
    in the query's result. A retried or cleared task plans again, and uses what was computed meanwhile.

    All fields but the task's own are templated; empty text means None, and numbers may be text.

    Args:
        view: the view's name.
        src_version: the source version to refresh to, which may be an earlier one; by default the newest.
        max_rows_per_fragment: rows of each new fragment of the view.
        on_code_change: `error`, `recompute` or `new_rows`, when the view holds another UDF version's values.
        ignore_checkpoints: do not use what earlier runs computed.
        concurrency: Spark task slots per spark-submit; by default `[geneva] concurrency`, which is 8.
        intra_applier_concurrency: threads per slot.
        batch_size: rows per UDF call.
        checkpoint_size, min_checkpoint_size, max_checkpoint_size: rows per checkpoint.
        checkpoint_interval: seconds between two checkpoints of a task.
        task_size: rows per Spark task.
        task_shuffle_diversity: number of stretches of the source that neighboring tasks are drawn from.
        shard_size: source fragments per shard.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.

    Example:
        ```python
        plan = PlanRefreshOperator(task_id="plan", view="long_docs")
        ```
    """

    template_fields: Sequence[str] = (
        *LanceOperator.template_fields,
        "view",
        "src_version",
        "max_rows_per_fragment",
        "on_code_change",
        "ignore_checkpoints",
        "sizing",
    )
    operator_extra_links = (JobLink(),)

    def __init__(
        self,
        *,
        view: str,
        src_version: int | str | None = None,
        max_rows_per_fragment: int | str | None = None,
        on_code_change: str = "error",
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
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.view = view
        self.src_version = src_version
        self.max_rows_per_fragment = max_rows_per_fragment
        self.on_code_change = on_code_change
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
        }

    def execute(self, context: Context) -> list[dict[str, Any]]:
        began = time.monotonic()
        configured = Configuration.read()
        view = self._open_view()
        definition = view.view_definition
        # Read before planning: the plan may already be based on a version that is written from here on.
        since = view.version
        try:
            made = self._plan(view, definition, context, configured)
        except CodeChanged as error:
            raise AirflowFailException(str(error)) from error
        saved = record_refresh(made, view.location, run_text(context), ship_code=True, about=about_run(context))
        work = saved.work
        # Also without shards: rows may be removed from the view.
        write_outbox(view.location.checkpoints, work.outbox, OutboxEntry(work.job_id, since))
        job = JobFolder.of(view.location.checkpoints, work.job_id)
        self.log.info("%s", made)
        assert made.swap is not None
        summary = {
            **summarize(made, saved, job.storage.path(plan_name(saved.fingerprint))),
            "view": view.name,
            "source": definition.source_table,
            "lance_conn_id": required_text("lance_conn_id", self.lance_conn_id),
            "seconds": round(time.monotonic() - began, 3),
        }
        context["ti"].xcom_push(SUMMARY, summary)
        return shard_summaries(made, saved, job.storage)

    def _open_view(self) -> View:
        name = required_text("view", self.view)
        view = self.open_database().open_table(name)
        if not isinstance(view, View):
            raise InvalidInput(
                f"{name!r} is a table and not a view, so it cannot be refreshed. Create a view first "
                "(CreateMaterializedViewOperator), or compute the table's columns with BackfillTaskGroup."
            )
        return view

    def _plan(self, view: View, definition: ViewDefinition, context: Context, configured: Configuration) -> Plan:
        request = RefreshRequest(
            job_id=job_id_of(context, view.location.checkpoints),
            src_version=optional_int("src_version", self.src_version),
            max_rows_per_fragment=optional_int("max_rows_per_fragment", self.max_rows_per_fragment),
            on_code_change=optional_text(self.on_code_change) or "error",
            ignore_checkpoints=parse_bool("ignore_checkpoints", self.ignore_checkpoints),
            sizing=check_sizing(read_sizing(self.sizing, configured)),
        )
        return plan(view.location, definition, view.source().location, request)
