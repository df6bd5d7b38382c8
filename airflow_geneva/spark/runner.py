"""Spark as the runner of jobs; it is loaded when it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.engine.job.progress import EVERY_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_geneva.engine.job.folder import ShardDocuments
    from airflow_geneva.engine.job.meter import Stopwatch
    from airflow_geneva.engine.plan.model import JobSpec
    from airflow_geneva.engine.plan.shard import Shard
    from airflow_geneva.engine.run.caps import Caps
    from airflow_geneva.engine.run.prepare import Udfs
    from airflow_geneva.engine.run.runner import Loader
    from airflow_geneva.engine.run.units import UnitReport
    from airflow_geneva.engine.storage.location import TableLocation


@dataclass(frozen=True)
class SparkRunner:
    """Computes shards on a session that has the code; without one, on the active session, or on a local one.

    Args:
        watch: has measured the start of the session, by part.
    """

    session: SparkSession | None = None
    watch: Stopwatch | None = None

    def is_up(self) -> bool:
        if self.session is not None or "pyspark.sql" not in sys.modules:
            return self.session is not None
        from airflow_geneva.spark.local import active_session

        return active_session() is not None

    def start(self, concurrency: int) -> None:
        from airflow_geneva.spark.local import open_session

        if self.session is None:
            open_session(concurrency)

    def compute(
        self,
        location: TableLocation,
        spec: JobSpec,
        shard: Shard,
        udfs: Udfs,
        documents: ShardDocuments,
        caps: Caps,
        wait: Callable[[Mapping[str, int]], None],
        every: float = EVERY_SECONDS,
    ) -> list[UnitReport]:
        from airflow_geneva.spark.tasks import apply_in_session, apply_on_spark

        if self.session is None:
            return apply_in_session(location, spec, shard, udfs, documents, caps, wait)
        return apply_on_spark(self.session, location, spec, shard, udfs, documents, caps, wait, self.watch, every)

    def load(self, concurrency: int) -> Loader:
        from airflow_geneva.spark.load import SparkSearch

        return SparkSearch(concurrency, self.session)
