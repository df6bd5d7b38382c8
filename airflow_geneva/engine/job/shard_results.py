"""Results of committed shards, as documents of their job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from airflow_geneva.engine.counts import StoreRequests
from airflow_geneva.engine.job.folder import COMMIT, COMMITTED, JobFolder
from airflow_geneva.engine.job.progress import usage_of
from airflow_geneva.engine.results import CARRIED, DONE, PARTIAL, ROWS_RUN, SENT, STORE_REQUESTS, ShardResult


def write_shard_result(folder: JobFolder, result: ShardResult) -> None:
    """Record that a shard is committed."""
    folder.update_shard(result.fingerprint, result.shard, committed=result.to_json())


def read_shard_result(folder: JobFolder, fingerprint: str, shard: int) -> ShardResult | None:
    """Read the commit result of a shard; None if there is none or it is damaged."""
    try:
        return ShardResult.from_json(folder.read_shard(fingerprint, shard, COMMIT).get(COMMITTED) or {})
    except (KeyError, TypeError, ValueError):
        return None


def carried_counts(folder: JobFolder, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the unannounced work of a job's earlier plans, as fields of the next plan's record.

    Args:
        record: the job's record before that plan; empty for a first one.
    """
    if (record.get("ended") or {}).get("state") in (DONE, PARTIAL):
        return {CARRIED: [], ROWS_RUN: 0, STORE_REQUESTS: {}}
    plan = record.get("plan")
    shards = range(int(record.get("shards", 0)) if plan else 0)
    read = (read_shard_result(folder, str(plan), index) for index in shards)
    found = [shard for shard in read if shard is not None]
    used = usage_of(folder.read_shard(str(plan), index) for index in shards)
    visible = [shard.to_json() for shard in found if shard.visible]
    rows = int(record.get(ROWS_RUN, 0)) + used.rows
    before = StoreRequests.from_json(record.get(STORE_REQUESTS))
    requests = sum((used.store_requests, *(shard.store_requests for shard in found)), before)
    sent = {SENT: record[SENT]} if SENT in record else {}
    carried = [*record.get(CARRIED, ()), *visible]
    return {CARRIED: carried, ROWS_RUN: rows, STORE_REQUESTS: asdict(requests), **sent}
