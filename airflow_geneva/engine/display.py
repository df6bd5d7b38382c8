"""Text and HTML representations of tables, plans, jobs and results, for consoles and notebooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.masking import mask_secrets

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST = 80
_SHOWN_VALUES, _SHOWN_CHARS = 4, 40
_MOST_ROWS, _MOST_COLUMNS = 50, 20
"""The most rows and columns of a grid."""


@dataclass(frozen=True)
class Summary:
    """The content of a table or a database: a title, and rows of cells below it, of which the first 50 are shown.

    `left_out` is the number of rows beyond `rows`.
    """

    title: str
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    preview: Callable[[], pa.Table] | None = None
    left_out: int = 0

    @property
    def _shown(self) -> list[Sequence[str]]:
        more = self.left_out + max(len(self.rows) - _MOST_ROWS, 0)
        rest = [("…", f"and {more:,} more", *("" for _ in self.headings[2:]))] if more else []
        return [*self.rows[:_MOST_ROWS], *rest]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._shown, strict=True)]
        lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in self._shown)
        return "\n".join([self.title, *(f"  {line}".rstrip() for line in lines)])

    def html(self) -> str:
        listed = _grid(self.headings, self._shown) if self.rows else ""
        return html_text(self.title) + listed + (_values(self.preview()) if self.preview else "")


class Summarized(ABC):
    """Is displayed as its summary. Logs use the text form too, so on an object store it is only the title."""

    @abstractmethod
    def _title(self) -> tuple[str, bool]:
        """Return a title with kind and location, and whether the location is on this machine."""

    @abstractmethod
    def _summary(self, title: str) -> Summary:
        """Summarize the content."""

    def __repr__(self) -> str:
        title, local = self._title()
        try:
            return str(self._summary(title)) if local else title
        except Exception as error:
            return f"{title}: {mask_secrets(str(error))}"

    def _repr_html_(self) -> str:
        title, _ = self._title()
        try:
            return self._summary(title).html()
        except Exception as error:
            return html_text(f"{title}: {mask_secrets(str(error))}")


class Described:
    """Uses the text of `print` as its representation, also in notebooks."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_text(str(self))


class Listed(Described):
    """Uses the first line of the text of `print` as its representation."""

    def __repr__(self) -> str:
        return f"<{str(self).partition(chr(10))[0]}>"


class Rows(Described):
    """A few rows of a table: a `pyarrow.Table` that prints as a grid.

    The grid has at most 50 rows and 20 columns, and shortens long values.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __getattr__(self, name: str) -> Any:
        if name == "table":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.table, name)

    def __getitem__(self, key: Any) -> Any:
        return self.table[key]

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return bool(self.table == (other.table if isinstance(other, Rows) else other))

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        columns, (shown, more) = [], self._shown
        for field, column in zip(shown.schema, shown.columns, strict=True):
            cells = [field.name, str(field.type), *map(_brief, column.to_pylist())]
            columns.append([cell if len(cell) <= _LONGEST else f"{cell[:_LONGEST]}…" for cell in cells])
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        return "\n".join([*("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), *more])

    def _repr_html_(self) -> str:
        shown, more = self._shown
        return _values(shown) + "".join(map(html_text, more))

    @property
    def _shown(self) -> tuple[pa.Table, list[str]]:
        """The first rows and columns, and a line that says how many more there are."""
        left_out = {"row": len(self.table) - _MOST_ROWS, "column": self.table.num_columns - _MOST_COLUMNS}
        more = " and ".join(counted(count, f"more {noun}") for noun, count in left_out.items() if count > 0)
        shown = self.table.select(list(range(self.table.num_columns))[:_MOST_COLUMNS]).slice(0, _MOST_ROWS)
        return shown, [f"… and {more}"] if more else []


def _brief(value: Any) -> str:
    """Return a value as text; long texts and lists are shortened at every depth."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_brief(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        more = f", … {len(value)} values" if len(value) > _SHOWN_VALUES else ""
        return f"[{', '.join(map(_brief, value[:_SHOWN_VALUES]))}{more}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value) if isinstance(value, bytes) else str(value).replace("\n", "\\n")
    return f"{text[:_SHOWN_CHARS]}…" if len(text) > _SHOWN_CHARS else text


def html_text(text: str) -> str:
    """Return lines of text as HTML; the first line is the heading."""
    head, _, rest = text.partition("\n")
    return f"<div><b>{escape(head)}</b>{f'<pre>{escape(rest)}</pre>' if rest else ''}</div>"


def _values(rows: pa.Table) -> str:
    """Return a few rows as HTML; long values are cut."""
    return _grid(rows.column_names, zip(*(map(_cut, column.to_pylist()) for column in rows.columns), strict=True))


def _grid(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cut(value: Any) -> str:
    # Convert only the beginning of a long vector or text.
    nested = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], (dict, list)))
    text = _brief(value) if nested else str(value[: _LONGEST + 1] if isinstance(value, (str, bytes, list)) else value)
    return f"{text[:_LONGEST]}…" if len(text) > _LONGEST else text


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 row``, ``1,234 rows``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def format_time(seconds: float) -> str:
    """Format a time for people; format a time outside the calendar's range as a number."""
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"


def duration(seconds: float) -> str:
    """Format a duration for people."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 60:
        return f"{int(minutes)} min {int(seconds % 60):02} s"
    return f"{int(hours)} h {int(minutes % 60):02} min" if hours < 48 else f"{hours / 24:.0f} days"


def readable_bytes(size: float) -> str:
    """Format a size for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


_STEPS_IN_WORDS = {
    "plan": "planning",
    "spark": "starting Spark…",
    "apply": "computing",
    "service": "waiting for a service",
    "commit": "committing",
    "finish": "finishing",
}


def step_in_words(step: str) -> str:
    """Say what a job does in a step."""
    return _STEPS_IN_WORDS.get(step, step)
