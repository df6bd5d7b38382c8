"""What a planner needs to know about the current state of a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from airflow_geneva.checkpoint.view_snapshot import Snapshot
from airflow_geneva.lance_io.row_ranges import Ranges

if TYPE_CHECKING:
    import lance


class ViewState(Protocol):
    """The current state of a view; parts are read on demand."""

    @property
    def dataset(self) -> lance.LanceDataset:
        """The version of the view."""

    @property
    def swap(self) -> str:
        """Identifies the rows; a swap or any other change of rows changes it; "" before the first swap."""

    @property
    def changed(self) -> str:
        """What other writers did to the rows since the newest swap; "" for nothing."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The source as the view reflects it.

        None before the first swap, if the document is lost, or if other writers changed the rows.
        """

    @property
    def shown(self) -> Ranges:
        """Source row ids of the rows that are set."""
