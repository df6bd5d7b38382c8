"""What makes the computed rows of a job visible: a backfill, a refresh and a load are peers behind one class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.saved_plan import SavedPlan
from airflow_geneva.engine.plan.shard import FragmentTask, Shard
from airflow_geneva.engine.plan.swap_plan import SwapPlan
from airflow_geneva.engine.results import BackfillResult, Checked, ShardResult
from airflow_geneva.engine.run.units import Target
from airflow_geneva.engine.runtime import Future
from airflow_geneva.engine.storage.location import TableLocation

if TYPE_CHECKING:
    import lance


@dataclass
class Publisher(ABC):
    """Makes the staged rows of a column or a view visible.

    Args:
        swap: the swap plan of a refresh, if this process has it already.
        opened: what the planner has opened, if this process has just planned.
        newest: the version of the last commit of this process.
        post_commit: writes to make while the job's end is recorded. The next plan works without a write that a kill
            prevents.
        write_behind: checkpoint writes in the background, for which `commit` or `finish` waits.
        uncomputed: work for rows that the last commit did not find in checkpoints, with the version from which to
            compute them.
    """

    location: TableLocation
    saved: SavedPlan
    spec: JobSpec
    folder: JobFolder
    swap: SwapPlan | None = field(default=None, kw_only=True)
    opened: tuple[Any, ...] = field(default=(), kw_only=True)
    checked: tuple[Checked, ...] = field(default=(), kw_only=True)
    newest: lance.LanceDataset | None = field(default=None, kw_only=True)
    post_commit: list[Callable[[], object]] = field(default_factory=list, kw_only=True)
    write_behind: list[Future[None]] = field(default_factory=list, kw_only=True)
    uncomputed: list[tuple[lance.LanceDataset, FragmentTask]] = field(default_factory=list, kw_only=True)

    @property
    @abstractmethod
    def target(self) -> Target:
        """The column or view, opened once; InvalidInput or TableRemade if it was removed or created again."""

    @abstractmethod
    def commit(self, shard: Shard) -> ShardResult:
        """Commit a shard of a column; verify a shard of a view. Removed files are staged again from checkpoints."""

    @abstractmethod
    def open_for_finish(self) -> None:
        """Open and read in parallel what `finish` needs, in a process that has not worked on the job."""

    @abstractmethod
    def finish(
        self, committed: Sequence[ShardResult], missing: Sequence[int], failed: bool
    ) -> tuple[BackfillResult, bool]:
        """Complete the job's work; return its result, and whether there are enough documents to pack.

        Args:
            missing: shards that are not committed.
            failed: whether a shard is missing, or too many rows failed. Then a view stays as it is.
        """

    @abstractmethod
    def result(self, committed: Iterable[ShardResult]) -> BackfillResult:
        """Return the result if the job ends now; rows of other shards count as left."""
