"""Run a shard's tasks on a SparkContext: the cluster computes and stages, only the caller commits."""

from __future__ import annotations

import importlib
import io
import linecache
import logging
import os
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle  # type: ignore[import-untyped]

import airflow_geneva
from airflow_geneva import errors
from airflow_geneva.code_zip import code_sha256, zip_code
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.java import java_environment
from airflow_geneva.job.progress import EVERY_SECONDS, Reporter
from airflow_geneva.job.record import JobFolder
from airflow_geneva.location import TableLocation
from airflow_geneva.plan.values import Shard, Work
from airflow_geneva.run.inline import run_units
from airflow_geneva.run.task import Bench, UnitReport
from airflow_geneva.run.units import Unit, cut_tasks, split_fragments, whole_unit
from airflow_geneva.storage import Storage
from airflow_geneva.udf import UDF, load_udf

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger("airflow_geneva.spark")

_TASK_REPORT_SECONDS = 2.0
_POLL_SECONDS = 0.05
_STOP = "stop.json"


@dataclass(frozen=True)
class UdfParcel:
    """A UDF on its way to the executors.

    Args:
        import_path: how workers import it, or None.
        version: the code version that was planned with; what an import path leads to must have it.
        pickled: the function itself, when it was made in the caller's own process and has no import path.
    """

    import_path: str | None
    version: str
    pickled: bytes | None = None

    @staticmethod
    def of(udf: UDF) -> UdfParcel:
        path = udf.import_path
        return UdfParcel(path, udf.code_version, None if path else cloudpickle.dumps(udf))

    def open(self) -> UDF:
        """The UDF in this process.

        Raises:
            InvalidInput: it cannot be imported here, or is not the code that was planned with.
        """
        if self.import_path is None:
            made: UDF = cloudpickle.loads(self.pickled)
            return made
        udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            # A worker that served an earlier job has the module as it was then.
            _forget_module(self.import_path)
            udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            raise InvalidInput(
                f"UDF {self.import_path!r} is version {udf.code_version} where it runs, and {self.version} was "
                "planned: another copy of its module comes first on the worker's path. Remove that one, or start a new "
                "session."
            )
        return udf


@dataclass(frozen=True)
class Station:
    """What a Spark task needs to know; reaches executors inside the task, never as a file.

    Args:
        location: the table, with credentials.
        work: the job.
        parcel: the UDF.
        progress: folder of the tasks' progress files.
    """

    location: TableLocation
    work: Work
    parcel: UdfParcel
    progress: Storage


def _forget_module(import_path: str) -> None:
    top = import_path.split(":")[0].split(".")[0]
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    linecache.clearcache()


def apply_on_spark(
    context: SparkContext,
    location: TableLocation,
    work: Work,
    shard: Shard,
    parcel: UdfParcel,
    every: float = EVERY_SECONDS,
) -> int:
    """Compute and stage a shard on a cluster; returns the rows the UDF ran on.

    Args:
        every: seconds between two lines of progress.

    Raises:
        UdfError: the UDF failed; what was computed before it did is kept.
    """
    works = shard.to_apply
    slots = min(work.sizing.concurrency, context.defaultParallelism) * work.sizing.intra_applier_concurrency
    tasks = cut_tasks(works, work.sizing, slots)
    storage = JobFolder.of(location.checkpoints, work.job_id).storage
    attempt = f"progress/{shard.index:04}-{int(time.time() * 1000)}"
    station = Station(location, work, parcel, storage.folder(*attempt.split("/")))
    rows = sum(min(item.rows, len(item.missing)) for item in works)
    reporter = Reporter(rows, len(works), storage, f"progress-{shard.index:04}.json", every=every)
    logger.info("Shard %s: %s rows in %s fragments, %s tasks.", shard.index, rows, len(works), len(tasks))
    reports = _run_stage(context, station, tasks, reporter, 0)
    rest = [(whole_unit(item),) for item in split_fragments(tasks)]
    if rest:
        reports += _run_stage(context, station, rest, reporter, len(tasks))
    reporter.rows_done = sum(report.rows_run for report in reports)
    reporter.ready = sum(report.staged for report in reports)
    reporter.tick(force=True)
    return reporter.rows_done


def _run_stage(
    context: SparkContext, station: Station, tasks: Sequence[Sequence[Unit]], reporter: Reporter, first: int
) -> list[UnitReport]:
    """Run tasks as one Spark job, several to a partition when a slot has several threads, and report meanwhile."""
    if not tasks:
        return []
    threads = station.work.sizing.intra_applier_concurrency
    groups = [
        (first + at, [unit for task in tasks[at : at + threads] for unit in task])
        for at in range(0, len(tasks), threads)
    ]
    run = _Partition(station)
    outcomes: list[_Outcome] = []
    failure: list[BaseException] = []

    def collect() -> None:
        try:
            outcomes.extend(context.parallelize(groups, len(groups)).mapPartitions(run).collect())
        except BaseException as error:
            failure.append(error)

    done_before = reporter.rows_done
    thread = threading.Thread(target=collect, name="geneva-collect", daemon=True)
    thread.start()
    watcher = _Watcher(station.progress, reporter, done_before)
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        watcher.look()
    if failure:
        raise failure[0]
    for outcome in outcomes:
        if outcome.failure is not None:
            kind, message = outcome.failure
            raise getattr(errors, kind)(message)
    return [report for outcome in outcomes for report in outcome.reports]


@dataclass(frozen=True)
class _Outcome:
    """What a Spark task did; a UDF's own failure comes back as a value, so that Spark does not run it three more times.

    Args:
        reports: the units that were done.
        failure: name of the error's class and its message, or None.
    """

    reports: list[UnitReport]
    failure: tuple[str, str] | None = None


class _StopRequested(Exception):
    """Another task failed; what this one has is kept, and it ends."""


@dataclass(frozen=True)
class _Partition:
    """The function that runs on executors."""

    station: Station

    def __call__(self, groups: Iterable[tuple[int, list[Unit]]]) -> Iterable[_Outcome]:
        for number, units in groups:
            yield self._run(number, units)

    def _run(self, number: int, units: list[Unit]) -> _Outcome:
        station = self.station
        rows = sum(unit.rows for unit in units)
        name = f"task-{number:06}.json"
        reporter = Reporter(rows, len(units), station.progress, name, self._look_around, every=_TASK_REPORT_SECONDS)
        try:
            self._look_around("")
            udf = station.parcel.open()
            bench = Bench.at(station.location, station.work)
            reports = run_units(bench, units, udf, reporter, station.work.sizing.intra_applier_concurrency)
            reporter.tick(force=True)
        except _StopRequested:
            return _Outcome([])
        except GenevaError as error:
            station.progress.write_json(_STOP, {"task": number})
            return _Outcome([], (type(error).__name__, str(error)))
        return _Outcome(reports)

    def _look_around(self, _line: str) -> None:
        """Tasks report by file and leave the talking to the driver; each time, they see whether another one failed."""
        if self.station.progress.exists(_STOP):
            raise _StopRequested


class _Watcher:
    """Adds the tasks' progress files up for the driver's reporter."""

    def __init__(self, folder: Storage, reporter: Reporter, done_before: int) -> None:
        self.folder = folder
        self.reporter = reporter
        self.done_before = done_before
        self._next = 0.0

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _TASK_REPORT_SECONDS
        rows = ready = 0
        for name in self.folder.list_files():
            if name == _STOP:
                continue
            try:
                document = self.folder.read_json(name)
            except (FileNotFoundError, ValueError):
                continue
            rows += document["rows_done"]
            ready += document["ready"]
        self.reporter.rows_done = max(self.reporter.rows_done, self.done_before, rows)
        self.reporter.ready = max(self.reporter.ready, ready)
        self.reporter.tick()


def package_zip() -> bytes:
    """This package as an archive, for workers that do not have it installed."""
    folder = Path(airflow_geneva.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.py")):
            info = zipfile.ZipInfo(f"airflow_geneva/{path.relative_to(folder).as_posix()}", (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return buffer.getvalue()


def start_session(work: Work) -> None:
    """Have a session before a job is announced.

    Raises:
        JavaNotFound: there is neither an active session nor a Java to start one.
    """
    _session(work.sizing.concurrency)


def apply_in_session(location: TableLocation, work: Work, shard: Shard, udf: UDF) -> int:
    """Compute a shard on the active SparkSession, or on a local one made for it."""
    session = _session(work.sizing.concurrency)
    context = session.sparkContext
    parcel = UdfParcel.of(udf)
    _ship_code(context, parcel)
    return apply_on_spark(context, location, work, shard, parcel)


def _session(concurrency: int) -> SparkSession:
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    java = tempfile.TemporaryDirectory(prefix="geneva-java-")
    _shipping.append(java)
    os.environ.update(java_environment(java.name))
    slots = max(1, min(concurrency, os.cpu_count() or 1))
    # Workers of a local session must be this very Python; Spark would take whatever python3 is on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{slots},4]").appName("airflow_geneva")
    for name, value in session_settings().items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def session_settings() -> dict[str, str]:
    """Spark settings of a session of our own: quiet, and with one BLAS thread a task (two fight for the cores)."""
    settings = {"spark.ui.enabled": "false", "spark.log.level": "WARN", "spark.ui.showConsoleProgress": "false"}
    for name in BLAS_VARIABLES:
        settings[f"spark.executorEnv.{name}"] = "1"
    return settings


BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_shipped: set[tuple[str, str]] = set()
# Spark serves shipped files from where they lie, so they stay until this process ends.
_shipping: list[tempfile.TemporaryDirectory[str]] = []


def _ship_code(context: SparkContext, parcel: UdfParcel) -> None:
    """Give the workers what they may lack: this package on a cluster, and the UDF's module."""
    parcels: list[tuple[str, Callable[[], bytes | None]]] = [("airflow_geneva", package_zip)]
    if parcel.import_path is not None:
        path = parcel.import_path
        parcels.append((path.split(":")[0], lambda: zip_code(path)))
    for name, make in parcels:
        data = make()
        mark = (str(context.applicationId), "" if data is None else code_sha256(data))
        if data is not None and mark not in _shipped:
            _shipped.add(mark)
            folder = tempfile.TemporaryDirectory(prefix="geneva-code-")
            _shipping.append(folder)
            target = Path(folder.name) / f"{name.replace('.', '_')}-{mark[1][:12]}.zip"
            target.write_bytes(data)
            path_before = list(sys.path)
            context.addPyFile(str(target))
            # It is for the workers; here it would hide the module that the user goes on editing.
            sys.path[:] = path_before
