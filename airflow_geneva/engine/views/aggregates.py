"""SQL aggregates of a view of groups: parse their text, find the type of their results, and compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.arrays import convert_array, rows_at, stored_as
from airflow_geneva.engine.lance_io.sql_text import Token, read_sql
from airflow_geneva.errors import InvalidInput, SumTooLarge

Function = Literal["count", "sum", "min", "max", "avg", "first", "last"]
FUNCTIONS: tuple[Function, ...] = get_args(Function)

_WRITE = "Write one of count(*), count(x), count(DISTINCT x), sum(x), min(x), max(x), avg(x), first(x) and last(x)"
_OR_A_FUNCTION = 'or give a function: {"name": (function, ["column"])}'
_MORE_DIGITS, _AVERAGE_DIGITS = 10, 4
"""Digits that a sum of decimals has before the point, and an average after it, beyond those of the values."""
_DIGITS_128, _DIGITS_256, _DIGITS_OF_ROWS = 38, 76, 19
_EXACTLY = Context(prec=2 * _DIGITS_256, rounding=ROUND_HALF_UP)
_LOW_BITS, _LOW = 32, (1 << 32) - 1

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Aggregate:
    """An SQL aggregate of a group's rows; `argument` is SQL over the source's columns, and None for ``count(*)``."""

    function: Function
    argument: str | None = None
    distinct: bool = False

    @property
    def is_ordered(self) -> bool:
        """Whether the result depends on the order of the rows."""
        return self.function in ("first", "last")


def parse_aggregate(text: str, column: str) -> Aggregate:
    """Parse the SQL aggregate of a column, such as ``count(DISTINCT kind)``.

    Raises:
        InvalidInput: it is not one aggregate; the message says what to write.
    """
    said = f"Column {column!r} is given {text!r:.200}, which "
    tokens = read_sql(text)
    if not tokens:
        raise InvalidInput(f"{said}is empty. {_WRITE}, {_OR_A_FUNCTION}.")
    name, close = tokens[0].bare, _end_of_call(tokens)
    called = [token for token in tokens if token.call and token.bare in FUNCTIONS and not token.field]
    if not tokens[0].call or close is None or (name not in FUNCTIONS and called):
        around = f"uses {called[0].bare}() within an expression" if called else "is not an aggregate of a group's rows"
        raise InvalidInput(
            f"{said}{around}. {_WRITE}, without anything around it; a view of this view can compute from the results. "
            "A column that is equal in all rows of a group belongs into group_by(...)."
        )
    if name not in FUNCTIONS:
        raise InvalidInput(f"{said}calls {name or tokens[0].text}(). {_WRITE}, {_OR_A_FUNCTION}.")
    if rest := tokens[close + 1 :]:
        raise InvalidInput(said + _why_no_end(rest))
    inside = tokens[2:close]
    distinct = bool(inside) and inside[0].bare == "distinct"
    inside = inside[distinct:]
    if any(one is not tokens[0] for one in called):
        raise InvalidInput(
            f"{said}has an aggregate within an aggregate. Make a view with the inner one, and a view of groups of it."
        )
    if not inside or [token.text for token in inside] == ["*"]:
        if name == "count" and inside and not distinct:
            return Aggregate("count")
        raise InvalidInput(f"{said}names no value: only count(*) counts rows. {_WRITE}.")
    if why := _why_no_argument(inside):
        raise InvalidInput(said + why)
    if distinct and name != "count":
        raise InvalidInput(f"{said}has DISTINCT, which only count takes. {_WRITE}, {_OR_A_FUNCTION}.")
    function = next(one for one in FUNCTIONS if one == name)
    return Aggregate(function, text[inside[0].start : inside[-1].end], distinct)


def _end_of_call(tokens: Sequence[Token]) -> int | None:
    """Return the position of the bracket that closes the first call; None if it stays open."""
    depth = 0
    for at, token in enumerate(tokens):
        if token.kind == "symbol":
            depth += (token.text in "([") - (token.text in ")]")
        if at and depth == 0:
            return at
    return None


def _why_no_end(rest: Sequence[Token]) -> str:
    match rest[0].bare:
        case "over":
            return (
                "is a window, which has a value for each row. A view of groups has one row for each group: leave OVER "
                "out, group by its partition, and give its order as agg(..., order_by=[...])."
            )
        case "filter":
            return (
                "has FILTER. Write the condition into the argument: count(nullif(condition, false)), or "
                "sum(x * CAST(condition AS BIGINT))."
            )
        case "ignore" | "respect" | "within":
            return f"has {rest[0].text.upper()} after the aggregate, which is not known here. {_WRITE}."
    return (
        f"has {rest[0].text!r:.50} after the aggregate. Give each aggregate a column of its own; a view of this view "
        "can compute from them."
    )


def _why_no_argument(inside: Sequence[Token]) -> str:
    depth = 0
    for at, token in enumerate(inside):
        if token.kind == "symbol":
            depth += (token.text in "([") - (token.text in ")]")
        if depth == 0 and token.text == ",":
            return f"has several values in one aggregate. {_WRITE}, {_OR_A_FUNCTION}."
        if depth == 0 and token.bare == "order" and at + 1 < len(inside) and inside[at + 1].bare == "by":
            return "has an order of its own. Give one order for all columns: agg(..., order_by=[...])."
    return ""


def result_type(aggregate: Aggregate, argument: pa.DataType | None, column: str) -> pa.DataType:
    """Return the type of an aggregate's results, given that of its argument.

    Raises:
        InvalidInput: values of that type cannot be aggregated so.
    """
    if argument is None or (aggregate.function == "count" and not aggregate.distinct):
        return pa.int64()
    stored = stored_as(argument)
    if aggregate.is_ordered:
        return stored
    kind = stored.value_type if pt.is_dictionary(stored) else stored
    if isinstance(kind, pa.BaseExtensionType) or pt.is_nested(kind) or pt.is_interval(kind):
        what = "be compared"
    elif aggregate.function == "count":
        return pa.int64()
    elif aggregate.function in ("min", "max"):
        return kind
    elif (found := _type_of_numbers(aggregate.function, kind)) is not None:
        return found
    else:
        what = "be added"
    raise InvalidInput(
        f"Column {column!r}: {aggregate.function}({aggregate.argument}) has values of type {argument}, which cannot "
        f"{what}. Cast them, as in CAST(x AS BIGINT), take a field of them, {_OR_A_FUNCTION}."
    )


def _type_of_numbers(function: Function, kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a sum or average; None if values cannot be added, or their exact sum cannot be computed."""
    if pt.is_floating(kind) or (pt.is_integer(kind) and function == "avg"):
        return pa.float64()
    if pt.is_integer(kind):
        return pa.int64() if pt.is_signed_integer(kind) else pa.uint64()
    if not pt.is_decimal(kind) or kind.precision + _DIGITS_OF_ROWS > _DIGITS_256:
        return None
    is_wide = kind.bit_width == 256
    most, make = (_DIGITS_256, pa.decimal256) if is_wide else (_DIGITS_128, pa.decimal128)
    if function == "sum":
        return make(min(kind.precision + _MORE_DIGITS, most), kind.scale)
    return make(min(kind.precision + _AVERAGE_DIGITS, most), min(kind.scale + _AVERAGE_DIGITS, most))


def aggregate_groups(aggregate: Aggregate, values: pa.Array | None, lengths: Lengths, column: str) -> pa.Array:
    """Aggregate rows that are sorted by group; return one value for each group.

    NULLs do not count, and an aggregate of no other values is NULL, as in SQL. NaN is equal to itself, and larger than
    any other number, as in Spark; -0.0 equals 0.0. `first` and `last` are the values of the first and last row, which
    may be NULL.

    Args:
        values: the argument's value for each row; None for ``count(*)``.
        lengths: the number of rows of each group, in the order of the rows.
        column: for the message of an error.

    Raises:
        SumTooLarge: a sum does not fit its type.
    """
    groups = _Groups(lengths)
    if aggregate.argument is None or values is None:
        return pa.array(lengths, pa.int64())
    wanted, values = result_type(aggregate, values.type, column), _without_views(values)
    if aggregate.is_ordered:
        rows = groups.starts if aggregate.function == "first" else groups.starts + lengths - 1
        return convert_array(groups.values_at(values, rows), wanted)
    if pt.is_dictionary(values.type):
        values = values.dictionary_decode()
    if aggregate.distinct:
        return groups.hashed(_comparable(values), "count_distinct", pc.CountOptions(mode="only_valid"), fill=0)
    counts = groups.sums(values.is_valid().to_numpy(zero_copy_only=False).astype(np.int64))
    match aggregate.function:
        case "count":
            return pa.array(counts, pa.int64())
        case "min" | "max":
            return convert_array(groups.extremes(aggregate.function, values, counts), wanted)
    made = _total(groups, aggregate, values, counts, wanted)
    if made is not None:
        return made
    raise SumTooLarge(
        f"Column {column!r}: {aggregate.function}({aggregate.argument}) of a group, of up to "
        f"{counted(int(lengths.max()), 'row')}, does not fit {wanted}. Cast the values to another type, as in "
        f"{aggregate.function}(CAST({aggregate.argument} AS DOUBLE)), or to DECIMAL(38, 0)."
    )


def _total(
    groups: _Groups, aggregate: Aggregate, values: pa.Array, counts: Lengths, wanted: pa.DataType
) -> pa.Array | None:
    """Return sums or averages; None if one does not fit its type."""
    empty = counts == 0
    if pt.is_floating(wanted):
        numbers = pc.fill_null(values.cast(pa.float64(), safe=False), 0.0).to_numpy(zero_copy_only=False)
        totals = groups.sums(numbers)
        with np.errstate(divide="ignore", invalid="ignore"):
            return pa.array(totals if aggregate.function == "sum" else totals / counts, wanted, mask=empty)
    if pt.is_integer(wanted):
        numbers = pc.fill_null(values.cast(wanted), 0).to_numpy(zero_copy_only=False)
        found, fits = groups.exact_sums(numbers)
        return pa.array(found, wanted, mask=empty) if fits else None
    sums = groups.hashed(values.cast(pa.decimal256(_DIGITS_256, values.type.scale)), "sum")
    try:
        if aggregate.function == "sum":
            return sums.cast(wanted)
        unit = Decimal((0, (1,), -wanted.scale))
        means = [
            None if total is None else _EXACTLY.divide(total, count).quantize(unit, context=_EXACTLY)
            for total, count in zip(sums.to_pylist(), counts.tolist(), strict=True)
        ]
        return pa.array(means, wanted)
    except pa.ArrowInvalid:
        return None


@dataclass(frozen=True)
class _Groups:
    """The rows of groups: `lengths` of them one after another, none of some."""

    lengths: Lengths

    @cached_property
    def starts(self) -> Lengths:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def has_rows(self) -> npt.NDArray[np.bool_]:
        return self.lengths > 0

    def values_at(self, values: pa.Array, rows: Lengths) -> pa.Array:
        """Return the value of one row of each group, NULL for a group without rows."""
        return rows_at(values, pa.array(rows, mask=~self.has_rows))

    def reduced(self, reduce: np.ufunc, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reduce the numbers of each group; 0 for a group without rows."""
        found = np.zeros(len(self.lengths), numbers.dtype)
        if self.has_rows.any():
            with np.errstate(invalid="ignore", over="ignore"):
                found[self.has_rows] = reduce.reduceat(numbers, self.starts[self.has_rows])
        return found

    def sums(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.reduced(np.add, numbers)

    def exact_sums(self, numbers: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], bool]:
        """Return the sums of 64-bit integers, and whether all of them fit into 64 bits."""
        if not len(numbers):
            return self.sums(numbers), True
        peak = max(abs(int(numbers.min())), abs(int(numbers.max())))
        if peak * int(self.lengths.max()) < 1 << 63:
            return self.sums(numbers), True
        signed = numbers.dtype == np.int64
        low = self.sums((numbers & numbers.dtype.type(_LOW)).astype(np.int64))
        high = self.sums((numbers >> numbers.dtype.type(_LOW_BITS)).astype(np.int64)) + (low >> _LOW_BITS)
        least, most = (-(1 << 31), 1 << 31) if signed else (0, 1 << 32)
        fits = bool(((high >= least) & (high < most)).all())
        return ((high << _LOW_BITS) | (low & _LOW)).view(numbers.dtype), fits

    def extremes(self, function: Function, values: pa.Array, counts: Lengths) -> pa.Array:
        """Return the smallest or the largest value of each group."""
        kind, is_min = values.type, function == "min"
        reduce: np.ufunc = np.minimum if is_min else np.maximum
        if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_temporal(kind)):
            return self.hashed(values, function)
        if pt.is_temporal(kind):
            values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
        if pt.is_floating(kind):
            # NaN is the largest number: fmin passes over it, and maximum returns it.
            missing, reduce = (np.nan, np.fmin) if is_min else (-np.inf, np.maximum)
        else:
            bounds = np.iinfo(values.type.to_pandas_dtype())
            missing = bounds.max if is_min else bounds.min
        filled = pc.fill_null(values, pa.scalar(missing, values.type)).to_numpy(zero_copy_only=False)
        made = pa.array(self.reduced(reduce, filled), values.type, mask=counts == 0)
        return made.view(kind) if pt.is_temporal(kind) else made

    def hashed(self, values: pa.Array, function: str, options: Any = None, fill: int | None = None) -> pa.Array:
        """Aggregate with a hash aggregate of pyarrow; `fill` is the result for a group without rows."""
        table = pa.table([np.repeat(np.arange(len(self.lengths)), self.lengths), values], names=["group", "value"])
        found = table.group_by("group", use_threads=False).aggregate([("value", function, options)])
        at = np.full(len(self.lengths), -1)
        at[found.column("group").to_numpy()] = np.arange(found.num_rows)
        made = found.column(f"value_{function}").combine_chunks()
        made = rows_at(made, pa.array(at, mask=at < 0)).cast(values.type if function in ("min", "max") else made.type)
        return made if fill is None else pc.fill_null(made, fill)


def _without_views(values: pa.Array) -> pa.Array:
    """Return values in a layout that pyarrow can take and aggregate."""
    if pt.is_string_view(values.type):
        return values.cast(pa.large_string())
    return values.cast(pa.large_binary()) if pt.is_binary_view(values.type) else values


def _comparable(values: pa.Array) -> pa.Array:
    """Return values of which equal ones have equal bits."""
    if not pt.is_floating(values.type):
        return values
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0
    return pa.array(np.where(np.isnan(numbers), np.nan, numbers), mask=values.is_null().to_numpy(zero_copy_only=False))
