"""Housekeeping at the end of a job: keep the number of files beside a table small, without a scheduled cleanup."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from airflow_geneva.checkpoint.keys import FragmentKey, parse_key, path_to_key
from airflow_geneva.checkpoint.packs import FOLDER as PACKED
from airflow_geneva.checkpoint.records import StagedFragment, read_range, read_staged
from airflow_geneva.checkpoint.store import LanceCheckpointStore
from airflow_geneva.checkpoint.view_snapshot import loose_snapshots, pack_snapshots
from airflow_geneva.errors import StorageError
from airflow_geneva.job.old_jobs import busy_targets, tidy_jobs
from airflow_geneva.lance_io.blobs import is_blob
from airflow_geneva.plan.model import Work
from airflow_geneva.plan.reusable_files import staged_is_whole
from airflow_geneva.storage.location import TableLocation

logger = logging.getLogger("airflow_geneva.run")

_MANY_CHECKPOINTS = 64
_MANY_SNAPSHOTS = 16


def keep_house(location: TableLocation, work: Work) -> None:
    """Reduce old jobs and pack checkpoints of a table; a storage error is only logged, as the job has already ended.

    After a kill the next job continues: a document is removed only after its replacement was read back.

    Args:
        location: the table or view.
        work: the job that has just ended.
    """
    try:
        tidy_jobs(location.checkpoints)
        if work.target not in busy_targets(location.checkpoints, work.job_id):
            _pack_checkpoints(location, work)
    except StorageError as error:
        logger.warning("Cannot reduce the files of ended jobs beside %s: %s", location.uri, error)


def has_many_snapshots(view: TableLocation) -> bool:
    """Whether a view has enough unpacked snapshots to run :func:`keep_house`."""
    return len(loose_snapshots(view.checkpoints)) >= _MANY_SNAPSHOTS


def _pack_checkpoints(location: TableLocation, work: Work) -> None:
    """Pack the fragment checkpoints of a UDF version, and remove the range checkpoints that they include."""
    if work.query:
        pack_snapshots(location.checkpoints)
    store = LanceCheckpointStore(location.checkpoints)
    folder = work.prefix.partition("_where-")[0]
    names = [name for name in store.storage.list_files(folder) if not name.startswith(f"{folder}/{PACKED}/")]
    keys = [key for key in map(parse_key, map(path_to_key, names)) if key is not None]
    if len(keys) < _MANY_CHECKPOINTS:
        return
    fragments = [str(key.fragment) for key in keys if key.range is None]
    ranges: dict[FragmentKey, list[str]] = {}
    for key in keys:
        if key.range is not None:
            ranges.setdefault(key.fragment, []).append(key.fragment.range(*key.range))
    store.pack(fragments)
    store.remove(_taken_up(location, work, store, ranges))


def _taken_up(
    location: TableLocation, work: Work, store: LanceCheckpointStore, ranges: Mapping[FragmentKey, Iterable[str]]
) -> list[str]:
    """Return keys of range checkpoints whose rows are all in the staged data file of their fragment."""
    dataset = location.open() if ranges else None
    names = dataset.schema.names if dataset is not None else []
    if (
        work.explode is not None
        or dataset is None
        or (work.column in names and is_blob(dataset.schema.field(work.column)))
    ):
        # Such a data file cannot replace range checkpoints: see `staged_gives_rows` and `view_file_gives_rows`.
        return []
    found: list[str] = []
    for fragment, keys in ranges.items():
        staged = read_staged(store, str(fragment))
        if staged is not None and staged_is_whole(dataset, staged):
            found += [key for key in keys if _holds(staged, store, key)]
    return found


def _holds(staged: StagedFragment, store: LanceCheckpointStore, key: str) -> bool:
    """Whether a staged data file has all rows of a range checkpoint."""
    content = read_range(store, key)
    return (
        content is not None
        and content.agreement == staged.agreement
        and staged.looked_at.contains(content.looked_at)
        and bool(staged.computed.mask(content.offsets).all())
    )
