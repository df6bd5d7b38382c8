"""Do one unit of work: compute what the store does not have, and stage the fragment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from airflow_geneva.apply.compute import Applier, Computed
from airflow_geneva.apply.given_up import FATAL, SkipCount
from airflow_geneva.apply.guarded import open_mapper
from airflow_geneva.checkpoint.fragment import Runs, StagedFragment, join_runs, runs_of, unrolled
from airflow_geneva.checkpoint.held import Held, KeyIndex
from airflow_geneva.checkpoint.provenance import Failures
from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.checkpoint.store import CheckpointStore, LanceCheckpointStore
from airflow_geneva.checkpoint.trust import Trust
from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.job.error_records import read_errors
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.location import TableLocation
from airflow_geneva.on_error import Policy
from airflow_geneva.plan.manifest import FragmentFiles, field_ids, live_offsets, row_ids
from airflow_geneva.plan.staging import staged_fits, staged_gives_rows
from airflow_geneva.plan.values import FragmentWork, Work
from airflow_geneva.run.units import Unit
from airflow_geneva.storage import Storage
from airflow_geneva.udf_definition import UdfDefinition
from airflow_geneva.udf_parcel import UdfParcel
from airflow_geneva.write.assemble import assemble
from airflow_geneva.write.staged import StagedWriter, lay_out

if TYPE_CHECKING:
    import lance

    from airflow_geneva.udf import UDF


_MOST_BROKEN = 100


@dataclass(frozen=True)
class UnitReport:
    """What a unit did.

    Args:
        fragment: its fragment.
        rows_run: rows the UDF ran on.
        staged: whether the fragment's data file is finished.
    """

    fragment: int
    rows_run: int
    staged: bool


DoUnit: TypeAlias = Callable[[Unit, Callable[[int], None]], UnitReport]
"""Does one unit, and tells of rows as they are computed."""


@dataclass(frozen=True)
class Bench:
    """What every unit of a job works with.

    Args:
        dataset: the table at the planned version.
        store: its checkpoints.
        work: the job.
        job: the job's folder.
    """

    dataset: lance.LanceDataset
    store: CheckpointStore
    work: Work
    job: Storage

    @staticmethod
    def at(location: TableLocation, work: Work) -> Bench:
        """Lay everything out.

        Raises:
            InvalidInput: the table, or the version of it that was planned on, is gone.
        """
        checkpoints = location.checkpoints
        job = JobFolder.of(checkpoints, work.job_id).storage
        try:
            dataset = location.open(work.version)
        except InvalidInput as error:
            # With the whole table out of reach, that is what is to be said.
            location.open()
            raise InvalidInput(
                f"Version {work.version} of table {work.table_name!r}, on which column {work.column!r} was planned, "
                "was cleaned up. Checkpoints are kept. Clear the plan task with its downstream tasks; outside of "
                "Airflow, run the backfill again."
            ) from error
        return Bench(dataset, LanceCheckpointStore(checkpoints), work, job)

    @cached_property
    def trust(self) -> Trust:
        return self.work.trust(*self.work.continue_from)

    @property
    def output_fields(self) -> tuple[int, ...]:
        return field_ids(self.dataset, self.work.column)

    def index(self, fragment: FragmentWork) -> KeyIndex:
        return KeyIndex(self.store, self.trust, [fragment.place, *(ancestor.place for ancestor in fragment.ancestors)])

    def staged(self, fragment: FragmentWork, index: KeyIndex, live: Ranges) -> StagedFragment | None:
        """The fragment's staged data file, if it may be committed as it is."""
        staged = index.staged_at(fragment.place)
        if staged is None:
            return None
        settled = self.trust.settled_rows(staged, self.work.tried(fragment))
        due = fragment.due & live
        fits = staged_fits(self.dataset, staged, fragment.files, live, due, self.output_fields, settled)
        return staged if fits else None

    def held(self, fragment: FragmentWork, index: KeyIndex, wanted: Ranges) -> Held:
        """Computed rows of the fragment that the store has."""
        return index.held(
            fragment.place,
            fragment.ancestors,
            wanted,
            lambda: row_ids(self.dataset, fragment.id),
            lambda staged: staged_gives_rows(self.dataset, staged, self.work.column),
            self.work.tried(fragment),
        )

    def stage(self, fragment: FragmentWork, live: Ranges, held: Held) -> StagedFragment:
        """Put a fragment together from checkpoints and old values.

        Raises:
            KeyError: a checkpoint is gone since it was found.
        """
        parts = assemble(self.dataset, self.store, fragment.files, live, self.work.column, held.pieces)
        writer = StagedWriter(self.dataset, self.work.column)
        for part in parts:
            writer.put(part)
        offsets, ids = row_ids(self.dataset, fragment.id)
        computed = held.computed
        mask = computed.mask(offsets)
        by_job: dict[str, int] = {}
        for piece in held.pieces:
            by_job[piece.job_id] = by_job.get(piece.job_id, 0) + len(piece.offsets)
        runs = join_runs([runs_of(offsets[mask], ids[mask])])
        taken = held.taken(self.work.udf_version)
        return self.record(fragment, writer.finish(), live, runs, held.done & live, by_job, held.failed, taken)

    def record(
        self,
        fragment: FragmentWork,
        file: str,
        live: Ranges,
        runs: Runs,
        looked_at: Ranges,
        by_job: dict[str, int],
        failed: Ranges,
        taken: tuple[tuple[str, Ranges], ...] = (),
    ) -> StagedFragment:
        """Write the fragment checkpoint of a finished data file."""
        files = fragment.files
        staged = StagedFragment(
            file=file,
            src_data_files=tuple(files.source_paths()),
            output_field_ids=self.output_fields,
            output_files=files.output,
            deletion=files.deletion,
            live=live,
            physical_rows=files.physical_rows,
            runs=runs,
            looked_at=looked_at,
            by_job=tuple(sorted(by_job.items())),
            failures=Failures.next(self.work.job_id, failed, self.work.tried(fragment)),
            taken=taken,
            agreement=self.work.agreement,
        )
        self.store[str(self.work.key(fragment))] = staged.to_batch()
        return staged


@dataclass(frozen=True)
class Tool:
    """A UDF ready to be run by the units of one task.

    Args:
        udf: the UDF in this process.
        source: what its mapper is opened from.
        skipped: counts the rows that are given up.
    """

    udf: UDF
    source: UDF | UdfParcel
    skipped: SkipCount

    @staticmethod
    def of(udf: UDF, work: Work, before: Mapping[int, int], parcel: UdfParcel | None = None) -> Tool:
        """Take a UDF up.

        Args:
            before: rows of the job that were given up before, by rule.
            parcel: what the UDF came in, if it did.
        """
        alone = udf.on_error == "fail" and udf.timeout is None
        source = udf if alone else parcel or UdfParcel.of(udf)
        return Tool(udf, source, SkipCount(udf.on_error, work.rows, before))


@dataclass(frozen=True)
class ColumnKit:
    """The UDF of a column on its way to the executors."""

    parcel: UdfParcel

    @property
    def parcels(self) -> tuple[UdfParcel, ...]:
        return (self.parcel,)

    def policy(self) -> Policy:
        """The UDF's error policy."""
        return self.parcel.open().on_error

    def open(self, location: TableLocation, work: Work, before: Mapping[int, int]) -> tuple[DoUnit, SkipCount]:
        """Make ready for the units of one task; gives what does a unit, and what counts rows that are given up.

        Args:
            before: rows of the job that were given up before, by rule.
        """
        tool = Tool.of(self.parcel.open(), work, before, self.parcel)
        bench = Bench.at(location, work)
        return lambda unit, on_rows: run_unit(bench, unit, tool, on_rows), tool.skipped


def skipped_before(location: TableLocation, work: Work) -> dict[int, int]:
    """Rows of a job that earlier tries and other shards gave up, by rule; asked only where a policy has limits.

    Rows that failed in earlier jobs already do not count.
    """
    if not has_limits(work):
        return {}
    records = read_errors(location.checkpoints, work.job_id)
    new = {record.row_id: record.rule for record in records if record.rule != FATAL and record.attempt == 1}
    return dict(Counter(new.values()))


def has_limits(work: Work) -> bool:
    """Whether the UDF's policy says how many rows of a job may be given up."""
    rules = UdfDefinition.from_json(work.udf).on_error
    return not isinstance(rules, str) and any(rule.get("max_count") or rule.get("max_fraction") for rule in rules)


def run_unit(bench: Bench, unit: Unit, tool: Tool, on_rows: Callable[[int], None] = lambda rows: None) -> UnitReport:
    """Compute the missing rows of a unit; a unit that owns its fragment stages it too.

    Raises:
        UdfError: the UDF failed; what was computed before it did is kept.
        StorageError: a checkpoint or data file cannot be written.
    """
    with open_mapper(tool.source, bench.work.inputs) as mapper:
        counted = _Count(on_rows)
        work = bench.work
        applier = Applier(bench.dataset, bench.store, bench.job, work, tool.udf, mapper, tool.skipped, counted)
        return _run_unit(bench, unit, applier, counted)


def _run_unit(bench: Bench, unit: Unit, applier: Applier, counted: _Count) -> UnitReport:
    fragment = unit.work
    live = live_offsets(bench.dataset, fragment.files)
    index = bench.index(fragment)
    if unit.whole and bench.staged(fragment, index, live):
        return UnitReport(fragment.id, 0, True)
    due = unit.run & live
    held = bench.held(fragment, index, due)
    if unit.whole and not held.pieces and not _needs_old_values(fragment.files, live, due, bench.work):
        _stream(bench, applier, fragment, live, due)
        return UnitReport(fragment.id, counted.rows, True)
    for _ in applier.compute(fragment, live, due - held.done):
        pass
    if not unit.whole:
        return UnitReport(fragment.id, counted.rows, False)
    for _ in range(_MOST_BROKEN):
        held = bench.held(fragment, bench.index(fragment), due)
        try:
            bench.stage(fragment, live, held)
        except KeyError as lost:
            # Its head was readable and its values are not: without it, its rows are simply missing.
            broken = next((piece for piece in held.pieces if lost.args == (piece.source,)), None)
            if broken is None or broken.staged:
                raise _changed_meanwhile(bench, fragment, lost) from lost
            del bench.store[broken.source]
            for _ in applier.compute(fragment, live, Ranges.from_offsets(broken.offsets)):
                pass
            continue
        return UnitReport(fragment.id, counted.rows, True)
    raise _changed_meanwhile(bench, fragment, KeyError(_MOST_BROKEN))


def _changed_meanwhile(bench: Bench, fragment: FragmentWork, lost: KeyError) -> StorageError:
    return StorageError(
        f"Checkpoint {lost} of column {bench.work.column!r} changed or broke while fragment {fragment.id} was put "
        "together. Run the task again; if it says so again, run with ignore_checkpoints=True."
    )


def _needs_old_values(files: FragmentFiles, live: Ranges, due: Ranges, work: Work) -> bool:
    return bool(files.output) and (work.where is not None or due != live)


def _stream(bench: Bench, applier: Applier, fragment: FragmentWork, live: Ranges, due: Ranges) -> None:
    """Compute a whole fragment straight into its data file."""
    writer = StagedWriter(bench.dataset, bench.work.column)
    data_type: pa.DataType = bench.dataset.schema.field(bench.work.column).type
    runs: list[Runs] = []
    looked_at: list[Ranges] = []
    failed: list[Ranges] = []
    position, rows = 0, 0
    steps: Iterator[Computed] = applier.compute(fragment, live, due, keep_last=False)
    for step in steps:
        if step.start > position:
            writer.put(pa.nulls(step.start - position, data_type))
        gapless = len(step.values) == step.end - step.start
        writer.put(
            step.values if gapless else lay_out(step.values, unrolled(step.runs)[0], step.start, step.end)
        )  # fmt: skip
        runs.append(step.runs)
        looked_at.append(step.looked_at)
        failed.append(step.failed)
        rows += len(step.values)
        position = step.end
    if position < fragment.files.physical_rows:
        writer.put(pa.nulls(fragment.files.physical_rows - position, data_type))
    by_job = {bench.work.job_id: rows}
    bench.record(
        fragment, writer.finish(), live, join_runs(runs), Ranges.union(looked_at), by_job, Ranges.union(failed)
    )  # fmt: skip


@dataclass
class _Count:
    on_rows: Callable[[int], None]
    rows: int = 0

    def __call__(self, rows: int) -> None:
        self.rows += rows
        self.on_rows(rows)
