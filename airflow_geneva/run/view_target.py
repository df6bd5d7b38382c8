"""A view as the target of a job: where its rows are read, what fits, and how its data files are laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.apply.applier import Applier, RowWidths, StepResult
from airflow_geneva.apply.outcome import MappedBatch, RowFailure
from airflow_geneva.apply.query_columns import QueryComputer
from airflow_geneva.apply.skipped_rows import SkipCount
from airflow_geneva.checkpoint.provenance import Failures
from airflow_geneva.checkpoint.records import RowRuns, StagedFragment, decode_runs, encode_runs, merge_runs
from airflow_geneva.checkpoint.reuse import CheckpointIndex, ReusableRows, ReuseRules
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.errors import UdfError
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.lance_io.arrays import convert_array
from airflow_geneva.lance_io.blobs import as_bytes
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import JobSpec, RefreshSpec
from airflow_geneva.plan.reusable_checkpoints import held_for_view, staged_for_view
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.run.units import RowCount, RunUnit, Unit, UnitReport, run_unit
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf import UDF
from airflow_geneva.udf.error_policy import Policy, rules_of
from airflow_geneva.udf.shipping import UdfReference
from airflow_geneva.views.definition import ViewDefinition
from airflow_geneva.write.column_file import WINDOW_ROWS, CheckpointedRowsReader, fit_rows
from airflow_geneva.write.view_file import ViewFileWriter, own_values

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True)
class ViewTarget:
    """A view, as all units of a refresh share it.

    Args:
        source: the source at the planned version.
        view: the view.
        store: the view's checkpoints.
        work: the job.
        job: the job's folder.
    """

    source: lance.LanceDataset
    view: lance.LanceDataset
    store: CheckpointStore
    work: RefreshSpec
    job: Storage

    @staticmethod
    def at(location: TableLocation, work: RefreshSpec) -> ViewTarget:
        """Open the source, the view, its checkpoints and the job's folder.

        Raises:
            InvalidInput: the source, the view, or the planned version of the source does not exist any more.
            TableRemade: the source or the view was dropped and created again.
        """
        source = TableLocation(work.source, work.read.name, location.options).open(work.version)
        work.read.check(source)
        view = location.open()
        work.written.check(view)
        job = JobFolder.of(location.checkpoints, work.job_id).storage
        return ViewTarget(source, view, CheckpointStore(location.checkpoints), work, job)

    @cached_property
    def reuse_rules(self) -> ReuseRules:
        return self.work.reuse_rules

    def index(self, fragment: FragmentWork) -> CheckpointIndex:
        return CheckpointIndex(self.store, self.reuse_rules, [fragment.place])

    def staged(self, fragment: FragmentWork, index: CheckpointIndex, live: Ranges) -> StagedFragment | None:
        """Return the fragment's staged rows if they can be swapped in as they are."""
        return staged_for_view(self.view, self.work, fragment, index)

    def held(self, fragment: FragmentWork, index: CheckpointIndex, wanted: Ranges) -> ReusableRows:
        """Return the fragment's computed rows that the store has."""
        return held_for_view(self.source, self.view, self.work, fragment, index, wanted)

    def stage(self, fragment: FragmentWork, held: ReusableRows) -> StagedFragment:
        """Assemble the rows from checkpoints.

        Raises:
            BrokenFile: a checkpoint or staged file is damaged, or was removed meanwhile.
        """
        writer = ViewFileWriter(self.view, self.work.definition.explode, self.work.plain_blobs)
        due = fragment.due.offsets()
        runs: list[RowRuns] = []
        limit = self.work.sizing.batch_bytes
        reader = CheckpointedRowsReader(self.view, self.store, held.pieces, limit, own_values)
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
            writer.put(values.take(pa.array(order)), ids)
            runs.append(encode_runs(offsets[order], ids))
            at = int(np.searchsorted(due, start + rows))
        return self.record(fragment, writer, merge_runs(runs), held.by_job, held.failed)

    def can_stream(self, fragment: FragmentWork, live: Ranges, due: Ranges) -> bool:
        """Whether the computed rows alone make the data file: always."""
        return True

    def stream(self, steps: Iterator[StepResult], fragment: FragmentWork, live: Ranges) -> None:
        """Write computed rows straight into their data file."""
        writer = ViewFileWriter(self.view, self.work.definition.explode, self.work.plain_blobs)
        runs: list[RowRuns] = []
        failed: list[Ranges] = []
        for step in steps:
            if len(step.values):
                writer.put(step.values, decode_runs(step.runs)[1])
            runs.append(step.runs)
            failed.append(step.failed)
        computed = merge_runs(runs)
        by_job = {self.work.job_id: int(computed[:, 2].sum())}
        self.record(fragment, writer, computed, by_job, Ranges.union(failed))

    def record(
        self,
        fragment: FragmentWork,
        writer: ViewFileWriter,
        runs: RowRuns,
        by_job: Mapping[str, int],
        failed: Ranges,
    ) -> StagedFragment:
        """Finish the data file, and write the fragment checkpoint that names it."""
        files = fragment.files
        staged = StagedFragment(
            file=writer.finish(),
            src_data_files=tuple(files.source_paths()),
            output_field_ids=tuple(field.id() for field in self.view.lance_schema.fields()),
            output_files=(),
            deletion=files.deletion,
            live=fragment.due,
            physical_rows=writer.rows,
            runs=runs,
            looked_at=fragment.due,
            by_job=tuple(sorted(by_job.items())),
            failures=Failures.next(self.work.job_id, failed, self.work.tried(fragment)),
            agreement=self.work.agreement,
            dense=True,
        )
        self.store[str(self.work.key(fragment))] = staged.to_batch()
        return staged


@dataclass(frozen=True)
class ViewUdfs:
    """The UDFs of a view: in this process, or as they are sent to the executors.

    Args:
        definition: the view's query, as stored JSON text.
        by_column: the UDFs.
    """

    definition: str
    by_column: tuple[tuple[str, UDF | UdfReference], ...]

    @staticmethod
    def of(definition: ViewDefinition, udfs: Mapping[str, UDF]) -> ViewUdfs:
        return ViewUdfs(definition.to_json(), tuple(udfs.items()))

    @staticmethod
    def planned(query: str) -> ViewUdfs:
        """Return the UDFs that a plan names, in the planned versions.

        Args:
            query: the definition that the plan holds, as JSON text.
        """
        columns = ViewDefinition.from_json(query).columns
        named = ((c.name, UdfReference(c.udf.import_path, c.udf.version)) for c in columns if c.udf)
        return ViewUdfs(query, tuple(named))

    @property
    def udf_references(self) -> tuple[UdfReference, ...]:
        return tuple(udf if isinstance(udf, UdfReference) else UdfReference.of(udf) for _, udf in self.by_column)

    def sent(self) -> ViewUdfs:
        """The same UDFs as they are sent to the executors."""
        names = (name for name, _ in self.by_column)
        return ViewUdfs(self.definition, tuple(zip(names, self.udf_references, strict=True)))

    def policy(self) -> Policy:
        """The rules of all UDFs, one after another."""
        return _rules(self._here())

    def prepare(self, location: TableLocation, work: JobSpec, before: Mapping[int, int]) -> tuple[RunUnit, SkipCount]:
        """Prepare a task; return a function that runs a unit, and the counter of skipped rows.

        Args:
            before: rows that the job skipped before, by rule.
        """
        assert isinstance(work, RefreshSpec)
        definition, udfs = ViewDefinition.from_json(self.definition), self._here()
        opened = {
            name: udf if udf.on_error == "fail" and udf.timeout is None else UdfReference.of(udf)
            for name, udf in udfs.items()
        }
        # Batch and checkpoint sizes are those of the first UDF.
        first = next(iter(udfs.values()), None)
        skipped, widths = SkipCount(_rules(udfs), work.rows, before), RowWidths()
        target = ViewTarget.at(location, work)

        def run(unit: Unit, on_rows: Callable[[int], None]) -> UnitReport:
            counted = RowCount(on_rows)
            with QueryComputer(definition.columns, opened) as computer:
                compute = _Rows(computer, udfs)
                applier = Applier(
                    target.source, target.store, target.job, work, first, compute, skipped, widths, counted
                )
                applier.reads = computer.projection
                return run_unit(target, unit, applier, counted)

        return run, skipped

    def _here(self) -> dict[str, UDF]:
        return {name: udf.open() if isinstance(udf, UdfReference) else udf for name, udf in self.by_column}


def _rules(udfs: Mapping[str, UDF]) -> Policy:
    return tuple(rule for udf in udfs.values() for rule in rules_of(udf.on_error)) or "fail"


class _Rows:
    """Computes the view's columns of a batch as one struct array, which checkpoints store like a column."""

    def __init__(self, computer: QueryComputer, udfs: Mapping[str, UDF]) -> None:
        self.computer = computer
        self.first_rule: dict[str, int] = {}
        at = 0
        for name, udf in udfs.items():
            self.first_rule[name] = at
            at += len(rules_of(udf.on_error))

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        computed = self.computer(batch, keep_before=True)
        rows = computed.rows
        values = pa.StructArray.from_arrays([as_bytes(column) for column in rows.columns], rows.schema.names)
        failures = tuple(sorted(self._failures(computed.mapped), key=lambda failure: failure.index))
        if (error := computed.failure) is not None:
            raise UdfError(str(error), error.row_index, values, failures, error.column) from error.__cause__
        return MappedBatch(values, failures, batch.num_rows)

    def _failures(self, mapped: Mapping[str, MappedBatch]) -> Iterator[RowFailure]:
        seen: set[int] = set()
        for name, outcome in mapped.items():
            for failure in outcome.failures:
                # A row is listed only for the first column that failed on it.
                if failure.index not in seen:
                    seen.add(failure.index)
                    yield replace(failure, rule=failure.rule + self.first_rule[name], column=name)
