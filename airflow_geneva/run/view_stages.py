"""The end of a refresh: verify for each shard that its rows are staged, then swap the view's rows once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from airflow_geneva.checkpoint.provenance import PriorFailures
from airflow_geneva.checkpoint.records import StagedFragment
from airflow_geneva.checkpoint.reuse import BrokenFile
from airflow_geneva.checkpoint.view_snapshot import save_snapshot
from airflow_geneva.commit.view_state import newest_swap
from airflow_geneva.commit.view_swap import mirror_swap, swap_rows, version_of_plan
from airflow_geneva.faults import fault_point
from airflow_geneva.job.error_records import count_errors
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.result import DONE, FAILED, PARTIAL, BackfillResult, ShardResult
from airflow_geneva.plan.model import RefreshSpec
from airflow_geneva.plan.saved_plan import SavedPlan, SwapPlan
from airflow_geneva.plan.shard import FragmentWork, Shard
from airflow_geneva.run.column_stages import missing_shards_error
from airflow_geneva.run.housekeeping import has_many_snapshots, run_maintenance
from airflow_geneva.run.units import remove_broken, staged_or_restaged
from airflow_geneva.run.view_target import ViewTarget
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.write.view_file import reorder_rows


@dataclass(frozen=True)
class _StagedRefresh:
    """The staged rows of a whole refresh."""

    pairs: tuple[tuple[FragmentWork, StagedFragment], ...]
    missing: tuple[FragmentWork, ...]

    @property
    def rows_missing(self) -> int:
        return sum(len(fragment.due) for fragment in self.missing)

    def rows(self, job_id: str) -> dict[str, Any]:
        """Count the rows that this job computed, that other jobs computed, and that failed."""
        due = sum(len(fragment.due) for fragment, _ in self.pairs)
        ours = sum(rows for _, pair in self.pairs for job, rows in pair.by_job if job == job_id)
        failed = sum(len(pair.failures.all) for _, pair in self.pairs)
        return {"rows_computed": ours - failed, "rows_reused": due - ours, "rows_failed": failed}

    @property
    def failed(self) -> dict[str, PriorFailures]:
        return {work.files.signature: staged.failures.rows for work, staged in self.pairs if staged.failures.rows}


def verify_shard(view: TableLocation, saved: SavedPlan, shard: Shard) -> ShardResult:
    """Check that all rows of a shard are staged, restage from checkpoints what was removed, and record the result.

    Nothing becomes visible: the view is swapped once, when all shards are verified.
    """
    began = time.monotonic()
    work = saved.work
    assert isinstance(work, RefreshSpec)
    staged = _staged(view, work, [shard])
    result = ShardResult(
        shard.index,
        saved.fingerprint,
        **staged.rows(work.job_id),
        rows_left=staged.rows_missing,
        fragments=len(staged.pairs),
        left_reasons=tuple((fragment.id, "not all of its rows are computed") for fragment in staged.missing),
        seconds=round(time.monotonic() - began, 3),
        visible=False,
    )
    JobFolder.of(view.checkpoints, work.job_id).write_shard("commit", saved.fingerprint, shard.index, result.to_json())
    return result


def fail_refresh(
    view: TableLocation, saved: SavedPlan, missing: Sequence[int], seconds: Mapping[str, float] | None = None
) -> BackfillResult:
    """Record that shards of a refresh were not computed; the view is unchanged."""
    rows = sum(int(shard["rows"]) for shard in saved.shards)
    version = int(view.open().version)
    result = BackfillResult(
        saved.work.job_id,
        FAILED,
        rows_skipped=saved.rows_skipped,
        rows_left=rows,
        version=version,
        from_version=version,
        notes=saved.notes,
    ).with_seconds(**(seconds or {}))
    folder = JobFolder.of(view.checkpoints, saved.work.job_id)
    error = missing_shards_error(folder, saved, missing)
    folder.write_result(FAILED, result.to_json(), error, count_errors(folder.storage))
    return result


def finish_refresh(
    view: TableLocation,
    saved: SavedPlan,
    swap: SwapPlan,
    shards: Iterable[Shard],
    seconds: Mapping[str, float] | None = None,
) -> BackfillResult:
    """Swap the view's rows if all of them are staged, and record how the job ended."""
    work = saved.work
    assert isinstance(work, RefreshSpec)
    began = time.monotonic()
    fault_point("finish.begin")
    result = _swapped(view, saved, swap, tuple(shards))
    mirror_swap(view)
    result = result.with_seconds(**(seconds or {}), finish=time.monotonic() - began)
    folder = JobFolder.of(view.checkpoints, work.job_id)
    folder.write_result(result.state, result.to_json(), None, count_errors(folder.storage))
    if saved.shards and has_many_snapshots(view):
        run_maintenance(view, work)
    fault_point("finish.end")
    return result


def _swapped(view: TableLocation, saved: SavedPlan, swap: SwapPlan, shards: Sequence[Shard]) -> BackfillResult:
    work = saved.work
    assert isinstance(work, RefreshSpec)
    staged = _staged(view, work, shards)
    result = BackfillResult(work.job_id, DONE, rows_skipped=saved.rows_skipped, from_version=view.open().version)
    version, why = _committed_before(view, saved, swap), ""
    if version is None and staged.missing:
        why = "not all of its rows are computed, or a staged file was removed"
    elif version is None:
        try:
            files = _files(view, work, swap, staged)
        except BrokenFile as broken:
            fragments = [fragment for fragment, pair in staged.pairs if pair.file == broken.source]
            remove_broken(ViewTarget.at(view, work).store, broken, (str(work.key(fragment)) for fragment in fragments))
            return _swapped(view, saved, swap, shards)
        following = swap.snapshot_with(staged.failed)
        save = partial(save_snapshot, view.checkpoints, work.job_id, following)
        version, why = swap_rows(view, work, saved.fingerprint, swap, files, save)
    if why:
        due = sum(len(fragment.due) for fragment, _ in staged.pairs) + staged.rows_missing
        notes = (*saved.notes, f"left for the next run: {why}")
        return replace(result, state=PARTIAL, rows_left=due, version=result.from_version, notes=notes)
    return replace(
        result,
        **staged.rows(work.job_id),
        version=version or result.from_version,
        commits=(version,) if version else (),
        notes=saved.notes,
    )


def _committed_before(view: TableLocation, saved: SavedPlan, swap: SwapPlan) -> int | None:
    """Return the version that this plan wrote, if its swap was already committed."""
    dataset = view.open()
    return None if newest_swap(view, dataset).identity == swap.based_on else version_of_plan(dataset, saved.fingerprint)


def _files(view: TableLocation, work: RefreshSpec, swap: SwapPlan, staged: _StagedRefresh) -> list[tuple[str, int]]:
    """Return names and row counts of the data files to swap in: the staged ones, or new ones in the view's order."""
    if swap.shuffle_seed is None and swap.max_rows_per_fragment is None:
        return [(pair.file, pair.physical_rows) for _, pair in staged.pairs if pair.physical_rows]
    fragments = [pair for _, pair in staged.pairs]
    return reorder_rows(view.open(), fragments, swap.shuffle_seed, swap.max_rows_per_fragment, work.sizing.batch_bytes)


def _staged(view: TableLocation, work: RefreshSpec, shards: Iterable[Shard]) -> _StagedRefresh:
    """Find the staged rows, and restage from checkpoints what was removed."""
    target = ViewTarget.at(view, work)
    pairs: list[tuple[FragmentWork, StagedFragment]] = []
    missing: list[FragmentWork] = []
    for shard in shards:
        for fragment in shard.fragments:
            staged = staged_or_restaged(target, fragment, target.index(fragment))
            if staged is None:
                missing.append(fragment)
            else:
                pairs.append((fragment, staged))
    return _StagedRefresh(tuple(pairs), tuple(missing))
