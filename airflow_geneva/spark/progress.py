"""Reports of a shard's Spark tasks to the driver, and its allowances for them, exchanged through files only."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import inf, nextafter
from typing import TYPE_CHECKING

from airflow_geneva import errors
from airflow_geneva.engine.apply.skipped_rows import SkipCount
from airflow_geneva.engine.counts import Counts, Usage
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.progress import START, ProgressReporter, read_progress
from airflow_geneva.engine.job.spark_start import SparkStart
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.run.caps import CapReached, Caps
from airflow_geneva.engine.runtime import time
from airflow_geneva.errors import GenevaError, UdfError
from airflow_geneva.spark.signs import DriverSigns

if TYPE_CHECKING:
    from airflow_geneva.spark.tasks import TaskSpec

logger = logging.getLogger("airflow_geneva.spark")

TASK, DEVICE = "task-", "device-"
FAILURE, ENDED = "failure", "ended"
_TASK_REPORT_SECONDS = 2.0
_WATCHED_SECONDS = 0.5
_ASK_SECONDS = 0.1
_USUAL_WAIT = 10.0


def report_seconds(spec: JobSpec) -> float:
    return _WATCHED_SECONDS if spec.sizing.watched else _TASK_REPORT_SECONDS


@dataclass
class Allowances:
    """The spending allowance of each task of a shard; all allowances together stay within the rest of a cap.

    An allowance never decreases, and unspent allowances never exceed the rest of the cap. So the cap is exceeded at
    most by the cost of the calls that were in flight when a task had spent its allowance.
    """

    given: dict[int, float] = field(default_factory=dict)

    def share(self, left: float, spent: Mapping[int, float], running: Collection[int], tasks: int) -> None:
        """Allow the running tasks more.

        Args:
            left: of the cap, after all that is known to be spent.
            spent: by task, as far as it is known.
            tasks: how many run at once.
        """
        free = left - sum(max(self.given.get(task, 0.0) - spent[task], 0.0) for task in running)
        for task in running:
            given = max(self.given.get(task, 0.0), spent[task])
            more = min(spent[task] + left / max(tasks, len(running)) - given, free)
            if more > 0:
                free -= more
                given = max(given + more, nextafter(given, inf))
            self.given[task] = given


@dataclass
class Allowance:
    """The allowance of one task, as set by its driver; used in the task.

    Args:
        capped: whether the job has a cap on its cost.
        spent: the cost that its calls reported.
        report: reports the task's progress to the driver.
    """

    task: int
    signs: DriverSigns
    capped: bool
    spent: Callable[[], float]
    report: Callable[[], None]
    _until: float = float("inf")

    @property
    def most_cost(self) -> float:
        """The total cost that the driver has allowed so far."""
        return float(self.signs.allowed.get(str(self.task), inf))

    def wait(self) -> None:
        """Return when the task may make its next calls; StopComputing if the job was stopped meanwhile."""
        if not self._is_used_up():
            return
        self.report()
        while self._is_used_up():
            time.sleep(_ASK_SECONDS)
            self.signs.read()

    def _is_used_up(self) -> bool:
        # The earliest end that was read counts: a heartbeat holds the time left at its writing, not at its reading.
        if self.signs.seconds_left is not None:
            self._until = min(self._until, self.signs.read_at + self.signs.seconds_left)
        if time.monotonic() >= self._until:
            return True
        given, spent = self.signs.allowed.get(str(self.task)), self.spent()
        # Whether calls report a cost is unknown until one does.
        if given is None:
            return self.capped and (spent > 0 or bool(self.signs.allowed))
        return spent >= given


@dataclass
class ProgressCollector:
    """Adds up the tasks' progress files for the driver's reporter, and stops the tasks if they skip too many rows.

    Args:
        tasks: how many the stage has.
        has_executor: whether something could compute a task.
    """

    task_spec: TaskSpec
    signs: DriverSigns
    reporter: ProgressReporter
    count: SkipCount
    caps: Caps
    done_before: int
    tasks: int
    has_executor: Callable[[], bool]
    failure: GenevaError | CapReached | None = None
    allowances: Allowances = field(default_factory=Allowances)
    failed_devices: dict[str, str] = field(default_factory=dict)
    _next: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _told: bool = False

    def look(self, now: bool = False) -> None:
        if time.monotonic() < self._next and not now:
            return
        self._next = time.monotonic() + report_seconds(self.caps.spec)
        ready, seconds, counts, busy = 0, 0.0, Counts(), Busy()
        skipped: Counter[int] = Counter()
        starts = list[SparkStart]()
        spent: dict[int, float] = {}
        running: list[int] = []
        progress, slots, usage = self.task_spec.progress, self.task_spec.slots, self.task_spec.used
        for name in progress.list_files():
            if name.startswith(DEVICE) and name not in self.failed_devices:
                self._note_device(name, progress.read_document(name) or {})
            document = progress.read_document(name) if name.startswith(TASK) else None
            if document is None:
                continue
            found = read_progress(document)
            task = int(name[len(TASK) :].partition(".")[0])
            counts += found
            busy += found.busy
            seconds += found.seconds
            ready += found.ready
            starts += filter(None, [SparkStart.from_json(document.get(START))])
            used = Usage.from_json(document.get("usage"))
            spent[task], usage = used.paid, usage + used
            if not document.get(ENDED):
                running.append(task)
            skipped.update({int(rule): given_up for rule, given_up in document["skipped"].items()})
            if failure := document.get(FAILURE):
                kind, message = failure
                self._stop(getattr(errors, kind, GenevaError)(message))
        rows = counts.rows_computed + counts.rows_failed
        self.reporter.rows_done = max(self.reporter.rows_done, self.done_before, rows)
        self.reporter.ready = max(self.reporter.ready, ready)
        self.reporter.rows_ready = max(self.reporter.rows_ready, counts.rows_ready)
        self.reporter.rows_failed = max(self.reporter.rows_failed, counts.rows_failed)
        self.reporter.usage, self.reporter.busy = lambda: usage, lambda: busy
        self.reporter.complete_start(starts)
        self._look_for_executor(bool(spent))
        try:
            self.count.check(skipped)
            if (
                not now and self.failure is None
            ):  # the end of a stage is reported by its caller, which would say the same again
                self.reporter.tick()
                self.caps.see(rows, seconds, usage.paid)
                self._allow(spent, running, min(slots, len(running) + max(self.tasks - len(spent), 0)), usage.paid)
        except (UdfError, CapReached) as stop:
            self._stop(stop)

    def _note_device(self, name: str, document: Mapping[str, object]) -> None:
        """Keep which device failed in a task, for the job's result; Spark runs the task again in another process."""
        self.failed_devices[name] = said = str(document.get(FAILURE, ""))
        logger.warning("%s Its process ended, and Spark runs the task again.", said)

    def _look_for_executor(self, begun: bool) -> None:
        """Keep in the shard's status that it waits for an executor, and log it once if it waits for long."""
        there = begun or self.has_executor()
        if there != self.reporter.has_executor:
            self.reporter.has_executor = there
            self.reporter.keep()
        if not there and not self._told and time.monotonic() - self._began >= _USUAL_WAIT:
            self._told = True
            logger.warning(
                "Shard %s waits for an executor: Spark asked the cluster for one %.0f s ago and has none yet. The "
                "cluster is full, or no machine of it has the cores, memory or GPUs that one executor needs: see the "
                "cluster's own page, or ask for less with the UDF's num_cpus, num_gpus and memory, or with conf.",
                *(self.task_spec.shard, time.monotonic() - self._began),
            )

    def _allow(self, spent: Mapping[int, float], running: Collection[int], tasks: int, reported: float) -> None:
        """Send the tasks the seconds left and, once calls report their cost, their allowances."""
        if reported and (left := self.caps.cost_left) is not None:
            self.allowances.share(left, spent, running, tasks)
        self.signs.write(allowed=self.allowances.given, seconds_left=self.caps.seconds_left)

    def _stop(self, failure: GenevaError | CapReached) -> None:
        if self.failure is None:
            self.failure = failure
            self.signs.write(stop=True)
