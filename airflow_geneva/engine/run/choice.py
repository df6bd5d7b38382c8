"""Choose where a job is computed: in this process, or on Spark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from airflow_geneva.engine.apply.batch_mapper import StopComputing
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.display import counted, readable_bytes
from airflow_geneva.engine.plan.model import JobSpec, Plan
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.runtime import time
from airflow_geneva.errors import InvalidInput

INLINE_BELOW_SECONDS = 10
"""About the time that it takes to start Spark for one shard."""

_LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class RunnerChoice:
    """Where a job is computed, and why.

    Args:
        runner: ``inline`` or ``spark``.
        below_seconds: ``inline`` only: switch to Spark if more seconds than this are left after a second; None: never.
    """

    runner: str
    why: str
    below_seconds: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return its fields for the job's record."""
        return {"runner": self.runner, "runner_reason": self.why}

    def __str__(self) -> str:
        return f"{'in this process' if self.runner == RunnerName.INLINE else 'on Spark'}: {self.why}"


class TooSlow(StopComputing):
    """An inline computation would take longer than Spark takes to start."""


@dataclass
class Pace:
    """Counts rows of an inline computation, and stops it when the rest would take longer than ``below_seconds``.

    The first call does not count, because it may load a model.

    Args:
        rows: rows to compute.
    """

    rows: int
    below_seconds: float
    done: int = 0
    first: tuple[int, float] | None = None

    def __call__(self, rows: int) -> None:
        self.done += rows
        now = time.monotonic()
        if self.first is None:
            self.first = (rows, now)
            return
        done, spent = self.done - self.first[0], now - self.first[1]
        left = (self.rows - self.done) * spent / max(done, 1)
        if spent >= _LEAST_SECONDS and left > self.below_seconds:
            raise TooSlow(
                f"{done:,} of {counted(self.rows, 'row')} took {spent:.1f} s in this process, and the others would "
                f"take about {left:,.0f} s"
            )


def choose_runner(plan: Plan, udfs: Udfs, below_seconds: float, try_new_code: bool) -> RunnerChoice:
    """Choose by the seconds per row of the same UDF versions in earlier jobs.

    The time to load a model does not count, because each task on Spark loads it too.

    Args:
        below_seconds: compute jobs of fewer estimated seconds in this process; 0: none.
        try_new_code: if UDF versions have never run, start in this process.
    """
    spec, rows = plan.spec, plan.rows_to_run
    if not plan.shards:
        return RunnerChoice("inline", "there is nothing to do")
    if any(udf.poll_interval for udf in spec.udfs.values()):
        why = "a batch API computes, and the job waits for it"
        return RunnerChoice("inline" if try_new_code else "spark", why)
    if below_seconds <= 0:
        return RunnerChoice("spark", "inline_below_seconds is 0")
    if not any(shard.to_apply for shard in plan.shards):
        return RunnerChoice("inline", "everything is staged")
    if demands := ", ".join(_demands(spec)):
        return RunnerChoice("spark", f"only Spark provides what was asked for: {demands}")
    if not udfs.have_planned_version():
        return RunnerChoice("spark", "this process has other code than the plan")
    if not (history := plan.earlier().measured):
        version = spec.describe()["udf_version"]
        why = f"no earlier job tells how long {f'UDF version {version}' if version else 'it'} takes"
        return RunnerChoice("inline" if try_new_code else "spark", why, below_seconds if try_new_code else None)
    speed = history[0].speed
    (loading, seconds), size = speed.parts_for(rows, plan.fragments_to_run), speed.bytes_for(rows)
    besides = f" besides {loading:,.1f} s of loading" if loading >= _LEAST_SECONDS else ""
    estimate = f"about {seconds:,.1f} s for {counted(rows, 'row')}{besides}, by an earlier job"
    if size > spec.sizing.task_memory_bytes:
        return RunnerChoice("spark", f"{estimate}, and {size / 2**20:,.0f} MiB of values are more than one task holds")
    if seconds >= below_seconds:
        try:
            udfs.check_sent("spark")
        except InvalidInput as unsent:
            return RunnerChoice("inline", f"{estimate}, and Spark cannot run it: {unsent}")
        return RunnerChoice("spark", f"{estimate}; inline_below_seconds is {below_seconds:g}")
    return RunnerChoice("inline", estimate, below_seconds)


def _demands(spec: JobSpec) -> Iterable[str]:
    if spec.num_gpus:
        yield f"{spec.num_gpus:g} GPUs for a call (num_gpus)"
    if spec.memory:
        yield f"{readable_bytes(spec.memory)} for a call (memory)"
    if spec.needs_spark:
        yield spec.needs_spark
