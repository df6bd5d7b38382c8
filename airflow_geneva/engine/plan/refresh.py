"""Plan a refresh: find the changes of the source, the rows that a view lacks, and the rows that must leave it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from airflow_geneva.engine.checkpoint.facts import ColumnState
from airflow_geneva.engine.checkpoint.provenance import (
    MOST_RUNS,
    PriorFailures,
    Provenance,
    add_rows,
)
from airflow_geneva.engine.checkpoint.reuse import CheckpointIndex, RowIdLookup
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.checkpoint.view_snapshot import SHOWN, Origin, Snapshot, SourceFragment
from airflow_geneva.engine.choices import OnCodeChange
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.job.speed import history_once
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.filters import check_where, selected_offsets
from airflow_geneva.engine.lance_io.fragments import (
    OFFSET_BITS,
    Columns,
    FragmentFiles,
    columns_in,
    columns_of,
    consecutive_row_ids,
    garbage_collector_off,
    live_offsets,
    open_fragment,
    row_ids,
)
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.table_versions import (
    PlannedTable,
    open_version,
    open_version_or_none,
    reporting_cleaned_up,
)
from airflow_geneva.engine.plan.backfill import FAILED
from airflow_geneva.engine.plan.computed_rows import ComputedRows, find_checkpointed
from airflow_geneva.engine.plan.due_columns import Decisions, DueColumns
from airflow_geneva.engine.plan.due_rows import OtherCode
from airflow_geneva.engine.plan.model import Plan, ReasonCount, RefreshSpec
from airflow_geneva.engine.plan.renumbered_rows import RenumberedRows, find_renumbered
from airflow_geneva.engine.plan.request import RefreshRequest, check_sizing, checkpoints_ignored
from airflow_geneva.engine.plan.reusable_checkpoints import ReusableView, find_mismatches, look_beside
from airflow_geneva.engine.plan.shard import CarriedRows, FragmentTask, FragmentTasks, cut_shards
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.plan.swap_plan import ALL_ROW_IDS, SwapPlan
from airflow_geneva.engine.plan.unknown_values import answers_unknown_view, cannot_adopt
from airflow_geneva.engine.storage.engine_errors import is_engine_error
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.engine.views.definition import SOURCE_ROW_ID, OutputColumn, ViewDefinition
from airflow_geneva.engine.views.rows import RowIdArray, order_row_ids
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.udf.settings import UdfDefinition
    from airflow_geneva.engine.views.state import CommittedViewState


KeptRows: TypeAlias = "Callable[[lance.LanceDataset], Ranges]"
"""Finds the row ids that a query keeps of each cluster of duplicates in a version of its source."""

CHANGED, RECODED, REFLECTED, FILTERED = (
    "new or changed in the source",
    "some columns changed",
    "unchanged since the last refresh",
    "not selected by the query",
)


@dataclass(frozen=True, eq=False)
class RowsAgain:
    """Rows whose values the view has, with an origin, and on which some columns run again.

    Args:
        after: the origin of the rows afterwards.
        carried: the rows that keep the values of the other columns.
    """

    origin: Origin
    columns: tuple[str, ...]
    after: Origin
    rows: Ranges
    carried: Ranges


@dataclass(frozen=True, eq=False)
class ChangedFragment:
    """A source fragment with rows that the view does not reflect yet, or on which some UDFs run again.

    Args:
        rows: the rows that run.
        groups: the rows among them whose values the view has.
        renumbered: the rows that the view knows by another id, also those of other fragments.
    """

    files: FragmentFiles
    live: Ranges
    ids: Ranges
    rows: Ranges
    look_up: RowIdLookup
    groups: tuple[RowsAgain, ...] = ()
    renumbered: RenumberedRows = field(default_factory=RenumberedRows)

    @property
    def again(self) -> Ranges:
        return Ranges.union(group.rows for group in self.groups)

    @property
    def failed(self) -> Ranges:
        """The rows on which the last run failed."""
        return Ranges.union(group.rows for group in self.groups if group.origin.failed)

    @property
    def tried(self) -> PriorFailures:
        """The rows that failed with the current code, by the number of runs."""
        found: dict[int, Ranges] = {}
        add_rows(
            found, ((max(runs for _, runs in one.after.tried), one.rows) for one in self.groups if one.after.tried)
        )
        return tuple(sorted(found.items()))

    def ids_of(self, rows: Ranges) -> Ranges:
        if rows == self.live or not rows:
            return self.ids if rows else rows
        offsets, ids = self.look_up()
        return Ranges.from_offsets(ids[rows.mask(offsets)])


@dataclass
class SourceChanges:
    """The differences between a source version and the snapshot of a view.

    Args:
        gone: ids of rows that were deleted or changed, so that the view must not show their old values.
        fragments: all fragments of the source for the next snapshot, without new failures.
        history: finds the fragments from which the source's fragments were compacted.
        names: the columns that the query read at the snapshot; "" for one that cannot be compared any more.
    """

    history: ComputedRows
    names: tuple[str, ...]

    changed: list[ChangedFragment] = field(default_factory=list)
    gone: Ranges = field(default_factory=Ranges.empty)
    fragments: list[SourceFragment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given_up: int = 0


@dataclass(frozen=True)
class ComparedView:
    """What a refresh of a view has to do.

    Args:
        chosen: the fragments with the rows to compute.
        gone: the ids of the source rows that leave the view.
        matching: see `Snapshot`.
        renumbered: rows that stay in the view under another id.
    """

    changes: SourceChanges
    chosen: list[ChangedFragment]
    gone: Ranges
    matching: Ranges
    renumbered: RenumberedRows = field(default_factory=RenumberedRows)


def plan_refresh(
    view: TableLocation,
    definition: ViewDefinition,
    source: TableLocation,
    udfs: Mapping[str, UdfDefinition],
    view_state: CommittedViewState,
    request: RefreshRequest,
    newest: lance.LanceDataset | None = None,
    kept: KeptRows | None = None,
    replaced: Mapping[int, Offsets] | None = None,
) -> Plan:
    """Compare the source with the view's snapshot; write nothing.

    Args:
        newest: the source, if it is already open.
        kept: asked once, if rows of a deduplicated query have changed; None: plan all rows that may be kept.
        replaced: the addresses of rows of the source, by fragment, that others will have taken the place of when the
            refresh runs, so that no value of earlier code is at stake in them.
    """
    request.check()
    sizing = check_sizing(request.sizing)
    dataset = newest = source.open() if newest is None else newest
    if request.errors_only:
        dataset = _version_shown(dataset, definition, view_state, view.name)
    elif request.src_version is not None:
        dataset = open_version(dataset, request.src_version)
    with reporting_cleaned_up(source, dataset):
        _check_version(definition, dataset, view.name)
        definition.check_source(dataset)
        names = tuple(column.name for column in definition.reads)
        code = definition.code({name: udf.version for name, udf in udfs.items()})
        base, adopted = view_state.snapshot, False
        if base is None and view_state.newest.job_id and not view_state.newest.changed:
            adopted = answers_unknown_view(view_state, view.name, request.on_unknown_values)
        if adopted:
            base = _snapshot_of_rows(dataset, definition, view_state, code)
        before = dict(base.code) if base else {}
        recompute = request.on_code_change == OnCodeChange.RECOMPUTE
        due = DueColumns(definition.columns, dict(code), before, recompute, request.errors_only)
        with garbage_collector_off():
            kept = None if kept is None else cache(kept)
            compare = partial(_compare, dataset, definition, base, view_state, kept)
            # A plan that leaves values of earlier code counts them as one that recomputes them.
            recomputed = compare(due.strict, counts=not recompute) if due.asks or recompute else None
            other_code = _other_code(due, recomputed, replaced or {})
            if request.on_code_change == OnCodeChange.ERROR and not request.errors_only:
                other_code.check(view.name, due.now)
            found = recomputed if recomputed and recompute else compare(due)
            changes, chosen, gone, renumbered = found.changes, found.chosen, found.gone, found.renumbered
            spec = _work(view, definition, source, dataset, udfs, code, request, sizing, view_state)
            tasks = [_fragment_task(spec, item, view_state) for item in chosen]
            lacking = sorted(due.now.keys() - before.keys()) if request.errors_only else []
            spec = _with_calls(spec, tasks, chosen, view_state.newest.identity, lacking)
            index = CheckpointIndex(CheckpointStore(view.checkpoints), spec.reuse_rules) if chosen else None
            earlier = history_once(view.checkpoints, spec.describe())
            if index is not None:
                _, spec = look_beside(view.checkpoints, spec, index.places, earlier)
                reusable = ReusableView(dataset, spec, view_state.dataset)
                unfinished = earlier().unfinished
                held = find_checkpointed(changes.history, reusable, FragmentTasks(tasks), {}, index, SHOWN, unfinished)
                tasks = list(held)
            planned = FragmentTasks(tasks)
        changes.notes.extend(_notes(changes, renumbered, view_state))
        if definition.deduplicate is not None and kept is None and found.matching != _matching(base):
            changes.notes.append(
                "which of the changed rows are duplicates is found when the refresh runs: these are the most that it "
                "computes, and other rows may take the place of those that leave."
            )
        if request.errors_only and dataset.version < newest.version:
            changes.notes.append(
                f"the view stays at version {dataset.version} of its source; the next refresh brings it to the newest."
            )
        total, looked = dataset.count_rows(), sum(len(item.rows) for item in changes.changed)
        rows = sum(item.rows for item in tasks)
        reason_counts = [*_count_reasons(tasks)]
        if (left := looked - rows - len(renumbered)) > 0:
            reason_counts.append(ReasonCount(FILTERED, len(changes.changed), left))
        reason_counts.append(ReasonCount(REFLECTED, 0, total - sum(tally.rows for tally in reason_counts)))
        if request.errors_only:
            code = tuple(one for one in code if one[0] in before)  # columns that were added are not computed yet
        dropped = base.dropped if base else ()
        reads = _reads(dataset, names)
        snapshot = Snapshot(int(dataset.version), code, tuple(changes.fragments), found.matching, reads, dropped)
        if request.errors_only and base is not None and not tasks:
            snapshot = base  # no row ran with other code, so there is nothing to decide
        swap = SwapPlan(
            based_on=view_state.newest.identity,
            gone=gone,
            snapshot=snapshot.renamed(definition.keys),
            advances=base is None
            or adopted
            or (base.source_version, base.code, base.older, base.reads)
            != (dataset.version, snapshot.code, snapshot.older, snapshot.reads),
            max_rows_per_fragment=request.max_rows_per_fragment,
            shuffle_seed=definition.shuffle_seed,
            renumbered=renumbered,
        )
        idle = not (tasks or gone or swap.advances) and view_state.settled
        return Plan(
            spec=replace(spec, rows=rows),
            shards=cut_shards(planned, spec.sizing.shard_size),
            rows_total=total,
            reason_counts=tuple(reason_counts),
            rows_by_other_version=other_code.by_version,
            notes=tuple(changes.notes),
            mismatches=find_mismatches(index, planned),
            opened=(dataset, view_state.dataset),
            index=index,
            earlier=earlier,
            swap=replace(swap, idle=idle),
        )


def _compare(
    dataset: lance.LanceDataset,
    definition: ViewDefinition,
    base: Snapshot | None,
    view_state: CommittedViewState,
    kept: KeptRows | None,
    due: DueColumns,
    counts: bool = False,
) -> ComparedView:
    """Compare a source version with a view's snapshot; with `counts`, to ask about rows instead of computing them."""
    decide = Decisions(due, lambda: view_state.shown, definition.explode)
    changes = compare_source(dataset, tuple(column.name for column in definition.reads), base, decide)
    if base is None:
        changes.gone = ALL_ROW_IDS
    found = ComparedView(changes, *choose_rows(dataset, definition, changes, base, view_state, kept))
    # Only views renumber their rows, and a limited, shuffled or deduplicated query orders rows by row id.
    ordered = definition.compares_rows or definition.shuffle_seed is not None
    if base is None or ordered or SOURCE_ROW_ID not in dataset.schema.names:
        return found
    # Comparing values costs more than a cheap function that runs on them all anyway.
    if not counts and not any(map(decide.keeps_part, base.every_origin)):
        return found
    return _with_renumbered(dataset, base, decide, found)


def _other_code(
    due: DueColumns, recomputed: ComparedView | None, replaced: Mapping[int, Offsets]
) -> OtherCode:  # fmt: skip
    """Count the rows that run because other code computed their values, in a plan that recomputes them."""
    rows, columns, by_version = 0, set[tuple[str, str]](), Counter[str]()
    for item in recomputed.chosen if recomputed else ():
        held: dict[str, Ranges] = {}
        left = item.rows
        if (away := replaced.get(item.files.id)) is not None:
            left = left - Ranges.from_offsets(np.sort(away & OFFSET_BITS))
        for group in item.groups:
            if there := group.rows & left:
                found = due.of_other_code(group.origin)
                columns.update(found)
                add_rows(held, ((version, there) for _, version in found))
        rows += len(Ranges.union(held.values()))
        by_version.update({version: len(there) for version, there in held.items()})
    return OtherCode(rows, tuple(sorted(by_version.items())), columns)


def _snapshot_of_rows(
    source: lance.LanceDataset,
    definition: ViewDefinition,
    view_state: CommittedViewState,
    code: tuple[tuple[str, str], ...],
) -> Snapshot:
    """Make the snapshot that a view lacks from the source version that it shows, if it holds the rows of its query.

    Raises:
        UnknownValues: the version was cleaned up, or the query selects other rows of it.
    """
    number, name = view_state.newest.source_version, view_state.location.name
    if definition.deduplicate is not None:
        raise cannot_adopt(name, "which row its query keeps of each cluster of duplicates is not known any more")
    then = open_version_or_none(source, number)
    if then is None:
        raise cannot_adopt(name, f"version {number} of its source, which it shows, was cleaned up")
    names = tuple(column.name for column in definition.reads)
    changes = compare_source(then, names, None, Decisions.none())
    rows = changes.changed
    if definition.where is not None:
        selected = selected_offsets(then, [item.files.id for item in rows], definition.where)
        rows = [replace(item, rows=item.rows & selected.get(item.files.id, Ranges.empty())) for item in rows]
    wanted = matching = Ranges.union(item.ids_of(item.rows) for item in rows)
    if definition.has_limit:
        ordered = order_row_ids(matching.offsets(), definition.shuffle_seed, definition.limit, definition.offset)
        wanted = Ranges.from_offsets(np.sort(ordered))
    # A source row whose list is empty has no row in a view that explodes it.
    missing = Ranges.empty() if definition.explode else wanted - view_state.shown
    if missing or view_state.shown - wanted:
        raise cannot_adopt(name, f"it holds other rows than its query selects at version {number} of its source")
    matching = matching if definition.has_limit else Ranges.empty()
    return Snapshot(number, code, tuple(changes.fragments), matching, _reads(then, names))


def _reads(source: lance.LanceDataset, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, columns_of(source, (name,), (), None).inputs_text) for name in names)


def _version_shown(
    source: lance.LanceDataset, definition: ViewDefinition, view_state: CommittedViewState, view: str
) -> lance.LanceDataset:
    """Open the source version that a view shows, whose failed rows run again."""
    shown = view_state.snapshot
    if shown is None:
        raise InvalidInput(
            f"The failed rows of view {view!r} are not known: it was never refreshed, or other writers changed its "
            "rows. Refresh it first, without errors_only."
        )
    found = open_version_or_none(source, shown.source_version)
    if found is None:
        raise InvalidInput(
            f"View {view!r} shows version {shown.source_version} of {definition.source_table!r}, which was cleaned up, "
            "so its failed rows cannot be read. Refresh it first, without errors_only."
        )
    return found


def _notes(
    changes: SourceChanges,
    renumbered: RenumberedRows,
    view_state: CommittedViewState,
) -> Iterator[str]:
    if renumbered:
        yield (
            f"{counted(len(renumbered), 'row')} of the source came back under another row id with the same values: "
            "the view keeps what it has of them."
        )
    if changes.given_up:
        yield (
            f"given up after {MOST_RUNS} runs: {counted(changes.given_up, 'row')}. view.get_errors() says why; "
            "errors_only=True tries again."
        )
    if view_state.newest.changed:
        yield f"other writers changed the view's rows ({view_state.newest.changed}): all are written again."
    yield from view_state.taken_back


def _count_reasons(tasks: Sequence[FragmentTask]) -> Iterator[ReasonCount]:
    for reason in (CHANGED, RECODED, FAILED):
        if found := [item.rows for item in tasks if item.reason == reason]:
            yield ReasonCount(reason, len(found), sum(found))


def _check_version(definition: ViewDefinition, dataset: lance.LanceDataset, view: str) -> None:
    if not definition.stable_row_ids and dataset.version != definition.source_version:
        raise InvalidInput(
            f"Cannot refresh materialized view {view!r} to version {dataset.version} of table "
            f"{definition.source_table!r}: the table has no stable row IDs, so the view can be refreshed to version "
            f"{definition.source_version} only, which it was made from. Copy the table with "
            "db.copy_table(..., rewrite=True), which enables them, and make the view again."
        )


def compare_source(
    dataset: lance.LanceDataset,
    names: tuple[str, ...],
    snapshot: Snapshot | None,
    decide: Decisions,
    instead: Mapping[str, str] | None = None,
) -> SourceChanges:
    """Compare a source version with the snapshot of a view's newest swap; without a snapshot, all rows are new.

    Args:
        names: the columns of the source that the query reads.
        decide: which columns run on rows that the view reflects.
        instead: names of columns that are read in place of others, by the name of the replaced column.
    """
    columns, then_names = columns_then(dataset, names, snapshot, instead)
    state = ColumnState() if snapshot is None else snapshot.state(columns.inputs_text)
    history = computed_rows = ComputedRows(dataset, columns, then_names, state)
    if then_names != names:
        history = ComputedRows(dataset, columns_of(dataset, names, (), None), names, ColumnState())
    before = {} if snapshot is None else {f.signature: f for f in snapshot.fragments}
    found = SourceChanges(history, then_names)
    seen = cache(lambda: Ranges.union(f.ids for f in before.values()))
    here: list[Ranges] = []
    kept: set[str] = set()  # of fragments whose rows are all still there, in the same fragment or a compacted one
    for files in computed_rows.manifest.values():
        if files.live_rows == 0:
            continue
        then = before.get(files.signature)
        if then is not None and then.deletion == files.deletion and not decide.runs_on(then):
            kept.add(files.signature)
            left = decide.left(then)
            if history is not computed_rows:
                left = replace(left, signature=history.manifest[files.id].signature)
            found.fragments.append(left)
            found.given_up += len(then.failed)
            continue
        now = files if history is computed_rows else history.manifest[files.id]
        parents = _parents(files, computed_rows, before)
        kept.update(parent.signature for parent in parents)
        fragment, after, given_up = _changed(files, now, computed_rows, parents, seen, decide)
        if not parents:
            here.append(fragment.ids)
        found.given_up += given_up
        found.fragments.append(after)
        if fragment.rows:
            found.changed.append(fragment)
    if before:
        lost = Ranges.union(f.ids for signature, f in before.items() if signature not in kept)
        found.gone = lost - Ranges.union(here)
        if found.changed:
            renewed = Ranges.union(fragment.ids_of(fragment.rows) for fragment in found.changed)
            found.gone = found.gone | (renewed & seen())
    found.notes = computed_rows.notes
    return found


def columns_then(
    dataset: lance.LanceDataset,
    names: tuple[str, ...],
    snapshot: Snapshot | None,
    instead: Mapping[str, str] | None = None,
) -> tuple[Columns, tuple[str, ...]]:
    """Return the columns that a view's query read at its snapshot, with their names in this version of the source.

    They differ from the columns that it reads now if columns were added to the query or dropped from it.
    """
    reads = [] if snapshot is None else [((instead or {}).get(name, name), text) for name, text in snapshot.reads]
    if not reads or tuple(name for name, _ in reads) == names:
        return columns_of(dataset, names, (), None), names
    texts = [
        (name, columns_of(dataset, (name,), (), None).inputs_text if name in names else text) for name, text in reads
    ]
    now = [columns_in(dataset, text, ())[1][0] for _, text in texts]
    return read_columns(dataset, texts), tuple(now)


def read_columns(dataset: lance.LanceDataset, reads: Sequence[tuple[str, str]]) -> Columns:
    """Return the columns with some field ids, as a snapshot has them; the version may lack some of them."""
    parts = [columns_in(dataset, text, ())[0] for _, text in reads]
    inputs = tuple(fields for part in parts for fields in part.inputs)
    return Columns(inputs, (), (), tuple(hashed for part in parts for hashed in part.names))


def _changed(
    files: FragmentFiles,
    now: FragmentFiles,
    computed_rows: ComputedRows,
    parents: Sequence[SourceFragment],
    seen: Callable[[], Ranges],
    decide: Decisions,
) -> tuple[ChangedFragment, SourceFragment, int]:
    """Find the rows of a fragment that run; `seen` returns the row ids in the snapshot.

    `files` are those of the columns that the query read at the snapshot, `now` those of the columns that it reads now.
    `parents` is what `_parents` returns. Return also the fragment for the next snapshot, without new failures, and the
    number of rows that were given up.
    """
    ids, live = Ranges.union(parent.ids for parent in parents), Ranges.of(0, files.physical_rows)
    if not parents and (physical := consecutive_row_ids(open_fragment(computed_rows.dataset, files.id))):
        live = live_offsets(computed_rows.dataset, files)
        ids = Ranges(live.starts + physical.start, live.ends + physical.start)
    elif not parents:
        offsets, row_ids = computed_rows.rows(files)
        ids = Ranges.from_offsets(row_ids)
        live = Ranges.from_offsets(offsets) if files.deletion else live
    elif files.deletion:
        live = parents[0].live
    known = computed_rows.resolve(files, live) if parents or ids & seen() else {}
    fragment = ChangedFragment(now, live, ids, live, partial(computed_rows.rows, files))
    rows, given_up = live - Ranges.union(known.values()), 0
    groups, origins = list[RowsAgain](), list[tuple[Origin, Ranges]]()
    for provenance, held in known.items():
        origin, held = Origin.of(provenance), held & live
        group, after = _decide(decide, origin, held, partial(_shown_rows, fragment, held))
        origins += after
        if group is None:
            given_up += len(held) if origin.failed else 0
        else:
            groups.append(group)
            rows = rows | group.rows
    found = replace(fragment, rows=rows, groups=tuple(groups))
    return found, SourceFragment(now.signature, files.deletion, live, ids).with_origins(origins), given_up


def _decide(
    decide: Decisions, origin: Origin, held: Ranges, shown: Callable[[Ranges], Ranges]
) -> tuple[RowsAgain | None, list[tuple[Origin, Ranges]]]:
    """Find what runs on rows with an origin, if anything does, and their origins afterwards.

    `shown` returns those that the view shows; it is called with the ids of all rows that the view shows.
    """
    run = decide.columns(origin)
    after = decide.after(origin, run)
    if run == ():
        return None, [(after, held)]
    there = shown(decide.shown())
    # Rows that the view does not show run whole, so none of their values are of earlier code.
    whole = held - there if decide.exploded in run else Ranges.empty()
    # Rows that an exploded list left out may appear now. Others stay out, and nothing of them runs.
    rows = held if decide.exploded in run else there
    group = RowsAgain(origin, run, after, rows, Ranges.empty() if decide.runs_all(run) else there)
    return group, [(after, held - whole), (Origin(tried=after.tried), whole)]


def _shown_rows(fragment: ChangedFragment, rows: Ranges, shown: Ranges) -> Ranges:
    """Return the rows of a fragment that the view shows."""
    if shown.contains(fragment.ids):
        return rows
    offsets, ids = fragment.look_up()
    return rows & Ranges.from_offsets(offsets[shown.mask(ids)])


def _offsets_of(offsets: Offsets, ids: RowIdArray, wanted: Ranges) -> Ranges:
    return Ranges.from_offsets(offsets[wanted.mask(ids)])


def _parents(
    files: FragmentFiles, computed_rows: ComputedRows, before: Mapping[str, SourceFragment]
) -> list[SourceFragment]:  # fmt: skip
    """Return the fragments of the snapshot that hold the very rows of a fragment, if there are such.

    It is the fragment itself, or those that were compacted into it.
    """
    then = before.get(files.signature)
    if then is not None:
        return [then] if then.deletion == files.deletion else []
    compaction = computed_rows.compaction_of(files)
    if compaction is None or not compaction.alone or files.deletion:
        return []
    parts = [_parents(parent, computed_rows, before) for parent in compaction.replaced if parent.live_rows]
    return [parent for part in parts for parent in part] if all(parts) else []


def choose_rows(
    dataset: lance.LanceDataset,
    definition: ViewDefinition,
    changes: SourceChanges,
    base: Snapshot | None,
    view_state: CommittedViewState,
    kept: KeptRows | None = None,
) -> tuple[list[ChangedFragment], Ranges, Ranges]:
    """Return fragments with the rows to compute, the row ids that leave the view, and those that match the query.

    The last are what `Snapshot.matching` holds: none unless the query compares rows.

    Args:
        kept: see `plan_refresh`.
    """
    chosen = changes.changed
    if definition.where is not None and chosen:
        try:
            selected = selected_offsets(dataset, [item.files.id for item in chosen], definition.where)
        except BaseException as error:
            if is_engine_error(error):
                check_where(dataset, definition.where)  # raises if the filter is the cause
            raise
        chosen = [replace(item, rows=item.rows & selected.get(item.files.id, Ranges.empty())) for item in chosen]
    if not definition.compares_rows:
        return [item for item in chosen if item.rows], changes.gone, Ranges.empty()
    fresh = Ranges.union(item.ids_of(item.rows) for item in chosen)
    if definition.deduplicate is None:
        matching = (_matching(base) - changes.gone) | fresh
    else:
        matching = _kept(dataset, chosen, changes, base, kept)
    if definition.has_limit:
        before, limit, offset = view_state.shown, definition.limit, definition.offset
        stop = len(matching) if limit is None else min(offset + limit, len(matching))
        if not (fresh or changes.gone) and len(before) == max(stop - offset, 0):
            return [], changes.gone, matching
        wanted = Ranges.from_offsets(np.sort(order_row_ids(matching.offsets(), definition.shuffle_seed, limit, offset)))
    else:
        # Not what the view shows: it has no row of a kept row whose list is empty.
        before, wanted = _matching(base), matching
    gone = changes.gone | (before - wanted)
    missing = wanted - (before - gone)
    by_fragment = {item.files.id: item for item in chosen}
    names = tuple(column.name for column in definition.reads)
    found = [
        replace(then, rows=fragment.rows) if (then := by_fragment.get(fragment.files.id)) else fragment
        for fragment in (_fragments_of_rows(dataset, names, missing) if missing else ())
    ]
    # Rows that enter the view run whole, whatever the view had of them before.
    entering = {item.files.signature: item.rows - item.again for item in found}
    changes.fragments = [
        one.with_origins((origin, rows - entering[one.signature]) for origin, rows in one.unusual)
        if one.unusual and one.signature in entering
        else one
        for one in changes.fragments
    ]
    return found, gone, matching


def _kept(
    dataset: lance.LanceDataset,
    chosen: Sequence[ChangedFragment],
    changes: SourceChanges,
    base: Snapshot | None,
    kept: KeptRows | None,
) -> Ranges:
    """Return the rows that a deduplicated query keeps; if that is not known, those that it may keep.

    Args:
        chosen: the rows that run and that the filter selects.
        kept: see `plan_refresh`.
    """
    again = Ranges.union(item.ids_of(item.rows & item.again) for item in changes.changed)
    fresh = Ranges.union(item.ids_of(item.rows - item.again) for item in chosen)
    lost = changes.gone - again
    if base is not None and not fresh and not lost:
        return base.matching
    return (_matching(base) - lost) | fresh if kept is None else kept(dataset)


def _matching(base: Snapshot | None) -> Ranges:
    return Ranges.empty() if base is None else base.matching


def _with_renumbered(
    dataset: lance.LanceDataset, base: Snapshot, decide: Decisions, found: ComparedView
) -> ComparedView:  # fmt: skip
    """Recognize the new rows that the view knows by another id: what it has of them stays, or some columns run."""
    again = Ranges.union(item.ids_of(item.rows & item.again) for item in found.chosen)
    fresh = Ranges.union(item.ids_of(item.rows - item.again) for item in found.chosen)
    names, gone = found.changes.names, found.gone - again
    renumbered, by_origin = find_renumbered(dataset, names, base, gone, fresh)
    if not renumbered:
        return found
    chosen, origins = list[ChangedFragment](), dict[str, list[tuple[Origin, Ranges]]]()
    new, stay, given_up = Ranges.from_offsets(renumbered.new), Ranges.empty(), 0
    for item in found.chosen:
        offsets, ids = item.look_up()
        here = new.mask(ids.astype(np.int64))
        offsets, old = offsets[here], renumbered.back.follow(ids[here].astype(np.int64))
        rows, groups = item.rows - Ranges.from_offsets(offsets), list[RowsAgain]()
        for origin, rows_then in by_origin.items():
            theirs = rows_then.mask(old)
            if not theirs.any():
                continue
            held = Ranges.from_offsets(offsets[theirs])
            group, after = _decide(decide, origin, held, partial(_offsets_of, offsets[theirs], old[theirs]))
            origins.setdefault(item.files.signature, []).extend(after)
            if group is None:
                stay = stay | Ranges.from_offsets(old[theirs])
                given_up += len(held) if origin.failed else 0
            else:
                groups.append(group)
                rows = rows | group.rows
        if rows:
            chosen.append(replace(item, rows=rows, groups=(*item.groups, *groups), renumbered=renumbered))
    fragments = [
        one.with_origins([*one.unusual, *origins[one.signature]]) if one.signature in origins else one
        for one in found.changes.fragments
    ]
    found.changes.fragments, found.changes.given_up = fragments, found.changes.given_up + given_up
    return replace(found, chosen=chosen, gone=found.gone - stay, renumbered=renumbered.among(stay))


def _fragments_of_rows(
    dataset: lance.LanceDataset, names: tuple[str, ...], wanted: Ranges
) -> Iterator[ChangedFragment]:
    for files in read_manifest(dataset, columns_of(dataset, names, (), None)).values():
        if files.live_rows:
            offsets, ids = found = row_ids(dataset, files.id)
            live = Ranges.from_offsets(offsets)
            rows = Ranges.from_offsets(offsets[wanted.mask(ids)])
            if rows:
                every = Ranges.from_offsets(ids)
                look_up = lambda found=found: found  # noqa: E731
                yield ChangedFragment(files, live, every, rows, look_up)


def _work(
    view: TableLocation,
    definition: ViewDefinition,
    source: TableLocation,
    dataset: lance.LanceDataset,
    udfs: Mapping[str, UdfDefinition],
    code: tuple[tuple[str, str], ...],
    request: RefreshRequest,
    sizing: Sizing,
    view_state: CommittedViewState,
) -> RefreshSpec:
    described = [replace(column, udf=None, expect=None).to_document() for column in definition.columns]
    inputs = [list(column.inputs) for column in definition.columns]
    about = [described, inputs, code, definition.where, definition.explode]
    about += [] if definition.grouping is None else [str(definition.grouping)]
    version = md5(json.dumps(about, sort_keys=True))[:16]
    return RefreshSpec(
        job_id=request.job_id,
        table=view.uri,
        table_name=view.name,
        inputs=tuple(column.name for column in definition.reads),
        version=int(dataset.version),
        tables=(PlannedTable.of(source, dataset), PlannedTable.of(view, view_state.dataset)),
        read_version=request.src_version,
        udf_version=version,
        sizing=sizing,
        ignore_checkpoints=request.ignore_checkpoints or checkpoints_ignored(),
        max_failed=request.max_failed,
        indexes=request.indexes,
        agreement=md5(version),
        plain_blobs=(definition.shuffle_seed is not None or request.max_rows_per_fragment is not None)
        and any(is_blob(field) for field in view_state.dataset.schema),
        query=replace(definition, columns=tuple(_as_planned(c, udfs) for c in definition.columns)).to_json(),
    )


def _as_planned(column: OutputColumn, udfs: Mapping[str, UdfDefinition]) -> OutputColumn:
    if column.udf is None:
        return column
    return replace(column, udf=replace(udfs[column.name], import_path=column.udf.import_path))


def _fragment_task(spec: RefreshSpec, item: ChangedFragment, view_state: CommittedViewState) -> FragmentTask:
    kept = tuple((Provenance(spec.udf_version, failures=runs), rows) for runs, rows in item.tried)
    runs: dict[tuple[str, ...], Ranges] = {}
    for group in item.groups:
        udfs = tuple(name for name in group.columns if spec.definition.column(name).udf)
        add_rows(runs, [(udfs, found)] if (found := group.carried & item.rows) else [])
    carried = CarriedRows(tuple(sorted(runs.items()))) if runs else None
    reason = CHANGED if item.rows - item.again else RECODED if item.rows - item.failed else FAILED
    if carried is not None:
        ids = item.renumbered.back.follow(item.ids_of(carried.rows).offsets())
        known = Ranges.from_offsets(ids)
        places, renumbered = view_state.fragments_with(known), item.renumbered.among(known)
        carried = replace(carried, view_fragments=places, renumbered=renumbered)
    return FragmentTask(item.files, reason, item.rows, item.rows, len(item.rows), False, (), kept, carried=carried)


def _with_calls(
    spec: RefreshSpec,
    tasks: Sequence[FragmentTask],
    chosen: Sequence[ChangedFragment],
    shown: str,
    lacking: Sequence[str],
) -> RefreshSpec:
    """Count the rows by UDF column if some rows carry values; name the code of these values if it is another one.

    The carried values of `lacking` columns have no code: they were never computed.
    """
    if not any(fragment.carried for fragment in tasks):
        return spec
    calls = Counter[str]()
    for fragment in tasks:
        calls.update(fragment.rows_by_column(spec.udfs, fragment.due))
    groups = (group for item in chosen for group in item.groups if group.carried & item.rows)
    origins = {replace(group.after, tried=()) for group in groups}
    origins.discard(Origin())
    # Which rows have which origin changes with the rows of the view, so their swap is a part of it.
    said = [*(origin.to_json() for origin in sorted(origins)), *lacking]
    other = md5(json.dumps([shown, *said]))[:16] if said else ""
    return replace(spec, calls={name: rows for name, rows in calls.items() if rows}, carries=other)
