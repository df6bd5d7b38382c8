"""Records of rows on which a UDF failed, stored in ``_checkpoints/jobs/{id}/errors/{name}.arrow``."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.display import Listed, format_time
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.lance_io.arrays import copy_sliced_columns
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.arrow_documents import from_bytes, to_bytes
from airflow_geneva.engine.storage.files import Storage

logger = logging.getLogger("airflow_geneva.job")

ERRORS = "errors"
_SUFFIX = ".arrow"

_SCHEMA = pa.schema(
    [
        ("job_id", pa.string()),
        ("column", pa.string()),
        ("udf", pa.string()),
        ("udf_version", pa.string()),
        ("row_address", pa.uint64()),
        ("row_id", pa.uint64()),
        ("exception", pa.string()),
        ("message", pa.string()),
        ("traceback", pa.string()),
        ("attempt", pa.int64()),
        ("calls", pa.int64()),
        ("time", pa.float64()),
        ("rule", pa.int64()),
        ("source", pa.string()),
        ("key", pa.string()),
    ]
)
_MOST_BYTES, _MOST_ROWS = 32 << 20, 1 << 16
"""The most bytes, expanded, and rows of one file."""
_FILES_AT_ONCE = 16
_ROWS_AT_ONCE = 1_024
_MOST_RECORDS, _MOST_BYTES_OF_RECORDS = 1_000_000, 256 << 20
"""What `newest_records` returns at most; it reads one file more."""
_LONG_SECONDS = 0.05
_COUNTED: ProcessMemo[str, tuple[float, int]] = ProcessMemo(256)
"""Error counts of running jobs by folder, with their expiry times. They are the process's: each request of a page opens
the job anew."""

FATAL = -1
"""The `rule` of a failure that ended the job."""

IDENTITY = ("job_id", "column", "row_id", "attempt")
"""Columns that identify a record; of several with the same values, the newest counts."""

FILE = "file"
"""The file of a record, as a column of `newest_records`."""


@dataclass(frozen=True, repr=False)
class ErrorRecord(Listed):
    """One row on which a UDF failed.

    Args:
        job_id: the job that ran it.
        column: the column that stays NULL there.
        udf, udf_version: the code that failed.
        row_address: fragment and physical offset at the planned version; for a view, in its source.
        row_id: its stable row id; the row address in a table without stable row ids.
        exception: name of the exception's class.
        message: its text.
        traceback: the UDF's own part of the traceback; "" if there is none, as after a crash.
        attempt: 1-based number of runs with this input and this UDF version.
        calls: number of UDF calls for the row in this run, retries included.
        time: seconds since the epoch.
        rule: position of the policy rule that skipped the row; -1 if the failure ended the job.
        source: for a view, the source table of the row; else "".
        key: the value of the table's key in the row, cut after 200 bytes; "" without a key.
    """

    job_id: str
    column: str
    udf: str
    udf_version: str
    row_address: int
    row_id: int
    exception: str
    message: str
    traceback: str
    attempt: int
    calls: int
    time: float
    rule: int = 0
    source: str = ""
    key: str = ""

    @property
    def kind(self) -> str:
        """The exception's name as it is written in code."""
        return self.exception.removeprefix("builtins.")

    @property
    def fragment(self) -> int:
        return self.row_address >> 32

    @property
    def offset(self) -> int:
        """Physical offset within the fragment."""
        return self.row_address & 0xFFFFFFFF

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def __str__(self) -> str:
        source = f" of source {self.source}" if self.source else ""
        key = f"key {self.key}, " if self.key else ""
        times = f", {self.calls} calls" if self.calls > 1 else ""
        lines = [
            f"{key}row address {self.row_address}{source} (fragment {self.fragment}, offset {self.offset}): "
            f"{self.kind}: {self.message}",
            f"  column {self.column}, UDF {self.udf} (version {self.udf_version}), attempt {self.attempt}{times}, "
            f"{format_time(self.time)}, job {self.job_id}",
        ]
        if self.traceback:
            lines.append(textwrap.indent(self.traceback.rstrip(), "  "))
        return "\n".join(lines)


def write_errors(job: Storage, name: str, records: Sequence[ErrorRecord]) -> None:
    """Write error records to files of bounded size, named by the range that was run; another run replaces them."""
    if not records:
        return
    whole = pa.RecordBatch.from_pylist([record.to_json() for record in records], schema=_SCHEMA)
    rows = min(_MOST_ROWS, max(whole.num_rows * (_MOST_BYTES // 2) // whole.nbytes, 1))
    for part, start in enumerate(range(0, whole.num_rows, rows)):
        data = to_bytes(copy_sliced_columns(whole.slice(start, rows)), "zstd")
        job.write_bytes(f"{ERRORS}/{name}{f'-part-{part}' if part else ''}{_SUFFIX}", data)


def read_errors(checkpoints: Storage, job_id: str | None = None, column: str | None = None) -> list[ErrorRecord]:
    """Return the error records of a table's jobs, newest first; one per job, column, row id and attempt.

    InvalidInput: ``job_id`` is not a job id.
    """
    newest: dict[tuple[Any, ...], ErrorRecord] = {}
    for _, batch in _batches(checkpoints, sorted(_error_files(checkpoints, job_id))):
        for row in _rows(batch):
            record = ErrorRecord(**row)
            key = tuple(row[name] for name in IDENTITY)
            if column in (None, record.column) and (key not in newest or newest[key].time < record.time):
                newest[key] = record
    return sorted(newest.values(), key=lambda record: (-record.time, record.row_address))


def count_errors(job: Storage) -> int:
    """Count the error records of one job, as `newest_records` returns them."""
    return int(newest_records(job).num_rows)


def newest_records(job: Storage, columns: Sequence[str] = ()) -> pa.Table:
    """Return columns of a job's error records, newest first; one row per job, column, row id and attempt.

    Of a message it is the first line. Records beyond a million, or 256 MiB, are left out.
    """
    names = list(dict.fromkeys((*IDENTITY, "time", *columns)))
    stored = [name for name in names if name != FILE]
    schema = pa.schema([_SCHEMA.field(name) if name != FILE else (FILE, pa.string()) for name in names])
    parts = [schema.empty_table()]
    for file, batch in _batches(job, sorted(filter(_is_error_file, job.list_files(ERRORS))), stored):
        if "message" in names:
            line = pc.replace_substring_regex(batch.column("message"), r"(?s)\n.*", "")
            batch = batch.set_column(stored.index("message"), "message", line)
        if FILE in names:
            batch = batch.append_column(FILE, pa.repeat(file, batch.num_rows))
        parts.append(pa.Table.from_batches([batch.select(names)]))
        rows, size = (sum(getattr(part, what) for part in parts) for what in ("num_rows", "nbytes"))
        if rows > _MOST_RECORDS or size > _MOST_BYTES_OF_RECORDS:
            break
    rest = [name for name in names if name not in IDENTITY]
    found = pa.concat_tables(parts).slice(0, _MOST_RECORDS)
    by_row = found.sort_by([("time", "descending")]).group_by(list(IDENTITY), use_threads=False)
    return by_row.aggregate([(name, "first") for name in rest]).rename_columns([*IDENTITY, *rest])


def read_records(job: Storage, chosen: pa.Table) -> list[ErrorRecord]:
    """Read a few of the `newest_records`, with their files; leave out those that were replaced since."""
    names = (*IDENTITY, "time")
    found: dict[tuple[Any, ...], ErrorRecord] = {}
    for _, batch in _batches(job, sorted(set(chosen.column(FILE).to_pylist()))):
        for row in _rows(batch.filter(pc.is_in(batch.column("row_id"), chosen.column("row_id").combine_chunks()))):
            found[tuple(row[name] for name in names)] = ErrorRecord(**row)
    wanted = (tuple(row[name] for name in names) for row in chosen.to_pylist())
    return [found[record] for record in wanted if record in found]


def count_errors_so_far(job: Storage) -> int:
    """Count the error records of a running job; a slow count is cached for ten times as long as it took.

    File names do not show changes, because a rewritten file keeps its name.
    """
    began = time.monotonic()
    kept_until, count = _COUNTED.get(job.root, (began, 0))
    if began < kept_until:
        return count
    count = count_errors(job)
    now = time.monotonic()
    if now - began > _LONG_SECONDS:
        _COUNTED[job.root] = (now + 10 * (now - began), count)
    return count


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
        yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()


def _error_files(checkpoints: Storage, job_id: str | None) -> list[str]:
    if job_id is None:
        return [name for name in checkpoints.list_files("jobs") if _is_error_file(name)]
    job = JobFolder.of(checkpoints, job_id).storage
    return [f"jobs/{job_id}/{name}" for name in job.list_files(ERRORS) if _is_error_file(name)]


def _contents(folder: Storage, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield files with their content, without files that are gone."""

    def read(name: str) -> bytes | None:
        try:
            return folder.read_bytes(name)
        except FileNotFoundError:
            return None

    rest = iter(names)
    while part := list(islice(rest, _FILES_AT_ONCE)):
        found = folder.side_by_side(*(partial(read, name) for name in part))
        yield from ((name, data) for name, data in zip(part, found, strict=True) if data is not None)


def _is_error_file(name: str) -> bool:
    return name.endswith(_SUFFIX) and f"/{name}".rpartition("/")[0].endswith(f"/{ERRORS}")


def _batches(
    folder: Storage, names: Iterable[str], columns: Sequence[str] | None = None
) -> Iterator[tuple[str, pa.RecordBatch]]:  # fmt: skip
    """Yield files with their records, all columns by default."""
    for name, data in _contents(folder, names):
        try:
            batch = from_bytes(data, columns, _MOST_BYTES)
            if columns is None:
                batch = batch.select(_SCHEMA.names)
            parts = zip(batch.schema, batch.columns, strict=True)
            wrong = [one.name for one, values in parts if one.type != _SCHEMA.field(one.name).type or values.null_count]
            if wrong or batch.num_rows > _MOST_ROWS:
                raise ValueError(f"it has {batch.num_rows:,} rows, and other types or NULL in the columns {wrong}")
            yield name, batch
        except (LookupError, ValueError) as error:
            logger.warning("Cannot read the error records in %s; they are left out: %s", folder.path(name), error)
