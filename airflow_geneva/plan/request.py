"""A backfill as it was asked for: checked, then planned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_geneva.annotations import check_inputs
from airflow_geneva.errors import InvalidInput
from airflow_geneva.job.record import new_job_id
from airflow_geneva.location import TableLocation
from airflow_geneva.plan.backfill import open_version, plan_backfill
from airflow_geneva.plan.manifest import field_ids
from airflow_geneva.plan.values import CodeRef, Plan, Sizing, Work
from airflow_geneva.plan.where import freeze_where

if TYPE_CHECKING:
    import lance

    from airflow_geneva.udf import UDF

ON_CODE_CHANGE = ("error", "recompute", "new_rows")
_SIZES = {f.name for f in fields(Sizing)}


@dataclass(frozen=True)
class BackfillRequest:
    """What the caller asked for; see :meth:`airflow_geneva.Table.plan_backfill`."""

    column: str
    where: str | None = None
    read_version: int | None = None
    on_code_change: str = "error"
    ignore_checkpoints: bool = False
    run_after: datetime | None = None
    job_id: str | None = None
    sizing: Mapping[str, Any] = field(default_factory=dict)


def plan_request(
    location: TableLocation,
    request: BackfillRequest,
    udf: UDF,
    inputs: Sequence[str] | None,
    newest: lance.LanceDataset | None = None,
) -> Plan:
    """Check a request and plan it; writes nothing.

    Args:
        udf: the loaded UDF.
        inputs: the input columns as the column's definition maps them, or None for the UDF's own.
        newest: the table, if the caller has just opened it.

    Raises:
        InvalidInput: something asked for does not exist or makes no sense.
        CodeChanged: see :func:`airflow_geneva.plan.backfill.plan_backfill`.
    """
    _check_kinds(request)
    sizing = check_sizing(request.sizing)
    if request.on_code_change not in ON_CODE_CHANGE:
        raise InvalidInput(f"on_code_change={request.on_code_change!r} is unknown. Use one of {ON_CODE_CHANGE}.")
    dataset = newest or location.open()
    if request.read_version is not None:
        open_version(dataset, request.read_version)
    found = dataset.schema.field(request.column).type
    if found != udf.data_type:
        raise InvalidInput(
            f"Type mismatch for column {request.column!r} of table {location.name!r}: it is {found}, and UDF "
            f"{udf.name!r} gives {udf.data_type}. Use a UDF of that type, or add another column."
        )
    definition = udf.definition(inputs)
    columns = definition.input_columns or tuple(name for name in dataset.schema.names if name != request.column)
    check_inputs(udf, dataset.schema, columns, location.name)
    if request.column in columns:
        raise InvalidInput(
            f"Column {request.column!r} of table {location.name!r} would be computed from itself. "
            f"Map other inputs: table.alter_columns({{{request.column!r}: (udf, [...])}})."
        )
    work = Work(
        job_id=request.job_id or new_job_id(),
        table=location.uri,
        table_name=location.name,
        column=request.column,
        field_id=field_ids(dataset, request.column)[0],
        udf=definition.to_json(),
        code=CodeRef(udf.import_path),
        inputs=tuple(columns),
        where=freeze_where(request.where, request.run_after),
        version=dataset.version,
        read_version=request.read_version,
        udf_name=udf.name,
        udf_version=udf.code_version,
        sizing=sizing,
        ignore_checkpoints=request.ignore_checkpoints,
    )
    return plan_backfill(dataset, location.checkpoints, work, request.on_code_change)


def _check_kinds(request: BackfillRequest) -> None:
    kinds = {
        "where": (request.where, str, "an SQL filter as text"),
        "read_version": (request.read_version, int, "a whole number"),
        "run_after": (request.run_after, datetime, "a datetime"),
        "ignore_checkpoints": (request.ignore_checkpoints, bool, "True or False"),
    }
    for name, (value, kind, wanted) in kinds.items():
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise InvalidInput(f"{name}={value!r} makes no sense: give {wanted}.")


def check_sizing(given: Mapping[str, Any]) -> Sizing:
    """Refuse unknown and nonsensical sizes.

    Raises:
        InvalidInput: names the parameter, what was given, and what fits.
    """
    unknown = sorted(set(given) - _SIZES)
    if unknown:
        raise InvalidInput(f"There is no parameter {unknown[0]!r}. Sizes are: {', '.join(sorted(_SIZES))}.")
    for name, value in given.items():
        if value is None and getattr(Sizing(), name) is None:
            continue
        kinds = (int, float) if name == "checkpoint_interval" else (int,)
        least = 0 if name == "checkpoint_interval" else 1
        number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least:
            raise InvalidInput(f"{name}={value!r} makes no sense: give a number of at least {least}.")
    sizing = Sizing(**given)
    low, high = sizing.min_checkpoint_size, sizing.max_checkpoint_size or sizing.checkpoint_size
    if low is not None and high is not None and low > high:
        raise InvalidInput(f"min_checkpoint_size={low} is larger than the largest checkpoint, {high} rows.")
    return sizing
