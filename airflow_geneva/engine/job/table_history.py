"""List the versions of a table, and what wrote them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.job.outbox import JOB_PROPERTY, ROWS_PROPERTY
from airflow_geneva.engine.lance_io.fragments import ids_by_name
from airflow_geneva.engine.lance_io.history import commits_newest_first, files_written
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.storage.files import in_threads

if TYPE_CHECKING:
    import lance

_ROWS = re.compile(r"[0-9]{1,18}")
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
    newest = int(dataset.version)
    commits = list(commits_newest_first(dataset, newest, max(newest - limit + 1, 1), limit))
    # pylance refuses two concurrent reads of one dataset object.
    opened = in_threads(lambda commit: open_version_or_none(copy.copy(dataset), commit.version), commits)
    ids = ids_by_name(dataset)
    names = {field: name for name in dataset.schema.names for field in ids[name]}
    found = list[dict[str, Any]]()
    for commit, version in zip(commits, opened, strict=True):
        if version is None:
            break
        found.append(
            {
                "version": commit.version,
                "time": written_at(version) // 1_000,
                "operation": None if commit.operation is None else type(commit.operation).__name__,
                "columns": _columns(commit.operation, names),
                "rows": _rows(commit.operation, commit.properties.get(ROWS_PROPERTY)),
                "job_id": commit.properties.get(JOB_PROPERTY),
            }
        )
    return pa.Table.from_pylist(found, SCHEMA)


def _columns(operation: Any, names: Mapping[int, str]) -> list[str]:
    """Return the columns of which an operation wrote values, in the order of the schema, without dropped ones."""
    fields = {field for file in files_written(operation) for field in file.fields}
    return list(dict.fromkeys(name for field, name in names.items() if field in fields))


def _rows(operation: Any, noted: str | None) -> int | None:
    import lance

    if noted is not None and _ROWS.fullmatch(noted):  # anyone who may write the table may have noted it
        return int(noted)
    if isinstance(operation, (lance.LanceOperation.Append, lance.LanceOperation.Overwrite)):
        return sum(fragment.physical_rows for fragment in operation.fragments)
    return None
