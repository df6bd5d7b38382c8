"""The two kinds of checkpoint: a range of computed rows, and a fragment whose data file is staged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.blobs import as_bytes
from airflow_geneva.checkpoint.ranges import Offsets, Ranges
from airflow_geneva.checkpoint.store import CheckpointStore

RowIds = npt.NDArray[np.uint64]

Run = tuple[int, int, int]
"""Rows side by side: physical offset and row id of the first, and how many."""

VALUE, OFFSET, ROW_ID = "value", "_offset", "_rowid"

_RUN = pa.struct([("offset", pa.uint32()), ("row_id", pa.uint64()), ("length", pa.uint32())])
_SPAN = pa.struct([("start", pa.uint32()), ("end", pa.uint32())])


def range_batch(values: pa.Array, offsets: Offsets, ids: RowIds, looked_at: Ranges, job_id: str) -> pa.RecordBatch:
    """The content of a range checkpoint.

    Args:
        values: output values, one per computed row.
        offsets: their physical offsets, ascending.
        ids: their row ids.
        looked_at: every row the range stands for, those a filter did not select included.
        job_id: the job that ran the UDF.
    """
    values = as_bytes(values)
    metadata = {"looked_at": json.dumps(looked_at.pairs()), "job_id": job_id}
    fields = [pa.field(VALUE, values.type), pa.field(OFFSET, pa.uint32()), pa.field(ROW_ID, pa.uint64())]
    columns = [values, pa.array(offsets.astype(np.uint32)), pa.array(ids.astype(np.uint64))]
    return pa.record_batch(columns, schema=pa.schema(fields, metadata=metadata))


@dataclass(frozen=True)
class RangeContent:
    """What a range checkpoint says, its values aside."""

    offsets: Offsets
    row_ids: RowIds
    looked_at: Ranges
    job_id: str


def read_range(store: CheckpointStore, key: str) -> RangeContent | None:
    """Read a range checkpoint without its values; None when it is damaged or gone."""
    try:
        batch = store.read(key, [OFFSET, ROW_ID])
        metadata = batch.schema.metadata or {}
        looked_at = Ranges.from_pairs(json.loads(metadata.get(b"looked_at", b"[]")))
    except (KeyError, ValueError):
        return None
    offsets = batch.column(OFFSET).to_numpy(zero_copy_only=False).astype(np.int64)
    ids = batch.column(ROW_ID).to_numpy(zero_copy_only=False)
    return RangeContent(offsets, ids, looked_at, metadata.get(b"job_id", b"").decode())


@dataclass(frozen=True)
class StagedFragment:
    """A finished data file that waits to be committed.

    Args:
        file: its name below the table's ``data/``.
        src_data_files: paths of the input and filter files it was computed from.
        output_field_ids: field ids it was written for.
        output_files: the output's data files whose old values it carries, as ``[field id, base, path]``.
        deletion: identity of the deletion file it was built under.
        live: the rows that were alive then.
        physical_rows: rows in the file.
        runs: computed rows as (offset, first row id, length).
        looked_at: every row that was due, those a filter did not select included.
        by_job: rows computed, by job.
    """

    file: str
    src_data_files: tuple[str, ...]
    output_field_ids: tuple[int, ...]
    output_files: tuple[tuple[int, int, str], ...]
    deletion: str
    live: Ranges
    physical_rows: int
    runs: tuple[tuple[int, int, int], ...]
    looked_at: Ranges
    by_job: tuple[tuple[str, int], ...]

    @property
    def computed(self) -> Ranges:
        """Physical offsets whose value in the file came out of the UDF."""
        return Ranges.from_pairs((offset, offset + length) for offset, _, length in self.runs)

    @property
    def row_ids(self) -> RowIds:
        """Row ids of the computed rows, in physical order."""
        parts = [np.arange(row_id, row_id + length, dtype=np.uint64) for _, row_id, length in self.runs]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def to_batch(self) -> pa.RecordBatch:
        head = {
            "file": self.file,
            "src_data_files": json.dumps(self.src_data_files),
            "output_field_ids": json.dumps(self.output_field_ids),
            "output_files": json.dumps(self.output_files),
            "deletion": self.deletion,
            "physical_rows": self.physical_rows,
            "by_job": json.dumps(self.by_job),
        }
        columns = {name: pa.array([value]) for name, value in head.items()}
        names = ("offset", "row_id", "length")
        columns["rows"] = pa.array([[dict(zip(names, run, strict=True)) for run in self.runs]], pa.list_(_RUN))
        for name, ranges in (("live", self.live), ("looked_at", self.looked_at)):
            columns[name] = pa.array([[{"start": a, "end": b} for a, b in ranges]], pa.list_(_SPAN))
        return pa.record_batch(columns)

    @staticmethod
    def from_batch(batch: pa.RecordBatch) -> StagedFragment:
        row = batch.to_pylist()[0]
        return StagedFragment(
            file=row["file"],
            src_data_files=tuple(json.loads(row["src_data_files"])),
            output_field_ids=tuple(json.loads(row["output_field_ids"])),
            output_files=tuple((int(a), int(b), str(c)) for a, b, c in json.loads(row["output_files"])),
            deletion=row["deletion"],
            live=Ranges.from_pairs((s["start"], s["end"]) for s in row["live"]),
            physical_rows=row["physical_rows"],
            runs=tuple((r["offset"], r["row_id"], r["length"]) for r in row["rows"]),
            looked_at=Ranges.from_pairs((s["start"], s["end"]) for s in row["looked_at"]),
            by_job=tuple((str(job), int(rows)) for job, rows in json.loads(row["by_job"])),
        )


def read_staged(store: CheckpointStore, key: str) -> StagedFragment | None:
    """Read a fragment checkpoint; None when it is damaged, gone, or of a form without ``src_data_files``."""
    try:
        return StagedFragment.from_batch(store[key])
    except (KeyError, ValueError, IndexError, TypeError):
        return None


def runs_of(offsets: Offsets, ids: RowIds) -> list[Run]:
    """Run-length form of rows with ascending offsets: (offset, first row id, length) wherever both go up by one."""
    if len(offsets) == 0:
        return []
    signed = ids.view(np.int64)
    if offsets[-1] - offsets[0] == len(offsets) - 1 and (signed[1:] - signed[:-1] == 1).all():
        return [(int(offsets[0]), int(signed[0]), len(offsets))]
    breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(signed) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(offsets)])))
    return list(zip(offsets[starts].tolist(), signed[starts].tolist(), lengths.tolist(), strict=True))


def unrolled(runs: Sequence[Run]) -> tuple[Offsets, RowIds]:
    """Offsets and row ids of rows in run-length form."""
    table = np.array(runs, np.int64).reshape(-1, 3)
    lengths = table[:, 2]
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum()), dtype=np.int64)
    offsets = within + np.repeat(table[:, 0] - before, lengths)
    return offsets, (within + np.repeat(table[:, 1] - before, lengths)).view(np.uint64)


def join_runs(groups: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[tuple[int, int, int], ...]:
    """Runs of consecutive pieces as one list, merged where one goes on where the last one ended."""
    joined: list[tuple[int, int, int]] = []
    for offset, row_id, length in sorted(run for group in groups for run in group):
        if joined:
            last_offset, last_id, last_length = joined[-1]
            if last_offset + last_length == offset and last_id + last_length == row_id:
                joined[-1] = (last_offset, last_id, last_length + length)
                continue
        joined.append((offset, row_id, length))
    return tuple(joined)
