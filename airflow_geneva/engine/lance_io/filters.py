"""Filters: check them, replace functions of the current time, find the columns they read, and evaluate them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import numpy as np

from airflow_geneva.engine.lance_io.fragments import OFFSET_BITS, damaged_file, open_fragment
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.sql_errors import explain_sql_error
from airflow_geneva.engine.lance_io.sql_text import Token, names_in, read_sql, replace_tokens
from airflow_geneva.engine.runtime import utc_now
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_TIME_FUNCTIONS = {
    "now": "timestamp '{:%Y-%m-%d %H:%M:%S.%f}'",
    "current_timestamp": "timestamp '{:%Y-%m-%d %H:%M:%S.%f}'",
    "current_date": "date '{:%Y-%m-%d}'",
    "today": "date '{:%Y-%m-%d}'",
    "current_time": "time '{:%H:%M:%S.%f}'",
}
_WITHOUT_BRACKETS = {"current_timestamp", "current_date", "current_time"}
_RANDOM_FUNCTIONS = {"random", "rand", "uuid"}
_FEW_ROWS, _MOST_ROWS = 1 << 16, 1 << 20


def freeze_where(where: str | None, at: datetime | None = None) -> str | None:
    """Replace functions of the current time by `at` (UTC; None: now), so that all tasks evaluate the same filter."""
    if where is None or not where.strip():
        return None
    moment = (at or utc_now()).astimezone(timezone.utc)

    def frozen(token: Token) -> str | None:
        volatile = _volatile(token)
        if volatile in _RANDOM_FUNCTIONS:
            raise InvalidInput(
                f"The filter {where!r:.1000} draws random values, so no two tasks would select the same rows. "
                "Filter on a stored column instead."
            )
        return None if volatile is None else _TIME_FUNCTIONS[volatile].format(moment)

    return replace_tokens(where, frozen).strip()


def volatile_functions(sql: str) -> list[str]:
    """Return the functions of time and randomness in a filter or expression."""
    return sorted({name for name in map(_volatile, read_sql(sql)) if name})


def _volatile(token: Token) -> str | None:
    """Return the function of time or randomness that a token calls, or None."""
    if token.kind != "name" or token.field:
        return None
    name = token.name.lower()
    bare = name in _WITHOUT_BRACKETS and token.bare and not token.call
    called = token.empty if name in _TIME_FUNCTIONS else token.call if name in _RANDOM_FUNCTIONS else False
    return name if called or bare else None


def where_columns(where: str | None, columns: list[str]) -> list[str]:
    """Return all columns that a filter mentions, in upper or lower case; it may not read all of them."""
    if where is None:
        return []
    mentioned = names_in(where)
    return [name for name in columns if name.lower() in mentioned]


def check_where(dataset: lance.LanceDataset, where: str | None) -> None:
    if where is None:
        return
    if not isinstance(where, str):
        raise InvalidInput(f"The filter {where!r:.200} is not valid: give an SQL condition as text.")
    read_sql(where)
    try:
        with engine_errors():
            dataset.scanner(filter=where, columns=[], with_row_id=True).explain_plan()
            dataset.scanner(columns={"selected": f"({where})"}, with_row_id=True, limit=1).to_table()
    except EngineError as error:
        raise InvalidInput(
            f"The filter {where!r:.1000} is not valid for columns {', '.join(dataset.schema.names)}: "
            f"{explain_sql_error(dataset, where, error)} Write a condition as after WHERE in SQL."
        ) from None


def selected_offsets(dataset: lance.LanceDataset, fragment_ids: list[int], where: str) -> dict[int, Ranges]:
    """Return the physical offsets of the live rows that a filter selects, by fragment, from one scan of its columns.

    All rows of a fragment with a damaged data file count as selected, so that the job names it.
    """
    if not fragment_ids:
        return {}
    read_sql(where)
    try:
        return _selected_offsets(dataset, fragment_ids, where)
    except BaseException as error:  # a panic of pylance is no Exception
        columns = where_columns(where, dataset.schema.names)
        damaged = [one for one in fragment_ids if damaged_file(dataset, one, columns, error) is not None]
        if not damaged:
            raise
        found = _selected_offsets(dataset, [one for one in fragment_ids if one not in damaged], where)
        rows = {one: open_fragment(dataset, one).physical_rows for one in damaged}
        return found | {one: Ranges.of(0, count) for one, count in rows.items()}


def _selected_offsets(dataset: lance.LanceDataset, fragment_ids: list[int], where: str) -> dict[int, Ranges]:
    if not fragment_ids:
        return {}
    fragments = [open_fragment(dataset, fragment_id) for fragment_id in fragment_ids]
    scanner = dataset.scanner(columns=[], filter=where, with_row_address=True, fragments=fragments)
    parts: dict[int, list[Ranges]] = {}
    for addresses in _joined(batch.column("_rowaddr").to_numpy().view(np.int64) for batch in scanner.to_batches()):
        alone = _fragment_of(addresses.min()) == _fragment_of(addresses.max())
        for rows in [addresses] if alone else np.split(addresses, np.flatnonzero(np.diff(addresses >> 32)) + 1):
            parts.setdefault(_fragment_of(rows[0]), []).append(Ranges.from_offsets(rows & OFFSET_BITS))
    return {fragment_id: Ranges.union(parts[fragment_id]) for fragment_id in sorted(parts)}


def _joined(batches: Iterable[Offsets]) -> Iterator[Offsets]:
    """Join addresses of one fragment, or of several small ones: sets are made faster from many rows at once."""
    held, rows = list[Offsets](), 0
    for batch in filter(len, batches):
        if rows >= _MOST_ROWS or (rows >= _FEW_ROWS and _fragment_of(held[0][0]) != _fragment_of(batch[-1])):
            yield np.concatenate(held)
            held, rows = [], 0
        held.append(batch)
        rows += len(batch)
    if held:
        yield np.concatenate(held)


def _fragment_of(address: np.int64) -> int:
    return int(address) >> 32
