"""Give a candidate column the name of a live one, on request after an approval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import AssetAlias, Context

from airflow_geneva.assets import PRODUCER, lance_asset
from airflow_geneva.engine import api
from airflow_geneva.operators._lance_task import (
    Configuration,
    LanceOperator,
    answered_by,
    is_template,
    optional_int,
    parse_bool,
    parse_json,
    required_text,
)

if TYPE_CHECKING:
    from airflow_geneva.table import Table


class PromoteColumnOperator(LanceOperator, ApprovalOperator):
    """Give a candidate column the name of a live one, which keeps its values under another name.

    It calls `Table.promote_column`, which writes one version of the table, and sends one event of the table's asset.
    When the task is retried after a kill, it detects a finished promotion. A candidate that is not ready fails the task
    without retries; a running job of one of the columns fails it as a conflict, and the task is retried.

    With `approve` a person decides under *Required Actions*, which shows a comparison of both columns and the rows that
    the promotion makes due. After a rejection nothing changes, and downstream tasks are skipped.

    Args:
        table: the table's name.
        column: the candidate, such as `embedding_v2`.
        to: the name of the live column, such as `embedding`.
        keep_as: the live column's new name, such as `embedding_v1`.
        require_complete: refuse the promotion while rows of the candidate are due.
        require_index: refuse the promotion unless the candidate's indexes cover at least as many rows as those of the
            live column.
        approve: whether a person decides.
        neighbors, queries, sample: arguments of the comparison, as in `Table.compare`.
        kwargs: with `approve`, also those of Airflow's `ApprovalOperator`, such as `assigned_users`,
            `response_timeout` and `fail_on_reject`.

    Example:
        ```python
        PromoteColumnOperator(
            task_id="promote", table="docs", column="embedding_v2", to="embedding", keep_as="embedding_v1", approve=True
        )
        ```
    """

    template_fields: Sequence[str] = (
        *LanceOperator.template_fields,
        *("subject", "table", "column", "to", "keep_as", "require_complete", "require_index", "queries", "sample"),
    )

    def __init__(
        self,
        *,
        table: str,
        column: str,
        to: str,
        keep_as: str,
        require_complete: bool | str = True,
        require_index: bool | str = True,
        approve: bool = False,
        neighbors: int = 10,
        queries: Sequence[Any] | str | None = None,
        sample: int | str = 1_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"subject": "Promote the column?", **kwargs})
        self.table = table
        self.column = column
        self.to = to
        self.keep_as = keep_as
        self.require_complete = require_complete
        self.require_index = require_index
        self.approve = approve
        self.neighbors = neighbors
        self.queries = queries
        self.sample = sample
        # The asset of a template is known only at run time; an alias can stand for any asset.
        templated = is_template(table) or is_template(self.lance_conn_id)
        self._alias = AssetAlias(f"{self.dag_id}/{self.task_id}") if templated else None
        self._outlet = self._alias or lance_asset(table, self.lance_conn_id)
        self.outlets = [*self.outlets, self._outlet]

    def execute(self, context: Context) -> dict[str, Any]:
        table, asked = self._table(), self._asked()
        if not self.approve or asked.is_done(table.lance):
            return self._promote(context)
        plan = asked.plan(table.location)
        plan.check()
        sample = optional_int("sample", self.sample) or 1_000
        found = table.compare(asked.to, asked.column, sample, self.neighbors, parse_json("queries", self.queries))
        # A user who may answer the question is not necessarily allowed to see values of rows.
        about = f"{found.without_values()}\n{plan.without_values()}"
        self.log.info("Asking for an approval.\n%s", about)
        self.subject = f"Promote {asked.column} to {asked.to} in table {table.name}?"
        self.body = f"```\n{about}\n```"
        super().execute(context)  # defers the task, which continues below
        return {}

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        answer = super().execute_complete(context, event)
        name = answered_by(answer)
        if answer["chosen_options"] == [self.APPROVE]:
            self.log.info("Approved by %s.", name)
            return self._promote(context)
        self.log.warning("Not approved, by %s: nothing is changed.", name)
        self.outlets = [outlet for outlet in self.outlets if outlet != self._outlet]
        return {"version": None, "rejected_by": name}

    def _table(self) -> Table:
        return self.open_database().open_table(required_text("table", self.table))

    def _asked(self) -> api.Promotion:
        column, to, keep_as = (required_text(name, getattr(self, name)) for name in ("column", "to", "keep_as"))
        required = (parse_bool(name, getattr(self, name)) for name in ("require_complete", "require_index"))
        return api.Promotion(column, to, keep_as, *required)

    def _promote(self, context: Context) -> dict[str, Any]:
        table, asked = self._table(), self._asked()
        with Configuration.read().retrying_commits():
            done = asked.run(table.location)
        self.log.info("%s", done)
        # `column` is None, because this event announces no commits of a job.
        event: dict[str, Any] = {
            "producer": PRODUCER,
            "table": table.name,
            "column": None,
            "promoted": asked.column,
            "to": asked.to,
            "to_version": done.version,
        }
        if self._alias is None:
            context["outlet_events"][lance_asset(table.name, self.lance_conn_id)].extra = event
        else:
            asset = lance_asset(table.name, required_text("lance_conn_id", self.lance_conn_id))
            context["outlet_events"][self._alias].add(asset, extra=event)
        plan = done.plan
        return {
            "version": done.version,
            "already": done.already,
            "rows_due": 0 if plan is None else plan.rows_due,
            "columns": {} if plan is None else plan.columns,
            "views": {} if plan is None else plan.views,
        }
