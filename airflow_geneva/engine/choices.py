"""What users choose by a word, with what each word means, and how they write an age or a whole number."""

from __future__ import annotations

import re
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    from typing_extensions import Self

_MEANING = re.compile(r"^ *- `(\w+)`: (.+?)\.$", re.MULTILINE | re.DOTALL)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE = re.compile(r"(\d{1,9})([smhdw])")
_MOST_AGE = timedelta(days=365_000)
"""Nothing is older; a date that long ago still exists."""


class Choice(str, Enum):
    """A word of a parameter. It equals its text, which users pass and which is stored."""

    __str__ = str.__str__
    __repr__ = str.__repr__

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return tuple(one.value for one in cls)

    @classmethod
    def listed(cls) -> str:
        """List the words, for a message."""
        *others, last = map(repr, cls.words())
        return f"{', '.join(others)} or {last}"

    @classmethod
    def check(cls, parameter: str, given: object) -> Self:
        """Return a parameter's value as one of the words; `InvalidInput` if it is none."""
        if given not in cls.words():
            raise InvalidInput(f"{parameter}={given!r} is unknown. Use {cls.listed()}.")
        return cls(given)

    @classmethod
    def explained(cls) -> str:
        """Return each word with its meaning, from the docstring."""
        return "; ".join(f"{word}: {' '.join(text.split())}" for word, text in _MEANING.findall(cls.__doc__ or ""))


def undecided(word: NoReturn) -> NoReturn:
    """Never called: a type checker complains about a decision that does not have every word."""
    raise AssertionError(f"{word!r} is not decided.")


class OnCodeChange(Choice):
    """What becomes of values that other code computed.

    - `error`: stop before anything starts, and say how many rows they are.
    - `recompute`: run the new code on them.
    - `new_rows`: keep them, and run the new code on other due rows only.
    """

    ERROR = "error"
    RECOMPUTE = "recompute"
    NEW_ROWS = "new_rows"


class OnUnknownValues(Choice):
    """What becomes of due rows with values that no job of the table computed, as in a copy or a clone.

    - `error`: stop before anything starts, and say how many rows they are.
    - `adopt`: keep the column in the fragments of these rows as it is, NULL included, as if this code had computed it;
      keep the rows of a view if they are those of its query at the source version that it shows.
    - `recompute`: compute all of them.
    - `fill`: keep the values, and compute rows that are NULL; for columns only.
    """

    ERROR = "error"
    ADOPT = "adopt"
    RECOMPUTE = "recompute"
    FILL = "fill"


class OnMissing(Choice):
    """What becomes of rows whose key the source of a load lacks.

    - `keep`: their values stay.
    - `null`: their values become NULL.
    - `error`: load nothing.
    """

    KEEP = "keep"
    NULL = "null"
    ERROR = "error"


class OnDuplicate(Choice):
    """The row that counts if several rows of a load's source have the same key.

    - `error`: none; load nothing.
    - `first`: the first one.
    - `last`: the last one.
    """

    ERROR = "error"
    FIRST = "first"
    LAST = "last"


class OnPartial(Choice):
    """What `finish` does at the end of a job that is PARTIAL, because rows are left for the next run.

    - `warn`: log a warning, and succeed.
    - `fail`: fail the task, without an asset event.
    """

    WARN = "warn"
    FAIL = "fail"


class RunnerName(Choice):
    """Where a job is computed.

    - `auto`: in this process what takes less than ten seconds there, and the rest on Spark.
    - `inline`: in this process.
    - `spark`: on the active SparkSession, or on a local one.
    """

    AUTO = "auto"
    INLINE = "inline"
    SPARK = "spark"


def parse_age(parameter: str, given: timedelta | str) -> timedelta:
    """Parse an age, such as ``7d``, ``12h`` or ``30m``; InvalidInput if it is not above zero."""
    span = given
    if isinstance(span, str):
        match = _AGE.fullmatch(span.strip().lower())
        unit = timedelta(**{_UNITS[match[2]]: 1}) if match else timedelta(0)
        span = unit * min(int(match[1]), _MOST_AGE // unit) if match else unit
    if not isinstance(span, timedelta) or span <= timedelta(0):
        raise InvalidInput(
            f"{parameter}={given!r} is not an age. Give a number with a unit, such as 7d, 12h or 30m, or a timedelta "
            "above 0."
        )
    return span


def check_whole(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise InvalidInput if a parameter is not a whole number of at least `least`, and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidInput(f"{name}={value!r:.200} is not valid: give a whole number {bounds}.")
