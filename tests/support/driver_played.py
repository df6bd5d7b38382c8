"""What Spark's driver does with a shard, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from airflow_geneva.engine.apply.batch_api import StillWaiting
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation


def compute_as_driver(argv: Sequence[str]) -> None:
    """Compute the shard that the arguments of a spark-submit name, and record a failure as the driver does."""
    uri, fingerprint, shard = (argv[argv.index(name) + 1] for name in ("--job", "--fingerprint", "--shard"))
    storage, index = Storage(uri), int(shard)
    saved = load_plan(storage, fingerprint)
    job = PlannedJob(TableLocation(saved.spec.table, saved.spec.table_name, storage.options), saved)
    job.waits = "--leave-waiting" not in argv
    with suppress(StillWaiting), job.at_step("apply", index):
        job.apply(saved.load_shard(storage, index), Udfs.planned(saved.spec))
