"""Load the UDFs of a job, and prepare them to compute units, in the caller's process and in Spark's tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from airflow_geneva.engine.apply.applier import PAID_SECONDS, Applier
from airflow_geneva.engine.apply.batch_mapper import BatchMapper
from airflow_geneva.engine.apply.dedup import KnownValues
from airflow_geneva.engine.apply.fitting import known_to_fit, learned_by
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.skipped_rows import SkipCount
from airflow_geneva.engine.apply.threads import ThreadedMapper
from airflow_geneva.engine.checkpoint.store import DelayedCheckpoints
from airflow_geneva.engine.checkpoint.submissions import Submissions
from airflow_geneva.engine.checkpoint.value_cache import ValueCache
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget
from airflow_geneva.engine.limits.calls import calling
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.plan.model import JobSpec, Plan, RefreshSpec
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.run import view
from airflow_geneva.engine.run.column import ColumnTarget
from airflow_geneva.engine.run.task import TaskRunner
from airflow_geneva.engine.run.units import Computer, Target
from airflow_geneva.engine.run.view import ViewTarget
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.timeouts import StoreThreads
from airflow_geneva.engine.udf import UDF, load_udf
from airflow_geneva.engine.udf.error_policy import Policy, rules_of
from airflow_geneva.engine.udf.packages import check_installed
from airflow_geneva.engine.udf.shipping import UdfReference
from airflow_geneva.engine.views.definition import ViewDefinition
from airflow_geneva.errors import InvalidInput, StorageError

logger = logging.getLogger("airflow_geneva.run")

_BEHIND = StoreThreads("geneva-checkpoints")


@dataclass(frozen=True)
class Udfs:
    """The UDFs of a job by computed column: loaded in this process, or in the form that is sent to the executors."""

    by_column: Mapping[str, UDF | UdfReference]

    @staticmethod
    def planned(spec: JobSpec) -> Udfs:
        """Return the UDFs of a plan, in the planned versions; `InvalidInput` if one has no import path."""
        for udf in spec.udfs.values():
            if udf.import_path is None:
                raise InvalidInput(
                    f"UDF {udf.name!r} has no import path, so no other process can load it. Move it to a module."
                )
        archives = tuple(code.zip for code in spec.codes)
        references = {
            name: UdfReference(udf.import_path, udf.version, archives=archives, groups=udf.groups is not None)
            for name, udf in spec.udfs.items()
        }
        return Udfs(references)

    @staticmethod
    def of_refresh(plan: Plan, definition: ViewDefinition) -> Udfs:
        """Find those UDFs of a view that run on some of the planned rows.

        Raises:
            InvalidInput: a UDF of the view cannot be found or imported here.
        """
        udfs = view.load_udfs(definition)
        return Udfs({name: udfs[name] for name in plan.spec.udfs})

    @property
    def references(self) -> tuple[UdfReference, ...]:
        udfs = self.by_column.values()
        return tuple(udf if isinstance(udf, UdfReference) else UdfReference.of(udf) for udf in udfs)

    def sent(self) -> Udfs:
        return Udfs(dict(zip(self.by_column, self.references, strict=True)))

    def with_archives(self, names: tuple[str, ...]) -> Udfs:
        """Return references with the names of the archives that have the planned code."""
        references = zip(self.by_column, self.references, strict=True)
        return Udfs({name: replace(reference, archives=names) for name, reference in references})

    def check_sent(self, runner: str) -> None:
        """Raise `InvalidInput` for UDFs that must be sent to another process and cannot be pickled."""
        for udf in self.by_column.values():
            if isinstance(udf, UDF) and (runner == RunnerName.SPARK or udf.needs_process):
                UdfReference.of(udf)
            elif isinstance(udf, UDF) and udf.preprocess_workers:
                UdfReference.of(udf, stage=True)

    def here(self) -> dict[str, UDF]:
        return {name: udf.open() if isinstance(udf, UdfReference) else udf for name, udf in self.by_column.items()}

    def have_planned_version(self) -> bool:
        """Whether this process has the planned code versions; InvalidInput if a UDF cannot be imported here."""
        planned = [udf for udf in self.by_column.values() if isinstance(udf, UdfReference)]
        return all(load_udf(str(udf.import_path)).code_version == udf.version for udf in planned)


def joint_policy(udfs: Mapping[str, UDF]) -> Policy:
    return tuple(rule for udf in udfs.values() for rule in rules_of(udf.on_error)) or "fail"


def open_target(location: TableLocation, spec: JobSpec) -> Target:
    """Open the column or view of a job; see the classes for errors if it was removed or created again."""
    return ViewTarget.at(location, spec) if isinstance(spec, RefreshSpec) else ColumnTarget.at(location, spec)


@contextmanager
def prepare(
    location: TableLocation,
    spec: JobSpec,
    udfs: Udfs,
    before: Mapping[int, int],
    meter: Meter,
    target: Target | None = None,
) -> Iterator[TaskRunner]:
    """Provide the runner of a task's units; the meter counts the usage of calls.

    `before` is the number of rows that the job has skipped, by rule. At the end, the checkpoints of all finished
    fragments and the values for other tasks are written. Then the records of completely collected batches are removed.
    """
    for udf in spec.udfs.values():
        check_installed(udf.name, udf.requirements or ())
    loaded = udfs.here()
    if asked := spec.sizing.resources:
        loaded = {name: replace(udf, **asked) for name, udf in loaded.items()}
    # Batch and checkpoint sizes are those of the first batch API, whose calls cost most, or of the first UDF.
    first = next(iter(sorted(loaded.values(), key=lambda udf: not udf.is_batch_api)), None)
    opened = ready_to_open(loaded)
    skipped = SkipCount(joint_policy(loaded), spec.rows, before)
    target = target or open_target(location, spec)
    delayed = DelayedCheckpoints(target.store, _seconds_unkept(spec.sizing, loaded))
    target = replace(target, delayed=delayed)
    fitting = RowsPerBudget(spec.sizing.batch_bytes, target.output_width)
    known = {
        name: KnownValues(_value_cache(location, spec, udf), spec.sizing.batch_bytes)
        for name, udf in loaded.items()
        if udf.dedup
    }
    submissions = submissions_of(location, spec, loaded)

    def keep() -> None:
        delayed.write()
        for values in known.values():
            values.flush()

    try:
        with calling(location, meter), ExitStack() as stack:
            threads = spec.sizing.intra_applier_concurrency
            made = [stack.enter_context(computing(target, loaded, opened, known, submissions)) for _ in range(threads)]
            (mapper, reads), mappers = made[0], [mapper for mapper, _ in made]
            if threads > 1 and not mapper.calls_at_a_time:
                mapper = stack.enter_context(ThreadedMapper(mappers))
            applier = Applier(spec, first, mapper, skipped, fitting, comes_in_windows(loaded))
            learned = partial(learned_by, loaded.values())
            yield TaskRunner(target, applier, reads, delayed, known.values(), learned)
    except BaseException:
        try:
            keep()
        except StorageError as unkept:
            logger.warning("Cannot write the last checkpoints, so the rows of small fragments are lost: %s", unkept)
        raise
    if target.write_behind is not None and not submissions and not known:
        target.write_behind.append(_BEHIND.submit(target.store.storage.root, delayed.write))
    else:
        keep()
    for of_column in submissions.values():
        of_column.remove_collected()


def _seconds_unkept(sizing: Sizing, loaded: Mapping[str, UDF]) -> float:
    """Return the seconds after which the checkpoints of finished fragments are due: few if calls cost money."""
    paid = any(udf.is_async or udf.limit or udf.cost or udf.reports_cost for udf in loaded.values())
    at_once = paid and sizing.checkpoint_cost is None
    return min(sizing.checkpoint_interval, PAID_SECONDS) if at_once else sizing.checkpoint_interval


def _value_cache(location: TableLocation, spec: JobSpec, udf: UDF) -> ValueCache | None:
    """Open the cache with values of other tasks and jobs; None for a job that ignores checkpoints."""
    if spec.ignore_checkpoints:
        return None
    return ValueCache(location.checkpoints, udf.name, udf.code_version, udf.data_type, udf.value_identity)


def submissions_of(location: TableLocation, spec: JobSpec, loaded: Mapping[str, UDF]) -> dict[str, Submissions]:
    """Open the records of the submissions to batch APIs, by column."""
    place, only_own = (location.checkpoints, spec.job_id), spec.ignore_checkpoints
    return {
        column: Submissions(*place, udf.name, udf.code_version, column, only_own)
        for column, udf in loaded.items()
        if udf.is_batch_api
    }


def comes_in_windows(loaded: Mapping[str, UDF]) -> bool:
    """Whether rows come in windows, which are larger than a batch, because a UDF sorts them by weight."""
    return any(udf.batch_by is not None for udf in loaded.values())


def ready_to_open(loaded: Mapping[str, UDF]) -> dict[str, UDF | UdfReference]:
    """Return UDFs in the form that each thread opens: UDFs that run in their own process are pickled only once."""
    return {name: UdfReference.of(udf) if udf.needs_process else udf for name, udf in loaded.items()}


def computing(
    target: Target,
    loaded: Mapping[str, UDF],
    opened: Mapping[str, UDF | UdfReference],
    known: Mapping[str, KnownValues] | None = None,
    submissions: Mapping[str, Submissions] | None = None,
) -> AbstractContextManager[Computer]:
    """Open the UDFs of a job to compute batches, with already known values and submitted batches."""
    in_windows, given, fitting = comes_in_windows(loaded), target.spec.sizing.batch_size, target.spec.fitting

    def open_mapper(name: str, inputs: Sequence[str] | None) -> BatchMapper:
        size, fits = (given or loaded[name].batch_size) if in_windows else None, known_to_fit(loaded[name], fitting)
        return open_batch_mapper(
            opened[name], inputs, (known or {}).get(name), (submissions or {}).get(name), size, fits, target.source_rows
        )

    return target.computing(loaded, open_mapper)
