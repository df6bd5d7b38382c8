"""Expectations on the values of a column, which are checked before the values become visible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction
from importlib import import_module
from inspect import iscoroutine
from math import ceil, floor, inf, nextafter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.blobs import is_blob_type
from airflow_geneva.engine.storage.documents import well_typed
from airflow_geneva.errors import InvalidInput

WARN, FAIL = "warn", "fail"
_FRACTION = "max_null_fraction"
_FUNCTION = "satisfies"
_DIGITS = Context(prec=80)
"""Enough digits for every decimal type of Arrow, which has at most 76."""


@dataclass(frozen=True)
class Verdict:
    """The positions of values that are not as expected, and why, if a function was the check."""

    wrong: Sequence[int] = ()
    why: str = ""


@dataclass(frozen=True)
class Expectation:
    """An expectation on the values of a column, made by `not_null` or another function of this module.

    Args:
        kind: name of the function that made it.
        arguments: its arguments, as JSON values.
        level: `fail` keeps values that are not as expected invisible; `warn` reports them.
        whole: whether it is about all values that a job makes visible together, rather than about each row.
        function: the function of `satisfies`; it is not stored.
    """

    kind: str
    arguments: tuple[Any, ...] = ()
    level: str = FAIL
    whole: bool = False
    function: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.level not in (WARN, FAIL):
            raise InvalidInput(f"level={self.level!r} of {self} is not valid: give {WARN!r} or {FAIL!r}.")

    def __str__(self) -> str:
        shown = self.arguments if self.kind == _FUNCTION else map(repr, self.arguments)
        return f"{self.kind}({', '.join(shown)})"

    def to_json(self) -> dict[str, Any]:
        found = {"kind": self.kind, "arguments": list(self.arguments), "level": self.level, "whole": self.whole}
        return {name: value for name, value in found.items() if value}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Expectation:
        arguments = tuple(document.get("arguments", ()))
        found = Expectation(document["kind"], arguments, document["level"], document.get("whole", False))
        return well_typed(found)

    @property
    def needs_function(self) -> bool:
        return self.kind == _FUNCTION

    @property
    def needs_table(self) -> bool:
        """Whether it must see all values at once."""
        return self.whole and self.needs_function

    def allows(self, wrong: int, rows: int) -> bool:
        """Whether this number of wrong rows is allowed."""
        return wrong <= self.arguments[0] * rows if self.kind == _FRACTION else wrong == 0

    def judge(self, values: pa.Table) -> Verdict:
        """Check values, given as a table with one column."""
        column = values.column(0)
        if self.needs_function:
            return _call(self.function, values)
        if self.kind in ("not_null", _FRACTION):
            right = pc.is_valid(column)
        elif self.kind == "between":
            right = _is_between(column, *self.arguments)
        elif self.kind == "in_set":
            listed = pa.array(self.arguments[0])
            right = pc.or_(pc.is_null(column), pc.is_in(column, value_set=_like(listed, column.type)))
        else:
            raise InvalidInput(f"This version of airflow-geneva does not know the expectation {self}. Upgrade it.")
        return _not_set(right)


def not_null(*, level: str = FAIL) -> Expectation:
    """Expect a value in each row, except in rows on which the UDF failed; `max_failed` limits those."""
    return Expectation("not_null", (), level)


def max_null_fraction(fraction: float, *, level: str = FAIL) -> Expectation:
    """Expect that at most this fraction of the values that a job makes visible is NULL; failed rows do not count."""
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise InvalidInput(f"max_null_fraction({fraction!r}) is not valid: give a number from 0 to 1.")
    return Expectation(_FRACTION, (fraction,), level, whole=True)


def between(low: Any, high: Any, *, level: str = FAIL) -> Expectation:
    """Expect values from `low` to `high`, both included, or NULL. NaN is not between any two numbers.

    Numbers are compared exactly, even if the column's type cannot hold a bound.
    """
    ends = _plain(low), _plain(high)
    if all(isinstance(end, (int, float, Decimal)) for end in (low, high)) and low > high:
        raise InvalidInput(
            f"between({low!r}, {high!r}) is not valid: no value is between them. Give the lower one first."
        )
    return Expectation("between", ends, level)


def in_set(values: Iterable[Any], *, level: str = FAIL) -> Expectation:
    """Expect one of these values, or NULL."""
    if isinstance(values, (str, bytes)) or not (listed := [_plain(value) for value in values]):
        raise InvalidInput(f"in_set({values!r}) is not valid: give a list of one or more values.")
    return Expectation("in_set", (listed,), level)


def satisfies(function: Callable[[Any], Any], *, whole: bool = False, level: str = FAIL) -> Expectation:
    """Expect that a function accepts a `pa.Table`, whose only column has the name and values of the checked column.

    The function returns one boolean for all rows, of Python, Arrow, NumPy or pandas, such as `pc.all(...)`; or a list,
    an array or a Series with a boolean for each row; or None if all rows are as expected. A NULL boolean counts as
    False. If the function raises or returns anything else, the expectation is not met. The function may be the
    `validate` method of a pandera schema, which gets a data frame.

    Args:
        function: the function; it is imported again with the UDF where values are checked.
        whole: call it once, with all values that the job makes visible, rather than once for each batch of rows. All
            these values are then in memory at once, regardless of the job's memory budget.
        level: `fail` or `warn`.
    """
    if not callable(function):
        raise InvalidInput(f"satisfies({function!r:.80}) is not valid: give a function of a pa.Table.")
    whole_function = getattr(function, "func", function)
    name = getattr(whole_function, "__qualname__", None) or type(whole_function).__name__
    return Expectation(_FUNCTION, (name,), level, whole, function)


def check_expectations(given: Any, kind: pa.DataType) -> tuple[Expectation, ...]:
    """Check expectations against the type of their column, or of the output of their UDF."""
    found = (given,) if isinstance(given, Expectation) else tuple(given)
    for one in found:
        if isinstance(one, Expectation) and is_blob_type(kind) and one.kind not in ("not_null", _FRACTION):
            raise InvalidInput(
                f"{one} cannot be checked on blobs, only not_null() and max_null_fraction(): a staged file says only "
                "where blobs lie. Check each value in the function, and raise if it is not as expected."
            )
        if not isinstance(one, Expectation):
            raise InvalidInput(
                f"{one!r:.80} is no expectation. Give a list of not_null(), max_null_fraction(), "
                "between(), in_set() and satisfies(), from airflow_geneva.expect."
            )
        try:
            if not one.needs_function:
                one.judge(pa.table({"value": pa.array([], kind)}))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise InvalidInput(f"{one} cannot be checked on values of type {kind}: {error}") from error
    return tuple(_told_apart(found))


def _told_apart(given: Sequence[Expectation]) -> Iterator[Expectation]:
    """Number functions with equal names, because expectations are matched by name."""
    names = Counter[tuple[Any, ...]]()
    for one in given:
        if one.needs_function:
            names[one.arguments] += 1
            if (count := names[one.arguments]) > 1:
                one = replace(one, arguments=(f"{one.arguments[0]} #{count}",))
        yield one


def _plain(value: Any) -> Any:
    """Return a bound as a JSON value; dates and decimals become text, which is later cast to the column's type."""
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if not isinstance(value, (str, int, float)):
        raise InvalidInput(f"{value!r:.80} cannot be a value of an expectation: give a number, a text or a date.")
    return value


def _like(value: Any, kind: pa.DataType) -> Any:
    """Cast text and arrays to the column's type; Arrow compares numbers of different types."""
    if pa.types.is_string(value.type) or isinstance(value, pa.Array):
        return value.cast(kind)
    return value


def _is_between(column: pa.ChunkedArray, low: Any, high: Any) -> pa.ChunkedArray:
    """Return for each value whether it is between two bounds.

    Arrow compares numbers of two types as numbers of a third one, and fails if this type cannot hold one of them. So
    bounds become the nearest numbers of the column's type.
    """
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        first, last = (_like(pa.scalar(bound), kind) for bound in (low, high))
        return pc.and_(pc.greater_equal(column, first), pc.less_equal(column, last))
    kind = pa.float64() if pa.types.is_floating(kind) else kind
    first, last = _nearest(low, kind, up=True), _nearest(high, kind, up=False)
    if first is None or last is None:
        return pc.if_else(pc.is_valid(column), False, pa.scalar(None, pa.bool_()))
    column = column.cast(kind)
    return pc.and_(pc.greater_equal(column, pa.scalar(first, kind)), pc.less_equal(column, pa.scalar(last, kind)))


def _nearest(bound: Any, kind: pa.DataType, up: bool) -> Any:
    """Return the least number of a type that is not below a bound, or the greatest not above it; None if there is none.

    Raises:
        TypeError: the bound is not a number.
    """
    if isinstance(bound, bool):
        raise TypeError(f"{bound} is not a number")
    if isinstance(bound, str):
        try:
            bound = float(bound) if pa.types.is_floating(kind) else Decimal(bound)
        except (ValueError, InvalidOperation):
            raise TypeError(f"{bound!r} is not a number") from None
    if bound != bound:  # NaN
        return None
    if pa.types.is_floating(kind):
        try:
            found = float(bound)
        except OverflowError:
            found = inf if bound > 0 else -inf
        if found != bound and (found < bound) == up:
            found = nextafter(found, inf if up else -inf)
        return found
    scale = kind.scale if pa.types.is_decimal(kind) else 0
    least, most = _limits(kind)
    if bound in (inf, -inf):
        steps = most + 1 if bound > 0 else least - 1
    else:
        # Take a float as it is written, not as its exact binary fraction.
        exact = Fraction(repr(bound) if scale and isinstance(bound, float) else bound) * Fraction(10) ** scale
        steps = ceil(exact) if up else floor(exact)
    steps = max(steps, least) if up else min(steps, most)
    if not least <= steps <= most:
        return None
    return Decimal(steps).scaleb(-scale, _DIGITS) if pa.types.is_decimal(kind) else steps


def _limits(kind: pa.DataType) -> tuple[int, int]:
    """Return the least and the greatest number of an integer type; for a decimal type, in units of its last digit."""
    if pa.types.is_decimal(kind):
        most = 10**kind.precision - 1
        return -most, most
    return int(np.iinfo(kind.to_pandas_dtype()).min), int(np.iinfo(kind.to_pandas_dtype()).max)


def _call(function: Callable[[Any], Any], values: pa.Table) -> Verdict:
    rows = range(values.num_rows)
    try:
        answer = function(_as_taken(function, values))
    except Exception as error:
        cases = getattr(error, "failure_cases", None)
        at = _positions(cases, len(rows)) or rows
        return Verdict(at, f"{type(error).__name__}: {' '.join(str(error).split()):.300}")
    if answer is None or _is_of_pandera(function):
        return Verdict()
    one = _truth(answer)
    if one is not None:
        return Verdict(() if one else rows)
    mask = _booleans(answer)
    if mask is None:
        if iscoroutine(answer):
            answer.close()  # or Python warns that nobody awaited it
        kind = type(answer)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        return Verdict(rows, f"its function returned a value of type {name}, not True, False or a boolean for each row")
    if mask.type != pa.bool_() or len(mask) != len(rows):
        return Verdict(
            rows,
            f"its function returned {counted(len(mask), 'value')} of type {mask.type} for {counted(len(rows), 'row')}",
        )
    return _not_set(pc.fill_null(mask, False))


def _truth(answer: Any) -> bool | None:
    """Return the value of a single boolean, with False for NULL; None for anything else."""
    if isinstance(answer, pa.Scalar):
        return bool(answer.as_py()) if answer.type == pa.bool_() else None
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    single = isinstance(answer, np.ndarray) and answer.ndim == 0 and answer.dtype == np.bool_
    return bool(answer) if single else None


def _booleans(answer: Any) -> pa.Array | pa.ChunkedArray | None:
    """Return the values of a list, an array or a Series; None for anything else."""
    if isinstance(answer, (pa.Array, pa.ChunkedArray)):
        return answer
    if not isinstance(answer, (list, tuple)):
        # A Series of pandas or polars is an array to NumPy.
        answer = np.asarray(answer) if hasattr(answer, "__array__") else None
        if answer is None or answer.ndim != 1:
            return None
    try:
        return pa.array(answer, from_pandas=True)
    except pa.ArrowException:
        return None


def _as_taken(function: Any, values: pa.Table) -> Any:
    """Return the values in the form that a function takes: a data frame for pandera, else the table."""
    if not _is_of_pandera(function):
        return values
    return import_module("polars").from_arrow(values) if "polars" in _home(function) else values.to_pandas()


def _is_of_pandera(function: Any) -> bool:
    """Whether a function is a method of a pandera schema, which raises if values are wrong, and else returns them."""
    return _home(function).partition(".")[0] == "pandera"


def _home(function: Any) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    return type(getattr(function, "__self__", function)).__module__


def _positions(cases: Any, rows: int) -> list[int]:
    """Return the rows that a pandera error names; none if it names columns only."""
    try:
        found = sorted({int(at) for at in cases["index"]})
    except (KeyError, TypeError, ValueError):
        return []
    return found if found and found[-1] < rows else []


def _not_set(right: pa.ChunkedArray | pa.Array) -> Verdict:
    """Find the rows for which `right` is False; NULL means that it is not known, so the row is not wrong."""
    wrong = np.flatnonzero(~np.asarray(pc.fill_null(right, True)))
    return Verdict(wrong.tolist())
