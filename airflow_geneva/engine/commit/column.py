"""Commit a shard's staged data files in groups, one Lance commit each, if they still fit the newest version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, TypeAlias

from airflow_geneva.engine.checkpoint.facts import STALE, Fact, append_ledger, filter_evaluated, load_state
from airflow_geneva.engine.checkpoint.keys import FragmentKey
from airflow_geneva.engine.checkpoint.provenance import ADOPTED, MOST_RUNS, Provenance, add_rows, prior_failures_of
from airflow_geneva.engine.checkpoint.records import StagedFragment, read_staged
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.outbox import JOB_PROPERTY, ROWS_PROPERTY
from airflow_geneva.engine.lance_io.conflicts import commit_tries, is_undecided
from airflow_geneva.engine.lance_io.data_file import LanceFile
from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    FragmentFiles,
    columns_in,
    fields_present,
    live_offsets,
    read_fragments,
    replace_columns,
)
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.staged_files import StagedFiles
from airflow_geneva.engine.plan.model import ColumnSpec
from airflow_geneva.engine.plan.moved_rows import (
    CHANGED,
    MOVED,
    NO_ROW_IDS,
    LostRows,
    count_unchanged,
    find_moved_rows,
    has_inputs,
)
from airflow_geneva.engine.plan.reusable_checkpoints import is_staged_complete, staged_fits
from airflow_geneva.engine.plan.saved_plan import SavedPlan
from airflow_geneva.engine.plan.shard import FRAGMENTS_PER_COMMIT, FragmentTask, Shard, fragments_per_commit
from airflow_geneva.engine.results import ShardResult
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.files import in_threads
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.commit")

# Other writers may move rows again while earlier moved rows are committed.
_MOST_ROUNDS = 8
_MOST_WARNED = 5
_DONE = "committed already"
_REMOVED = "its committed data file was removed"
_DROPPED = "the column was dropped"
_OTHER_INPUTS = "an input column was dropped, or its nested fields are others now"
_UPDATED = "updated meanwhile"
_REPLACED = "another writer replaced its inputs during the commit"
_NOT_HELD = "their computed values are gone from the checkpoints"
SECONDS_A_COMMIT = 10.0
"""Target time between two commits of a computed shard; longer if the shard would need too many commits."""


@dataclass(frozen=True)
class Candidate:
    """A staged fragment that a commit may make visible.

    Args:
        source: the version that contains the fragment, which is not always the planned one.
        hidden: computed rows that a commit of the file does not make visible, because they are no longer there.
    """

    task: FragmentTask
    staged: StagedFragment
    source: lance.LanceDataset = field(repr=False, compare=False)
    hidden: Ranges = field(default_factory=Ranges.empty, compare=False)

    @property
    def rows(self) -> Ranges:
        """The computed rows that were due and become visible."""
        return (self.staged.computed & self.task.due) - self.hidden

    def without_hidden(self) -> Candidate:
        """Return the candidate without its hidden rows, which other candidates make visible."""
        due = self.task.due - self.hidden
        return replace(self, task=replace(self.task, due=due, rows=len(due & self.staged.computed)))

    def lost(self, rows: Ranges, why: str) -> LostRows:
        return LostRows(self.source, self.task, self.staged, rows, why)

    def outcome(self, version: str) -> dict[Provenance, Ranges]:
        """Return the provenance of the fragment's rows after the commit of its file, computed by a UDF version."""
        staged = self.staged
        found = {provenance: rows - staged.computed for provenance, rows in self.task.kept}
        add_rows(found, [(Provenance(version, maker), rows) for maker, rows in staged.taken])
        add_rows(found, [(Provenance(version, failures=runs), rows) for runs, rows in staged.failures.rows])
        apart = Ranges.union([staged.failures.all, *(rows for _, rows in staged.taken)])
        add_rows(found, [(Provenance(version), staged.computed - apart)])
        return found

    def only_failed_again(self, version: str) -> bool:
        """Whether the UDF failed on every row again that it ran on, so that the values are NULL already."""
        failed = Ranges.union(rows for _, rows in prior_failures_of(self.task.known, version))
        computed = self.staged.computed
        return (
            bool(self.task.files.output and computed)
            and computed == self.staged.failures.all
            and failed.contains(computed)
        )

    @property
    def failed(self) -> Ranges:
        """The due rows on which the UDF failed."""
        return (self.staged.failures.all & self.task.due) - self.hidden

    def output(self, field_id: int) -> tuple[tuple[int, int, str], ...]:
        return ((field_id, -1, self.staged.file),)


class Restage(Protocol):
    def __call__(self, dataset: lance.LanceDataset, task: FragmentTask) -> Candidate:
        """Stage a fragment of a version: its due rows in checkpoints, and the existing values of its other rows."""


@dataclass(frozen=True)
class Verification:
    """The candidates that fit a version, those that an earlier attempt committed, and the reasons to leave others.

    Args:
        manifest: the candidates' fragments in that version.
        output: field ids of the column in it; empty if it was dropped.
        removed: committed candidates whose data file another process removed.
    """

    dataset: lance.LanceDataset
    manifest: Mapping[int, FragmentFiles]
    output: tuple[int, ...]
    fitting: tuple[Candidate, ...]
    done: tuple[Candidate, ...]
    removed: tuple[Candidate, ...]
    left: tuple[tuple[Candidate, str], ...]

    @property
    def lost(self) -> list[LostRows]:
        """The computed rows that a commit of the fitting candidates does not make visible in their planned fragment."""
        there = (*self.fitting, *self.done)
        hidden = [c.lost(c.hidden & c.task.due, _UPDATED) for c in there if c.hidden & c.task.due]
        return [*hidden, *(candidate.lost(candidate.rows, why) for candidate, why in self.left)]

    @property
    def candidates(self) -> list[Candidate]:
        return [*self.done, *self.removed, *self.fitting, *(candidate for candidate, _ in self.left)]


Check: TypeAlias = Callable[[Verification], bool]
"""Checks the values that a commit of the fitting candidates makes visible, and raises to stop the commit. Returns
whether any of the values had not been checked before."""


def verify(
    dataset: lance.LanceDataset, columns: Columns, candidates: Sequence[Candidate], data: StagedFiles
) -> Verification:
    """Compare every candidate with the newest version, because Lance does not check a ``DataReplacement``."""
    output = fields_present(dataset, columns.output)
    same_inputs = all(columns_in(dataset, columns.inputs_text, columns.output)[1])
    manifest = read_fragments(dataset, columns, {candidate.task.id for candidate in candidates})

    def judge(candidate: Candidate) -> tuple[Candidate, str]:
        # Rows hidden at an earlier version are searched again if their fragment has been removed since.
        candidate, now = replace(candidate, hidden=Ranges.empty()), manifest.get(candidate.task.id)
        if now is not None and _replaces_a_removed_file(dataset, now, candidate, output):
            candidate = replace(candidate, staged=replace(candidate.staged, output_files=now.output))
        reason = _reason(dataset, now, candidate, output, data) if same_inputs else _OTHER_INPUTS
        if now is None or reason not in ("", _DONE) or now.deletion == candidate.task.files.deletion:
            return candidate, reason
        return replace(candidate, hidden=candidate.staged.computed - live_offsets(dataset, now)), reason

    judged = in_threads(judge, candidates)
    fitting, done, removed = (tuple(c for c, found in judged if found == reason) for reason in ("", _DONE, _REMOVED))
    left = tuple((c, reason) for c, reason in judged if reason not in ("", _DONE, _REMOVED))
    return Verification(dataset, manifest, output, fitting, done, removed, left)


def _replaces_a_removed_file(
    dataset: lance.LanceDataset, now: FragmentFiles, candidate: Candidate, output: tuple[int, ...]
) -> bool:
    """Whether the column has a file that is neither the planned one nor the candidate's, and does not exist.

    An earlier process of the job has committed it, was killed, and could not see that it was removed meanwhile.
    """
    expected = ((), candidate.staged.output_files, candidate.output(output[0]) if output else ())
    return now.output not in expected and not any(LanceFile.of_table(dataset, path).exists() for *_, path in now.output)


def _reason(
    dataset: lance.LanceDataset,
    now: FragmentFiles | None,
    candidate: Candidate,
    output_fields: tuple[int, ...],
    data: StagedFiles,
) -> str:
    planned, staged = candidate.task.files, candidate.staged
    if not output_fields:
        return _DROPPED
    if now is None:
        return "the fragment is gone (compacted, updated or deleted)"
    if now.output == candidate.output(output_fields[0]) and now.inputs == planned.inputs:
        return _DONE if is_staged_complete(dataset, staged, data) else _REMOVED
    if now.inputs != planned.inputs or now.physical_rows != planned.physical_rows:
        return "its inputs were replaced"
    if now.output != staged.output_files:
        return "another writer wrote the column"
    live = live_offsets(dataset, now)
    if not staged_fits(
        dataset, staged, now, live, candidate.task.due & live, output_fields, staged.filter_evaluated, data
    ):
        return "its staged file no longer fits (rows were restored, the column was replaced, or the file is missing)"
    return ""


@dataclass
class ShardCommitter:
    """Commits the staged fragments of one shard, and the fragments that replaced them since.

    Args:
        planned: the table, with the column's planned name.
        data: the staged files, with their known properties.
        restage: stages a fragment again, with the due rows in checkpoints and the existing values of other rows.
        opened: the newest version, if it was just opened, for the first verification.
        newest: the version of the last commit; None if a later one may have landed.
        unsure: whether a commit may have landed that no answer told of.
        versions: the table versions that it has written.
    """

    location: TableLocation
    saved: SavedPlan
    spec: ColumnSpec
    planned: lance.LanceDataset
    data: StagedFiles
    restage: Restage
    opened: lance.LanceDataset | None = None
    newest: lance.LanceDataset | None = None
    unsure: bool = False
    versions: list[int] = field(default_factory=list)
    _done: list[Candidate] = field(default_factory=list)
    _lost: list[LostRows] = field(default_factory=list)
    _removed: list[Candidate] = field(default_factory=list)
    _left: list[tuple[int, int, str]] = field(default_factory=list)
    _lacking: list[Candidate] = field(default_factory=list)
    _earlier: int = 0
    _by_others: int = 0
    _failed: int = 0
    _deleted: int = 0
    _warned: int = 0

    @cached_property
    def columns(self) -> Columns:
        """The relevant columns by field id, as planned."""
        return self.spec.columns_at(self.planned)

    @cached_property
    def fact_columns(self) -> Columns:
        """The columns that facts are about."""
        return self.spec.fact_columns_at(self.planned)

    def commit(
        self,
        shard: Shard,
        candidates: Sequence[Candidate],
        missing: Sequence[tuple[int, int, str]],
        on_group: Callable[[int, int, tuple[int, ...]], None] = lambda fragments, rows, versions: None,
        check: Check | None = None,
        at_once: bool = False,
    ) -> ShardResult:
        """Commit the candidates that fit; report the rows of the others, and of fragments without a staged file.

        ``on_group`` is called after every Lance commit with the number of visible fragments, the number of visible due
        rows that did not fail, and the table versions written. With ``at_once`` there is one Lance commit.

        Raises:
            CommitConflict: other writers changed the table at every retry.
            TableRemade: the table was dropped and created again; a commit to the new table is undone.
        """
        self._left.extend(missing)
        self._lacking = [candidate for candidate in candidates if len(candidate.staged.missing)]
        for rounds in range(_MOST_ROUNDS + 1):
            left = self._without_repeated_failures(candidates)
            asked = len(candidates) if at_once else self.spec.sizing.commit_granularity
            least = size = asked or fragments_per_commit(len(shard.fragments), len(self.saved.shards))
            while left:
                group, left = left[:size], left[size:]
                began = time.monotonic()
                self._commit_group(group, check, at_once)
                rows_done = sum(len(done.rows) - len(done.failed) for done in self._done)
                on_group(len(self._done), rows_done, tuple(self.versions))
                if asked is None:
                    spent = max(time.monotonic() - began, 1e-3)
                    size = max(least, round(len(group) * SECONDS_A_COMMIT / spent))
            if rounds == _MOST_ROUNDS or not (self._lost or self._removed):
                break
            candidates = [*self._rebuild(), *self._follow(self.location.open())]
            if at_once:
                # All values are checked together, including those that are already visible.
                candidates, self._done = [*self._done, *candidates], []
        return self._result(shard)

    def _result(self, shard: Shard) -> ShardResult:
        """Return the result of a shard's rows after the last commit."""
        for lost in self._lost:
            self._leave(lost.task.id, len(lost.rows), lost.why)
        rows_missing = self._count_missing()
        if self._warned > _MOST_WARNED:
            logger.warning("Left for the next run: %s.", counted(self._warned - _MOST_WARNED, "more fragment"))
        ours = sum(min(self._computed_by_this_job(done.staged), len(done.rows)) for done in self._done)
        # An earlier job may have computed rows that were deleted before this job was planned.
        everyone = sum(len(candidate.rows) for candidate in self._done)
        failed = sum(len(candidate.failed) for candidate in self._done)
        return ShardResult(
            shard=shard.index,
            fingerprint=self.saved.fingerprint,
            rows_computed=ours - failed + self._earlier,
            rows_reused=everyone - ours + self._by_others,
            rows_failed=failed + self._failed,
            rows_taken=sum(len(rows) for c in self._done for _, rows in c.staged.taken),
            rows_left=sum(count for _, count, _ in self._left),
            rows_deleted=self._deleted,
            fragments=len(self._done),
            versions=tuple(self.versions),
            left_reasons=tuple((fragment, why) for fragment, _, why in self._left),
            rows_missing=rows_missing,
        )

    def _count_missing(self) -> int:
        """Count the rows whose key a load's source lacks, wherever they are now; leave those with another key."""
        if not self._lacking:
            return 0
        newest = self.location.open() if self.newest is None else self.newest
        there = read_fragments(newest, self.columns, {candidate.task.id for candidate in self._lacking})
        rows, moved = 0, list[LostRows]()
        for candidate in self._lacking:
            staged = replace(candidate.staged, runs=candidate.staged.missing)
            gone, now = staged.computed, there.get(candidate.task.id)
            in_place = now is not None and has_inputs(now, candidate.task.files)
            if now is not None and in_place:
                gone = gone - live_offsets(newest, now)
            rows += len(staged.computed) - len(gone)
            if gone and newest.has_stable_row_ids:
                moved.append(LostRows(candidate.source, candidate.task, staged, gone, _UPDATED))
            elif not in_place:
                self._leave(candidate.task.id, len(gone), NO_ROW_IDS)
        for one in moved:
            same, changed = count_unchanged(newest, self.columns, one)
            rows += same
            self._leave(one.task.id, changed, CHANGED)
        return rows

    def _computed_by_this_job(self, staged: StagedFragment) -> int:
        return sum(rows for job, rows in staged.by_job if job == self.spec.job_id)

    def _rebuild(self) -> list[Candidate]:
        """Stage fragments again whose committed data file was removed, with the values in checkpoints."""
        removed, self._removed = self._removed, []
        candidates: list[Candidate] = []
        for candidate in removed:
            logger.warning("Another process removed data file %s, which is written again.", candidate.staged.file)
            again = self.restage(candidate.source, candidate.task)
            staged = replace(again.staged, output_files=candidate.output(self.spec.field_id))
            self._leave(candidate.task.id, len(candidate.rows) - again.task.rows, _NOT_HELD)
            candidates.append(replace(again, staged=staged))
        return candidates

    def _follow(self, dataset: lance.LanceDataset) -> list[Candidate]:
        """Find the fragments of a version that hold the lost rows now, and stage these fragments."""
        lost, self._lost = self._lost, []
        state = load_state(self.location.checkpoints, self.columns.output[0])
        found = find_moved_rows(dataset, self.columns, self.spec, state, lost)
        for files, there, of in found.computed:
            self._add_committed(files, there, of)
        self._failed += found.failed
        self._deleted += found.deleted
        for fragment, rows, why in found.left:
            self._leave(fragment, rows, why)
        candidates: list[Candidate] = []
        for task in found.tasks.values():
            candidate = self.restage(dataset, task)
            if candidate.task.rows:
                candidates.append(candidate)
            self._leave(task.id, task.rows - candidate.task.rows, _NOT_HELD)
        return candidates

    def _add_committed(self, files: FragmentFiles, rows: Ranges, of: LostRows) -> None:
        """Count rows that an earlier attempt or another job has already made visible.

        Another shard may have written the fragment since, including their values.
        """
        key = FragmentKey(self.spec.prefix, files.srcfiles, files.id)
        staged = read_staged(CheckpointStore(self.location.checkpoints), str(key))
        if staged is not None and files.output == ((self.spec.field_id, -1, staged.file),):
            task = FragmentTask(files, MOVED, rows, Ranges.empty(), len(rows))
            self._done.append(Candidate(task, staged, self.planned))
            rows = rows - staged.computed
        ours = min(self._computed_by_this_job(of.staged), len(rows))
        self._earlier += ours
        self._by_others += len(rows) - ours

    def _without_repeated_failures(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Record fragments that need no commit, because their values stay: known failures failed again, or a load found
        equal values."""
        version = self.spec.udf_version
        repeated = [c for c in candidates if c.staged.leaves_unchanged or c.only_failed_again(version)]
        facts = [
            self._fact(files, files.signature, p.kind, rows, self.spec.version)
            for c, files in zip(repeated, self._fact_files(self.planned, [c.task.files for c in repeated]), strict=True)
            for p, rows in c.outcome(version).items()
            # Facts about a fragment replace facts about its ancestors.
            if rows
            and (c.task.reason == MOVED or c.staged.leaves_unchanged or (p.failures and rows & c.staged.failures.all))
        ]
        self._learn(facts)
        self._done.extend(repeated)
        return [candidate for candidate in candidates if candidate not in repeated]

    def _fact_files(self, dataset: lance.LanceDataset, files: Sequence[FragmentFiles]) -> Sequence[FragmentFiles]:
        """Return fragments with the data files of the columns that facts are about."""
        if self.fact_columns == self.columns or not self.spec.keeps_facts:
            return files
        found = read_fragments(dataset, self.fact_columns, {one.id for one in files})
        return [found[one.id] for one in files]

    def _learn(self, facts: Sequence[Fact]) -> None:
        if self.spec.keeps_facts:
            append_ledger(self.location.checkpoints, self.spec.field_id, self.spec.job_id, facts)

    def _verify(self, group: Sequence[Candidate]) -> Verification:
        opened, self.opened = self.opened, None
        dataset = self.location.open() if opened is None else opened
        self.data.look_if_old(dataset, [candidate.staged.file for candidate in group])
        verdict = verify(dataset, self.columns, group, self.data)
        if verdict.done:
            # Another process has committed them, or no answer told of it. A file may have been removed right before.
            self.data.look_again(dataset, [candidate.staged.file for candidate in verdict.done])
            verdict = verify(dataset, self.columns, group, self.data)
        if verdict.left:
            self.spec.written.assert_same_table(self.location.options)
        return verdict

    def _follow_before(self, verdict: Verification) -> Verification:
        """Stage moved rows again before a commit of all values; leave rows that keep moving."""
        for _ in range(_MOST_ROUNDS):
            if not verdict.lost:
                break
            self._lost = verdict.lost
            there = [*verdict.removed, *(c.without_hidden() for c in (*verdict.done, *verdict.fitting))]
            verdict = self._verify([*there, *self._follow(verdict.dataset)])
        return verdict

    def _commit_group(self, group: Sequence[Candidate], check: Check | None, at_once: bool = False) -> None:
        for _ in commit_tries(f"table {self.spec.table_name!r}", f"commit column {self.spec.column!r}"):
            verdict = self._verify(group)
            verdict = self._follow_before(verdict) if at_once else verdict
            if check is not None and check(verdict):
                # A check can take minutes, and Lance does not detect every change since the version that it commits on.
                verdict = self._verify(verdict.candidates)
                verdict = self._follow_before(verdict) if at_once else verdict
                check(verdict)
            group = verdict.candidates
            if not verdict.fitting:
                self._learn(self._stale_facts(verdict))
            if not verdict.fitting or self._replace(verdict):
                self._keep(replace(verdict, fitting=()))
                return
            if not at_once and self.spec.sizing.commit_granularity is None and len(group) > FRAGMENTS_PER_COMMIT:
                # A commit with fewer fragments conflicts less often.
                half = -(-len(group) // 2)
                self._commit_group(group[:half], check)
                self._commit_group(group[half:], check)
                return

    def _replace(self, verdict: Verification) -> bool:
        """Try to commit at the verified version; return False if it has to be verified again."""
        import lance

        dataset = verdict.dataset
        names = [candidate.staged.file for candidate in verdict.fitting]

        def transaction() -> lance.Transaction:
            named = zip(verdict.fitting, self.data.data_files(self.planned, names), strict=True)
            files = {candidate.task.id: file for candidate, file in named}
            rows = sum(len(candidate.rows) - len(candidate.failed) for candidate in verdict.fitting)
            return lance.Transaction(
                read_version=dataset.version,
                operation=replace_columns(dataset, files),
                transaction_properties={JOB_PROPERTY: self.spec.job_id, ROWS_PROPERTY: str(rows)},
            )

        try:
            committed = self.spec.written.commit_transaction(
                self.location.options,
                transaction,
                before="commit.before",
                after="commit.after",
                # If the commit fails, the facts name files outside the table and match nothing.
                first=partial(self._learn, self._facts(verdict)),
                then=lambda committed: self.data.look_again(committed, names),
            )
        except FileNotFoundError:
            return False
        except OSError as error:
            if is_undecided(error):
                self.newest, self.unsure = None, True
                return False
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"Cannot commit column {self.spec.column!r} to {dataset.uri}: {error}. Check space and permissions, "
                "then run again: nothing is lost."
            ) from error
        self.newest = committed
        self.versions.append(committed.version)
        self._verify_committed(committed, verdict)
        return True

    def _verify_committed(self, committed: lance.LanceDataset, verdict: Verification) -> None:
        """Check for changes that Lance does not report as conflicts: replaced inputs, deleted rows, removed files."""
        found = verify(committed, self.columns, verdict.fitting, self.data)
        others = (*found.fitting, *(candidate for candidate, _ in found.left))
        found = replace(found, fitting=(), left=tuple((candidate, _REPLACED) for candidate in others))
        self._learn(self._stale_facts(found))
        self._keep(found)

    def _stale_facts(self, found: Verification) -> list[Fact]:
        """Return the facts that values of candidates that were left are there, of other inputs than the version has.

        Their commit landed right after the inputs were replaced, and perhaps no answer told of it.
        """
        # No fact is about these inputs, and the values are no other writer's.
        now = ((found.manifest.get(one.task.id), one.output(self.spec.field_id)) for one, _ in found.left)
        ours = self._fact_files(found.dataset, [files for files, output in now if files and files.output == output])
        at = int(found.dataset.version)
        return [Fact(files.signature, STALE, None, at, None, self._inputs_text) for files in ours]

    def _keep(self, verdict: Verification) -> None:
        """Record the candidates that leave this commit: done, removed or lost."""
        self._done.extend(verdict.done)
        self._removed.extend(verdict.removed)
        self._lost.extend(verdict.lost)

    def _leave(self, fragment: int, rows: int, why: str) -> None:
        """Leave rows of a fragment to the next run."""
        if rows:
            self._warned += 1
            if self._warned <= _MOST_WARNED:
                logger.warning("Fragment %s is left for the next run: %s.", fragment, why)
            self._left.append((fragment, rows, why))

    def _fact(
        self, files: FragmentFiles, signature: str, kind: str, rows: Ranges, at: int, under: str | None = None
    ) -> Fact:
        every = None if len(rows) == files.physical_rows else rows
        return Fact(signature, kind, every, at, under, self._inputs_text)

    @property
    def _inputs_text(self) -> str:
        return self.fact_columns.inputs_text

    def _facts(self, verdict: Verification) -> list[Fact]:
        if not self.spec.keeps_facts:
            return []
        facts = self._stale_facts(verdict)
        version = int(verdict.dataset.version)
        files = self._fact_files(verdict.dataset, [verdict.manifest[one.task.id] for one in verdict.fitting])
        for candidate, now in zip(verdict.fitting, files, strict=True):
            output = candidate.output(self.spec.field_id)
            signature = now.signature_with(output)
            for provenance, rows in candidate.outcome(self.spec.udf_version).items():
                if rows:
                    under = _live_under(candidate, provenance, rows)
                    facts.append(self._fact(now, signature, provenance.kind, rows, version, under))
            if stale := candidate.task.stale - candidate.staged.computed:
                facts.append(self._fact(now, signature, STALE, stale, version))
            if self.spec.where is not None:
                kind = filter_evaluated(self.spec.filter_hash, self.spec.udf_version)
                seen = candidate.staged.filter_evaluated - candidate.staged.failures.all
                # Use the planned files: another writer may have replaced the filter's columns since.
                signature = candidate.task.files.where_signature(output)
                facts.append(Fact(signature, kind, None if len(seen) == now.physical_rows else seen, version))
        return facts


def _live_under(candidate: Candidate, provenance: Provenance, rows: Ranges) -> str | None:
    """Return the deletion file under which these rows, and those that failed for good or were adopted, are all live."""
    if provenance.failures or provenance.made_by == ADOPTED:
        return None
    version = provenance.version
    beside = (Provenance(version, failures=MOST_RUNS), Provenance(version, ADOPTED))
    outcome = candidate.outcome(version)
    settled = Ranges.union([rows, *(outcome.get(found, Ranges.empty()) for found in beside)])
    return candidate.staged.deletion if settled.contains(candidate.staged.live) else None
