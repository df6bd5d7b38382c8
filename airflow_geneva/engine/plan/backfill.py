"""Plan a backfill: compare the table with the state of the column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.facts import SEEN, ColumnState, Fact, Facts, filter_evaluated, seen
from airflow_geneva.engine.checkpoint.provenance import (
    ADOPTED,
    MOST_RUNS,
    Provenance,
    add_rows,
    by_code_version,
    failed_rows,
)
from airflow_geneva.engine.checkpoint.reuse import CheckpointIndex
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.choices import OnUnknownValues
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.speed import ReadJobs, history_once
from airflow_geneva.engine.lance_io.filters import check_where, selected_offsets
from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    FragmentFiles,
    TableFields,
    garbage_collector_off,
    ids_by_name,
    live_offsets,
    row_ids,
)
from airflow_geneva.engine.lance_io.manifest import Manifest
from airflow_geneva.engine.lance_io.messages import Numbers
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.table_versions import open_version, open_version_or_none
from airflow_geneva.engine.plan.computed_rows import ComputedRows, find_checkpointed
from airflow_geneva.engine.plan.due_rows import DueRules, RowStatus, check_code_change, classify_rows
from airflow_geneva.engine.plan.model import BackfillSpec, Plan, ReasonCount
from airflow_geneva.engine.plan.reusable_checkpoints import (
    ReusableColumn,
    check_continue_from,
    continue_from_savings,
    find_mismatches,
    look_beside,
    other_versions,
)
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks, cut_shards
from airflow_geneva.engine.plan.shared_files import state_with_bases
from airflow_geneva.engine.plan.unknown_values import adopted_note, check_unknown_values, filled_rows
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.udf.definition import columns_before, stored_definition

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.udf.settings import UdfDefinition

FRESH, NOT_SELECTED, NEW, LEFT_OUT = "computed", "not selected by where", "never computed", "newer than read_version"
CHANGED, CODE, EMPTY = "new, or changed since they were computed", "computed by another UDF version", "no live rows"
FAILED, GIVEN_UP = "failed before", f"failed in {MOST_RUNS} runs"
NOT_ASKED = "not asked for"


@dataclass(frozen=True)
class _Due:
    """The work for a fragment before the planner looks for checkpoints; `unknown` are due rows without provenance."""

    task: FragmentTask
    live: Ranges
    given_up: int = 0
    unknown: Ranges = field(default_factory=Ranges.empty)
    adopted: int = 0


def plan_backfill(dataset: lance.LanceDataset, checkpoints: Storage, spec: BackfillSpec, wanted: DueRules) -> Plan:
    check_continue_from(checkpoints, spec)
    check_where(dataset, spec.where)
    columns = spec.columns_at(dataset)
    spec = replace(spec, nested=columns.nested)
    with garbage_collector_off():
        state = state_with_bases(dataset, checkpoints, columns)
        planner = _Planner(dataset, spec, columns, state, wanted)
        if not state.ledgers:
            planner.record(state)
        return planner.plan(CheckpointStore(checkpoints))


class _Planner:
    def __init__(
        self, dataset: lance.LanceDataset, spec: BackfillSpec, columns: Columns, state: ColumnState, wanted: DueRules
    ) -> None:
        self.dataset = dataset
        self.spec = spec
        self.state = state.about(columns.inputs_text)
        self.every_fact = state.facts
        self._again: dict[str, str] = {}
        self.wanted = wanted
        self.fragments: Counter[str] = Counter()
        self.rows: Counter[str] = Counter()
        self.computed = ComputedRows.of_column(dataset, columns, (*spec.inputs, *spec.columns), state)
        self.read_version = dataset.version if spec.read_version is None else spec.read_version
        self.given_up = 0
        self.mixed: Counter[str] = Counter()
        self.rows_by_other_version: Counter[str] = Counter()
        self.accepted: list[tuple[FragmentFiles, Provenance, Ranges]] = []
        # Values computed from an input that a promotion replaced; the plan of the promotion has reported them as due.
        self.of_replaced = {
            Provenance(f"{spec.udf_version}/{inputs}")
            for inputs in state.other_inputs(columns.inputs_text)
            if _are_replaced(dataset, spec.inputs, columns, inputs)
        }

    def record(self, state: ColumnState) -> None:
        """Write facts to the ledger of this job, for later plans, and at which versions they are complete."""
        self.computed.learned += [fact for signature in state.facts for fact in state.facts[signature]]
        self.computed.learned += [seen(version, version in state.moved) for version in state.seen]

    def plan(self, store: CheckpointStore) -> Plan:
        manifest = self.computed.manifest
        whole, rest = self._sort_out(manifest)
        dues = [due for files in manifest.at(rest) if (due := self._due(files)) is not None]
        selected = self._selected(dues)
        if self.spec.where is not None and not selected:
            all_looked_at = sum(due.task.rows for due in dues) == int(manifest.live_rows.sum())
            of_what = "of the table" if all_looked_at else "that is due"
            self.computed.notes.append(f"where {self.spec.where} selects no row {of_what}.")
        given, own = self.spec.definition, stored_definition(self.dataset.schema, self.spec.column)
        again = {one: said for one in {**self.rows_by_other_version, **self.mixed} if (said := self._added_again(one))}
        if not self.wanted.errors_only:
            check_code_change(self.spec, +self.rows_by_other_version, self.wanted.on_code_change, own, again)
        if self.wanted.asks_about_values:
            whole, selected = self._settle_unknown(whole, selected, own)
        if selected or not self.wanted.errors_only:
            for files, provenance, rows in self.accepted:
                self.computed.learn(files, provenance, rows, all_live=False)
        tasks = FragmentTasks((), manifest, whole, NEW)
        index = CheckpointIndex(store, self.spec.reuse_rules) if selected or tasks else None
        earlier, others = history_once(store.storage, self.spec.describe()), list[str]()
        if index is not None:
            looks = partial(other_versions, store, self.spec), index.places, earlier
            (others, *_), self.spec = look_beside(store.storage, self.spec, *looks)
        tasks = self._with_checkpoints(selected, tasks, index, earlier)
        if self.given_up:
            self.computed.notes.append(
                f"given up after {MOST_RUNS} runs: {counted(self.given_up, 'row')}. "
                f"table.get_errors(column_name={self.spec.column!r}) says why; errors_only=True tries again."
            )
        if self.wanted.errors_only and own and (given.import_path, given.name) != (own.import_path, own.name):
            self.computed.notes.append(
                f"later runs use {own.call}, until table.alter_columns({{{self.spec.column!r}: {given.name}}})."
            )
        if not self.dataset.has_stable_row_ids:
            self.computed.notes.append(
                "the table has no stable row ids, so a fragment that was compacted or updated is recomputed whole. "
                "Copy the table with db.copy_table(..., rewrite=True), which enables them."
            )
        return Plan(
            spec=replace(self.spec, rows=tasks.rows, makers=tuple(sorted(self.mixed))),
            shards=cut_shards(tasks, self.spec.sizing.shard_size),
            rows_total=int(manifest.live_rows.sum()),
            reason_counts=tuple(ReasonCount(reason, n, self.rows[reason]) for reason, n in self.fragments.items()),
            rows_by_other_version=tuple(sorted((self.rows_by_other_version + self.mixed).items())),
            inputs_again=again,
            # A mark would end the search for files that were lost.
            learned=tuple(fact for fact in self.computed.learned if fact.kind != SEEN or not self.computed.lost),
            notes=tuple(self.computed.notes),
            savings=tuple(continue_from_savings(self.dataset, store, self.spec, tasks, others)),
            mismatches=find_mismatches(index, tasks),
            ledgers=len(self.state.ledgers),
            opened=(self.dataset,),
            index=index,
            earlier=earlier,
        )

    def _sort_out(self, manifest: Manifest) -> tuple[Numbers, Numbers]:
        """Return the positions of fragments whose rows are all due, as no value is known, and of those to inspect."""
        rest, version = manifest.live_rows > 0, self.spec.udf_version
        if empty := int((~rest).sum()):
            self._add(EMPTY, empty, 0)
        if self.state.facts and not self.wanted.errors_only:
            adopted = Provenance(version, ADOPTED).kind
            kinds = (Provenance(version).kind, adopted)
            fresh = rest & self.state.facts.cover(kinds, manifest.signatures, manifest.deletion)
            if self.computed.lost:
                fresh &= ~np.isin(manifest.ids, list(self.computed.lost))
            if self.wanted.recompute_mixed:
                fresh &= ~self.state.facts.say(adopted, manifest.signatures)
            failed = self.state.failed_too_often(version)
            if len(failed):
                some = pc.is_in(manifest.signatures, failed).to_numpy(zero_copy_only=False)
                for files in manifest.at(np.flatnonzero(fresh & some)):
                    self._leave(FRESH, files.live_rows, self.computed.given_up(files, version))
                rest, fresh = rest & ~(fresh & some), fresh & ~some
            if fresh.any():
                self._add(FRESH, int(fresh.sum()), int(manifest.live_rows[fresh].sum()))
            rest = rest & ~fresh
        whole = np.zeros(len(manifest), np.bool_)
        asked_for_all = self.spec.where is None and self.spec.read_version is None
        if asked_for_all and not self.wanted.named_rows:
            whole = rest & ~manifest.has_deletion
            if self.state.facts or self.computed.previous:
                whole &= ~manifest.has_output
        return np.flatnonzero(whole), np.flatnonzero(rest & ~whole)

    def _due(self, files: FragmentFiles) -> _Due | None:
        """Compare one fragment with the facts; None if nothing is due."""
        version, rows = self.spec.udf_version, files.live_rows
        live = live_offsets(self.dataset, files)
        filter_evaluated = Ranges.empty()
        if self.spec.where is not None:
            # An earlier job evaluated this filter for these rows.
            filter_evaluated = self.state.filter_evaluated(
                files.where_signature(), self.spec.filter_hash, version, files.physical_rows
            )
        lost = files.id in self.computed.lost
        known = {} if lost else self.computed.resolve(files, live, settled=filter_evaluated)
        unknown = Ranges.empty() if lost else live - Ranges.union(known.values())
        stale = self.computed.learn_stale(files, unknown - filter_evaluated)
        known = {provenance: there for provenance, there in known.items() if provenance not in self.of_replaced}
        found = classify_rows(known, live, version, self.spec.continue_from, self.wanted)
        due, given_up = found.due, len(found.given_up)
        others = {p: there for p, there in known.items() if p.made_by not in ("", ADOPTED, version)}
        taken = by_code_version(others, live - due)
        for maker, stays in taken.items():
            self.mixed[maker] += len(stays)
        own, adopted = (known.get(p, Ranges.empty()) for p in (Provenance(version), Provenance(version, ADOPTED)))
        if (own | adopted | found.given_up).contains(live) and files.signature in self.state.facts:
            every = Provenance(version, ADOPTED) if adopted and not own else Provenance(version)
            self.computed.learn(files, every, known.get(every, Ranges.empty()), all_live=True)
        for maker, accepted in found.accepted.items():
            self.rows_by_other_version[maker] += len(accepted - taken.get(maker, Ranges.empty()))
            self.mixed[maker] += 0
            if self.spec.where is None and self.spec.read_version is None:
                self.accepted.append((files, Provenance(version, maker), accepted))
                # A commit changes the fragment's signature, and writes facts only for the rows in `known`.
                add_rows(known, [(Provenance(version, maker), accepted)])
        # A job evaluated the filter for failed rows too, but they run again.
        due = due - (filter_evaluated - failed_rows(known))
        existed = self._existed(files, due) if due else due
        if not existed:
            self._leave(LEFT_OUT if due else self._why_not(), rows, given_up)
            return None
        reason, kept = self._why(files, found, existed, known), tuple(known.items())
        task = FragmentTask(files, reason, existed, existed, len(existed), kept=kept, stale=stale)
        return _Due(task, live, given_up, existed & unknown if files.output else Ranges.empty())

    def _why(
        self, files: FragmentFiles, found: RowStatus, due: Ranges, known: dict[Provenance, Ranges]
    ) -> str:  # fmt: skip
        others = [maker for maker, rows in found.others.items() if due & rows]
        if others or self.wanted.recompute_mixed:
            return self._added_again(others[0]) if others and all(map(self._added_again, others)) else CODE
        if not due - failed_rows(known):
            return FAILED
        # Of rows beside computed ones, and of a fragment without the column, there was never a value.
        known_files = not files.output or files.signature in self.state.facts
        return NEW if known_files or not self.state.facts else CHANGED

    def _added_again(self, maker: str) -> str:
        """Say that inputs were removed and added again, if values of this code were computed from other columns."""
        version, _, inputs = maker.partition("/")
        if not inputs or version != self.spec.udf_version:
            return ""
        if inputs not in self._again:
            names = _added_again(self.dataset, self.spec.inputs, self.computed.columns, self.every_fact, inputs)
            self._again[inputs] = "; ".join(
                f"column {name!r}, which {self.spec.column!r} reads, was removed and added again" for name in names
            )
        return self._again[inputs]

    def _why_not(self) -> str:
        if self.wanted.errors_only or self.wanted.recompute_mixed:
            return f"{FRESH} or {NOT_ASKED}"
        return FRESH if self.spec.where is None else f"{FRESH} or {NOT_SELECTED}"

    def _count(self, reason: str, rows: int) -> None:
        self._add(reason, 1, rows)

    def _add(self, reason: str, fragments: int, rows: int) -> None:
        self.fragments[reason] += fragments
        self.rows[reason] += rows

    def _leave(self, reason: str, rows: int, given_up: int) -> None:
        self._add_given_up(given_up)
        self._count(reason, rows - given_up)

    def _add_given_up(self, rows: int) -> None:
        if rows:
            self.given_up += rows
            self._count(GIVEN_UP, rows)

    def _existed(self, files: FragmentFiles, rows: Ranges) -> Ranges:
        """Return the rows of a fragment that existed at the requested version."""
        if self.read_version >= self.dataset.version:
            return rows
        if self._physical_rows_then.get(files.id) == files.physical_rows:
            return rows
        if not self.dataset.has_stable_row_ids:
            return Ranges.empty()
        return rows & Ranges.from_offsets(row_ids(self.dataset, files.id, created_by=self.read_version)[0])

    @cached_property
    def _physical_rows_then(self) -> dict[int, int]:
        then = open_version(self.dataset, self.read_version)
        return {fragment.fragment_id: fragment.metadata.physical_rows for fragment in then.get_fragments()}

    def _selected(self, dues: list[_Due]) -> list[_Due]:
        """Evaluate the filter on the candidates, and drop fragments in which it selects no row."""
        selected = None
        if self.spec.where is not None:
            selected = selected_offsets(self.dataset, [due.task.id for due in dues], self.spec.where)
        kept: list[_Due] = []
        for due in dues:
            task = due.task
            chosen = task.due if selected is None else task.due & selected.get(task.id, Ranges.empty())
            if not self.wanted.recompute_mixed:
                for maker, rows in by_code_version(task.known, chosen).items():
                    self.rows_by_other_version[maker] += len(rows)
            if chosen:
                whole = len(chosen) == task.rows
                kept.append(due if whole else replace(due, task=replace(task, rows=len(chosen), selected=chosen)))
                continue
            self._leave(NOT_SELECTED, task.files.live_rows, due.given_up)
            if self.spec.read_version is None and not self.wanted.errors_only and not self.wanted.recompute_mixed:
                kind = filter_evaluated(self.spec.filter_hash, self.spec.udf_version)
                self.computed.learned.append(Fact(task.files.where_signature(), kind, task.due, self.dataset.version))
        return kept

    def _settle_unknown(
        self, whole: Numbers, selected: list[_Due], own: UdfDefinition | None
    ) -> tuple[Numbers, list[_Due]]:
        """Ask about due rows that hold a value although no job computed it, or leave them alone and record them."""
        manifest, version = self.computed.manifest, self.spec.udf_version
        there = whole[manifest.has_output[whole]]
        sizes = zip(manifest.ids[there].tolist(), manifest.physical_rows[there].tolist(), strict=True)
        unknown = {fragment: Ranges.of(0, rows) for fragment, rows in sizes}
        for due in selected:
            if of_no_job := self.computed.of_no_job(due.task.files, due.unknown & due.task.chosen):
                unknown[due.task.id] = of_no_job
        filled = filled_rows(self.dataset, self.spec.columns, unknown)
        if self.wanted.on_unknown_values == OnUnknownValues.ERROR:
            check_unknown_values(self.spec, filled, own)
            return whole, selected
        # "adopt" takes a column without facts as it is, also what is NULL. Beside computed values, NULL is due.
        adopt = self.wanted.on_unknown_values == OnUnknownValues.ADOPT and not self.state.holds_values
        taken = {fragment: unknown[fragment] if adopt else rows for fragment, rows in filled}
        if not taken:
            return whole, selected
        some = np.isin(manifest.ids[whole], list(taken))
        tasks = FragmentTasks((), manifest, whole[some], NEW)
        left = list[_Due]()
        for due in (*selected, *(_Due(task, task.due) for task in tasks)):
            rows = taken.get(due.task.id)
            if rows is None:
                left.append(due)
            elif (rest := self._without_adopted(due, rows)) is not None:
                left.append(rest)
        if not self.state.facts:
            self.computed.learned.append(seen(self.dataset.version))
        self.computed.notes.append(adopted_note(sum(map(len, taken.values())), version))
        return whole[~some], left

    def _without_adopted(self, due: _Due, rows: Ranges) -> _Due | None:
        """Record rows of a fragment as adopted; return the work for the others, None if there is none."""
        adopted, task = Provenance(self.spec.udf_version, ADOPTED), due.task
        self.computed.learn(task.files, adopted, rows, all_live=rows.contains(due.live))
        self._add(ADOPTED, 1, len(rows))
        selected = None if task.selected is None else task.selected - rows
        rest = task.due - rows
        if not (rest if selected is None else selected):
            if others := task.files.live_rows - len(rows):
                self._leave(self._why_not(), others, due.given_up)
            return None
        kept = (*task.kept, (adopted, rows))
        task = replace(task, due=rest, missing=rest, selected=selected, kept=kept)
        return replace(due, task=replace(task, rows=len(task.chosen)), adopted=len(rows))

    def _with_checkpoints(
        self, dues: list[_Due], whole: FragmentTasks, index: CheckpointIndex | None, earlier: ReadJobs
    ) -> FragmentTasks:  # fmt: skip
        if index is None:
            return whole
        reusable = ReusableColumn(self.dataset, self.spec)
        if whole:
            self._add(whole.reason, len(whole), whole.rows)
        for due in dues:
            task = due.task
            self._count(task.reason, task.rows)
            self._add_given_up(due.given_up)
            if rest := task.files.live_rows - task.rows - due.given_up - due.adopted:
                self._count(f"{NOT_SELECTED} or {FRESH}" if self.spec.where else self._why_not(), rest)
        tasks, live = whole.replaced(due.task for due in dues), {due.task.id: due.live for due in dues}
        unfinished = earlier().unfinished
        return find_checkpointed(self.computed, reusable, tasks, live, index, self.spec.udf_version, unfinished)


def _added_again(
    dataset: lance.LanceDataset, names: Sequence[str], columns: Columns, facts: Facts, inputs: str
) -> tuple[str, ...]:
    """Return the columns that were removed and added again under their names since facts about inputs.

    Nothing is returned if another column was an input then, or if the versions of these facts were cleaned up.
    """
    now, then = columns.inputs_text.split(","), inputs.split(",")
    if len(now) != len(then):
        return ()
    pairs = zip(names, now, then, strict=True)
    changed = {int(before.partition(".")[0]): name for name, text, before in pairs if text != before}
    if not changed.keys().isdisjoint(TableFields(dataset).paths):
        return ()
    about = facts.table.filter(pc.equal(facts.table["inputs"], inputs))
    for version in sorted(about["at"].unique().to_pylist(), reverse=True):
        if (before := open_version_or_none(dataset, version)) is not None:
            called = TableFields(before).paths
            same = all(called.get(field) == name for field, name in changed.items())
            return tuple(changed.values()) if same else ()
    return ()


def _are_replaced(dataset: lance.LanceDataset, names: Sequence[str], columns: Columns, inputs: str) -> bool:
    """Whether each input in a fact is the current one, or a column that the current one replaced by promotion."""
    now, then, ids = columns.inputs_text.split(","), inputs.split(","), ids_by_name(dataset)
    called = {found[0]: name for name, found in ids.items() if "." not in name}

    def replaced(path: str) -> set[int]:
        root, _, rest = path.partition(".")
        before = columns_before(dataset.schema.field(root))
        if not rest:
            return set(before)
        return {ids[there][0] for one in before if (there := f"{called.get(one)}.{rest}") in ids}

    return len(now) == len(then) and all(
        text == before or int(before.partition(".")[0]) in replaced(path)
        for path, text, before in zip(names, now, then, strict=False)
    )
