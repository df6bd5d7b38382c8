"""Estimate the cost of a plan from earlier jobs, or from a sample of rows that is computed and timed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.apply.reader import ReadSize
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.job.estimate import Call, Estimate, Size
from airflow_geneva.engine.lance_io.arrays import single_batch
from airflow_geneva.engine.lance_io.blobs import as_bytes
from airflow_geneva.engine.lance_io.fragments import live_offsets
from airflow_geneva.engine.lance_io.row_ranges import Ranges, RowIds
from airflow_geneva.engine.limits.calls import calling
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.plan.model import Plan, RefreshSpec
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.run.choice import INLINE_BELOW_SECONDS, choose_runner
from airflow_geneva.engine.run.prepare import Udfs, computing, open_target, ready_to_open
from airflow_geneva.engine.run.runner import Runner
from airflow_geneva.engine.run.units import Target
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput, UdfError

ERROR = "error"
_CALLS = 3
_FRAGMENTS = 4


@dataclass
class ComputedSample:
    """Computed rows: their inputs, values and errors, and the time of the calls.

    Args:
        names: the source's column names, by their names in `inputs`.
        reported: the cost that the calls reported.
    """

    column: str
    inputs: list[pa.RecordBatch] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)
    row_ids: list[int] = field(default_factory=list)
    values: list[pa.Array] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    reported: float = 0.0

    def table(self) -> pa.Table:
        """Return a table of inputs, values and, last, errors; the values of a view have one column per view column."""
        if not self.inputs:
            return pa.table({ERROR: pa.array([], pa.string())})
        kind = next((part.type for part in self.values if not pa.types.is_null(part.type)), pa.null())
        parts = [part if part.type == kind else pa.nulls(len(part), kind) for part in self.values]
        values = pa.Table.from_arrays([pa.chunked_array(parts, kind)], [self.column or "value"])
        if not self.column and pa.types.is_struct(kind):
            values = values.flatten().rename_columns([part.name for part in kind])
        # Fragments of a view on which only some UDFs run were read without the inputs of the others.
        read = {name: text for name, text in self.names.items() if all(name in one.schema.names for one in self.inputs)}
        inputs = pa.Table.from_batches([one.select(list(read)) for one in self.inputs])
        inputs = inputs.rename_columns(list(read.values()))
        inputs = inputs.select([name for name in inputs.schema.names if name not in values.schema.names])
        for name in values.schema.names:
            inputs = inputs.append_column(values.schema.field(name), values.column(name))
        raised = ERROR if ERROR not in inputs.schema.names else f"{ERROR}.raised"
        return inputs.append_column(raised, pa.array(self.errors, pa.string()))


def check_rows(name: str, rows: Any) -> int:
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise InvalidInput(f"{name}={rows!r} is not valid: give a number of rows of at least 1.")
    return rows


def sample_plan(plan: Plan, location: TableLocation, udfs: Udfs, rows: int, also: Sequence[str] = ()) -> ComputedSample:
    """Compute some of a plan's due rows, taken from several fragments.

    Args:
        also: columns to read besides the inputs of a column.

    Raises:
        InvalidInput: a UDF cannot be loaded here.
    """
    tasks = [task for shard in plan.shards for task in shard.to_apply[:_FRAGMENTS] if task.missing][:_FRAGMENTS]
    spec, target, loaded = plan.spec, open_target(location, plan.spec), udfs.here()
    sample = ComputedSample(spec.column or "")
    meter = Meter()
    with (
        calling(location, meter),
        computing(target, loaded, ready_to_open(loaded)) as (compute, inputs),
    ):
        reads = [*inputs, *also] if also else inputs
        named = inputs if isinstance(inputs, Mapping) else {name: f"`{name}`" for name in reads}
        # SQL columns of a view count as values.
        sample.names = {name: text.strip("`") for name, text in named.items() if text.startswith("`")}

        def call(batch: pa.RecordBatch) -> MappedBatch:
            return compute(batch.select(list(inputs)) if also else batch)

        left = rows
        # The smallest fragments come first, so that larger ones make up for their missing rows.
        for at, fragment in enumerate(sorted(tasks, key=lambda fragment: len(fragment.missing))):
            share = -(-left // (len(tasks) - at))
            for batch, ids in _read(target, fragment, reads, share, at / len(tasks)):
                left -= batch.num_rows
                sample.row_ids += ids.tolist()
                # The first row gets its own call, because that call may load a model.
                step = -(-rows // _CALLS)
                cuts = [] if sample.calls else [1, *range(1 + step, batch.num_rows, step)]
                for start, end in zip([0, *cuts], [*cuts, batch.num_rows], strict=True):
                    if start < end:
                        _call(call, batch[start:end], sample)
    sample.reported = meter.usage.cost
    return sample


def _read(
    target: Target, fragment: FragmentTask, reads: Sequence[str] | Mapping[str, str], rows: int, begin: float
) -> Iterator[tuple[pa.RecordBatch, RowIds]]:
    """Read `rows` rows of a fragment, with ids, from a relative position on; if there are too few, also before it."""
    spec, live = target.spec, live_offsets(target.source, fragment.files)
    size = ReadSize.of(target.source, reads, spec.sizing.batch_bytes, 1)
    due = fragment.missing & live
    if not due:
        return
    cut = int(due.offsets()[min(int(begin * len(due)), max(len(due) - rows, 0))])
    for part in (due.within(cut, fragment.files.physical_rows), due.within(0, cut)):
        for run in _pieces(part):
            window = (int(run.starts[0]), int(run.ends[-1]))
            for found in target.read(fragment, live, [window], reads, size):
                batch, ids = found.columns, found.row_ids
                if (chosen := found.chosen(run)) is not None:
                    batch = single_batch(pa.Table.from_batches([batch]).filter(pa.array(chosen)))
                    ids = ids[chosen]
                if batch.num_rows:
                    yield batch[:rows], ids[:rows]
                    rows -= min(rows, batch.num_rows)
                if not rows:
                    return


def _pieces(rows: Ranges) -> Iterator[Ranges]:
    for start, end in rows:
        for at in range(start, end, 1_024):
            yield Ranges.of(at, min(at + 1_024, end))


def _call(compute: Callable[[pa.RecordBatch], MappedBatch], batch: pa.RecordBatch, sample: ComputedSample) -> None:
    """Call the UDF; a row that fails gets its error and NULL, and the rows after it get another call."""
    while batch.num_rows:
        began = time.monotonic()
        errors: dict[int, str]
        try:
            mapped = compute(batch)
            values, rows = mapped.values, batch.num_rows
            errors = {
                failure.index: f"{failure.exception.removeprefix('builtins.')}: {failure.message}"
                for failure in mapped.failures
            }
        except UdfError as error:
            at, message = error.row_index, str(error).partition("\n")[0]
            rows = batch.num_rows if at is None else at + 1
            values = pa.nulls(rows)
            if at is not None and error.computed is not None:
                values = pa.concat_arrays([error.computed, pa.nulls(1, error.computed.type)])
            errors = dict.fromkeys(range(rows) if at is None else [at], message)
        sample.calls.append(Call(rows, time.monotonic() - began))
        sample.inputs.append(batch[:rows])
        sample.values.append(as_bytes(values))
        sample.errors.extend(errors.get(row) for row in range(rows))
        batch = batch[rows:]


def estimate_plan(
    location: TableLocation, udfs: Udfs, cluster: Runner | None, plan: Plan, sample: int | None = None
) -> Estimate:  # fmt: skip
    """Estimate a plan as a job with ``runner="auto"``, by earlier jobs, or by a sample of this number of rows."""
    if sample is not None:
        check_rows("sample", sample)
        if isinstance(plan.spec, RefreshSpec) and plan.spec.definition.grouping is not None:
            raise InvalidInput(
                f"Groups of view {plan.spec.target!r} cannot be computed as a sample: a plan writes nothing, and only "
                "the refresh gathers their rows. Leave sample out: earlier refreshes tell the seconds."
            )
    if not plan.shards:
        return Estimate.of_nothing()
    choice = choose_runner(plan, udfs, INLINE_BELOW_SECONDS, try_new_code=True)
    found = None if sample is None else sample_plan(plan, location, udfs, sample)
    if found is None or not found.calls:
        return replace(estimate_by_history(plan, choice.runner, cluster), why=choice.why)
    by_sample = partial(Estimate.by_sample, calls=found.calls, table=found.table(), reported=found.reported)
    expected = by_sample(size_of(plan, choice.runner, cluster))
    # The sample may correct the choice of the runner.
    slow = expected.slot_seconds is not None and sum(expected.slot_seconds) / 2 >= INLINE_BELOW_SECONDS
    here = choice.runner == RunnerName.INLINE
    return by_sample(size_of(plan, "spark", cluster)) if slow and here else expected


def estimate_by_history(plan: Plan, runner: str, cluster: Runner | None = None) -> Estimate:
    """Estimate from earlier jobs, for the chosen runner; call no UDF."""
    size, history = size_of(plan, runner, cluster), plan.earlier().measured
    return Estimate.by_history(size, history) if history else Estimate.unknown(size)


def size_of(plan: Plan, runner: str, cluster: Runner | None = None) -> Size:
    is_up = runner == RunnerName.SPARK and cluster is not None and cluster.is_up()
    return replace(plan.size(runner), session_is_up=is_up)
