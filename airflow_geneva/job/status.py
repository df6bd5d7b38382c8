"""The status of a job when its record was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from airflow_geneva.job.result import DONE, PENDING, RUNNING
from airflow_geneva.job.shard_status import ShardStatus

STAGES = ("plan", "spark", "apply", "commit", "finish")


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
    """The status of a job when its record was read.

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
        stage: the stage at the last heartbeat, or None.
        rows_total: live rows of the table, or of the source, when it was planned.
        rows_pending: rows that were due then.
        rows_computed: rows that the UDF ran on; after the end, those that are visible.
        rows_reused: rows that other jobs computed and this job made visible.
        rows_skipped: rows with nothing to do.
        rows_failed: rows on which the UDF failed.
        rows_left: due rows that are not visible.
        reasons: number of rows by the reason why they were due or not, when the job was planned.
        rows_checkpointed, rows_ready, rows_committed: due rows that are checkpointed; those of them that are in
            finished data files; those of them that are visible in the table, including failed rows that are NULL.
        shard_count: number of shards.
        shards: status of each shard; for a DONE job only on request.
        seconds: time by stage, added up over parallel shards; ``spark`` is the time to get a session.
        commits: table versions written.
        error: why it failed, or None.
        errors: number of error records.
        airflow: the Airflow task that planned it, or None.
        notes: notes for the user.
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
        """Whether a process works on it or may resume it: neither ended nor dead."""
        return self.state in (PENDING, RUNNING) and not self.dead

    @property
    def target(self) -> str:
        """The column as ``table.column``, or the name of the view."""
        return self.view or f"{self.table}.{self.column}"

    @property
    def share_reused(self) -> float:
        """Fraction of the visible rows that earlier jobs computed; 0 if there are no rows."""
        visible = self.rows_computed + self.rows_reused
        return self.rows_reused / visible if visible else 0.0

    @property
    def took(self) -> float:
        """Seconds from start to end, or to the last heartbeat."""
        return max((self.ended or self.last_seen) - self.started, 0.0)

    @property
    def rows_per_second(self) -> float:
        """Speed of the UDF over all running shards; 0 if none runs."""
        return sum(shard.rows_per_second for shard in self.shards) if self.open else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until all rows are computed, at the current speed; None if nothing runs."""
        speed = self.rows_per_second
        return max(self.rows_pending - self.rows_checkpointed, 0) / speed if speed else None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        speed = {"rows_per_second": self.rows_per_second, "seconds_left": self.seconds_left}
        return {**asdict(self), "open": self.open, "share_reused": round(self.share_reused, 4), **speed}

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *(f"  {shard}" for shard in self.shards if self.state != DONE)])

    def lines(self) -> list[str]:
        """Describe the job as a whole, without its shards."""
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
        began = f"started {format_time(self.started)}"
        if self.ended is not None:
            return f"{began}, took {self.took:,.1f} s"
        what = f" in stage {self.stage}" if self.stage else ""
        return f"{began}, last heartbeat {format_time(self.last_seen)}{what}"

    def _commits(self) -> str:
        if not self.commits:
            return "no commits"
        listed = ", ".join(map(str, self.commits[:8])) + (", ..." if len(self.commits) > 8 else "")
        return f"{len(self.commits)} commit(s): version {listed}"


def format_time(seconds: float) -> str:
    """Format a time for people."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
