"""Plan a load of values by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import OnDuplicate, OnMissing
from airflow_geneva.operators._lance_task import check_word, optional_text, parse_bool, required_text
from airflow_geneva.operators.plan import PlanOperator

if TYPE_CHECKING:
    from airflow.sdk import Context
    from lance import LanceDataset

    from airflow_geneva.table import Table


class PlanLoadOperator(PlanOperator):
    """Plan a load of values that others computed, by key: check the source, and cut the table into shards.

    Returns one dict per shard, to expand `ApplyOperator` and `CommitOperator` over, and pushes a `summary`. Columns
    that the table lacks are added. The worker needs DuckDB, which looks for keys with several rows; the apply task
    checks a table of Spark. A retried or cleared task plans again, and uses what was joined meanwhile.

    All fields but the task's own are templated; empty text means None. A list may be text with commas.

    The arguments are those of :class:`airflow_geneva.task_groups.groups.LoadColumnsTaskGroup`.

    Example:
        ```python
        plan = PlanLoadOperator(task_id="plan", table="docs", source="s3://deliveries/{{ ds }}/*.parquet", on="id")
        ```
    """

    template_fields: Sequence[str] = (
        *PlanOperator.template_fields,
        *("table", "source", "on", "columns", "format", "on_missing", "on_duplicate", "where", "adopt"),
    )

    def __init__(
        self,
        *,
        table: str,
        source: str | Sequence[str],
        on: str | Sequence[str],
        columns: str | Sequence[str] | None = None,
        format: str | None = None,
        on_missing: str = "keep",
        on_duplicate: str = "error",
        where: str | None = None,
        adopt: bool | str = False,
        commit_granularity: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.source = source
        self.on = on
        self.columns = columns
        self.format = format
        self.on_missing = on_missing
        self.on_duplicate = on_duplicate
        check_word(OnMissing, "on_missing", on_missing)
        check_word(OnDuplicate, "on_duplicate", on_duplicate)
        self.where = where
        self.adopt = adopt
        self.sizing["commit_granularity"] = commit_granularity

    def _target(self) -> str:
        return required_text("table", self.table)

    def _plan(
        self, table: Table, newest: LanceDataset, context: Context, asked: Mapping[str, Any]
    ) -> tuple[api.Plan, int | None]:

        arguments = {
            **asked,
            "source": required_text("source", self.source) if isinstance(self.source, str) else self.source,
            "on": _names(self.on) or (),
            "columns": _names(self.columns),
            "format": optional_text(self.format),
            "on_missing": optional_text(self.on_missing) or "keep",
            "on_duplicate": optional_text(self.on_duplicate) or "error",
            "where": optional_text(self.where),
            "adopt": parse_bool("adopt", self.adopt),
            "run_after": getattr(context["dag_run"], "run_after", None),
        }
        plan, _ = api.plan_load(table.location, api.LoadRequest.of(arguments, asked["sizing"]))
        return plan, plan.spec.version if plan.shards else None


def _names(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names from a list, or from one text with commas."""
    listed = given.split(",") if isinstance(given, str) else list(given or ())
    return tuple(name.strip() for name in listed if name.strip()) or None
