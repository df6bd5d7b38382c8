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


@dataclass(frozen=True)
class Summary:
    """The content of a table or a database: a title, and rows of cells below it."""

    title: str
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    preview: Callable[[], pa.Table] | None = None

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in self.rows)
        return "\n".join([self.title, *(f"  {line}".rstrip() for line in lines)])

    def html(self) -> str:
        listed = _grid(self.headings, self.rows) if self.rows else ""
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
    """A few rows of a table: a `pyarrow.Table` that prints as a grid and shortens long values."""

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
        columns = []
        for field, column in zip(self.table.schema, self.table.columns, strict=True):
            cells = [field.name, str(field.type), *map(_brief, column.to_pylist())]
            columns.append([cell if len(cell) <= _LONGEST else f"{cell[:_LONGEST]}…" for cell in cells])
        widths = [max(map(len, column)) for column in columns]
        rows = zip(*columns, strict=True)
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        return _values(self.table)


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
