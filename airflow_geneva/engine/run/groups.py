"""Refresh a view of groups: bring its two hidden tables to a version of the source, then plan it over them.

1. Plan the table `rows`, an ordinary view of the source, against the source version. The groups of the rows that leave
   it or come into it are touched.
2. Replace the touched groups in the table `groups`, in one commit, which says what the table `rows` showed before.
3. Refresh the table `rows`.
4. Plan the view over the table `groups`, as any view over a table. The tasks read the rows of a group by the table
   `rows`.

A process that dies between two of these steps leaves tables that say which step comes next: `GroupTables.state`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_geneva.engine.apply.group_columns import GroupColumns
from airflow_geneva.engine.apply.shuffled_rows import ShuffleColumns
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.commit.group_table import (
    by_fragment,
    compact,
    create_groups,
    has_many_fragments,
    index_column,
    replace_groups,
    without_groups,
)
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.meter import JobMeter, Stopwatch
from airflow_geneva.engine.lance_io.conflicts import commit_tries, is_undecided
from airflow_geneva.engine.lance_io.fragments import OFFSET_BITS, FragmentFiles
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.table_versions import (
    PlannedTable,
    open_version,
    open_version_or_none,
    reporting_cleaned_up,
)
from airflow_geneva.engine.plan.due_columns import Decisions
from airflow_geneva.engine.plan.model import Plan, ReasonCount
from airflow_geneva.engine.plan.refresh import CHANGED, REFLECTED, choose_rows, compare_source, plan_refresh
from airflow_geneva.engine.plan.renumbered_rows import RenumberedRows
from airflow_geneva.engine.plan.request import RefreshRequest, cap_rows, check_sizing
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks, cut_shards
from airflow_geneva.engine.plan.swap_plan import ALL_ROW_IDS
from airflow_geneva.engine.run.pipeline import run_new
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.touched_groups import RowChanges, TouchedGroups, find_touched
from airflow_geneva.engine.run.view import definitions_now, load_udfs
from airflow_geneva.engine.runtime import uuid
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.requests import give_back
from airflow_geneva.engine.udf.definition import check_view_type
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.engine.views.definition import OutputColumn, ViewDefinition, fold_columns
from airflow_geneva.engine.views.group_tables import BEGUN, NEW, SETTLED, TOUCHED_GROUPS, GroupsCommit, GroupTables
from airflow_geneva.engine.views.grouping import (
    HASH,
    SHARED,
    TABLE_ID,
    Grouping,
    groups_schema,
    groups_table,
    hash_of_key,
    key_schema,
    rows_table,
)
from airflow_geneva.engine.views.rows import create_view
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.run")

_ROWS_PER_FRAGMENT = 1 << 20
_ROWS_WORTH_A_SHUFFLE, _PART_WORTH_A_SHUFFLE = 1 << 20, 4
"""Rows of the source, and the part of the groups, from which a shuffle on Spark is faster than reads by row id."""
_MOST_SHUFFLED = 8 << 20
"""Groups of which every sending process holds 16 bytes each."""
_LOST = "others changed its hidden tables, or two refreshes to different versions ran at the same time"
_UNREAD = "it was restored, and has columns again whose source columns its hidden tables have not followed since"


@dataclass(frozen=True)
class GroupsRefresh:
    """A refresh of a view of groups: what it is asked for, and where its tables lie.

    Args:
        definition: the view's, which is about its table `groups`.
        code: the definitions of its functions, with their code as it is now.
        shown: what the newest version of the view shows.
    """

    view: TableLocation
    definition: ViewDefinition
    source: TableLocation
    code: Mapping[str, UdfDefinition]
    shown: CommittedViewState
    request: RefreshRequest

    @property
    def grouping(self) -> Grouping:
        assert self.definition.grouping is not None
        return self.definition.grouping

    def plan(self, writes: bool) -> Plan:
        """Plan the refresh; if it `writes`, bring the hidden tables to the source version first.

        Otherwise the plan has the touched groups in a fragment that does not exist, and cannot be run.

        Raises:
            InvalidInput: the source no longer fits the view, a group is too large, or an argument is not valid.
        """
        self.request.check()
        check_sizing(self.request.sizing)
        newest = self.source.open()
        if self.request.errors_only:
            return self._plan_failed(newest)
        version = self.request.src_version
        at = newest if version is None else open_version(newest, version)
        if not writes:
            return self._shuffling(self._plan_touched(at), at.count_rows(), self._no_groups(at))
        before, hidden = GroupTables.open(self.view), self._brought_to(at)
        assert hidden.groups is not None
        plan = self._with_rows_before(self._plan_over(hidden, at), before)
        plan = self._shuffling(plan, at.count_rows(), hidden.groups)
        snapshot, commit = self.shown.snapshot, hidden.commit
        if commit is None or (snapshot is not None and snapshot.source_version > commit.before):
            return plan  # the view shows these groups
        return replace(plan, notes=(*plan.notes, f"{TOUCHED_GROUPS}{commit.told}."))

    def _plan_failed(self, newest: lance.LanceDataset) -> Plan:
        """Plan to run the failed groups, at the version that the view shows."""
        hidden, snapshot, name = GroupTables.open(self.view), self.shown.snapshot, self.view.name
        then = None
        if snapshot is not None and hidden.groups is not None and hidden.state == SETTLED:
            then = open_version_or_none(hidden.groups, snapshot.source_version)
        if then is None or hidden.source_version is None or GroupsCommit.newest(then) != hidden.commit:
            raise InvalidInput(
                f"The failed groups of view {name!r} cannot run alone: it was never refreshed, or a refresh has begun "
                "since that did not end. Refresh it first, without errors_only."
            )
        at = open_version_or_none(newest, hidden.source_version)
        if at is None or not _changes(at, self._plan_rows(hidden, at)).empty:
            raise InvalidInput(
                f"View {name!r} shows version {hidden.source_version} of {self.definition.source_table!r}, which was "
                "cleaned up or created again, so its failed groups cannot be read. Refresh it first, without "
                "errors_only."
            )
        plan = self._plan_over(replace(hidden, groups=then), at)
        if at.version == newest.version:
            return plan
        note = f"the view stays at version {at.version} of its source; the next refresh brings it to the newest."
        return replace(plan, notes=(*plan.notes, note))

    def _plan_over(self, hidden: GroupTables, at: lance.LanceDataset) -> Plan:
        """Plan the view over its table `groups`, whose rows are read from a version of the source."""
        assert hidden.rows is not None
        request = replace(self.request, src_version=None)
        places = groups_table(self.view), rows_table(self.view)
        plan = plan_refresh(self.view, self.definition, places[0], self.code, self.shown, request, hidden.groups)
        groups, *_, view = plan.spec.tables
        read = PlannedTable.of(self.source, at), PlannedTable.of(places[1], hidden.rows)
        return plan.with_work(tables=(groups, *read, view), read_version=self.request.src_version)

    def _shuffling(self, plan: Plan, rows: int, groups: lance.LanceDataset) -> Plan:
        """Let Spark bring the rows of groups together if a large part of the groups is computed."""
        count = plan.rows_to_run
        columns = ShuffleColumns.of(self.grouping, self.definition.columns).columns
        is_large = count * _PART_WORTH_A_SHUFFLE >= plan.rows_total and count <= _MOST_SHUFFLED
        if rows < _ROWS_WORTH_A_SHUFFLE or not is_large or not columns.reads_rows or groups.count_rows(f"`{SHARED}`"):
            return plan
        return plan.with_work(shuffles=True)

    def _with_rows_before(self, plan: Plan, before: GroupTables) -> Plan:
        """Tell the tasks where rows are that groups have lost, for functions that remove them from a state."""
        removes = any(one.removes for one in fold_columns(self.definition.columns))
        if not removes or before.rows is None or self._state(before) != SETTLED or before.source_version is None:
            return plan
        source = self.source.open()
        if before.commit is None or before.commit.source_in(source) is None:
            return plan
        # Later versions of the source that touched no group are those of which the table `rows` tells.
        if open_version_or_none(source, before.source_version) is None:
            return plan
        return plan.with_work(rows_before=(int(before.rows.version), before.source_version))

    def _brought_to(self, at: lance.LanceDataset) -> GroupTables:
        """Bring the hidden tables to a version of the source."""
        rows, groups = rows_table(self.view), groups_table(self.view)
        for _ in commit_tries(f"the groups of view {self.view.name!r}", "bring them to a version of the source"):
            hidden = self._open_or_create(at)
            if hidden.shown is None:  # another refresh has dropped it, to find the groups anew
                continue
            state = self._state(hidden)
            if state == BEGUN:
                assert hidden.commit is not None
                then = hidden.commit.source_in(at)
                if then is not None:
                    _refresh_rows(rows, self._plan_rows(hidden, then))
                    continue
            based_on = hidden.shown.newest.identity
            if state != SETTLED and based_on:
                why = _LOST if state == hidden.state else _UNREAD
                logger.warning("The groups of view %r are found anew: %s.", self.view.name, why)
                _drop(rows)
                continue
            assert hidden.groups is not None
            plan = self._plan_rows(hidden, at)
            changes = _changes(at, plan)
            if changes.empty and state == SETTLED and None not in self._follows(hidden).values():
                if plan.swap is not None and plan.swap.advances:
                    _refresh_rows(rows, plan)
                return hidden
            if has_many_fragments(hidden.groups):
                compact(groups)
                hidden = GroupTables.open(self.view)
                if self._state(hidden) != state or hidden.shown is None or hidden.shown.newest.identity != based_on:
                    continue
            assert hidden.groups is not None
            # A new table `rows` beside other groups says nothing of these: all of them are replaced.
            touched = self._touched(changes, hidden if state == SETTLED else replace(hidden, rows=None))
            commit = self._commit(at, hidden, touched, changes.empty and state == SETTLED)
            table = touched.table(hidden.groups.schema)
            try:
                replace_groups(groups, hidden.groups, by_fragment(touched.gone), table, touched.row_ids, commit)
            except OSError as error:
                if is_undecided(error):
                    continue
                raise
            _refresh_rows(rows, plan)
            hidden = GroupTables.open(self.view)
            if hidden.state == SETTLED and hidden.source_version == at.version:
                return hidden
        raise AssertionError("commit_tries raises after its last try")

    def _commit(self, at: lance.LanceDataset, hidden: GroupTables, touched: TouchedGroups, same: bool) -> GroupsCommit:
        """Describe the next commit of the table `groups`; the `same` groups stay those of the commit before."""
        assert hidden.shown is not None
        assert hidden.groups is not None
        follows = self._follows(hidden)
        if same and hidden.commit is not None:
            # The table `rows` gets no other version, by which one could see that the refresh has gone on.
            return replace(hidden.commit, follows=follows)
        told, before = touched.told(hidden.groups, self.grouping.keys), int(hidden.groups.version)
        return GroupsCommit(int(at.version), written_at(at), hidden.shown.newest.identity, before, told, follows)

    def _follows(self, hidden: GroupTables) -> dict[str, int | None]:
        """Return what the next commit of the table `groups` follows; None for a column that it begins to follow."""
        followed = hidden.follows
        return {one.name: 0 if followed is None else followed.get(one.name) for one in self.definition.source_reads}

    def _state(self, hidden: GroupTables) -> str:
        return hidden.state_for(self.definition, self.shown.snapshot)

    def _open_or_create(self, at: lance.LanceDataset) -> GroupTables:
        hidden = GroupTables.open(self.view)
        if hidden.state != NEW:
            return hidden
        self._create(at)
        return GroupTables.open(self.view)

    def _create(self, at: lance.LanceDataset) -> None:
        rows, groups = rows_table(self.view), groups_table(self.view)
        keys = key_schema(self.grouping.keys, {field.name: field.type for field in at.schema})
        definition = self._of_rows
        definition.check_source(at)
        if not rows.exists():
            metadata = {**definition.metadata(), TABLE_ID: uuid.uuid4().hex}
            schema = pa.schema([pa.field(HASH, pa.int64())], metadata=metadata)
            try:
                create_view(rows, schema, (), _ROWS_PER_FRAGMENT, int(at.version))
            except InvalidInput:
                if not rows.exists():  # another refresh has created it
                    raise
        fault_point("groups.create")
        create_groups(groups, groups_schema(keys))

    @property
    def _of_rows(self) -> ViewDefinition:
        """The definition of the table `rows`."""
        hashed = OutputColumn(HASH, "udf", "int64", udf=hash_of_key.definition(self.grouping.keys))
        return replace(
            self.definition,
            where=self.grouping.where,
            columns=(hashed,),
            all_columns=False,
            explode=None,
            reads=self.definition.source_reads,
            grouping=None,
        )

    def _plan_rows(self, hidden: GroupTables, at: lance.LanceDataset) -> Plan:
        assert hidden.shown is not None
        request = RefreshRequest(src_version=int(at.version), on_unknown_values="recompute")
        code = {HASH: hash_of_key.definition(self.grouping.keys)}
        return plan_refresh(rows_table(self.view), self._of_rows, self.source, code, hidden.shown, request, at)

    def _touched(self, changes: RowChanges, hidden: GroupTables) -> TouchedGroups:
        limit = check_sizing(self.request.sizing).batch_bytes
        touched = find_touched(self.grouping, changes, hidden.rows, hidden.groups, limit)
        columns = self.definition.columns
        if GroupColumns.of(columns, {column.name for column in columns}).reads_rows:
            touched.check(self.grouping, self.view.name)
        return touched

    def _plan_touched(self, at: lance.LanceDataset) -> Plan:
        """Plan without writing: the groups that are touched, and those that the view lacks already."""
        hidden = GroupTables.open(self.view)
        state = self._state(hidden)
        begun = state == BEGUN and hidden.commit is not None and hidden.commit.source_in(at) is not None
        if begun or state == SETTLED:
            changes = _changes(at, self._plan_rows(hidden, at))
            if changes.empty:
                return self._plan_over(hidden, at)
        else:
            changes = self._every_row(at)
            hidden = replace(hidden, rows=None)
        touched = self._touched(changes, hidden)
        groups = hidden.groups if hidden.groups is not None else self._no_groups(at)
        request = replace(self.request, src_version=None)
        place, gone = groups_table(self.view), by_fragment(touched.gone)
        over = plan_refresh(self.view, self.definition, place, self.code, self.shown, request, groups, replaced=gone)
        return _with_touched(over, touched, groups, PlannedTable.of(self.source, at), self.grouping.keys)

    def _every_row(self, at: lance.LanceDataset) -> RowChanges:
        definition = self._of_rows
        definition.check_source(at)
        names = tuple(column.name for column in definition.reads)
        changes = compare_source(at, names, None, Decisions.none())
        chosen, _, _ = choose_rows(at, definition, changes, None, self.shown)
        return RowChanges(at, [(item.files, item.rows) for item in chosen], ALL_ROW_IDS, RenumberedRows())

    def _no_groups(self, at: lance.LanceDataset) -> lance.LanceDataset:
        keys = key_schema(self.grouping.keys, {field.name: field.type for field in at.schema})
        return without_groups(groups_schema(keys))


def _changes(at: lance.LanceDataset, plan: Plan) -> RowChanges:
    assert plan.swap is not None
    tasks = [(task.files, task.due) for task in plan.fragments]
    return RowChanges(at, tasks, plan.swap.gone, plan.swap.renumbered)


def _refresh_rows(rows: TableLocation, plan: Plan) -> None:
    """Refresh the table `rows`, in this process."""
    udfs = Udfs(dict.fromkeys(plan.spec.udfs, hash_of_key))
    with JobMeter(rows.name).measuring():  # the meter of the caller is that of the view
        result = run_new(plan, rows, udfs, RunnerName.INLINE, Stopwatch())
    give_back(result.store_requests)  # to the job of the view
    fault_point("groups.rows")
    if has_many_fragments(rows.open()):
        compact(rows)
    index_column(rows, HASH)


def _drop(table: TableLocation) -> None:
    import lance

    lance.LanceDataset.drop(table.uri, **table.access)


def _with_touched(
    plan: Plan, touched: TouchedGroups, groups: lance.LanceDataset, source: PlannedTable, keys: Sequence[str]
) -> Plan:
    """Return a plan over the table `groups` as if the touched groups were replaced, and came in a new fragment."""
    gone = by_fragment(touched.gone)
    left = (_without(task, gone.get(task.id)) for task in plan.fragments)
    tasks = [task for task in left if task is not None]
    count = len(touched.rows)
    if count:
        last = max((fragment.fragment_id for fragment in groups.get_fragments()), default=-1)
        files = FragmentFiles(last + 1, count, "", 0, (), (), (), 0)
        tasks.append(FragmentTask(files, CHANGED, Ranges.of(0, count), Ranges.of(0, count), count))
    rows, total = sum(task.rows for task in tasks), groups.count_rows() - len(touched.gone) + count
    reasons = dict.fromkeys((CHANGED, *(task.reason for task in tasks)))
    tallies = [
        ReasonCount(reason, len(found), sum(task.rows for task in found))
        for reason in reasons
        if (found := [task for task in tasks if task.reason == reason])
    ]
    view = plan.spec.tables[-1]
    plan = plan.with_work(rows=rows, tables=(plan.spec.tables[0], source, view))
    notes = [f"{TOUCHED_GROUPS}{touched.told(groups, keys)}."]
    lost = Ranges.from_offsets(touched.lost)
    swap = None if plan.swap is None else replace(plan.swap, gone=plan.swap.gone | lost, advances=True, idle=False)
    return replace(
        plan,
        shards=cut_shards(FragmentTasks(tasks), plan.spec.sizing.shard_size),
        rows_total=total,
        reason_counts=(*tallies, ReasonCount(REFLECTED, 0, total - rows)),
        notes=(*plan.notes, *notes),
        swap=swap,
    )


def _without(task: FragmentTask, addresses: Offsets | None) -> FragmentTask | None:
    """Return the work on a fragment without some rows; None if none is left."""
    if addresses is None:
        return task
    due = task.due - Ranges.from_offsets(addresses & OFFSET_BITS)
    if not due:
        return None
    carried = task.carried.within(due) if task.carried is not None else None
    return replace(task, due=due, missing=task.missing & due, rows=len(due), staged=False, carried=carried)


def plan_groups(
    view: TableLocation,
    definition: ViewDefinition,
    source: TableLocation,
    request: RefreshRequest,
    newest: lance.LanceDataset,
    to_run: bool,
) -> Plan:
    """Plan the refresh of a view of groups; see `plan_refresh` in `engine/api.py`."""
    code = definitions_now(definition, load_udfs(definition))
    for name, udf in code.items():
        column = definition.column(name)
        check_view_type(view.name, name, column.type, udf, column.udf if column.field else None)
    with reporting_cleaned_up(view, newest):
        shown = CommittedViewState(view, newest)
        return cap_rows(GroupsRefresh(view, definition, source, code, shown, request).plan(to_run))
