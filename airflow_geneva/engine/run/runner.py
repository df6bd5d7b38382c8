"""What the engine asks of a cluster that computes shards in place of this process.

The caller that starts a job passes its runner to the engine, which imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from airflow_geneva.engine.job.folder import ShardDocuments
from airflow_geneva.engine.load.checks import KeySearch
from airflow_geneva.engine.load.delivery import SourceMapping
from airflow_geneva.engine.load.source import LoadSource
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.shard import FragmentTask, Shard
from airflow_geneva.engine.run.caps import Caps
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.units import UnitReport
from airflow_geneva.engine.storage.location import TableLocation


class Runner(Protocol):
    """A cluster; without a session of its own it uses the active one, or starts a local one."""

    def is_up(self) -> bool:
        """Whether it has a session, so that nothing has to be started."""

    def start(self, concurrency: int) -> None:
        """Start a local session for this number of tasks unless there is one; JavaNotFound if there is no Java."""

    def compute(
        self,
        location: TableLocation,
        spec: JobSpec,
        shard: Shard,
        udfs: Udfs,
        documents: ShardDocuments,
        caps: Caps,
        wait: Callable[[Mapping[str, int]], None],
        every: float = ...,
    ) -> list[UnitReport]:
        """Compute and stage a shard; CapReached if the job reached a cap before it was done.

        Args:
            wait: called with the rows that a service has, before it is asked again; it may raise StillWaiting.
            every: seconds between two writes of the progress.
        """

    def load(self, concurrency: int) -> Loader:
        """Return what loads values by key; its first search starts a session if there is none."""


class Loader(KeySearch, Protocol):
    """Loads values by key on a cluster."""

    def open_source(self, source: LoadSource) -> LoadSource:
        """Return a source that only the cluster has with its frame and columns; another one as it is."""

    def stage(
        self,
        location: TableLocation,
        spec: LoadSpec,
        delivery: SourceMapping,
        todo: Sequence[FragmentTask],
        plan: str,
        shard: int,
    ) -> Iterator[int]:
        """Join and stage fragments of a shard; yield the number of rows of each."""


def needed(runner: Runner | None) -> Runner:
    """Return the runner of a job that is computed on a cluster; the caller that started the job passed it."""
    assert runner is not None, "A job that is computed on a cluster needs its runner."
    return runner
