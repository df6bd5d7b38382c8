"""List the versions of a table, and what wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.job.outbox import JOB_PROPERTY
from airflow_geneva.engine.lance_io.history import commits_newest_first, files_written
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none, written_at

if TYPE_CHECKING:
    import lance

ROWS_PROPERTY = "geneva.rows"
"""The transaction property that has the number of computed rows which a commit makes visible."""
SCHEMA = pa.schema(
    {
        "version": pa.int64(),
        "time": pa.timestamp("us", "UTC"),
        "operation": pa.string(),
        "columns": pa.list_(pa.string()),
        "rows": pa.int64(),
        "job_id": pa.string(),
    }
)


def table_history(dataset: lance.LanceDataset, limit: int) -> pa.Table:
    """Return the newest versions of a table, newest first, up to those that were cleaned up."""
    return pa.Table.from_pylist(list(islice(_versions(dataset, limit), limit)), SCHEMA)


def _versions(dataset: lance.LanceDataset, limit: int) -> Iterator[dict[str, Any]]:
    newest = int(dataset.version)
    names = {field.id(): field.name() for field in dataset.lance_schema.fields()}
    for commit in commits_newest_first(dataset, newest, max(newest - limit + 1, 1)):
        if (opened := open_version_or_none(dataset, commit.version)) is None:
            return
        fields = {field for file in files_written(commit.operation) for field in file.fields}
        yield {
            "version": commit.version,
            "time": written_at(opened) // 1_000,
            "operation": None if commit.operation is None else type(commit.operation).__name__,
            "columns": [name for field, name in names.items() if field in fields],
            "rows": _rows(commit.operation, commit.properties.get(ROWS_PROPERTY)),
            "job_id": commit.properties.get(JOB_PROPERTY),
        }


def _rows(operation: Any, noted: str | None) -> int | None:
    import lance

    if noted is not None:
        return int(noted)
    if isinstance(operation, (lance.LanceOperation.Append, lance.LanceOperation.Overwrite)):
        return sum(fragment.physical_rows for fragment in operation.fragments)
    return None
