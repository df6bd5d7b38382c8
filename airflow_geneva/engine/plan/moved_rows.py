"""Find computed rows again after other writers compacted, updated or restored their fragments since the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from airflow_geneva.engine.checkpoint.facts import ColumnState
from airflow_geneva.engine.checkpoint.provenance import (
    PriorFailures,
    Provenance,
    add_rows,
    prior_failures_of,
    rows_that,
)
from airflow_geneva.engine.checkpoint.records import StagedFragment, decode_runs
from airflow_geneva.engine.checkpoint.reuse import Ancestor
from airflow_geneva.engine.lance_io.data_file import LanceFile
from airflow_geneva.engine.lance_io.fragments import Columns, FragmentFiles, columns_in, live_offsets, output_names
from airflow_geneva.engine.lance_io.history import History, Tracer, among
from airflow_geneva.engine.lance_io.pylance_internals import take_rows
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.table_versions import version_exists
from airflow_geneva.engine.plan.computed_rows import ComputedRows
from airflow_geneva.engine.plan.model import ColumnSpec
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.plan.value_diff import ReferenceVersion, compare_rows
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors, lacks_data_file

if TYPE_CHECKING:
    import lance

MOVED = "moved since it was planned"
CHANGED = "other writers changed the rows meanwhile"
RENAMED = "the column or an input was renamed meanwhile, and other writers moved the rows"
NO_ROW_IDS = "the table has no stable row ids to find its rows by"
FILE_GONE = "others removed the data file of the column"
NOT_COMPARABLE = "the rows were updated meanwhile, and their inputs cannot be compared (blobs, or a cleaned-up version)"


@dataclass(frozen=True)
class LostRows:
    """Computed rows of a fragment that a commit of its staged file does not make visible, because they moved.

    Args:
        source: the table version from which they were computed.
        rows: their physical offsets in the fragment.
        why: what happened to the fragment.
    """

    source: lance.LanceDataset
    task: FragmentTask
    staged: StagedFragment
    rows: Ranges
    why: str

    @property
    def row_ids(self) -> RowIds:
        return self.ids_of(self.rows)

    def ids_of(self, rows: Ranges) -> RowIds:
        """Return the row ids of computed rows, given by their offsets in the fragment."""
        offsets, ids = decode_runs(self.staged.runs)
        return ids[rows.mask(offsets)]


@dataclass
class FoundRows:
    """The results of the search for lost rows.

    Args:
        tasks: the fragments of the newest version that hold unchanged lost rows; only these rows are due.
        computed: fragments in which the column already holds values of this UDF version for lost rows, with the offsets
            of these rows, and the `LostRows` from which they come.
        failed: number of rows that failed in this run, which an earlier attempt has already committed.
        deleted: number of rows that the table no longer has.
        left: planned fragments with rows that cannot be committed, the number of these rows, and the reason.
    """

    tasks: dict[int, FragmentTask] = field(default_factory=dict)
    computed: list[tuple[FragmentFiles, Ranges, LostRows]] = field(default_factory=list)
    failed: int = 0
    deleted: int = 0
    left: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, task: FragmentTask) -> None:
        """Add work for a fragment, and merge it with its work for lost rows of another version."""
        known = self.tasks.get(task.id)
        if known is not None:
            due = known.due | task.due
            kept = {provenance: rows - known.due for provenance, rows in task.kept}
            add_rows(kept, ((provenance, rows & known.due) for provenance, rows in known.kept))
            ancestors = (*known.ancestors, *task.ancestors)
            kept_now, stale = tuple(kept.items()), task.stale - known.due
            task = replace(task, due=due, rows=len(due), ancestors=ancestors, kept=kept_now, stale=stale)
        self.tasks[task.id] = task


def find_moved_rows(
    newest: lance.LanceDataset, columns: Columns, spec: ColumnSpec, state: ColumnState, lost: Sequence[LostRows]
) -> FoundRows:
    """Find lost rows by id in the newest version, and plan the fragments that hold unchanged ones.

    A row is unchanged if only compactions moved it, or if its inputs and its value are equal to the planned ones.
    """
    found = FoundRows()
    inputs, outputs = columns_in(newest, columns.inputs_text, columns.output)[1], output_names(newest, columns.output)
    names = (*inputs, *outputs)
    if names != (*spec.inputs, *spec.columns):
        there = all(inputs) and len(outputs) == len(spec.columns)
        found.left.extend((one.task.id, len(one.rows), RENAMED if there else one.why) for one in lost)
        return found
    computed = ComputedRows.of_column(newest, columns, names, state)
    for version in sorted({one.source.version for one in lost}):
        _Search(computed, [one for one in lost if one.source.version == version], spec, found).run()
    return found


def count_unchanged(newest: lance.LanceDataset, columns: Columns, lost: LostRows) -> tuple[int, int]:
    """Count the lost rows that the newest version has with the same inputs, and those with others or unknown ones."""
    ids, found = lost.row_ids, list[int]()
    inputs = replace(columns, where=(), output=(), names=columns.names[: len(columns.inputs)])
    then, now = (ReferenceVersion.at(at, inputs) for at in (lost.source, newest))
    if then is not None and now is not None:
        try:
            with engine_errors():
                compared = list(compare_rows(then, newest, ids, now.names))
                found = [sum(int((rows.same == same).sum()) for rows in compared) for same in (True, False)]
        except EngineError:
            if version_exists(newest, int(lost.source.version)):
                raise
    same, changed = found or (0, len(take_rows(newest, ids.tolist(), ["_rowid"])))
    return same, changed


@dataclass(frozen=True, eq=False)
class _Moved:
    """Rows of a planned fragment, by id, and the fragment that holds them now; `same` if they are unchanged."""

    fragment: int
    of: LostRows
    row_ids: RowIds
    same: bool = True


class _Search:
    """Searches lost rows of one version: in their old fragment, then through compactions, then by id and value."""

    def __init__(
        self, computed: ComputedRows, lost: Sequence[LostRows], spec: ColumnSpec, found: FoundRows
    ) -> None:  # fmt: skip
        self.source = lost[0].source
        self.newest = computed.dataset
        self.computed = computed
        self.columns = computed.columns
        self.spec = spec
        self.found = found
        self.lost = {one.task.id: one for one in lost}
        self.open = {one.task.id: one.row_ids for one in lost}
        self._left: Counter[tuple[int, str]] = Counter()

    def run(self) -> None:
        by_fragment: dict[int, list[_Moved]] = {}
        stable = bool(self.newest.has_stable_row_ids)
        for find in (self._in_place, *((self._after_compaction, self._by_value) if stable else ())):
            for moved in find():
                by_fragment.setdefault(moved.fragment, []).append(moved)
        for fragment, parts in sorted(by_fragment.items()):
            self._plan(self.computed.manifest[fragment], parts)
        for one in self.lost.values():
            if rows := len(self.open[one.task.id]):
                self._left[one.task.id, f"{one.why}, and {NO_ROW_IDS}"] += rows
        self.found.left.extend((fragment, rows, why) for (fragment, why), rows in self._left.items())

    def _take(self, of: LostRows, ids: RowIds) -> RowIds:
        """Return the given ids that were not found before, and mark them as found."""
        wanted = self.open[of.task.id]
        taken = among(wanted, ids)
        self.open[of.task.id] = wanted[~taken]
        return wanted[taken]

    def _in_place(self) -> Iterator[_Moved]:
        """Find rows whose fragment still has the planned input files."""
        for one in self.lost.values():
            files = self.computed.manifest.get(one.task.id)
            if files is None or not has_inputs(files, one.task.files):
                continue
            offsets, ids = decode_runs(one.staged.runs)
            there = one.rows & live_offsets(self.newest, files)
            ids, same = self._take(one, ids[there.mask(offsets)]), files.output == one.task.files.output
            yield from self._by_output(one, ids, files.id, same)
            if not self.newest.has_stable_row_ids:
                # Without stable row ids, an updated row gets a new id, so it counts as a deleted row and a new one.
                self.found.deleted += len(self._take(one, self.open[one.task.id]))

    def _by_output(self, one: LostRows, ids: RowIds, fragment: int, same: bool) -> Iterator[_Moved]:
        """Yield rows with whether they have their planned value; read it if other writers wrote the column since."""
        if same or not self.newest.has_stable_row_ids:
            yield _Moved(fragment, one, ids, same)
        else:
            yield from self._compared(one, ids, self.computed.names[len(self.spec.inputs) :])

    def _after_compaction(self) -> Iterator[_Moved]:
        """Follow rows through compactions; read the column's values only if other writers wrote it since."""
        manifest = self.computed.manifest
        planned = np.array([fragment.fragment_id for fragment in self.source.get_fragments()], np.int64)
        new = manifest.at(np.flatnonzero(~np.isin(manifest.ids, planned) & (manifest.live_rows > 0)))
        if not new:
            return
        known, history = set(planned.tolist()), History(self.newest)

        def is_lost(files: FragmentFiles) -> bool:
            return files.id in self.lost

        def not_lost(files: FragmentFiles) -> bool:
            return files.id in known and not is_lost(files)

        lineage = Tracer(history, self.columns).trace(new, is_lost, int(self.source.version))
        for files in new:
            unwritten = set(lineage.ancestors(files, not_lost, same_output=True))
            with suppress(EngineError):  # a version in between was cleaned up: `_by_value` searches the other rows
                for origin in history.origins(lineage, files, not_lost):
                    one = self.lost.get(origin.fragment.id)
                    if one is not None and has_inputs(origin.fragment, one.task.files):
                        same = origin.fragment in unwritten and origin.fragment.output == one.task.files.output
                        yield from self._by_output(one, self._take(one, origin.row_ids), files.id, same)

    def _by_value(self) -> Iterator[_Moved]:
        for one in self.lost.values():
            yield from self._compared(one, self._take(one, self.open[one.task.id]), self.computed.names)

    def _compared(self, one: LostRows, ids: RowIds, names: tuple[str, ...]) -> Iterator[_Moved]:
        """Find rows by id, and compare these columns with the version from which they were computed."""
        if not len(ids):
            return
        reference = ReferenceVersion.at(self.source, self.columns)
        if reference is None:
            yield from self._not_comparable(one, ids)
            return
        reference = replace(reference, names=reference.names[-len(names) :])
        there = list[RowIds]()
        try:
            with engine_errors():
                for rows in compare_rows(reference, self.newest, ids, names):
                    there.append(rows.ids)
                    for same in (True, False):
                        part = rows.same == same
                        for fragment in np.unique(rows.now[part] >> 32).tolist():
                            yield _Moved(fragment, one, rows.ids[part & (rows.now >> 32 == fragment)], same)
        except EngineError as error:
            # Of a file that others removed during a commit, no version tells the values.
            if version_exists(self.newest, int(self.source.version)) and not lacks_data_file(error):
                raise
            found = np.concatenate([*there, np.empty(0, np.uint64)])
            yield from self._not_comparable(one, ids[~np.isin(ids, found)])
            return
        self.found.deleted += len(ids) - sum(map(len, there))

    def _not_comparable(self, one: LostRows, ids: RowIds) -> Iterator[_Moved]:
        rows = take_rows(self.newest, ids.tolist(), ["_rowid", "_rowaddr"])
        found, fragments = rows.column("_rowid").to_numpy(), rows.column("_rowaddr").to_numpy() >> np.uint64(32)
        self.found.deleted += len(ids) - len(found)
        for fragment in np.unique(fragments).tolist():
            yield _Moved(int(fragment), one, found[fragments == fragment], same=False)

    def _plan(self, files: FragmentFiles, parts: Sequence[_Moved]) -> None:
        """Plan the unchanged rows that a fragment holds, unless the column has their values already."""
        offsets, ids = self.computed.rows(files)
        rows = [Ranges.from_offsets(offsets[among(ids, part.row_ids)]) for part in parts]
        same = Ranges.union(there for there, part in zip(rows, parts, strict=True) if part.same)
        live = live_offsets(self.newest, files)
        known = self.computed.resolve(files, live, settled=same)
        version, taken = self.spec.udf_version, (self.spec.udf_version, *self.spec.taken_versions)
        done = rows_that(known, lambda p: p.is_value_of(version) and p.maker in taken)
        here = [path for _, base, path in files.output if base < 0] if done & Ranges.union(rows) else ()
        if not all(LanceFile.of_table(self.newest, path).exists() for path in here):
            # Facts are recorded before a commit, and this file was removed in between.
            for there, part in zip(rows, parts, strict=True):
                self._left[part.of.task.id, FILE_GONE] += len(there)
            return
        tried, failed = dict[int, Ranges](), Ranges.empty()
        ancestors = list[Ancestor]()
        for there, part in zip(rows, parts, strict=True):
            rest = there - done
            if there & done:
                self.found.computed.append((files, there & done, part.of))
            if not part.same and rest:
                comparable = ReferenceVersion.at(self.source, self.columns) is not None
                self._left[part.of.task.id, CHANGED if comparable else NOT_COMPARABLE] += len(rest)
            elif rest:
                failed = failed | _failed_already(
                    known, version, _here(part.of.staged.failures.rows, part, offsets, ids)
                )
                before = prior_failures_of(part.of.task.known, version)
                add_rows(tried, _here(before, part, offsets, ids))
                if part.of.task.place != (files.srcfiles, files.id):
                    ancestors.append(Ancestor(part.of.task.place, rest))
        self.found.failed += len(failed)
        if due := same - done - failed:
            # Facts may already count this run's failures, or may be missing for rows that an update moved.
            kept = {p: there - due if p.failures and p.version == version else there for p, there in known.items()}
            add_rows(kept, ((Provenance(version, failures=runs), there & due) for runs, there in tried.items()))
            stale = self.computed.learn_stale(files, live - due - Ranges.union(known.values()))
            task = FragmentTask(
                files, MOVED, due, due, len(due), ancestors=tuple(ancestors), kept=tuple(kept.items()), stale=stale
            )
            self.found.add(task)


def _here(failures: PriorFailures, part: _Moved, offsets: Offsets, ids: RowIds) -> PriorFailures:
    """Return which moved rows failed, by their offsets in the fragment that holds them now."""
    if not failures:
        return ()
    wanted = among(ids, part.row_ids)
    here = ((runs, wanted & among(ids, part.of.ids_of(rows))) for runs, rows in failures)
    return tuple((runs, Ranges.from_offsets(offsets[mask])) for runs, mask in here)


def _failed_already(known: Mapping[Provenance, Ranges], version: str, failures: PriorFailures) -> Ranges:
    """Return the rows of `failures` that facts already record as failed in that number of runs or more."""
    said = [(p.failures, rows) for p, rows in known.items() if p.version == version]
    return Ranges.union(there & rows for runs, there in failures for number, rows in said if number >= runs)


def has_inputs(files: FragmentFiles, planned: FragmentFiles) -> bool:
    """Whether a fragment is the planned one with the planned data files of the inputs."""
    return files.id == planned.id and files.inputs == planned.inputs and files.physical_rows == planned.physical_rows
