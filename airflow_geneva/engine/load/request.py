"""Check and plan a load of values by key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.choices import OnDuplicate, OnMissing
from airflow_geneva.engine.lance_io.arrays import castable, check_storable, map_leaves
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.filters import check_where, freeze_where
from airflow_geneva.engine.lance_io.fragments import live_offsets
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.siblings import Output, group_of
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.load.checks import KeySearch, check_keys
from airflow_geneva.engine.load.delivery import SourceMapping, TableKeys
from airflow_geneva.engine.load.join import DuckSearch
from airflow_geneva.engine.load.source import LoadSource, open_source
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.model import Plan, ReasonCount
from airflow_geneva.engine.plan.request import JobRequest, cap_fragments, check_sizing
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks, cut_shards
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.engine.udf.definition import check_column_name, stored_definition
from airflow_geneva.engine.udf.lancedb import refuse_column
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

LOADED = "may have other values in the source"


@dataclass(frozen=True)
class LoadRequest(JobRequest):
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


def _names(given: Any, what: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInput(f"{what}={given!r:.200} is not valid: give the name of a column, or a list of names.")
    if len(set(names)) < len(names):
        raise InvalidInput(f"{what}={list(names)} names a column twice.")
    return names


def plan_from(
    location: TableLocation,
    request: LoadRequest,
    source: LoadSource | None = None,
    search: KeySearch | None = None,
) -> Plan:
    """Check a load, add the columns that the table lacks, and plan it; no value is written.

    Without a session of Spark, nothing is known about a table of Spark but its name. Then the table's columns say what
    is loaded, and the load itself checks the source before it stages anything.

    Args:
        source: the request's source, if it is open already.
        search: who finds keys that do not fit; by default DuckDB in this process.

    Raises:
        InvalidInput: an argument is not valid, the source or a column does not exist, types do not fit, several rows of
            the source have one key, or rows of the table have none in it and ``on_missing`` is ``error``.
    """
    sizing, on = check_arguments(request), _names(request.on, "on")
    dataset = location.open()
    source = source or open_source(request.source, request.format, location.source_options)
    if source.on_spark and request.on_duplicate != OnDuplicate.ERROR:
        raise InvalidInput(
            f"The rows of {source.name} have no order, so there is no {request.on_duplicate} one of several with one "
            "key. Leave one of each there, by row_number() over a window, or write the rows to files, and load these."
        )
    unchecked = source.on_spark and source.columns is None
    _check_there(on, location.name, dataset.schema.names, "the key", "on")
    theirs = (
        _expected(location, dataset.schema, source, on, request)
        if unchecked
        else source.schema(location.source_options)
    )
    found = {one.name: one.type for one in theirs}
    _check_there(on, source.name, list(found), "the key", "on")
    named = (
        tuple(name for name in found if name not in on)
        if request.columns is None
        else _names(request.columns, "columns")
    )
    _check_there(named, source.name, list(found), "a column to load", "columns")
    if not named:
        raise InvalidInput(f"{source.name} has no column but the keys, so there is nothing to load.")
    if same := [name for name in (*on, *named) if theirs.names.count(name) > 1]:
        raise InvalidInput(f"{source.name} has several columns {same[0]!r}. Rename them, or name other columns.")
    if blobs := [name for name in (*on, *named) if is_blob(theirs.field(name))]:
        raise InvalidInput(f"Column {blobs[0]!r} of {source.name} holds blobs, which cannot be loaded by key.")
    if both := [name for name in named if name in on]:
        raise InvalidInput(f"{both} are keys, and cannot be loaded, too. Leave them out of columns.")
    check_where(dataset, request.where)
    columns = _check_columns(location, dataset, named, request.adopt)
    delivery = deliver(location, dataset.schema, source, theirs, on, columns, request.on_duplicate)
    new = pa.schema([pa.field(name, delivery.values[name][1]) for name in columns if name not in dataset.schema.names])
    check_storable(new, dataset.data_storage_version, f"table {location.name!r}")
    where = freeze_where(request.where, request.run_after)
    notes = list[str]()
    if unchecked:
        notes.append("Spark checks the keys and the columns of the source before it stages anything.")
    else:
        twice = check_keys(search or DuckSearch(), delivery, keys_of(location, dataset, on, where), request.on_missing)
        if twice:
            notes.append(f"{twice:,} keys of the source have several rows; the {request.on_duplicate} counts.")
    if new.names:
        dataset.add_columns(new)
        dataset = location.open()
    return _plan(location, dataset, request, delivery, where, sizing, notes, unchecked)


def check_arguments(request: LoadRequest) -> Sizing:
    """Return the sizes that a request asks for; `InvalidInput` if an argument is not valid whatever the tables have."""
    OnMissing.check("on_missing", request.on_missing)
    OnDuplicate.check("on_duplicate", request.on_duplicate)
    sizing = check_sizing(request.sizing)
    if given := [name for name in ("max_rows", "max_cost") if getattr(sizing, name) is not None]:
        raise InvalidInput(f"{given[0]} limits calls of a function, and a load makes none. Use num_frags or where.")
    return sizing


def deliver(
    location: TableLocation,
    schema: pa.Schema,
    source: LoadSource,
    theirs: pa.Schema,
    on: Sequence[str],
    columns: Sequence[str],
    on_duplicate: str,
) -> SourceMapping:
    """Return what a load takes from a source, whose schema is `theirs`.

    Raises:
        InvalidInput: the source lacks a column, or has a type that does not fit.
    """
    _check_there((*on, *columns), source.name, theirs.names, "the column", "source")
    found = {one.name: one.type for one in source.typed(theirs, schema, (*on, *columns), location.options)}
    keys = {name: (found[name], schema.field(name).type) for name in on}
    for name, (given, ours) in keys.items():
        if not castable(given, ours):
            raise InvalidInput(
                f"The key {name!r} is {ours} in table {location.name!r} and {given} in {source.name}, which cannot be "
                "compared without loss. Convert it before."
            )
    # Rows without a match are NULL in a new column, and so is all that they hold.
    new = {name: map_leaves(found[name], lambda kind: kind, nullable=True) for name in columns}
    values = {name: (found[name], schema.field(name).type if name in schema.names else new[name]) for name in columns}
    for name, (given, ours) in values.items():
        if not castable(given, ours) and not _is_same_list(given, ours):
            raise InvalidInput(
                f"Column {name!r} of table {location.name!r} is {ours}, and {given} in the source, which cannot be "
                "converted without loss. Convert it before, or load another column."
            )
    return SourceMapping(source, location.source_options, keys, values, on_duplicate)


def keys_of(location: TableLocation, dataset: lance.LanceDataset, on: Sequence[str], where: str | None) -> TableKeys:
    """Return the keys of all rows of a table that a load selects."""
    fragments = tuple(fragment.fragment_id for fragment in dataset.get_fragments())
    return TableKeys(location, int(dataset.version), tuple(on), fragments, where)


def _expected(
    location: TableLocation, schema: pa.Schema, source: LoadSource, on: Sequence[str], request: LoadRequest
) -> pa.Schema:
    """Return the columns that a table of Spark must have; their types are known to Spark only."""
    named = () if request.columns is None else _names(request.columns, "columns")
    if not named or not set(named) <= set(schema.names):
        raise InvalidInput(
            f"This process has no session of Spark, and cannot see the columns of {source.name}. Name columns that "
            f"table {location.name!r} has, which are {', '.join(name for name in schema.names if name not in on)}. Add "
            "a new one before: table.lance.add_columns(pa.field(name, type))."
        )
    return pa.schema([schema.field(name) for name in dict.fromkeys((*on, *named))])


def _check_there(names: Sequence[str], where: str, there: Sequence[str], what: str, argument: str) -> None:
    if missing := [name for name in names if name not in there]:
        raise InvalidInput(f"{argument}: {what} {missing[0]!r} is not in {where!r}, which has {', '.join(there)}.")


def _check_columns(
    location: TableLocation, dataset: lance.LanceDataset, named: Sequence[str], adopt: bool
) -> tuple[str, ...]:
    """Return the columns to load, in the table's order and then new ones; refuse columns that cannot be loaded."""
    for name in named:
        if name not in dataset.schema.names:
            check_column_name(name)
            if adopt:
                raise InvalidInput(
                    f"adopt=True is for computed columns, and table {location.name!r} has no column {name!r}."
                )
            continue
        definition = stored_definition(dataset.schema, name)
        if definition is None:
            refuse_column(location.name, dataset.schema.field(name))
        if definition is not None and not adopt:
            raise InvalidInput(
                f"Column {name!r} of table {location.name!r} is computed by {definition.call}. If the values to load "
                "are those of this function, say so: adopt=True; they count as computed then. Otherwise load another "
                "column."
            )
        if definition is None and adopt:
            raise InvalidInput(f"adopt=True is for computed columns, and {name!r} of table {location.name!r} is none.")
        if is_blob(dataset.schema.field(name)):
            raise InvalidInput(
                f"Column {name!r} of table {location.name!r} holds blobs, which cannot be loaded by key."
            )
    if not adopt:
        # A commit compares their fields with those of the table, in its order.
        there = dataset.schema.names
        return tuple(sorted(named, key=lambda name: there.index(name) if name in there else len(there)))
    output = Output.of(dataset, named[0])
    if set(output.columns) != set(named):
        raise InvalidInput(
            f"adopt=True takes the columns of one function: {', '.join(output.columns)}, not {', '.join(named)}."
        )
    return output.columns


def _is_same_list(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a list can hold what a list of fixed size does; files such as JSON have no such lists."""
    lists = pt.is_list(found) or pt.is_large_list(found)
    return bool(lists and pt.is_fixed_size_list(wanted) and castable(found.value_type, wanted.value_type))


def _plan(
    location: TableLocation,
    dataset: lance.LanceDataset,
    request: LoadRequest,
    delivery: SourceMapping,
    where: str | None,
    sizing: Sizing,
    notes: Sequence[str],
    unchecked: bool,
) -> Plan:
    columns, on = tuple(delivery.values), tuple(delivery.keys)
    definition = stored_definition(dataset.schema, columns[0]) if request.adopt else None
    facts = () if definition is None else definition.input_columns or ()
    field_id = output_id(dataset, columns, definition is not None)
    options = repr((delivery.source.fingerprint, on, columns, request.on_missing, request.on_duplicate))
    spec = LoadSpec(
        job_id=request.job_id,
        table=location.uri,
        table_name=location.name,
        column=columns[0],
        siblings=columns[1:],
        field_id=field_id,
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
        unchecked=unchecked,
    )
    manifest = read_manifest(dataset, spec.columns_at(dataset))
    tasks = FragmentTasks(
        FragmentTask(files, LOADED, live, live, len(live))
        for files in manifest.values()
        if files.live_rows and (live := live_offsets(dataset, files))
    )
    rows = int(manifest.live_rows.sum())
    plan = Plan(
        spec=replace(spec, rows=rows),
        shards=cut_shards(tasks, sizing.shard_size),
        rows_total=rows,
        reason_counts=(ReasonCount(LOADED, len(tasks), rows),),
        notes=tuple(notes),
        opened=(dataset, delivery.source if delivery.source.in_memory else None),
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
