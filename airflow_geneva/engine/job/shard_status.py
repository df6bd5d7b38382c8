"""The status of a shard, read from the documents that its steps write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from airflow_geneva.engine.counts import Counts, Usage
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.busy import Busy
from airflow_geneva.engine.job.folder import (
    ALIVE,
    APPLIED,
    APPLYING,
    COMMIT,
    COMMITTED,
    COMMITTING,
    FAILURE,
    FINISH,
    STARTED,
    STATUS,
    SUBMIT,
    SUBMITTED,
    JobFolder,
    plan_name,
    shard_name,
)
from airflow_geneva.engine.job.heartbeat import Heartbeat
from airflow_geneva.engine.job.progress import NO_EXECUTOR, START, read_progress, rows_per_second, usage_of
from airflow_geneva.engine.job.spark_start import SparkStart
from airflow_geneva.engine.results import ShardResult
from airflow_geneva.engine.storage.files import in_parallel

WAITING, STARTING, FAILED, LEFT = "waiting", "starting", "failed", "left"
QUEUED = "waiting for an executor"
AT_WORK = (STARTING, QUEUED, "applying")

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class ShardStatus(Counts):
    """One shard of a job at one time; its failed rows are exact, and its reused rows known, once it is committed.

    Args:
        index: its position in the plan.
        step: ``waiting``, ``starting`` (a task has begun, and computes nothing yet), ``waiting for an executor``
            (Spark has none that could compute), ``applying``, ``applied``, ``committing`` or ``committed``; for a view
            also ``verified``; ``failed`` if its last attempt failed, ``left`` if the job ended or died before the shard
            was done.
        rows: due rows.
        fragments, fragments_ready, fragments_committed: number of all fragments, staged ones, and visible ones.
        versions: table versions written.
        seconds: time spent, by step.
        error: why the last attempt failed, until a new one begins; None for an attempt that was killed.
        since: start of its last attempt, in seconds since the epoch; None if it is not known.
        seen: time of its newest progress, in seconds since the epoch; None if it is not known.
        start_seconds: seconds from the start of the task to that of the computation; while it runs, to its first rows.
        spark_start: seconds to the first call of the function on Spark, by part; zeros if they are not known.
        spark_ui: address of the UI of the Spark driver that computed it last, or None; it ends with the driver.
        usage: what all attempts used, except in the last seconds before a kill.
        samples: at most 60 pairs of time, in seconds since the epoch, and rows that its last attempt had computed then.
        rows_submitted: rows that the service of a batch API has, and had not answered at the last poll.
        last: whether no other attempt follows the one that failed.
        busy: seconds that its function ran and waited in its last attempt.
    """

    index: int
    step: str
    rows: int
    fragments: int = 0
    fragments_ready: int = 0
    fragments_committed: int = 0
    versions: tuple[int, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    error: str | None = None
    spark_ui: str | None = None
    since: float | None = None
    seen: float | None = None
    start_seconds: float | None = None
    spark_start: SparkStart = field(default_factory=SparkStart)
    samples: tuple[tuple[float, int], ...] = ()
    usage: Usage = field(default_factory=Usage)
    rows_submitted: int = 0
    last: bool = False
    busy: Busy = field(default_factory=Busy)

    @property
    def rows_to_compute(self) -> int:
        return max(self.rows - self.rows_checkpointed - self.rows_failed, 0)

    @property
    def rows_per_second(self) -> float:
        """Speed of the UDF while it runs, else 0."""
        return rows_per_second(self.samples) if self.step == "applying" else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until all of its rows are computed, or None."""
        speed = self.rows_per_second
        return self.rows_to_compute / speed if speed else None

    @property
    def applied_per_second(self) -> float:
        """Mean speed of the computation once it has ended or failed; 0 while it runs, or if it had nothing to do."""
        if self.step in (WAITING, *AT_WORK):
            return 0.0
        if self.step == FAILED and len(self.samples) > 1 and (passed := self.samples[-1][0] - self.samples[0][0]) > 0:
            return (self.samples[-1][1] - self.samples[0][1]) / passed
        spent = dict(self.seconds).get("apply", 0.0) - (self.start_seconds or 0.0)
        rows = self.rows_computed + self.rows_failed
        return rows / spent if spent > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows_per_second": self.rows_per_second, "seconds_left": self.seconds_left}

    def __str__(self) -> str:
        speed = f", {self.rows_per_second:,.0f} rows/s" if self.rows_per_second else ""
        left = f", about {self.seconds_left:,.0f} s left" if self.seconds_left is not None else ""
        failed = f", {self.rows_failed:,} failed" if self.rows_failed else ""
        failed += f", {self.rows_submitted:,} with the service" if self.rows_submitted else ""
        return (
            f"shard {self.index}: {self.step}, {self.rows_checkpointed:,} of {counted(self.rows, 'row')} "
            f"checkpointed, {self.rows_ready:,} ready, {self.rows_committed:,} committed{failed}{speed}{left}"
            + (f"; error: {self.reason}" if self.error else "")
        )

    def at_rest(self, failed: bool, swapped: bool = False) -> ShardStatus:
        """Return the status after its job has ended or died; a view's swap makes all shards visible at once."""
        if swapped:
            rows, fragments = self.rows - self.rows_failed, self.fragments
            shown = replace(self, rows_checkpointed=rows, rows_ready=rows, rows_committed=rows, rows_left=0, error=None)
            return replace(shown, step="committed", fragments_ready=fragments, fragments_committed=fragments)
        if self.step == WAITING or self.step in (*AT_WORK, "committing"):
            return replace(self, step=FAILED if failed and self.step != WAITING else LEFT)
        return self

    @property
    def reason(self) -> str:
        """The first line of its error."""
        return (self.error or "").partition("\n")[0]

    @property
    def remedy(self) -> str:
        """The advice in its error: the second line, unless that shows the inputs or the traceback of a UDF."""
        after = (self.error or "").partition("\n")[2].partition("\n")[0]
        return "" if after.startswith(("Input batch schema", "Traceback", " ")) else after


def read_shards(folder: JobFolder, record: Mapping[str, Any]) -> tuple[tuple[ShardStatus, ...], Heartbeat | None]:
    """Read the shards of a job's current plan, if it exists, and the last heartbeat.

    Heartbeats from before the job was planned belong to an earlier attempt, and do not count.
    """
    fingerprint = record["plan"]
    planned = folder.read(plan_name(fingerprint)) if fingerprint else None
    names = frozenset(folder.storage.list_folder()[1])

    def read(name: str) -> dict[str, Any]:
        return (folder.read(name) if name in names else None) or {}

    def read_one(shard: tuple[int, Mapping[str, Any]]) -> ShardStatus:
        found: dict[str, Any] = {}
        for writer in (STATUS, SUBMIT, COMMIT):
            parts = read(shard_name(writer, fingerprint, shard[0]))
            found |= {part: value for part, value in parts.items() if value is not None}
            signs.append(parts.get(ALIVE))
        return _shard(*shard, found)

    signs: list[Any] = [read(shard_name(FINISH, str(fingerprint), 0)).get(ALIVE)]
    shards = in_parallel(read_one, enumerate(() if planned is None else planned["shards"]), folder.storage.local)
    beats = [beat for sign in signs if (beat := Heartbeat.from_json(sign)) and beat.at >= float(record["started"])]
    return tuple(shards), max(beats, key=lambda beat: beat.at, default=None)


def _shard(index: int, size: Mapping[str, Any], found: Mapping[str, Any]) -> ShardStatus:
    staged = int(size["rows_staged"])
    status = ShardStatus(
        index=index,
        step=WAITING,
        rows=int(size["rows"]),
        rows_checkpointed=staged + int(size["rows_held"]),
        rows_ready=staged,
        fragments=int(size["fragments"]),
        fragments_ready=int(size["staged"]),
        usage=usage_of([found]),
    )
    status = _at_its_step(status, found)
    return replace(status, rows_left=max(status.rows - status.rows_committed - status.rows_failed, 0))


def _at_its_step(status: ShardStatus, found: Mapping[str, Any]) -> ShardStatus:
    committed = found.get(COMMITTED)
    steps = {APPLYING: _applying, APPLIED: _applied, COMMITTING: _committing}
    if committed and not committed["rows_left"]:
        steps = {APPLIED: _applied}
    for part, add in steps.items():
        if found.get(part):
            status = add(status, found[part])
    status = _started(status, found.get(STARTED))
    if submitted := found.get(SUBMITTED):
        status = replace(status, step="applying", rows_submitted=sum(submitted.values()))
    if committed:
        return _committed(status, committed)
    if failure := found.get(FAILURE):
        return replace(status, step=FAILED, error=failure["error"], last=bool(failure.get("last")))
    return status


def _started(status: ShardStatus, document: Mapping[str, Any] | None) -> ShardStatus:
    """Add the start of the last attempt; the shard is `starting` until this attempt writes progress."""
    if not document:
        return status
    since = float(document["at"])
    if status.step == WAITING or (status.step in (QUEUED, "applying") and (status.seen or 0.0) < since):
        return replace(status, step=STARTING, since=since)
    if status.step == "applying" and status.seen is not None:
        spent = tuple((name, status.seen - since if name == "apply" else value) for name, value in status.seconds)
        first = next((at for at, rows in status.samples if rows), status.seen - dict(status.seconds)["apply"])
        return replace(status, since=since, seconds=spent, start_seconds=max(first - since, 0.0))
    return replace(status, since=since)


def _applying(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    progress = read_progress(document)
    # Fragments that were staged when the shard was planned are not applied again.
    staged = status.rows_ready
    counts = progress + Counts(rows_checkpointed=staged, rows_ready=staged)
    done = counts.rows_ready + counts.rows_failed >= status.rows
    address = str(document.get("spark_ui") or "")
    began = float(document.get("at", 0.0)) - progress.seconds
    return replace(
        status,
        **counts.counts(),
        step=QUEUED if document.get(NO_EXECUTOR) else "applied" if done else "applying",
        fragments_ready=status.fragments_ready + progress.ready,
        seconds=(("apply", round(progress.seconds, 3)),),
        seen=float(document["at"]) if "at" in document else None,
        spark_start=SparkStart.from_json(document.get(START)),
        # A web page turns it into a link.
        spark_ui=address if address.startswith(("http://", "https://")) else None,
        busy=progress.busy,
        samples=tuple((round(began + sample.seconds, 2), int(sample.rows)) for sample in progress.samples),
    )


def _applied(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    if document.get("stopped"):  # at a cap: computed rows are kept, and committed as far as possible
        return replace(status, step="applied")
    failed = int(document["rows_failed"])
    return replace(
        status,
        step="applied",
        rows_checkpointed=status.rows - failed,
        rows_ready=status.rows - failed,
        rows_failed=failed,
        fragments_ready=status.fragments,
        rows_computed=max(status.rows_computed, int(document["rows_computed"])),
        seconds=(("apply", float(document["seconds"])),),
        start_seconds=document.get("start_seconds"),
        spark_start=SparkStart.from_json(document.get(START)),
    )


def _committing(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    progress = read_progress(document)
    return replace(
        status,
        **(status | replace(progress, rows_computed=0)).counts(),
        step="committing",
        fragments_ready=progress.ready,
        fragments_committed=progress.committed,
        versions=progress.versions,
        seconds=_with_commit(status.seconds, progress.seconds),
    )


def _committed(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    result = ShardResult.from_json(document)
    # Rows that were deleted after planning no longer count; rows that could not be committed stay ready.
    kept = Counts(rows_checkpointed=status.rows_checkpointed, rows_ready=status.rows_ready)
    return replace(
        status,
        **(result | kept if result.rows_left else result).counts(),
        step="committed" if result.visible else "verified",
        fragments_ready=max(status.fragments_ready, result.fragments),
        fragments_committed=result.fragments if result.visible else 0,
        versions=result.versions,
        seconds=_with_commit(status.seconds, result.seconds),
        usage=status.usage + Usage(store_requests=result.store_requests),
    )


def _with_commit(seconds: tuple[tuple[str, float], ...], spent: float) -> tuple[tuple[str, float], ...]:
    return (*((name, value) for name, value in seconds if name != "commit"), ("commit", round(spent, 3)))
