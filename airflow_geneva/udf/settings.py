"""Checks of the settings that `@udf` takes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any

from airflow_geneva.errors import InvalidInput

DEFAULT_IN_FLIGHT = 16

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])?(?:i?b)?", re.IGNORECASE)


def check_name(setting: str, value: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidInput(
            f"{setting}={value!r} of a UDF: give up to 128 letters, digits, '_', '-', '+' and '.', "
            "beginning with a letter, digit or '_'."
        )
    return value


def check_sequence(setting: str, value: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidInput(f"{setting}={value!r} of a UDF: give a list, such as [{value!r}].")
    found = tuple(value)
    if setting == "input_columns" and not (found and all(isinstance(column, str) and column for column in found)):
        raise InvalidInput(f"input_columns={value!r} of a UDF: give the names of one or more columns.")
    return found


def check_rows(setting: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidInput(f"{setting}={value!r}: give a number of rows of at least 1, or None.")
    return value


def check_bounds(minimum: int | None, size: int | None, maximum: int | None) -> None:
    """Check that the sizes ascend, as far as they are given."""
    sizes = {"min_checkpoint_size": minimum, "checkpoint_size": size, "max_checkpoint_size": maximum}
    given = [(setting, value) for setting, value in sizes.items() if value is not None]
    for (low, low_value), (high, high_value) in itertools.pairwise(given):
        if low_value > high_value:
            raise InvalidInput(f"{low}={low_value} is above {high}={high_value}. Lower the first, or raise the second.")


def check_number(setting: str, value: float | None, above_zero: bool) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above_zero and value == 0):
        raise InvalidInput(f"{setting}={value!r}: give a number {'above' if above_zero else 'of at least'} 0, or None.")
    return value


def check_calls(is_async: bool, value: int | None, name: str) -> int | None:
    if value is not None and not is_async:
        raise InvalidInput(
            f"UDF {name!r} has max_in_flight={value!r}, and is a plain function, which is called once at a time. "
            "Make it `async def`, or leave max_in_flight out."
        )
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidInput(f"max_in_flight={value!r}: give a number of calls of at least 1, or None.")
    return DEFAULT_IN_FLIGHT if is_async and value is None else value


def check_flag(setting: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{setting}={value!r}: give True or False.")
    return value


def check_memory(value: int | str | None) -> int | None:
    """Return bytes for a number, or for a text such as "512m" or "4g" (powers of 1,024)."""
    amount: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (match := _MEMORY.fullmatch(value.strip())):
        amount = float(match[1]) * 1024 ** " kmgt".index((match[2] or " ").lower())
    if value is not None and (amount is None or amount < 1):
        raise InvalidInput(f'memory={value!r}: give bytes above 0, or a text such as "512m" or "4g".')
    return None if amount is None else int(amount)
