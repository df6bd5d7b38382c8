"""What users choose by a word: each parameter with its words."""

from __future__ import annotations

from enum import Enum


class Choice(str, Enum):
    """A word of a parameter. It equals its text, which users pass and which is stored."""

    __str__ = str.__str__

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return tuple(one.value for one in cls)


class OnCodeChange(Choice):
    """What becomes of values that other code computed."""

    ERROR = "error"
    RECOMPUTE = "recompute"
    NEW_ROWS = "new_rows"


class OnUnknownValues(Choice):
    """What becomes of values that no job computed."""

    ERROR = "error"
    ADOPT = "adopt"
    RECOMPUTE = "recompute"
    FILL = "fill"


class OnMissing(Choice):
    """What becomes of rows whose key the source of a load lacks."""

    KEEP = "keep"
    NULL = "null"
    ERROR = "error"


class OnDuplicate(Choice):
    """The row that counts if several rows of a load's source have the same key."""

    ERROR = "error"
    FIRST = "first"
    LAST = "last"


class OnPartial(Choice):
    """What a task does at the end of a job that left rows for the next run."""

    WARN = "warn"
    FAIL = "fail"
