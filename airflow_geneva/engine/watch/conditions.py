"""The condition that a sensor or trigger waits for, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, fields

from airflow_geneva.engine.storage.uri import check_name
from airflow_geneva.errors import InvalidInput


@dataclass(frozen=True)
class WaitCondition:
    """The condition; :class:`airflow_geneva.sensors.NewFragmentsSensor` describes the fields.

    Raises:
        InvalidInput: a value is not valid, as far as that is clear without reading the table.
    """

    table: str
    since: str | None = None
    changed_rows: bool = False
    min_new_rows: int | None = None
    min_new_fragments: int | None = None
    quiet_period: float | None = None
    max_wait: float | None = None

    def __post_init__(self) -> None:
        kind, name = self.parsed
        if kind not in ("", "version", "view", "column") or (kind and not name):
            raise InvalidInput(
                f'since={self.since!r} is not understood. Give "view:<name>", "column:<name>", or a version of the '
                "table."
            )
        check_name(self.table, "table")
        if self.view is not None:
            check_name(self.view, "view")
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise InvalidInput(f"{field.name}={value!r} is not valid. Give more than 0, or nothing.")

    @property
    def parsed(self) -> tuple[str, str]:
        """The kind and the name in `since`."""
        if self.since is None:
            return "", ""
        kind, colon, name = self.since.partition(":")
        return ("version", kind) if kind.isdecimal() and not colon else (kind if colon else "?", name)

    @property
    def view(self) -> str | None:
        kind, name = self.parsed
        return name if kind == "view" else None
