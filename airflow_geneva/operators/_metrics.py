"""Metrics of jobs, which go where Airflow sends its own: to StatsD, Datadog or OpenTelemetry."""

from __future__ import annotations

import logging
from dataclasses import astuple, fields
from datetime import timedelta
from typing import Any

from airflow.providers.common.compat.sdk import Stats, conf

from airflow_geneva.engine import api
from airflow_geneva.engine.counts import StoreRequests
from airflow_geneva.engine.results import DONE, SENT
from airflow_geneva.engine.runtime import time
from airflow_geneva.errors import DamagedRecord, StorageError

logger = logging.getLogger("airflow_geneva.job")

_SWITCHES = ("statsd_on", "statsd_datadog_enabled", "otel_on")
_COUNTED = ("rows_run", "rows_computed", "rows_reused", "rows_failed")
_REQUESTS = tuple(f"store_{kind.name}" for kind in fields(StoreRequests))


def send_metrics_of_plan(plan: api.Plan) -> None:
    """Send how many rows are due."""
    if _wanted():
        tags = {"table": plan.spec.table_name, "target": plan.spec.target}
        Stats.gauge("geneva.rows_due", plan.rows_pending, tags=tags)


def send_metrics_of_job(folder: api.JobFolder) -> None:
    """Send what a job that has ended did, how long its steps took, what it cost, and how fresh its values are.

    Its record has what was sent, so that a job whose `finish` runs again is counted once, and one that goes on by the
    difference.
    """
    if not _wanted():
        return
    try:
        found, sent = api.read_job(folder), _sent(folder)
        if found is None:
            return
        rows = {name: getattr(found, name) for name in _COUNTED}
        requests = dict(zip(_REQUESTS, astuple(found.store_requests), strict=True))
        # A `finish` that runs again makes other requests, which are not counted either.
        again = {"state": found.state, **rows}.items() <= sent.items()
        if not again:
            folder.update_record(**{SENT: {"state": found.state, **rows, **requests}})
    except (StorageError, DamagedRecord) as error:
        logger.warning("The metrics of job %s are not sent: %s", folder.job_id, error)
        return
    tags = {"table": found.table, "target": found.target}
    if not again:
        for name, count in (rows | requests).items():
            Stats.incr(f"geneva.{name}", max(count - sent.get(name, 0), 0), tags=tags)
        Stats.incr("geneva.jobs", tags={**tags, "state": found.state, "runner": found.runner or ""})
        Stats.timing("geneva.job_duration", timedelta(seconds=found.took), tags=tags)
        for step, seconds in found.seconds.items():
            Stats.timing(f"geneva.step_duration.{step}", timedelta(seconds=seconds), tags=tags)
    # Failed rows stay due: every run computes them again.
    Stats.gauge("geneva.rows_due", found.rows_left + found.rows_failed, tags=tags)
    if found.state == DONE and found.version_at is not None:  # else older changes may not be visible
        Stats.gauge("geneva.staleness", time.time() - found.version_at, tags=tags)
    for name, figure in {"cost": found.cost, "function_busy": found.busy_share}.items():
        if figure is not None:
            Stats.gauge(f"geneva.{name}", figure, tags=tags)


def _sent(folder: api.JobFolder) -> dict[str, Any]:
    """Return what was sent of a job; nothing if the note of it is missing or damaged."""
    noted = folder.record.get(SENT)
    if isinstance(noted, dict) and all(type(noted.get(name)) is int for name in (*_COUNTED, *_REQUESTS)):
        return noted
    return {}


def _wanted() -> bool:
    # Reading a job costs requests.
    return any(conf.getboolean("metrics", switch, fallback=False) for switch in _SWITCHES)
