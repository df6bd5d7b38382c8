"""Estimate what a plan will cost."""

from __future__ import annotations

from collections.abc import Callable

from airflow_geneva.job.estimate import Estimate, Size
from airflow_geneva.job.speed import read_history
from airflow_geneva.plan.model import Plan
from airflow_geneva.run.choice import INLINE_BELOW_SECONDS, choose_runner
from airflow_geneva.run.prepare import Udfs
from airflow_geneva.run.sample import check_rows, sample_plan
from airflow_geneva.storage.location import TableLocation


def estimator(location: TableLocation, udfs: Callable[[], Udfs]) -> Callable[[Plan, int | None], Estimate]:
    """Return the function with which a plan estimates itself, as a job of ``runner="auto"``."""

    def estimate(plan: Plan, sample: int | None = None) -> Estimate:
        if sample is not None:
            check_rows("sample", sample)
        if not plan.shards:
            return Estimate.of_nothing()
        here = udfs()
        runner = choose_runner(plan, location.checkpoints, here, INLINE_BELOW_SECONDS, try_new_code=True).runner
        if sample is None:
            return estimate_by_history(plan, location, runner)
        found = sample_plan(plan, location, here, sample)
        if not found.calls:
            return estimate_by_history(plan, location, runner)
        size = size_of(plan, runner)
        expected = Estimate.by_sample(size, found.calls, found.table())
        # The sample knows more than the choice did.
        slow = expected.slot_seconds is not None and sum(expected.slot_seconds) / 2 >= INLINE_BELOW_SECONDS
        if slow and runner == "inline":
            return Estimate.by_sample(size_of(plan, "spark"), found.calls, found.table())
        return expected

    return estimate


def estimate_by_history(plan: Plan, location: TableLocation, runner: str) -> Estimate:
    """Estimate by earlier jobs, for a runner that is chosen; it calls no UDF."""
    size = size_of(plan, runner)
    history = read_history(location.checkpoints, plan.work.describe())
    return Estimate.by_history(size, history) if history else Estimate.unknown(size)


def size_of(plan: Plan, runner: str) -> Size:
    sizing, udfs = plan.work.sizing, plan.work.udfs.values()
    threads, tasks = sizing.intra_applier_concurrency, 1 if runner == "inline" else sizing.concurrency
    costs = [udf.cost for udf in udfs if udf.cost is not None]
    return Size(
        rows=plan.rows_to_run,
        fragments=plan.fragments_to_run,
        runner=runner,
        slots=tasks * threads,
        shards=sum(bool(shard.to_apply) for shard in plan.shards),
        price_per_slot_hour=sizing.price_per_slot_hour,
        cost_per_row=sum(costs) if costs else None,
    )
