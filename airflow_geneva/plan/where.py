"""Filters: checked before any work, frozen in time, and reduced to the columns they read."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import numpy as np

from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.errors import InvalidInput
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.plan.manifest import open_fragment

if TYPE_CHECKING:
    import lance

_LITERAL = re.compile(r"'(?:[^']|'')*'")
_QUOTED = re.compile(rf"{_LITERAL.pattern}|`[^`]*`|\"[^\"]*\"")
_WORD = re.compile(r"`([^`]+)`|\"([^\"]+)\"|([^\W\d]\w*)")
_CLOCK = {
    "now": "timestamp '{:%Y-%m-%d %H:%M:%S.%f}'",
    "current_timestamp": "timestamp '{:%Y-%m-%d %H:%M:%S.%f}'",
    "current_date": "date '{:%Y-%m-%d}'",
    "today": "date '{:%Y-%m-%d}'",
    "current_time": "time '{:%H:%M:%S.%f}'",
}
_CLOCK_CALL = re.compile(rf"\b({'|'.join(_CLOCK)})\s*\(\s*\)|\b(current_timestamp|current_date|current_time)\b", re.I)
_DICE = re.compile(r"\b(random|uuid)\s*\(", re.I)


def freeze_where(where: str | None, at: datetime | None = None) -> str | None:
    """Replace the functions that look at the clock by the moment of the run, so that every task sees one filter.

    Args:
        where: SQL filter; empty counts as none.
        at: the DAG run's ``run_after``, or None for now; UTC.

    Raises:
        InvalidInput: the filter draws random values, which no second task could repeat.
    """
    if where is None or not where.strip():
        return None
    moment = (at or datetime.now(timezone.utc)).astimezone(timezone.utc)
    parts: list[str] = []
    last = 0
    for literal in [*_QUOTED.finditer(where), None]:
        code = where[last : literal.start() if literal else len(where)]
        if _DICE.search(code):
            raise InvalidInput(
                f"The filter {where!r} draws random values, so no two tasks would select the same rows. "
                "Filter on a stored column instead."
            )
        parts.append(_CLOCK_CALL.sub(lambda m: _CLOCK[(m[1] or m[2]).lower()].format(moment), code))
        if literal:
            parts.append(literal[0])
            last = literal.end()
    return "".join(parts).strip()


def volatile_functions(sql: str) -> list[str]:
    """The functions in a filter or expression that give something else at every call: those of clock and dice."""
    code = _QUOTED.sub(" ", sql)
    found = [match[1] or match[2] for match in _CLOCK_CALL.finditer(code)]
    found += [match[1] for match in _DICE.finditer(code)]
    return sorted({name.lower() for name in found})


def where_columns(where: str | None, columns: list[str]) -> list[str]:
    """Columns a filter may read: every one it mentions, in whatever case, so never too few."""
    if where is None:
        return []
    code = _LITERAL.sub(" ", where)
    words = {word.lower() for match in _WORD.finditer(code) for word in match.groups() if word}
    return [name for name in columns if name.lower() in words]


def check_where(dataset: lance.LanceDataset, where: str | None) -> None:
    """Ask the engine whether it understands a filter.

    Raises:
        InvalidInput: it does not; carries the engine's message.
    """
    if where is None:
        return

    def invalid(error: BaseException) -> InvalidInput:
        message = str(error).split(", /")[0]
        return InvalidInput(
            f"The filter {where!r} is not valid for columns {', '.join(dataset.schema.names)}: {message}. "
            "Write a condition as after WHERE in SQL."
        )

    with engine_errors(invalid):
        dataset.scanner(filter=where, columns=[], with_row_id=True).explain_plan()
        some_column = dataset.schema.names[0]
        dataset.scanner(columns={"any": f"`{some_column}`", "selected": f"({where})"}, limit=1).to_table()


def selected_offsets(dataset: lance.LanceDataset, fragment_ids: list[int], where: str) -> dict[int, Ranges]:
    """Physical offsets, by fragment, of the live rows that a filter selects; one scan over the filter's columns."""
    if not fragment_ids:
        return {}
    fragments = [open_fragment(dataset, fragment_id) for fragment_id in fragment_ids]
    scanner = dataset.scanner(columns=[], filter=where, with_row_address=True, fragments=fragments)
    parts = [
        Ranges.from_offsets(batch.column("_rowaddr").to_numpy().astype(np.int64)) for batch in scanner.to_batches()
    ]
    addresses = Ranges.union(parts)
    wanted = np.array(sorted(fragment_ids), np.int64)
    cuts = np.searchsorted(addresses.starts, np.append(wanted, wanted[-1] + 1) << 32)
    found: dict[int, Ranges] = {}
    for at, fragment_id in enumerate(wanted.tolist()):
        starts, ends = (bounds[cuts[at] : cuts[at + 1]] for bounds in (addresses.starts, addresses.ends))
        if len(starts):
            found[fragment_id] = Ranges(starts - (fragment_id << 32), ends - (fragment_id << 32))
    return found
