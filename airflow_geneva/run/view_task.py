"""Run one unit of work of a refresh: compute rows of a source fragment, and stage them as new rows of the view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from airflow_geneva.apply.applier import Applier, RowWidths
from airflow_geneva.apply.outcome import MappedBatch, RowFailure
from airflow_geneva.apply.policy import rules_of
from airflow_geneva.apply.query_columns import QueryComputer
from airflow_geneva.apply.skipped_rows import SkipCount
from airflow_geneva.checkpoint.records import RowRuns, decode_runs, merge_runs
from airflow_geneva.errors import UdfError
from airflow_geneva.lance_io.blobs import as_bytes
from airflow_geneva.lance_io.fragments import live_offsets
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.run.units import RowCount, RunUnit, Unit, UnitReport, stage_computed
from airflow_geneva.run.view_target import RefreshContext
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf import UDF
from airflow_geneva.udf.error_policy import Policy
from airflow_geneva.udf.shipping import UdfReference
from airflow_geneva.views.definition import ViewDefinition
from airflow_geneva.write.view_file import ViewFileWriter


@dataclass(frozen=True)
class ViewUdfRunner:
    """A view's UDFs that are ready to run in the units of one task.

    Args:
        definition: the view's query.
        udfs: by column, the UDF in this process.
        skipped: counts skipped rows.
        widths: width estimates from the rows of its units.
    """

    definition: ViewDefinition
    udfs: Mapping[str, UDF]
    skipped: SkipCount
    widths: RowWidths = field(default_factory=RowWidths)

    @staticmethod
    def of(
        definition: ViewDefinition, udfs: Mapping[str, UDF], work: JobSpec, before: Mapping[int, int]
    ) -> ViewUdfRunner:
        """Prepare the UDFs for a task.

        Args:
            before: rows that the job skipped before, by rule.
        """
        return ViewUdfRunner(definition, udfs, SkipCount(_rules(udfs), work.rows, before))

    @property
    def sources(self) -> dict[str, UDF | UdfReference]:
        return {
            name: udf if udf.on_error == "fail" and udf.timeout is None else UdfReference.of(udf)
            for name, udf in self.udfs.items()
        }

    @property
    def shape(self) -> UDF | None:
        """The UDF whose batch and checkpoint sizes are used: the first one."""
        return next(iter(self.udfs.values()), None)


@dataclass(frozen=True)
class ViewUdfBundle:
    """The UDFs of a view, as they are sent to the executors.

    Args:
        definition: the view's query, as stored JSON text.
        by_column: the UDFs.
    """

    definition: str
    by_column: tuple[tuple[str, UdfReference], ...]

    @staticmethod
    def of(definition: ViewDefinition, udfs: Mapping[str, UDF]) -> ViewUdfBundle:
        return ViewUdfBundle(definition.to_json(), tuple((name, UdfReference.of(udf)) for name, udf in udfs.items()))

    @staticmethod
    def planned(query: str) -> ViewUdfBundle:
        """Return the UDFs that a plan names, in the planned versions.

        Args:
            query: the definition that the plan holds, as JSON text.
        """
        columns = ViewDefinition.from_json(query).columns
        named = ((c.name, UdfReference(c.udf.import_path, c.udf.version)) for c in columns if c.udf)
        return ViewUdfBundle(query, tuple(named))

    @property
    def udf_references(self) -> tuple[UdfReference, ...]:
        return tuple(udf_reference for _, udf_reference in self.by_column)

    def policy(self) -> Policy:
        """The rules of all UDFs, one after another."""
        return _rules({name: udf_reference.open() for name, udf_reference in self.by_column})

    def open(self, location: TableLocation, work: JobSpec, before: Mapping[int, int]) -> tuple[RunUnit, SkipCount]:
        """Prepare a task; return a function that runs a unit, and the counter of skipped rows.

        Args:
            before: rows that the job skipped before, by rule.
        """
        udfs = {name: udf_reference.open() for name, udf_reference in self.by_column}
        udf_runner = ViewUdfRunner.of(ViewDefinition.from_json(self.definition), udfs, work, before)
        unit_context = RefreshContext.at(location, work)
        return lambda unit, on_rows: run_view_unit(unit_context, unit, udf_runner, on_rows), udf_runner.skipped


def _rules(udfs: Mapping[str, UDF]) -> Policy:
    return tuple(rule for udf in udfs.values() for rule in rules_of(udf.on_error)) or "fail"


def run_view_unit(
    unit_context: RefreshContext,
    unit: Unit,
    udf_runner: ViewUdfRunner,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> UnitReport:
    """Compute the missing rows of a unit; a unit that owns its fragment stages them too.

    Raises:
        UdfError: a UDF failed; rows computed before are checkpointed.
        StorageError: a checkpoint or data file cannot be written.
    """
    with QueryComputer(udf_runner.definition.columns, udf_runner.sources) as computer:
        counted = RowCount(on_rows)
        applier = Applier(
            unit_context.source,
            unit_context.store,
            unit_context.job,
            unit_context.work,
            udf_runner.shape,
            _Rows(computer, udf_runner),
            udf_runner.skipped,
            udf_runner.widths,
            counted,
        )
        applier.reads = computer.projection
        return _run(unit_context, unit, applier, counted)


def _run(unit_context: RefreshContext, unit: Unit, applier: Applier, counted: RowCount) -> UnitReport:
    fragment = unit.work
    index = unit_context.index(fragment)
    if unit.whole and unit_context.staged(fragment, index):
        return UnitReport(fragment.id, 0, True)
    live = live_offsets(unit_context.source, fragment.files)
    held = unit_context.held(fragment, index, unit.run)
    if unit.whole and not held.pieces:
        _stream(unit_context, applier, fragment, live)
        return UnitReport(fragment.id, counted.rows, True)

    def compute(missing: Ranges) -> None:
        for _ in applier.compute(fragment, live, missing):
            pass

    if unit.whole:
        stage_computed(unit_context, fragment, unit.run, held, compute)
    else:
        compute(unit.run - held.done)
    return UnitReport(fragment.id, counted.rows, unit.whole)


def _stream(unit_context: RefreshContext, applier: Applier, fragment: FragmentWork, live: Ranges) -> None:
    """Compute the rows straight into their data file."""
    writer = ViewFileWriter(unit_context.view, unit_context.work.explode, unit_context.work.plain_blobs)
    runs: list[RowRuns] = []
    failed: list[Ranges] = []
    for step in applier.compute(fragment, live, fragment.due, keep_last=False):
        if len(step.values):
            writer.put(step.values, decode_runs(step.runs)[1])
        runs.append(step.runs)
        failed.append(step.failed)
    computed = merge_runs(runs)
    by_job = {unit_context.work.job_id: int(computed[:, 2].sum())}
    unit_context.record(fragment, writer, computed, by_job, Ranges.union(failed))


class _Rows:
    """Computes the view's columns of a batch as one struct array, which checkpoints store like a column."""

    def __init__(self, computer: QueryComputer, udf_runner: ViewUdfRunner) -> None:
        self.computer = computer
        self.first_rule: dict[str, int] = {}
        at = 0
        for name, udf in udf_runner.udfs.items():
            self.first_rule[name] = at
            at += len(rules_of(udf.on_error))

    def __call__(self, batch: pa.RecordBatch) -> MappedBatch:
        computed = self.computer.up_to_failure(batch)
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
