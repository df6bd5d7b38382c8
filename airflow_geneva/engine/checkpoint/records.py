"""The two kinds of checkpoint: a range of computed rows, and a fragment with a staged data file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.engine.checkpoint.keys import FragmentKey
from airflow_geneva.engine.checkpoint.provenance import NO_FAILURES, Failures, join_columns
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.lance_io.blobs import as_bytes
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.storage.arrow_documents import from_bytes, to_bytes
from airflow_geneva.engine.storage.documents import parse

RowRuns = npt.NDArray[np.int64]
"""Rows in run-length form, of shape (n, 3): physical offset and row id of a run's first row, and the run's length."""

VALUE, OFFSET, ROW_ID = "value", "_offset", "_rowid"

_RUN = pa.struct([("offset", pa.uint32()), ("row_id", pa.uint64()), ("length", pa.uint32())])
_PLACES_A_RUN = 128
_PLAIN = ("file", "deletion", "physical_rows", "agreement", "dense")
_AS_JSON = ("src_data_files", "output_field_ids", "output_files", "by_job")
_NO_RUNS: RowRuns = np.empty((0, 3), np.int64)
_DOCUMENTS = pa.list_(pa.large_binary())
_MOST_EARLIER = 4
_SPAN = pa.struct([("start", pa.uint32()), ("end", pa.uint32())])


def range_batch(
    values: pa.Array, offsets: Offsets, ids: RowIds, filter_evaluated: Ranges, failures: Failures, agreement: str = ""
) -> pa.RecordBatch:
    """Build a range checkpoint; `filter_evaluated` has the computed rows and those that the filter did not select."""
    values = as_bytes(values)
    metadata = {
        "filter_evaluated": json.dumps(filter_evaluated.to_json()),
        "failures": failures.dumps(),
        "agreement": agreement,
    }
    fields = [pa.field(VALUE, values.type), pa.field(OFFSET, pa.uint32()), pa.field(ROW_ID, pa.uint64())]
    columns = [values, pa.array(offsets.astype(np.uint32)), pa.array(ids.astype(np.uint64))]
    return pa.record_batch(columns, schema=pa.schema(fields, metadata=metadata))


@dataclass(frozen=True)
class RangeContent:
    """The content of a range checkpoint without its values."""

    offsets: Offsets
    row_ids: RowIds
    filter_evaluated: Ranges
    failures: Failures
    agreement: str

    def within(self, start: int, end: int, part: slice) -> RangeContent:
        """Return the content for rows from `start` to `end`; `part` has the positions of the computed ones."""
        failed = ((runs, rows.within(start, end)) for runs, rows in self.failures.rows)
        columns = join_columns([self.failures.columns], Ranges.of(start, end))
        failures = Failures(self.failures.job_id, tuple((runs, rows) for runs, rows in failed if rows), columns)
        filter_evaluated = self.filter_evaluated.within(start, end)
        return RangeContent(self.offsets[part], self.row_ids[part], filter_evaluated, failures, self.agreement)


def write_range(
    store: CheckpointStore, fragment: FragmentKey, start: int, end: int, values: pa.Array, rows: RangeContent
) -> None:  # fmt: skip
    """Write rows as the checkpoint of a range; split them if a checkpoint of that range has rows that these lack."""
    key = str(fragment.range(start, end))
    there = read_range(store, key) if 0 < len(rows.filter_evaluated) < end - start else None
    if there is not None and there.agreement == rows.agreement and there.filter_evaluated - rows.filter_evaluated:
        # A running job may rely on the rows of the existing checkpoint.
        for half in np.array_split(rows.filter_evaluated.offsets(), min(len(rows.filter_evaluated), 2)):
            first, last = int(half[0]), int(half[-1]) + 1
            part = slice(*np.searchsorted(rows.offsets, [first, last]))
            write_range(store, fragment, first, last, values[part], rows.within(first, last, part))
    elif rows.filter_evaluated:
        store[key] = range_batch(
            values, rows.offsets, rows.row_ids, rows.filter_evaluated, rows.failures, rows.agreement
        )


def read_range(store: CheckpointStore, key: str) -> RangeContent | None:
    """Read a range checkpoint without its values; None if it is damaged or missing."""
    try:
        batch = store.read(key, [OFFSET, ROW_ID])
        metadata = batch.schema.metadata or {}
        filter_evaluated = Ranges.from_json(parse(metadata[b"filter_evaluated"]))
        failures = Failures.loads(metadata[b"failures"])
    except (KeyError, TypeError, ValueError):
        return None
    offsets = batch.column(OFFSET).to_numpy(zero_copy_only=False).astype(np.int64)
    ids = batch.column(ROW_ID).to_numpy(zero_copy_only=False)
    return RangeContent(offsets, ids, filter_evaluated, failures, metadata.get(b"agreement", b"").decode())


@dataclass(frozen=True, eq=False)
class StagedFragment:
    """A finished data file that is not committed yet.

    Args:
        output_files: data files of the output whose old values it copies, as ``[field id, base, path]``.
        deletion: identity of the fragment's deletion file when it was built.
        filter_evaluated: every row that was due, including rows that the filter did not select.
        failures: the job that staged it, and the rows that failed; they count as computed, with NULL.
        taken: computed rows whose values come from another version of the UDF, by that version.
        dense: whether the file holds only the computed rows, without gaps, as a view's new rows.
        nulls: positions of NULLs in the file, by blob column.
        size_bytes: size of the file; 0 if it is unknown.
        missing: of a load, the selected rows whose key its source lacks.
        earlier: what this checkpoint replaced, newest first, as far as rows were in it that are not in the fragment any
            more: another fragment may hold them now.
    """

    file: str
    src_data_files: tuple[str, ...]
    output_field_ids: tuple[int, ...]
    output_files: tuple[tuple[int, int, str], ...]
    deletion: str
    live: Ranges
    physical_rows: int
    runs: RowRuns
    filter_evaluated: Ranges
    by_job: tuple[tuple[str, int], ...]
    failures: Failures = NO_FAILURES
    taken: tuple[tuple[str, Ranges], ...] = ()
    agreement: str = ""
    dense: bool = False
    nulls: tuple[tuple[str, Ranges], ...] = ()
    size_bytes: int = 0
    missing: RowRuns = field(default_factory=lambda: _NO_RUNS)
    earlier: tuple[StagedFragment, ...] = ()

    @property
    def leaves_unchanged(self) -> bool:
        """Whether no data file was written, because the fragment's values stay as they are."""
        return not self.file

    def replacing(self, before: StagedFragment) -> StagedFragment:
        """Return the checkpoint with another one, which it replaces, among its `earlier` ones."""
        found, rows = list[StagedFragment](), self.computed
        for one in (replace(before, earlier=()), *before.earlier):
            if one.computed - rows:
                found.append(one)
                rows = rows | one.computed
        return replace(self, earlier=tuple(found[:_MOST_EARLIER]))

    @cached_property
    def computed(self) -> Ranges:
        """Physical offsets of the rows whose value in the file the UDF computed."""
        return computed_rows(self.runs)

    @property
    def row_ids(self) -> RowIds:
        """Row ids of the computed rows, in physical order."""
        return decode_runs(self.runs)[1]

    def to_batch(self) -> pa.RecordBatch:
        head = {name: getattr(self, name) for name in _PLAIN}
        head |= {name: json.dumps(getattr(self, name)) for name in _AS_JSON}
        head["size_bytes"] = self.size_bytes
        head["failures"] = self.failures.dumps()
        head["taken"] = json.dumps([[version, rows.to_json()] for version, rows in self.taken])
        head["nulls"] = json.dumps([[column, rows.to_json()] for column, rows in self.nulls])
        columns = {name: pa.array([value]) for name, value in head.items()}
        for name, runs in {"rows": self.runs, **({"missing_rows": self.missing} if len(self.missing) else {})}.items():
            stretches, bits = pack_runs(runs)
            columns[name], columns[f"{name}_among"] = _one_list(_RUN, stretches.T), pa.array([bits])
        if self.earlier:
            columns["earlier"] = pa.array([[to_bytes(one.to_batch()) for one in self.earlier]], _DOCUMENTS)
        computed = self.computed
        for name, rows in {"live": self.live, "filter_evaluated": self.filter_evaluated}.items():
            # Often equal to the computed rows, which may be very many runs; NULL then means "equal".
            columns[name] = (
                pa.nulls(1, pa.list_(_SPAN)) if rows == computed else _one_list(_SPAN, [rows.starts, rows.ends])
            )
        return pa.record_batch(columns)

    @staticmethod
    def from_batch(batch: pa.RecordBatch) -> StagedFragment:
        lists = {"rows", "missing_rows", "live", "filter_evaluated"} & set(batch.schema.names)
        row = batch.drop_columns(sorted(lists)).to_pylist()[0]
        if row.get("missing"):
            raise ValueError("an earlier version counted the missing rows, and did not say which they are")
        earlier = tuple(StagedFragment.from_batch(from_bytes(one)) for one in row.get("earlier", ()))
        runs, missing = (
            unpack_runs(_from_list(batch.column(name)), row[f"{name}_among"]) if name in lists else _NO_RUNS
            for name in ("rows", "missing_rows")
        )
        computed = computed_rows(runs)
        live, filter_evaluated = (
            Ranges.from_bounds(*_from_list(column).T) if column.null_count == 0 else computed
            for column in (batch.column("live"), batch.column("filter_evaluated"))
        )
        files, fields, outputs, jobs = (parse(row[name]) for name in _AS_JSON)
        return StagedFragment(
            **{name: row[name] for name in _PLAIN},
            src_data_files=tuple(files),
            output_field_ids=tuple(fields),
            output_files=tuple((int(a), int(b), str(c)) for a, b, c in outputs),
            by_job=tuple((str(job), int(rows)) for job, rows in jobs),
            live=live,
            runs=runs,
            filter_evaluated=filter_evaluated,
            failures=Failures.loads(row["failures"]),
            taken=_ranges_by_name(row["taken"]),
            nulls=_ranges_by_name(row["nulls"]),
            size_bytes=row["size_bytes"],
            missing=missing,
            earlier=earlier,
        )


def _ranges_by_name(text: str) -> tuple[tuple[str, Ranges], ...]:
    return tuple((str(name), Ranges.from_json(rows)) for name, rows in parse(text))


def computed_rows(runs: RowRuns) -> Ranges:
    """Return the physical offsets of the rows in run-length form."""
    return Ranges.from_bounds(runs[:, 0], runs[:, 0] + runs[:, 2])


def _one_list(item: pa.StructType, columns: Iterable[npt.NDArray[np.int64]]) -> pa.Array:
    """Build a list column of one row from the fields of its structs."""
    arrays = [pa.array(values.astype(part.type.to_pandas_dtype())) for values, part in zip(columns, item, strict=True)]
    return pa.ListArray.from_arrays([0, len(arrays[0])], pa.StructArray.from_arrays(arrays, fields=list(item)))


def _from_list(column: pa.Array) -> npt.NDArray[np.int64]:
    return np.stack([part.to_numpy(zero_copy_only=False).astype(np.int64) for part in column.flatten().flatten()], 1)


def read_staged(store: CheckpointStore, key: str) -> StagedFragment | None:
    """Read a fragment checkpoint; None if it is damaged, missing, or of a format without ``src_data_files``."""
    try:
        return StagedFragment.from_batch(store[key])
    except (LookupError, ValueError, TypeError, AttributeError):
        return None


def encode_runs(offsets: Offsets, ids: RowIds) -> RowRuns:
    """Encode rows with ascending offsets as runs: within a run, offset and row id both increase by one."""
    signed = ids.view(np.int64)
    parted = signed[1:] - signed[:-1] != 1
    if len(offsets) and offsets[-1] - offsets[0] >= len(offsets):
        parted |= offsets[1:] - offsets[:-1] != 1
    if len(offsets) and not parted.any():
        return np.array([[offsets[0], signed[0], len(offsets)]], np.int64)
    starts = np.concatenate(([0], np.flatnonzero(parted) + 1)) if len(offsets) else np.empty(0, np.int64)
    return np.stack([offsets[starts], signed[starts], np.diff(starts, append=len(offsets))], 1)


def decode_runs(runs: RowRuns) -> tuple[Offsets, RowIds]:
    """Decode runs to offsets and row ids."""
    offsets, ids = (Ranges(runs[:, at], runs[:, at] + runs[:, 2]).offsets() for at in (0, 1))
    return offsets, ids.view(np.uint64)


def merge_runs(groups: Sequence[RowRuns]) -> RowRuns:
    """Merge several groups of runs, sorted by offset; adjacent runs become one."""
    if not groups:
        return np.empty((0, 3), np.int64)
    runs = np.concatenate(groups)
    if len(runs) < 2:
        return runs
    if not (runs[1:, 0] > runs[:-1, 0]).all():
        runs = runs[np.argsort(runs[:, 0], kind="stable")]
    parted = runs[1:, 0] != runs[:-1, 0] + runs[:-1, 2]
    parted |= runs[1:, 1] != runs[:-1, 1] + runs[:-1, 2]
    if parted.all():
        # Nothing to merge, for example if every second row was computed.
        return runs
    starts = np.concatenate(([0], np.flatnonzero(parted) + 1))
    joined = runs[starts].copy()
    joined[:, 2] = np.add.reduceat(runs[:, 2], starts)
    return joined


def pack_runs(runs: RowRuns) -> tuple[RowRuns, bytes]:
    """Pack runs for storage: runs that are close together become a few longer spans and a bitmap of their offsets."""
    if len(runs) < 2:
        return runs, b""
    starts, ids, lengths = runs.T
    shift = ids - starts
    firsts = np.concatenate(([0], np.flatnonzero(shift[1:] != shift[:-1]) + 1))
    counts = np.diff(firsts, append=len(runs))
    stretches, lasts = runs[firsts], firsts + counts - 1
    stretches[:, 2] = starts[lasts] + lengths[lasts] - starts[firsts]
    places = int(stretches[:, 2].sum())
    if places > _PLACES_A_RUN * (len(runs) - len(firsts)):
        return runs, b""
    begins = starts - np.repeat(stretches[:, 0] - _before(stretches), counts)
    return stretches, np.packbits(Ranges.from_bounds(begins, begins + lengths).bitmap(0, places)).tobytes()


def unpack_runs(stretches: RowRuns, bits: bytes) -> RowRuns:
    """Restore the runs that :func:`pack_runs` packed."""
    if not bits:
        return stretches
    before = _before(stretches)
    count = int(stretches[:, 2].sum())
    chosen = np.unpackbits(np.frombuffer(bits, np.uint8), count=count).view(np.bool_)
    begins, ends = chosen.copy(), chosen.copy()
    begins[1:] &= ~chosen[:-1]
    ends[:-1] &= ~chosen[1:]
    # A run never continues across the end of a span, because the row ids do not.
    begins[before] = chosen[before]
    ends[before[1:] - 1] = chosen[before[1:] - 1]
    starts = np.flatnonzero(begins)
    counts = np.diff(np.searchsorted(starts, before), append=len(starts))
    offsets, ids = (starts + np.repeat(stretches[:, at] - before, counts) for at in (0, 1))
    return np.stack([offsets, ids, np.flatnonzero(ends) + 1 - starts], 1)


def _before(runs: RowRuns) -> Offsets:
    return np.cumsum(runs[:, 2]) - runs[:, 2]
