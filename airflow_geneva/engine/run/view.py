"""A view as the target of a job: read its rows, find staged files that fit, lay files out, and swap them in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.carried import CarriedValues
from airflow_geneva.engine.apply.isolation.runner import OpenMapper
from airflow_geneva.engine.apply.query_columns import QueryComputer, read_for
from airflow_geneva.engine.apply.reader import ReadSize, RowBatch, joint_width
from airflow_geneva.engine.apply.source_rows import SourceRows
from airflow_geneva.engine.checkpoint.provenance import RowsByColumn
from airflow_geneva.engine.checkpoint.records import RowRuns, StagedFragment, encode_runs, merge_runs
from airflow_geneva.engine.checkpoint.reuse import BrokenFile, ReusableRows
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot
from airflow_geneva.engine.commit.view_swap import (
    NewRows,
    Swapped,
    mirror_swap,
    promoted_meanwhile,
    swap_rows,
    version_of_plan,
)
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.table_versions import open_version, open_version_or_none, reporting_cleaned_up
from airflow_geneva.engine.plan.model import Plan, RefreshSpec
from airflow_geneva.engine.plan.refresh import KeptRows, plan_refresh
from airflow_geneva.engine.plan.request import RefreshRequest, cap_rows
from airflow_geneva.engine.plan.reusable_checkpoints import ReusableView
from airflow_geneva.engine.plan.shard import FragmentTask, Shard
from airflow_geneva.engine.plan.swap_plan import SwapPlan
from airflow_geneva.engine.results import DONE, FAILED, PARTIAL, BackfillResult, ShardResult
from airflow_geneva.engine.run.expectations import ValueChecks, stop_if_not_met
from airflow_geneva.engine.run.housekeeping import has_many_snapshots
from airflow_geneva.engine.run.publisher import Publisher
from airflow_geneva.engine.run.units import Computer, Target, all_staged, remove_broken, stopped_at_cap
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.definition import check_view_type
from airflow_geneva.engine.udf.of_process import find_udf
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.views.definition import FoldColumn, OutputColumn, ViewDefinition, fold_columns
from airflow_geneva.engine.views.rows import HeldRows
from airflow_geneva.engine.views.state import CommittedViewState, newest_swap, taken_back
from airflow_geneva.engine.write.data_files import (
    WINDOW_ROWS,
    CheckpointedRowsReader,
    StagedViewRows,
    ViewFileWriter,
    fit_rows,
    reorder_rows,
    view_file_schema,
)
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance
    from typing_extensions import Self

    from airflow_geneva.engine.apply.group_folds import GroupFolds
    from airflow_geneva.engine.apply.group_rows import GroupRows
    from airflow_geneva.engine.apply.shuffled_rows import ShuffleColumns, ShuffledRows

_FRESH_SECONDS = 1.0


@dataclass(frozen=True)
class ViewTarget(ReusableView, Target):
    """A view, as all units of a refresh share it; `view` is its own dataset, `source` the one that it reads."""

    shuffled: ShuffledRows | None = field(default=None, kw_only=True)
    """The source rows of groups that a shuffle brought to this task."""

    @classmethod
    def at(cls, location: TableLocation, spec: RefreshSpec, *opened: lance.LanceDataset) -> Self:
        """Open the source and the view; raise an error if one, or the planned version, is gone or was created again."""
        if opened:
            source, view = opened
        else:
            source = spec.read.location(location.options).open(spec.version)
            spec.read.check(source)
            view = location.open()
            spec.written.check(view)
        job = JobFolder.of(location.checkpoints, spec.job_id).storage
        return cls(source, spec, CheckpointStore(location.checkpoints), job, view)

    def check_names(self) -> Self:
        if why := promoted_meanwhile(self.view, self.spec):
            raise InvalidInput(
                f"{self.spec.title} (job {self.spec.job_id}) cannot be continued: {why}. Plan the refresh again; in "
                "Airflow, clear the plan task with its downstream tasks."
            )
        return self

    @contextmanager
    def computing(self, udfs: Mapping[str, UDF], open_mapper: OpenMapper) -> Iterator[Computer]:
        with QueryComputer(self.spec.definition.columns, udfs, open_mapper) as computer:
            yield computer, computer.projection

    def read(
        self,
        fragment: FragmentTask,
        live: Ranges,
        parts: Iterable[tuple[int, int]],
        reads: Sequence[str] | Mapping[str, str],
        size: ReadSize,
    ) -> Iterator[RowBatch]:
        definition, carried, running = self.spec.definition, fragment.carried, set(self.spec.all_udfs)
        assert isinstance(reads, Mapping)
        if carried is not None and carried.rows.contains(fragment.due):
            running = {name for names, _ in carried.runs for name in names}
            needed = read_for(definition.columns, running)
            reads = {alias: text for alias, text in reads.items() if alias in needed}
        if definition.grouping is None:
            rows = super().read(fragment, live, parts, reads, size)
        else:
            from airflow_geneva.engine.apply.group_columns import GroupColumns
            from airflow_geneva.engine.apply.group_rows import group_reads

            keys = group_reads(definition.grouping.keys)
            rows = super().read(fragment, live, parts, {**reads, **keys}, size)
            columns = GroupColumns.of(definition.columns, frozenset(running))
            folds = [one for one in fold_columns(definition.columns) if one.name in running]
            rows = self._group_folds(folds).add(rows, fragment.due) if folds else rows
            rows = self._group_rows.add(rows, fragment.id, fragment.due, columns)
        yield from rows if carried is None else self._carried.add(rows, carried)

    @cached_property
    def source_rows(self) -> SourceRows | None:
        grouping = self.spec.definition.grouping
        if grouping is None:
            return None
        table = self.spec.tables[1]
        return SourceRows(table.location(self.store.storage.options), table.version, tuple(grouping.order))

    @cached_property
    def rows_of_groups(self) -> lance.LanceDataset:
        """The planned version of the table whose rows a view of groups groups."""
        return self._open_planned(1)

    @property
    def shuffle_columns(self) -> ShuffleColumns:
        """What a shuffle reads of the rows of groups."""
        from airflow_geneva.engine.apply.shuffled_rows import ShuffleColumns

        definition = self.spec.definition
        assert definition.grouping is not None
        return ShuffleColumns.of(definition.grouping, definition.columns)

    def _open_planned(self, number: int) -> lance.LanceDataset:
        table = self.spec.tables[number]
        found = table.location(self.store.storage.options).open(table.version)
        table.check(found)
        return found

    @cached_property
    def _group_rows(self) -> GroupRows:
        from airflow_geneva.engine.apply.group_rows import GroupRows

        grouping = self.spec.definition.grouping
        assert grouping is not None
        source, rows = self.rows_of_groups, self._open_planned(2)
        return GroupRows(rows, source, grouping, self.spec.sizing.batch_bytes, self.shuffled)

    def _group_folds(self, columns: Sequence[FoldColumn]) -> GroupFolds:
        from airflow_geneva.engine.apply.group_folds import GroupFolds, RowsBefore

        known, before = self.spec.rows_before, None
        if known is not None:
            then = open_version_or_none(self._group_rows.rows, known[0])
            # A cleanup may have run since the plan.
            if then is not None and open_version_or_none(self._group_rows.source, known[1]) is not None:
                before = RowsBefore(then, known[1])
        return GroupFolds(self._planned_view, columns, self._group_rows, before, self.spec.sizing.batch_bytes)

    @cached_property
    def _planned_view(self) -> lance.LanceDataset:
        planned = self.spec.written.version
        return self.view if self.view.version == planned else open_version(self.view, planned)

    @cached_property
    def _carried(self) -> CarriedValues:
        definition, limit = self.spec.definition, self.spec.sizing.batch_bytes
        return CarriedValues(self._planned_view, definition.columns, definition.explode, limit)

    @property
    def output_width(self) -> float | None:
        if self.spec.definition.explode is not None:
            return None
        return joint_width([self.view.schema.field(column.name).type for column in self.spec.definition.columns])

    def stage(self, fragment: FragmentTask, held: ReusableRows) -> StagedFragment:
        writer = self.open_writer(fragment)
        due = fragment.due.offsets()
        runs: list[RowRuns] = []
        limit = self.spec.sizing.batch_bytes
        staged = StagedViewRows(self.view, self.spec.definition.explode)
        reader = CheckpointedRowsReader(self.store, held.pieces, limit, staged.read)
        at = 0
        while at < len(due):
            start = int(due[at])
            until = min(at + WINDOW_ROWS, len(due))
            end = reader.end_of_window(start, int(due[until - 1]) + 1)
            parts, rows = fit_rows(partial(reader.read, start), end - start)
            offsets = np.concatenate([part.offsets for part, _ in parts])
            order = np.argsort(offsets, kind="stable")
            ids = np.concatenate([part.row_ids for part, _ in parts])[order]
            kind = parts[0][1].type
            values = pa.concat_arrays([convert_array(values, kind) for _, values in parts])
            writer.put(rows_at(values, pa.array(order)), ids)
            runs.append(encode_runs(offsets[order], ids))
            at = int(np.searchsorted(due, start + rows))
        layout = self.layout(fragment, fragment.due, fragment.due)
        return self.record(fragment, writer, merge_runs(runs), held.by_job, (held.failed, held.failed_columns), layout)

    def can_stream(self, fragment: FragmentTask, live: Ranges, due: Ranges) -> bool:
        return True

    def open_writer(self, fragment: FragmentTask) -> ViewFileWriter:
        return ViewFileWriter(self.view, self._file_schema, self.spec.definition.explode)

    @cached_property
    def _file_schema(self) -> pa.Schema:
        return view_file_schema(self.view, self.spec.plain_blobs)

    @cached_property
    def _field_ids(self) -> tuple[int, ...]:
        return tuple(field.id() for field in self.view.lance_schema.fields())

    def layout(self, fragment: FragmentTask, live: Ranges, filter_evaluated: Ranges) -> dict[str, Any]:
        return {
            "output_field_ids": self._field_ids,
            "output_files": (),
            "live": fragment.due,
            "filter_evaluated": fragment.due,
            "dense": True,
        }


@dataclass(frozen=True)
class _StagedRows:
    """The fragments of some shards, with their staged files or None."""

    fragments: Sequence[tuple[FragmentTask, StagedFragment | None]]

    @cached_property
    def pairs(self) -> list[tuple[FragmentTask, StagedFragment]]:
        return [(fragment, staged) for fragment, staged in self.fragments if staged is not None]

    @property
    def missing(self) -> list[FragmentTask]:
        return [fragment for fragment, staged in self.fragments if staged is None]

    @property
    def rows_missing(self) -> int:
        return sum(len(fragment.due) for fragment in self.missing)

    def counts(self, job_id: str) -> dict[str, Any]:
        """Count the rows that this job computed, that other jobs computed, and that failed."""
        due = sum(len(fragment.due) for fragment, _ in self.pairs)
        ours = sum(rows for _, pair in self.pairs for job, rows in pair.by_job if job == job_id)
        failed = sum(len(pair.failures.all) for _, pair in self.pairs)
        return {"rows_computed": ours - failed, "rows_reused": due - ours, "rows_failed": failed}

    @property
    def failed(self) -> dict[str, RowsByColumn]:
        """The rows that failed in this job, by the signature of the source's fragment and by column."""
        return {task.files.signature: staged.failures.columns for task, staged in self.pairs if staged.failures.columns}


@dataclass
class ViewPublisher(Publisher):
    """Verifies the shards of a refresh one by one, and swaps the view's rows at the end, all at once."""

    spec: RefreshSpec
    _shards: dict[int, Shard] = field(default_factory=dict)
    _verified: dict[int, _StagedRows] = field(default_factory=dict)
    _swapped: Swapped = field(default_factory=Swapped)

    def commit(self, shard: Shard) -> ShardResult:
        """Check that all rows of a shard are staged; nothing becomes visible."""
        staged = self._verified[shard.index] = self._verify(shard)
        capped = stopped_at_cap(self.folder, self.saved, shard.index)
        self.uncomputed = [] if capped else [(self.target.source, fragment) for fragment in staged.missing]
        return ShardResult(
            shard.index,
            self.saved.fingerprint,
            **staged.counts(self.spec.job_id),
            rows_left=staged.rows_missing,
            fragments=len(staged.pairs),
            left_reasons=tuple((fragment.id, "not all of its rows are computed") for fragment in staged.missing),
            visible=False,
        )

    def open_for_finish(self) -> None:
        if self.spec.rows_beyond:
            return
        job = self.folder.storage
        load = partial(self.saved.load_swap, job)
        shards = (partial(self.saved.load_shard, job, index) for index in range(len(self.saved.shards)))
        targets = [lambda: self.target] if self.saved.shards else []
        self.swap, *rest = job.side_by_side(load, *shards, *targets)
        self._shards = dict(enumerate(rest[: len(self.saved.shards)]))

    def finish(
        self, committed: Sequence[ShardResult], missing: Sequence[int], failed: bool
    ) -> tuple[BackfillResult, bool]:
        """Swap the view's rows if all of them are staged; if the job failed, leave the view as it is."""
        if failed:
            return self.result(committed), False
        if self.spec.rows_beyond:
            return replace(self.result(()), state=PARTIAL, notes=(*self.saved.notes, self.spec.cap_note)), False
        job = self.folder.storage
        swap = self.swap or self.saved.load_swap(job)
        if swap.idle and self.folder.alone:
            return replace(self.result(()), state=DONE), False
        if swap.idle:
            view = self.location.open()
            self.spec.written.check(view)
            if view.version == self.spec.written.version:
                return replace(self.result(()), state=DONE), False
        result = self._swap_rows(job, swap)
        mirror = partial(mirror_swap, self.location, self._swapped)
        if self._swapped.view is None:
            self.newest = mirror()
        else:
            self.newest, self.post_commit = self._swapped.view, [mirror]
        return result, bool(self.saved.shards) and has_many_snapshots(self.location, self._swapped.snapshots)

    def result(self, committed: Iterable[ShardResult]) -> BackfillResult:
        """Return the result of a job that has made nothing visible."""
        return BackfillResult(
            self.spec.job_id,
            FAILED,
            rows_skipped=self.saved.rows_skipped,
            rows_left=sum(int(shard["rows"]) for shard in self.saved.shards) + self.spec.rows_beyond,
            version=self.spec.written.version,
            from_version=self.spec.written.version,
            notes=self.saved.notes,
        )

    def _swap_rows(self, job: Storage, swap: SwapPlan) -> BackfillResult:
        began, view, spec, saved = time.monotonic(), self.location, self.spec, self.saved
        # The source may have been created again after its rows were read.
        looks = partial(self._all_staged, job), view.open, partial(spec.read.assert_same_table, view.options)
        waits = [write.result for write in self.write_behind]
        self.write_behind.clear()
        verified = (pair for found in self._verified.values() for _, pair in found.pairs if pair.physical_rows)
        if not view.checkpoints.local and (first := next(verified, None)) is not None:
            self.target.data.describe_ahead(self.target.view, first.file)
        staged, dataset, *_ = view.checkpoints.side_by_side(*looks, *waits)
        # Rows that failed without changing the view count as another run, too.
        swap = replace(swap, advances=swap.advances or bool(staged.failed))
        result = BackfillResult(spec.job_id, DONE, rows_skipped=saved.rows_skipped, from_version=dataset.version)
        # An earlier attempt may have been killed after its swap.
        newest = newest_swap(view, dataset)
        done = newest.identity != swap.based_on
        # Later refreshes read the history only back to this swap.
        restores = [restore for restore in newest.restores if restore[0] > spec.written.version]
        notes = (*saved.notes, *taken_back(dataset, restores))
        version, why = version_of_plan(dataset, saved.fingerprint) if done else None, ""
        if version is None and staged.missing:
            shards = range(len(saved.shards))
            capped = [cap for at in shards if (cap := stopped_at_cap(self.folder, saved, at))]
            why = capped[0] if capped else "not all of its rows are computed, or a staged file was removed"
        elif version is None and not (why := promoted_meanwhile(dataset, spec)):

            @cache
            def judge() -> None:
                checks = ValueChecks(dataset, spec, spec.definition.source_database, lambda: self.target.names)
                self.checked = tuple(checks.check(pair for _, pair in staged.pairs))
                stop_if_not_met(self.checked, "The refresh of the view")

            def snapshot() -> Snapshot:
                judge()
                return swap.snapshot_with(staged.failed, spec.definition.keys)

            try:
                if not done:
                    judge()
                files = self._files(swap, staged, dataset)
                data = self.target.data
                fresh = not view.checkpoints.local and time.monotonic() - began < _FRESH_SECONDS
                opened = dataset if fresh else None
                self._swapped = swap_rows(view, spec, saved.fingerprint, swap, files, data, snapshot, opened)
                version, why = self._swapped.version, self._swapped.why
            except BrokenFile as broken:
                fragments = [fragment for fragment, pair in staged.pairs if pair.file == broken.source]
                remove_broken(self.target, broken, (str(spec.key(fragment)) for fragment in fragments))
                self._verified.clear()
                return self._swap_rows(job, swap)
        if why:
            due = sum(len(fragment.due) for fragment, _ in staged.pairs) + staged.rows_missing
            notes = (*notes, f"left for the next run: {why}")
            return replace(result, state=PARTIAL, rows_left=due, version=result.from_version, notes=notes)
        return replace(
            result,
            **staged.counts(spec.job_id),
            version=version or result.from_version,
            commits=(version,) if version else (),
            notes=notes,
        )

    def _files(self, swap: SwapPlan, staged: _StagedRows, dataset: lance.LanceDataset) -> list[NewRows]:
        """Return the files to swap in: the staged ones, or new ones in the view's order."""
        fragments, limit = [pair for _, pair in staged.pairs if pair.physical_rows], self.spec.sizing.batch_bytes
        seed, most = swap.shuffle_seed, swap.max_rows_per_fragment
        if not (self.spec.definition.keeps_row_ids and swap.gone):
            if seed is None and most is None:
                return [NewRows(pair.file, pair.physical_rows) for pair in fragments]
            return [NewRows(file, len(ids)) for file, ids in reorder_rows(dataset, fragments, seed, most, limit)]
        held, found, apart = HeldRows.of(dataset), list[NewRows](), list[StagedFragment]()
        for pair in fragments:
            known = held.row_ids_of(pair.row_ids.view(np.int64))
            if most is None and not bool(np.any((known[:-1] < 0) & (known[1:] >= 0))):
                found.append(NewRows(pair.file, pair.physical_rows, known[known >= 0]))
            else:
                apart.append(pair)
        for file, ids in reorder_rows(dataset, apart, None, most, limit, lambda ids: held.row_ids_of(ids) < 0):
            known = held.row_ids_of(ids)
            found.append(NewRows(file, len(ids), known[known >= 0]))
        return found

    def _all_staged(self, job: Storage) -> _StagedRows:
        """Return the staged rows of all shards; this process may have verified some already."""
        for index in range(len(self.saved.shards)):
            if index not in self._verified:
                shard = self._shards[index] if index in self._shards else self.saved.load_shard(job, index)
                self._verified[index] = self._verify(shard)
        return _StagedRows([found for index in sorted(self._verified) for found in self._verified[index].fragments])

    def _verify(self, shard: Shard) -> _StagedRows:
        """Find the staged rows, and stage removed files again from checkpoints."""
        target = self.target
        return _StagedRows([(fragment, staged) for fragment, _, staged in all_staged(target, list(shard.fragments))])

    @cached_property
    def target(self) -> ViewTarget:
        return replace(ViewTarget.at(self.location, self.spec, *self.opened), written={})


def load_udfs(definition: ViewDefinition) -> dict[str, UDF]:
    """Find the UDFs of a view, by column; InvalidInput if one cannot be found or imported here."""
    return {column.name: find_column_udf(definition, column) for column in definition.columns if column.udf}


def find_column_udf(definition: ViewDefinition, column: OutputColumn) -> UDF:
    """Find the UDF of a computed column of a view; InvalidInput if it cannot be found or imported here."""
    assert column.udf is not None
    advice = "Move it to a module and create the view again, or run the code that defines it here."
    return find_udf(column.udf, definition.source_database, f"view column {column.name!r}", advice)


def definitions_now(definition: ViewDefinition, udfs: Mapping[str, UDF]) -> dict[str, UdfDefinition]:
    """Return the definitions of a view's columns with the current code of its UDFs."""
    return {name: udf.definition(definition.column(name).inputs) for name, udf in udfs.items()}


def plan(
    view: TableLocation,
    definition: ViewDefinition,
    source: TableLocation,
    request: RefreshRequest,
    newest: lance.LanceDataset | None = None,
    kept: KeptRows | None = None,
) -> Plan:
    """Plan a refresh. Parameters and errors are those of :func:`airflow_geneva.engine.plan.refresh.plan_refresh`."""
    udfs = load_udfs(definition)
    code = definitions_now(definition, udfs)
    dataset = view.open() if newest is None else newest

    def shown() -> CommittedViewState:
        state = CommittedViewState(view, dataset)
        _ = state.snapshot
        return state

    state, read = view.checkpoints.side_by_side(shown, source.open)
    with reporting_cleaned_up(view, dataset):
        for name, udf in code.items():
            column = definition.column(name)
            check_view_type(view.name, name, column.type, udf, column.udf if column.field else None)
        return cap_rows(plan_refresh(view, definition, source, code, state, request, read, kept))
