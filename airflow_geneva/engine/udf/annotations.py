"""Arrow types from a UDF's annotations, and the check that a table's columns match them."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import decimal
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import castable, find_field, is_binary, is_list, is_string, stored_as
from airflow_geneva.engine.lance_io.blobs import is_blob_type
from airflow_geneva.engine.udf.signature import UNKNOWN, Signature, union_members
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    from airflow_geneva.engine.udf.decorator import UDF

# Python types: the Arrow type that they give, if there is one, and the Arrow types that they accept.
_PYTHON_TYPES: dict[Any, tuple[pa.DataType | None, Callable[[pa.DataType], bool]]] = {
    bool: (pa.bool_(), pt.is_boolean),
    int: (pa.int64(), lambda t: pt.is_integer(t) or pt.is_boolean(t)),
    float: (pa.float64(), lambda t: pt.is_floating(t) or pt.is_integer(t)),
    str: (pa.string(), is_string),
    bytes: (pa.binary(), is_binary),
    datetime.datetime: (pa.timestamp("us"), pt.is_timestamp),
    datetime.date: (pa.date32(), pt.is_date),
    datetime.time: (pa.time64("us"), pt.is_time),
    datetime.timedelta: (pa.duration("us"), pt.is_duration),
    decimal.Decimal: (None, pt.is_decimal),
}
_ARRAY_TYPES: dict[Any, pa.DataType] = {
    type(pa.nulls(0, data_type)): data_type
    for data_type in (
        *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.string_view()),
        *(pa.binary(), pa.large_binary(), pa.binary_view(), pa.date32(), pa.date64()),
    )
}
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, np.ndarray)
_MAPPINGS = (dict, collections.abc.Mapping)


def output_type(signature: Signature, data_type: pa.DataType | None, name: str) -> pa.DataType:
    """Return `data_type`, or the type that the return annotation determines; `InvalidInput` if they contradict."""
    if data_type is None:
        found = _type_of(signature.result)
        if found is not None:
            return found
        if signature.result is pa.Array:
            raise InvalidInput(
                f"Cannot validate generic pa.Array type of the result of UDF {name!r}: it does not say the type of its "
                "values. Give @udf(data_type=...), or annotate the result, for example as pa.Int64Array."
            )
        said = "is not annotated" if signature.result is UNKNOWN else f"is annotated as {_show(signature.result)}"
        raise InvalidInput(
            f"UDF {name!r} needs an output type: its result {said}, which does not determine one. "
            "Give @udf(data_type=...), for example data_type=pa.float32()."
        )
    if not isinstance(data_type, pa.DataType):
        raise InvalidInput(
            f"UDF {name!r} has data_type={data_type!r}, which is not an Arrow type. "
            "Give a pa.DataType, such as pa.int64()."
        )
    if signature.yields and (pt.is_primitive(data_type) or is_string(data_type) or is_binary(data_type)):
        raise InvalidInput(
            f"UDF {name!r} is a generator, whose values of a row become a list, and data_type is {data_type}. Give "
            "data_type=pa.list_(...), or return one value."
        )
    members = union_members(signature.result)
    whole_batch = signature.form != "scalar"
    # Arrow stores Python integers in such columns without losing their value.
    widens = int in members and (pt.is_floating(data_type) or pt.is_decimal(data_type))
    if not widens and not any(_gives(one, data_type, whole_batch) for one in members):
        raise InvalidInput(
            f"Type mismatch for the output of UDF {name!r}: its result is annotated as {_show(signature.result)} "
            f"and data_type is {data_type}. Make them agree."
        )
    return stored_as(data_type)


def _type_of(annotation: Any) -> pa.DataType | None:
    members = union_members(annotation)
    if len(members) != 1:
        return None
    annotation = members[0]
    if typing.get_origin(annotation) is list and (items := typing.get_args(annotation)):
        item = _type_of(items[0])
        return None if item is None else pa.list_(item)
    if isinstance(annotation, type):
        if (fields := _record_fields(annotation)) is not None:
            types = {name: _type_of(hint) for name, hint in fields.items()}
            return None if not types or None in types.values() else pa.struct(list(types.items()))
        if issubclass(annotation, np.generic):
            try:
                return pa.from_numpy_dtype(np.dtype(annotation))
            except (pa.ArrowException, TypeError):
                return None
        return _PYTHON_TYPES.get(annotation, (_ARRAY_TYPES.get(annotation),))[0]
    return None


def _record_fields(kind: type) -> dict[str, Any] | None:
    """Return the annotated fields of a dataclass, a NamedTuple or a TypedDict; None for any other class."""
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        names = list(kind._fields)
    elif names is None and typing.is_typeddict(kind):
        names = list(kind.__annotations__)
    if names is None:
        return None
    with suppress(Exception):  # an annotation that cannot be resolved determines no type
        hints = typing.get_type_hints(kind)
        return {name: hints.get(name) for name in names}
    return {}


def _gives(annotation: Any, data_type: pa.DataType, whole_batch: bool) -> bool:
    """Whether results with this annotation can be stored as `data_type`; True if the annotation does not say."""
    if (typing.get_origin(annotation) or annotation) is not np.ndarray:
        return accepts(annotation, data_type) is not False
    # An array for all rows of a batch may have any number of dimensions; an array for one row is a list.
    if not whole_batch and accepts(annotation, data_type) is False:
        return False
    item = _item_type(annotation)
    return item is None or _holds_items(item, data_type)


def _item_type(array: Any) -> pa.DataType | None:
    """Return the item type of an annotated NumPy array; None if the annotation does not say."""
    dtype = typing.get_args(array)[1:]
    item = typing.get_args(dtype[0]) if dtype else ()
    return _type_of(item[0]) if item else None


def _holds_items(item: pa.DataType, data_type: pa.DataType) -> bool:
    held = data_type
    while is_list(held):
        held = held.value_type
    if pt.is_null(held) or pt.is_map(held) or isinstance(held, pa.BaseExtensionType):
        return True
    if castable(item, held):
        return True
    # Inside lists Arrow also converts integers to times, booleans to times and floats, and strings to binary.
    plain = held.value_type if pt.is_dictionary(held) else held
    texts = (is_string(item) or is_binary(item)) and (is_string(plain) or is_binary(plain))
    truth = pt.is_boolean(item)
    times = (truth or pt.is_integer(item)) and pt.is_temporal(held)
    return held is not data_type and bool(texts or times or (truth and pt.is_floating(held)))


def accepts(annotation: Any, data_type: pa.DataType) -> bool | None:
    """Whether values of a column of this type match the annotation; None if the annotation does not say."""
    if isinstance(data_type, pa.BaseExtensionType):
        data_type = pa.large_binary() if is_blob_type(data_type) else data_type.storage_type
    members = union_members(annotation)
    if len(members) != 1:
        answers = [accepts(member, data_type) for member in members]
        return True if True in answers else None if None in answers or not answers else False
    annotation = members[0]
    if isinstance(annotation, type) and issubclass(annotation, pa.Array):
        return annotation is pa.Array or issubclass(type(pa.nulls(0, data_type)), annotation)
    if pt.is_dictionary(data_type):
        data_type = data_type.value_type
    if pt.is_null(data_type):
        return True
    origin = typing.get_origin(annotation) or annotation
    if origin in _LISTS:
        return _accepts_list(annotation, origin, data_type)
    if origin in _MAPPINGS:
        return bool(pt.is_struct(data_type) or pt.is_map(data_type))
    known = _PYTHON_TYPES.get(annotation) if isinstance(annotation, type) else None
    return None if known is None else bool(known[1](data_type))


def _accepts_list(annotation: Any, origin: Any, data_type: pa.DataType) -> bool:
    if not is_list(data_type):
        # A map's entries arrive as a list of pairs, and a string is a sequence too.
        return bool(pt.is_map(data_type)) or (origin is not list and origin is not np.ndarray)
    items = typing.get_args(annotation)
    if origin is np.ndarray or len(items) != 1:
        return True
    return accepts(items[0], data_type.value_type) is not False


def check_inputs(udf: UDF, schema: pa.Schema, input_columns: Sequence[str] | None, table_name: str) -> None:
    """Check that a table has the UDF's input columns, with types that its annotations allow."""
    check_input_fields(udf, {field.name: field for field in schema}, input_columns, table_name)


def check_input_fields(
    udf: UDF, fields: Mapping[str, pa.Field], input_columns: Sequence[str] | None, table_name: str
) -> None:
    """Check like `check_inputs`, given the table's fields by name."""
    if wrong := [one for one in (udf, udf.input_stage) if one.signature.takes_groups_only]:
        takes = "an iterator of batches" if wrong[0].form == "batches" else "whole columns, and is a generator"
        takes = "a state, and folds the rows of a group" if wrong[0].fold is not None else takes
        raise InvalidInput(
            f"UDF {wrong[0].name!r} takes {takes}, and so cannot compute a value for each row. Use it in "
            'query().group_by(...).agg({"name": (function, ["column"])}), which calls it once per group; or take the '
            "values of one row, or whole columns, and return an array."
        )
    columns = udf.resolve_inputs(input_columns)
    if columns is None:
        return
    found_fields = {column: find_field(fields, column) for column in columns}
    missing = [column for column, found in found_fields.items() if found is None]
    if missing:
        nested = [fields[root] for column in missing if (root := column.split(".")[0]) in fields]
        if nested:
            advice = f"Column {nested[0].name!r} is {nested[0].type}: give a field of a struct as 'column.field'."
        else:
            advice = (
                f'Map its inputs: table.add_columns({{"new_column": ({udf.name}, ["a_column"])}}), or, for an existing '
                'column, table.alter_columns(...); in a DAG, columns={"new_column": ("module:name", ["a_column"])}.'
            )
        stage = "" if udf.input_stage is udf else f" (of its preprocess={udf.input_stage.name})"
        raise InvalidInput(
            f"UDF {udf.name!r} expects input columns {missing!r}{stage} which are not found in table {table_name!r}, "
            f"whose columns are {list(fields)!r}. {advice}"
        )
    first = udf.input_stage
    signature, groups = first.signature, udf.groups
    if udf.fold is not None:
        signature, groups = udf.fold.rows, udf.fold.rows.form
    for position, column in enumerate(columns):
        annotation = UNKNOWN if signature.takes_batches else signature.annotation_at(position)
        found = found_fields[column]
        if found is None:
            continue
        if groups == "scalar" and accepts(annotation, pa.list_(found.type)) is False:
            raise InvalidInput(
                f"Type mismatch for column {column!r} of table {table_name!r}: UDF {first.name!r} takes "
                f"{_show(annotation)} there, and gets the values of all rows of a group, each of type {found.type}. "
                "Annotate the parameter as a list, such as list[str], or as pa.Array."
            )
        if groups != "scalar" and accepts(annotation, found.type) is False:
            raise InvalidInput(
                f"Type mismatch for column {column!r} of table {table_name!r}: it is {found.type}, and UDF "
                f"{first.name!r} takes {_show(annotation)} there. Correct the annotation, or map another column to it."
            )


def _show(annotation: Any) -> str:
    if union_members(annotation) != [annotation]:
        return " | ".join("None" if one is type(None) else _show(one) for one in typing.get_args(annotation))
    if typing.get_origin(annotation) is np.ndarray and (item := _item_type(annotation)) is not None:
        return f"NDArray[{item}]"
    return annotation.__name__ if type(annotation) is type else str(annotation)
