"""A column as the target of a job: read its rows, find staged files that fit, lay files out, and commit them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.apply.isolation.runner import OpenMapper
from airflow_geneva.engine.apply.reader import fixed_width
from airflow_geneva.engine.checkpoint.facts import append_ledger, fold_ledgers, may_fold, seen
from airflow_geneva.engine.checkpoint.records import StagedFragment, encode_runs, merge_runs
from airflow_geneva.engine.checkpoint.reuse import BrokenFile, ReusableRows
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.commit.column import Candidate, ShardCommitter, Verification
from airflow_geneva.engine.counts import Counts
from airflow_geneva.engine.job.folder import APPLIED, COMMIT, COMMITTING, JobFolder
from airflow_geneva.engine.job.outbox import JOB_PROPERTY, find_commits
from airflow_geneva.engine.job.progress import ProgressReporter
from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    field_ids,
    fields_present,
    live_offsets,
    output_names,
    row_ids,
)
from airflow_geneva.engine.lance_io.history import commits_newest_first
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.model import ColumnSpec
from airflow_geneva.engine.plan.moved_rows import FILE_GONE
from airflow_geneva.engine.plan.reusable_checkpoints import ReusableColumn
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks, Shard
from airflow_geneva.engine.results import DONE, PARTIAL, BackfillResult, Checked, ShardResult
from airflow_geneva.engine.run.expectations import ValueChecks, stop_if_not_met, total, without_deleted
from airflow_geneva.engine.run.publisher import Publisher
from airflow_geneva.engine.run.units import (
    Computer,
    Target,
    all_staged,
    remove_broken,
    staged_or_restaged,
    stopped_at_cap,
)
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.definition import MIXED_VERSIONS_KEY
from airflow_geneva.engine.write.data_files import ColumnFileWriter, assemble
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance
    from typing_extensions import Self

logger = logging.getLogger("airflow_geneva.run")
_MIXED = "mixed:"
_NOT_STAGED = "its staged data file is gone or no longer fits"
_FRESH_SECONDS = 1.0
_NOT_COMPUTED = "not all of its rows are computed"


@dataclass(frozen=True)
class ColumnTarget(ReusableColumn, Target):
    """A column of a table, as all units of a backfill share it."""

    @classmethod
    def at(cls, location: TableLocation, spec: ColumnSpec, opened: lance.LanceDataset | None = None) -> Self:
        """Open the table; raise an error if it, or its planned version, is gone or was created again."""
        checkpoints = location.checkpoints
        job = JobFolder.of(checkpoints, spec.job_id).storage
        if opened is not None:
            return cls(opened, spec, CheckpointStore(checkpoints), job)
        try:
            source = location.open(spec.version)
        except InvalidInput as error:
            # If the whole table is unreachable or was created again, raise that error instead.
            location.open()
            spec.read.assert_same_table(location.options)
            raise InvalidInput(
                f"Version {spec.version} of table {spec.table_name!r}, on which column {spec.column!r} was planned, "
                "was cleaned up. Checkpoints are kept. Clear the plan task with its downstream tasks; outside of "
                "Airflow, run the backfill again."
            ) from error
        spec.read.check(source)
        return cls(source, spec, CheckpointStore(checkpoints), job)

    @cached_property
    def columns(self) -> Columns:
        """The columns that the job reads and writes, in the version that it reads."""
        return self.spec.columns_at(self.source)

    @property
    def output_width(self) -> float | None:
        return fixed_width(self.output.type(self.source.schema))

    def stage(self, fragment: FragmentTask, held: ReusableRows) -> StagedFragment:
        live, limit = live_offsets(self.source, fragment.files), self.spec.sizing.batch_bytes
        writer = self.open_writer(fragment)
        for part in assemble(
            self.source, self.store, fragment.files, live, self.output, held.pieces, limit
        ):  # fmt: skip
            writer.put(part)
        offsets, ids = row_ids(self.source, fragment.id)
        mask = held.computed.mask(offsets)
        runs = merge_runs([encode_runs(offsets[mask], ids[mask])])
        layout = self.layout(fragment, live, held.done & live) | {"taken": held.taken(self.spec.udf_version)}
        return self.record(fragment, writer, runs, held.by_job, (held.failed, ()), layout)

    @contextmanager
    def computing(self, udfs: Mapping[str, UDF], open_mapper: OpenMapper) -> Iterator[Computer]:
        with open_mapper(self.spec.column, self.spec.inputs) as mapper:
            yield mapper, self.spec.inputs

    def can_stream(self, fragment: FragmentTask, live: Ranges, due: Ranges) -> bool:
        return not fragment.files.output or (self.spec.where is None and due == live)

    def open_writer(self, fragment: FragmentTask) -> ColumnFileWriter:
        rows, limit = fragment.files.physical_rows, self.spec.sizing.batch_bytes
        return ColumnFileWriter(self.source, self._file_schema, self.output, rows, limit)

    @cached_property
    def _file_schema(self) -> pa.Schema:
        schema = self.source.schema
        return pa.schema([schema.field(name) for name in self.output.columns])

    def layout(self, fragment: FragmentTask, live: Ranges, filter_evaluated: Ranges) -> dict[str, Any]:
        return {
            "output_field_ids": self.output_ids,
            "output_files": fragment.files.output,
            "live": live,
            "filter_evaluated": filter_evaluated,
        }


@dataclass
class ColumnPublisher(Publisher):
    """Commits the shards of a backfill; with an expectation on the whole column, all at once in `finish`."""

    spec: ColumnSpec
    _written: set[int] = field(default_factory=set)
    _noted: set[int] = field(default_factory=set)
    _unsure: bool = False

    @cached_property
    def target(self) -> ColumnTarget:
        return replace(ColumnTarget.at(self.location, self.spec, *self.opened), written={})

    def _count_staged(self, shard: Shard) -> ShardResult:
        """Count the staged rows of a shard, which `finish` commits."""
        candidates, missing = self._staged(shard)
        due = sum(len(candidate.staged.computed & candidate.task.due) for candidate in candidates)
        failed = sum(len(candidate.failed) for candidate in candidates)
        jobs = [pair for candidate in candidates for pair in candidate.staged.by_job]
        ours = sum(rows for job, rows in jobs if job == self.spec.job_id)
        return ShardResult(
            shard.index,
            self.saved.fingerprint,
            rows_computed=max(ours - failed, 0),
            rows_reused=max(due - max(ours, failed), 0),
            rows_failed=failed,
            rows_left=sum(rows for _, rows, _ in missing),
            fragments=len(candidates),
            left_reasons=tuple((fragment, why) for fragment, _, why in missing),
            visible=False,
        )

    def commit(self, shard: Shard, parts: Sequence[Shard] = ()) -> ShardResult:
        """Check and commit the staged files of a shard, or of its parts; rows in a damaged file count as missing."""
        if not parts:
            self.uncomputed = []
            if self.spec.at_once:
                return self._count_staged(shard)
            parts = [shard]
        spec, target, checkpoints = self.spec, self.target, self.location.checkpoints
        while True:
            began = time.monotonic()
            opening = [] if checkpoints.local else [self.location.open, *self._beside_opening(shard)]
            staged, *opened = checkpoints.side_by_side(lambda: [self._staged(part) for part in parts], *opening)
            newest = opened[0] if opened and time.monotonic() - began < _FRESH_SECONDS else None
            candidates = [candidate for found, _ in staged for candidate in found]
            missing = [left for _, found in staged for left in found]
            reporter = self._reporter(shard, candidates)
            committer = ShardCommitter(
                self.location, self.saved, spec, target.source, target.data, self._restage, newest
            )
            judge = _Judge(self, shard)
            check = judge.check if judge.checks.expected else None
            try:
                result = committer.commit(shard, candidates, missing, reporter.set_committed, check, spec.at_once)
            except BrokenFile as broken:
                damaged = [one.task for one in candidates if one.staged.file == broken.source]
                remove_broken(target, broken, (str(spec.key(fragment)) for fragment in damaged))
                continue
            finally:
                self._written.update(committer.versions)
            if committer.unsure or committer.newest is not None:
                self.newest = committer.newest
            self._unsure |= committer.unsure
            self._forget(candidates)
            return result

    def _forget(self, candidates: Iterable[Candidate]) -> None:
        """Release what is known of staged files after their commit: a job may have very many of them."""
        for candidate in candidates:
            self.target.data.forget(candidate.staged.file)
            if self.target.written is not None:
                self.target.written.pop(str(self.spec.key(candidate.task)), None)

    def _reporter(self, shard: Shard, candidates: Sequence[Candidate]) -> ProgressReporter:
        """Return a reporter for the progress of a shard's commit."""
        folder, plan = self.folder, self.saved.fingerprint
        failed = sum(len(candidate.failed) for candidate in candidates)
        reporter = ProgressReporter(
            shard.rows,
            len(shard.fragments),
            lambda progress: folder.update_shard(plan, shard.index, committing=progress),
            rows_ready=sum(candidate.task.rows for candidate in candidates) - failed,
            rows_failed=failed,
            ready=len(candidates),
        )
        reporter.keep()
        return reporter

    def _beside_opening(self, shard: Shard) -> list[Callable[[], object]]:
        """Start to describe the first file that this process has staged; return the waits for checkpoint writes."""
        written, target = self.target.written or {}, self.target
        keys = (str(self.spec.key(fragment)) for fragment in shard.fragments) if written else ()
        if (first := next((written[key] for key in keys if key in written), None)) is not None:
            target.data.describe_ahead(target.source, first.file)
        waits: list[Callable[[], object]] = [write.result for write in self.write_behind]
        self.write_behind.clear()
        return waits

    def _staged(self, shard: Shard) -> tuple[list[Candidate], list[tuple[int, int, str]]]:
        """Return the staged fragments of a shard, and the others with their numbers of rows and the reasons."""
        target = self.target
        candidates: list[Candidate] = []
        missing: list[tuple[int, int, str]] = []
        capped = stopped_at_cap(self.folder, self.saved, shard.index)
        for fragment, index, staged in all_staged(target, list(shard.fragments)):
            if staged is not None:
                candidates.append(Candidate(fragment, staged, target.source))
                if target.written is not None:
                    target.written[str(self.spec.key(fragment))] = staged
            elif capped:
                part = _computed_part(target, fragment)
                candidates.extend([_stage_part(target, part)] if part.rows else ())
                missing.append((fragment.id, max(fragment.rows - part.rows, 0), capped))
            else:
                self.uncomputed.append((target.source, fragment))
                gone = index.staged_at(fragment.place) is not None
                missing.append((fragment.id, fragment.rows, _NOT_STAGED if gone else _NOT_COMPUTED))
        return candidates, missing

    def _commit_at_once(self) -> list[ShardResult]:
        """Check and commit all shards; the first result counts the rows of all shards."""
        job, count = self.target.job, len(self.saved.shards)
        shards = [self.saved.load_shard(job, index) for index in range(count)]
        whole = Shard(0, FragmentTasks(task for shard in shards for task in shard.fragments))
        others = [ShardResult(index, self.saved.fingerprint) for index in range(1, count)]
        return [self.commit(whole, shards), *others]

    def _restage(self, dataset: lance.LanceDataset, task: FragmentTask) -> Candidate:
        spec = replace(self.spec, version=int(dataset.version))
        target = replace(self.target, source=dataset, spec=spec)
        staged = target.staged(task, target.index(task), live_offsets(dataset, task.files))
        if staged is not None:
            return Candidate(task, staged, dataset)
        part = _computed_part(target, task)
        if part.rows < task.rows:
            self.uncomputed.append((dataset, task))
        return _stage_part(target, part)

    def finish(
        self, committed: Sequence[ShardResult], missing: Sequence[int], failed: bool
    ) -> tuple[BackfillResult, bool]:
        spec, checkpoints = self.spec, self.location.checkpoints
        if spec.at_once:
            if failed:
                return self.result(()), False
            committed = self._commit_at_once() if self.saved.shards else []
        if committed and spec.keeps_facts:
            before = self._newest()
            self.newest = record_mixed_versions(self.location, spec, before, committed, whole=not missing)
            self._noted = {int(self.newest.version)} - {int(before.version)}
        result = self.result(committed)
        if not {version for shard in committed for version in shard.versions} <= set(result.commits):
            spec.written.assert_same_table(self.location.options)
        # An earlier process may have committed a file that is gone, and died; without a mark the next plan looks.
        gone = any(why in (_NOT_STAGED, FILE_GONE) for shard in committed for _, why in shard.left_reasons)
        if result.commits and spec.keeps_facts and not gone:
            earlier, moved = _before_others_moved_rows(self._newest(), spec.version, result.commits)
            known = {result.version, *earlier}
            marks = [seen(version, bool(moved) and version > moved) for version in sorted(known)]
            self.post_commit = [partial(append_ledger, checkpoints, spec.field_id, spec.job_id, marks)]
        if not spec.keeps_facts or not may_fold(None if len(result.commits) > 1 else self.saved.ledgers):
            return result, False
        for write in self.post_commit:
            write()
        self.post_commit = []
        return result, fold_ledgers(checkpoints, spec.field_id)

    def open_for_finish(self) -> None:
        self._newest()

    def _newest(self) -> lance.LanceDataset:
        """Return the version of this process's last commit, or else the newest one, opened once."""
        self.newest = self.location.open() if self.newest is None else self.newest
        return self.newest

    def _commits(self, results: Iterable[ShardResult | None]) -> tuple[int, ...]:
        """Return the versions that the job wrote.

        This process knows them if no other process has worked on the job, and the store told what each commit did.
        """
        spec, there = self.spec, list(results)
        if not there:
            return ()
        if self.newest is not None and None not in there and self.folder.alone and not self._unsure:
            return tuple(sorted(self._written | self._noted))
        return tuple(find_commits(self._newest(), spec.version, [spec.job_id]))

    def result(self, committed: Iterable[ShardResult]) -> BackfillResult:
        spec, saved = self.spec, self.saved
        there = {result.shard: result for result in committed}
        results = [there.get(index) or self._begun(index) for index in range(len(saved.shards))]
        counts = sum(results, Counts())
        reasons = sorted({reason for result in results for _, reason in result.left_reasons})
        capped = (spec.cap_note,) if spec.rows_beyond else ()
        missing = sum(result.rows_missing for result in results)
        skipped = saved.rows_skipped + self._skipped(results)
        commits = self._commits(there.get(index) for index in range(len(saved.shards)))
        return BackfillResult(
            job_id=spec.job_id,
            state=PARTIAL if counts.rows_left or spec.rows_beyond else DONE,
            **(counts + Counts(rows_skipped=skipped, rows_left=spec.rows_beyond)).counts(),
            version=max(commits, default=spec.version),
            from_version=spec.version,
            commits=commits,
            rows_missing=missing,
            notes=(*saved.notes, *capped, *(f"left for the next run: {reason}" for reason in reasons)),
        )

    def _skipped(self, results: Sequence[ShardResult]) -> int:
        """Return the number of planned rows that turned out not to be due."""
        return sum(result.rows_deleted for result in results)

    def _begun(self, shard: int) -> ShardResult:
        """Return the result of a shard whose commit did not end, with the rows that it has made visible."""
        folder, plan = self.folder, self.saved.fingerprint
        status, committing = folder.read_shard(plan, shard), folder.read_shard(plan, shard, COMMIT).get(COMMITTING)
        visible = int((committing or {}).get("rows_committed", 0))
        computed = min(visible, (status.get(APPLIED) or {}).get("rows_computed", 0))
        left = max(int(self.saved.shards[shard]["rows"]) - visible, 0)
        return ShardResult(shard, plan, rows_computed=computed, rows_reused=visible - computed, rows_left=left)


class _Judge:
    """Checks the values of a shard that a commit makes visible against the column's expectations."""

    def __init__(self, publisher: ColumnPublisher, shard: Shard) -> None:
        self.publisher = publisher
        self.shard = shard
        self.checks = ValueChecks(
            publisher.target.source, publisher.spec, publisher.location.database_uri, lambda: publisher.target.names
        )
        self.found: list[Checked] = []
        self.judged: dict[tuple[str, Any], Candidate] = {}

    def check(self, verdict: Verification) -> bool:
        spec, manifest = self.publisher.spec, verdict.manifest
        visible = {
            (one.staged.file, manifest[one.task.id].deletion if spec.at_once else ""): one for one in verdict.fitting
        }
        # An earlier attempt has made these visible, which cannot be undone.
        visible |= {(one.staged.file, "committed"): one for one in verdict.done}
        if spec.at_once and visible.keys() != self.judged.keys():
            # All values are judged together, so the results for other files no longer count.
            self.judged, self.found = {}, []
        fresh = {key: one for key, one in visible.items() if key not in self.judged}
        self.judged |= fresh
        live = (without_deleted(one.staged, verdict.dataset, manifest[one.task.id]) for one in fresh.values())
        new = self.checks.check(live)
        self.found = total([*self.found, *new])
        if spec.at_once:
            self.publisher.checked = tuple(self.found)
        elif new:
            folder, plan = self.publisher.folder, self.publisher.saved.fingerprint
            folder.update_shard(plan, self.shard.index, checked=[asdict(one) for one in self.found])
        if verdict.fitting:
            whole = spec.at_once and not verdict.done
            stop_if_not_met(new, "The column" if whole else "This part of the column")
        return bool(new)


def _before_others_moved_rows(
    dataset: lance.LanceDataset, planned: int, commits: Sequence[int]
) -> tuple[list[int], int]:
    """Return the commits of jobs since the planned version after which others could move rows with a committed value.

    At later versions, no fact describes such rows. A job that has died since may have committed them. Also return the
    first version at which others could move rows; 0 if there is none.
    """
    import lance

    found, last, first = list[int](), 0, 0
    if commits[-1] - planned == len(commits):
        return found, first
    for commit in reversed(list(commits_newest_first(dataset, commits[-1], planned + 1))):
        if commit.version in commits or JOB_PROPERTY in commit.properties:
            last = commit.version
        elif commit.gone or isinstance(
            commit.operation, (lance.LanceOperation.Update, lance.LanceOperation.DataReplacement)
        ):
            first = first or commit.version
            if last and last not in found:
                found.append(last)
    return found, first


def _computed_part(target: ColumnTarget, fragment: FragmentTask) -> FragmentTask:
    """Return the work for a fragment with only its computed rows."""
    live = live_offsets(target.source, fragment.files)
    held = target.held(fragment, target.index(fragment), fragment.due & live)
    return replace(fragment, due=held.done & live, missing=Ranges.empty(), rows=len(held.computed & live))


def _stage_part(target: ColumnTarget, part: FragmentTask) -> Candidate:
    """Stage computed rows of a fragment, with the existing values of its other rows."""
    while (staged := staged_or_restaged(target, part, target.index(part))) is None:
        part = _computed_part(target, part)  # a damaged checkpoint was removed
    return Candidate(part, staged, target.source)


def record_mixed_versions(
    location: TableLocation,
    spec: ColumnSpec,
    dataset: lance.LanceDataset,
    shards: Sequence[ShardResult],
    whole: bool,
) -> lance.LanceDataset:
    """Write, change or remove the note ``mixed:<version>,<version>``; usually there is nothing to change.

    The note is for readers of the table; the column's ledgers hold the version of each row. Return the table version
    with the note.
    """
    import lance

    makers = spec.mixed_versions(taken=any(shard.rows_taken for shard in shards))
    left = not whole or any(shard.rows_left for shard in shards)
    names = output_names(dataset, fields_present(dataset, (spec.field_id,)))
    if not names:
        return dataset
    noted = (dataset.schema.field(names[0]).metadata or {}).get(MIXED_VERSIONS_KEY.encode(), b"").decode()
    wanted = noted
    if makers:
        wanted = _MIXED + ",".join([*makers, spec.udf_version])
    elif not (left or spec.where or spec.read_version):
        wanted = ""
    if wanted == noted:
        return dataset
    operation = lance.LanceOperation
    update = operation.UpdateMap({MIXED_VERSIONS_KEY: wanted or None}, False)
    transaction = lance.Transaction(
        read_version=dataset.version,
        operation=operation.UpdateConfig(
            field_metadata_updates={field_ids(dataset, name)[0]: update for name in names}
        ),
        transaction_properties={JOB_PROPERTY: spec.job_id},
    )
    try:
        with engine_errors():
            options = location.options
            dataset = spec.written.commit_transaction(
                options, lambda: transaction, before="note.write", after="note.written"
            )
    except EngineError as error:
        logger.warning("Cannot write the note %r to the metadata of column %s: %s", wanted, spec.column, error)
    return dataset
