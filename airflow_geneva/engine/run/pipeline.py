"""Run a job of a column or a view in the same steps: record the plan, apply and commit its shards, finish.

In a notebook :func:`run` runs all steps in one process; in Airflow each step is a task. Publishers make shards visible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from airflow_geneva.engine.checkpoint.reuse import CheckpointIndex
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.counts import StoreRequests, Usage
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job import progress
from airflow_geneva.engine.job.error_records import count_errors
from airflow_geneva.engine.job.estimate import FEW_ROWS, Estimate, starting_spark
from airflow_geneva.engine.job.folder import (
    APPLIED,
    APPLYING,
    FAILURE,
    STARTED,
    SUBMIT,
    JobFolder,
    ShardDocuments,
    plan_name,
)
from airflow_geneva.engine.job.heartbeat import writing_heartbeats
from airflow_geneva.engine.job.meter import JobMeter, Stopwatch
from airflow_geneva.engine.job.outbox import OutboxEntry, write_outbox
from airflow_geneva.engine.job.progress import EVERY_SECONDS, START, usage_of
from airflow_geneva.engine.job.shard_results import carried_counts, read_shard_result, write_shard_result
from airflow_geneva.engine.job.speed import UdfSpeed
from airflow_geneva.engine.lance_io.table_versions import reporting_remade
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.plan.model import JobSpec, Plan
from airflow_geneva.engine.plan.saved_plan import SavedPlan, shard_summaries
from airflow_geneva.engine.plan.shard import FragmentTasks, Shard
from airflow_geneva.engine.plan.swap_plan import SwapPlan
from airflow_geneva.engine.results import FAILED, STORE_REQUESTS, BackfillResult, ShardResult
from airflow_geneva.engine.run import caps as job_caps
from airflow_geneva.engine.run.caps import Canceled, CapReached, Caps, Spent
from airflow_geneva.engine.run.choice import INLINE_BELOW_SECONDS, Pace, RunnerChoice, TooSlow, choose_runner
from airflow_geneva.engine.run.estimate import estimate_by_history
from airflow_geneva.engine.run.expectations import found_in_job
from airflow_geneva.engine.run.housekeeping import run_maintenance, with_indexes
from airflow_geneva.engine.run.peers import PEERS
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import failure_message, record_plan, what_failed, with_stamps
from airflow_geneva.engine.run.runner import Runner, needed
from airflow_geneva.engine.run.task import GRACE_SECONDS
from airflow_geneva.engine.run.units import Target, UnitReport, is_shard_staged
from airflow_geneva.engine.run.waiting import Waiting
from airflow_geneva.engine.runtime import time, wait
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.requests import take_requests
from airflow_geneva.engine.udf.packages import missing_package
from airflow_geneva.errors import ExpectationFailed, InvalidInput, JobFailed, StorageError

logger = logging.getLogger("airflow_geneva.run")
_MOST_TIMES = 3
_MOST_UNREADABLE = 10


def start(
    plan: Plan,
    location: TableLocation,
    udfs: Udfs,
    runner: str,
    watch: Stopwatch,
    cluster: Runner | None = None,
    folder: JobFolder | None = None,
) -> PlannedJob:
    """Choose where to compute, start a Spark session if the job needs one, and record the plan.

    Args:
        cluster: computes what is not computed in this process.

    Raises:
        InvalidInput: a UDF that must be sent to another process cannot be pickled.
        JavaNotFound: there is neither an active session nor Java to start one.
        StorageError: the table's folder is read-only or unreachable.
    """
    JobMeter.current().rows = plan.rows_to_run
    plan, choice, expected = choose(plan, location, udfs, runner, INLINE_BELOW_SECONDS, True, cluster)
    if runner == RunnerName.AUTO:
        logger.info("Computing %s %s.", plan.spec.target, choice)
    about = {"expected": expected.pace()} if plan.shards else {}
    JobMeter.current().expected = about.get("expected", {})
    if any(shard.to_apply for shard in plan.shards):
        udfs.check_sent(choice.runner)
        if choice.runner == RunnerName.SPARK:
            if runner == RunnerName.SPARK and plan.rows_to_run < FEW_ROWS and not needed(cluster).is_up():
                instead = 'runner="inline" computes them in this process.'
                logger.warning("%s %s", starting_spark(plan.rows_to_run), instead)
            _start_cluster(needed(cluster), plan.spec, watch, "plan")
    for saving in plan.savings:
        logger.info("%s", saving)
    job = record_job(plan, location, choice, about, cluster=cluster, folder=folder)
    JobMeter.current().cancel = job.folder.cancel
    watch.lap("plan")
    return job


def choose(
    plan: Plan,
    location: TableLocation,
    udfs: Udfs,
    runner: str,
    below_seconds: float,
    try_new_code: bool,
    cluster: Runner | None = None,
) -> tuple[Plan, RunnerChoice, Estimate]:
    """Choose where to compute a plan, and estimate by earlier jobs what that takes; return the plan with both.

    Args:
        runner: ``auto`` chooses; ``inline`` and ``spark`` are as requested.
        below_seconds, try_new_code: see :func:`airflow_geneva.engine.run.choice.choose_runner`.
    """
    choice = RunnerChoice(runner, "as requested")
    if runner == RunnerName.AUTO:
        choice = choose_runner(plan, udfs, below_seconds, try_new_code)
    if not plan.shards:
        return plan, choice, Estimate.of_nothing()
    estimate = partial(estimate_by_history, plan, choice.runner, cluster)
    expected, plan = location.checkpoints.side_by_side(estimate, partial(with_stamps, plan, location))
    return plan.expecting(expected), choice, expected


def record_job(
    plan: Plan,
    location: TableLocation,
    choice: RunnerChoice,
    about: Mapping[str, Any],
    run: str = "",
    elsewhere: bool = False,
    announces_since: int | None = None,
    cluster: Runner | None = None,
    folder: JobFolder | None = None,
    before: Mapping[str, Any] | None = None,
) -> PlannedJob:
    """Write the record and the plan of a job; from then on any process can carry it out.

    Args:
        about: fields of the record beside those of the plan.
        elsewhere: store the code of the UDFs and all documents, for processes that have neither.
        announces_since: the version after which the job's commits must be announced; None: it announces none.
        before: the job's record of an earlier plan, whose unannounced work the job announces too.
        run, folder: see :func:`airflow_geneva.engine.run.record.record_plan`, which has the errors too.
    """
    # This process itself finishes a job with nothing to do, and has its swap in memory.
    idle = not elsewhere and plan.swap is not None and plan.swap.idle
    stored = replace(plan, swap=None) if idle else plan
    folder = folder or JobFolder.of(location.patient().checkpoints, plan.spec.job_id)
    if before is not None:
        about = {**about, **carried_counts(folder, before)}
    beside = []
    if announces_since is not None:
        entry = OutboxEntry(plan.spec.job_id, announces_since)
        beside = [partial(write_outbox, location.checkpoints, plan.spec.outbox, entry, new=folder.alone)]
    saved = record_plan(stored, location, choice, run, elsewhere, about, beside, folder)
    return PlannedJob(location, saved, plan.swap, choice, plan.opened, plan.index, cluster=cluster, folder=folder)


def _start_cluster(cluster: Runner, spec: JobSpec, watch: Stopwatch, before: str) -> None:
    watch.lap(before)
    JobMeter.current().enter("spark")
    cluster.start(spec.sizing.concurrency)
    watch.lap("spark")


def run_new(
    plan: Plan, location: TableLocation, udfs: Udfs, runner: str, watch: Stopwatch, cluster: Runner | None = None
) -> BackfillResult:
    """Start a new job and run it to its end in this process; raises the errors of `start` and `run`."""
    folder = JobFolder.of(location.patient().checkpoints, plan.spec.job_id)
    with folder.written_by_this_process():
        return run(start(plan, location, udfs, runner, watch, cluster, folder), plan.shards, udfs, watch)


def run(job: PlannedJob, shards: Sequence[Shard], udfs: Udfs, watch: Stopwatch) -> BackfillResult:
    """Apply and commit the shards of a job one after another, and finish it.

    Raises:
        JobFailed: a step failed; ``.result`` has the work that was completed before.
    """
    committed = list[ShardResult]()
    pace, sent = job.pace(shards), udfs
    if job.choice is not None and job.choice.below_seconds is not None:
        try:
            sent = udfs.sent()  # before they run: later their state may not be picklable
        except Exception as error:
            target = job.spec.target
            logger.info("Computing all of %s in this process, because its UDF cannot be sent: %s", target, error)
            pace = _unwatched
    try:
        for shard in shards:
            try:
                committed.append(apply_and_commit(job, shard, udfs, watch, pace))
            except TooSlow as slow:
                job.choice = RunnerChoice("spark", str(slow))
                logger.info("Computing the rest of %s %s.", job.spec.target, job.choice)
                job.folder.update_record(**job.choice.describe())
                udfs = sent
                _start_cluster(needed(job.cluster), job.spec, watch, "apply")
                committed.append(apply_and_commit(job, shard, udfs, watch))
        result = job.finish(committed, watch.seconds)
    except BaseException as error:
        failed = job.fail(committed, error, watch.seconds)
        if not is_failure(error):
            raise
        # The message names the missing package, so the traceback of the worker adds nothing.
        cause = None if missing_package(str(error)) else error
        raise JobFailed(failure_message(job.spec, error), failed) from cause
    logger.info("%s", result)
    if why := job.why_failed(committed):
        raise JobFailed(f"{what_failed(job.spec)}: {why}", result)
    return result


def apply_and_commit(
    job: PlannedJob, shard: Shard, udfs: Udfs, watch: Stopwatch, on_rows: Callable[[int], None] = lambda rows: None
) -> ShardResult:
    """Apply and commit one shard; an exception of ``on_rows`` ends an inline computation."""
    folder, place = job.folder, (job.saved.fingerprint, shard.index)
    with folder.recording_failure(*place), job.writing_behind():
        with watch.timing("apply"), writing_heartbeats(folder, "apply", *place):
            job.apply(shard, udfs, on_rows, commits=True)
        with watch.timing("commit"), writing_heartbeats(folder, "commit", *place):
            result = job.commit(shard)
        for _ in range(_MOST_TIMES):
            if not job.publisher.uncomputed or job.unreadable_in(shard):
                break
            with watch.timing("apply"), writing_heartbeats(folder, "apply", *place):
                job.apply_uncomputed(shard, udfs, on_rows)
            with watch.timing("commit"), writing_heartbeats(folder, "commit", *place):
                result = job.commit(shard)
        return result


@dataclass
class _Applied:
    """A shard in computation, with the caps of the job; then also the reports of its units and the written result."""

    shard: Shard
    caps: Caps
    look: Callable[[], None]
    reports: Sequence[UnitReport] = ()
    document: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> Caps:
        """Return the caps; CapReached if the shard has rows to compute and the job is at a cap or was canceled."""
        if self.shard.to_apply:
            self.look()
            self.caps.check()
        return self.caps


class PlannedJob:
    """A job whose record and plan are written. Each step works in any process, and after a kill it can be repeated.

    Args:
        swap: the swap plan of a refresh, if this process has it already.
        choice: where it is computed; None: in the process that applies a shard.
        opened, index: what the planner has opened and the checkpoints that it has read, if this process has planned.
        record: the job's record, if this process has read it.
        cluster: computes shards if `choice` says so; :meth:`apply_on` is given its own.
        folder: the job's documents, if this process has them.

    With `waits` set to False, `apply` and `apply_on` raise StillWaiting when a batch API has not answered.
    """

    def __init__(
        self,
        location: TableLocation,
        saved: SavedPlan,
        swap: SwapPlan | None = None,
        choice: RunnerChoice | None = None,
        opened: tuple[Any, ...] = (),
        index: CheckpointIndex | None = None,
        record: Mapping[str, Any] | None = None,
        cluster: Runner | None = None,
        folder: JobFolder | None = None,
    ) -> None:
        self.location = location = location.patient()
        self.choice = choice
        self.cluster = cluster
        self.saved = saved
        self.spec = spec = saved.spec
        self.waits = True
        self.unmet = ""
        self._ended: dict[int, Spent] = {}
        self._canceled: Canceled | None = None
        self._looked = time.monotonic()
        self._index = index
        self._record = record
        self.folder = folder or JobFolder.of(location.checkpoints, spec.job_id)
        self._peer = PEERS[spec.kind]
        self.publisher = self._peer.publisher(location, saved, spec, self.folder, swap=swap, opened=opened)

    def apply_uncomputed(self, shard: Shard, udfs: Udfs, on_rows: Callable[[int], None]) -> None:
        """Compute the rows that a commit did not find, because others removed files or moved rows with blobs."""
        found = self.publisher.uncomputed
        if written := self.publisher.target.written:
            # Spark's tasks write some of these checkpoints again.
            written.clear()
        for version in sorted({int(dataset.version) for dataset, _ in found}):
            source = next(dataset for dataset, _ in found if dataset.version == version)
            here = (task for dataset, task in found if dataset.version == version)
            # The plan may have found them staged, or some of their rows in checkpoints.
            tasks = FragmentTasks(replace(task, missing=task.due, staged=False) for task in here)
            target = replace(self.publisher.target, source=source, spec=replace(self.spec, version=version))
            self.apply(Shard(shard.index, tasks), udfs, on_rows, target)

    def apply(
        self,
        shard: Shard,
        udfs: Udfs,
        on_rows: Callable[[int], None] = lambda rows: None,
        target: Target | None = None,
        commits: bool = False,
    ) -> None:
        """Compute a shard, stage its rows, and write the result.

        Args:
            on_rows: called with the number of rows after every step of an inline computation; may raise StopComputing.
            target: the column or view at the version to read, if it is not the planned version.
            commits: whether this process commits the shard next, and waits for the last checkpoint writes only then.

        Raises:
            UdfError: a UDF failed; rows computed before are checkpointed.
            TableRemade: a table was dropped and created again.
        """
        location, documents = self.location, self.documents(shard.index)
        earlier = None if target is None else documents.applied
        before = UdfSpeed.from_json((earlier or {}).get("speed"))
        index, self._index = self._index, None
        write_behind = self.publisher.write_behind if commits and not self.folder.storage.local else None
        target = target or replace(self.publisher.target, listed=index, write_behind=write_behind)
        on_spark = self.choice is not None and self.choice.runner == RunnerName.SPARK and bool(shard.to_apply)
        with self._applying(shard, before) as applied:
            given = (location, target.check_names(), shard, udfs, documents)
            caps, wait = applied.begin(), applied.caps.around(self.waiting(shard))
            if on_spark:
                applied.reports = self._peer.on_cluster(needed(self.cluster), *given, caps, wait)
            else:
                meter = Meter(lambda: caps.most_reported, lambda: caps.add(0))
                watched = caps.watching(on_rows)
                applied.reports = self._peer.inline(
                    location, target.spec, shard, udfs, watched, documents, target, wait, meter
                )

    def apply_on(self, cluster: Runner, shard: Shard, every: float = EVERY_SECONDS) -> dict[str, Any]:
        """Compute a shard on a cluster that has the code; write and return its result. Raises as `apply` does."""
        udfs, documents = Udfs.planned(self.spec), self.documents(shard.index)
        with self._applying(shard) as applied:
            caps, wait = applied.begin(), applied.caps.around(self.waiting(shard))
            given = (self.location, self.publisher.target.check_names(), shard, udfs, documents)
            applied.reports = self._peer.on_cluster(cluster, *given, caps, wait, every)
        return applied.document

    @contextmanager
    def at_step(self, step: str, shard: int, last_try: bool = False, submits: bool = False) -> Iterator[None]:
        """Write heartbeats while a step of a shard runs, and record why it failed.

        Args:
            last_try: no other attempt follows, so the job fails too.
            submits: this process waits for the one that computes the shard, and has a document of its own.
        """
        place = self.saved.fingerprint, shard
        heartbeats = writing_heartbeats(self.folder, step, *place, SUBMIT if submits else "")
        with heartbeats, self.folder.recording_failure(*place, last_try):
            yield

    @property
    def uri(self) -> str:
        """The URI of the plan."""
        return self.folder.storage.path(plan_name(self.saved.fingerprint))

    def summarize_shards(self, plan: Plan) -> list[dict[str, Any]]:
        """Return what names the shards of the plan, of which the job was made, in XCom."""
        return shard_summaries(plan, self.saved, self.folder.storage)

    def load_shard(self, index: int) -> Shard:
        return self.saved.load_shard(self.folder.storage, index)

    def apply_if_same_code(self, shard: Shard) -> bool:
        """Compute a shard, if this process has the planned versions of its UDFs."""
        udfs = Udfs.planned(self.spec)
        if same := udfs.have_planned_version():
            self.apply(shard, udfs)
        return same

    def apply_and_commit(self, shards: Sequence[Shard], udfs: Udfs) -> None:
        """Apply and commit shards one after another, as their own tasks do; raises TooSlow if that takes too long."""
        pace, watch = self.pace(shards), Stopwatch()
        for shard in shards:
            apply_and_commit(self, shard, udfs, watch, pace)
        self.settle()

    def documents(self, shard: int) -> ShardDocuments:
        return ShardDocuments(self.folder, self.saved.fingerprint, shard)

    def waiting(self, shard: Shard) -> Waiting:
        """Return the object with which a shard waits for batch APIs."""
        return Waiting(self.location, self.spec, self.documents(shard.index), self.waits)

    def begin(self, shard: Shard) -> None:
        """Record that a task has begun to work on a shard, before Spark is started for it."""
        self.documents(shard.index).update(started={"at": time.time()})

    @contextmanager
    def _applying(self, shard: Shard, before: UdfSpeed | None = None) -> Iterator[_Applied]:
        """Write the result of a block that computes a shard; a cap ends the block. `before`: speed measured earlier."""
        began, applied, stopped = time.monotonic(), _Applied(shard, self._caps(shard), self._look), None
        caps = applied.caps
        with reporting_remade(self.spec.tables, self.location.options):
            try:
                yield applied
            except CapReached as reached:
                applied.reports, stopped = reached.reports, str(reached)
                self._canceled = reached if isinstance(reached, Canceled) else self._canceled
                logger.warning("%s %s.", self.spec.target, stopped)
            finally:
                caps.keep(caps.own)
            reports = [*applied.reports, *([] if before is None else [UnitReport(True, speed=before)])]
            applied.document = self.write_applied(shard, reports, time.monotonic() - began, caps, stopped)

    def _look(self) -> None:
        """Raise Canceled if the job was canceled, as far as looks every few seconds tell, whatever a shard takes."""
        if self._canceled is not None:
            raise self._canceled
        if (now := time.monotonic()) - self._looked >= progress.CHECK_SECONDS:
            self._looked = now
            job_caps.stop_if_canceled(self.folder)

    def _caps(self, shard: Shard) -> Caps:
        plan, shards = self.saved.fingerprint, len(self.saved.shards)
        return Caps.of(self.spec, self.folder, plan, shard.index, shards, self._ended)

    def unreadable_in(self, shard: Shard) -> list[str]:
        """Return why fragments of an applied shard cannot be read."""
        return list((self.documents(shard.index).applied or {}).get("unreadable", ()))

    def is_at_cap(self, shard: Shard) -> bool:
        """Whether the job is at a cap or was canceled, so that the shard is not computed; its result records that."""
        try:
            job_caps.stop_if_canceled(self.folder)
            self._caps(shard).check()
        except CapReached as reached:
            self.write_applied(shard, (), 0.0, stopped=str(reached))
            return True
        return False

    def write_applied(
        self,
        shard: Shard,
        reports: Iterable[UnitReport],
        seconds: float,
        caps: Caps | None = None,
        stopped: str | None = None,
    ) -> dict[str, Any]:
        """Write and return a shard's result; `seconds` exclude Spark's start, `stopped` is why it stopped at a cap."""
        done = sum(reports, UnitReport(True))
        status = self.documents(shard.index).read()
        begun = self.documents(shard.index).read(SUBMIT)
        started, computed = begun.get(STARTED), done.speed.rows
        if stopped and caps is not None:
            computed = max(computed, caps.computed)
        waited = max(time.time() - started["at"] - seconds, 0.0) if started else 0.0
        document = {
            "shard": shard.index,
            "fingerprint": self.saved.fingerprint,
            "rows_run": usage_of([status]).rows,
            "rows_computed": max(computed - done.failed, 0),
            "rows_failed": done.failed,
            "fragments_staged": done.speed.fragments if stopped or done.unreadable else len(shard.to_apply),
            "speed": done.speed.to_json(),
            "seconds": round(seconds + waited, 3),
            "start_seconds": round(waited, 3),
        }
        if caps is not None and (start := (status.get(APPLYING) or {}).get(START)):
            document[START] = start
        if stopped:
            document["stopped"] = stopped
        if done.notes:
            document["notes"] = list(done.notes)
        if done.unreadable:
            document["unreadable"] = list(done.unreadable)
        self.documents(shard.index).update(applied=document, submitted=None)
        return document

    @cached_property
    def _recorded(self) -> Mapping[str, Any]:
        """The job's record, as it was before the end."""
        return self._record or self.folder.record

    @property
    def applied(self) -> list[dict[str, Any]]:
        """The results of the applied shards, read at the first access."""
        return [status[APPLIED] for status in self._statuses if status.get(APPLIED)]

    @cached_property
    def _statuses(self) -> list[dict[str, Any]]:
        """What the computing processes wrote about all shards, read in parallel."""
        read = partial(self.folder.read_shard, self.saved.fingerprint)
        return self.folder.storage.side_by_side(*(partial(read, index) for index in range(len(self.saved.shards))))

    @contextmanager
    def writing_behind(self) -> Iterator[None]:
        """If the body fails, wait some seconds for checkpoint writes in the background."""
        try:
            yield
        except BaseException:
            wait(self.publisher.write_behind, GRACE_SECONDS)
            raise

    def settle(self) -> None:
        """Wait for checkpoint writes in the background."""
        writes, self.publisher.write_behind = self.publisher.write_behind, []
        for write in writes:
            write.result()

    def committed(self) -> list[ShardResult | None]:
        """Read the commit results of all shards in parallel; None for a shard without a result."""
        read = partial(read_shard_result, self.folder, self.saved.fingerprint)
        return self.folder.storage.side_by_side(*(partial(read, index) for index in range(len(self.saved.shards))))

    @cached_property
    def _errors(self) -> int:
        return count_errors(self.folder.storage)

    def read_for_finish(self) -> list[ShardResult | None]:
        """Read in parallel what `finish` needs, in a process that has not worked on the job; return `committed`."""
        reads = lambda: self._statuses, lambda: self._errors, self.publisher.open_for_finish
        found: list[ShardResult | None] = self.folder.storage.side_by_side(self.committed, *reads)[0]
        return found

    def pace(self, shards: Iterable[Shard]) -> Callable[[int], None]:
        """Return a callback that watches an inline computation of these shards, and may raise TooSlow."""
        below = None if self.choice is None else self.choice.below_seconds
        return _unwatched if below is None else Pace(sum(shard.rows_to_run for shard in shards), below)

    def is_staged(self, shard: Shard) -> bool:
        """Whether a shard is computed and staged, so that only the commit is left."""
        return is_shard_staged(self.publisher.target, shard)

    def commit(self, shard: Shard) -> ShardResult:
        """Commit a shard of a column, or verify a shard of a view, and write the result. Raises as `finish` does."""
        began = time.monotonic()
        self.publisher.target.store.look_again()
        with reporting_remade(self.spec.tables, self.location.options):
            result = self.publisher.commit(shard)
            if result.rows_left:
                # The staged files may be gone because the table was created again since it was opened.
                for table in self.spec.tables:
                    table.assert_same_table(self.location.options)
            seconds = round(time.monotonic() - began, 3)
            result = replace(result, seconds=seconds, store_requests=take_requests())
            write_shard_result(self.folder, result)
        return result

    def finish(self, committed: Iterable[ShardResult], seconds: Mapping[str, float] | None = None) -> BackfillResult:
        """Complete the job, and record how it ended: FAILED if a shard is missing.

        Args:
            committed: the recorded results of the plan's shards.

        Raises:
            InvalidInput: the plan's documents were removed or changed.
            CommitConflict: other writers kept changing the view until all retries were used.
            TableRemade: a table was dropped and created again.
        """
        with writing_heartbeats(self.folder, "finish", self.saved.fingerprint) if self.saved.shards else nullcontext():
            return self._finish(list(committed), seconds or {})

    def _finish(self, results: Sequence[ShardResult], seconds: Mapping[str, float]) -> BackfillResult:
        began = time.monotonic()
        fault_point("finish.begin")
        missing = sorted(set(range(len(self.saved.shards))) - {result.shard for result in results})
        with reporting_remade(self.spec.tables, self.location.options):
            error = self.missing_error(missing) if missing else self.why_failed(results)
            try:
                result, many_documents = self.publisher.finish(results, missing, error is not None)
            except ExpectationFailed as unmet:
                self.unmet = error = str(unmet)
                result, many_documents = self.publisher.result(()), False
            result = replace(result, state=FAILED) if error else result
            result = with_indexes(self.location, self.spec, result, self.publisher.newest)
            result = result.with_carried(self._recorded)
            result = result.with_seconds(**seconds, finish=time.monotonic() - began)
            result = self._write_end(result, results, error, [*self.publisher.post_commit, self.settle])
            if many_documents and not missing:
                run_maintenance(self.location, self.spec)
        fault_point("finish.end")
        return result

    def fail(
        self, committed: Iterable[ShardResult], error: BaseException, seconds: Mapping[str, float]
    ) -> BackfillResult:
        """Record that the job failed, and which rows it committed before; other computed rows stay in checkpoints."""
        committed = list(committed)
        try:
            result = replace(self.publisher.result(committed), state=FAILED).with_seconds(**seconds)
        except InvalidInput:  # the table was dropped, and with it all records
            return BackfillResult(self.spec.job_id, FAILED).with_seconds(**seconds)
        try:
            return self._write_end(result, committed, str(error) or type(error).__name__)
        except StorageError as unkept:
            # The caller raises the original error.
            logger.warning("Cannot record that job %s failed: %s", result.job_id, unkept)
            return result

    def _write_end(
        self,
        result: BackfillResult,
        committed: Sequence[ShardResult],
        error: str | None,
        beside: Iterable[Callable[[], object]] = (),
    ) -> BackfillResult:
        """Record how the job ended; return its result, with the failed rows of shards that were not committed."""
        failed = result.state == FAILED or result.rows_failed or any(one.get("rows_failed") for one in self.applied)
        unread = self.saved.shards and (failed or not self.folder.alone)
        errors = self._errors if unread else 0
        speed = sum((UdfSpeed.from_json(document.get("speed")) for document in self.applied), UdfSpeed())
        checked = found_in_job(self.folder, self.saved, self.publisher.checked)
        result = replace(speed.saved.added_to(result), checked=checked)
        notes = [note for document in self.applied for note in document.get("notes", ())]
        result = replace(result, notes=(*result.notes, *filter(None, [str(speed.busy)]), *notes))
        used, price = usage_of(self._statuses), self.spec.sizing.price_per_slot_hour
        result = self._with_usage(result, used, committed)
        result = result.with_failures(errors) if result.state == FAILED else result
        about: dict[str, Any] = {} if self.choice is None else self.choice.describe()
        if speed.rows:
            sizing = self.spec.sizing
            tasks = 1 if about.get("runner") == "inline" else sizing.concurrency
            about |= {"speed": speed.to_json(), "slots": tasks * sizing.intra_applier_concurrency}
        if paid := used.paid + speed.seconds * (price or 0.0) / 3600:
            about["cost"] = round(paid, 6)
        starts = [document["start_seconds"] for document in self.applied if document.get("start_seconds")]
        if starts:
            about["start_seconds"] = round(sum(starts) / len(starts), 3)
        end = (result.state, result.to_json(), error, errors, about, self.saved.fingerprint)
        self.folder.storage.side_by_side(*beside, partial(self.folder.write_result, *end))
        return result

    def _with_usage(self, result: BackfillResult, used: Usage, committed: Sequence[ShardResult]) -> BackfillResult:
        """Add what all processes used; visible rows count as run, even if a kill lost the usage of their calls."""
        saved = result.rows_deduplicated + result.rows_cached
        least = result.rows_computed - saved if self.spec.udfs else 0
        others = (StoreRequests.from_json(self._recorded.get(STORE_REQUESTS)), used.store_requests)
        requests = sum((*others, *(shard.store_requests for shard in committed)), take_requests())
        return replace(
            result, usage=used.reported, rows_run=max(result.rows_run + used.rows, least), store_requests=requests
        )

    def why_failed(self, committed: Sequence[ShardResult]) -> str | None:
        """Return why a job failed whose shards are all there: an expectation is not met, a fragment cannot be read, or
        more rows failed than `max_failed` allows; None if it did not fail.
        """
        found = list(dict.fromkeys(why for document in self.applied for why in document.get("unreadable", ())))
        if len(found) > _MOST_UNREADABLE:
            found = [*found[:_MOST_UNREADABLE], f"{len(found) - _MOST_UNREADABLE:,} more fragments cannot be read."]
        too_many = self.spec.too_many(sum(result.rows_failed for result in committed))
        return self.unmet or "\n".join(found) or too_many

    def missing_error(self, missing: Sequence[int]) -> str:
        """Return the first recorded failure of a missing shard, if any, and the number of missing shards."""
        count = f"{len(missing):,} of {counted(len(self.saved.shards), 'shard')} not committed: {missing[:20]}."
        for index in missing[:20]:
            if failure := self.documents(index).read().get(FAILURE):
                error, alone = failure["error"].rstrip(), len(self.saved.shards) == 1
                return error if alone else f"Shard {index}: {error}\n{count}"
        return count


def _unwatched(_rows: int) -> None:
    """Do not limit the time of an inline computation."""
