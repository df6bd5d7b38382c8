"""Find the rows of a fragment that hold a computed value, from facts, the table's history, and the values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.facts import STALE, ColumnState, Fact, seen
from airflow_geneva.engine.checkpoint.provenance import Provenance, add_rows, by_code_version
from airflow_geneva.engine.checkpoint.reuse import Ancestor, CheckpointIndex
from airflow_geneva.engine.job.outbox import JOB_PROPERTY
from airflow_geneva.engine.lance_io.data_file import LanceFile
from airflow_geneva.engine.lance_io.fragments import (
    OFFSET_BITS,
    Columns,
    FragmentFiles,
    TableFields,
    columns_in,
    live_offsets,
    output_names,
    row_ids,
)
from airflow_geneva.engine.lance_io.history import (
    NO_LINEAGE,
    Compaction,
    FragmentFilter,
    History,
    Lineage,
    Origin,
    Tracer,
    among,
    commits_newest_first,
    commits_of_version,
    replaced_files,
)
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none, version_exists
from airflow_geneva.engine.plan.reusable_checkpoints import Reusable
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks
from airflow_geneva.engine.plan.value_diff import ReferenceVersion, compare_rows, computed_by_value
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors, lacks_data_file
from airflow_geneva.engine.storage.files import in_threads

if TYPE_CHECKING:
    import lance

HISTORY_CLEANED_UP = "part of the table's history was cleaned up, so compacted or updated rows may be computed again."
_MOST_REFERENCES = 4
_MOST_UNFINISHED = 16
_MOST_VERSIONS = 1_000
_COMMITS_AT_ONCE = 16
_OPEN_COMMITS_AT_ONCE = 4


def find_checkpointed(
    history: ComputedRows,
    reusable: Reusable,
    tasks: FragmentTasks,
    live: Mapping[int, Ranges],
    index: CheckpointIndex,
    version: str,
    unfinished: Iterable[int],
) -> FragmentTasks:
    """Find the due rows that checkpoints hold, also if rows were moved since they were computed.

    Args:
        live: the live rows of fragments of which not all due rows are.
        version: the UDF version of the facts.
        unfinished: the versions that unfinished jobs read, the newest first.
    """

    def look_up(
        tasks: FragmentTasks, fragments: Iterable[int], found: Mapping[int, tuple[Ancestor, ...]]
    ) -> FragmentTasks:
        asked = (
            (replace(task, ancestors=(*task.ancestors, *found.get(task.id, ()))), live.get(task.id, task.due))
            for task in tasks.with_ids(fragments)
        )
        return tasks.replaced(reusable.look_up_all(asked, index))

    found = history.compacted_from(tasks, index, version)
    tasks = look_up(tasks, {*(fragment for _, fragment in index.places()), *found}, found)
    for before in islice((before for before in unfinished if before < history.dataset.version), _MOST_UNFINISHED):
        if found := history.unchanged_since(before, tasks, index):
            tasks = look_up(tasks, found, found)
    return tasks


@dataclass(frozen=True)
class TracedFragment:
    """A fragment with its live rows, those with a provenance, and those that hold a value of inputs that changed."""

    files: FragmentFiles
    live: Ranges
    known: Mapping[Provenance, Ranges]
    stale: Ranges


class ComputedRows:
    """Finds the computed rows of one column at one table version, from facts about its inputs and `previous` inputs.

    Rows that it finds in the history or by comparing values become facts in ``learned``, for the next plan. `names` are
    the names of the inputs and, last, of the output's columns. A name is "" if the column was dropped or has other
    nested fields now, so that its values cannot be compared.
    """

    def __init__(
        self,
        dataset: lance.LanceDataset,
        columns: Columns,
        names: tuple[str, ...],
        state: ColumnState,
        previous: Sequence[ComputedRows] = (),
    ) -> None:
        self.dataset = dataset
        self.columns = columns
        self.names = names
        self.manifest = read_manifest(dataset, columns)
        self.state = state.at_files(self.manifest.values())
        self.previous = previous
        self.learned: list[Fact] = []
        self.notes: list[str] = []
        self._history = History(dataset)
        self._tracer = Tracer(self._history, columns)
        self._stable = bool(dataset.has_stable_row_ids)
        self._of_a_job: dict[int, Ranges] = {}
        self._of_no_job: dict[int, Ranges] = {}
        self._line: list[int] = []
        self._commits = commits_of_version(dataset, max(1, dataset.version - _MOST_VERSIONS), _COMMITS_AT_ONCE)
        self._opened: dict[tuple[int, Columns], ReferenceVersion | None] = {}
        if state.facts and (dataset.version not in state.seen or dataset.version in state.moved):
            self.learned.append(seen(dataset.version))

    @staticmethod
    def of_column(
        dataset: lance.LanceDataset, columns: Columns, names: tuple[str, ...], state: ColumnState
    ) -> ComputedRows:
        """Find the computed rows of a column from all of its facts, including those about previous inputs."""
        others = sorted(state.other_inputs(columns.inputs_text))
        previous = [ComputedRows.from_inputs(dataset, columns.output, state, inputs) for inputs in others]
        return ComputedRows(dataset, columns, names, state.about(columns.inputs_text), previous)

    @staticmethod
    def from_inputs(
        dataset: lance.LanceDataset,
        output: tuple[int, ...],
        state: ColumnState,
        inputs: str,
        known: TableFields | None = None,
    ) -> ComputedRows:
        """Search the rows of a column that were computed from `inputs`, as in facts; they may have been dropped."""
        known = known or TableFields(dataset)
        columns, names = columns_in(dataset, inputs, output, known)
        return ComputedRows(dataset, columns, (*names, *output_names(dataset, output, known)), state.about(inputs))

    def resolve(self, files: FragmentFiles, live: Ranges, settled: Ranges | None = None) -> dict[Provenance, Ranges]:
        """Return the rows on which the UDF ran, by provenance; do not search the provenance of `settled` rows."""
        if not files.output:
            # A column without a file holds no values. Facts may be about a dropped column whose field id Lance gave to
            # this one after compaction had removed the last file with the dropped column.
            return {}
        known = self.of(files)
        for find in (self.by_value, *(earlier.as_previous for earlier in self.previous)):
            if unknown := live - Ranges.union(known.values()) - (settled or Ranges.empty()):
                add_rows(known, find(files, unknown).items())
        return known

    def as_previous(self, files: FragmentFiles, unknown: Ranges) -> dict[Provenance, Ranges]:
        """Return the rows that hold a value; the provenance names these inputs, because the column has others now."""
        found = by_code_version(self.resolve(self.manifest[files.id], unknown), unknown)
        return {Provenance(f"{maker}/{self.columns.inputs_text}"): rows for maker, rows in found.items()}

    def rows(self, files: FragmentFiles) -> tuple[Offsets, RowIds]:
        return self._history.rows(files.id, self.dataset.version)

    def of(self, files: FragmentFiles) -> dict[Provenance, Ranges]:
        """Return the rows on which the UDF ran, by provenance, from facts about the fragment or about its ancestors."""
        if files.signature in self.state.facts:
            return self.state.known(files.signature, files.physical_rows)
        compaction = self.compaction_of(files)
        return {} if compaction is None else self._before_compaction(files, compaction)

    def by_value(self, files: FragmentFiles, unknown: Ranges) -> dict[Provenance, Ranges]:
        """Return rows without facts whose inputs and output equal those at an earlier version, by provenance."""
        found: dict[Provenance, Ranges] = {}
        if not self._stable or not all(self.names):
            return found
        newest, still_there = self._complete_versions[:_MOST_REFERENCES], Ranges.empty()
        for version in newest:
            unknown, there = self._compare(version, files, unknown, found)
            still_there = still_there | there
        if unknown & still_there and len(self._complete_versions) > len(newest):
            # If rows move during a run, its facts describe them at the complete versions before the move.
            for version in self._complete_before_move(files):
                unknown, _ = self._compare(version, files, unknown, found)
        # No restore undid the move of a row into a fragment that still exists, so a restore has not changed that row.
        unknown = unknown - still_there
        if unknown and len(self._complete_versions) > len(newest):
            for version in self._complete_in_line:
                if version not in newest:
                    unknown, _ = self._compare(version, files, unknown, found)
        for provenance, rows in found.items():
            self.learn(files, provenance, rows, all_live=False)
        return found

    def _compare(
        self, version: int, files: FragmentFiles, unknown: Ranges, found: dict[Provenance, Ranges]
    ) -> tuple[Ranges, Ranges]:
        """Add the rows whose values equal those at a version to `found`.

        Return the rows that stay unknown although they existed at that version, and the rows whose fragment at that
        version still exists.
        """
        if not unknown or (reference := self._reference(version, self.columns)) is None:
            return unknown, Ranges.empty()
        then = None
        with self._noting_gap(version):
            given = self.state, self.dataset, files, self.names, unknown, self.manifest
            # A job that died right after its commit recorded no fact about inputs that were replaced meanwhile.
            then = computed_by_value(reference, *given, self._open_commits.get(version, {}).keys())
        if then is None:
            return unknown, Ranges.empty()
        add_rows(found, then.computed.items())
        left, changed = (unknown & then.existed) - Ranges.union(then.computed.values()), then.changed
        # Updates and compactions move rows to new fragments, so history is read for a fragment of that version only.
        if changed - then.in_place and files.id in reference.manifest and self._was_undone(version):
            changed = changed & then.in_place
        add_rows(self._of_a_job, [(files.id, changed)])
        if version not in self.state.moved and version not in self._open_commits:
            add_rows(self._of_no_job, [(files.id, left - changed)])
        return left, then.in_place

    def _was_undone(self, version: int) -> bool:
        """Whether a restore undid a version, so that it does not tell what rows held; False if commits are gone."""
        while not self._line or self._line[-1] > version:
            commit = next(self._commits, None)
            if commit is None or commit.gone:
                return False
            self._line.append(commit.version)
        return version not in self._line

    def of_no_job(self, files: FragmentFiles, unknown: Ranges) -> Ranges:
        """Return the rows that certainly hold no value of a job, among those that `resolve` did not find.

        If the column has facts, these are the rows that were added after the facts were complete, and those without a
        value of a job in earlier versions. All other rows may hold a value of inputs that changed since.
        """
        parts = (self, *self.previous)
        if not any(part.state.holds_values for part in parts):
            return unknown
        unknown = unknown - Ranges.union(part._of_a_job.get(files.id, Ranges.empty()) for part in parts)
        unknown = unknown - self.state.stale(files.signature, files.physical_rows)
        complete = max((version for part in parts for version in part._complete_versions[:1]), default=None)
        if not unknown or complete is None or not self._stable:
            return Ranges.empty()
        before = Ranges.from_offsets(row_ids(self.dataset, files.id, created_by=complete)[0])
        return unknown - (before - Ranges.union(part._of_no_job.get(files.id, Ranges.empty()) for part in parts))

    def learn_stale(self, files: FragmentFiles, unknown: Ranges) -> Ranges:
        """Return the rows that `resolve` did not find and that may hold a value of a job, of inputs that changed since.

        Record them: later plans compare with a few versions only, at all of which these rows may be unknown already.
        """
        if not (unknown and files.output and self._stable and self.state.facts):
            return Ranges.empty()
        stale = unknown - self.of_no_job(files, unknown)
        if new := stale - self.state.stale(files.signature, files.physical_rows):
            inputs = self.columns.inputs_text
            self.learned.append(Fact(files.signature, STALE, new, self.dataset.version, None, inputs))
        return stale

    def trace(self) -> Iterator[TracedFragment]:
        """Yield all fragments with what facts, history and values tell of their rows; then `learned` is complete."""
        for files in self.manifest.values():
            live = live_offsets(self.dataset, files)
            known = self.resolve(files, live)
            unknown = live - Ranges.union(known.values()) if files.output else Ranges.empty()
            yield TracedFragment(files, live, known, unknown - self.of_no_job(files, unknown) if unknown else unknown)

    def given_up(self, files: FragmentFiles, version: str) -> int:
        """Count the live rows of a fragment that failed in the maximum number of runs."""
        rows = self.state.given_up(files.signature, version)
        return len(rows & live_offsets(self.dataset, files)) if rows else 0

    def learn(self, files: FragmentFiles, provenance: Provenance, rows: Ranges, all_live: bool) -> None:
        """Record a fact for the next plan; `all_live` says that the rows are all live rows."""
        whole = None if len(rows) == files.physical_rows else rows
        under = files.deletion if all_live else None
        inputs = self.columns.inputs_text
        self.learned.append(Fact(files.signature, provenance.kind, whole, self.dataset.version, under, inputs))

    def compacted_from(
        self, tasks: FragmentTasks, index: CheckpointIndex, version: str
    ) -> dict[int, tuple[Ancestor, ...]]:
        """Find the checkpointed fragments from which fragments were compacted; skip completely computed ones."""

        def computed(parent: FragmentFiles) -> bool:
            return Provenance(version) in self.state.of_all_rows(parent.signature, parent.deletion)

        found: dict[int, tuple[Ancestor, ...]] = {}
        places = index.places()
        there = self.manifest.at(self.manifest.positions(at for _, at in places))
        stray = places - {(files.srcfiles, files.id) for files in there}
        if not stray or not self._stable:
            return found
        fragments = [task.files for task in tasks]
        lineage = self._tracer.trace(fragments, computed)
        for files in fragments:
            if any((a.srcfiles, a.id) in stray for a in lineage.ancestors(files, computed)):
                offsets, ids = self.rows(files)
                found[files.id] = tuple(
                    Ancestor((o.fragment.srcfiles, o.fragment.id), Ranges.from_offsets(offsets[among(ids, o.row_ids)]))
                    for o in self._origins(lineage, files, computed)
                    if (o.fragment.srcfiles, o.fragment.id) in stray
                )
        return found

    def unchanged_since(
        self, version: int, tasks: FragmentTasks, index: CheckpointIndex
    ) -> dict[int, tuple[Ancestor, ...]]:
        """Find the checkpointed fragments of a version that held missing rows with the inputs that these have now."""
        found: dict[int, dict[tuple[str, int], Ranges]] = {}
        with self._noting_gap(version):
            for fragment, place, rows in self._unchanged_since(version, tasks, index.places()) if self._stable else ():
                add_rows(found.setdefault(fragment, {}), [(place, rows)])
        return {fragment: tuple(Ancestor(*one) for one in parts.items()) for fragment, parts in found.items()}

    def _unchanged_since(
        self, version: int, tasks: FragmentTasks, places: Collection[tuple[str, int]]
    ) -> Iterator[tuple[int, tuple[str, int], Ranges]]:
        then, now = (self._reference(at, self.columns.read) for at in (version, int(self.dataset.version)))
        if then is None or now is None:
            return
        before = read_manifest(then.dataset, self.columns)
        moved = {
            files.id: (files.srcfiles, files.id)
            for files in before.at(before.positions(at for _, at in places))
            if (files.srcfiles, files.id) in places and self._has_lost_rows(files)
        }
        new = ~pc.is_in(self.manifest.signatures, before.signatures).to_numpy(zero_copy_only=False)
        wanted: list[FragmentTask] = []
        for task in tasks.with_ids(self.manifest.ids[new].tolist() if moved else ()):
            earlier = before.get(task.id)
            if task.missing_selected and (earlier is None or earlier.srcfiles != task.files.srcfiles):
                wanted.append(task)
        held = (row_ids(then.dataset, fragment)[1] for fragment in (moved if wanted else ()))
        ids = Ranges.union(map(Ranges.from_offsets, held))
        for task in wanted:
            offsets, here = self.rows(task.files)
            chosen = here[task.missing_selected.mask(offsets) & ids.mask(here)]
            for rows in compare_rows(then, self.dataset, chosen, now.names):
                fragments = rows.then >> 32
                for fragment in np.unique(fragments[rows.same]).tolist():
                    same = rows.now[rows.same & (fragments == fragment)] & OFFSET_BITS
                    yield task.id, moved[fragment], Ranges.from_offsets(same)

    def _has_lost_rows(self, before: FragmentFiles) -> bool:
        """Whether rows of a fragment of an earlier version may be elsewhere now, or have other inputs."""
        now = self.manifest.get(before.id)
        return now is None or (now.srcfiles, now.deletion) != (before.srcfiles, before.deletion)

    def compaction_of(self, files: FragmentFiles) -> Compaction | None:
        """Return the compaction that made a fragment, if its inputs and output are unchanged since."""
        return self._lineage.made_by(files, same_output=True)

    @cached_property
    def _lineage(self) -> Lineage:
        if not self._stable or not self.state.facts:
            return NO_LINEAGE
        facts = self.state.facts
        oldest = facts.oldest_apart_from(self.manifest.signatures)
        if oldest is None:
            return NO_LINEAGE

        def settled(files: FragmentFiles) -> bool:
            return files.signature in facts or not files.output

        unknown = (self.manifest.live_rows > 0) & self.manifest.has_output
        unknown &= ~facts.know(self.manifest.signatures)
        lineage = self._tracer.trace(self.manifest.at(np.flatnonzero(unknown)), settled, oldest, same_output=True)
        if not lineage.complete:
            self._note_gap()
        return lineage

    def _complete_before_move(self, files: FragmentFiles) -> list[int]:
        """Return the newest complete version before the fragment's rows were written, unless already compared."""
        written = max(self._history.written_at(files, int(self.dataset.version)), default=0)
        before = [version for version in self._complete_versions if version < written][:1]
        return [version for version in before if version not in self._complete_versions[:_MOST_REFERENCES]]

    @cached_property
    def _complete_in_line(self) -> list[int]:
        """The newest complete versions that no restore undid, as far back as commits can be read."""
        oldest = max(self._complete_versions[-1], self.dataset.version - _MOST_VERSIONS)
        line = takewhile(lambda commit: not commit.gone, commits_of_version(self.dataset, oldest))
        complete = (commit.version for commit in line if commit.version in self._complete_versions)
        return list(islice(complete, _MOST_REFERENCES))

    @cached_property
    def _complete_versions(self) -> list[int]:
        """Table versions at which the facts were complete, newest first."""
        if not self.state.facts:
            return []
        versions = set(self.state.seen)
        # A job that died before finish marked no version, but its commits carry its id.
        versions |= self._open_commits.keys()
        return sorted((version for version in versions if version <= self.dataset.version), reverse=True)

    @cached_property
    def _open_commits(self) -> Mapping[int, Mapping[int, str]]:
        """The commits of jobs that have not finished since the newest mark: the new data file of each fragment."""
        if not self.state.open_jobs:
            return {}
        newest = int(self.dataset.version)
        since = max(max(self.state.seen, default=0), newest - _MOST_VERSIONS, 0)
        commits = commits_newest_first(self.dataset, newest, since + 1, _OPEN_COMMITS_AT_ONCE)
        return {
            commit.version: {group.fragment_id: group.new_file.path for group in replaced_files(commit.operation)}
            for commit in commits
            if commit.properties.get(JOB_PROPERTY) in self.state.open_jobs
        }

    @cached_property
    def lost(self) -> frozenset[int]:
        """Fragments whose data file of the column was removed while a job committed it that died right after.

        The commit itself would have noticed. Only files that such jobs have committed are looked for.
        """
        committed = {at: name for _, files in sorted(self._open_commits.items()) for at, name in files.items()}
        there = [(at, name) for at, name in committed.items() if at in self.manifest]
        named = [(at, name) for at, name in there if any(path == name for *_, path in self.manifest[at].output)]
        found = in_threads(lambda one: LanceFile.of_table(self.dataset, one[1]).exists(), named)
        return frozenset(at for (at, _), exists in zip(named, found, strict=True) if not exists)

    def _reference(self, version: int, columns: Columns) -> ReferenceVersion | None:
        """Open a version to compare columns, once; None if it was cleaned up or cannot be compared."""
        if (version, columns) not in self._opened:
            current = version == self.dataset.version
            then = self.dataset if current else open_version_or_none(self.dataset, version)
            self._opened[version, columns] = None if then is None else ReferenceVersion.at(then, columns)
            if then is None:
                self._note_gap()
        return self._opened[version, columns]

    def _before_compaction(self, files: FragmentFiles, compaction: Compaction) -> dict[Provenance, Ranges]:
        """Derive the provenance of a compacted fragment's rows from the fragments that were compacted.

        Parents whose rows all share the same provenance need no row ids; row ids are read for the other parents.
        """
        parents = [parent for parent in compaction.replaced if parent.live_rows]
        shared_provenance = {parent: self._shared_provenance(parent) for parent in parents}
        alike = next((known for known in shared_provenance.values() if known), frozenset[Provenance]())
        partly = {parent for parent in parents if not alike or shared_provenance[parent] != alike}
        if partly:
            found = self._by_row_id(files, partly, set(compaction.replaced) - partly, alike)
        else:
            found = {provenance: Ranges.of(0, files.physical_rows) for provenance in alike}
        for provenance, rows in found.items():
            self.learn(files, provenance, rows, len(rows) >= files.live_rows)
        return found

    def _shared_provenance(self, files: FragmentFiles) -> frozenset[Provenance]:
        """Return the provenance that all live rows of a fragment share; empty if they differ."""
        if files.signature in self.state.facts:
            return self.state.shared_provenance(files.signature, files.deletion, files.physical_rows)
        compaction = self.compaction_of(files)
        if compaction is None:
            return frozenset()
        found = {self._shared_provenance(parent) for parent in compaction.replaced if parent.live_rows}
        return found.pop() if len(found) == 1 else frozenset()

    def _by_row_id(
        self,
        files: FragmentFiles,
        parents: Collection[FragmentFiles],
        passed_over: Collection[FragmentFiles],
        others: Iterable[Provenance],
    ) -> dict[Provenance, Ranges]:
        """Find the provenance of rows by row id; rows of the `passed_over` parents have the provenances in `others`."""
        offsets, ids = self.rows(files)
        missing, theirs = set(parents), np.ones(len(ids), np.bool_)
        ids_by_provenance: dict[Provenance, list[RowIds]] = {}
        for origin in self._origins(self._lineage, files, lambda parent: parent in passed_over, same_output=True):
            if origin.fragment in parents:
                missing.discard(origin.fragment)
                theirs &= ~among(ids, origin.row_ids)
            known = self.state.known(origin.fragment.signature, origin.fragment.physical_rows)
            for provenance, rows in known.items():
                ids_by_provenance.setdefault(provenance, []).append(origin.row_ids[rows.mask(origin.offsets)])
        found: dict[Provenance, Ranges] = {}
        if not missing:
            add_rows(found, [(provenance, Ranges.from_offsets(offsets[theirs])) for provenance in others])
        for provenance, groups in ids_by_provenance.items():
            add_rows(found, [(provenance, Ranges.from_offsets(offsets[among(ids, np.concatenate(groups))]))])
        return {provenance: rows for provenance, rows in found.items() if rows}

    def _origins(
        self, lineage: Lineage, files: FragmentFiles, passed_over: FragmentFilter, same_output: bool = False
    ) -> list[Origin]:
        """Return the origins of a compacted fragment's rows, as far back as versions can be read."""
        found: list[Origin] = []
        try:
            for origin in self._history.origins(lineage, files, passed_over, same_output):
                found.append(origin)
        except EngineError:
            self._note_gap()
        return found

    @contextmanager
    def _noting_gap(self, version: int) -> Iterator[None]:
        """Note that a version, or a data file of it, was cleaned up if it cannot be read because of that."""
        try:
            with engine_errors():
                yield
        except EngineError as error:
            if version_exists(self.dataset, version) and not lacks_data_file(error):
                raise
            self._note_gap()

    def _note_gap(self) -> None:
        if HISTORY_CLEANED_UP not in self.notes:
            self.notes.append(HISTORY_CLEANED_UP)
