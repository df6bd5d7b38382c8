"""Progress of a shard: written by its stages as log lines and small files, and read from these."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from airflow_geneva.errors import StorageError
from airflow_geneva.job.folder import APPLIED, APPLYING, COMMITTING, FAILURE, JobFolder, plan_name, shard_name

logger = logging.getLogger("airflow_geneva.progress")

EVERY_SECONDS = 5.0
LONGEST_SECONDS = 600.0
_GROWTH = 0.1
_READERS = 16

WAITING, FAILED, LEFT = "waiting", "failed", "left"
"""Stages of a shard that no process works on."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Progress:
    """The progress of one shard: `ready` is staged, and `held` was in checkpoints when the shard was planned.

    Rows on which the UDF failed are `done`, and neither ready nor committed.
    """

    rows: int
    rows_done: int
    fragments: int
    ready: int
    committed: int
    seconds: float
    rows_held: int = 0
    rows_ready: int = 0
    rows_committed: int = 0
    rows_failed: int = 0
    versions: tuple[int, ...] = ()

    @property
    def rows_checkpointed(self) -> int:
        """Rows that are computed and kept, except what running tasks computed since their last checkpoint."""
        return max(self.rows_held + self.rows_done - self.rows_failed, self.rows_ready, self.rows_committed)

    @property
    def rows_per_second(self) -> float:
        return self.rows_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate, or None while there is nothing to go by."""
        speed = self.rows_per_second
        return max(self.rows - self.rows_done, 0) / speed if speed > 0 else None

    def __str__(self) -> str:
        left = self.seconds_left
        share = 100 * self.rows_done / self.rows if self.rows else 100.0
        failed = f"{self.rows_failed:,} of them failed, " if self.rows_failed else ""
        return (
            f"{self.rows_done:,} of {self.rows:,} rows computed ({share:.0f} %), {failed}{self.ready} of "
            f"{self.fragments} fragments ready ({self.rows_ready:,} rows), {self.rows_per_second:,.0f} rows/s, "
            + (f"about {left:,.0f} s left" if left is not None else "time left unknown")
        )


@dataclass
class ProgressReporter:
    """Logs progress, and keeps the newest in a document every few seconds, if it can `write` one.

    The pauses between two lines grow with the time that has passed, up to `longest` seconds, so that the log of a shard
    of hours stays short.
    """

    rows: int
    fragments: int
    write: Callable[[Mapping[str, Any]], None] | None = None
    emit: Callable[[str], Any] = logger.info
    every: float = EVERY_SECONDS
    longest: float = LONGEST_SECONDS
    rows_held: int = 0
    rows_done: int = 0
    ready: int = 0
    rows_ready: int = 0
    committed: int = 0
    rows_committed: int = 0
    rows_failed: int = 0
    versions: tuple[int, ...] = ()
    skipped: Callable[[], Mapping[int, int]] = dict
    failed: Callable[[], int] = int
    spark_ui: str | None = None
    _began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _last_line: float = 0.0
    _already_warned: bool = False

    def now(self) -> Progress:
        counts = {part.name: getattr(self, part.name) for part in fields(Progress) if part.name != "seconds"}
        counts["rows_failed"] = max(self.rows_failed, self.failed())
        return Progress(seconds=time.monotonic() - self._began, **counts)

    def add_rows(self, rows: int) -> None:
        self.rows_done += rows
        self.tick()

    def add_ready(self, rows: int) -> None:
        """Count a fragment that was staged, with its due rows that did not fail."""
        self.ready += 1
        self.rows_ready += rows

    def set_committed(self, fragments: int, rows: int, versions: tuple[int, ...]) -> None:
        """Record what is visible now; writes the document at once, because commits are few."""
        self.committed, self.rows_committed, self.versions = fragments, rows, versions
        self.keep()

    def tick(self, force: bool = False) -> None:
        """Log and write the document if it is time."""
        moment = time.monotonic()
        if not force and moment - max(self._last, self._began) < self.every:
            return
        self._last = moment
        pause = min(max(self.every, _GROWTH * (moment - self._began)), self.longest)
        if force or moment - self._last_line >= pause:
            self._last_line = moment
            self.emit(str(self.now()))
        self.keep()

    def keep(self) -> None:
        """Write the document; a failed write does not fail the work."""
        if self.write is None:
            return
        try:
            self.write(self.document())
        except StorageError as error:
            if not self._already_warned:
                self._already_warned = True
                logger.warning("Cannot write the progress; the work goes on: %s", error)

    def document(self) -> dict[str, Any]:
        progress = self.now()
        speed = progress.rows_per_second
        shown = {} if self.spark_ui is None else {"spark_ui": self.spark_ui}
        return {**asdict(progress), "rows_per_second": speed, "at": time.time(), "skipped": self.skipped(), **shown}


def read_progress(document: Mapping[str, Any]) -> Progress:
    """Parse a progress document, also of an older version of this package; KeyError, TypeError if it is none."""
    known = {part.name: document[part.name] for part in fields(Progress) if part.name in document}
    return Progress(**{**known, "versions": tuple(document.get("versions", ()))})


@dataclass(frozen=True)
class ShardStatus:
    """One shard of a job at one time; committed rows count as ready, and ready rows as checkpointed.

    Args:
        index: its position in the plan.
        stage: ``waiting``, ``applying``, ``applied``, ``committing`` or ``committed``; for a view also ``verified``;
            ``failed`` if its last try failed, ``left`` if the job ended or died before the shard was done.
        rows: due rows.
        rows_checkpointed: due rows that are computed and checkpointed, without those that failed.
        rows_ready: those of them in a finished data file.
        rows_committed: those of them that are visible in the table.
        rows_failed: due rows on which the UDF failed; exact once the shard is committed.
        fragments, fragments_ready, fragments_committed: the same in fragments.
        rows_computed: rows that the UDF computed in this job.
        rows_reused: rows that other jobs computed; known once the shard is committed.
        versions: table versions written.
        seconds: time spent, by stage.
        rows_per_second: speed of the UDF while it runs, else 0.
        seconds_left: estimated seconds left in the current stage, or None.
        error: why the last try failed, until a new try begins; None for a try that was killed.
        spark_ui: address of the UI of the Spark driver that computed it last, or None; it ends with the driver.
    """

    index: int
    stage: str
    rows: int
    rows_checkpointed: int = 0
    rows_ready: int = 0
    rows_committed: int = 0
    fragments: int = 0
    fragments_ready: int = 0
    fragments_committed: int = 0
    rows_computed: int = 0
    rows_reused: int = 0
    rows_failed: int = 0
    versions: tuple[int, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    rows_per_second: float = 0.0
    seconds_left: float | None = None
    error: str | None = None
    spark_ui: str | None = None

    def __str__(self) -> str:
        speed = f", {self.rows_per_second:,.0f} rows/s" if self.rows_per_second else ""
        left = f", about {self.seconds_left:,.0f} s left" if self.seconds_left is not None else ""
        failed = f", {self.rows_failed:,} failed" if self.rows_failed else ""
        return (
            f"shard {self.index}: {self.stage}, {self.rows_checkpointed:,} of {self.rows:,} rows checkpointed, "
            f"{self.rows_ready:,} ready, {self.rows_committed:,} committed{failed}{speed}{left}"
            + (f"; error: {self.reason}" if self.error else "")
        )

    def at_rest(self, failed: bool, swapped: bool = False) -> ShardStatus:
        """Return the shard after its job has ended or died; the swap of a view makes all shards visible at once."""
        ended = replace(self, rows_per_second=0.0, seconds_left=None)
        if not swapped:
            worked_on = self.stage in ("applying", "committing")
            if worked_on or self.stage == WAITING:
                return replace(ended, stage=FAILED if worked_on and failed else LEFT)
            return ended
        return replace(
            ended,
            stage="committed",
            rows_checkpointed=self.rows - self.rows_failed,
            rows_ready=self.rows - self.rows_failed,
            rows_committed=self.rows - self.rows_failed,
            fragments_ready=self.fragments,
            fragments_committed=self.fragments,
            error=None,
        )

    @property
    def reason(self) -> str:
        """The first line of its error."""
        return (self.error or "").partition("\n")[0]


def read_shards(folder: JobFolder, record: Mapping[str, Any]) -> tuple[ShardStatus, ...]:
    """Read the shards of a job's current plan; none if there is no plan yet, or no more."""
    if "plan" in record:
        fingerprint = record["plan"]
        planned = folder.read(plan_name(fingerprint)) if fingerprint else None
    else:  # written by an older version of this package
        planned = folder.read("planned.json")
        fingerprint = (planned or {}).get("fingerprint")
    if planned is None:
        return ()
    names = frozenset(folder.storage.list_folder()[1])
    sizes = list(enumerate(planned["shards"]))
    found = in_parallel(
        lambda item: _read_shard(folder, fingerprint, item[0], item[1], names), sizes, folder.storage.local
    )
    return tuple(found)


def in_parallel(read: Callable[[_T], _R], items: Iterable[_T], local: bool) -> list[_R]:
    """Read many small documents, in parallel where each costs a round trip."""
    if local:
        return [read(item) for item in items]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, items))


def _read_shard(
    folder: JobFolder, fingerprint: str, index: int, size: Mapping[str, Any], names: frozenset[str]
) -> ShardStatus:
    def read(name: str) -> dict[str, Any]:
        return (folder.read(name) if name in names else None) or {}

    staged = int(size["rows_staged"])
    status = ShardStatus(
        index=index,
        stage=WAITING,
        rows=int(size["rows"]),
        rows_checkpointed=staged + int(size["rows_held"]),
        rows_ready=staged,
        fragments=int(size["fragments"]),
        fragments_ready=int(size["staged"]),
    )
    committed = read(shard_name("commit", fingerprint, index))
    found = read(shard_name("status", fingerprint, index)) or {
        part: read(name.format(plan=fingerprint[:16], shard=index)) for part, name in _FORMER_NAMES.items()
    }
    stages = {APPLYING: _applying, APPLIED: _applied, COMMITTING: _committing}
    if committed and not committed["rows_left"]:
        stages = {APPLIED: _applied}
    for part, add in stages.items():
        if found.get(part):
            status = add(status, found[part])
    if committed:
        return _committed(status, committed)
    if failure := found.get(FAILURE):
        return replace(status, stage=FAILED, error=failure["error"], rows_per_second=0.0, seconds_left=None)
    return status


_FORMER_NAMES = {
    APPLYING: "progress-{shard:04}.json",
    APPLIED: "apply-{plan}-{shard:04}.json",
    COMMITTING: "committing-{shard:04}.json",
    FAILURE: "failed-{plan}-{shard:04}.json",
}
"""The documents that held the parts of a shard's status before it was one document."""


def _applying(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    progress = read_progress(document)
    # Fragments that were staged when the shard was planned are not applied again.
    rows_ready = status.rows_ready + progress.rows_ready
    done = rows_ready + progress.rows_failed >= status.rows
    address = str(document.get("spark_ui") or "")
    return replace(
        status,
        stage="applied" if done else "applying",
        rows_checkpointed=status.rows_ready + progress.rows_checkpointed,
        rows_ready=rows_ready,
        fragments_ready=status.fragments_ready + progress.ready,
        rows_computed=max(progress.rows_done - progress.rows_failed, 0),
        rows_failed=progress.rows_failed,
        seconds=(("apply", round(progress.seconds, 3)),),
        rows_per_second=0.0 if done else progress.rows_per_second,
        seconds_left=None if done else progress.seconds_left,
        # A page makes a link of it.
        spark_ui=address if address.startswith(("http://", "https://")) else None,
    )


def _applied(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    failed = int(document.get("rows_failed", 0))
    return replace(
        status,
        stage="applied",
        rows_checkpointed=status.rows - failed,
        rows_ready=status.rows - failed,
        rows_failed=failed,
        fragments_ready=status.fragments,
        rows_computed=max(status.rows_computed, int(document["rows_run"]) - failed),
        seconds=(("apply", float(document.get("seconds", 0.0))),),
        rows_per_second=0.0,
        seconds_left=None,
    )


def _committing(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    progress = read_progress(document)
    return replace(
        status,
        stage="committing",
        rows_checkpointed=max(status.rows_checkpointed, progress.rows_checkpointed),
        rows_ready=progress.rows_ready,
        rows_committed=progress.rows_committed,
        rows_failed=max(status.rows_failed, progress.rows_failed),
        fragments_ready=progress.ready,
        fragments_committed=progress.committed,
        versions=progress.versions,
        seconds=_add_stage(status.seconds, "commit", progress.seconds),
        rows_per_second=0.0,
        seconds_left=None,
    )


def _committed(status: ShardStatus, document: Mapping[str, Any]) -> ShardStatus:
    visible = int(document["rows_computed"]) + int(document["rows_reused"])
    whole = not document["rows_left"]
    shown = document.get("visible", True)
    return replace(
        status,
        stage="committed" if shown else "verified",
        # Rows that were deleted after planning no longer count.
        rows_checkpointed=visible if whole else max(status.rows_checkpointed, visible),
        rows_ready=visible if whole else max(status.rows_ready, visible),
        rows_committed=visible if shown else 0,
        fragments_ready=max(status.fragments_ready, int(document["fragments"])),
        fragments_committed=int(document["fragments"]) if shown else 0,
        rows_computed=int(document["rows_computed"]),
        rows_reused=int(document["rows_reused"]),
        rows_failed=int(document["rows_failed"]),
        versions=tuple(document["versions"]),
        seconds=_add_stage(status.seconds, "commit", float(document.get("seconds", 0.0))),
    )


def _add_stage(seconds: tuple[tuple[str, float], ...], stage: str, spent: float) -> tuple[tuple[str, float], ...]:
    return (*((name, value) for name, value in seconds if name != stage), (stage, round(spent, 3)))
