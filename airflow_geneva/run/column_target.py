"""A column as the target of a job: where its rows are read, what fits, and how its data files are laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.applier import Applier, RowWidths, StepResult
from airflow_geneva.apply.isolation.runner import open_batch_mapper
from airflow_geneva.apply.skipped_rows import SkipCount
from airflow_geneva.checkpoint.provenance import Failures
from airflow_geneva.checkpoint.records import RowRuns, StagedFragment, decode_runs, encode_runs, merge_runs
from airflow_geneva.checkpoint.reuse import CheckpointIndex, ReusableRows, ReuseRules
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.errors import InvalidInput
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.lance_io.fragments import field_ids, live_offsets, row_ids
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import BackfillSpec, JobSpec
from airflow_geneva.plan.reusable_checkpoints import held_for_column, staged_for_column
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.run.units import RowCount, RunUnit, Unit, UnitReport, run_unit
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf.error_policy import Policy
from airflow_geneva.udf.shipping import UdfReference
from airflow_geneva.write.column_file import ColumnFileWriter, assemble

if TYPE_CHECKING:
    import lance

    from airflow_geneva.udf import UDF


@dataclass(frozen=True)
class ColumnTarget:
    """A column of a table, as all units of a backfill share it.

    Args:
        source: the table at the planned version.
        store: its checkpoints.
        work: the job.
        job: the job's folder.
    """

    source: lance.LanceDataset
    store: CheckpointStore
    work: BackfillSpec
    job: Storage

    @staticmethod
    def at(location: TableLocation, work: BackfillSpec) -> ColumnTarget:
        """Open the table, its checkpoints and the job's folder.

        Raises:
            InvalidInput: the table or its planned version does not exist any more.
            TableRemade: the table was dropped and created again.
        """
        checkpoints = location.checkpoints
        job = JobFolder.of(checkpoints, work.job_id).storage
        try:
            source = location.open(work.version)
        except InvalidInput as error:
            # If the whole table is unreachable or was created again, raise that error instead.
            location.open()
            work.read.look(location.options)
            raise InvalidInput(
                f"Version {work.version} of table {work.table_name!r}, on which column {work.column!r} was planned, "
                "was cleaned up. Checkpoints are kept. Clear the plan task with its downstream tasks; outside of "
                "Airflow, run the backfill again."
            ) from error
        work.read.check(source)
        return ColumnTarget(source, CheckpointStore(checkpoints), work, job)

    @cached_property
    def reuse_rules(self) -> ReuseRules:
        return self.work.reuse_rules

    @property
    def output_fields(self) -> tuple[int, ...]:
        return field_ids(self.source, self.work.column)

    def index(self, fragment: FragmentWork) -> CheckpointIndex:
        return CheckpointIndex(
            self.store, self.reuse_rules, [fragment.place, *(ancestor.place for ancestor in fragment.ancestors)]
        )

    def staged(self, fragment: FragmentWork, index: CheckpointIndex, live: Ranges) -> StagedFragment | None:
        """Return the fragment's staged data file if it can be committed as it is."""
        return staged_for_column(self.source, self.work, fragment, index, live)

    def held(self, fragment: FragmentWork, index: CheckpointIndex, wanted: Ranges) -> ReusableRows:
        """Return the fragment's computed rows that the store has."""
        return held_for_column(self.source, self.work, fragment, index, wanted)

    def stage(self, fragment: FragmentWork, held: ReusableRows) -> StagedFragment:
        """Assemble a fragment's data file from checkpoints and old values.

        Raises:
            BrokenFile: a checkpoint or staged file is damaged, or was removed meanwhile.
        """
        live, limit = live_offsets(self.source, fragment.files), self.work.sizing.batch_bytes
        parts = assemble(self.source, self.store, fragment.files, live, self.work.column, held.pieces, limit)
        writer = ColumnFileWriter(self.source, self.work.column)
        for part in parts:
            writer.put(part)
        offsets, ids = row_ids(self.source, fragment.id)
        computed = held.computed
        mask = computed.mask(offsets)
        runs = merge_runs([encode_runs(offsets[mask], ids[mask])])
        taken = held.taken(self.work.udf_version)
        return self.record(fragment, writer.finish(), live, runs, held.done & live, held.by_job, held.failed, taken)

    def can_stream(self, fragment: FragmentWork, live: Ranges, due: Ranges) -> bool:
        """Whether the computed rows alone make the data file, without values that the column has."""
        return not fragment.files.output or (self.work.where is None and due == live)

    def stream(self, steps: Iterator[StepResult], fragment: FragmentWork, live: Ranges) -> None:
        """Write computed rows straight into the data file of a whole fragment."""
        writer = ColumnFileWriter(self.source, self.work.column)
        data_type: pa.DataType = self.source.schema.field(self.work.column).type
        runs: list[RowRuns] = []
        looked_at: list[Ranges] = []
        failed: list[Ranges] = []
        position, rows, limit = 0, 0, self.work.sizing.batch_bytes
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
        end = fragment.files.physical_rows
        if position < end:
            writer.put_slots(pa.nulls(0, data_type), np.empty(0, np.int64), position, end, limit)
        computed, by_job = merge_runs(runs), {self.work.job_id: rows}
        self.record(fragment, writer.finish(), live, computed, Ranges.union(looked_at), by_job, Ranges.union(failed))

    def record(
        self,
        fragment: FragmentWork,
        file: str,
        live: Ranges,
        runs: RowRuns,
        looked_at: Ranges,
        by_job: Mapping[str, int],
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
class ColumnUdf:
    """The UDF of a column: in this process, or as it is sent to the executors."""

    udf: UDF | UdfReference

    @property
    def udf_references(self) -> tuple[UdfReference, ...]:
        return (self.udf if isinstance(self.udf, UdfReference) else UdfReference.of(self.udf),)

    def policy(self) -> Policy:
        """The UDF's error policy."""
        return self._here().on_error

    def prepare(self, location: TableLocation, work: JobSpec, before: Mapping[int, int]) -> tuple[RunUnit, SkipCount]:
        """Prepare a task; return a function that runs a unit, and the counter of skipped rows.

        Args:
            before: rows that the job skipped before, by rule.
        """
        assert isinstance(work, BackfillSpec)
        udf = self._here()
        alone = udf.on_error == "fail" and udf.timeout is None
        opened = udf if alone else self.udf_references[0]
        skipped, widths = SkipCount(udf.on_error, work.rows, before), RowWidths()
        target = ColumnTarget.at(location, work)

        def run(unit: Unit, on_rows: Callable[[int], None]) -> UnitReport:
            counted = RowCount(on_rows)
            with open_batch_mapper(opened, work.inputs) as mapper:
                applier = Applier(target.source, target.store, target.job, work, udf, mapper, skipped, widths, counted)
                return run_unit(target, unit, applier, counted)

        return run, skipped

    def _here(self) -> UDF:
        return self.udf.open() if isinstance(self.udf, UdfReference) else self.udf
