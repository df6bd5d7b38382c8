"""Run one unit of work of a backfill: compute the rows that have no checkpoint, and stage the fragment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.applier import Applier, Computed, Widths
from airflow_geneva.apply.isolation.runner import open_mapper
from airflow_geneva.apply.skipped_rows import SkipCount
from airflow_geneva.checkpoint.records import Runs, join_runs, unrolled
from airflow_geneva.lance_io.fragments import FragmentFiles, live_offsets
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import Work
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.run.column_target import Bench
from airflow_geneva.run.completion import stage_held
from airflow_geneva.run.units import DoUnit, RowCount, Unit, UnitReport
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf.error_policy import Policy
from airflow_geneva.udf.shipping import UdfParcel
from airflow_geneva.write.staged_file import StagedWriter

if TYPE_CHECKING:
    from airflow_geneva.udf import UDF


@dataclass(frozen=True)
class Tool:
    """A UDF that is ready to run in the units of one task.

    Args:
        udf: the UDF in this process.
        source: the UDF or parcel that its mapper is opened from.
        skipped: counts skipped rows.
        widths: width estimates from the rows of its units.
    """

    udf: UDF
    source: UDF | UdfParcel
    skipped: SkipCount
    widths: Widths = field(default_factory=Widths)

    @staticmethod
    def of(udf: UDF, work: Work, before: Mapping[int, int], parcel: UdfParcel | None = None) -> Tool:
        """Prepare a UDF for a task.

        Args:
            before: rows that the job skipped before, by rule.
            parcel: the parcel that the UDF was sent in, if any.
        """
        alone = udf.on_error == "fail" and udf.timeout is None
        source = udf if alone else parcel or UdfParcel.of(udf)
        return Tool(udf, source, SkipCount(udf.on_error, work.rows, before))


@dataclass(frozen=True)
class ColumnKit:
    """The UDF of a column, as it is sent to the executors."""

    parcel: UdfParcel

    @property
    def parcels(self) -> tuple[UdfParcel, ...]:
        return (self.parcel,)

    def policy(self) -> Policy:
        """The UDF's error policy."""
        return self.parcel.open().on_error

    def open(self, location: TableLocation, work: Work, before: Mapping[int, int]) -> tuple[DoUnit, SkipCount]:
        """Prepare a task; return a function that runs a unit, and the counter of skipped rows.

        Args:
            before: rows that the job skipped before, by rule.
        """
        tool = Tool.of(self.parcel.open(), work, before, self.parcel)
        bench = Bench.at(location, work)
        return lambda unit, on_rows: run_unit(bench, unit, tool, on_rows), tool.skipped


def run_unit(bench: Bench, unit: Unit, tool: Tool, on_rows: Callable[[int], None] = lambda rows: None) -> UnitReport:
    """Compute the missing rows of a unit; a unit that owns its fragment stages it too.

    Raises:
        UdfError: the UDF failed; rows computed before are checkpointed.
        StorageError: a checkpoint or data file cannot be written.
    """
    with open_mapper(tool.source, bench.work.inputs) as mapper:
        counted = RowCount(on_rows)
        work = bench.work
        applier = Applier(
            bench.dataset, bench.store, bench.job, work, tool.udf, mapper, tool.skipped, tool.widths, counted
        )
        return _run_unit(bench, unit, applier, counted)


def _run_unit(bench: Bench, unit: Unit, applier: Applier, counted: RowCount) -> UnitReport:
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

    def compute(missing: Ranges) -> None:
        for _ in applier.compute(fragment, live, missing):
            pass

    if unit.whole:
        stage_held(bench, fragment, due, held, compute)
    else:
        compute(due - held.done)
    return UnitReport(fragment.id, counted.rows, unit.whole)


def _needs_old_values(files: FragmentFiles, live: Ranges, due: Ranges, work: Work) -> bool:
    return bool(files.output) and (work.where is not None or due != live)


def _stream(bench: Bench, applier: Applier, fragment: FragmentWork, live: Ranges, due: Ranges) -> None:
    """Compute a whole fragment straight into its data file."""
    writer = StagedWriter(bench.dataset, bench.work.column)
    data_type: pa.DataType = bench.dataset.schema.field(bench.work.column).type
    runs: list[Runs] = []
    looked_at: list[Ranges] = []
    failed: list[Ranges] = []
    position, rows, limit = 0, 0, bench.work.sizing.batch_bytes
    steps: Iterator[Computed] = applier.compute(fragment, live, due, keep_last=False)
    for step in steps:
        if len(step.values) == step.end - position:
            writer.put(step.values)
        else:
            writer.spread(step.values, unrolled(step.runs)[0], position, step.end, limit)
        runs.append(step.runs)
        looked_at.append(step.looked_at)
        failed.append(step.failed)
        rows += len(step.values)
        position = step.end
    if position < fragment.files.physical_rows:
        writer.spread(pa.nulls(0, data_type), np.empty(0, np.int64), position, fragment.files.physical_rows, limit)
    by_job = {bench.work.job_id: rows}
    bench.record(
        fragment, writer.finish(), live, join_runs(runs), Ranges.union(looked_at), by_job, Ranges.union(failed)
    )  # fmt: skip
