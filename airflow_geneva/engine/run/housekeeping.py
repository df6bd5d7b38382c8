"""Housekeeping at the end of a job: update indexes, and keep the number of files beside a table small."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.checkpoint.keys import FragmentKey, parse_key, path_to_key
from airflow_geneva.engine.checkpoint.packs import FOLDER as PACKED
from airflow_geneva.engine.checkpoint.records import StagedFragment, read_range, read_staged
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.checkpoint.view_snapshot import pack_snapshots, unpacked_snapshots
from airflow_geneva.engine.commit.indexes import update_indexes
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.outbox import jobs_in_outbox
from airflow_geneva.engine.job.status import job_ids, read_job, read_jobs
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.indexes import Index
from airflow_geneva.engine.lance_io.staged_files import StagedFiles
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.reusable_checkpoints import is_staged_complete
from airflow_geneva.engine.results import DONE, PARTIAL, BackfillResult
from airflow_geneva.engine.storage.engine_errors import EngineError
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import CommitConflict, DamagedRecord, InvalidInput, StorageError

if TYPE_CHECKING:
    import lance

_KEPT_WHOLE = 16
_MOST_AT_ONCE = 100
_DONE_UNTIL = "maintenance.json"
logger = logging.getLogger("airflow_geneva.run")
_MANY_CHECKPOINTS = 64
_MANY_SNAPSHOTS = 16


def reduce_old_jobs(checkpoints: Storage) -> None:
    """Remove plans, progress and shard results of a table's old jobs; keep their records and error records.

    These jobs are not reduced: the newest ones, open ones, those with commits to announce, and failed or dead ones
    until a later job for the same column or view is DONE. Only a job that is not reduced is checked again.
    """
    state = _read_state(checkpoints)
    until, later = str(state.get("until", "")), [str(name) for name in state.get("later", ())]
    old = sorted(job_ids(checkpoints)[_KEPT_WHOLE:])
    names = [name for name in old if name in later] + [name for name in old if name > until][:_MOST_AT_ONCE]
    if names:
        kept = _reduce(checkpoints, names)
        checkpoints.write_json(_DONE_UNTIL, {"until": max(until, *names), "later": kept[-_MOST_AT_ONCE:]})


def busy_targets(checkpoints: Storage, but: str) -> set[str]:
    """Return the ``target`` (column or view) of each open job of a table, except the job ``but``."""
    later = set(map(str, _read_state(checkpoints).get("later", ())))
    names = job_ids(checkpoints)
    chosen = [name for at, name in enumerate(names) if name != but and (at < _KEPT_WHOLE or name in later)]
    return {job.target for job in read_jobs(checkpoints, chosen) if job.open}


def _reduce(checkpoints: Storage, names: Sequence[str]) -> list[str]:
    """Reduce the jobs that may be reduced, and return the others, oldest first."""
    announced_later = jobs_in_outbox(checkpoints)
    made_up_for: set[str] = set()
    kept: list[str] = []
    for name in sorted(set(names), reverse=True):
        folder = JobFolder.of(checkpoints, name)
        try:
            job = read_job(folder, with_shards=False)
        except DamagedRecord:
            continue
        if job is None:
            continue
        done = job.ended is not None and job.state in (DONE, PARTIAL)
        if job.open or name in announced_later or not (done or job.target in made_up_for):
            kept.append(name)
        else:
            folder.reduce_to_record()
        if done and job.state == DONE:
            made_up_for.add(job.target)
    return kept[::-1]


def _read_state(checkpoints: Storage) -> dict[str, Any]:
    return checkpoints.read_document(_DONE_UNTIL) or {}


def with_indexes(
    location: TableLocation, spec: JobSpec, result: BackfillResult, newest: lance.LanceDataset | None
) -> BackfillResult:
    """Update the indexes on the column or view, if the job requests it; count the rows that they do not cover.

    Args:
        newest: the table after the job's last commit, if this process has it open.

    An error becomes a note of the result: values are visible, and searches find them without an index. The next job
    with the same request repeats the update, also after a kill.
    """
    if not spec.indexes and not result.commits:
        return result
    try:
        open_newest = cache(lambda: location.open() if newest is None else newest)
        ids = spec.indexed_fields(open_newest)
        for field_id in ids if spec.indexes else ():
            update_indexes(location, field_id)
            open_newest = cache(location.open)
        left = max((index.unindexed_rows for one in ids for index in Index.read(open_newest(), one)), default=0)
        return replace(result, unindexed_rows=left)
    except (CommitConflict, EngineError, InvalidInput, StorageError) as error:
        note = f"the indexes are not up to date: {error}"
        logger.warning("%s: %s", spec.target, note)
        return replace(result, notes=(*result.notes, note))


def run_maintenance(location: TableLocation, spec: JobSpec) -> None:
    """Reduce old jobs and pack checkpoints after a job; a storage error is only logged, as the job has already ended.

    After a kill the next job continues: a document is removed only after its replacement was read back.
    """
    try:
        reduce_old_jobs(location.checkpoints)
        if spec.target not in busy_targets(location.checkpoints, spec.job_id):
            _pack_checkpoints(location, spec)
    except StorageError as error:
        logger.warning("Cannot reduce the files of ended jobs beside %s: %s", location.uri, error)


def has_many_snapshots(view: TableLocation, unpacked: int | None) -> bool:
    """Whether a view has enough unpacked snapshots to run :func:`run_maintenance`; None: count them."""
    count = len(unpacked_snapshots(view.checkpoints)) if unpacked is None else unpacked
    return count >= _MANY_SNAPSHOTS


def _pack_checkpoints(location: TableLocation, spec: JobSpec) -> None:
    """Pack the fragment checkpoints of a UDF version, and remove the range checkpoints that they include."""
    if spec.of_view:
        pack_snapshots(location.checkpoints)
    store = CheckpointStore(location.checkpoints)
    folder = spec.prefix.partition("_where-")[0]
    names = [name for name in store.storage.list_files(folder) if not name.startswith(f"{folder}/{PACKED}/")]
    keys = [key for key in map(parse_key, map(path_to_key, names)) if key is not None]
    if len(keys) < _MANY_CHECKPOINTS:
        keys = []
    fragments = [str(key.fragment) for key in keys if key.range is None]
    ranges: dict[FragmentKey, list[str]] = {}
    for key in keys:
        if key.range is not None:
            ranges.setdefault(key.fragment, []).append(key.fragment.range(*key.range))
    store.pack(fragments, folder)
    store.remove(_redundant_ranges(location, spec, store, ranges))


def _redundant_ranges(
    location: TableLocation, spec: JobSpec, store: CheckpointStore, ranges: Mapping[FragmentKey, Iterable[str]]
) -> list[str]:
    """Return keys of range checkpoints whose rows are all in the staged data file of their fragment."""
    dataset = location.open() if ranges else None
    written = () if dataset is None else [f for f in dataset.schema if spec.of_view or f.name == spec.column]
    if dataset is None or (not spec.plain_blobs and any(is_blob(field) for field in written)):
        # Such a data file cannot replace range checkpoints: see `Reusable.has_single_rows`.
        return []
    found, data = list[str](), StagedFiles()
    for fragment, keys in ranges.items():
        staged = read_staged(store, str(fragment))
        if staged is not None and is_staged_complete(dataset, staged, data):
            found += [key for key in keys if _includes(staged, store, key)]
    return found


def _includes(staged: StagedFragment, store: CheckpointStore, key: str) -> bool:
    """Whether a staged data file has all rows of a range checkpoint."""
    content = read_range(store, key)
    return (
        content is not None
        and content.agreement == staged.agreement
        and staged.filter_evaluated.contains(content.filter_evaluated)
        and bool(staged.computed.mask(content.offsets).all())
    )
