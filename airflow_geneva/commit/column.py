"""Commit a shard's staged data files, a group of fragments per Lance commit, if they still fit the newest version."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from airflow_geneva.checkpoint.facts import Fact, append_ledger, load_state, looked_at
from airflow_geneva.checkpoint.provenance import MOST_RUNS, Provenance, add_rows, prior_failures_of
from airflow_geneva.checkpoint.records import StagedFragment, decode_runs
from airflow_geneva.display import counted
from airflow_geneva.errors import StorageError
from airflow_geneva.job.result import ShardResult
from airflow_geneva.lance_io.conflicts import commit_tries, is_conflict
from airflow_geneva.lance_io.filters import where_columns
from airflow_geneva.lance_io.fragments import (
    Columns,
    FragmentFiles,
    columns_of,
    fields_present,
    live_offsets,
    read_fragments,
)
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import BackfillSpec
from airflow_geneva.plan.reusable_checkpoints import staged_fits
from airflow_geneva.plan.saved_plan import SavedPlan
from airflow_geneva.plan.shard import FRAGMENTS_PER_COMMIT, FragmentWork, Shard, fragments_per_commit
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.storage.uri import md5

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.commit")

# Where rows were deleted, Lance's time for a read of row ids grows with the square of their number.
_IDS_A_READ = 10_000
# About a second. Beyond this number, deleted rows count as left; the next plan finds out that they are gone.
_MOST_LOOKED_UP = 1_000_000
_MOST_WARNED = 5
_THREADS = 8
_DONE = "committed already"
SECONDS_A_COMMIT = 10.0
"""Target time between two commits of a computed shard; longer if the shard would need too many commits."""


@dataclass(frozen=True)
class Candidate:
    """A staged fragment on its way into the table."""

    work: FragmentWork
    staged: StagedFragment

    def outcome(self, version: str) -> dict[Provenance, Ranges]:
        """Return the provenance of the fragment's rows after its file, which a UDF version computed, is committed."""
        staged = self.staged
        found = {provenance: rows - staged.computed for provenance, rows in self.work.kept}
        add_rows(found, [(Provenance(version, maker), rows) for maker, rows in staged.taken])
        add_rows(found, [(Provenance(version, failures=runs), rows) for runs, rows in staged.failures.rows])
        apart = Ranges.union([staged.failures.all, *(rows for _, rows in staged.taken)])
        add_rows(found, [(Provenance(version), staged.computed - apart)])
        return found

    def only_failed_again(self, version: str) -> bool:
        """Whether the UDF failed only on rows that it failed on before, so that their values are NULL already."""
        failed = Ranges.union(rows for _, rows in prior_failures_of(self.work.known, version))
        computed = self.staged.computed
        return (
            bool(self.work.files.output and computed)
            and computed == self.staged.failures.all
            and failed.contains(computed)
        )

    @property
    def failed(self) -> Ranges:
        """The due rows on which the UDF failed."""
        return self.staged.failures.all & self.work.due

    def output(self, field_id: int) -> tuple[tuple[int, int, str], ...]:
        return ((field_id, -1, self.staged.file),)


@dataclass(frozen=True)
class Verification:
    """Which candidates fit a version, which an earlier try has committed, and why others are left."""

    fitting: tuple[Candidate, ...]
    done: tuple[Candidate, ...]
    left: tuple[tuple[Candidate, str], ...]


def verify(
    dataset: lance.LanceDataset,
    manifest: Mapping[int, FragmentFiles],
    candidates: Iterable[Candidate],
    output_fields: tuple[int, ...],
) -> Verification:
    """Compare every candidate with the newest version, because Lance does not check a ``DataReplacement``."""

    def judge(candidate: Candidate) -> tuple[Candidate, str]:
        return candidate, _reason(dataset, manifest.get(candidate.work.id), candidate, output_fields)

    with ThreadPoolExecutor(_THREADS) as pool:
        judged = list(pool.map(judge, candidates))
    return Verification(
        tuple(c for c, reason in judged if reason == ""),
        tuple(c for c, reason in judged if reason == _DONE),
        tuple((c, reason) for c, reason in judged if reason not in ("", _DONE)),
    )


def _reason(
    dataset: lance.LanceDataset, now: FragmentFiles | None, candidate: Candidate, output_fields: tuple[int, ...]
) -> str:
    planned, staged = candidate.work.files, candidate.staged
    if now is None:
        return "the fragment is gone (compacted, updated or deleted)"
    if not output_fields:
        return "the column was dropped"
    if now.output == candidate.output(output_fields[0]) and now.inputs == planned.inputs:
        return _DONE
    if now.inputs != planned.inputs or now.physical_rows != planned.physical_rows:
        return "its inputs were replaced"
    if now.output != staged.output_files:
        return "another writer wrote the column"
    live = live_offsets(dataset, now)
    if not staged_fits(dataset, staged, now, live, candidate.work.due & live, output_fields, staged.looked_at):
        return "its staged file no longer fits (rows were restored, the column was replaced, or the file is missing)"
    return ""


@dataclass
class ShardCommitter:
    """Commits the staged fragments of one shard; `planned` is the table in which its column has the planned name."""

    location: TableLocation
    saved: SavedPlan
    work: BackfillSpec
    planned: lance.LanceDataset
    _done: list[Candidate] = field(default_factory=list)
    _left: list[tuple[int, int, str]] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _by_others: int = 0
    _gone: list[tuple[Candidate, Ranges]] = field(default_factory=list)
    _looked_up: int = 0
    _warned: int = 0

    @cached_property
    def columns(self) -> Columns:
        """The relevant columns by field id, as planned."""
        filtered = where_columns(self.work.where, self.planned.schema.names)
        return columns_of(self.planned, self.work.inputs, filtered, self.work.column)

    def commit(
        self,
        shard: Shard,
        candidates: Sequence[Candidate],
        missing: Sequence[tuple[int, int, str]],
        on_group: Callable[[int, int, tuple[int, ...]], None] = lambda fragments, rows, versions: None,
        check: Callable[[Sequence[Candidate]], None] | None = None,
        at_once: bool = False,
    ) -> ShardResult:
        """Commit the candidates that fit; report the rows of the others, and of fragments without a staged file.

        ``on_group`` is called after every Lance commit with the number of visible fragments, that of visible due rows
        without those that failed, and the table versions written. ``check`` is called before every Lance commit, with
        its fragments, and stops it by raising. With ``at_once`` there is one Lance commit.

        Raises:
            CommitConflict: other writers changed the table at every retry.
            TableRemade: the table was dropped and created again; a commit to the new table is undone.
        """
        self._left.extend(missing)
        left = self._without_repeated_failures(candidates)
        asked = len(candidates) if at_once else self.work.sizing.commit_granularity
        least = size = asked or fragments_per_commit(len(shard.fragments), len(self.saved.shards))
        while left:
            group, left = left[:size], left[size:]
            began = time.monotonic()
            if check is not None:
                check(group)
            self._commit_group(group, at_once)
            rows_done = sum(done.work.rows - len(done.failed) for done in self._done)
            on_group(len(self._done), rows_done, tuple(self._versions))
            if asked is None:
                spent = max(time.monotonic() - began, 1e-3)
                size = max(least, round(len(group) * SECONDS_A_COMMIT / spent))
        if self._warned > _MOST_WARNED:
            logger.warning("Left for the next run: %s.", counted(self._warned - _MOST_WARNED, "more fragment"))
        ours = sum(n for c in self._done for job, n in c.staged.by_job if job == self.work.job_id)
        # An earlier job may have computed rows that were deleted before this one was planned.
        everyone = sum(len(c.staged.computed & c.work.due) for c in self._done)
        failed = sum(len(candidate.failed) for candidate in self._done)
        # Rows that were deleted since the plan count as computed, whether or not their fragment still exists.
        for candidate, gone in self._gone:
            everyone += len(gone)
            ours += len(gone) if {job for job, _ in candidate.staged.by_job} == {self.work.job_id} else 0
            failed += len(candidate.staged.failures.all & gone)
        return ShardResult(
            shard=shard.index,
            fingerprint=self.saved.fingerprint,
            rows_computed=ours - failed,
            rows_reused=everyone - ours + self._by_others,
            rows_failed=failed,
            rows_taken=sum(len(rows) for c in self._done for _, rows in c.staged.taken),
            rows_left=sum(count for _, count, _ in self._left),
            fragments=len(self._done),
            versions=tuple(self._versions),
            left_reasons=tuple((fragment, why) for fragment, _, why in self._left),
        )

    def _without_repeated_failures(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Record fragments in which only known failures failed again: their values stay, so no commit is needed."""
        repeated = [candidate for candidate in candidates if candidate.only_failed_again(self.work.udf_version)]
        facts = [
            self._fact(c.work.files, c.work.files.signature, p.what, rows, self.work.version)
            for c in repeated
            for p, rows in c.outcome(self.work.udf_version).items()
            if rows and p.failures and rows & c.staged.failures.all
        ]
        self._learn(facts)
        self._done.extend(repeated)
        return [candidate for candidate in candidates if candidate not in repeated]

    def _learn(self, facts: Sequence[Fact]) -> None:
        append_ledger(self.location.checkpoints, self.work.field_id, self.work.job_id, facts)

    def _commit_group(self, group: Sequence[Candidate], at_once: bool = False) -> None:
        for _ in commit_tries(f"table {self.work.table_name!r}", f"commit column {self.work.column!r}"):
            dataset = self.location.open()
            output = fields_present(dataset, self.columns.output)
            manifest = read_fragments(dataset, self.columns, {c.work.id for c in group})
            verdict = verify(dataset, manifest, group, output)
            if verdict.left:
                self.work.written.look(self.location.options)
            if not verdict.fitting or self._replace(dataset, manifest, verdict, output):
                self._done.extend(verdict.done)
                by_others = self._computed_by_others(manifest, [candidate for candidate, _ in verdict.left])
                self._by_others += sum(candidate.work.rows for candidate in by_others)
                for candidate, why in verdict.left:
                    if candidate not in by_others:
                        self._leave(dataset, candidate, why)
                return
            if not at_once and self.work.sizing.commit_granularity is None and len(group) > FRAGMENTS_PER_COMMIT:
                # A commit with fewer fragments conflicts less often.
                half = -(-len(group) // 2)
                self._commit_group(group[:half])
                self._commit_group(group[half:])
                return

    def _computed_by_others(
        self, manifest: Mapping[int, FragmentFiles], left: Sequence[Candidate]
    ) -> list[Candidate]:  # fmt: skip
        """Return the candidates for which another job has committed values of the same UDF version meanwhile."""
        if not left:
            return []
        state = load_state(self.location.checkpoints, self.work.field_id)
        found = []
        for candidate in left:
            now = manifest.get(candidate.work.id)
            if now is not None and now.inputs == candidate.work.files.inputs:
                known = state.known(now.signature, now.physical_rows)
                rows = known.get(Provenance(self.work.udf_version), Ranges.empty())
                if rows.contains(candidate.staged.computed & candidate.work.due):
                    found.append(candidate)
        return found

    def _replace(
        self,
        dataset: lance.LanceDataset,
        manifest: dict[int, FragmentFiles],
        verdict: Verification,
        output: tuple[int, ...],
    ) -> bool:
        """Try to commit at the verified version; return False on a conflict."""
        import lance
        from lance.fragment import DataFile

        operation = lance.LanceOperation
        groups = [
            operation.DataReplacementGroup(c.work.id, DataFile.create(self.planned, c.staged.file))
            for c in verdict.fitting
        ]
        # Write the facts first: if the commit fails, they name files outside the table and match nothing.
        self._learn(self._facts(dataset, manifest, verdict))
        transaction = lance.Transaction(
            read_version=dataset.version,
            operation=operation.DataReplacement(groups),
            transaction_properties={"geneva.job_id": self.work.job_id},
        )
        try:
            committed = self.work.written.commit_transaction(
                self.location.options, transaction, before="commit.before", after="commit.after"
            )
        except OSError as error:
            if is_conflict(error):
                return False
            raise StorageError(
                f"Cannot commit column {self.work.column!r} to {dataset.uri}: {error}. Check space and permissions, "
                "then run again: nothing is lost."
            ) from error
        self._versions.append(committed.version)
        self._verify_committed(committed, verdict, output)
        return True

    def _verify_committed(self, committed: lance.LanceDataset, verdict: Verification, output: tuple[int, ...]) -> None:
        """Check the committed version: Lance reports no conflict when another writer replaced an input in place."""
        manifest = read_fragments(committed, self.columns, {c.work.id for c in verdict.fitting})
        for candidate in verdict.fitting:
            now = manifest.get(candidate.work.id)
            expected = candidate.work.files.signature_with(candidate.output(output[0]))
            if now is not None and now.signature == expected:
                self._done.append(candidate)
            else:
                self._leave(committed, candidate, "another writer replaced its inputs during the commit")

    def _leave(self, dataset: lance.LanceDataset, candidate: Candidate, why: str) -> None:
        """Leave a fragment for the next run, without its deleted rows, which no run can compute."""
        self._looked_up += candidate.work.rows
        gone = Ranges.empty()
        if self._looked_up <= _MOST_LOOKED_UP and fields_present(dataset, self.columns.output):
            gone = _deleted_rows(dataset, candidate)
        if gone:
            self._gone.append((candidate, gone))
        rows = candidate.work.rows - len(gone)
        if rows:
            self._warned += 1
            if self._warned <= _MOST_WARNED:
                logger.warning("Fragment %s is left for the next run: %s.", candidate.work.id, why)
            self._left.append((candidate.work.id, rows, why))

    def _fact(
        self, files: FragmentFiles, signature: str, what: str, rows: Ranges, at: int, under: str | None = None
    ) -> Fact:
        every = None if len(rows) == files.physical_rows else rows
        return Fact(signature, what, every, at, under, self.columns.inputs_text)

    def _facts(
        self, dataset: lance.LanceDataset, manifest: dict[int, FragmentFiles], verdict: Verification
    ) -> list[Fact]:
        facts: list[Fact] = []
        for candidate in verdict.fitting:
            now = manifest[candidate.work.id]
            output = candidate.output(self.work.field_id)
            signature = now.signature_with(output)
            for provenance, rows in candidate.outcome(self.work.udf_version).items():
                if rows:
                    under = _live_under(candidate, provenance, rows)
                    facts.append(self._fact(now, signature, provenance.what, rows, dataset.version, under))
            if self.work.where is not None:
                what = looked_at(md5(self.work.where), self.work.udf_version)
                seen = candidate.staged.looked_at - candidate.staged.failures.all
                # Use the planned files: another writer may have replaced the filter's columns since.
                signature = candidate.work.files.where_signature(output)
                facts.append(Fact(signature, what, None if len(seen) == now.physical_rows else seen, dataset.version))
        return facts


def _deleted_rows(dataset: lance.LanceDataset, candidate: Candidate) -> Ranges:
    """Physical offsets of a fragment's computed and due rows that the table no longer has."""
    if not dataset.has_stable_row_ids:
        return Ranges.empty()
    offsets, ids = decode_runs(candidate.staged.runs)
    gone = np.ones(len(ids), np.bool_)
    for at in range(0, len(ids), _IDS_A_READ):
        part = ids[at : at + _IDS_A_READ]
        alive = dataset._take_rows(part.tolist(), columns=["_rowid"]).column("_rowid").to_numpy()
        gone[at : at + len(part)] = ~np.isin(part, alive)
    return Ranges.from_offsets(offsets[gone]) & candidate.work.due


def _live_under(candidate: Candidate, provenance: Provenance, rows: Ranges) -> str | None:
    """Return the deletion file under which the rows, and those that failed in all runs, are all live rows."""
    if provenance.failures:
        return None
    given_up = Provenance(provenance.version, failures=MOST_RUNS)
    settled = rows | candidate.outcome(provenance.version).get(given_up, Ranges.empty())
    return candidate.staged.deletion if settled.contains(candidate.staged.live) else None
