"""Run one unit of work of a backfill: compute the rows that have no checkpoint, and stage the fragment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.applier import Applier, RowWidths, StepResult
from airflow_geneva.apply.isolation.runner import open_batch_mapper
from airflow_geneva.apply.skipped_rows import SkipCount
from airflow_geneva.checkpoint.records import RowRuns, decode_runs, merge_runs
from airflow_geneva.lance_io.fragments import FragmentFiles, live_offsets
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.run.column_target import BackfillContext
from airflow_geneva.run.units import RowCount, RunUnit, Unit, UnitReport, stage_computed
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf.error_policy import Policy
from airflow_geneva.udf.shipping import UdfReference
from airflow_geneva.write.column_file import ColumnFileWriter

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF


@dataclass(frozen=True)
class UdfRunner:
    """A UDF that is ready to run in the units of one task.

    Args:
        udf: the UDF in this process.
        source: the UDF, or the reference that its mapper is opened from.
        skipped: counts skipped rows.
        widths: width estimates from the rows of its units.
    """

    udf: UDF
    source: UDF | UdfReference
    skipped: SkipCount
    widths: RowWidths = field(default_factory=RowWidths)

    @staticmethod
    def of(udf: UDF, work: JobSpec, before: Mapping[int, int], udf_reference: UdfReference | None = None) -> UdfRunner:
        """Prepare a UDF for a task.

        Args:
            before: rows that the job skipped before, by rule.
            udf_reference: what the UDF was sent as, if it was sent.
        """
        alone = udf.on_error == "fail" and udf.timeout is None
        source = udf if alone else udf_reference or UdfReference.of(udf)
        return UdfRunner(udf, source, SkipCount(udf.on_error, work.rows, before))


@dataclass(frozen=True)
class ColumnUdfBundle:
    """The UDF of a column, as it is sent to the executors."""

    udf_reference: UdfReference

    @property
    def udf_references(self) -> tuple[UdfReference, ...]:
        return (self.udf_reference,)

    def policy(self) -> Policy:
        """The UDF's error policy."""
        return self.udf_reference.open().on_error

    def open(self, location: TableLocation, work: JobSpec, before: Mapping[int, int]) -> tuple[RunUnit, SkipCount]:
        """Prepare a task; return a function that runs a unit, and the counter of skipped rows.

        Args:
            before: rows that the job skipped before, by rule.
        """
        udf_runner = UdfRunner.of(self.udf_reference.open(), work, before, self.udf_reference)
        unit_context = BackfillContext.at(location, work)
        return lambda unit, on_rows: run_unit(unit_context, unit, udf_runner, on_rows), udf_runner.skipped


def run_unit(
    unit_context: BackfillContext, unit: Unit, udf_runner: UdfRunner, on_rows: Callable[[int], None] = lambda rows: None
) -> UnitReport:
    """Compute the missing rows of a unit; a unit that owns its fragment stages it too.

    Raises:
        UdfError: the UDF failed; rows computed before are checkpointed.
        StorageError: a checkpoint or data file cannot be written.
    """
    with open_batch_mapper(udf_runner.source, unit_context.work.inputs) as mapper:
        counted = RowCount(on_rows)
        work = unit_context.work
        applier = Applier(
            unit_context.dataset,
            unit_context.store,
            unit_context.job,
            work,
            udf_runner.udf,
            mapper,
            udf_runner.skipped,
            udf_runner.widths,
            counted,
        )
        return _run_unit(unit_context, unit, applier, counted)


def _run_unit(unit_context: BackfillContext, unit: Unit, applier: Applier, counted: RowCount) -> UnitReport:
    fragment = unit.work
    live = live_offsets(unit_context.dataset, fragment.files)
    index = unit_context.index(fragment)
    if unit.whole and unit_context.staged(fragment, index, live):
        return UnitReport(fragment.id, 0, True)
    due = unit.run & live
    held = unit_context.held(fragment, index, due)
    if unit.whole and not held.pieces and not _needs_old_values(fragment.files, live, due, unit_context.work):
        _stream(unit_context, applier, fragment, live, due)
        return UnitReport(fragment.id, counted.rows, True)

    def compute(missing: Ranges) -> None:
        for _ in applier.compute(fragment, live, missing):
            pass

    if unit.whole:
        stage_computed(unit_context, fragment, due, held, compute)
    else:
        compute(due - held.done)
    return UnitReport(fragment.id, counted.rows, unit.whole)


def _needs_old_values(files: FragmentFiles, live: Ranges, due: Ranges, work: JobSpec) -> bool:
    return bool(files.output) and (work.where is not None or due != live)


def _stream(unit_context: BackfillContext, applier: Applier, fragment: FragmentWork, live: Ranges, due: Ranges) -> None:
    """Compute a whole fragment straight into its data file."""
    writer = ColumnFileWriter(unit_context.dataset, unit_context.work.column)
    data_type: pa.DataType = unit_context.dataset.schema.field(unit_context.work.column).type
    runs: list[RowRuns] = []
    looked_at: list[Ranges] = []
    failed: list[Ranges] = []
    position, rows, limit = 0, 0, unit_context.work.sizing.batch_bytes
    steps: Iterator[StepResult] = applier.compute(fragment, live, due, keep_last=False)
    for step in steps:
        if len(step.values) == step.end - position:
            writer.put(step.values)
        else:
            writer.put_slots(step.values, decode_runs(step.runs)[0], position, step.end, limit)
        runs.append(step.runs)
        looked_at.append(step.looked_at)
        failed.append(step.failed)
        rows += len(step.values)
        position = step.end
    if position < fragment.files.physical_rows:
        writer.put_slots(pa.nulls(0, data_type), np.empty(0, np.int64), position, fragment.files.physical_rows, limit)
    by_job = {unit_context.work.job_id: rows}
    unit_context.record(
        fragment, writer.finish(), live, merge_runs(runs), Ranges.union(looked_at), by_job, Ranges.union(failed)
    )  # fmt: skip
