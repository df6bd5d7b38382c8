"""The hidden tables of a view of groups: which rows they show, and which step of a refresh comes next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from airflow_geneva.engine.lance_io.history import commits_of_version
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.definition import ViewDefinition, grouping_of
from airflow_geneva.engine.views.grouping import groups_table, rows_table
from airflow_geneva.engine.views.state import CommittedViewState

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot

NEW, SETTLED, BEGUN, UNKNOWN = "new", "settled", "begun", "unknown"
"""States of the hidden tables; see `GroupTables.state`."""

TOUCHED_GROUPS = "touched groups: "
"""Comes before `GroupsCommit.told` where users read it."""

_SOURCE_VERSION, _SOURCE_WRITTEN = "geneva.groups.src_version", "geneva.groups.src_written"
_BASED_ON, _BEFORE, _TOLD = "geneva.groups.based_on", "geneva.groups.before", "geneva.groups.told"
_FOLLOWS = "geneva.groups.follows"
_SAID = {_SOURCE_WRITTEN, _BASED_ON, _BEFORE, _TOLD, _FOLLOWS}
_LONGEST = 500


@dataclass(frozen=True)
class GroupsCommit:
    """The commit that wrote the newest rows of the table `groups`.

    A later commit repeats it if another column of the source begins to be followed and no group is touched.

    Args:
        source_version: the source version whose rows the groups have.
        source_written: the time of that version, which differs in a source that was created again.
        based_on: identifies what the table `rows` showed before: until it shows something else, the refresh that wrote
            the groups has not gone on.
        before: the version of the table `groups` that the commit replaced.
        told: says which groups it touched, and which is the largest.
        follows: the columns of the source whose changes touch groups, each with the version of the table `groups` since
            which they have done so without a gap; None: since this commit.
    """

    source_version: int
    source_written: int
    based_on: str
    before: int
    told: str
    follows: Mapping[str, int | None]

    @staticmethod
    def newest(groups: lance.LanceDataset) -> GroupsCommit | None:
        """Find the commit in the history of a version; None if there is none, or if it was cleaned up.

        Also None if it says less than is read here, as other releases may: then all groups are found anew.
        """
        for commit in commits_of_version(groups):
            said = commit.properties
            if _SOURCE_VERSION in said:
                if not said.keys() >= _SAID:
                    return None
                version, written = int(said[_SOURCE_VERSION]), int(said[_SOURCE_WRITTEN])
                follows = _followed(said[_FOLLOWS], commit.version)
                before, told = int(said[_BEFORE]), said[_TOLD][:_LONGEST]
                return GroupsCommit(version, written, said[_BASED_ON], before, told, follows)
            if commit.gone:
                return None
        return None

    @property
    def properties(self) -> dict[str, str]:
        of_source = {_SOURCE_VERSION: str(self.source_version), _SOURCE_WRITTEN: str(self.source_written)}
        based_on = {_BASED_ON: self.based_on, _BEFORE: str(self.before)}
        return {**of_source, **based_on, _TOLD: self.told, _FOLLOWS: json.dumps(dict(self.follows))}

    def source_in(self, table: lance.LanceDataset) -> lance.LanceDataset | None:
        """Check out the version of the source; None if it was cleaned up, or if the source was created again."""
        found = open_version_or_none(table, self.source_version)
        return found if found is not None and written_at(found) == self.source_written else None

    def is_of_another(self, table: lance.LanceDataset) -> bool:
        """Whether the source was created again, as far as the version tells it: one that was cleaned up does not."""
        found = open_version_or_none(table, self.source_version)
        return found is not None and written_at(found) != self.source_written


def _followed(text: str, version: int) -> dict[str, int | None]:
    """Read what a commit that wrote a version follows; what is damaged is not followed."""
    try:
        since = parse(text)
    except ValueError:
        return {}
    known = since.items() if isinstance(since, dict) else ()
    return {name: version if at is None else at for name, at in known if at is None or type(at) is int}


@dataclass(frozen=True)
class GroupTables:
    """The newest versions of the two hidden tables of a view; None if they do not exist yet."""

    rows: lance.LanceDataset | None
    groups: lance.LanceDataset | None
    shown: CommittedViewState | None
    commit: GroupsCommit | None

    @staticmethod
    def open(view: TableLocation) -> GroupTables:
        rows, groups = rows_table(view), groups_table(view)
        if not (rows.exists() and groups.exists()):
            return GroupTables(None, None, None, None)
        of_rows, of_groups = rows.open(), groups.open()
        return GroupTables(of_rows, of_groups, CommittedViewState(rows, of_rows), GroupsCommit.newest(of_groups))

    @property
    def state(self) -> str:
        """Say whether the tables show the same rows, or which step of a refresh comes next.

        ``begun``: the groups are those of `commit.source_version`, to which the table `rows` was not refreshed yet.
        ``unknown``: others changed the tables, or two refreshes to different versions ran at the same time.
        """
        if self.shown is None:
            return NEW
        newest, commit = self.shown.newest, self.commit
        # Functions that can be folded rely on it that no row of the table `rows` comes back: its newest version tells
        # which rows are new since an earlier one.
        if newest.changed or newest.restores or (commit is None and newest.job_id):
            return UNKNOWN
        if self.source_version is None and not newest.job_id:
            return SETTLED  # the table `rows` is new: all groups are found anew, whatever there is
        if commit is None or self.source_version == commit.source_version:
            return SETTLED
        if commit.based_on == newest.identity:
            return BEGUN
        return SETTLED if newest.source_version == commit.source_version else UNKNOWN

    def state_for(self, definition: ViewDefinition, shown: Snapshot | None) -> str:
        """Say the same for what a view shows: a restore may bring back columns of which changes were not looked for.

        ``unknown`` then, unless all that its columns read was followed since the table `groups` had what it shows.
        """
        followed = self.follows
        if followed is None or shown is None or definition.grouping is None:
            return self.state
        columns = [column for column in definition.columns if column.is_in(dict(shown.code))]
        read = [name for name, *_ in grouping_of(definition.grouping, columns).reads]
        missed = any(followed.get(name, shown.source_version + 1) > shown.source_version for name in read)
        return UNKNOWN if missed else self.state

    @cached_property
    def follows(self) -> Mapping[str, int] | None:
        """The columns whose changes touch groups, with versions as in `GroupsCommit`; None: all groups are due."""
        snapshot = None if self.shown is None else self.shown.snapshot
        if snapshot is None or self.commit is None:
            return None
        read = {name for name, _ in snapshot.reads}
        return {name: at for name, at in self.commit.follows.items() if at is not None and name in read}

    def commit_of(self, version: int | None) -> GroupsCommit | None:
        """Return the commit that wrote the groups of a version of the table `groups`; None if it is not known."""
        then = None if self.groups is None or version is None else open_version_or_none(self.groups, version)
        return None if then is None else GroupsCommit.newest(then)

    def rows_show(self, commit: GroupsCommit | None) -> bool:
        """Whether the table `rows` shows the rows of the groups of a commit."""
        if commit is None or self.commit is None:
            return False
        if self.state == SETTLED:
            newest = self.commit
            return (commit.source_version, commit.source_written) == (newest.source_version, newest.source_written)
        return self.state == BEGUN and self.source_version == commit.source_version

    @cached_property
    def source_version(self) -> int | None:
        """The source version that the table `rows` shows; None before its first refresh."""
        snapshot = None if self.shown is None else self.shown.snapshot
        return None if snapshot is None else snapshot.source_version


def source_version_of(view: TableLocation, definition: ViewDefinition, shown: CommittedViewState) -> int | None:
    """Return the version of the source that a view shows; None if it is not known."""
    if definition.grouping is None or shown.source_version is None:
        return shown.source_version
    hidden = GroupTables.open(view)
    commit = hidden.commit_of(shown.source_version)
    if commit == hidden.commit and hidden.state_for(definition, shown.snapshot) == SETTLED:
        return hidden.source_version  # later versions of the source have touched no group
    return None if commit is None else commit.source_version


def groups_of(view: TableLocation) -> lance.LanceDataset | None:
    """Open the table `groups` of a view; None before its first refresh."""
    groups = groups_table(view)
    return groups.open() if groups.exists() else None
