"""Check and plan a load of values by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.job.folder import new_job_id
from airflow_geneva.engine.lance_io.arrays import castable
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.filters import check_where, freeze_where, where_columns
from airflow_geneva.engine.lance_io.fragments import columns_of, live_offsets
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.siblings import Output, group_of
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.load.delivery import Delivery, read_keys
from airflow_geneva.engine.load.join import check_duplicates, check_missing
from airflow_geneva.engine.load.source import open_source
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.model import Plan, ReasonCount
from airflow_geneva.engine.plan.request import cap_fragments, check_sizing
from airflow_geneva.engine.plan.shard import FragmentWork, Works, cut_shards
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.engine.udf.definition import check_column_name, stored_definition
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

ON_MISSING = ("keep", "null", "error")
ON_DUPLICATE = ("error", "first", "last")
LOADED = "may have other values in the source"


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of a load; see :meth:`airflow_geneva.Table.load_columns`."""

    source: Any
    on: str | Sequence[str]
    columns: Sequence[str] | None = None
    format: str | None = None
    on_missing: str = "keep"
    on_duplicate: str = "error"
    where: str | None = None
    adopt: bool = False
    run_after: datetime | None = None
    ignore_checkpoints: bool = False
    indexes: str | None = None
    job_id: str | None = None
    sizing: Mapping[str, Any] = field(default_factory=dict)


def _names(given: Any, what: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInput(f"{what}={given!r:.200} is not valid: give the name of a column, or a list of names.")
    if len(set(names)) < len(names):
        raise InvalidInput(f"{what}={list(names)} names a column twice.")
    return names


@dataclass(frozen=True)
class PlannedLoad:
    """A load that was checked: its plan, and its source with the columns that it takes."""

    plan: Plan
    delivery: Delivery


def plan_load(location: TableLocation, request: LoadRequest) -> PlannedLoad:
    """Check a load, add the columns that the table lacks, and plan it; no value is written.

    Raises:
        InvalidInput: an argument is not valid, the source or a column does not exist, types do not fit, several rows of
            the source have one key, or rows of the table have none in it and ``on_missing`` is ``error``.
    """
    for name, allowed in (("on_missing", ON_MISSING), ("on_duplicate", ON_DUPLICATE)):
        if getattr(request, name) not in allowed:
            raise InvalidInput(
                f"{name}={getattr(request, name)!r} is unknown. Use one of {', '.join(map(repr, allowed))}."
            )
    sizing, on = check_sizing(request.sizing), _names(request.on, "on")
    if given := [name for name in ("max_rows", "max_cost") if getattr(sizing, name) is not None]:
        raise InvalidInput(f"{given[0]} limits calls of a function, and a load makes none. Use num_frags or where.")
    dataset = location.open()
    source = open_source(request.source, request.format, location.options)
    found = {one.name: one.type for one in source.schema(location.options)}
    _check_there(on, location.name, dataset.schema.names, "the key", "on")
    _check_there(on, source.name, list(found), "the key", "on")
    named = (
        tuple(name for name in found if name not in on)
        if request.columns is None
        else _names(request.columns, "columns")
    )
    _check_there(named, source.name, list(found), "a column to load", "columns")
    if both := [name for name in named if name in on]:
        raise InvalidInput(f"{both} are keys, and cannot be loaded, too. Leave them out of columns.")
    check_where(dataset, request.where)
    keys = {name: (found[name], dataset.schema.field(name).type) for name in on}
    for name, (theirs, ours) in keys.items():
        if not castable(theirs, ours):
            raise InvalidInput(
                f"The key {name!r} is {ours} in table {location.name!r} and {theirs} in {source.name}, which cannot be "
                "compared without loss. Convert it before."
            )
    values = _check_values(location, dataset, named, found, request.adopt)
    delivery = Delivery(source, location.options, keys, values, request.on_duplicate)
    twice = check_duplicates(delivery, on)
    where = freeze_where(request.where, request.run_after)
    if request.on_missing == "error":
        ids = [fragment.fragment_id for fragment in dataset.get_fragments()]
        check_missing(delivery, on, partial(read_keys, dataset, on, ids, where))
    if new := [name for name in named if name not in dataset.schema.names]:
        dataset.add_columns(pa.schema([pa.field(name, found[name]) for name in new]))
        dataset = location.open()
    notes = [f"{twice:,} keys of the source have several rows; the {request.on_duplicate} counts."] if twice else []
    return PlannedLoad(_plan(location, dataset, request, delivery, where, sizing, notes), delivery)


def _check_there(names: Sequence[str], where: str, there: Sequence[str], what: str, argument: str) -> None:
    if missing := [name for name in names if name not in there]:
        raise InvalidInput(f"{argument}: {what} {missing[0]!r} is not in {where!r}, which has {', '.join(there)}.")


def _check_values(
    location: TableLocation,
    dataset: lance.LanceDataset,
    named: Sequence[str],
    found: Mapping[str, pa.DataType],
    adopt: bool,
) -> dict[str, tuple[pa.DataType, pa.DataType]]:
    """Return the types of the columns to load in the source and in the table; refuse columns that cannot be loaded."""
    values: dict[str, tuple[pa.DataType, pa.DataType]] = {}
    for name in named:
        if name not in dataset.schema.names:
            check_column_name(name)
            if adopt:
                raise InvalidInput(
                    f"adopt=True is for computed columns, and table {location.name!r} has no column {name!r}."
                )
            values[name] = found[name], found[name]
            continue
        one = dataset.schema.field(name)
        definition = stored_definition(dataset.schema, name)
        if definition is not None and not adopt:
            raise InvalidInput(
                f"Column {name!r} of table {location.name!r} is computed by {definition.call}. If the values to load "
                "are those of this function, say so: adopt=True; they count as computed then. Otherwise load another "
                "column."
            )
        if definition is None and adopt:
            raise InvalidInput(f"adopt=True is for computed columns, and {name!r} of table {location.name!r} is none.")
        if is_blob(one):
            raise InvalidInput(
                f"Column {name!r} of table {location.name!r} holds blobs, which cannot be loaded by key."
            )
        if not castable(found[name], one.type) and not _is_same_list(found[name], one.type):
            raise InvalidInput(
                f"Column {name!r} of table {location.name!r} is {one.type}, and {found[name]} in the source, which "
                "cannot be converted without loss. Convert it before, or load another column."
            )
        values[name] = found[name], one.type
    if adopt:
        output = Output.of(dataset, named[0])
        if set(output.columns) != set(named):
            raise InvalidInput(
                f"adopt=True takes the columns of one function: {', '.join(output.columns)}, not {', '.join(named)}."
            )
        values = {name: values[name] for name in output.columns}
    return values


def _is_same_list(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a list can hold what a list of fixed size does; files such as JSON have no such lists."""
    lists = pt.is_list(found) or pt.is_large_list(found)
    return bool(lists and pt.is_fixed_size_list(wanted) and castable(found.value_type, wanted.value_type))


def _plan(
    location: TableLocation,
    dataset: lance.LanceDataset,
    request: LoadRequest,
    delivery: Delivery,
    where: str | None,
    sizing: Sizing,
    notes: Sequence[str],
) -> Plan:
    columns, on = tuple(delivery.values), tuple(delivery.keys)
    definition = stored_definition(dataset.schema, columns[0]) if request.adopt else None
    facts = () if definition is None else definition.input_columns or ()
    field_id = output_id(dataset, columns, definition is not None)
    options = repr((delivery.source.fingerprint, on, columns, request.on_missing, request.on_duplicate))
    work = LoadSpec(
        job_id=request.job_id or new_job_id(),
        table=location.uri,
        table_name=location.name,
        column=columns[0],
        siblings=columns[1:],
        field_id=field_id,
        udf="" if definition is None else definition.to_json(),
        inputs=(*on, *(name for name in facts if name not in on)),
        where=where,
        version=int(dataset.version),
        tables=(PlannedTable.of(location, dataset),),
        read_version=None,
        udf_version="load" if definition is None else definition.version,
        sizing=sizing,
        ignore_checkpoints=request.ignore_checkpoints,
        indexes=request.indexes,
        source=delivery.source.to_json(),
        delivery=md5(options)[:16],
        on=on,
        fact_inputs=facts,
        on_missing=request.on_missing,
        on_duplicate=request.on_duplicate,
    )
    filtered = where_columns(where, dataset.schema.names)
    manifest = read_manifest(dataset, columns_of(dataset, work.inputs, filtered, work.output_at(dataset)))
    works = Works(
        FragmentWork(files, LOADED, live, live, len(live))
        for files in manifest.values()
        if files.live_rows and (live := live_offsets(dataset, files))
    )
    rows = int(manifest.live_rows.sum())
    plan = Plan(
        work=replace(work, rows=rows),
        shards=cut_shards(works, sizing.shard_size),
        rows_total=rows,
        reason_counts=(ReasonCount(LOADED, len(works), rows),),
        notes=tuple(notes),
        opened=(dataset,),
    )
    return cap_fragments(plan)


def output_id(dataset: lance.LanceDataset, columns: Sequence[str], adopted: bool) -> int:
    """Return the number that identifies the columns of a load."""
    output = Output.of(dataset, columns[0])
    if adopted and output.group is not None:
        return output.group
    if len(columns) > 1:
        return group_of(columns)
    return next(one.id() for one in dataset.lance_schema.fields() if one.name() == columns[0])
