"""Refresh a materialized view of LanceDB in LanceDB's own layout, so that LanceDB goes on from there.

Such a view has SQL expressions only and no system column but the row id in its source. Its schema metadata name the
source version that it shows, and the version of the view at which that was true.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.commit.view_swap import replace_rows, without_rows
from airflow_geneva.engine.job.folder import new_job_id
from airflow_geneva.engine.job.outbox import JOB_PROPERTY, ROWS_PROPERTY
from airflow_geneva.engine.job.result import DONE, BackfillResult
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at, single_batch
from airflow_geneva.engine.lance_io.conflicts import commit_tries, is_undecided
from airflow_geneva.engine.lance_io.engine_errors import engine_errors
from airflow_geneva.engine.lance_io.filters import where_columns
from airflow_geneva.engine.lance_io.fragments import columns_of, row_ids
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.rows import RowErrors
from airflow_geneva.engine.lance_io.rows_by_id import take_rows
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none, written_at
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget, batch_bytes, task_memory_bytes
from airflow_geneva.engine.plan.value_diff import same_values
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.location import TableLocation, locate
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID
from airflow_geneva.engine.views.lancedb_query import LancedbQuery
from airflow_geneva.engine.views.rows import select_row_ids
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_KEPT = "__kept"
_BATCH_ROWS = 65_536
Ids = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def refresh_lancedb_view(location: TableLocation, src_version: int | None = None) -> BackfillResult:
    """Update a view to a version of its source, by default the newest, in one commit of rows and one of metadata.

    Rows of new and changed fragments of the source are computed and compared with those of the view, and only what
    differs is written. The row ids of source and view are held in memory, 32 bytes a row. Two first refreshes at the
    same time may show rows twice for a moment, until the second one has removed them.

    Raises:
        InvalidInput: the view has a query that only LanceDB refreshes, or its source has no stable row ids.
        CommitConflict: other writers changed the view at every retry.
    """
    began, job_id, commits, written, computed, first = time.monotonic(), new_job_id(), list[int](), 0, 0, 0
    for _ in commit_tries(f"view {location.name!r}", "refresh it"):
        view = location.open()
        first = first or int(view.version)
        query = LancedbQuery.read(view.schema, location.name)
        source = locate(location.database_uri, query.source, location.options).open(src_version)
        if not source.has_stable_row_ids:
            raise InvalidInput(f"Table {query.source!r} has no stable row ids, by which views of LanceDB follow it.")
        if _shown(view) == (source.version, written_at(source)):
            break
        query.check(source, location.name)
        change = _Change(view, source, query)
        try:
            if (rows := change.commit(location, job_id)) is not None:
                commits.append(int(rows.version))
                if rows.version != view.version + 1:  # another writer's rows may be in between
                    continue
            # A dataset without rows is false.
            noted = _note(location, view if rows is None else rows, source)
        except OSError as error:
            if is_undecided(error):
                continue
            raise
        finally:
            written, computed = written + change.written, computed + change.computed
        commits.append(noted)
        break
    return BackfillResult(
        job_id,
        DONE,
        version=max([first, *commits]),
        from_version=first,
        commits=tuple(commits),
        rows_computed=written,
        rows_run=computed,
        seconds={"apply": round(time.monotonic() - began, 3)},
    )


def _shown(view: lance.LanceDataset) -> tuple[int, int] | None:
    """Return the version of the source that a view shows, and its time; None if others have changed the view since."""
    about = view.schema.metadata or {}
    try:
        noted = [int(about[f"mv.{name}".encode()]) for name in ("view_version", "source_version", "source_version_ts")]
    except (LookupError, ValueError):
        return None
    return (noted[1], noted[2]) if noted[0] == view.version else None


def _note(location: TableLocation, view: lance.LanceDataset, source: lance.LanceDataset) -> int:
    """Note the source version in the view's metadata; if another writer commits first, the note does not count."""
    import lance

    about: dict[str, str | None] = {
        "mv.source_version": str(source.version),
        "mv.source_version_ts": str(written_at(source)),
        "mv.refreshed_at_ms": str(time.time_ns() // 1_000_000),
        "mv.view_version": str(view.version + 1),
    }
    update = lance.LanceOperation.UpdateConfig(schema_metadata_updates=lance.LanceOperation.UpdateMap(about, False))
    transaction = lance.Transaction(view.version, update)
    return int(lance.LanceDataset.commit(location.open(), transaction, **location.access).version)


def _converted(values: pa.Array, field: pa.Field) -> pa.Array:
    try:
        return convert_array(values, field.type)
    except pa.ArrowException as error:
        raise InvalidInput(
            f"Values of column {field.name!r} of the view, which is {field.type}, are now {values.type}: {error}. "
            "Create the view again."
        ) from error


@dataclass
class _Change:
    """The difference between a view and its query at a version of the source."""

    view: lance.LanceDataset
    source: lance.LanceDataset
    query: LancedbQuery
    written: int = 0
    computed: int = 0

    def __post_init__(self) -> None:
        rows = self.view.scanner(columns=[SOURCE_ROW_ID], with_row_id=True, with_row_address=True).to_table()
        order = np.argsort(rows.column(SOURCE_ROW_ID).to_numpy(), kind="stable")
        names = (SOURCE_ROW_ID, "_rowid", "_rowaddr")
        self._ids, self._row_ids, self._addresses = (rows.column(name).to_numpy()[order] for name in names)
        # Two refreshes at a time may both have added a row.
        self._gone: Mask = np.zeros(len(order), np.bool_)
        self._gone[1:] = self._ids[1:] == self._ids[:-1]

    def commit(self, location: TableLocation, job_id: str) -> lance.LanceDataset | None:
        """Commit the rows that differ; None if no row does."""
        import lance

        added = self._write(location)
        live = np.concatenate([np.zeros(0, np.int64), *select_row_ids(self.source, None)]).view(np.uint64)
        self._gone |= ~np.isin(self._ids, live)
        if not added and not self._gone.any():
            return None
        addresses = self._addresses[self._gone]
        out = {int(at): addresses[addresses >> 32 == at] for at in np.unique(addresses >> 32)}
        removed, updated, unchanged = without_rows(self.view, out, Counter())
        transaction = lance.Transaction(
            read_version=self.view.version,
            operation=replace_rows(self.view, removed, [*updated, *unchanged], added),
            transaction_properties={JOB_PROPERTY: job_id, ROWS_PROPERTY: str(self.written)},
        )
        return lance.LanceDataset.commit(location.open(), transaction, **location.access)

    @property
    def names(self) -> list[str]:
        return [*self.query.columns, SOURCE_ROW_ID]

    def _write(self, location: TableLocation) -> list[Any]:
        """Write data files with the rows that the view lacks or has with other values; no version names them yet."""
        from lance.fragment import write_fragments

        batches = self._differing()
        if (first := next(batches, None)) is None:
            return []
        with RowErrors() as errors:
            rows = errors.reader(first.schema, itertools.chain([first], batches))
            return list(write_fragments(rows, location.uri, mode="append", **pylance_access(location.options)))

    def _differing(self) -> Iterator[pa.RecordBatch]:
        """Compute the rows that may have changed, and yield those that the view lacks or has with other values."""
        schema = pa.schema([self.view.schema.field(name) for name in self.names])
        columns = {**self.query.columns, SOURCE_ROW_ID: "_rowid", "_rowid": "_rowid"}
        columns |= {} if self.query.where is None else {_KEPT: self.query.where}
        fitting, ids = RowsPerBudget(batch_bytes(task_memory_bytes())), self._candidates()
        while len(ids):
            size = min(fitting.careful_rows, _BATCH_ROWS)
            with engine_errors():
                rows = single_batch(take_rows(self.source, pa.array(ids[:size]), columns))
            ids = ids[size:]
            fitting.record(rows.num_rows, rows.nbytes)
            self.computed += rows.num_rows
            kept = np.ones(rows.num_rows, np.bool_)
            if self.query.where is not None:
                kept = rows.column(_KEPT).fill_null(False).to_numpy(zero_copy_only=False)
            arrays = [_converted(rows.column(field.name), field) for field in schema]
            values = pa.RecordBatch.from_arrays(arrays, schema=schema)
            new = np.flatnonzero(kept & ~self._unchanged(values, kept))
            if len(new):
                self.written += len(new)
                yield rows_at(values, pa.array(new))

    def _unchanged(self, values: pa.RecordBatch, kept: Mask) -> Mask:
        """Return which computed rows the view has with the same values; its other rows of them are gone."""
        ids = values.column(SOURCE_ROW_ID).to_numpy()
        same = np.zeros(len(ids), np.bool_)
        if not len(self._ids):
            return same
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        there = self._ids[at] == ids
        compared = np.flatnonzero(there & kept)
        if len(compared):
            wanted = self._row_ids[at[compared]]
            old = single_batch(take_rows(self.view, pa.array(wanted), [*self.query.columns, "_rowid"]))
            order = np.argsort(old.column("_rowid").to_numpy(), kind="stable")
            found = pa.array(order[np.searchsorted(old.column("_rowid").to_numpy(), wanted, sorter=order)])
            alike = np.ones(len(compared), np.bool_)
            for name in self.query.columns:
                now = rows_at(values.column(name), pa.array(compared))
                alike &= same_values(rows_at(old.column(name), found), now)
            same[compared] = alike
        self._gone[at[there & ~same]] = True
        return same

    def _candidates(self) -> Ids:
        """Return the row ids of the source whose values may differ from those that the view shows.

        A fragment whose files have not changed since has only its rows that were deleted then, and no longer are.
        """
        names = sorted(where_columns(self.query.sql, self.source.schema.names))
        shown = _shown(self.view)
        before = None if shown is None else open_version_or_none(self.source, shown[0])
        if before is not None and not (
            set(names) <= set(before.schema.names) and shown == (before.version, written_at(before))
        ):
            before = None
        then = {} if before is None else read_manifest(before, columns_of(before, names, (), None))
        found: list[Ids] = [np.zeros(0, np.uint64)]
        for files in read_manifest(self.source, columns_of(self.source, names, (), None)).values():
            known = then.get(files.id)
            if known is None or (known.inputs, known.physical_rows) != (files.inputs, files.physical_rows):
                found.append(row_ids(self.source, files.id)[1])
            elif known.deletion != files.deletion:
                there = row_ids(before, files.id)[1]  # type: ignore[arg-type]
                found.append(np.setdiff1d(row_ids(self.source, files.id)[1], there))
        return np.concatenate(found)
