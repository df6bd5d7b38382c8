"""What is known of a job: read from its folder, while it runs and ever after."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from airflow_geneva.job.error_records import count_errors
from airflow_geneva.job.folder import JobFolder, is_job_id
from airflow_geneva.job.heartbeat import HEARTBEAT, SILENT_WHILE_WORKING, Heartbeat, silence_allowed
from airflow_geneva.job.result import DONE, FAILED, PENDING, RUNNING
from airflow_geneva.job.shard import WAITING, ShardStatus, in_parallel, read_shards
from airflow_geneva.storage import Storage

STAGES = ("plan", "apply", "commit", "finish")


@dataclass(frozen=True)
class AirflowRun:
    """The task that planned a job."""

    dag_id: str
    run_id: str
    task_id: str
    try_number: int

    def __str__(self) -> str:
        return f"{self.dag_id}, run {self.run_id}, task {self.task_id}, try {self.try_number}"


@dataclass(frozen=True)
class Job:
    """A job as it was when it was looked at.

    Args:
        id: its name.
        kind: ``backfill`` or ``refresh``.
        table: name of the table, or of the view.
        column: the column, or None for a view.
        view: name of the view, or None for a column.
        source: name of the table or view that a view is made from, or None for a column.
        udf, udf_version: the code; of a view with several UDFs, one after another.
        where: the filter, or None; a view's is part of it.
        version: the table version it was planned on, of a view that of its source.
        read_version: the version asked for, or None for the newest.
        state: PENDING (planned, nothing started), RUNNING, DONE, PARTIAL or FAILED.
        dead: not ended, and silent for so long that nobody works on it any more.
        started, ended, last_seen: in seconds since the epoch; ``last_seen`` is the last sign of life.
        stage: what was worked on then, or None.
        rows_total: live rows of the table, or of the source, when it was planned.
        rows_pending: of these, due.
        rows_computed: rows the UDF ran on; when ended, those of them that are visible.
        rows_reused: rows that other jobs had computed and this one made visible.
        rows_skipped: rows with nothing to do.
        rows_failed: rows the UDF failed on.
        rows_left: due rows that are not visible.
        reasons: rows by why they were due, or were not, when it was planned.
        rows_checkpointed, rows_ready, rows_committed: due rows that are computed and kept, of these those in finished
            data files, and of these those visible in the table; a row that failed and was skipped is so as NULL.
        shard_count: number of shards.
        shards: how far each is; of a job that is DONE only when asked for.
        seconds: time by stage, that of parallel shards added up.
        commits: table versions written.
        error: why it failed, or None.
        errors: number of error records.
        airflow: the Airflow task it belongs to, or None.
        notes: sentences for the reader.
    """

    id: str
    kind: str
    table: str
    column: str | None
    view: str | None
    udf: str
    udf_version: str
    where: str | None
    version: int
    read_version: int | None
    state: str
    dead: bool
    started: float
    ended: float | None
    last_seen: float
    stage: str | None
    rows_total: int = 0
    rows_pending: int = 0
    rows_computed: int = 0
    rows_reused: int = 0
    rows_skipped: int = 0
    rows_failed: int = 0
    rows_left: int = 0
    rows_checkpointed: int = 0
    rows_ready: int = 0
    rows_committed: int = 0
    shard_count: int = 0
    shards: tuple[ShardStatus, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    commits: tuple[int, ...] = ()
    error: str | None = None
    errors: int = 0
    airflow: AirflowRun | None = None
    notes: tuple[str, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)
    source: str | None = None

    @property
    def open(self) -> bool:
        """Whether somebody works on it, or may come back to it: neither ended nor dead."""
        return self.state in (PENDING, RUNNING) and not self.dead

    @property
    def target(self) -> str:
        """What is computed: ``table.column``, or the view."""
        return self.view or f"{self.table}.{self.column}"

    @property
    def share_reused(self) -> float:
        """Of the rows made visible, the share that others had computed; 0 when there are none."""
        visible = self.rows_computed + self.rows_reused
        return self.rows_reused / visible if visible else 0.0

    @property
    def took(self) -> float:
        """Seconds from start to end, or to the last sign of life."""
        return max((self.ended or self.last_seen) - self.started, 0.0)

    @property
    def rows_per_second(self) -> float:
        """Speed of the UDF on all shards that run now; 0 when none does."""
        return sum(shard.rows_per_second for shard in self.shards) if self.open else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate until the UDF has run on all rows, at the speed of now; None while nothing runs."""
        speed = self.rows_per_second
        return max(self.rows_pending - self.rows_checkpointed, 0) / speed if speed else None

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        speed = {"rows_per_second": self.rows_per_second, "seconds_left": self.seconds_left}
        return {**asdict(self), "open": self.open, "share_reused": round(self.share_reused, 4), **speed}

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *(f"  {shard}" for shard in self.shards if self.state != DONE)])

    def lines(self) -> list[str]:
        """What is to be said of the job as a whole."""
        where = f" where {self.where}" if self.where else ""
        source = f" from {self.source}" if self.source else ""
        code = f" with {self.udf} (version {self.udf_version})" if self.udf else ""
        lines = [
            f"{self.state}{' (found dead)' if self.dead else ''}: {self.kind} of {self.target}{source}{code}{where}, "
            f"job {self.id}",
            f"  {self._when()}",
            f"  {self.rows_pending:,} of {self.rows_total:,} rows due: {self.rows_checkpointed:,} checkpointed, "
            f"{self.rows_ready:,} ready to commit, {self.rows_committed:,} committed, {self.rows_left:,} left",
            f"  {self.rows_computed:,} rows computed, {self.rows_reused:,} reused ({100 * self.share_reused:.0f} %), "
            f"{self.rows_skipped:,} skipped, {self.rows_failed:,} failed, {self.errors:,} error record(s)",
            f"  planned on version {self.version}{f' of {self.source}' if self.source else ''}, {self._commits()}",
        ]
        if self.seconds_left is not None:
            lines.append(f"  {self.rows_per_second:,.0f} rows/s, about {self.seconds_left:,.0f} s left")
        if self.seconds:
            spent = ((stage, self.seconds[stage]) for stage in STAGES if stage in self.seconds)
            lines.append("  " + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in spent))
        if self.airflow is not None:
            lines.append(f"  Airflow: {self.airflow}")
        lines.extend(f"  Note: {note}" for note in self.notes)
        if self.error:
            lines.append(f"  Error: {self.error}")
        return lines

    def _when(self) -> str:
        began = f"started {moment(self.started)}"
        if self.ended is not None:
            return f"{began}, took {self.took:,.1f} s"
        what = f" in stage {self.stage}" if self.stage else ""
        return f"{began}, last sign of life {moment(self.last_seen)}{what}"

    def _commits(self) -> str:
        if not self.commits:
            return "no commits"
        listed = ", ".join(map(str, self.commits[:8])) + (", ..." if len(self.commits) > 8 else "")
        return f"{len(self.commits)} commit(s): version {listed}"


def moment(seconds: float) -> str:
    """A time as people read it."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def read_job(folder: JobFolder, with_shards: bool = True, now: float | None = None) -> Job | None:
    """The job of a folder; None when there is none.

    Args:
        with_shards: also those of a job that is DONE, for which two documents say everything else.
        now: the time that silence is measured to; by default now.
    """
    record = folder.read("job.json")
    if record is None:
        return None
    ended = folder.read("result.json")
    heartbeat = Heartbeat.from_json(folder.read(HEARTBEAT))
    shards: tuple[ShardStatus, ...] = ()
    if with_shards or ended is None or ended["state"] != DONE:
        _, names = folder.storage.list_folder()
        planned = folder.read("planned.json") if "planned.json" in names else None
        shards = () if planned is None else read_shards(folder, planned, names)
    job = _job(record, ended, heartbeat, shards, time.time() if now is None else now)
    return job if job.ended is not None else replace(job, errors=count_errors(folder.storage))


def read_jobs(checkpoints: Storage, newest: int | None = None) -> list[Job]:
    """A table's jobs, newest first; shards of those that are DONE are left out.

    Args:
        newest: how many at most.
    """
    return read_chosen(checkpoints, job_ids(checkpoints)[:newest])


def job_ids(checkpoints: Storage) -> list[str]:
    """Names of a table's jobs, newest first: one listing, nothing is read."""
    names, _ = checkpoints.list_folder("jobs")
    return sorted(filter(is_job_id, names), reverse=True)


def read_chosen(checkpoints: Storage, ids: Iterable[str]) -> list[Job]:
    """The jobs of these names, in their order; those that are gone or damaged are left out."""
    folders = [JobFolder.of(checkpoints, name) for name in ids]
    found = in_parallel(lambda folder: read_job(folder, with_shards=False), folders, checkpoints.local)
    return [job for job in found if job is not None]


def _job(
    record: Mapping[str, Any],
    ended: Mapping[str, Any] | None,
    heartbeat: Heartbeat | None,
    shards: tuple[ShardStatus, ...],
    now: float,
) -> Job:
    if ended is not None and _goes_on(ended, heartbeat, now):
        ended = None
    if ended is not None:
        swapped = record["kind"] == "refresh" and ended["state"] == DONE
        shards = tuple(shard.at_rest(swapped) for shard in shards)
    run = record.get("airflow")
    last_seen = max(float(record["started"]), heartbeat.at if heartbeat else 0.0, float((ended or {}).get("ended", 0)))
    silent = now - last_seen > silence_allowed(heartbeat, retried=run is not None)
    pending = int(record.get("rows_pending", 0))
    total = int(record.get("rows_total", 0))
    job = Job(
        id=record["id"],
        kind=record["kind"],
        table=record["table"],
        column=record.get("column"),
        view=record.get("view"),
        source=record.get("source"),
        udf=record.get("udf", ""),
        udf_version=record.get("udf_version", ""),
        where=record.get("where"),
        version=int(record["version"]),
        read_version=record.get("read_version"),
        state=_state(record, heartbeat, shards) if ended is None else ended["state"],
        dead=ended is None and silent,
        started=float(record["started"]),
        ended=None if ended is None else float(ended["ended"]),
        last_seen=last_seen,
        stage=heartbeat.stage if heartbeat else None,
        rows_total=total,
        rows_pending=pending,
        rows_skipped=total - pending,
        shard_count=int(record.get("shards", 0)),
        shards=shards,
        reasons=dict(record.get("reasons", {})),
        airflow=None if run is None else AirflowRun(run["dag_id"], run["run_id"], run["task_id"], int(run["try"])),
    )
    job = _with_shards(job)
    return job if ended is None else _with_result(job, ended)


def _goes_on(ended: Mapping[str, Any], heartbeat: Heartbeat | None, now: float) -> bool:
    """Whether a shard of an ended job was cleared, and is computed or committed again."""
    if heartbeat is None or heartbeat.stage not in ("apply", "commit") or heartbeat.at <= float(ended["ended"]):
        return False
    # Of a finished job, what ended in order was somebody who came too late, and nobody follows.
    follows = not heartbeat.over or ended["state"] == FAILED
    return follows and now - heartbeat.at <= SILENT_WHILE_WORKING


def _state(record: Mapping[str, Any], heartbeat: Heartbeat | None, shards: tuple[ShardStatus, ...]) -> str:
    begun = heartbeat is not None and heartbeat.stage != "plan"
    begun = begun or any(shard.stage != WAITING for shard in shards)
    # Records of older versions are announced as running.
    return RUNNING if begun else str(record.get("state", PENDING))


def _with_shards(job: Job) -> Job:
    seconds: dict[str, float] = {}
    for shard in job.shards:
        for stage, spent in shard.seconds:
            seconds[stage] = round(seconds.get(stage, 0.0) + spent, 3)
    committed = sum(shard.rows_committed for shard in job.shards)
    return replace(
        job,
        rows_computed=sum(shard.rows_computed for shard in job.shards),
        rows_reused=sum(shard.rows_reused for shard in job.shards),
        rows_failed=sum(shard.rows_failed for shard in job.shards),
        rows_left=job.rows_pending - committed,
        rows_checkpointed=sum(shard.rows_checkpointed for shard in job.shards),
        rows_ready=sum(shard.rows_ready for shard in job.shards),
        rows_committed=committed,
        seconds=seconds,
        commits=tuple(sorted({version for shard in job.shards for version in shard.versions})),
    )


def _with_result(job: Job, ended: Mapping[str, Any]) -> Job:
    result = ended["result"]
    committed = int(result["rows_computed"]) + int(result["rows_reused"]) + int(result["rows_failed"])
    return replace(
        job,
        rows_computed=int(result["rows_computed"]),
        rows_reused=int(result["rows_reused"]),
        rows_skipped=int(result["rows_skipped"]),
        rows_failed=int(result["rows_failed"]),
        rows_left=int(result["rows_left"]),
        rows_checkpointed=max(job.rows_checkpointed, committed),
        rows_ready=max(job.rows_ready, committed),
        rows_committed=committed,
        seconds=dict(result["seconds"]),
        commits=tuple(result["commits"]),
        error=ended.get("error"),
        errors=int(ended.get("errors", 0)),
        notes=tuple(result["notes"]),
    )
