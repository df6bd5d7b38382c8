"""What each Arrow type takes: plain Python values of which pyarrow makes exactly this type, or a refusal.

pyarrow itself truncates fractions and parts of seconds, reads a NumPy time in the unit of the column, and takes the
items of a pandas Series by label. Here, a value is stored as it is, by position, or does not fit.
"""

from __future__ import annotations

import collections
import datetime
import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from decimal import Clamped, Context, Decimal, DecimalException, Inexact, InvalidOperation, Overflow, Rounded
from itertools import chain
from numbers import Rational
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import castable, convert_exactly, is_binary, is_string
from airflow_geneva.engine.lance_io.to_python import python_value, python_values
from airflow_geneva.engine.runtime import uuid


class DoesNotFit(TypeError):
    """A value cannot be stored as the declared type."""


class Rule(ABC):
    """How Python values become one Arrow type; None becomes NULL in each."""

    @abstractmethod
    def are_exact(self, values: Sequence[Any]) -> bool:
        """Whether pyarrow stores all values as they are; runs no code of the values."""

    @abstractmethod
    def plain(self, value: Any) -> Any:
        """Return the value, which is not None, as pyarrow stores it; `DoesNotFit` if it cannot be stored."""

    def of(self, value: Any) -> Any:
        return None if value is None else self.plain(value)


def rule_of(data_type: pa.DataType) -> Rule:
    """Return the rule of a type; values of extension types become those of the storage type."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _Leaf(data_type, _STORED_AS.get(data_type.extension_name, frozenset()), _to_extension)
    if pt.is_struct(data_type):
        return _Struct(data_type)
    if pt.is_map(data_type):
        return _Map(data_type)
    if hasattr(data_type, "value_field"):
        return _List(data_type)
    if pt.is_dictionary(data_type):
        # pyarrow ends the process on some values for dictionaries, so that only known classes go there.
        inner = rule_of(data_type.value_type)
        if not isinstance(inner, _Leaf) or inner.exact is not None:
            return inner
        return _Leaf(data_type.value_type, _KNOWN, inner.convert)
    return _leaf(data_type)


class _Leaf(Rule):
    """Values that are not nested.

    Args:
        exact: classes whose values pyarrow stores as they are; None: it refuses all others.
        convert: makes a plain value of any other, or raises `DoesNotFit`.
        check: whether values of `exact` classes fit, given the values and their classes.
    """

    def __init__(
        self,
        data_type: pa.DataType,
        exact: frozenset[Any] | None,
        convert: Callable[[Any, pa.DataType], Any],
        check: Callable[[Sequence[Any], set[type]], bool] | None = None,
    ) -> None:
        self.data_type = data_type
        self.exact = exact
        self.convert = convert
        self.check = check

    def are_exact(self, values: Iterable[Any]) -> bool:
        if self.exact is None or (self.exact is _FLOATS and isinstance(values, list) and _are_floats([values])):
            return True
        if self.check is None:
            return self.exact.issuperset(set(map(type, values)))
        given = list(values)
        kinds = set(map(type, given))
        return self.exact.issuperset(kinds) and self.check(given, kinds)

    def plain(self, value: Any) -> Any:
        return self.convert(_without_dimensions(value, self.data_type), self.data_type)


class _List(Rule):
    def __init__(self, data_type: pa.DataType) -> None:
        self.data_type = data_type
        self.items = rule_of(data_type.value_type)

    def are_exact(self, values: Sequence[Any]) -> bool:
        if not _LISTS.issuperset(set(map(type, values))):
            return False
        if isinstance(self.items, _Leaf):
            if self.items.exact is None or (self.items.exact is _FLOATS and _are_floats(values)):
                return True
            return self.items.are_exact(chain.from_iterable(filter(None, values)))
        return self.items.are_exact(list(chain.from_iterable(filter(None, values))))

    def plain(self, value: Any) -> Any:
        items = value if self.are_exact([value]) else self._of_numpy(value)
        if items is None:
            items = list(map(self.items.of, _items(value, self.data_type)))
        size = getattr(self.data_type, "list_size", len(items))
        if len(items) != size:
            kind = "an array" if isinstance(value, np.ndarray) else "a list"
            raise DoesNotFit(f"expected a list of {size} values, got {kind} of {len(items)}")
        return items

    def _of_numpy(self, value: Any) -> Any:
        """Convert an array of numbers as a whole, like the arrays of many rows; None for anything else."""
        if type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind not in "iufb":
            return None
        made = pa.array(in_native_order(value))
        if not castable(made.type, self.data_type.value_type) or not isinstance(self.items, _Leaf):
            return None
        found = convert_exactly(made, self.data_type.value_type)
        if self.items.exact is _INTEGERS or self.items.exact is _FLOATS:
            return found.to_numpy()  # of exactly the type, as which pyarrow takes it fast
        return found.to_pylist()


class _Struct(Rule):
    def __init__(self, data_type: pa.DataType) -> None:
        self.data_type = data_type
        self.fields = {field.name: rule_of(field.type) for field in data_type}

    def are_exact(self, values: Sequence[Any]) -> bool:
        kinds = set(map(type, values))
        rows = [value for value in values if value is not None]
        if tuple in kinds:
            return _TUPLES.issuperset(kinds) and self._are_exact_tuples(rows)
        if not _DICTS.issuperset(kinds):
            return False
        if not all(row.keys() <= self.fields.keys() for row in rows):
            return False
        return all(rule.are_exact([row.get(name) for row in rows]) for name, rule in self.fields.items())

    def _are_exact_tuples(self, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Whether pyarrow stores tuples as they are, which have an item for each field."""
        if set(map(len, rows)) != {len(self.fields)}:
            return False
        columns = map(list, zip(*rows, strict=True))
        return all(rule.are_exact(column) for rule, column in zip(self.fields.values(), columns, strict=True))

    def plain(self, value: Any) -> Any:
        row = _as_dict(value, self.data_type)
        if not row.keys() <= self.fields.keys():
            unknown, known = sorted(map(str, row.keys() - self.fields.keys())), sorted(self.fields)
            raise DoesNotFit(f"the keys {unknown!r} are not fields of the struct, which has {known!r}")
        return {name: self.fields[name].of(item) for name, item in row.items()}


class _Map(Rule):
    def __init__(self, data_type: pa.DataType) -> None:
        self.data_type = data_type
        self.keys, self.values = rule_of(data_type.key_type), rule_of(data_type.item_type)

    def are_exact(self, values: Sequence[Any]) -> bool:
        kinds = set(map(type, values))
        if _DICTS.issuperset(kinds):
            rows = list(filter(None, values))
            return self.keys.are_exact(list(chain.from_iterable(rows))) and self.values.are_exact(
                list(chain.from_iterable(map(dict.values, rows)))
            )
        if not _MAPS.issuperset(kinds):
            return False
        pairs = list(chain.from_iterable(one.items() if type(one) is dict else one for one in values if one))
        if not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
            return False
        return self.keys.are_exact([key for key, _ in pairs]) and self.values.are_exact([item for _, item in pairs])

    def plain(self, value: Any) -> Any:
        pairs = _pairs(value, self.data_type)
        return [(self.keys.of(key), self.values.of(item)) for key, item in pairs]


_LISTS = frozenset({list, tuple, type(None)})
_DICTS = frozenset({dict, type(None)})
_TUPLES = frozenset({tuple, type(None)})
_MAPS = _LISTS | _DICTS
_INTEGERS = frozenset({int, type(None), *(np.dtype(f"{sign}{size}").type for sign in "iu" for size in (1, 2, 4, 8))})
# pyarrow reads unsigned integers of 64 bits as signed ones where floats are wanted.
_FLOATS = (_INTEGERS - {np.uint64, np.ulonglong}) | {float, bool, np.float16, np.float32, np.float64}
_KNOWN = frozenset({str, bytes, bool, Decimal, int, type(None)})
_STORED_AS: dict[str, frozenset[Any]] = {
    "arrow.json": frozenset({str, type(None)}),
    "arrow.uuid": frozenset({bytes, type(None)}),
    "arrow.bool8": frozenset({int, type(None)}),
}


def _leaf(data_type: pa.DataType) -> _Leaf:
    if pt.is_integer(data_type):
        return _Leaf(data_type, _INTEGERS, _to_integer)
    if pt.is_floating(data_type):
        return _Leaf(data_type, _FLOATS, _to_float)
    if is_string(data_type) or is_binary(data_type):
        return _Leaf(data_type, None, _to_text)
    if pt.is_timestamp(data_type):
        zoned, least = data_type.tz is not None, _microseconds(data_type)
        fits = functools.partial(_are_whole_times, zoned, least)
        return _Leaf(data_type, frozenset({datetime.datetime, int, type(None)}), _to_timestamp, fits)
    if pt.is_time(data_type):
        fits = functools.partial(_are_whole_times, False, _microseconds(data_type))
        return _Leaf(data_type, frozenset({datetime.time, type(None)}), _to_time, fits)
    if pt.is_duration(data_type):
        fits = functools.partial(_are_whole_durations, _microseconds(data_type))
        return _Leaf(data_type, frozenset({datetime.timedelta, int, type(None)}), _to_duration, fits)
    if pt.is_date(data_type):
        return _Leaf(data_type, frozenset({datetime.date, type(None)}), _to_date)
    if pt.is_decimal(data_type):
        if data_type.scale < 0:
            return _Leaf(data_type, frozenset({int, type(None)}), _to_decimal)
        fits = functools.partial(_are_short, _short_decimals(data_type))
        return _Leaf(data_type, frozenset({Decimal, int, type(None)}), _to_decimal, fits)
    return _Leaf(data_type, None, _to_number if pt.is_boolean(data_type) else _as_it_is)


def _refusal(value: Any, data_type: pa.DataType, why: str = "") -> DoesNotFit:
    return DoesNotFit(f"a {type(value).__name__} is not {data_type}{why and f': {why}'}")


def _without_dimensions(value: Any, data_type: pa.DataType) -> Any:
    """Return the value in a NumPy array, a tensor or an Arrow scalar of one value."""
    if isinstance(value, pa.Scalar):
        return python_value(value)
    dimensions = None if isinstance(value, memoryview) else getattr(value, "ndim", None)
    if dimensions:
        raise _refusal(value, data_type)
    if dimensions == 0 and not isinstance(value, np.generic) and hasattr(value, "__array__"):
        return np.asarray(value)[()]
    return value


def _as_it_is(value: Any, data_type: pa.DataType) -> Any:
    return value


def _to_number(value: Any, data_type: pa.DataType) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    return _to_integer(value, data_type) if _is_integer(value) else value


def _short_decimals(data_type: pa.DataType) -> Context:
    """Return a context that refuses decimals of which pyarrow makes another number, or on which it ends the process."""
    digits = 76 if data_type.bit_width == 256 else 38
    return Context(prec=digits, Emin=-1, Emax=digits - data_type.scale, traps=[Clamped, Overflow, Rounded])


def _are_short(context: Context, values: Sequence[Any], kinds: set[type]) -> bool:
    decimals = values if kinds == {Decimal} else [value for value in values if type(value) is Decimal]
    try:
        collections.deque(map(context.plus, decimals), maxlen=0)
    except DecimalException:
        return False
    return True


def _to_decimal(value: Any, data_type: pa.DataType) -> Any:
    return exact_decimal(value, data_type) if isinstance(value, Decimal) else _to_number(value, data_type)


def exact_decimal(value: Decimal, data_type: pa.DataType) -> Decimal:
    """Return a decimal with as many digits after the point as the type has, because pyarrow misreads other forms.

    Raises:
        DoesNotFit: it has more digits.
    """
    try:
        return value.quantize(Decimal((0, (1,), -data_type.scale)), context=_exactly(data_type.precision))
    except DecimalException:
        raise _refusal(value, data_type, "it has more digits") from None


@functools.cache
def _exactly(digits: int) -> Context:
    return Context(prec=digits, traps=[Inexact, InvalidOperation])


def _is_integer(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_, np.timedelta64)):
        return False
    return isinstance(value, (int, np.integer)) or hasattr(value, "__index__")


_DIGITS_OF_INTEGERS = 20


def _to_integer(value: Any, data_type: pa.DataType) -> Any:
    if _is_integer(value):
        return operator.index(value)
    if isinstance(value, (Decimal, Rational)) and not isinstance(value, (bool, np.generic)):
        if isinstance(value, Decimal) and value.adjusted() > _DIGITS_OF_INTEGERS:
            raise _refusal(value, data_type, "it is too large")
        if value == (whole := int(value)):  # type: ignore[arg-type]
            return whole
        raise _refusal(value, data_type, "it has a fraction")
    raise _refusal(value, data_type)


def _to_float(value: Any, data_type: pa.DataType) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (float, np.floating)):
        if (number := float(value)) == value or value != value:
            return number
        raise _refusal(value, data_type, "it has more digits")
    if isinstance(value, bool):
        return value
    if _is_integer(value):
        return operator.index(value)
    raise _refusal(value, data_type)


def _to_text(value: Any, data_type: pa.DataType) -> Any:
    if isinstance(value, (str, bytes, bytearray)):
        return value
    if isinstance(value, memoryview):
        return bytes(value)
    raise _refusal(value, data_type)


_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_UTC = datetime.timezone.utc
# Attoseconds of NumPy's units, of which the finest is the attosecond.
_ATTO = {"as": 1, "fs": 10**3, "ps": 10**6, "ns": 10**9, "us": 10**12, "ms": 10**15, "s": 10**18}
_ATTO |= {"m": 60 * _ATTO["s"], "h": 3_600 * _ATTO["s"], "D": 86_400 * _ATTO["s"], "W": 7 * 86_400 * _ATTO["s"]}


def _is_nat(value: Any) -> bool:
    """Whether this is the missing time (NaT) of NumPy or pandas."""
    kinds = (np.datetime64, np.timedelta64, datetime.date, datetime.timedelta)
    return isinstance(value, kinds) and bool(value != value)


def _microseconds(data_type: pa.DataType) -> int:
    """Return the unit of a type in microseconds, 1 for nanoseconds."""
    return max(_NANOSECONDS[str(data_type.unit)] // 1_000, 1)


def _are_whole_times(zoned: bool, least: int, values: Sequence[Any], kinds: set[type]) -> bool:
    for kind in kinds & {datetime.datetime, datetime.time}:
        times = values if len(kinds) == 1 else [value for value in values if type(value) is kind]
        zones = set(map(operator.attrgetter("tzinfo"), times))
        if (None in zones) if zoned else zones != {None}:
            return False
        if least > 1 and any(part % least for part in set(map(operator.attrgetter("microsecond"), times))):
            return False
    return True


def _are_whole_durations(least: int, values: Sequence[Any], kinds: set[type]) -> bool:
    return least == 1 or not any(value.microseconds % least for value in values if type(value) is datetime.timedelta)


def _are_floats(lists: Iterable[Any]) -> bool:
    """Whether all items are Python's own numbers; False if that is not certain. A sum is faster than their classes."""
    with suppress(Exception):
        return all(type(sum(one)) in (float, int) for one in lists if one)
    return False


def _ticks(nanoseconds: int, value: Any, data_type: pa.DataType) -> int:
    ticks, rest = divmod(nanoseconds, _NANOSECONDS[str(data_type.unit)])
    if rest:
        raise _refusal(value, data_type, "it is finer than the column's unit")
    return ticks


def _to_timestamp(value: Any, data_type: pa.DataType) -> Any:
    if _is_integer(value):
        return operator.index(value)
    if _is_nat(value):
        return None
    zoned = data_type.tz is not None
    if isinstance(value, np.datetime64) and not zoned:
        return _ticks(_numpy_nanoseconds(value, data_type), value, data_type)
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime) and not zoned:
        return _ticks((value.toordinal() - _EPOCH) * 86_400 * 10**9, value, data_type)
    if not isinstance(value, datetime.datetime):
        raise _refusal(value, data_type)
    finest = getattr(value, "nanosecond", 0)  # of pandas
    moment = value.to_pydatetime(warn=False) if hasattr(value, "to_pydatetime") else value
    if (moment.utcoffset() is not None) != zoned:
        advice = (
            "give it one" if zoned else f"remove it, or declare the type as pa.timestamp({data_type.unit!r}, 'UTC')"
        )
        raise _refusal(value, data_type, f"it has {'no' if zoned else 'a'} time zone; {advice}")
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=_UTC if zoned else None)
    return _ticks(_nanoseconds(since) + finest, value, data_type)


def _to_time(value: Any, data_type: pa.DataType) -> Any:
    if _is_integer(value):
        ticks = operator.index(value)
        if not 0 <= ticks * _NANOSECONDS[str(data_type.unit)] < 86_400 * 10**9:
            raise _refusal(value, data_type, "it is not within a day")
        return ticks
    if not isinstance(value, datetime.time):
        raise _refusal(value, data_type)
    if value.tzinfo is not None:
        raise _refusal(value, data_type, "it has a time zone")
    since = datetime.timedelta(0, value.hour * 3_600 + value.minute * 60 + value.second, value.microsecond)
    return _ticks(_nanoseconds(since), value, data_type)


def _to_duration(value: Any, data_type: pa.DataType) -> Any:
    if _is_integer(value):
        return operator.index(value)
    if _is_nat(value):
        return None
    if isinstance(value, np.timedelta64):
        return _ticks(_numpy_nanoseconds(value, data_type), value, data_type)
    if not isinstance(value, datetime.timedelta):
        raise _refusal(value, data_type)
    return _ticks(_nanoseconds(value) + getattr(value, "nanoseconds", 0), value, data_type)


_EPOCH = datetime.date(1970, 1, 1).toordinal()


def _to_date(value: Any, data_type: pa.DataType) -> Any:
    if _is_integer(value):
        ticks = operator.index(value)
        if pt.is_date64(data_type) and ticks % 86_400_000:
            raise _refusal(value, data_type, "it has a time of day")
        return ticks
    if _is_nat(value):
        return None
    if isinstance(value, np.datetime64):
        days, rest = divmod(_numpy_nanoseconds(value, data_type), 86_400 * 10**9)
        if rest:
            raise _refusal(value, data_type, "it has a time of day")
        return days * 86_400_000 if pt.is_date64(data_type) else days
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None or value.time() != datetime.time() or bool(getattr(value, "nanosecond", 0)):
            raise _refusal(value, data_type, "it has a time of day")
        return datetime.date(value.year, value.month, value.day)
    if not isinstance(value, datetime.date):
        raise _refusal(value, data_type)
    return value


def _nanoseconds(value: datetime.timedelta) -> int:
    return ((value.days * 86_400 + value.seconds) * 10**6 + value.microseconds) * 1_000


def _numpy_nanoseconds(value: np.datetime64 | np.timedelta64, data_type: pa.DataType) -> int:
    unit, count = np.datetime_data(value.dtype)
    if unit in ("Y", "M") and isinstance(value, np.datetime64):
        value, unit, count = value.astype("datetime64[D]"), "D", 1
    if unit not in _ATTO:
        raise _refusal(value, data_type, f"its unit {unit!r} has no fixed length")
    nanoseconds, rest = divmod(int(value.astype(np.int64)) * count * _ATTO[unit], _ATTO["ns"])
    if rest:
        raise _refusal(value, data_type, "it has a part of a nanosecond")
    return nanoseconds


def _to_extension(value: Any, data_type: pa.DataType) -> Any:
    name = data_type.extension_name
    if name == "lance.bfloat16" and not isinstance(value, bytes):
        from lance.arrow import bfloat16_array

        number = value.as_float() if hasattr(value, "as_float") else _to_float(value, data_type)
        return bfloat16_array([number]).storage[0].as_py()
    if isinstance(value, uuid.UUID):
        return value.bytes
    if name == "arrow.bool8" and isinstance(value, (bool, np.bool_)):
        return int(value)
    return rule_of(data_type.storage_type).of(value)


def _items(value: Any, data_type: pa.DataType) -> Iterable[Any]:
    """Return the items of a list in their order, whatever holds them."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, np.ma.MaskedArray):
        return [None if item is np.ma.masked else item for item in value]
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            raise _refusal(value, data_type)
        # Of times, tolist() returns integers.
        return value.tolist() if value.ndim == 1 and value.dtype.kind in "iufbUSO" else list(value)
    if isinstance(value, pa.Scalar):
        return _items(python_value(value), data_type)
    is_pandas = type(value).__module__.partition(".")[0] == "pandas"
    if isinstance(value, (pa.Array, pa.ChunkedArray)) or (hasattr(value, "__arrow_c_stream__") and not is_pandas):
        held = value if isinstance(value, (pa.Array, pa.ChunkedArray)) else pa.chunked_array(value)
        found, unreadable = python_values(held)
        for error in unreadable.values():
            raise error
        return found
    if is_pandas and hasattr(value, "isna") and not isinstance(value.dtype, np.dtype):
        return [None if missing else item for item, missing in zip(value, value.isna(), strict=True)]
    if hasattr(value, "__array__") and (not is_pandas or int(getattr(value, "ndim", 1)) != 1):
        return _items(np.asarray(value), data_type)
    if isinstance(value, Iterator):
        raise _refusal(value, data_type, "it can be read only once; return list(...) of it")
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise _refusal(value, data_type)
    return list(value)


def in_native_order(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in this machine's byte order, the only one that pyarrow reads."""
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _as_dict(value: Any, data_type: pa.DataType) -> Mapping[str, Any]:
    """Return the fields of a struct: of a mapping, a dataclass, a pydantic model, a tuple, or a list of pairs."""
    if isinstance(value, pa.Scalar):
        return _as_dict(python_value(value), data_type)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, type):
        raise _refusal(value, data_type)
    if is_dataclass(value):
        return {part.name: getattr(value, part.name) for part in fields(value)}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(names := getattr(type(value), "model_fields", None), Mapping):
        return {name: getattr(value, name) for name in names}
    if isinstance(value, tuple) and len(value) == data_type.num_fields:
        return {field.name: item for field, item in zip(data_type, value, strict=True)}
    if isinstance(value, list):
        pairs = _pairs(value, data_type)
        if len(row := dict(pairs)) == len(pairs):
            return row
    raise _refusal(value, data_type)


def _pairs(value: Any, data_type: pa.DataType) -> list[tuple[Any, Any]]:
    if isinstance(value, pa.Scalar):
        value = python_value(value)
    if isinstance(value, Mapping):
        return list(value.items())
    pairs = list(_items(value, data_type))
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise _refusal(value, data_type, "its entries are not pairs")
    return [(key, item) for key, item in pairs]
