"""Requests for backfills and refreshes; check and plan a backfill, and limit a plan to its cap of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from airflow_geneva.engine.choices import OnCodeChange, OnUnknownValues, check_whole
from airflow_geneva.engine.code_hash.hasher import deps_version
from airflow_geneva.engine.job.folder import new_job_id
from airflow_geneva.engine.lance_io.filters import freeze_where
from airflow_geneva.engine.lance_io.fragments import output_ids
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.lance_io.table_versions import PlannedTable, open_version, reporting_cleaned_up
from airflow_geneva.engine.lance_io.task_memory import task_memory_bytes
from airflow_geneva.engine.plan.backfill import plan_backfill
from airflow_geneva.engine.plan.due_rows import DueRules
from airflow_geneva.engine.plan.model import BackfillSpec, Plan
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks, Shard
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.annotations import check_inputs
from airflow_geneva.engine.udf.definition import check_type, columns_to_take, former_names
from airflow_geneva.engine.udf.settings import check_memory
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance
    from typing_extensions import Self

_SIZES = {f.name for f in fields(Sizing)}
_OF_FUNCTIONS = {f.name for f in fields(UDF)}


class SizingOptions(TypedDict, total=False):
    concurrency: int
    intra_applier_concurrency: int
    batch_size: int | None
    checkpoint_size: int | None
    min_checkpoint_size: int | None
    max_checkpoint_size: int | None
    checkpoint_interval: float
    checkpoint_cost: float | None
    task_size: int | None
    task_shuffle_diversity: int | None
    shard_size: int | None
    commit_granularity: int | None
    task_memory_bytes: int
    price_per_slot_hour: float | None
    num_frags: int | None
    skip_frags: int | None
    max_rows: int | None
    max_seconds: float | None
    max_cost: float | None
    num_cpus: float | None
    num_gpus: float | None
    memory: int | str | None


class BackfillOptions(SizingOptions, total=False):
    """Arguments of a backfill besides its columns and their UDF."""

    where: str | None
    read_version: int | None
    on_code_change: str
    continue_from: str | Sequence[str] | None
    errors_only: bool
    recompute_mixed: bool
    ignore_checkpoints: bool
    runner: str
    run_after: datetime | None
    max_failed: int | float | None
    indexes: str | None
    on_unknown_values: str


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The arguments that all jobs share. Its sizes are checked when it is planned."""

    job_id: str = field(default_factory=new_job_id)
    ignore_checkpoints: bool = False
    indexes: str | None = None
    sizing: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any], sizing: Mapping[str, Any] | None = None) -> Self:
        """Make a request from those arguments that are its fields; without `sizing` the others are sizes."""
        own = {part.name for part in fields(cls)} - {"sizing"}
        sizes = {name: value for name, value in arguments.items() if name not in own} if sizing is None else sizing
        return cls(**{name: arguments[name] for name in own & set(arguments)}, sizing=sizes)


@dataclass(frozen=True, kw_only=True)
class UdfRequest(JobRequest):
    """The arguments that backfills and refreshes share."""

    on_code_change: str = "error"
    on_unknown_values: str = "error"
    errors_only: bool = False
    max_failed: int | float | None = None

    def check(self) -> None:
        OnCodeChange.check("on_code_change", self.on_code_change)
        OnUnknownValues.check("on_unknown_values", self.on_unknown_values)
        failed = self.max_failed
        rows = isinstance(failed, int) and not isinstance(failed, bool) and failed >= 0
        part = isinstance(failed, float) and 0 <= failed <= 1
        if not (failed is None or rows or part):
            raise InvalidInput(
                f"max_failed={failed!r} is not valid: give a number of rows, as 100, or a part of the rows that are "
                "due, as 0.01."
            )
        if self.indexes not in (None, "update"):
            raise InvalidInput(f'indexes={self.indexes!r} is unknown. Use "update", or leave it out.')


@dataclass(frozen=True)
class BackfillRequest(UdfRequest):
    """The arguments of a backfill; see :meth:`airflow_geneva.Table.plan_backfill`."""

    column: str
    where: str | None = None
    read_version: int | None = None
    continue_from: str | Sequence[str] | None = None
    recompute_mixed: bool = False
    run_after: datetime | None = None

    @staticmethod
    def of_all_rows(column: str) -> BackfillRequest:
        """Return the request to compute all rows of a column again, also those without a value."""
        every = "recompute"
        return BackfillRequest(column, on_code_change=every, on_unknown_values=every, ignore_checkpoints=True)

    def check(self) -> None:
        super().check()
        versions = self.continue_from
        listed = isinstance(versions, Sequence) and all(isinstance(version, str) for version in versions)
        if versions is not None and not listed:
            raise InvalidInput(f"continue_from={versions!r} is not valid: give a UDF version, or a list of them.")
        if self.errors_only and self.recompute_mixed:
            raise InvalidInput("errors_only and recompute_mixed each name the only rows to run. Give one of them.")
        if versions and (self.ignore_checkpoints or self.recompute_mixed):
            raise InvalidInput(
                "continue_from reuses what another version computed; ignore_checkpoints and recompute_mixed ask for "
                "the opposite. Give one of them."
            )
        kinds: dict[str, tuple[type, str]] = {
            "where": (str, "an SQL filter as text"),
            "read_version": (int, "a whole number"),
            "run_after": (datetime, "a datetime"),
            **dict.fromkeys(("ignore_checkpoints", "errors_only", "recompute_mixed"), (bool, "True or False")),
        }
        for name, (kind, wanted) in kinds.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
                raise InvalidInput(f"{name}={value!r} is not valid: give {wanted}.")


@dataclass(frozen=True)
class RefreshRequest(UdfRequest):
    """The arguments of a refresh; see :meth:`airflow_geneva.view.View.refresh`."""

    src_version: int | None = None
    max_rows_per_fragment: int | None = None

    def check(self) -> None:
        super().check()
        if self.on_unknown_values == OnUnknownValues.FILL:
            raise InvalidInput('on_unknown_values="fill" is for columns. Of a view, "adopt" or "recompute" all rows.')
        for name in ("ignore_checkpoints", "errors_only"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name}={getattr(self, name)!r} is not valid: give True or False.")
        if self.errors_only and (self.src_version is not None or self.on_code_change == OnCodeChange.RECOMPUTE):
            other = 'on_code_change="recompute"' if self.src_version is None else f"src_version={self.src_version!r}"
            raise InvalidInput(
                f"errors_only runs failed rows only, at the source version that the view shows; {other} asks for other "
                "rows. Give one of them."
            )
        for name in ("src_version", "max_rows_per_fragment"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value)


def plan_request(
    location: TableLocation,
    request: BackfillRequest,
    udf: UDF,
    inputs: Sequence[str] | None,
    newest: lance.LanceDataset | None = None,
) -> Plan:
    """Check a request and plan it; write nothing. `inputs` come from the column's definition; None: from the UDF."""
    request.check()
    sizing = check_sizing(request.sizing)
    dataset = location.open() if newest is None else newest
    with reporting_cleaned_up(location, dataset):
        if request.read_version is not None:
            open_version(dataset, request.read_version)
        output = Output.of(dataset, request.column)
        check_type(location.name, output, dataset.schema, udf)
        definition = udf.definition(inputs)
        columns = definition.input_columns or columns_to_take(dataset.schema, request.column)
        check_inputs(udf, dataset.schema, columns, location.name)
        if own := [name for name in output.columns if name in definition.columns]:
            raise InvalidInput(
                f"Column {own[0]!r} of table {location.name!r} would be computed from itself. "
                f"Map other inputs: table.alter_columns({{{request.column!r}: (udf, [...])}})."
            )
        spec = BackfillSpec(
            job_id=request.job_id,
            table=location.uri,
            table_name=location.name,
            column=output.column,
            siblings=output.columns[1:],
            field_id=output_ids(dataset, output.column)[0],
            former_names=tuple(former_names(dataset.schema, output.column)),
            udf=definition.to_json(),
            inputs=tuple(columns),
            where=freeze_where(request.where, request.run_after),
            version=dataset.version,
            tables=(PlannedTable.of(location, dataset),),
            read_version=request.read_version,
            udf_version=udf.code_version,
            sizing=sizing,
            ignore_checkpoints=request.ignore_checkpoints or checkpoints_ignored(),
            max_failed=request.max_failed,
            indexes=request.indexes,
            continue_from=_versions(request.continue_from),
            agreement=md5(f"{udf.data_type}\0{deps_version(udf.deps, udf.name)}"),
        )
        wanted = DueRules(
            request.on_code_change, request.on_unknown_values, request.errors_only, request.recompute_mixed
        )
        return cap_rows(plan_backfill(dataset, location.checkpoints, spec, wanted))


def checkpoints_ignored() -> bool:
    """Whether ``GENEVA_IGNORE_CHECKPOINTS`` makes every job of this process ignore checkpoints."""
    value = os.environ.get("GENEVA_IGNORE_CHECKPOINTS", "").strip().lower()
    if value not in ("", "0", "false", "1", "true"):
        raise InvalidInput(f"GENEVA_IGNORE_CHECKPOINTS={value!r} is not valid: set it to 1, or unset it.")
    return value in ("1", "true")


def _versions(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Parse versions from a list, or from one text with commas, as a templated field renders it."""
    named = given.split(",") if isinstance(given, str) else list(given or ())
    return tuple(dict.fromkeys(version.strip() for version in named if version.strip()))


def check_sizing(given: Mapping[str, Any]) -> Sizing:
    unknown = sorted(set(given) - _SIZES)
    if unknown and unknown[0] in _OF_FUNCTIONS:
        raise InvalidInput(f"{unknown[0]!r} belongs to the function and not to a job: @udf({unknown[0]}=...).")
    if unknown:
        raise InvalidInput(f"There is no parameter {unknown[0]!r}. Sizes are: {', '.join(sorted(_SIZES))}.")
    for name, value in given.items():
        if value is None and getattr(Sizing(), name) is None:
            continue
        if name == "memory" and isinstance(value, str):
            given = {**given, name: check_memory(value)}
            continue
        if Sizing.is_whole(name):
            check_whole(name, value, Sizing.least(name))
            continue
        Sizing.check_number(name, value)
    sizing = Sizing(**{"task_memory_bytes": task_memory_bytes(), **given})
    low, high = sizing.min_checkpoint_size, sizing.max_checkpoint_size or sizing.checkpoint_size
    if low is not None and high is not None and low > high:
        raise InvalidInput(f"min_checkpoint_size={low} is larger than the largest checkpoint, {high} rows.")
    return sizing


def cap_rows(plan: Plan) -> Plan:
    """Limit a plan to ``num_frags`` after ``skip_frags``, and the rows on which the UDF runs by ``max_rows`` and
    ``max_cost``; checkpoints do not count.

    Raises:
        InvalidInput: ``max_cost`` is given without a price, or it is less than the cost of one row.
    """
    plan = cap_fragments(plan)
    spec = plan.spec
    priced = spec.sizing.price_per_slot_hour or spec.cost_per_row or spec.reports_cost
    if spec.sizing.max_cost is not None and not priced:
        raise InvalidInput(
            "max_cost needs a price: price_per_slot_hour, in Airflow [geneva] price_per_slot_hour, @udf(cost=...), or "
            "the price per million tokens of a ready-made function."
        )
    most = spec.most_rows
    if most is None or plan.rows_to_run <= most:
        return plan
    if not most:
        raise InvalidInput(
            f"max_cost={spec.sizing.max_cost:g} does not pay for one row of {spec.target}, which costs "
            f"{spec.cost_per_row:g} by @udf(cost=...). Give at least that."
        )
    kept = list[Shard]()
    for shard in plan.shards:
        rows = shard.rows_to_run
        tasks = shard.fragments if rows <= most else FragmentTasks(_tasks_within(shard.fragments, most, spec.of_view))
        most = max(most - rows, 0)
        if len(tasks):
            kept.append(Shard(len(kept), tasks))
    left = sum(shard.rows for shard in plan.shards) - sum(shard.rows for shard in kept)
    return replace(plan, shards=tuple(kept)).with_work(rows=spec.rows - left, rows_beyond=spec.rows_beyond + left)


def cap_fragments(plan: Plan) -> Plan:
    """Limit a plan to ``num_frags`` of its fragments, after the first ``skip_frags``."""
    sizing = plan.spec.sizing
    skip, most = sizing.skip_frags or 0, sizing.num_frags
    if not skip and most is None:
        return plan
    kept = list[Shard]()
    for shard in plan.shards:
        count = len(shard.fragments)
        tasks = shard.fragments[skip : count if most is None else skip + most]
        skip, most = max(skip - count, 0), None if most is None else most - len(tasks)
        if len(tasks):
            kept.append(Shard(len(kept), tasks))
    left = sum(shard.rows for shard in plan.shards) - sum(shard.rows for shard in kept)
    return replace(plan, shards=tuple(kept)).with_work(rows=plan.spec.rows - left, rows_beyond=left)


def _tasks_within(tasks: FragmentTasks, most: int, of_view: bool) -> Iterator[FragmentTask]:
    """Yield the fragments that fit, the part of the next one that fits, and all later staged fragments."""
    last = -1
    for task in tasks:
        last = task.id
        if task.staged or task.rows_to_run <= most:
            most -= 0 if task.staged else task.rows_to_run
            yield task
            continue
        if part := _first_rows(task, most):
            yield replace(part, partial=of_view)
        break
    yield from (task for task in tasks.single if task.id > last and task.staged)


def _first_rows(task: FragmentTask, most: int) -> FragmentTask | None:
    """Return the work with its first `most` missing rows only; None if no row is left."""
    rows = Ranges.from_offsets(task.missing_selected.offsets()[:most]) if most else Ranges.empty()
    # The filter is also evaluated on the rows between them that it does not select.
    missing = task.missing.within(0, int(rows.ends[-1])) if rows else rows
    due = (task.due - task.missing) | missing
    count = len(due if task.selected is None else due & task.selected)
    return replace(task, due=due, missing=missing, rows=count) if due else None
