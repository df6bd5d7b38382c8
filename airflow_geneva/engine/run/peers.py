"""Backfills, refreshes and loads are peers: how the jobs of each kind compute a shard, and what makes it visible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_geneva.engine.job.folder import ShardDocuments
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.model import BackfillSpec, RefreshSpec
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.run.caps import Caps
from airflow_geneva.engine.run.column import ColumnPublisher
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.load import LoadPublisher, load_inline, load_shard
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.publisher import Publisher
from airflow_geneva.engine.run.runner import Runner
from airflow_geneva.engine.run.units import Target, UnitReport
from airflow_geneva.engine.run.view import ViewPublisher
from airflow_geneva.engine.storage.location import TableLocation


@dataclass(frozen=True)
class Peer:
    """What the jobs of a kind do in their own way.

    Args:
        publisher: makes computed rows visible.
        inline: computes a shard in this process, with the parameters of `apply_inline`.
        on_cluster: computes a shard on a runner.
    """

    publisher: Callable[..., Publisher]
    inline: Callable[..., list[UnitReport]]
    on_cluster: Callable[..., list[UnitReport]]


def _compute(
    runner: Runner, location: TableLocation, target: Target, shard: Shard, udfs: Udfs, *how: Any
) -> list[UnitReport]:
    return runner.compute(location, target.spec, shard, udfs, *how)


def _load(
    runner: Runner,
    location: TableLocation,
    target: Any,
    shard: Shard,
    _: Udfs,
    documents: ShardDocuments,
    caps: Caps,
    *_how: Any,
) -> list[UnitReport]:
    return load_shard(location, target, shard, documents, caps.add, runner)


PEERS = {
    BackfillSpec.kind: Peer(ColumnPublisher, apply_inline, _compute),
    RefreshSpec.kind: Peer(ViewPublisher, apply_inline, _compute),
    LoadSpec.kind: Peer(LoadPublisher, load_inline, _load),
}
