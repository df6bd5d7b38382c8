"""Wait for the services of batch APIs: in this process, or until an Airflow task is woken."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from airflow_geneva.engine.apply.batch_api import BatchApiMapper, StillWaiting
from airflow_geneva.engine.apply.udf_call import Mapper
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.folder import SUBMIT, SUBMITTED, WAKES, ShardDocuments
from airflow_geneva.engine.job.meter import JobMeter
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.run.prepare import Udfs, submissions_of
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput

logger = logging.getLogger("airflow_geneva.run")


@dataclass(frozen=True)
class Waiting:
    """Waits for the submitted batches of a shard, and records them in its status.

    Args:
        plan: the fingerprint of the plan.
        here: wait in this process; else raise StillWaiting.
    """

    location: TableLocation
    spec: JobSpec
    documents: ShardDocuments
    here: bool

    def __call__(self, batches: Mapping[str, int]) -> None:
        """Record the submitted rows by batch, and wait until the next poll; StillWaiting if not `here`."""
        self.documents.update(submitted=dict(batches))
        rows, seconds = sum(batches.values()), self.interval
        there = f"{counted(rows, 'row')} in {counted(len(batches), 'batch', 'batches')}"
        logger.info("%s: a service has %s; it is asked again in %g s.", self.spec.target, there, seconds)
        if not self.here:
            raise StillWaiting(batches)
        JobMeter.current().enter("service")
        time.sleep(seconds)
        JobMeter.current().enter("apply")

    @property
    def batches(self) -> dict[str, int]:
        """The rows for which the shard waits, by submission."""
        return self.documents.read().get(SUBMITTED) or {}

    @property
    def wakes(self) -> int:
        """How often an Airflow task was deferred for the shard."""
        return int(self.documents.read(SUBMIT).get(WAKES) or 0)

    def count_wake(self) -> None:
        """Record that the task is deferred. Its next Spark job gets a new name, because the earlier one has ended."""
        self.documents.update(wakes=self.wakes + 1)

    @property
    def interval(self) -> float:
        """Seconds between two polls of the batches."""
        return min((udf.poll_interval for udf in self.spec.udfs.values() if udf.poll_interval), default=0.0)

    def look(self) -> None:
        """Raise StillWaiting if the service has not answered every batch; return if this process has other code."""
        names, udfs = self.batches, Udfs.planned(self.spec)
        try:
            if not names or not udfs.have_planned_version():
                return
        except InvalidInput as missing:
            logger.info("This process cannot ask the service, Spark does: %s", missing)
            return
        loaded = udfs.here()
        for column, found in submissions_of(self.location, self.spec, loaded).items():
            mapper = BatchApiMapper(Mapper(loaded[column], ()), found)
            if any(mapper.state_of(submission) == "waiting" for submission in found.named(names)):
                raise StillWaiting(names)
