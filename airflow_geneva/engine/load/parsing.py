"""Convert the text of CSV and JSON to values: the type of the table's column decides, and no value changes.

A value that the type cannot hold exactly is refused. Columns that the table lacks get the first type that fits the
values of all files.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.json as pjson
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import is_list, is_string, map_leaves, nested_types, storage_type
from airflow_geneva.engine.lance_io.plain_values import DoesNotFit, exact_decimal
from airflow_geneva.engine.load.texts import TEXT_BLOCK, CheckedText, row_too_large
from airflow_geneva.errors import InvalidInput

MISSING = ("", "NA", "N/A", "NULL", "null")
"""Fields of CSV that are NULL in columns that hold no text; in columns of text, only an empty unquoted field is."""
_MISSING = pa.array(MISSING)
_CSV = pcsv.ParseOptions(newlines_in_values=True)
_READ_CSV = pcsv.ReadOptions(use_threads=False, block_size=TEXT_BLOCK)
_EXACT = 2.0**53
"""The first double to which several integers are rounded."""
_INTEGER = r"^-?(0|[1-9][0-9]*)$"
_CODE = r"^([+]|-?0[0-9]|-?[0-9]{16,}$)"
"""Texts of which a number would not keep all digits: 01234, +49123, and more digits than a double has."""
_SHORT = r"^[+-]?[0-9]{0,19}[.]?[0-9]{0,19}$"
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_TIME = r"^[0-9]{2}:[0-9]{2}"
_WORD = r"^(?i:true|false)$"
_GUESSES: tuple[pa.DataType, ...] = (
    pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns"),
    pa.timestamp("s", "UTC"), pa.timestamp("ns", "UTC"), pa.float64(),
)  # fmt: skip


def parsed_type(kind: pa.DataType, format: str) -> pa.DataType:
    """Return the type as which text is parsed; Arrow casts the result to the type of the column."""

    def leaf(one: pa.DataType) -> pa.DataType:
        one = one.value_type if pt.is_dictionary(one) else one
        if pt.is_floating(one):
            return pa.float64()
        exact = pt.is_integer(one) or pt.is_decimal(one) or pt.is_boolean(one)
        return one if exact or pt.is_date(one) or pt.is_time(one) or pt.is_timestamp(one) else pa.string()

    def nested(one: pa.DataType) -> pa.DataType:
        if is_list(one):
            return pa.list_(nested(one.value_type))
        if pt.is_struct(one):
            return pa.struct([pa.field(field.name, nested(field.type)) for field in one])
        return leaf(one)

    stored = storage_type(kind)
    return nested(stored) if format == "json" else leaf(stored)


# --- texts to values


def parse(texts: pa.Array, kind: pa.DataType, column: str, path: str, first_row: int | None) -> pa.Array:
    """Convert texts to values of a type that `parsed_type` returned.

    Args:
        column, path, first_row: name a text in errors; without the row, texts are parts of rows.

    Raises:
        InvalidInput: the type has no such value.
    """
    if is_string(kind):
        return texts
    try:
        return _parsed(texts, kind)
    except pa.ArrowException:
        at, error = _first_error(texts, kind)
        row = "" if first_row is None else f" in row {first_row + at:,}"
        raise InvalidInput(
            f"Column {column!r} of {path!r} has {texts[at].as_py()!r:.200}{row}, which cannot be loaded as {kind}: "
            f"{error}. Correct it, or load it to a column of text."
        ) from None


def _first_error(texts: pa.Array, kind: pa.DataType) -> tuple[int, str]:
    start, end, reason = 0, len(texts), ""
    while end - start > 1:
        middle = (start + end) // 2
        try:
            _parsed(texts.slice(start, middle - start), kind)
            start = middle
        except pa.ArrowException as error:
            end, reason = middle, str(error)
    try:
        _parsed(texts.slice(start, 1), kind)
    except pa.ArrowException as error:
        reason = str(error)
    return start, reason.rstrip(".")


def _parsed(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return _parsed_as_written(texts, kind)
    except pa.ArrowException:
        trimmed = pc.ascii_trim(texts, " \t")
        if trimmed.equals(texts):
            raise
        return _parsed_as_written(trimmed, kind)


def _parsed_as_written(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if pt.is_integer(kind):
        return _integers(texts, kind)
    if pt.is_floating(kind):
        return _doubles(texts)
    if pt.is_time(kind):
        if _any(pc.invert(pc.match_substring_regex(texts, _TIME))):
            raise pa.ArrowInvalid("it is no time of a day, such as 23:59:59")
        day = pc.binary_join_element_wise("1970-01-01 ", texts, "")
        return day.cast(pa.timestamp(kind.unit)).cast(kind)
    if pt.is_boolean(kind) or pt.is_temporal(kind):
        return texts.cast(kind)
    return _decimals(texts, pa.decimal128(kind.precision, kind.scale) if kind.bit_width < 128 else kind).cast(kind)


def _integers(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if _any(pc.match_substring(texts, "x")) or _any(pc.match_substring(texts, "X")):
        raise pa.ArrowInvalid("it is no decimal number")
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        return _decimals(texts, pa.decimal128(38, 0)).cast(kind)  # which also reads 1.0 and 1e3


def _decimals(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    # Arrow makes another number of 39 digits, 0 of 1e-39, and ends the process on 1e-999999999.
    long = pc.fill_null(pc.invert(pc.match_substring_regex(texts, _SHORT)), False)
    if _any(long):
        written = [_written_out(text, kind) for text in texts.filter(long).to_pylist()]
        texts = pc.replace_with_mask(texts, long, pa.array(written, texts.type))
    return texts.cast(kind)


def _written_out(text: str, kind: pa.DataType) -> str:
    """Write a decimal without an exponent, with as many digits after the point as its type has."""
    if not _DECIMAL.fullmatch(text):
        raise pa.ArrowInvalid("it is no decimal number")
    try:
        return f"{exact_decimal(Decimal(text), kind):f}"
    except DoesNotFit:
        raise pa.ArrowInvalid("it has too many digits") from None


def _doubles(texts: pa.Array) -> pa.Array:
    made = texts.cast(pa.float64())
    large = pc.greater_equal(pc.abs(made), _EXACT)
    if _any(large):
        for text in texts.filter(large).unique().to_pylist():
            if not _is_double(text):
                raise pa.ArrowInvalid("a floating number would be another one")
    return made


def _is_double(text: str) -> bool:
    """Whether a number of 2 ** 53 or more is not infinite, and an integer is exact, as a double."""
    number = float(text)
    if number in (float("inf"), float("-inf")):
        return "inf" in text.lower()
    digits = re.fullmatch("[+-]?0*([0-9]+)", text)
    return digits is None or int(digits[1]) == abs(number)


def _any(found: pa.Array) -> bool:
    return bool(pc.any(found).as_py())


# --- types of columns that the table lacks


class _Guess:
    """The types that all texts so far fit."""

    def __init__(self) -> None:
        self._left: list[pa.DataType] = list(_GUESSES)
        self._seen = False

    @property
    def is_text(self) -> bool:
        return not self._left

    def look(self, texts: pa.Array) -> None:
        given = texts.filter(pc.invert(pc.is_in(texts, pa.concat_arrays([_MISSING, pa.nulls(1, pa.string())]))))
        if len(given):
            self._seen = True
            given = pc.ascii_trim(given, " \t")
            if self._left[:1] == [pa.int64()] and (digits := _digits(given)):
                # What integers fit is known without parsing them as all other types.
                self._left = [
                    kind for kind in self._left if pt.is_integer(kind) or (pt.is_floating(kind) and digits < 16)
                ]
            else:
                left = [kind for kind in self._left if not pt.is_integer(kind)]
                # Arrow makes an error of each text that does not fit, which takes time.
                left = [kind for kind in left if _fits(given.slice(0, 10), kind)]
                self._left = [kind for kind in left if _fits(given, kind)]
                if self._left == [pa.float64()] and not _any(pc.is_finite(given.cast(pa.float64()))):
                    self._left = []  # names such as Nan and Inf

    def type(self) -> pa.DataType:
        return self._left[0] if self._seen and self._left else pa.string()


def _digits(texts: pa.Array) -> int:
    """Return the most letters of integers of 64 bits; 0 if other texts are among them."""
    if not pc.all(pc.match_substring_regex(texts, _INTEGER)).as_py():
        return 0
    try:
        texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return 0
    return int(pc.max(pc.binary_length(texts)).as_py())


def _fits(texts: pa.Array, kind: pa.DataType) -> bool:
    if pt.is_boolean(kind):
        return bool(pc.all(pc.match_substring_regex(texts, _WORD)).as_py())
    if pt.is_floating(kind) and _any(pc.match_substring_regex(texts, _CODE)):
        return False
    try:
        _parsed_as_written(texts, kind)
    except pa.ArrowException:
        return False
    return True


# --- CSV


def csv_names(text: CheckedText) -> list[str]:
    """Return the names in the first row."""
    with _explaining_rows(text.path):
        return list(pcsv.open_csv(text, _READ_CSV, _CSV).schema.names)


def read_csv(text: CheckedText, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read columns as the types of `parsed_type`."""
    row = 1
    for batch in _csv_texts(text, schema.names):
        columns = [parse(_present(batch, field), field.type, field.name, text.path, row) for field in schema]
        row += batch.num_rows
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _present(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    texts = batch.column(field.name)
    return texts if is_string(field.type) else pc.if_else(pc.is_in(texts, _MISSING), None, texts)


def guess_csv(texts: Iterable[CheckedText], names: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the types of columns that fit all rows of some files."""
    guesses = {name: _Guess() for name in names}
    for text in texts:
        left = [name for name in names if not guesses[name].is_text]
        for batch in _csv_texts(text, left) if left else ():
            for name in left:
                guesses[name].look(batch.column(name))
    return {name: guess.type() for name, guess in guesses.items()}


def _csv_texts(text: CheckedText, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    convert = pcsv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), include_columns=list(names), strings_can_be_null=True,
        null_values=[""], quoted_strings_can_be_null=False,
    )  # fmt: skip
    try:
        with _explaining_rows(text.path):
            for batch in pcsv.open_csv(text, _READ_CSV, _CSV, convert):
                yield batch.select(names)
    except KeyError as error:  # "Column 'n' in include_columns does not exist in CSV file"
        raise incomplete(text.path, str(error).split("'")[1]) from None


@contextmanager
def _explaining_rows(path: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        if "straddling" in str(error):
            raise row_too_large(path) from None
        raise


def incomplete(path: str, column: str) -> InvalidInput:
    return InvalidInput(
        f"{path!r} has no column {column!r}, which the first file has. Load files with other columns on their own, or "
        "add the column."
    )


# --- JSON

_LONG = re.compile(rb"[0-9.][eE][+-]?[0-9]|[0-9.]{39}|\\u00")
"""Numbers of which Arrow may make another decimal, and escapes, which may hide one."""
_NULL_FIRST = re.compile(rb"[ \t\r\n]*null")
_BLANKS = re.compile(r"[ \t\r\n]*")


class _Number(str):
    """A number of JSON as it is written."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the field {name!r:.100} is there twice")
        found[name] = value
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_once, parse_int=_Number, parse_float=_Number, parse_constant=_Number)


def json_names(text: CheckedText) -> list[str]:
    """Return the names of the fields in the first block."""
    names = dict[str, None]()
    for block in text.rows():
        for _, row in _objects(block, text.path, 1):
            names |= dict.fromkeys(row)
        break
    if not names:
        raise InvalidInput(f"Cannot read {text.path!r}: it has no row with a field.")
    return list(names)


def _objects(block: bytes, path: str, first_row: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse rows one by one, with numbers as they are written; yield the number of each row, too."""
    text, at = block.decode(), 0
    for number in itertools.count(first_row):
        at = _BLANKS.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return
        try:
            row, at = _JSON.raw_decode(text, at)
            if row is not None and not isinstance(row, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise InvalidInput(
                f"Row {number:,} of {path!r} is no valid JSON: {error}. Write one object a line."
            ) from None
        yield number, row or {}


def read_json(text: CheckedText, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read columns as the types of `parsed_type`; blocks that Arrow refuses, or would round, are parsed row by row."""
    row = 1
    for block in text.rows():
        columns = _columns_by_arrow(block, schema, text.path)
        if columns is None:
            columns = _columns_by_rows(block, schema, text.path, row)
        made = [
            _valued(values, field.type, field.name, text.path, row)
            for values, field in zip(columns, schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(made, schema=schema)
        row += batch.num_rows
        yield batch


def _columns_by_arrow(block: bytes, schema: pa.Schema, path: str) -> list[pa.Array] | None:
    if any(map(pt.is_decimal, itertools.chain(*map(nested_types, schema.types)))) and _LONG.search(block):
        return None
    carried = pa.schema([(field.name, map_leaves(field.type, _as_json)) for field in schema])
    # Arrow drops the fields of a struct that it does not know, unless it infers them.
    unknown = "infer" if any(map(pt.is_struct, itertools.chain(*map(nested_types, carried.types)))) else "ignore"
    try:
        found = _read_block(block, pjson.ParseOptions(explicit_schema=carried, unexpected_field_behavior=unknown))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    columns = [found.column(field.name).combine_chunks() for field in carried]
    exact = all(
        column.type == field.type and not _may_be_rounded(column)
        for column, field in zip(columns, carried, strict=True)
    )
    return columns if exact else None


def _read_block(block: bytes, parse: pjson.ParseOptions) -> pa.Table:
    if _NULL_FIRST.match(block):
        raise pa.ArrowInvalid("Arrow ends the process if the first row is null")
    return pjson.read_json(
        pa.BufferReader(block), pjson.ReadOptions(use_threads=False, block_size=len(block) + 1), parse
    )


def _as_json(kind: pa.DataType) -> pa.DataType:
    """Return the type of a leaf that Arrow reads exactly or refuses; as times, it reads numbers and drops zones."""
    return pa.string() if pt.is_temporal(kind) else kind


def _may_be_rounded(values: pa.Array) -> bool:
    if is_list(values.type):
        return _may_be_rounded(values.values)
    if pt.is_struct(values.type):
        return any(_may_be_rounded(values.field(at)) for at in range(values.type.num_fields))
    return bool(pt.is_float64(values.type) and _any(pc.greater_equal(pc.abs(values), _EXACT)))


def _columns_by_rows(block: bytes, schema: pa.Schema, path: str, first_row: int) -> list[pa.Array]:
    texts: list[list[Any]] = [[] for _ in schema]
    for number, row in _objects(block, path, first_row):
        for field, column in zip(schema, texts, strict=True):
            try:
                column.append(_as_texts(row.get(field.name), field.type))
            except TypeError as error:
                raise InvalidInput(
                    f"Column {field.name!r} of {path!r} cannot be loaded as {field.type}: {error}, in row {number:,}. "
                    "Correct it, or load it to a column of another type."
                ) from None
    try:
        types = (map_leaves(kind, lambda _: pa.string()) for kind in schema.types)
        return [pa.array(column, kind) for column, kind in zip(texts, types, strict=True)]
    except UnicodeEncodeError:
        raise InvalidInput(f"{path!r} has half of a surrogate pair, such as \\ud800, which is no character.") from None


def _as_texts(value: Any, kind: pa.DataType) -> Any:
    """Replace the leaves of a value by their texts; `TypeError` if its form is not that of the type."""
    if value is None:
        return None
    if is_list(kind):
        if not isinstance(value, list):
            raise TypeError(f"{_shown(value)} is no array")
        return [_as_texts(one, kind.value_type) for one in value]
    if pt.is_struct(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{_shown(value)} is no object")
        if unknown := [name for name in value if kind.get_field_index(name) < 0]:
            raise TypeError(f"the type lacks the field {unknown[0]!r}")
        return {field.name: _as_texts(value.get(field.name), field.type) for field in kind}
    if isinstance(value, (list, dict)):
        raise TypeError(f"{_shown(value)} is no single value")
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.100}"


def _valued(values: pa.Array, kind: pa.DataType, column: str, path: str, row: int | None) -> pa.Array:
    """Convert the leaves that are texts to the leaves of a type."""
    if values.type == kind:
        return values
    if is_list(kind):
        items = _valued(values.values, kind.value_type, column, path, None)
        return pa.ListArray.from_arrays(values.offsets, items, kind, mask=values.is_null())
    if pt.is_struct(kind):
        fields = [_valued(values.field(at), field.type, column, path, None) for at, field in enumerate(kind)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=values.is_null())
    return parse(values, kind, column, path, row)


def guess_json(texts: Iterable[CheckedText], names: Sequence[str]) -> dict[str, pa.DataType]:
    """Return the types of columns that all rows of some files have."""
    found: dict[str, pa.DataType] = dict.fromkeys(names, pa.null())
    for text in texts:
        row = 1
        for block in text.rows():
            types, rows = _block_types(block, names, text.path, row)
            row += rows
            for name, kind in types.items():
                try:
                    found[name] = _merged(found[name], kind)
                except TypeError as error:
                    raise _mixed(name, text.path, str(error)) from None
    return {name: map_leaves(kind, lambda one: pa.string() if pt.is_null(one) else one) for name, kind in found.items()}


def _mixed(name: str, path: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"Column {name!r} of {path!r} has no type that holds all its values: {reason}. Add the column to the table "
        "first, with a type that does, such as string, or decimal128 for long numbers."
    )


def _block_types(
    block: bytes, names: Sequence[str], path: str, first_row: int
) -> tuple[Mapping[str, pa.DataType], int]:
    try:
        found = _read_block(block, pjson.ParseOptions())
        columns = {name: found.column(name).combine_chunks() for name in names if name in found.schema.names}
        if not any(_may_be_rounded(column) for column in columns.values()):
            texts = {name: map_leaves(column.type, _as_json) for name, column in columns.items()}
            return texts, found.num_rows
    except pa.ArrowInvalid:
        pass
    types, number = dict.fromkeys(names, pa.null()), first_row - 1
    for number, row in _objects(block, path, first_row):
        for name in names:
            try:
                types[name] = _merged(types[name], _type_of(row.get(name)))
            except TypeError as error:
                raise _mixed(name, path, f"{error}, in row {number:,}") from None
    return types, number - first_row + 1


def _type_of(value: Any) -> pa.DataType:
    if value is None:
        return pa.null()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, _Number):
        if not re.fullmatch("-?[0-9]+", value):
            return pa.float64()
        if len(value) > 20 or not -(1 << 63) <= int(value) < 1 << 63:
            raise TypeError(f"{value:.50} exceeds 64 bits")
        return pa.int64()
    if isinstance(value, list):
        kind = pa.null()
        for one in value:
            kind = _merged(kind, _type_of(one))
        return pa.list_(kind)
    if isinstance(value, dict):
        return pa.struct([(name, _type_of(one)) for name, one in value.items()])
    return pa.string()


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type of two that holds the values of both; raise `TypeError` if there is none."""
    if one == other or pt.is_null(other):
        return one
    if pt.is_null(one):
        return other
    if pt.is_list(one) and pt.is_list(other):
        return pa.list_(_merged(one.value_type, other.value_type))
    if pt.is_struct(one) and pt.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = _merged(fields.get(field.name, pa.null()), field.type)
        return pa.struct(list(fields.items()))
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    raise TypeError(f"{one} and {other}")
