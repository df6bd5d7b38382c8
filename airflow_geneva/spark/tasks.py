"""Run a shard's tasks on a Spark session, classic or Connect: the cluster computes and stages, and commits nothing."""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from math import isfinite
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias

from airflow_geneva.engine.apply.batch_mapper import StopComputing
from airflow_geneva.engine.apply.isolation.process import POOL
from airflow_geneva.engine.apply.skipped_rows import SkipCount, has_limits, skipped_before
from airflow_geneva.engine.counts import Usage
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.folder import JobFolder, ShardDocuments
from airflow_geneva.engine.job.meter import Stopwatch
from airflow_geneva.engine.job.progress import EVERY_SECONDS, ProgressReporter
from airflow_geneva.engine.job.spark_start import SparkStart
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.masking import is_service_variable
from airflow_geneva.engine.plan.model import JobSpec, RefreshSpec
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.run.caps import CapReached, Caps
from airflow_geneva.engine.run.inline import Reporting, open_reporter
from airflow_geneva.engine.run.prepare import Udfs, joint_policy, open_target, prepare
from airflow_geneva.engine.run.task import TaskRunner
from airflow_geneva.engine.run.units import Target, Unit, UnitReport, group_units
from airflow_geneva.engine.run.view import ViewTarget
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.requests import RequestMeter
from airflow_geneva.engine.udf.error_policy import Policy, rules_of
from airflow_geneva.engine.udf.packages import how_to_install, missing_package
from airflow_geneva.errors import DeviceFailed, GenevaError, InvalidInput, StorageError, UdfCrashed
from airflow_geneva.spark.claims import Claims, OneGroup, Share
from airflow_geneva.spark.connect import explaining_ended_session, is_connect
from airflow_geneva.spark.progress import DEVICE, ENDED, FAILURE, TASK, Allowance, ProgressCollector, report_seconds
from airflow_geneva.spark.signs import DriverLost, DriverSigns
from airflow_geneva.spark.submit import THREAD_VARIABLES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

logger = logging.getLogger("airflow_geneva.spark")

_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0
"""Seconds for which a driver that is asked to stop waits for its tasks, which keep what they computed."""
_Stage: TypeAlias = tuple[str, str, int]


@dataclass(frozen=True)
class TaskSpec:
    """All that a Spark task needs, credentials too; sent to executors inside the serialized task, never as a file.

    ``attempt`` names the folder of the tasks' reports, ``used`` is what calls reported before; ``slots`` is how many
    Spark tasks run at once; ``skipped`` counts rows skipped before the stage, by rule; ``services`` are environment
    variables of model services; ``submitted`` is the time when the stage was submitted.
    """

    location: TableLocation
    spec: JobSpec
    udfs: Udfs
    job: JobFolder
    plan: str
    shard: int
    attempt: str
    slots: int
    skipped: Mapping[int, int]
    services: Mapping[str, str] = field(default_factory=dict, repr=False)
    used: Usage = field(default_factory=Usage)
    submitted: float = 0.0

    @property
    def progress(self) -> Storage:
        return self.job.storage.folder("progress", self.attempt)

    def claims(self, stage: int) -> Storage:
        return self.job.storage.folder("claims", self.attempt, str(stage))

    def open_view(self) -> ViewTarget:
        target = open_target(self.location, self.spec)
        assert isinstance(target, ViewTarget)
        return target

    def read_groups(self, stage: int) -> list[list[Unit]]:
        """Read the units of a stage from the plan; sent along, scattered rows of many fragments could be too large."""
        shard = load_plan(self.job.storage, self.plan).load_shard(self.job.storage, self.shard)
        return group_units(shard, self.spec, self.slots, stage)


@explaining_ended_session()
def apply_on_spark(
    session: SparkSession,
    location: TableLocation,
    spec: JobSpec,
    shard: Shard,
    udfs: Udfs,
    documents: ShardDocuments,
    caps: Caps,
    wait: Callable[[Mapping[str, int]], None],
    watch: Stopwatch | None = None,
    every: float = EVERY_SECONDS,
) -> list[UnitReport]:
    """Compute and stage a shard on a cluster; CapReached if the job reached a cap before it was done.

    Args:
        wait: called with the rows that a service has, before it is asked again; it may raise StillWaiting.
        watch: has measured the start of the session, by part.
    """
    watch = watch or Stopwatch()
    slots, skipped = _slots(session, spec), skipped_before(location, spec)
    services = {name: value for name, value in os.environ.items() if is_service_variable(name)}
    job, plan = documents.folder, documents.plan
    task_spec = TaskSpec(location, spec, udfs, job, plan, shard.index, "", slots, skipped, services)
    reporter = open_reporter(spec, shard, documents, every)
    if not is_connect(session) and (address := session.sparkContext.uiWebUrl):
        reporter.spark_ui = address
        reporter.keep()
        logger.info("Spark's UI: %s", address)
    groups, rest = (group_units(shard, spec, slots, stage) for stage in (0, 1))
    works = shard.to_apply
    rows, fragments = counted(shard.rows_to_run, "row"), counted(len(works), "fragment")
    logger.info("Shard %s: %s in %s, %s.", shard.index, rows, fragments, counted(len(groups), "task"))
    limits: Policy = _policy(spec, udfs) if has_limits(spec) else "fail"
    watch.lap("driver")
    start = SparkStart(**watch.seconds)
    reporter.start = lambda: start
    earlier, reports = list[UnitReport](), list[UnitReport]()
    may_shuffle = isinstance(spec, RefreshSpec) and spec.shuffles and find_spec("pandas") is not None
    for stage, count in enumerate((len(groups), len(rest))):
        repeat = stage == 0
        while count:
            if repeat:
                # Each round has a folder of its own, so its tasks' usage is added to the usage of earlier rounds.
                attempt = f"{shard.index:04}-{int(time.time() * 1000)}"
                task_spec = replace(task_spec, attempt=attempt, used=reporter.usage(), submitted=time.time())
            runner = _GroupRunner(task_spec, stage, stage * len(groups))
            # What a round left is read by row ids.
            shuffles, may_shuffle = may_shuffle and stage == 0, False
            computing = min(len(groups), slots)
            found, left = _run_stage(session, runner, count, reporter, limits, caps, computing, shuffles)
            waiting = sum(found, UnitReport(True)).waiting
            repeat = bool(waiting or left)
            if not repeat:
                reports += found
                break
            # The tasks check all units again, and skip staged ones.
            earlier += [UnitReport(True, speed=report.speed) for report in found]
            reporter.keep()
            if waiting:
                wait(waiting)
            else:
                caps.begin_round()
    reports += earlier
    reporter.rows_done = sum(report.speed.rows for report in reports)
    reporter.rows_failed = sum(report.failed for report in reports)
    reporter.ready = sum(report.staged for report in reports) - len(earlier)
    reporter.rows_ready = sum(item.rows for item in works) - reporter.rows_failed
    reporter.tick(force=True)
    return reports


@explaining_ended_session()
def apply_in_session(
    location: TableLocation,
    spec: JobSpec,
    shard: Shard,
    udfs: Udfs,
    documents: ShardDocuments,
    caps: Caps,
    wait: Callable[[Mapping[str, int]], None],
) -> list[UnitReport]:
    """Compute a shard on the active SparkSession, or on a new local one."""
    # The workers import this module, and need neither.
    from airflow_geneva.spark import local
    from airflow_geneva.spark.code import planned_archives, send_archives, send_code

    watch = Stopwatch()
    session = local.open_session(spec.sizing.concurrency)
    watch.lap("session")
    if spec.codes:
        send_archives(session, planned_archives(spec, documents.folder.storage))
        udfs = udfs.sent().with_archives(tuple(code.zip for code in spec.codes))
    else:
        udfs = send_code(session, udfs)
    watch.lap("code")
    return apply_on_spark(session, location, spec, shard, udfs, documents, caps, wait, watch)


def _slots(session: SparkSession, spec: JobSpec) -> int:
    """Return how many Spark tasks shall run at once; a server does not say how many slots it has."""
    asked = spec.sizing.concurrency
    return asked if is_connect(session) else min(asked, session.sparkContext.defaultParallelism)


def _has_executor(session: SparkSession) -> bool:
    """Whether something can compute; a server does not say."""
    if is_connect(session):
        return True
    context = session.sparkContext._jsc.sc()
    # The driver is in the map, too.
    return bool(context.isLocal() or context.getExecutorMemoryStatus().size() > 1)


def _policy(spec: JobSpec, udfs: Udfs) -> Policy:
    """Return the rules of all UDFs. Only a list of rules needs the functions here, for its exceptions."""
    policies = [udf.on_error for udf in spec.udfs.values()]
    if all(isinstance(policy, str) for policy in policies):
        return tuple(rule for policy in policies for rule in rules_of("skip" if policy == "skip" else "fail")) or "fail"
    return joint_policy(udfs.here())


def _run_stage(
    session: SparkSession,
    runner: _GroupRunner,
    groups: int,
    reporter: ProgressReporter,
    limits: Policy,
    caps: Caps,
    computing: int,
    shuffles: bool = False,
) -> tuple[list[UnitReport], int]:
    """Run groups of units as one Spark job and report progress; return also how many groups no task has run.

    Args:
        computing: how many tasks at once compute rows.
        shuffles: whether Spark brings the rows of groups to the tasks.
    """
    from pyspark.sql.functions import udf
    from pyspark.sql.types import BinaryType

    task_spec, signs = runner.task_spec, DriverSigns(runner.task_spec.progress)
    signs.write()
    # Each row holds a task's number, and is one Spark task. A shared server gets one for each slot at most.
    partitions = min(groups, task_spec.slots) if is_connect(session) else groups
    # Neither needs pandas, as `mapInArrow` does on the driver, nor pyarrow in the JVM's protocol.
    run = udf(runner, BinaryType(), useArrow=False).asNondeterministic()
    reports: list[UnitReport] = []
    done = set[int]()
    failure: list[BaseException] = []
    # An exception of a signal handler within `Thread.join` makes Python 3.11 take the thread for ended.
    collected = threading.Event()

    def collect() -> None:
        try:
            if shuffles:
                results = _collect_shuffled(session, runner, groups)
            else:
                results = session.range(0, groups, 1, partitions).select(run("id")).collect()
            for (found,) in results:
                ran, of_task = pickle.loads(found)  # noqa: S301  # of the runner below
                done.update(ran)
                reports.extend(of_task)
        except BaseException as error:
            failure.append(error)
        finally:
            collected.set()

    done_before = reporter.rows_done
    threading.Thread(target=collect, name="geneva-collect", daemon=True).start()
    count = SkipCount(limits, task_spec.spec.rows, task_spec.skipped)
    asked = partial(_has_executor, session)
    watcher = ProgressCollector(task_spec, signs, reporter, count, caps, done_before, computing, asked)
    try:
        while not collected.wait(_POLL_SECONDS):
            watcher.look()
    except BaseException:
        if watcher.failure is None:  # else they are stopping already
            signs.write(stop=True)
            collected.wait(_STOP_SECONDS)
        raise
    if failure:
        error = failure[0]
        if DeviceFailed.__name__ in str(error):
            watcher.look(now=True)
            found = " ".join(watcher.failed_devices.values()) or str(error)
            raise DeviceFailed(f"In every try of a task its device failed. {found}") from error
        raise _explained(error, task_spec.spec, session)
    watcher.look(now=True)
    if watcher.failure is not None:
        reporter.keep()
        if isinstance(watcher.failure, CapReached):
            watcher.failure.reports = reports
        raise watcher.failure
    # A killed try of a task skipped rows that the next try did not run; only the error records have all of them.
    SkipCount(limits, task_spec.spec.rows, skipped_before(task_spec.location, task_spec.spec)).check()
    retired = tuple(f"{said} Its rows were computed elsewhere." for said in watcher.failed_devices.values())
    # Without any progress, another round would not make any either.
    left = groups - len(done) if done else 0
    return [*reports, UnitReport(True, notes=retired)] if retired else reports, left


def _collect_shuffled(session: SparkSession, runner: _GroupRunner, groups: int) -> Sequence[Sequence[bytes]]:
    """Run the groups of a stage on the rows that Spark's shuffle brings to them."""
    from airflow_geneva.spark.shuffle import SendTask, few_messages_at_once, partition_keys, pieces_to_send, shuffled

    task_spec = runner.task_spec
    keys = partition_keys(session, groups)
    pieces = pieces_to_send(task_spec.open_view(), task_spec.slots)
    stage = task_spec.plan, task_spec.attempt
    read_groups = partial(task_spec.read_groups, runner.stage)
    sends = SendTask(stage, task_spec.open_view, read_groups, task_spec.progress, keys, pieces)
    with few_messages_at_once(session):
        return shuffled(session, sends, task_spec.slots, replace(runner, keys=keys).run_received).collect()


def _explained(error: BaseException, spec: JobSpec, session: SparkSession) -> BaseException:
    """Explain what Spark's own message does not: a Python that lacks a package, is missing, or died."""
    python = "the workers' Python" if is_connect(session) else str(session.sparkContext.pythonExec)
    found: str | None = None
    if package := missing_package(str(error)):
        found = f"Spark's workers cannot run the tasks of {spec.target}. {how_to_install(package, python)}"
    elif no_python := _NO_PYTHON.search(str(error)):
        found = (
            f"Spark's workers cannot run the tasks of {spec.target}: their Python {no_python[1]!r} is not there. Set "
            "PYSPARK_PYTHON, or spark.pyspark.python, to a Python that all workers have."
        )
    if found is None:
        return _explain_worker_death(error, spec)
    explained = InvalidInput(found)
    explained.__suppress_context__ = True
    return explained


_NO_PYTHON = re.compile(r'Cannot run program "([^"]*)"')
_WORKER_DEATH_SIGNS = ("Python worker exited unexpectedly", "ExecutorLostFailure", "Crash detected")


def _explain_worker_death(error: BaseException, spec: JobSpec) -> BaseException:
    """Explain a worker that died in every try of a task, which Spark's own message does not."""
    if not any(sign in str(error) for sign in _WORKER_DEATH_SIGNS):
        return error
    advice = (
        "The policy finds rows that kill the UDF's own process; what died is the worker or the executor around it, as "
        "when a container ends for its memory. Give a smaller batch_size, or Spark more memory, or let the UDF limit "
        "itself with resource.setrlimit, so that the row raises MemoryError."
        if any(udf.on_error != "fail" for udf in spec.udfs.values())
        else 'With @udf(on_error="skip") the UDF runs in a process of its own, and the rows that kill it are found and '
        "listed; with less memory to a call, give a smaller batch_size, or Spark more memory."
    )
    crashed = UdfCrashed(
        f"A process that ran UDF {spec.identity.udf!r} died in every try of a task: it may have crashed, or used more "
        f"memory than there is. What was checkpointed is kept. {advice}"
    )
    crashed.__cause__ = error
    return crashed


@dataclass(frozen=True)
class _GroupRunner:
    """The function that runs on executors: the number of a task in, its groups and the reports of their units out.

    A task takes one group of units after another from those that no task of the stage has claimed, and reads the rows
    of the next one while it computes and writes those before. The reports of a stage's tasks are numbered from `first`.
    With `keys`, those of the groups, a task gets the rows of one group by a shuffle.
    """

    task_spec: TaskSpec
    stage: int
    first: int
    keys: tuple[int, ...] = ()

    def __call__(self, task: int) -> bytes:
        began, waited = self._begin()
        return pickle.dumps(self._run(task, began, waited))

    def run_received(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the group whose rows a shuffle brought; yield what a call returns."""
        from airflow_geneva.spark.shuffle import answered, messages_of

        began, waited = self._begin()
        for key, messages in groupby(messages_of(batches), itemgetter(0)):
            found = self._run(self.keys.index(key), began, waited, (message for _, message in messages))
            yield answered(pickle.dumps(found))

    def _begin(self) -> tuple[float, float]:
        began, waited = time.monotonic(), max(time.time() - self.task_spec.submitted, 0.0)
        # On a server nothing else could set them; this runs before the UDF's imports.
        for name in THREAD_VARIABLES:
            os.environ.setdefault(name, "1")
        os.environ.update(self.task_spec.services)
        return began, waited

    def _run(
        self, at: int, began: float, waited: float, received: Iterator[tuple[int, bytes]] | None = None
    ) -> tuple[list[int], list[UnitReport]]:
        task_spec, every = self.task_spec, report_seconds(self.task_spec.spec)
        stage = task_spec.plan, task_spec.attempt, self.stage
        groups = _groups_of_stage.once(stage, lambda: task_spec.read_groups(self.stage))
        claims = _claims_of_stage.once(stage, lambda: Claims(task_spec.claims(self.stage), len(groups)))
        # Only an earlier try of this task can have left its progress, and every request blocks the task.
        again = _is_tried_again()
        if received is None and not claims.free and not again:
            return [], []
        number = self.first + at
        name = f"{TASK}{number:06}.json"
        write = partial(task_spec.progress.write_json, name)
        signs, parent = DriverSigns(task_spec.progress), os.getppid()
        share = Share(claims, at, again) if received is None else OneGroup(at)

        # Called instead of a log: tasks report progress only through files.
        def look_around(_line: str) -> None:
            if os.getppid() != parent:
                # Spark runs the task in another worker when the daemon that forked this one was killed.
                raise StopComputing
            signs.read()

        def take() -> list[Unit]:
            units = [unit for group in share.next() for unit in groups[group]]
            reporter.rows += sum(unit.rows for unit in units)
            reporter.fragments += len(units)
            return units

        about = task_spec.location, task_spec.spec
        earlier = (task_spec.progress.read_document(name) if again else None) or {}
        used = Usage.from_json(earlier.get("usage"))  # by a try of this task that was killed
        reporter = ProgressReporter(0, 0, write, look_around, every=every, longest=every, used_before=used)
        reporter.store_requests = RequestMeter()
        opening = partial(_target_of_stage.once, stage, lambda: open_target(*about).check_names())
        try:
            units, opened, _ = task_spec.progress.side_by_side(take, opening, signs.read)
            if not units:
                if earlier:  # else the driver keeps the rest of its allowance for it
                    write({**earlier, ENDED: True})
                return [], []
            _limit_visible_gpus()
            meter = Meter(lambda: allowance.most_cost - used.paid, lambda: allowance.wait())
            reporter.usage = lambda: meter.usage
            capped = task_spec.spec.sizing.max_cost is not None
            allowance = Allowance(number, signs, capped, lambda: (used + meter.usage).paid, reporter.keep)
            allowance.wait()
            if again:
                opened.store.look_again()
            begun = opened.at_begin(sum(map(len, groups)))
            if received is not None:
                from airflow_geneva.spark.shuffle import received_rows

                assert isinstance(begun, ViewTarget)
                begun = replace(begun, shuffled=received_rows(begun, units, received))
            with (
                prepare(*about, task_spec.udfs, task_spec.skipped, meter, begun) as task,
                Reporting(reporter, task, lambda rows: allowance.wait()) as reporting,
            ):
                reporter.start = partial(_started, task, began, waited)
                reports = task.run(units, reporting.add_rows, reporting.add_unit, take)
            write({**reporter.document(), ENDED: True})
        except DriverLost as lost:
            write({**reporter.document(), FAILURE: [StorageError.__name__, str(lost)]})
            return [], []
        except StopComputing:
            return [], []
        except DeviceFailed as failed:
            task_spec.progress.write_json(f"{DEVICE}{number:06}-{time.time_ns()}.json", {FAILURE: str(failed)})
            raise  # which ends this process: Spark runs the task again in another one
        except GenevaError as error:
            write({**reporter.document(), FAILURE: [type(error).__name__, str(error)]})
            return [], []
        return share.taken, reports


_groups_of_stage: ProcessMemo[_Stage, list[list[Unit]]] = ProcessMemo(1)
_claims_of_stage: ProcessMemo[_Stage, Claims] = ProcessMemo(1)
_target_of_stage: ProcessMemo[_Stage, Target] = ProcessMemo(1)
"""What a worker process shares among its tasks of a stage, which are told apart by plan, attempt and stage."""


def _started(task: TaskRunner, began: float, waited: float) -> SparkStart:
    """Return the last parts of Spark's start, as a task that began then sees them; zeros before its first result."""
    called = task.first_call
    return SparkStart(worker=waited, function=max(called - began, 0.0)) if isfinite(called) else SparkStart()


def _is_tried_again() -> bool:
    """Whether Spark runs this task again, because the process of an earlier try died."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return task is None or task.attemptNumber() > 0


_GPUS, _GIVEN_GPUS = "CUDA_VISIBLE_DEVICES", "AIRFLOW_GENEVA_GPUS"


def _limit_visible_gpus() -> None:
    """Make only the GPUs of this Spark task visible to the UDF, unless the worker's environment already limits them."""
    from pyspark import TaskContext

    task = TaskContext.get()
    given = task.resources().get("gpu") if task else None
    # An earlier task of this process may have limited them.
    if given and (_GPUS not in os.environ or _GIVEN_GPUS in os.environ):
        if os.environ.get(_GPUS) != (addresses := ",".join(given.addresses)):
            # The GPU of the task before is another process's now: what runs calls there must not keep a model on it.
            POOL.dismiss()
        os.environ[_GPUS] = os.environ[_GIVEN_GPUS] = addresses
