"""Stage what a load brings: join the keys of a shard with the source, and write the fragments that change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.apply.reader import ReadSize, read_rows
from airflow_geneva.engine.checkpoint.records import RowRuns, StagedFragment, encode_runs, merge_runs
from airflow_geneva.engine.choices import OnMissing, RunnerName, undecided
from airflow_geneva.engine.job.folder import ShardDocuments
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at
from airflow_geneva.engine.lance_io.fragments import live_offsets
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.task_memory import return_large_buffers
from airflow_geneva.engine.load.checks import check_keys
from airflow_geneva.engine.load.delivery import ADDRESS, FOUND, ROW_ID, SourceMapping, carried_as, read_keys
from airflow_geneva.engine.load.join import join_inline
from airflow_geneva.engine.load.request import LoadRequest, check_arguments, deliver, keys_of, plan_from
from airflow_geneva.engine.load.source import LoadSource, find_source, open_source
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.shard import FragmentTask, Shard
from airflow_geneva.engine.plan.value_diff import same_values
from airflow_geneva.engine.results import ShardResult
from airflow_geneva.engine.run.column import ColumnPublisher, ColumnTarget
from airflow_geneva.engine.run.inline import open_reporter
from airflow_geneva.engine.run.runner import Runner
from airflow_geneva.engine.run.units import UnitReport
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.write.data_files import ColumnFileWriter
from airflow_geneva.errors import InvalidInput

Mask = npt.NDArray[np.bool_]
INLINE_BYTES = 2 << 30
"""Sources with larger files are loaded on Spark, unless a runner is asked for."""


def plan_load(
    location: TableLocation, request: LoadRequest, runner: str = "auto", cluster: Runner | None = None
) -> tuple[Plan, str]:
    """Choose a runner, let it check the source, and plan; return also the runner.

    Args:
        cluster: checks what is not loaded in this process; without it, this process checks what it can.

    Raises:
        InvalidInput: as `plan_from` does; or only Spark has the source, and another runner is asked for.
    """
    sizing = check_arguments(request)
    source = open_source(request.source, request.format, location.source_options)
    if runner == RunnerName.AUTO:
        runner = "spark" if source.on_spark or source.size_bytes > INLINE_BYTES else "inline"
    if runner == RunnerName.INLINE and source.on_spark:
        source.schema(location.source_options)  # which raises
    if runner == RunnerName.INLINE or cluster is None:
        return plan_from(location, request, source), runner
    search = cluster.load(sizing.concurrency)
    return plan_from(location, request, search.open_source(source), search), runner


@dataclass(frozen=True)
class LoadTarget(ColumnTarget):
    """A column into which values are loaded; `given` is the source, if this process has planned the load."""

    spec: LoadSpec
    given: LoadSource | None = None

    @property
    def load_source(self) -> LoadSource:
        return self.given or find_source(self.spec.source)

    def record_unchanged(
        self, fragment: FragmentTask, live: Ranges, rows: RowRuns, missing: RowRuns
    ) -> StagedFragment:  # fmt: skip
        """Write the checkpoint of a fragment whose values stay as they are.

        Args:
            rows: the rows whose values were found to be the wanted ones.
            missing: the rows whose key the source lacks.
        """
        staged = StagedFragment(
            file="",
            physical_rows=fragment.files.physical_rows,
            src_data_files=tuple(fragment.files.source_paths()),
            deletion=fragment.files.deletion,
            runs=rows,
            by_job=(),
            agreement=self.spec.agreement,
            missing=missing,
            **self.layout(fragment, live, live),
        )
        return self.keep(fragment, staged)


@dataclass
class LoadPublisher(ColumnPublisher):
    """Commits the shards of a load."""

    spec: LoadSpec

    @cached_property
    def target(self) -> LoadTarget:
        dataset, given = self.opened or (None, None)
        return replace(LoadTarget.at(self.location, self.spec, dataset), written={}, given=given)

    def _skipped(self, results: Sequence[ShardResult]) -> int:
        # A plan does not know which rows a load changes.
        found = sum(int(shard["rows"]) for shard in self.saved.shards) - sum(one.rows_missing for one in results)
        return found - sum(one.rows_visible + one.rows_left + one.rows_failed for one in results)


def load_shard(
    location: TableLocation,
    target: LoadTarget,
    shard: Shard,
    documents: ShardDocuments,
    on_rows: Callable[[int], None],
    runner: Runner | None = None,
) -> list[UnitReport]:
    """Stage the fragments of a shard that have no data file yet, and return a report of each.

    Args:
        runner: the cluster that joins and stages them; None: this process.
    """
    index = target.at_begin(len(shard.fragments))
    todo = [
        task for task in shard.to_apply
        if target.staged(task, index.index(task), live_offsets(target.source, task.files)) is None
    ]  # fmt: skip
    reporter = open_reporter(target.spec, shard, documents)
    reports = [UnitReport(True) for _ in range(len(shard.to_apply) - len(todo))]
    try:
        found: Iterator[int]
        if not todo:
            found = iter(())
        elif runner is not None:
            search = runner.load(target.spec.sizing.concurrency)
            delivery = _delivery_of(location, target, search.open_source(target.load_source))
            if target.spec.unchecked:
                keys = keys_of(location, target.source, target.spec.on, target.spec.where)
                check_keys(search, delivery, keys, target.spec.on_missing)
            found = search.stage(location, target.spec, delivery, todo, documents.plan, shard.index)
        else:
            found = _load_inline(target, _delivery_of(location, target, target.load_source), todo)
        for rows in found:
            reporter.rows_done += rows
            reporter.add_ready(rows)
            reporter.tick()
            on_rows(rows)
            reports.append(UnitReport(True))
    finally:
        reporter.keep()
    return reports


def load_inline(
    location: TableLocation,
    spec: LoadSpec,
    shard: Shard,
    udfs: object,
    on_rows: Callable[[int], None],
    documents: ShardDocuments,
    target: LoadTarget,
    *_waits: object,
) -> list[UnitReport]:
    """Load a shard in this process; the parameters are those of `apply_inline`."""
    return load_shard(location, target, shard, documents, on_rows)


def _delivery_of(location: TableLocation, target: LoadTarget, source: LoadSource) -> SourceMapping:
    """Return what a planned load takes from its source, which is open; `InvalidInput` if the source has changed."""
    spec = target.spec
    source.check_unchanged(location.source_options)
    theirs = source.schema(location.source_options)
    return deliver(location, target.source.schema, source, theirs, spec.on, spec.columns, spec.on_duplicate)


def _load_inline(target: LoadTarget, delivery: SourceMapping, todo: Sequence[FragmentTask]) -> Iterator[int]:
    """Stage fragments; yield the number of rows of each."""
    return_large_buffers()
    left = {one.id: one for one in todo}
    joined = join_inline(delivery, read_keys(target.source, target.spec.on, list(left), target.spec.where))
    for fragment, rows in load_fragments(target, left, joined):
        del left[fragment]
        yield rows
    for one in left.values():  # the filter selects no row of these
        yield FragmentLoader(target, one).finish()


def load_fragments(
    target: LoadTarget, tasks: Mapping[int, FragmentTask], joined: Iterable[pa.RecordBatch]
) -> Iterator[tuple[int, int]]:
    """Stage fragments from joined rows in the order of their addresses; yield the id and the rows of each."""
    loader: FragmentLoader | None = None
    for batch in joined:
        fragments = batch.column(ADDRESS).to_numpy() >> 32
        cuts = [0, *(np.flatnonzero(np.diff(fragments)) + 1).tolist(), len(fragments)]
        for start, end in pairwise(cuts):
            if start == end:
                continue
            fragment = int(fragments[start])
            if loader is None or loader.task.id != fragment:
                if loader is not None:
                    yield loader.task.id, loader.finish()
                loader = FragmentLoader(target, tasks[fragment])
            loader.put(batch.slice(start, end - start))
    if loader is not None:
        yield loader.task.id, loader.finish()


class FragmentLoader:
    """Compares joined rows of a fragment with its values; from the first difference on, it writes a data file."""

    def __init__(self, target: LoadTarget, task: FragmentTask) -> None:
        self.target = target
        self.task = task
        self.spec = target.spec
        self.output = target.output
        self.live = live_offsets(target.source, task.files)
        schema = target.source.schema
        self.kind = self.output.type(schema)
        self.size = ReadSize.of(target.source, list(self.output.columns), self.spec.sizing.batch_bytes)
        self.at = 0
        self.missing = list[RowRuns]()
        self.writer: ColumnFileWriter | None = None
        self.runs = list[RowRuns]()
        self.changed = 0

    def put(self, rows: pa.RecordBatch) -> None:
        """Take joined rows of the fragment, which come in the order of their offsets."""
        offsets = rows.column(ADDRESS).to_numpy() & 0xFFFFFFFF
        ids = rows.column(ROW_ID).to_numpy().view(np.uint64)
        if len(offsets) and (offsets[0] < self.at or (np.diff(offsets) == 0).any()):
            raise InvalidInput(
                "Several rows of the source have the same key, and had not when the load was checked: it has "
                "changed, or does not give the same rows each time. Write it to files, and load these."
            )
        found = rows.column(FOUND).to_numpy(zero_copy_only=False).astype(np.bool_)
        self.missing.append(encode_runs(offsets[~found], ids[~found]))
        values = self._values(rows)
        match OnMissing(self.spec.on_missing):
            case OnMissing.KEEP:
                replaced = found
            case OnMissing.NULL | OnMissing.ERROR:  # no row is missing, or the load has failed
                replaced = np.ones(len(found), np.bool_)
            case other:
                undecided(other)
        end = int(offsets[-1]) + 1
        for start, stop, old in self._old(self.at, end):
            low, high = np.searchsorted(offsets, [start, stop])
            part = slice(low, high)
            self._window(
                start, stop, old, offsets[part], ids[part], replaced[part], found[part], values.slice(low, high - low)
            )
        self.at = end

    def _values(self, rows: pa.RecordBatch) -> pa.Array:
        names = self.output.columns
        columns = [rows.column(f"v{at}") for at in range(len(names))]
        types = [self.target.source.schema.field(name).type for name in names]
        made = [_restored(values, kind) for values, kind in zip(columns, types, strict=True)]
        return self.output.joined(made)

    def _old(self, start: int, end: int) -> Iterator[tuple[int, int, tuple[Offsets, pa.Array] | None]]:
        """Yield windows of physical offsets that cover a range, with the values that the column has in them."""
        files = self.task.files
        if not files.output:
            yield start, end, None
            return
        at = start
        for rows in read_rows(
            self.target.source, files, self.live, (start, end), list(self.output.columns), None, self.size
        ):
            stop = min(rows.end, end)
            yield at, stop, (rows.offsets, self.output.joined(rows.columns.columns))
            at = stop
        if at < end:
            yield at, end, None

    def _window(
        self,
        start: int,
        stop: int,
        old: tuple[Offsets, pa.Array] | None,
        offsets: Offsets,
        ids: RowIds,
        replaced: Mask,
        found: Mask,
        values: pa.Array,
    ) -> None:
        before = self._at(old, offsets)
        differs = replaced & ~_same(before, values)
        if differs.any() and self.writer is None:
            self.writer = self.target.open_writer(self.task)
            for low, high, earlier in self._old(0, start):
                self.writer.put(self._dense(low, high, earlier))
        kept = (found & replaced) if self.spec.keeps_facts else differs
        self.runs.append(encode_runs(offsets[kept], ids[kept]))
        self.changed += int(differs.sum())
        if self.writer is not None:
            self.writer.put(self._dense(start, stop, old, offsets[differs], values.filter(pa.array(differs))))

    def _at(self, old: tuple[Offsets, pa.Array] | None, offsets: Offsets) -> pa.Array:
        if old is None:
            return pa.nulls(len(offsets), self.kind)
        there, values = old
        return rows_at(values, pa.array(np.searchsorted(there, offsets)))

    def _dense(
        self,
        start: int,
        stop: int,
        old: tuple[Offsets, pa.Array] | None,
        offsets: Offsets | None = None,
        values: pa.Array | None = None,
    ) -> pa.Array:
        """Return a value for each physical offset: a new one, else the old one, else NULL."""
        at = np.full(stop - start, -1, np.int64)
        parts = list[pa.Array]()
        if old is not None:
            at[old[0] - start] = np.arange(len(old[0]))
            parts.append(old[1])
        if offsets is not None and values is not None and len(offsets):
            at[offsets - start] = sum(map(len, parts)) + np.arange(len(offsets))
            parts.append(values)
        if not parts:
            return pa.nulls(stop - start, self.kind)
        every = pa.concat_arrays([convert_array(part, self.kind) for part in parts])
        return rows_at(every, pa.array(at, mask=at < 0))

    def finish(self) -> int:
        """Write the fragment's checkpoint, and its data file if a value differs; return the number of its rows."""
        runs, missing = (merge_runs([one for one in parts if len(one)]) for parts in (self.runs, self.missing))
        if self.writer is None:
            self.target.record_unchanged(self.task, self.live, runs, missing)
            return self.task.rows
        for low, high, old in self._old(self.at, self.task.files.physical_rows):
            self.writer.put(self._dense(low, high, old))
        layout = self.target.layout(self.task, self.live, self.live) | {"missing": missing}
        rows = int(runs[:, 2].sum()) if len(runs) else 0
        by_job = {self.spec.job_id: min(rows, self.changed) if not self.spec.keeps_facts else rows}
        self.target.record(self.task, self.writer, runs, by_job, (Ranges.empty(), ()), layout)
        return self.task.rows


def _same(before: pa.Array, values: pa.Array) -> Mask:
    return same_values(before, convert_array(values, before.type))


def _restored(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return joined values in the type of their column."""
    if values.type == kind:
        return values
    if values.null_count == len(values):  # the cast of such lists to a fixed size may crash in Arrow 26
        return pa.nulls(len(values), kind)
    carried = carried_as(kind)
    values = values if values.type == carried else values.cast(carried)  # of lists without a size, for example
    return convert_array(values.cast(pa.float16()) if pt.is_float16(kind) else values, kind)
