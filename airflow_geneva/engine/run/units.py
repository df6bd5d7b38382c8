"""Split a shard into units of work, each of which computes and stages rows of a column or a view."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import and_, or_
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_geneva.engine.apply.applier import StepResult
from airflow_geneva.engine.apply.batch_mapper import BatchMapper
from airflow_geneva.engine.apply.checkpoint_writer import CheckpointWriter, joint_filter_evaluated
from airflow_geneva.engine.apply.isolation.runner import OpenMapper
from airflow_geneva.engine.apply.reader import ReadSize, RowBatch, read_fragment, windows
from airflow_geneva.engine.apply.source_rows import SourceRows
from airflow_geneva.engine.checkpoint.provenance import Failures, RowsByColumn, join_columns
from airflow_geneva.engine.checkpoint.records import RowRuns, StagedFragment, merge_runs
from airflow_geneva.engine.checkpoint.reuse import BrokenFile, CheckpointIndex, ReusableRows
from airflow_geneva.engine.checkpoint.store import CheckpointStore, DelayedCheckpoints
from airflow_geneva.engine.counts import Sums
from airflow_geneva.engine.job.folder import APPLIED, JobFolder
from airflow_geneva.engine.job.speed import UdfSpeed
from airflow_geneva.engine.lance_io.filters import where_columns
from airflow_geneva.engine.lance_io.fragments import live_offsets
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.reusable_checkpoints import Reusable
from airflow_geneva.engine.plan.saved_plan import SavedPlan
from airflow_geneva.engine.plan.shard import FragmentTask, Shard
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.runtime import Future, random, time
from airflow_geneva.engine.storage.files import AT_A_TIME, Storage, in_threads
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.write.data_files import ColumnFileWriter, ViewFileWriter
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("airflow_geneva.run")
_MOST_TIMES = 4
_WAIT_SECONDS = 0.5
_LISTED_ONCE = 8
_FEWEST_TASKS, _MOST_TASKS, _TASK_SECONDS = 2, 16, 4.0


@dataclass(frozen=True)
class Unit:
    """The offsets of one fragment that a task computes; a `whole` unit also stages the fragment's data file."""

    task: FragmentTask
    run: Ranges
    whole: bool

    @property
    def rows(self) -> int:
        return len(self.run)


@dataclass(frozen=True)
class UnitReport(Sums):
    """The result of a unit.

    Args:
        staged: whether the data file exists.
        failed: number of its rows that failed.
        speed: the speed of the UDFs.
        waiting: rows that a service has not answered yet, by submission.
        notes: sentences for the job's result.
        unreadable: why a fragment cannot be read, of each whose data file is damaged.
    """

    staged: bool = field(metadata={"add": and_})
    failed: int = 0
    speed: UdfSpeed = field(default_factory=UdfSpeed)
    waiting: Mapping[str, int] = field(default_factory=dict, metadata={"add": or_})
    notes: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


StagedWriter: TypeAlias = ColumnFileWriter | ViewFileWriter
Computer: TypeAlias = tuple[BatchMapper, Sequence[str] | Mapping[str, str]]
"""A mapper of batches, and the columns that a batch needs."""


def whole_unit(task: FragmentTask) -> Unit:
    return Unit(task, task.due, not task.partial)


def stopped_at_cap(folder: JobFolder, saved: SavedPlan, shard: int) -> str | None:
    """Return why the computation of a shard stopped at a cap of its job; None if it did not."""
    applied = folder.read_shard(saved.fingerprint, shard).get(APPLIED) or {}
    return applied.get("stopped")


def tasks_per_slot(spec: JobSpec, shard: Shard, slots: int) -> int:
    """Return the number of tasks per slot: more for long jobs, so that slots idle less at the end.

    Rows may differ in cost, and a slot that has finished its tasks waits for the others. Without an earlier job the
    duration is unknown; a first job that asks for GPUs gets the most tasks.
    """
    if spec.slot_seconds is None:
        return _MOST_TASKS if spec.num_gpus else _FEWEST_TASKS
    seconds = spec.slot_seconds * shard.rows_to_run / max(spec.rows, 1) / max(slots, 1)
    return min(max(int(seconds / _TASK_SECONDS), _FEWEST_TASKS), _MOST_TASKS)


def split_into_tasks(
    fragments: Sequence[FragmentTask], sizing: Sizing, slots: int, per_slot: int = _FEWEST_TASKS
) -> list[tuple[Unit, ...]]:
    """Group fragments into tasks of about ``task_size`` rows for these slots, and split much larger fragments."""
    if not fragments:
        return []
    rows = sum(len(fragment.missing) for fragment in fragments)
    size = sizing.task_size or max(rows // max(slots, 1) // per_slot, 1)
    # Splitting costs a second pass over the fragment, so some imbalance is cheaper unless the user set a size.
    splits_above = size if sizing.task_size else 2 * size
    tasks: list[tuple[Unit, ...]] = []
    group: list[Unit] = []
    small = (len(fragment.missing) for fragment in fragments if len(fragment.missing) <= splits_above)
    grouped, left = 0, sum(max(rows, 1) for rows in small)
    tasks_left = -(-left // size)
    for fragment in _shuffled(fragments, sizing.task_shuffle_diversity):
        if len(fragment.missing) > splits_above:
            tasks.extend((part,) for part in _split(fragment, size))
            continue
        group.append(whole_unit(fragment))
        grouped += max(len(fragment.missing), 1)
        # Without a size, the remaining tasks share the remaining rows: large tasks come first, and each slot gets the
        # same number of tasks.
        if grouped >= (sizing.task_size or left / max(tasks_left, 1)):
            tasks.append(tuple(group))
            left, tasks_left = left - grouped, tasks_left - 1
            group, grouped = [], 0
    if group:
        tasks.append(tuple(group))
    return tasks


def split_fragments(tasks: Sequence[Sequence[Unit]]) -> list[FragmentTask]:
    """Return the fragments that were split over several units, and still have to be staged."""
    found = {unit.task.id: unit.task for task in tasks for unit in task if not unit.whole and not unit.task.partial}
    return [found[key] for key in sorted(found)]


def group_units(shard: Shard, spec: JobSpec, slots: int, stage: int) -> list[list[Unit]]:
    """Group a shard's units by Spark task: in stage 0 units that compute, in stage 1 units that stage split fragments.

    With several threads per slot, a group has the units of several tasks.
    """
    threads = spec.sizing.intra_applier_concurrency
    per_slot = tasks_per_slot(spec, shard, slots * threads)
    tasks = split_into_tasks(shard.to_apply, spec.sizing, slots * threads, per_slot)
    if stage:
        tasks = [(whole_unit(item),) for item in split_fragments(tasks)]
    return [[unit for task in tasks[at : at + threads] for unit in task] for at in range(0, len(tasks), threads)]


def _split(task: FragmentTask, size: int) -> list[Unit]:
    parts = -(-len(task.missing) // size)
    step = -(-len(task.missing) // parts)
    offsets = task.missing.offsets()
    cuts = [int(offsets[i]) for i in range(0, len(offsets), step)] + [int(offsets[-1]) + 1]
    return [Unit(task, task.missing.within(a, b), False) for a, b in pairwise(cuts)]


def _shuffled(fragments: Sequence[FragmentTask], diversity: int | None) -> list[FragmentTask]:
    """Take fragments from ``diversity`` stretches of the table in turn, to spread slow fragments over tasks."""
    if not diversity or diversity <= 1:
        return list(fragments)
    length = -(-len(fragments) // diversity)
    stretches = [fragments[at : at + length] for at in range(0, len(fragments), length)]
    return [stretch[i] for i in range(length) for stretch in stretches if i < len(stretch)]


@dataclass(frozen=True)
class Target(Reusable):
    """A column or a view: reads its rows, finds staged files that fit, and lays out data files."""

    store: CheckpointStore
    job: Storage
    written: dict[str, StagedFragment] | None = field(default=None, kw_only=True)
    """Fragment checkpoints that this process wrote, by key, so that its commit need not read them; None: not kept."""
    delayed: DelayedCheckpoints | None = field(default=None, kw_only=True)
    """Buffer for new fragment checkpoints; None: write each one immediately."""
    write_behind: list[Future[None]] | None = field(default=None, kw_only=True)
    """Takes the background write of the last checkpoints, for which the commit waits; None: write them immediately."""
    replaced: StagedFragment | None = field(default=None, kw_only=True)
    """The fragment checkpoint that a new one replaces, if it has rows that the fragment does not hold any more."""
    listed: CheckpointIndex | None = field(default=None, kw_only=True)
    """The checkpoints listed when a task of many fragments began; None: they are listed for each fragment."""

    def check_names(self) -> Self:
        """Return the target; `InvalidInput` if a column of a view was promoted after the plan, which has its name."""
        return self

    @abstractmethod
    def computing(self, udfs: Mapping[str, UDF], open_mapper: OpenMapper) -> AbstractContextManager[Computer]:
        """Open the UDFs, which are given by column, to compute batches."""

    def at_begin(self, fragments: int) -> Target:
        """Return the target for a task; list the checkpoints once if the task has many fragments."""
        if self.listed is not None or fragments < _LISTED_ONCE:
            return self
        return replace(self, listed=CheckpointIndex(self.store, self.spec.reuse_rules, written=self.written))

    def index(self, fragment: FragmentTask, again: bool = False) -> CheckpointIndex:
        """Return the checkpoints of a fragment; `again`: list them again."""
        if self.listed is not None and not again:
            return self.listed
        places = [fragment.place, *(ancestor.place for ancestor in fragment.ancestors)]
        return CheckpointIndex(self.store, self.spec.reuse_rules, places, self.written)

    def read(
        self,
        fragment: FragmentTask,
        live: Ranges,
        parts: Iterable[tuple[int, int]],
        reads: Sequence[str] | Mapping[str, str],
        size: ReadSize,
    ) -> Iterator[RowBatch]:
        """Read rows of a fragment, with all that the function needs of them.

        Args:
            parts: windows of physical offsets.
            reads: the columns to read; see `read_rows`.

        Raises:
            UnreadableFragment: a data file of an input is damaged.
        """
        where = self.spec.where
        inputs = [*self.spec.inputs, *where_columns(where, self.source.schema.names)]
        yield from read_fragment(self.source, fragment.files, live, parts, reads, where, size, inputs)

    def replacing(self, staged: StagedFragment | None, live: Ranges) -> Target:
        """Return the target to stage a fragment again, whose rows in the earlier file may be in other fragments now."""
        lost = staged is not None and bool(staged.computed - live)
        return replace(self, replaced=staged, delayed=None) if lost else self

    @property
    def source_rows(self) -> SourceRows | None:
        """The rows of the source of a view of groups, for functions that take iterators of batches."""
        return None

    @property
    @abstractmethod
    def output_width(self) -> float | None:
        """Bytes that the computed values of every row take in memory; None if rows differ."""

    @abstractmethod
    def stage(self, fragment: FragmentTask, held: ReusableRows) -> StagedFragment:
        """Assemble the fragment's data file; `BrokenFile` if a file is damaged, or was removed meanwhile."""

    @abstractmethod
    def can_stream(self, fragment: FragmentTask, live: Ranges, due: Ranges) -> bool:
        """Whether the data file needs only the computed rows, and no existing values of the column."""

    @abstractmethod
    def open_writer(self, fragment: FragmentTask) -> StagedWriter: ...

    @abstractmethod
    def layout(self, fragment: FragmentTask, live: Ranges, filter_evaluated: Ranges) -> dict[str, Any]:
        """Return the fields of a fragment checkpoint that differ for a column and a view."""

    def stream(self, steps: Iterable[StepResult], fragment: FragmentTask, live: Ranges) -> StagedFragment:
        """Write computed rows straight into the data file of a whole fragment."""
        began, writer = time.monotonic(), self.open_writer(fragment)
        done = list[StepResult]()
        for step in steps:
            writer.put_step(step.values, step.runs, step.row_ids, step.end)
            done.append(step.without_rows())
        computed = merge_runs([step.runs for step in done])
        by_job = {self.spec.job_id: int(computed[:, 2].sum())}
        layout = self.layout(fragment, live, joint_filter_evaluated(done, computed))
        failed, columns = Ranges.union(step.failed for step in done), join_columns(one.failed_columns for one in done)
        return self.record(fragment, writer, computed, by_job, (failed, columns), layout, began)

    def record(
        self,
        fragment: FragmentTask,
        writer: StagedWriter,
        runs: RowRuns,
        by_job: Mapping[str, int],
        failed: tuple[Ranges, RowsByColumn],
        layout: Mapping[str, Any],
        began: float | None = None,
    ) -> StagedFragment:
        """Finish a data file and write its fragment checkpoint; delay the checkpoint of rows computed since `began`.

        Args:
            failed: the rows that failed, and those of a view by column.
        """
        staged = StagedFragment(
            file=writer.finish(),
            physical_rows=writer.rows,
            src_data_files=tuple(fragment.files.source_paths()),
            deletion=fragment.files.deletion,
            runs=runs,
            by_job=tuple(sorted(by_job.items())),
            failures=Failures.next(self.spec.job_id, failed[0], self.spec.tried(fragment), failed[1]),
            agreement=self.spec.agreement,
            nulls=writer.file.nulls,
            size_bytes=writer.file.size_bytes,
            **layout,
        )
        self.data.add(writer.file)
        return self.keep(fragment, staged, writer.rows, began)

    def keep(
        self, fragment: FragmentTask, staged: StagedFragment, rows: int = 0, began: float | None = None
    ) -> StagedFragment:  # fmt: skip
        """Write a fragment checkpoint; delay that of rows computed since `began`."""
        key = str(self.spec.key(fragment))
        if self.replaced is not None:
            staged = staged.replacing(self.replaced)
        if self.delayed is None or began is None:
            self.store[key] = staged.to_batch()
        else:
            self.delayed.add(key, staged.to_batch(), rows, began)
        if self.written is not None:
            self.written[key] = staged
        return staged


@dataclass(frozen=True)
class OpenedUnit:
    """A unit with its rows and files in the store.

    Args:
        held: rows that are in checkpoints.
        staged: the fragment's data file, if it exists.
        streams: whether the data file needs only the rows that this unit computes.
    """

    target: Target
    unit: Unit
    live: Ranges
    held: ReusableRows
    staged: StagedFragment | None
    streams: bool

    @property
    def due(self) -> Ranges:
        return self.unit.run & self.live

    @cached_property
    def missing(self) -> Ranges:
        if self.staged is not None:
            return Ranges.empty()
        return self.due if self.streams else self.due - self.held.done

    def rows(self, reads: Sequence[str] | Mapping[str, str], size: ReadSize) -> Iterator[RowBatch]:
        """Read the rows to compute."""
        return self.target.read(self.unit.task, self.live, windows(self.missing), reads, size)

    def keep(self, steps: Iterable[StepResult], checkpoints: CheckpointWriter) -> UnitReport | None:
        """Keep computed rows; a whole unit also stages its fragment. Return None if rows are missing at the end."""
        target, fragment, staged = self.target, self.unit.task, self.staged
        if staged is None and self.streams:
            with closing(checkpoints.keep(steps, keep_last=False)) as kept:
                staged = target.stream(kept, fragment, self.live)
        elif staged is None:
            for _ in checkpoints.keep(steps):
                pass
            if not self.unit.whole:
                return UnitReport(False)
            held = self.held
            if self.missing:
                held = target.held(fragment, target.index(fragment, again=True), self.due)
            staged = stage_computed(target, fragment, self.due, held)
        return None if staged is None else UnitReport(True, len(staged.failures.all))


_NOTHING_HELD = ReusableRows((), Ranges.empty())


def open_unit(target: Target, unit: Unit, again: bool = False) -> OpenedUnit:
    """Look up the rows and files of a unit in the store; `again`: list its checkpoints again."""
    fragment = unit.task
    live = live_offsets(target.source, fragment.files)
    index = target.index(fragment, again)
    if index.is_staged(fragment.place):
        # A pack would not replace a checkpoint that is a file of its own.
        target = replace(target, delayed=None)
    if unit.whole and (there := target.staged(fragment, index, live)):
        return OpenedUnit(target, unit, live, _NOTHING_HELD, there, False)
    target = target.replacing(index.staged_at(fragment.place), live)
    due = unit.run & live
    held = target.held(fragment, index, due)
    streams = unit.whole and not held.pieces and target.can_stream(fragment, live, due)
    return OpenedUnit(target, unit, live, held, None, streams)


def is_shard_staged(target: Target, shard: Shard) -> bool:
    return all(staged is not None for _, _, staged in _look(target, shard.to_apply))


def staged_or_restaged(target: Target, fragment: FragmentTask, index: CheckpointIndex) -> StagedFragment | None:
    """Return a fragment's staged data file; stage it again from checkpoints if it was removed or does not fit."""
    live = live_offsets(target.source, fragment.files)
    return target.staged(fragment, index, live) or _restaged(target, fragment, index, live)


def _restaged(
    target: Target, fragment: FragmentTask, index: CheckpointIndex, live: Ranges
) -> StagedFragment | None:  # fmt: skip
    due = fragment.due & live
    held = target.held(fragment, index, due)
    return stage_computed(target.replacing(index.staged_at(fragment.place), live), fragment, due, held)


def all_staged(
    target: Target, fragments: Sequence[FragmentTask]
) -> list[tuple[FragmentTask, CheckpointIndex, StagedFragment | None]]:
    """Return each fragment with its checkpoints and the result of `staged_or_restaged`."""
    return [
        (fragment, index, staged or _restaged(target, fragment, index, live))
        for fragment, (index, live, staged) in zip(fragments, _look(target, fragments), strict=True)
    ]


def _look(
    target: Target, fragments: Sequence[FragmentTask]
) -> list[tuple[CheckpointIndex, Ranges, StagedFragment | None]]:
    """Find each fragment's checkpoints and its staged data file, in parallel."""
    target = target.at_begin(len(fragments))

    def look(fragment: FragmentTask) -> tuple[CheckpointIndex, Ranges, StagedFragment | None]:
        index, live = target.index(fragment), live_offsets(target.source, fragment.files)
        return index, live, target.staged(fragment, index, live)

    return in_threads(look, fragments, 1 if target.store.storage.local else AT_A_TIME)


def stage_computed(
    target: Target, fragment: FragmentTask, wanted: Ranges, held: ReusableRows
) -> StagedFragment | None:  # fmt: skip
    """Stage a fragment from its rows in the store; None if some are missing."""
    times = Counter[str]()
    while not wanted - held.done:
        try:
            return target.stage(fragment, held)
        except BrokenFile as broken:
            remove_broken(target, broken, {piece.key for piece in held.pieces if piece.source == broken.source})
            times[broken.source] += 1
            pause_before(times[broken.source], fragment, broken.source)
        held = target.held(fragment, target.index(fragment, again=True), wanted)
    return None


def pause_before(tries: int, fragment: FragmentTask, why: str) -> None:
    """Wait before a fragment's rows, which others replaced, are looked up again; fail after too many times."""
    if tries > _MOST_TIMES:
        raise StorageError(
            f"Checkpoints of fragment {fragment.id} are replaced by other jobs of this column or view, or damaged, "
            f"again and again: {why}, {tries} times. Run the task again when no other job of it runs; if the error "
            "returns, check the disk, or run with ignore_checkpoints=True."
        )
    time.sleep(_WAIT_SECONDS * (tries - 1) * random.uniform(0.5, 1.5))


def remove_broken(target: Target, broken: BrokenFile, keys: Iterable[str]) -> None:
    """Remove the checkpoints that name a broken file, unless it was replaced, so that its rows count as missing."""
    if broken.__cause__ is not None:
        logger.warning("Cannot read %s; its rows count as missing: %s", broken.source, broken.__cause__)
        for key in keys:
            del target.store[key]
            if target.written is not None:
                target.written.pop(key, None)
