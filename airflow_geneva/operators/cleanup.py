"""Remove files that earlier jobs left beside their tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import Context

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import parse_age
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.operators._lance_task import (
    LanceOperator,
    failing_at_once,
    is_template,
    optional_text,
    parse_bool,
    required_text,
)


class CleanupCheckpointsOperator(LanceOperator):
    """Remove files of earlier jobs that a database's tables no longer need.

    These are checkpoints, unreferenced staged data files, plans and records of ended jobs, half-written files, ledgers
    that were merged into a newer one, and view snapshots that no version of the view references. Files that an open job
    uses and files younger than `ttl` are kept. After a kill, run the task again.

    Returns the number of files and bytes removed (with `dry_run`, that would be removed), in total and by kind.

    Args:
        table: the table's name; by default all tables of the database.
        ttl: minimum age of removed files: text such as `7d` or `12h`, or a timedelta. Choose it longer than the longest
            time between planning a backfill and its last retry.
        dry_run: remove nothing, only report.

    Example:
        ```python
        CleanupCheckpointsOperator(task_id="clean_up", ttl="14d")
        ```
    """

    template_fields: Sequence[str] = (*LanceOperator.template_fields, "table", "ttl", "only_tell")

    def __init__(
        self,
        *,
        table: str | None = None,
        ttl: timedelta | str = "7d",
        dry_run: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.ttl = ttl
        if not is_template(ttl):
            parse_age("ttl", ttl)  # raises InvalidInput while the DAG is parsed
        # Not named `dry_run`, which is a method of every operator.
        self.only_tell = dry_run

    def execute(self, context: Context) -> dict[str, Any]:
        dry = parse_bool("dry_run", self.only_tell)
        with failing_at_once(InvalidInput):
            given = self.ttl if isinstance(self.ttl, timedelta) else required_text("ttl", self.ttl)
            ttl = parse_age("ttl", given)
        database = self.open_database()
        name = optional_text(self.table)
        found: list[api.Garbage] = []
        failed: list[GenevaError] = []
        for table in database.table_names() if name is None else [name]:
            location = database.open_table(table).location if name else database.location(table)
            try:
                found.append(api.clean_up(location, ttl, dry))
            except GenevaError as error:
                # Clean the other tables even if one cannot be read.
                failed.append(error)
        report = "\n".join(str(garbage) for garbage in found if garbage.count or garbage.notes)
        self.log.info(
            "%s %s tables.\n%s", "Checked" if dry else "Cleaned up", len(found), report or "Nothing to remove."
        )
        if failed:
            raise failed[0]
        return {"tables": len(found), "dry_run": dry, **api.Garbage.add_up(found)}
