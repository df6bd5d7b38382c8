"""plan → apply → verify → swap in one call: what a backfill is to a column, a refresh is to a view."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

from airflow_geneva.checkpoint.fragment import StagedFragment
from airflow_geneva.checkpoint.provenance import Tried
from airflow_geneva.checkpoint.snapshot import save_snapshot
from airflow_geneva.commit.swap import ViewContents, mirror_swap, swap_rows
from airflow_geneva.errors import JobFailed
from airflow_geneva.faults import fault_point
from airflow_geneva.job.error_records import count_errors
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.job.heartbeat import beating
from airflow_geneva.job.result import DONE, FAILED, PARTIAL, PENDING, BackfillResult
from airflow_geneva.location import TableLocation
from airflow_geneva.plan.document import SavedPlan, save_plan
from airflow_geneva.plan.refresh import RefreshRequest, next_snapshot, plan_refresh
from airflow_geneva.plan.swap import SwapPlan
from airflow_geneva.plan.values import FragmentWork, Plan, Shard, Work
from airflow_geneva.run.inline import run_shard_inline
from airflow_geneva.run.job import Stopwatch
from airflow_geneva.run.task import skipped_before
from airflow_geneva.run.view_task import ViewBench, ViewKit, ViewTool, run_view_unit
from airflow_geneva.storage import is_engine_error
from airflow_geneva.udf import UDF, load_udf
from airflow_geneva.view_definition import ViewDefinition
from airflow_geneva.write.arrange import arrange

logger = logging.getLogger("airflow_geneva.run")


def load_udfs(definition: ViewDefinition) -> dict[str, UDF]:
    """The UDFs of a view, imported, by column.

    Raises:
        InvalidInput: one cannot be imported here.
    """
    return {column.name: load_udf(str(column.udf.import_path)) for column in definition.columns if column.udf}


def plan(view: TableLocation, definition: ViewDefinition, source: TableLocation, request: RefreshRequest) -> Plan:
    """Plan a refresh; writes nothing. Raises as :func:`airflow_geneva.plan.refresh.plan_refresh`."""
    udfs = load_udfs(definition)
    return plan_refresh(view, definition, source, udfs, ViewContents(view, view.open()), request)


def run_refresh(
    view: TableLocation,
    definition: ViewDefinition,
    source: TableLocation,
    request: RefreshRequest,
    runner: str,
) -> BackfillResult:
    """Carry a refresh out in one call.

    Raises:
        InvalidInput, CodeChanged: nothing was started.
        JobFailed: it failed half-way; ``.result`` says what was done.
    """
    watch = Stopwatch()
    made = plan(view, definition, source, request)
    assert made.swap is not None
    if runner == "spark" and any(shard.to_apply for shard in made.shards):
        from airflow_geneva.run.spark_session import start_session

        start_session(made.work)
    saved = start_refresh(made, view)
    watch.lap("plan")
    job = JobFolder.of(view.checkpoints, made.work.job_id)
    udfs = load_udfs(definition)
    try:
        for shard in made.shards:
            with beating(job.storage, "apply"):
                apply_shard(view, definition, udfs, made.work, shard, runner)
            watch.lap("apply")
        with beating(job.storage, "finish") if made.shards else nullcontext():
            result = finish_refresh(view, saved, made.swap, made.shards, watch.seconds)
    except BaseException as error:
        if not is_engine_error(error):
            raise
        failed = BackfillResult(made.work.job_id, FAILED, rows_skipped=made.rows_skipped, rows_left=made.rows_pending)
        job.write_result(FAILED, failed.to_json(), str(error), count_errors(job.storage))
        raise JobFailed(
            f"Refresh of view {view.name!r} failed (job {made.work.job_id}): {error}\n"
            "What was computed is kept in checkpoints; run it again to go on from there.",
            failed,
        ) from error
    logger.info("%s", result)
    return result


def start_refresh(made: Plan, view: TableLocation, run: str = "") -> SavedPlan:
    """Announce a refresh and keep its plan."""
    work = made.work
    folder = JobFolder.of(view.checkpoints, work.job_id)
    folder.write_record(
        {
            "kind": "refresh",
            "state": PENDING,
            "table": work.table_name,
            "view": work.table_name,
            "column": work.column,
            "udf": work.udf_name,
            "udf_version": work.udf_version,
            "version": work.version,
            "read_version": work.read_version,
            "rows_total": made.rows_total,
            "rows_pending": made.rows_pending,
            "shards": len(made.shards),
        }
    )
    fault_point("plan.recorded")
    saved = save_plan(made, folder.storage, run)
    fault_point("plan.saved")
    return saved


def apply_shard(
    view: TableLocation, definition: ViewDefinition, udfs: Mapping[str, UDF], work: Work, shard: Shard, runner: str
) -> None:
    """Compute a shard and stage its rows."""
    if shard.to_apply and runner == "spark":
        from airflow_geneva.run.spark import apply_in_session

        apply_in_session(view, work, shard, ViewKit.of(definition, udfs))
        return
    bench = ViewBench.at(view, work)
    tool = ViewTool.of(definition, udfs, work, skipped_before(view, work))
    run_shard_inline(view, work, shard, lambda unit, on_rows: run_view_unit(bench, unit, tool, on_rows), tool.skipped)


@dataclass(frozen=True)
class _Staged:
    """The staged rows of a whole refresh."""

    pairs: tuple[tuple[FragmentWork, StagedFragment], ...]
    missing: int

    @property
    def failed(self) -> dict[str, Tried]:
        return {work.files.signature: staged.failures.rows for work, staged in self.pairs if staged.failures.rows}


def finish_refresh(
    view: TableLocation,
    saved: SavedPlan,
    swap: SwapPlan,
    shards: Iterable[Shard],
    seconds: Mapping[str, float] | None = None,
) -> BackfillResult:
    """Swap the view's rows when all of them are staged, and record how the job ended."""
    work = saved.work
    fault_point("finish.begin")
    staged = _staged(view, work, shards)
    result = _swapped(view, saved, swap, staged)
    mirror_swap(view)
    result = result.with_seconds(**(seconds or {}))
    folder = JobFolder.of(view.checkpoints, work.job_id)
    folder.write_result(result.state, result.to_json(), None, count_errors(folder.storage))
    fault_point("finish.end")
    return result


def _swapped(view: TableLocation, saved: SavedPlan, swap: SwapPlan, staged: _Staged) -> BackfillResult:
    work = saved.work
    result = BackfillResult(work.job_id, DONE, rows_skipped=saved.rows_skipped, from_version=view.open().version)
    due = sum(len(fragment.due) for fragment, _ in staged.pairs) + staged.missing
    left = replace(result, state=PARTIAL, rows_left=due)
    if staged.missing:
        why = "not all of its rows are computed, or a staged file is gone"
        return replace(left, version=result.from_version, notes=(*saved.notes, f"left for the next run: {why}"))
    snapshot = save_snapshot(view.checkpoints, work.job_id, next_snapshot(swap, staged.failed))
    files = _files(view, swap, staged)
    version, why = swap_rows(view, work, saved.fingerprint, swap.based_on, swap.gone, files, snapshot, lambda: "")
    if why:
        return replace(left, version=result.from_version, notes=(*saved.notes, f"left for the next run: {why}"))
    ours = sum(rows for _, pair in staged.pairs for job, rows in pair.by_job if job == work.job_id)
    failed = sum(len(pair.failures.all) for _, pair in staged.pairs)
    return replace(
        result,
        rows_computed=ours - failed,
        rows_reused=due - ours,
        rows_failed=failed,
        version=version or result.from_version,
        commits=(version,) if version else (),
        notes=saved.notes,
    )


def _files(view: TableLocation, swap: SwapPlan, staged: _Staged) -> list[tuple[str, int]]:
    """Names and rows of the data files to swap in: the staged ones, or new ones in the order that was asked for."""
    if swap.shuffle_seed is None and swap.max_rows_per_fragment is None:
        return [(pair.file, pair.physical_rows) for _, pair in staged.pairs if pair.physical_rows]
    return arrange(view.open(), [pair for _, pair in staged.pairs], swap.shuffle_seed, swap.max_rows_per_fragment)


def _staged(view: TableLocation, work: Work, shards: Iterable[Shard]) -> _Staged:
    """Find the staged rows, putting together again from checkpoints what is gone."""
    bench = ViewBench.at(view, work)
    pairs: list[tuple[FragmentWork, StagedFragment]] = []
    missing = 0
    for shard in shards:
        for fragment in shard.fragments:
            index = bench.index(fragment)
            staged = bench.staged(fragment, index)
            if staged is None:
                held = bench.held(fragment, index, fragment.due)
                if fragment.due - held.done:
                    missing += len(fragment.due)
                    continue
                staged = bench.stage(fragment, held)
            pairs.append((fragment, staged))
    return _Staged(tuple(pairs), missing)
