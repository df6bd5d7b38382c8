"""What mapping a batch gives: values, and the rows that failed."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from types import TracebackType

_MESSAGE_CHARS = 2_000
_TRACEBACK_CHARS = 8_000


@dataclass(frozen=True)
class RowFailure:
    """A row that was given up under a `Skip` rule.

    Args:
        index: the row within the batch.
        rule: position of the `Skip` in the policy, 0 for `"skip"`.
        exception: qualified name of the exception's class, such as `builtins.ValueError`.
        message: its text, up to 2,000 characters.
        traceback: the UDF's own frames, up to 8,000 characters; "" where there are none (timed out, crashed).
        calls: how often the UDF was called on it in this run, calls that other rows took part in included.
        column: the column of a query that was computed, where there may be several; else "".
    """

    index: int
    rule: int
    exception: str
    message: str
    traceback: str
    calls: int
    column: str = ""


@dataclass(frozen=True, eq=False)
class Mapped:
    """The outcome of a batch.

    Args:
        values: one a row, of the UDF's type; NULL for rows that failed.
        failures: those rows, in order.
        rows_called: rows the UDF was really called on, repeats included.
    """

    values: pa.Array
    failures: tuple[RowFailure, ...]
    rows_called: int

    def first(self, rows: int) -> Mapped:
        """The same of the first rows only."""
        failures = tuple(failure for failure in self.failures if failure.index < rows)
        return Mapped(self.values.slice(0, rows), failures, self.rows_called)


@dataclass(frozen=True)
class Trouble:
    """Why one call gave no values.

    Args:
        exception: qualified name of the exception's class.
        message: its text.
        traceback: the UDF's own frames, or "".
        fits: positions of the rules of the policy that fit, in order.
        complete: whether the message is all there is to say, as about an output that does not fit its column.
    """

    exception: str
    message: str
    traceback: str
    fits: tuple[int, ...]
    complete: bool = False

    @staticmethod
    def of(
        error: Exception, fits: tuple[int, ...], trace: TracebackType | None = None, complete: bool = False
    ) -> Trouble:
        """trace: the traceback from the UDF's first frame on."""
        text = "" if complete else "".join(traceback.format_exception(type(error), error, trace))
        return Trouble(
            exception=f"{type(error).__module__}.{type(error).__qualname__}",
            message=_printable(_text_of(error), _MESSAGE_CHARS),
            traceback=_printable(text, _TRACEBACK_CHARS, keep_end=True),
            fits=fits,
            complete=complete,
        )

    @property
    def name(self) -> str:
        """The class's own name."""
        return self.exception.rpartition(".")[2]


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its text cannot be made: {type(broken).__name__})"


def _printable(text: str, most: int, keep_end: bool = False) -> str:
    """Text that can be stored as UTF-8, cut to a length; of a traceback, the end says most."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= most:
        return text
    return "..." + text[3 - most :] if keep_end else text[: most - 3] + "..."
