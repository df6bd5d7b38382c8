"""The status of a job, read from its folder while it runs and after it has ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.counts import Counts, StoreRequests, Usage
from airflow_geneva.engine.display import Listed, counted, duration, format_time
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.error_records import count_errors_so_far
from airflow_geneva.engine.job.estimate import Interval
from airflow_geneva.engine.job.folder import RECORD, JobFolder
from airflow_geneva.engine.job.heartbeat import APPROVAL, RUNNING_TIMEOUT, Heartbeat, heartbeat_timeout
from airflow_geneva.engine.job.shard_status import FAILED as FAILED_SHARD, WAITING, ShardStatus, read_shards
from airflow_geneva.engine.job.spark_start import SparkStart
from airflow_geneva.engine.job.time_left import TimeLeft, estimate_time_left, format_duration
from airflow_geneva.engine.results import (
    DONE,
    FAILED,
    PARTIAL,
    PENDING,
    ROWS_RUN,
    RUNNING,
    STORE_REQUESTS,
    BackfillResult,
    Checked,
    in_order,
)
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.documents import check_time, well_typed
from airflow_geneva.engine.storage.files import Storage, in_parallel
from airflow_geneva.errors import DamagedRecord

logger = logging.getLogger("airflow_geneva.job")

DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors raised when a document does not have the expected form."""


@dataclass(frozen=True)
class AirflowRun:
    """The task that planned a job."""

    dag_id: str
    run_id: str
    task_id: str
    try_number: int

    def __str__(self) -> str:
        return f"{self.dag_id}, run {self.run_id}, task {self.task_id}, try {self.try_number}"


@dataclass(frozen=True, repr=False)
class Job(Listed, Counts):
    """The status of a job when its record was read, with :class:`~airflow_geneva.engine.counts.Counts` of its rows.

    Args:
        id: the job id.
        kind: ``backfill`` or ``refresh``.
        table: name of the table, or of the view.
        column: the column, or None for a view.
        view: name of the view, or None for a column.
        source: name of the view's source table or view, or None for a column.
        udf, udf_version: the UDF and its version; for a view with several UDFs, comma-separated lists.
        where: the filter, or None; a view's filter is in its definition.
        version: the planned version of the table; for a view, of its source.
        read_version: the requested version, or None for the newest.
        state: PENDING (planned, nothing started), RUNNING, DONE, PARTIAL or FAILED.
        dead: not ended, and without a heartbeat for so long that no process works on it any more.
        started, ended, last_seen: seconds since the epoch; ``last_seen`` is the last heartbeat.
        step: the step at the last heartbeat, or None.
        rows_total: live rows of the table, or of the source, when it was planned.
        rows_pending: rows that were due then.
        rows_run: rows on which functions were called; a row counts once for each call.
        reasons: number of rows by the reason why they were due or not, when the job was planned.
        shard_count: number of shards.
        shards: status of each shard; for a DONE job only on request.
        seconds: time by step, added up over parallel shards; ``spark`` is the time to get a session. In an Airflow
            task, the start of Spark counts as ``apply``.
        commits: table versions written.
        error: why it failed, or None.
        errors: number of error records.
        airflow: the Airflow task that planned it, or None.
        notes: notes for the user.
        checked: results of checking the expectations on values; empty before the end.
        usage: usage that calls of a service reported.
        unindexed_rows: the most rows that one index over changed columns did not cover at the end.
        siblings: the other columns that the UDF fills.
        key_column: the column's name in checkpoint keys; None: `column`.
        time_left: estimated time until its end; None once it has ended, or is dead.
        version_at: when that version was committed, in seconds since the epoch.
        started_by: the user, host and program that started it, or the kind of DAG run and its user.
        cost: what it has cost, as calls reported it or at the declared cost of rows, and at the price of slots once it
            has ended; None if nothing has a price.
        cost_expected: the interval of the cost that was estimated when it was planned; None if it was not.
        busy_share: after the end, the fraction of the time from the first call to the last of each task in which the
            function ran; None if it was not called.
        runner, runner_reason: where it is computed, ``inline`` or ``spark``, and why; None if the record does not say.
        store_requests: requests to object stores, as far as its processes have reported them.
    """

    id: str
    kind: str
    table: str
    column: str | None
    view: str | None
    source: str | None
    udf: str
    udf_version: str
    where: str | None
    version: int
    read_version: int | None
    runner: str | None
    runner_reason: str | None
    state: str
    dead: bool
    started: float
    ended: float | None
    last_seen: float
    step: str | None
    rows_total: int = 0
    rows_pending: int = 0
    rows_run: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    shard_count: int = 0
    shards: tuple[ShardStatus, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    commits: tuple[int, ...] = ()
    error: str | None = None
    errors: int = 0
    airflow: AirflowRun | None = None
    notes: tuple[str, ...] = ()
    checked: tuple[Checked, ...] = ()
    unindexed_rows: int = 0
    siblings: tuple[str, ...] = ()
    key_column: str | None = None
    time_left: TimeLeft | None = None
    usage: Usage = field(default_factory=Usage)
    started_by: str | None = None
    version_at: float | None = None
    cost: float | None = None
    cost_expected: Interval | None = None
    busy_share: float | None = None
    store_requests: StoreRequests = field(default_factory=StoreRequests)

    @property
    def open(self) -> bool:
        """Whether a process works on it or may resume it: neither ended nor dead."""
        return self.state in (PENDING, RUNNING) and not self.dead

    @property
    def outlook(self) -> str:
        """How a running job will end because shards failed; "" if none did."""
        failed = [shard for shard in self.shards if shard.step == FAILED_SHARD] if self.open else []
        if not failed:
            return ""
        unless = "" if any(shard.last for shard in failed) else ", unless another try succeeds"
        return f"{counted(len(failed), 'shard')} failed: the run will end FAILED{unless}"

    @property
    def average_speed(self) -> float:
        """Mean rows per second of a shard over the shards that were computed; 0 if it is unknown."""
        known = [(shard.rows_computed + shard.rows_failed, speed) for shard in self.shards
                 if (speed := shard.applied_per_second)]  # fmt: skip
        seconds = sum(rows / speed for rows, speed in known)
        return sum(rows for rows, _ in known) / seconds if seconds else 0.0

    @property
    def spark_start(self) -> str:
        """How long Spark took to start, by part, in a shard or in the job's session; "" if that is not known."""
        known = [shard.spark_start for shard in self.shards if shard.spark_start]
        if (session := self.seconds.get("spark")) is not None:
            start = known[0] + SparkStart(session=session) if known else SparkStart()
            return f"{duration(start.seconds)}: {start}" if start else ""
        start = SparkStart.mean(known)
        waits = [shard.start_seconds for shard in self.shards if shard.start_seconds]
        seconds = start.seconds or sum(waits) / max(len(waits), 1)
        every = " a shard" if self.shard_count > 1 else ""
        return f"{duration(seconds)}{every}, in Apply{f': {start}' if start else ''}" if round(seconds, 1) else ""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that it computes; () for a view."""
        return () if self.column is None else (self.column, *self.siblings)

    @property
    def dag_id(self) -> str | None:
        """The DAG that planned it; None if no DAG did."""
        return None if self.airflow is None else self.airflow.dag_id

    @property
    def target(self) -> str:
        """The column as ``table.column``, or the name of the view."""
        return self.view or f"{self.table}.{self.column}"

    @property
    def share_reused(self) -> float:
        """Fraction of the visible rows that earlier jobs computed; 0 if there are no rows."""
        return self.rows_reused / self.rows_visible if self.rows_visible else 0.0

    @property
    def took(self) -> float:
        """Seconds from start to end, or to the last heartbeat."""
        return max((self.ended or self.last_seen) - self.started, 0.0)

    @property
    def rows_per_second(self) -> float:
        """Speed of the UDF over all running shards; 0 if none runs."""
        return sum(shard.rows_per_second for shard in self.shards) if self.open else 0.0

    @property
    def priced(self) -> str:
        """The cost, beside the one that was estimated; "" if nothing has a price."""
        known = "" if self.cost is None else f"{self.cost:,.4g}"
        expected = "" if self.cost_expected is None else f"estimated {self.cost_expected}"
        told = f"{known} ({expected})" if known and expected else known or expected
        return f"cost {told}" if told else ""

    @property
    def busy(self) -> str:
        """How busy the function is in running shards; "" if none runs. After the end, it is in the job's notes."""
        running = [shard.busy for shard in self.shards if shard.step == "applying"] if self.open else []
        return str(sum(running, Busy()))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until it ends; None if that is not known, and once it has ended or is dead."""
        return self.time_left.seconds if self.time_left and not self.time_left.unknown else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        speed: dict[str, Any] = {"rows_per_second": self.rows_per_second, "seconds_left": self.seconds_left}
        speed["shards"] = tuple(shard.to_json() for shard in self.shards)
        return {**asdict(self), "open": self.open, "share_reused": round(self.share_reused, 4), **speed}

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *(f"  {shard}" for shard in self.shown_shards if self.state != DONE)])

    @property
    def shown_shards(self) -> tuple[ShardStatus, ...]:
        """The shards, without errors that the job's own error already contains."""
        said = self.error or ""
        return tuple(replace(shard, error=None) if shard.reason in said else shard for shard in self.shards)

    def lines(self) -> list[str]:
        """Describe the job as a whole, without its shards."""
        where = f" where {self.where}" if self.where else ""
        source = f" from {self.source}" if self.source else ""
        code = f" with {self.udf} (version {self.udf_version})" if self.udf else ""
        lines = [
            f"{self.state}{' (found dead)' if self.dead else ''}: {self.kind} of {self.target}{source}{code}{where}, "
            f"job {self.id}",
            f"  {self._when()}",
            f"  {self.rows_pending:,} of {counted(self.rows_total, 'row')} due: {self.rows_checkpointed:,} "
            f"checkpointed, {self.rows_ready:,} ready to commit, {self.rows_committed:,} committed, "
            f"{self.rows_failed:,} failed, {self.rows_left:,} left",
            f"  {counted(self.rows_run, 'row')} run, {self.rows_computed:,} computed, {self.rows_reused:,} reused "
            f"({100 * self.share_reused:.0f} %), {self.rows_skipped:,} skipped, {counted(self.errors, 'error record')}",
            f"  planned on version {self.version}{f' of {self.source}' if self.source else ''}, {self._commits()}",
        ]
        if self.time_left is not None:
            speed = f"{self.rows_per_second:,.0f} rows/s, " if self.rows_per_second else ""
            lines.append(f"  {speed}{self.time_left}")
        lines.extend([f"  {self.busy}"] if self.busy else [])
        lines.extend([f"  {self.outlook}"] if self.outlook else [])
        if self.seconds:
            lines.append("  " + ", ".join(f"{step} {duration(seconds)}" for step, seconds in self.seconds.items()))
        lines.extend([f"  Spark's start {self.spark_start}"] if self.spark_start else [])
        if self.runner is not None:
            where = "one process" if self.runner == RunnerName.INLINE else "Spark"
            lines.append(f"  planned for {where}: {self.runner_reason}")
        lines.extend([f"  {self.usage}"] if self.usage else [])
        lines.extend([f"  {self.priced}"] if self.priced else [])
        lines.extend([f"  {self.store_requests}"] if self.store_requests else [])
        lines.extend(f"  {checked}" for checked in self.checked)
        lines.extend([f"  not in an index yet: {counted(self.unindexed_rows, 'row')}"] if self.unindexed_rows else [])
        lines.extend([] if self.airflow is None else [f"  Airflow: {self.airflow}"])
        lines.extend(f"  Note: {note}" for note in self.notes)
        lines.extend([f"  Error: {self.error}"] if self.error else [])
        return lines

    def _when(self) -> str:
        by = f" by {self.started_by}" if self.started_by else ""
        began = f"started {format_time(self.started)}{by}"
        if self.ended is not None:
            return f"{began}, took {duration(self.took)}"
        what = f" in step {self.step}" if self.step else ""
        return f"{began}, last heartbeat {format_time(self.last_seen)}{what}"

    def _commits(self) -> str:
        if not self.commits:
            return "no commits"
        listed = ", ".join(map(str, self.commits[:8])) + (", ..." if len(self.commits) > 8 else "")
        return f"{counted(len(self.commits), 'commit')}: version{'s' * (len(self.commits) > 1)} {listed}"


def read_job(folder: JobFolder, with_shards: bool = True, now: float | None = None) -> Job | None:
    """Read the job of a folder; None if there is none. DamagedRecord: its documents are damaged.

    Without `with_shards`, the shards of a DONE job are not read: everything else about it is in its record.
    """
    try:
        job = _read(folder, with_shards, time.time() if now is None else now)
        _ = str(job), None if job is None else well_typed(job)  # a job that cannot be described is damaged too
    except DAMAGED as error:
        raise DamagedRecord(
            f"The record of job {folder.job_id} in {folder.storage.root} is damaged ({type(error).__name__}: {error}). "
            "Run the backfill or the refresh again, as a new job."
        ) from error
    return job


def _read(folder: JobFolder, with_shards: bool, now: float) -> Job | None:
    try:
        record = folder.storage.read_json(RECORD)
    except FileNotFoundError:
        return None
    ended = record.get("ended")
    shards: tuple[ShardStatus, ...] = ()
    heartbeat: Heartbeat | None = None
    if with_shards or ended is None or ended["state"] != DONE or float(record.get("resumed", 0)) > ended["ended"]:
        shards, heartbeat = read_shards(folder, record)
    job = _job(folder.job_id, record, ended, heartbeat, shards, now)
    return job if job.ended is not None else replace(job, errors=count_errors_so_far(folder.storage))


def job_ids(checkpoints: Storage) -> list[str]:
    """Return the ids of a table's jobs, newest first; one listing, no reads."""
    return sorted(filter(JobFolder.is_id, checkpoints.list_folder("jobs")[0]), reverse=True)


def read_jobs(checkpoints: Storage, ids: Iterable[str]) -> list[Job]:
    """Read the jobs with these ids, in order, without removed ones; damaged ones are left out with a warning."""
    folders = [JobFolder.of(checkpoints, name) for name in ids]
    return [job for job in in_parallel(_read_listed, folders, checkpoints.local) if job is not None]


@dataclass(frozen=True)
class JobList:
    """The jobs of several tables, newest first: their ids are listed at once, and the jobs are read in parts.

    Args:
        checkpoints: by the name of each table.
        ids: ids with the names of the tables; ids sort by time.
    """

    checkpoints: Mapping[str, Storage]
    ids: tuple[tuple[str, str], ...]

    @staticmethod
    def of(checkpoints: Mapping[str, Storage]) -> JobList:
        local = all(storage.local for storage in checkpoints.values())
        listed = in_parallel(lambda name: [(one, name) for one in job_ids(checkpoints[name])], checkpoints, local)
        return JobList(checkpoints, tuple(sorted((one for group in listed for one in group), reverse=True)))

    def between(self, since: str = "", before: str | None = None) -> JobList:
        """Return the jobs whose ids are at least `since`, and smaller than `before`."""
        return replace(self, ids=tuple(o for o in self.ids if since <= o[0] and (before is None or o[0] < before)))

    def read(self, start: int, most: int) -> list[Job]:
        """Read this part of the jobs, without removed and damaged ones."""
        by_table: dict[str, list[str]] = {}
        for one, name in self.ids[start : start + most]:
            by_table.setdefault(name, []).append(one)
        found = [job for name, ids in by_table.items() for job in read_jobs(self.checkpoints[name], ids)]
        return sorted(found, key=lambda job: job.id, reverse=True)


def _read_listed(folder: JobFolder) -> Job | None:
    try:
        return read_job(folder, with_shards=False)
    except DamagedRecord as error:
        logger.warning("The list leaves a job out: %s", error)
        return None


def _job(
    job_id: str,
    record: Mapping[str, Any],
    ended: Mapping[str, Any] | None,
    heartbeat: Heartbeat | None,
    shards: tuple[ShardStatus, ...],
    now: float,
) -> Job:
    if ended is not None and _resumed(ended, heartbeat, now):
        ended = None
    if ended is not None:
        done, of_view = ended["state"] == DONE, record["kind"] == "refresh"
        swapped = [done and (of_view or shard.step == "verified") for shard in shards]
        shards = tuple(shard.at_rest(ended["state"] == FAILED, at) for shard, at in zip(shards, swapped, strict=True))
    run, chosen = record.get("airflow"), {**record, **(ended or {})}
    last_seen = max(float(record["started"]), heartbeat.at if heartbeat else 0.0, float((ended or {}).get("ended", 0)))
    state = _state(record, heartbeat, shards) if ended is None else ended["state"]
    if state not in (PENDING, RUNNING, DONE, PARTIAL, FAILED):
        raise ValueError(f"unknown state {state!r}")
    asked = record.get(APPROVAL) if state == PENDING else None
    # A heartbeat from far in the future does not count either: a clock was wrong.
    dead = ended is None and abs(now - last_seen) > heartbeat_timeout(heartbeat, run is not None, asked is not None)
    if dead:
        shards = tuple(shard.at_rest(failed=False) for shard in shards)
    pending = int(record.get("rows_pending", 0))
    total = int(record.get("rows_total", 0))
    named: dict[str, Any] = {name: record.get(name) for name in _AS_RECORDED}
    run_by = None if run is None else AirflowRun(run["dag_id"], run["run_id"], run["task_id"], run["try"])
    job = Job(
        **named,
        id=job_id,
        udf=record.get("udf", ""),
        udf_version=record.get("udf_version", ""),
        runner=chosen.get("runner"),
        runner_reason=chosen.get("runner_reason"),
        state=state,
        dead=dead,
        started=check_time(record["started"]),
        ended=None if ended is None else check_time(ended["ended"]),
        last_seen=last_seen,
        step=heartbeat.step if heartbeat else None,
        rows_total=total,
        rows_pending=pending,
        rows_skipped=total - pending,
        shard_count=int(record.get("shards", 0)),
        shards=shards,
        reasons=dict(record.get("reasons", {})),
        siblings=tuple(record.get("siblings", ())),
        key_column=record.get("key_column"),
        airflow=run_by,
        cost_expected=_interval((chosen.get("expected") or {}).get("cost")),
    )
    job = _with_shards(job, int(record.get(ROWS_RUN, 0)), StoreRequests.from_json(record.get(STORE_REQUESTS)))
    if job.open:
        left = estimate_time_left(shards, chosen.get("expected") or {}, job.runner != RunnerName.INLINE, now)
        if asked is not None:
            left = TimeLeft(0.0, f"waits until it is approved and its first task starts: {asked}", waits=True)
        elif heartbeat is not None and (silent := heartbeat.silent_for(now)):
            left = TimeLeft(0.0, f"no process has given a sign of life for {format_duration(silent)}")
        job = replace(job, time_left=left)
    return job if ended is None else _with_result(job, ended)


def _interval(document: object) -> Interval | None:
    return Interval(*map(float, document)) if isinstance(document, list) and len(document) == 2 else None


_AS_RECORDED = (
    "kind", "table", "column", "view", "source", "where", "version", "version_at", "read_version", "started_by",
)  # fmt: skip


def _resumed(ended: Mapping[str, Any], heartbeat: Heartbeat | None, now: float) -> bool:
    """Whether a shard of an ended job was cleared, and runs again."""
    if heartbeat is None or heartbeat.step not in ("apply", "commit") or heartbeat.at <= float(ended["ended"]):
        return False
    # If the job did not fail, a step that ended after it was a late task, and no other step follows.
    follows = not heartbeat.over or ended["state"] == FAILED
    return follows and abs(now - heartbeat.at) <= RUNNING_TIMEOUT


def _state(record: Mapping[str, Any], heartbeat: Heartbeat | None, shards: tuple[ShardStatus, ...]) -> Any:
    begun = heartbeat is not None and heartbeat.step != "plan"
    begun = begun or any(shard.step != WAITING for shard in shards)
    return RUNNING if begun else PENDING


def _with_shards(job: Job, run_before: int, requests_before: StoreRequests) -> Job:
    seconds: dict[str, float] = {}
    for shard in job.shards:
        for step, spent in shard.seconds:
            seconds[step] = round(seconds.get(step, 0.0) + spent, 3)
    counts = sum(job.shards, Counts())
    used = sum((shard.usage for shard in job.shards), Usage())
    left = max(job.rows_pending - counts.rows_committed - counts.rows_failed, 0)
    return replace(
        job,
        **replace(counts, rows_skipped=job.rows_skipped, rows_left=left).counts(),
        rows_run=run_before + used.rows,
        usage=used.reported,
        store_requests=requests_before + used.store_requests,
        cost=used.paid or None,
        seconds=in_order(seconds),
        commits=tuple(sorted({version for shard in job.shards for version in shard.versions})),
    )


def _with_result(job: Job, ended: Mapping[str, Any]) -> Job:
    found = BackfillResult.from_json(ended["result"])
    # The result of a job that failed lacks the time of the shards that failed.
    seconds = {name: max(part.get(name, 0.0) for part in (found.seconds, job.seconds))
               for name in (*found.seconds, *job.seconds)}  # fmt: skip
    kept = Counts(rows_checkpointed=job.rows_checkpointed, rows_ready=job.rows_ready)
    return replace(
        job,
        **(found | kept).counts(),
        rows_run=found.rows_run,
        seconds=in_order(seconds),
        commits=found.commits,
        error=ended.get("error"),
        errors=int(ended.get("errors", 0)),
        notes=found.notes,
        checked=found.checked,
        usage=found.usage,
        store_requests=found.store_requests,
        unindexed_rows=found.unindexed_rows,
        cost=ended.get("cost", found.usage.cost or None),
        busy_share=Busy.from_json((ended.get("speed") or {}).get("busy")).share,
    )
