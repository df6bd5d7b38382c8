"""What the pages show as JSON documents, for programs; `VERSION` changes when a field goes or means something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi.responses import JSONResponse

from airflow_geneva.engine import api
from airflow_geneva.pages.databases import DatabaseDetails, TableCard
from airflow_geneva.pages.rendering import NOT_KEPT, masked
from airflow_geneva.pages.tables import ColumnRow, FreshnessView, TableDetails

VERSION = 1


def answer(document: Mapping[str, Any], status: int = 200) -> JSONResponse:
    """Answer with a document; its texts go through Airflow's secrets masker, as those of the pages do."""
    return JSONResponse(_masked({"version": VERSION, **document}), status, NOT_KEPT)


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(masked(str(name))): _masked(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item) for item in value]
    if isinstance(value, float) and value != value:  # JSON has no NaN
        return None
    return masked(value)


def job_document(job: api.Job) -> dict[str, Any]:
    """Return a job with its shards, as `airflow-geneva status --json` prints it."""
    return {"job": job.to_json()}


def table_document(described: TableDetails, counted: FreshnessView) -> dict[str, Any]:
    """Return a table or view, its columns and its views, and how many rows of what is computed are due."""
    found = {row.name: row for row in counted.columns}
    return {
        "name": described.name,
        "table_version": described.version,
        "rows": described.rows,
        "fragments": described.fragments,
        "is_view": described.own is not None,
        "error": described.error,
        "note": described.note,
        "refreshed": None if described.own is None else _computed(found.get(described.own.name, described.own)),
        "columns": [_column(found.get(row.name, row)) for row in described.columns],
        "views": [_computed(row) for row in counted.views],
        "indexes": [asdict(index) for index in described.indexes],
    }


def database_document(conn_id: str, shown: DatabaseDetails) -> dict[str, Any]:
    """Return the tables and views of a database, with their states, and its newest jobs."""
    return {
        "lance_conn_id": conn_id,
        "tables": [_card(card) for card in shown.cards],
        "jobs": [_in_short(job) for job in shown.listed.jobs],
        "older_jobs_before": shown.listed.older,
    }


def _column(row: ColumnRow) -> dict[str, Any]:
    about: dict[str, Any] = {"name": row.name, "type": row.type, "computed_by": row.what}
    return {**about, **_computed(row)} if row.is_computed else about


def _computed(row: ColumnRow) -> dict[str, Any]:
    """Return how a column or view stands; `state` is None while its rows are counted: ask again."""
    rows = None if row.standing is None else {"state": row.standing.state, **asdict(row.standing)}
    return {
        "name": row.name,
        "inputs": list(row.inputs),
        "state": None if rows is None else rows["state"],
        "rows": rows,
        "error": row.error,
        "stale_since": row.since or None,
        "job": None if row.job is None else _in_short(row.job),
    }


def _card(card: TableCard) -> dict[str, Any]:
    counted = not (card.counting or card.broken)
    return {
        "name": card.name,
        "rows": card.rows if counted else None,
        "is_view": card.is_view if counted else None,
        "source": card.source,
        "state": card.state,
        "pending": card.pending if counted else None,
        "failed": card.failed if counted else None,
    }


def _in_short(job: api.Job) -> dict[str, Any]:
    fields = ("id", "kind", "table", "column", "view", "state", "dead", "started", "ended", "started_by", "cost")
    rows = ("rows_pending", "rows_committed", "rows_failed", "rows_left")
    return {name: getattr(job, name) for name in (*fields, *rows)}
