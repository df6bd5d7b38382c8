"""What a job did, as its user sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_geneva.job.folder import JobFolder

PENDING, RUNNING, DONE, PARTIAL, FAILED = "PENDING", "RUNNING", "DONE", "PARTIAL", "FAILED"


@dataclass(frozen=True)
class ShardResult:
    """What happened to the fragments of one shard.

    Args:
        shard: its index.
        fingerprint: of the plan it belongs to.
        rows_computed: rows this job ran the UDF on that are now visible.
        rows_reused: rows made visible that earlier jobs had computed.
        rows_failed: rows the UDF failed on.
        rows_left: due rows that could not be committed.
        rows_taken: rows among the reused ones whose value another UDF version computed.
        versions: table versions written.
        left_reasons: why, by fragment.
        seconds: that its commit took.
        visible: whether the rows are; a view's are when it is swapped, at the end.
    """

    shard: int
    fingerprint: str
    rows_computed: int = 0
    rows_reused: int = 0
    rows_failed: int = 0
    rows_left: int = 0
    rows_taken: int = 0
    fragments: int = 0
    versions: tuple[int, ...] = ()
    left_reasons: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0
    visible: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ShardResult:
        fields = dict(document)
        fields["versions"] = tuple(fields["versions"])
        fields["left_reasons"] = tuple((int(a), str(b)) for a, b in fields["left_reasons"])
        return ShardResult(**fields)

    @staticmethod
    def read(folder: JobFolder, fingerprint: str, shard: int) -> ShardResult | None:
        """What the commit of a shard of a plan recorded; None when it recorded nothing, or that is damaged."""
        try:
            return ShardResult.from_json(folder.read_shard("commit", fingerprint, shard) or {})
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class BackfillResult:
    """The outcome of a backfill.

    Args:
        job_id: the job.
        state: DONE, PARTIAL (something was left because others changed it meanwhile) or FAILED.
        rows_computed: rows the UDF ran on in this job that are visible now.
        rows_reused: rows that earlier, unfinished jobs had computed and this one made visible.
        rows_skipped: rows with nothing to do.
        rows_failed: rows the UDF failed on.
        rows_left: rows that are due and were not made visible.
        version: the newest table version this job knows of.
        from_version: the version that was planned on.
        commits: table versions this job wrote.
        seconds: time by stage; ``spark`` is the time until its session was there.
        notes: sentences for the reader.
    """

    job_id: str
    state: str
    rows_computed: int = 0
    rows_reused: int = 0
    rows_skipped: int = 0
    rows_failed: int = 0
    rows_left: int = 0
    version: int = 0
    from_version: int = 0
    commits: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether a table version was written."""
        return bool(self.commits)

    def with_seconds(self, **seconds: float) -> BackfillResult:
        return replace(self, seconds={**self.seconds, **{k: round(v, 3) for k, v in seconds.items()}})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> BackfillResult:
        fields = dict(document)
        fields["commits"] = tuple(fields["commits"])
        fields["notes"] = tuple(fields["notes"])
        return BackfillResult(**fields)

    def __str__(self) -> str:
        took = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.seconds.items())
        lines = [
            f"{self.state}: {self.rows_computed:,} rows computed, {self.rows_reused:,} taken from checkpoints, "
            f"{self.rows_skipped:,} skipped, {self.rows_failed:,} failed, {self.rows_left:,} left",
            f"  table version {self.from_version} -> {self.version}, {len(self.commits)} commit(s), job {self.job_id}"
            + (f" ({took})" if took else ""),
        ]
        lines.extend(f"  Note: {note}" for note in self.notes)
        return "\n".join(lines)


def combine(
    job_id: str,
    shards: Iterable[ShardResult],
    rows_skipped: int,
    from_version: int,
    version: int,
    notes: tuple[str, ...],
) -> BackfillResult:
    """Add the shards of a job up."""
    results = list(shards)
    left = sum(r.rows_left for r in results)
    commits = tuple(sorted({v for r in results for v in r.versions}))
    reasons = sorted({reason for r in results for _, reason in r.left_reasons})
    return BackfillResult(
        job_id=job_id,
        state=PARTIAL if left else DONE,
        rows_computed=sum(r.rows_computed for r in results),
        rows_reused=sum(r.rows_reused for r in results),
        rows_skipped=rows_skipped,
        rows_failed=sum(r.rows_failed for r in results),
        rows_left=left,
        version=max(commits, default=version),
        from_version=from_version,
        commits=commits,
        notes=(*notes, *(f"left for the next run: {reason}" for reason in reasons)),
    )
