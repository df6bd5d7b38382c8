"""What a view shows, as far as a plan asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.checkpoint.snapshot import Snapshot

if TYPE_CHECKING:
    import lance


class Reflected(Protocol):
    """What a view shows now, read as far as it is asked for."""

    @property
    def dataset(self) -> lance.LanceDataset:
        """The version of the view."""

    @property
    def swap(self) -> str:
        """Names what is shown; another swap or a foreign change of rows changes it; "" before the first swap."""

    @property
    def changed(self) -> str:
        """What others did to the rows since the newest swap; "" for nothing."""

    @property
    def snapshot(self) -> Snapshot | None:
        """What it reflects; None before the first, when it is lost, or when others changed the view's rows."""

    @property
    def shown(self) -> Ranges:
        """Source row ids of the rows that are set."""
