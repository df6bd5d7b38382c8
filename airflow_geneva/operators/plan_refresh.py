"""Plan a refresh: determine which rows a view lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow.sdk import Context

from airflow_geneva.engine import api
from airflow_geneva.engine.storage.places import allow_databases
from airflow_geneva.errors import InvalidInput
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.operators._lance_task import optional_int, parse_bool, parse_json, required_text
from airflow_geneva.operators.plan import PlanOperator, check_number

if TYPE_CHECKING:
    from airflow_geneva.table import Table
    from airflow_geneva.view import View


class PlanRefreshOperator(PlanOperator):
    """Plan a refresh: determine the source rows that a view lacks and the view's rows to remove, and make shards.

    Returns one dict per shard, to expand `ApplyOperator` and `CommitOperator` over, and pushes a `summary`. If no row
    must be computed, the list is empty, so no task is expanded; `FinishOperator` still removes rows that are no longer
    in the query's result. A small job is computed here, and the list is empty too: see `[geneva]
    inline_below_seconds`. A retried or cleared task plans again, and reuses rows that were computed meanwhile.

    All fields but the task's own are templated; empty text means None, and numbers may be text.

    The arguments are those of :class:`airflow_geneva.task_groups.groups.RefreshTaskGroup`.

    Example:
        ```python
        plan = PlanRefreshOperator(task_id="plan", view="long_docs")
        ```
    """

    template_fields: Sequence[str] = (
        *PlanOperator.template_fields,
        *("view", "src_version", "max_rows_per_fragment", "errors_only", "sources"),
    )

    def __init__(
        self,
        *,
        view: str,
        src_version: int | str | None = None,
        max_rows_per_fragment: int | str | None = None,
        errors_only: bool | str = False,
        sources: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.view = view
        self.src_version = src_version
        self.max_rows_per_fragment = max_rows_per_fragment
        check_number("max_rows_per_fragment", max_rows_per_fragment, 1)
        self.errors_only = errors_only
        self.sources = sources

    def _target(self) -> str:
        return required_text("view", self.view)

    def _with_sources(self, view: Table) -> View:
        """Return the view, which may read the databases that are allowed."""
        from airflow_geneva.view import View

        if not isinstance(view, View):
            raise InvalidInput(
                f"{view.name!r} is a table and not a view, so it cannot be refreshed. Create a view first "
                "(CreateMaterializedViewOperator), or compute the table's columns with BackfillTaskGroup."
            )
        allowed = parse_json("sources", self.sources) or []
        if not isinstance(allowed, Sequence) or isinstance(allowed, str):
            raise InvalidInput(f"sources={self.sources!r:.200} is not a list of databases or connections.")
        places = [_uri_of(str(one)) for one in allowed]
        with suppress(InvalidInput):  # a connection for `database` needs no URI of its own
            places.append(LanceHook(required_text("lance_conn_id", self.lance_conn_id)).uri)
        return View(view.location, allow_databases(places))

    def _plan(
        self, table: Table, newest: Any, context: Context, asked: Mapping[str, Any]
    ) -> tuple[api.Plan, int | None]:
        from airflow_geneva.engine.udf.lancedb import refuse_view

        refuse_view(table.name, newest.schema.metadata)
        view = self._with_sources(table)
        request = api.RefreshRequest(
            src_version=optional_int("src_version", self.src_version),
            max_rows_per_fragment=optional_int("max_rows_per_fragment", self.max_rows_per_fragment),
            errors_only=parse_bool("errors_only", self.errors_only),
            **asked,
        )
        # Even without shards there may be a commit to announce, because rows may be removed from the view.
        return view._plan_version(newest, request, to_run=True), int(newest.version)

    def _summarize(self, plan: api.Plan, planned: api.PlannedJob) -> dict[str, Any]:
        spec = planned.spec
        return {**super()._summarize(plan, planned), "view": spec.table_name, "source": spec.source_name}


def _uri_of(given: str) -> str:
    """Return the given URI, or the URI of the given connection."""
    return given if "/" in given else LanceHook(given).uri
