"""The plan of a job: what all tasks have in common, the shards, and the reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from airflow_geneva.checkpoint.facts import Fact
from airflow_geneva.checkpoint.keys import FragmentKey, WorkIdentity
from airflow_geneva.checkpoint.provenance import PriorFailures, prior_failures_of
from airflow_geneva.checkpoint.reuse import ReuseRules
from airflow_geneva.lance_io.table_identity import PlannedTable
from airflow_geneva.lance_io.task_memory import DEFAULT_TASK_MEMORY, batch_bytes, checkpoint_bytes
from airflow_geneva.plan.file_mismatch import Mismatches
from airflow_geneva.plan.previous_inputs import version_label
from airflow_geneva.plan.shard import FragmentWork, Shard
from airflow_geneva.plan.swap_plan import SwapPlan

_LISTED = 8


@dataclass(frozen=True)
class Sizing:
    """Sizes of shards, tasks, batches, checkpoints and commits.

    Args:
        concurrency: Spark task slots per spark-submit.
        intra_applier_concurrency: threads per slot.
        batch_size: rows per UDF call.
        checkpoint_size: most rows one checkpoint covers.
        min_checkpoint_size, max_checkpoint_size: bounds of the adaptive size.
        checkpoint_interval: seconds between two checkpoints of a task.
        task_size: rows per Spark task.
        task_shuffle_diversity: number of regions of the table that consecutive tasks are taken from.
        shard_size: fragments per shard.
        commit_granularity: fragments per Lance commit; None: enough to keep a backfill at about 100 commits.
        task_memory_bytes: bytes of rows that a task slot holds at a time; see `airflow_geneva.lance_io.task_memory`.
    """

    concurrency: int = 8
    intra_applier_concurrency: int = 1
    batch_size: int | None = None
    checkpoint_size: int | None = None
    min_checkpoint_size: int | None = None
    max_checkpoint_size: int | None = None
    checkpoint_interval: float = 10.0
    task_size: int | None = None
    task_shuffle_diversity: int | None = None
    shard_size: int | None = None
    commit_granularity: int | None = None
    task_memory_bytes: int = DEFAULT_TASK_MEMORY

    @property
    def batch_bytes(self) -> int:
        return batch_bytes(self.task_memory_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.task_memory_bytes)


@dataclass(frozen=True)
class CodeRef:
    """How a worker loads a UDF.

    Args:
        import_path: ``module:name``; None if the caller's process defined the function and sends it pickled.
        zip: name of the code archive beside the plan; None if the module is installed on the workers.
        sha256: digest of the archive; "" without an archive.
    """

    import_path: str | None
    zip: str | None = None
    sha256: str = ""


@dataclass(frozen=True)
class JobSpec:
    """What all tasks of a job need to know, besides their fragments; small, and free of credentials.

    Args:
        job_id: identifies the job in checkpoints, ledgers and commits.
        table: normalized URI of the table.
        table_name: its name in the database.
        column, field_id: the output column.
        udf: the UDF's definition, as JSON text.
        code: how to load the UDF.
        inputs: names of the input columns at the planned version.
        where: frozen filter, or None.
        version: the table version to read.
        tables: the table to read and the table to commit to, as planned on; one entry for a column.
        read_version: the version that the user requested; None: the newest.
        udf_name, udf_version: identity of the code, determined once by the plan.
        sizing: sizes of shards, tasks, batches, checkpoints and commits.
        ignore_checkpoints: do not reuse checkpoints of other jobs.
        continue_from: other UDF versions whose checkpoints the job reuses.
        agreement: hash of the output type and the declared deps; must be equal for versions in `continue_from`.
        rows: number of due rows of the job.
        makers: other versions whose values stay in the column and count as this version's.
        source: refresh only: the table to read; "" for a backfill.
        explode: refresh only: the list column whose elements become separate rows.
        plain_blobs: refresh only: whether staged files hold blobs as plain bytes, so that they can be read back.
        query: refresh only: the view's definition with the planned code versions, as JSON text.
        codes: refresh only: how to load the modules of its UDFs that travel with the job, each once.
    """

    job_id: str
    table: str
    table_name: str
    column: str
    field_id: int
    udf: str
    code: CodeRef
    inputs: tuple[str, ...]
    where: str | None
    version: int
    tables: tuple[PlannedTable, ...]
    read_version: int | None
    udf_name: str
    udf_version: str
    sizing: Sizing = field(default_factory=Sizing)
    ignore_checkpoints: bool = False
    continue_from: tuple[str, ...] = ()
    agreement: str = ""
    rows: int = 0
    makers: tuple[str, ...] = ()
    source: str = ""
    explode: str | None = None
    plain_blobs: bool = False
    query: str = ""
    codes: tuple[CodeRef, ...] = ()

    @cached_property
    def identity(self) -> WorkIdentity:
        # A job that ignores checkpoints adds its id to the filter in the key, so it finds only its own checkpoints.
        tag = f"{self.where or ''}\0only:{self.job_id}" if self.ignore_checkpoints else self.where
        if self.plain_blobs:
            tag = f"{tag or ''}\0plain blobs"
        return WorkIdentity(self.udf_name, self.udf_version, self.column, tag, self.table)

    def reuse_rules(self, *versions: str) -> ReuseRules:
        """Return which checkpoints the job reuses: its own version's and those of the given versions."""
        own = (self.identity.prefix, self.udf_version)
        others = tuple((replace(self.identity, version=version).prefix, version) for version in versions)
        return ReuseRules(self.job_id, (own, *others), self.agreement)

    @property
    def prefix(self) -> str:
        return self.identity.prefix

    @property
    def read(self) -> PlannedTable:
        """The table that is read."""
        return self.tables[0]

    @property
    def written(self) -> PlannedTable:
        """The table that is committed to."""
        return self.tables[-1]

    @property
    def target(self) -> str:
        """The view or the column that the job computes, for messages."""
        return self.table_name if self.source else f"{self.table_name}.{self.column}"

    def tried(self, work: FragmentWork) -> PriorFailures:
        """Return the rows of a fragment on which the UDF failed in earlier runs."""
        return prior_failures_of(work.known, self.udf_version)

    def key(self, work: FragmentWork) -> FragmentKey:
        return FragmentKey(self.prefix, *work.place)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> JobSpec:
        fields = dict(document)
        fields["code"] = CodeRef(**fields["code"])
        fields["sizing"] = Sizing(**fields["sizing"])
        fields["tables"] = tuple(PlannedTable(**table) for table in fields["tables"])
        fields["inputs"] = tuple(fields["inputs"])
        fields["continue_from"] = tuple(fields["continue_from"])
        fields["makers"] = tuple(fields["makers"])
        fields["codes"] = tuple(CodeRef(**code) for code in fields.get("codes", ()))
        return JobSpec(**fields)


@dataclass(frozen=True)
class ReasonCount:
    """Rows and fragments that share a reason."""

    reason: str
    fragments: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """What a backfill or a refresh would run, and why.

    Args:
        work: what all tasks have in common.
        shards: the fragments with due rows, grouped into shards.
        rows_total: live rows of the table at the planned version.
        reason_counts: number of fragments and rows for every reason, including those with nothing to do.
        rows_by_other_version: number of rows that hold the value of another UDF version, by version.
        learned: facts that the planner found out, for the next plan.
        notes: sentences for the user, for example why whole fragments are recomputed.
        swap: refresh only: the swap at the end.
        mismatches: fragments with a checkpoint that was computed from other data files than they have now.
    """

    work: JobSpec
    shards: tuple[Shard, ...]
    rows_total: int
    reason_counts: tuple[ReasonCount, ...]
    rows_by_other_version: tuple[tuple[str, int], ...] = ()
    learned: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    swap: SwapPlan | None = None
    mismatches: Mismatches = field(default_factory=Mismatches)

    @property
    def fragments(self) -> tuple[FragmentWork, ...]:
        """The fragments with due rows."""
        return tuple(work for shard in self.shards for work in shard.fragments)

    @property
    def rows_pending(self) -> int:
        """Number of rows that are selected and due, including rows in checkpoints."""
        return sum(shard.rows for shard in self.shards)

    @property
    def rows_skipped(self) -> int:
        """Number of live rows that are not due."""
        return self.rows_total - self.rows_pending

    @property
    def rows_to_run(self) -> int:
        """Most rows that the UDF will run on: due rows that no checkpoint holds."""
        return sum(min(work.rows, len(work.missing)) for work in self.fragments if not work.staged)

    @property
    def rows_held(self) -> tuple[int, int]:
        """Number of fragments with reusable checkpoints, and number of rows in these."""
        held = [work.rows if work.staged else work.rows - min(work.rows, len(work.missing)) for work in self.fragments]
        return sum(rows > 0 for rows in held), sum(held)

    @property
    def reasons(self) -> dict[str, int]:
        """Number of rows by the reason why they are due or not."""
        return {tally.reason: tally.rows for tally in self.reason_counts if tally.rows}

    def with_work(self, **changes: Any) -> Plan:
        return replace(self, work=replace(self.work, **changes))

    def __str__(self) -> str:

        return explain(self)


def explain(plan: Plan) -> str:
    """Say what would run, what would not, and why; a few lines for a table of any size."""
    work = plan.work
    where = f" where {work.where}" if work.where else ""
    lines = [
        f"Refresh of view {work.target} to version {work.version} of its source"
        if plan.swap is not None
        else f"Backfill of {work.target} with {work.udf_name} (version {work.udf_version}){where}, "
        f"table version {work.version}",
        f"  {plan.rows_total:,} rows: {plan.rows_pending:,} pending, {plan.rows_skipped:,} with nothing to do",
    ]
    for tally in plan.reason_counts:
        lines.append(f"    {tally.rows:>14,} rows  {tally.fragments:>8,} fragments  {tally.reason}")
    if not plan.shards and plan.swap is not None and plan.swap.gone:
        lines.append("  Nothing to compute, no Spark; rows that are no longer in the query's result leave the view.")
    elif not plan.shards:
        lines.append("  Nothing to do: no Spark, no new version.")
    else:
        held = plan.rows_pending - plan.rows_to_run
        kept = f" ({held:,} rows come from checkpoints)" if held else ""
        lines.append(f"  {len(plan.fragments):,} fragments in {len(plan.shards)} shard(s){kept}")
        for fragment in plan.fragments[:_LISTED]:
            gaps = ", ".join(_span(a, b) for a, b in list(fragment.missing)[:4])
            more = " ..." if len(fragment.missing.starts) > 4 else ""
            lines.append(
                f"    fragment {fragment.id}: {fragment.status}, {fragment.reason}; rows missing: {gaps or '-'}{more}"
            )
        if len(plan.fragments) > _LISTED:
            lines.append(f"    and {len(plan.fragments) - _LISTED:,} more fragments")
    for version, rows in plan.rows_by_other_version:
        lines.append(f"  {rows:,} rows hold values of UDF version {version_label(version)}")
    lines.extend(f"  Note: {note}" for note in plan.notes)
    return "\n".join(lines)


def _span(start: int, end: int) -> str:
    """Format offsets ``[start, end)`` with an inclusive end."""
    return f"{start} to {end - 1}" if end - start > 1 else f"{start}"
