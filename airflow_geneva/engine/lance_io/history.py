"""Read a table's history: its commits, and the fragments that compacted fragments were made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    FragmentFiles,
    field_ids_present,
    fragment_files,
    open_fragment,
    row_ids,
)
from airflow_geneva.engine.lance_io.pylance_internals import path_of
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.table_versions import manifest_of, open_version_to_read, read_transaction
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors, is_unavailable
from airflow_geneva.engine.storage.files import in_threads
from airflow_geneva.engine.storage.uri import is_local
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

_MOST_AT_ONCE = 16
_MOST_VERSIONS = 1_000
_MOST_ASKED = 64
FragmentFilter = Callable[[FragmentFiles], bool]
Key = tuple[int, str]
"""A fragment's id, and the files of its inputs."""


@dataclass(frozen=True)
class Commit:
    """One commit, its operation one of ``lance.LanceOperation`` or None; `gone` if its version was cleaned up."""

    version: int
    operation: Any = None
    properties: Mapping[str, str] = field(default_factory=dict)
    gone: bool = False


def read_commit(dataset: lance.LanceDataset, version: int) -> Commit:
    try:
        with engine_errors():
            transaction = read_transaction(dataset, version)
    except EngineError as error:
        if is_unavailable(error):
            raise
        return Commit(version, gone=True)
    if transaction is None:
        return Commit(version)
    return Commit(version, transaction.operation, transaction.transaction_properties or {})


def commits_newest_first(
    dataset: lance.LanceDataset, newest: int, oldest: int = 1, at_once: int = 1
) -> Iterator[Commit]:
    """Read the commits of a range of versions, newest first.

    On an object store, the number of parallel reads starts at `at_once` and doubles, because most callers need only the
    first commits.
    """
    most = 1 if is_local(dataset.uri) else _MOST_AT_ONCE
    at_once = min(at_once, most)
    while newest >= oldest:
        versions = range(newest, max(newest - at_once, oldest - 1), -1)
        if len(versions) == 1:
            yield read_commit(dataset, newest)
        else:
            # pylance refuses two concurrent reads of one dataset object, so each thread gets a copy.
            yield from in_threads(lambda version: read_commit(copy.copy(dataset), version), versions, len(versions))
        newest, at_once = newest - len(versions), min(2 * at_once, most)


def commits_of_version(dataset: lance.LanceDataset, oldest: int = 1, at_once: int = 1) -> Iterator[Commit]:
    """Read the commits that are part of a version, newest first; commits that a restore undid are left out."""
    import lance

    newest = int(dataset.version)
    while newest >= oldest:
        for commit in commits_newest_first(dataset, newest, oldest, at_once):
            yield commit
            newest = commit.version - 1
            if isinstance(commit.operation, lance.LanceOperation.Restore):
                newest = int(commit.operation.version)
                break


def files_written(operation: Any) -> list[lance.fragment.DataFile]:
    """Return the data files that an operation added with new or changed values; a compaction changes no value."""
    import lance

    made = lance.LanceOperation
    if isinstance(operation, (made.Append, made.Overwrite)):
        return [file for fragment in operation.fragments for file in fragment.files]
    if replaced := replaced_files(operation):
        return [group.new_file for group in replaced]
    if isinstance(operation, made.Update):
        fields = set(operation.fields_modified)
        added = [file for fragment in operation.new_fragments for file in fragment.files]
        in_place = (file for fragment in operation.updated_fragments for file in fragment.files)
        return added + [file for file in in_place if fields & set(file.fields)]
    return []


def replaced_files(operation: Any) -> list[lance.LanceOperation.DataReplacementGroup]:
    """Return the fragments and their new files, if the operation is a DataReplacement."""
    import lance

    return operation.replacements if isinstance(operation, lance.LanceOperation.DataReplacement) else []


def was_overtaken(dataset: lance.LanceDataset, commit: Commit, following: Commit | None) -> bool:
    """Whether a commit that had to be the next one came too late: no version after it has its rows.

    Lance gives such a commit the next number if that is free, also if the version of that number was cleaned up.

    Args:
        following: the commit of the next version.
    """
    import lance

    made = lance.LanceOperation
    if following is None or following.version != commit.version + 1 or not isinstance(commit.operation, made.Overwrite):
        return False
    did = following.operation
    if isinstance(did, (made.Overwrite, made.Restore, made.Delete)) or getattr(did, "removed_fragment_ids", None):
        return False
    there = dataset if following.version == dataset.version else manifest_of(dataset, following.version)
    fragments = [fragment.metadata for fragment in there.get_fragments()]
    if isinstance(did, made.Rewrite):
        fragments += [fragment for group in did.groups for fragment in group.old_fragments]
    added = {file.path for file in files_written(commit.operation)}
    return bool(added) and added.isdisjoint(file.path for fragment in fragments for file in fragment.files)


@dataclass(frozen=True)
class Compaction:
    """One fragment that a compaction wrote; if it is `alone`, it holds all rows of the fragments that it replaced."""

    made: FragmentFiles
    replaced: tuple[FragmentFiles, ...]
    version: int
    alone: bool


@dataclass(frozen=True)
class Lineage:
    """The compactions that wrote fragments; `complete` if the history could be read as far back as requested."""

    parents: dict[Key, Compaction]
    complete: bool

    def made_by(self, fragment: FragmentFiles, same_output: bool = False) -> Compaction | None:
        """Return the compaction that wrote a fragment, if its inputs (and its output, if asked) are unchanged since."""
        found = self.parents.get(_key(fragment)) if self.parents else None
        return None if found is None or (same_output and found.made.output != fragment.output) else found

    def ancestors(
        self, fragment: FragmentFiles, passed_over: FragmentFilter, same_output: bool = False
    ) -> Iterator[FragmentFiles]:
        """Yield the ancestors of a fragment, nearest first, without those in `passed_over` and their own ancestors."""
        queue = [fragment]
        while queue:
            found = self.made_by(queue.pop(0), same_output)
            parents = [] if found is None else [parent for parent in found.replaced if not passed_over(parent)]
            yield from parents
            queue.extend(parents)


NO_LINEAGE = Lineage({}, True)


@dataclass(frozen=True, eq=False)
class Origin:
    """Rows of a replaced fragment, by offset, that a compaction moved unchanged into another fragment."""

    fragment: FragmentFiles
    offsets: Offsets
    row_ids: RowIds


@dataclass(frozen=True)
class History:
    """Reads the row ids of fragments in the planned and older versions, and caches them."""

    dataset: lance.LanceDataset
    _rows: dict[tuple[int, int], tuple[Offsets, RowIds]] = field(default_factory=dict)
    _versions: dict[int, lance.LanceDataset] = field(default_factory=dict)

    def rows(self, fragment_id: int, version: int) -> tuple[Offsets, RowIds]:
        """Return offsets and ids of a fragment's live rows; `EngineError` if the version was cleaned up."""
        if (fragment_id, version) not in self._rows:
            with self._open(version) as dataset:
                self._rows[fragment_id, version] = row_ids(dataset, fragment_id)
        return self._rows[fragment_id, version]

    def written_at(self, fragment: FragmentFiles, version: int) -> list[int]:
        """Return the versions that last updated and that created the fragment's first row; each may have written it."""
        names = ["_row_last_updated_at_version", "_row_created_at_version"]
        try:
            with self._open(version) as dataset:
                row = open_fragment(dataset, fragment.id).scanner(columns=names, limit=1).to_table()
        except EngineError:
            return []
        return list(dict.fromkeys(int(row[name][0].as_py()) for name in names if len(row)))

    @contextmanager
    def _open(self, version: int) -> Iterator[lance.LanceDataset]:
        """Open a version; convert pylance's errors to `EngineError`, because a plan can do without older versions."""
        if version == self.dataset.version:
            yield self.dataset
            return
        with engine_errors():
            if version not in self._versions:
                try:
                    self._versions[version] = open_version_to_read(self.dataset, version)
                except InvalidInput as error:
                    raise EngineError(str(error)) from error
            yield self._versions[version]

    def origins(
        self, lineage: Lineage, fragment: FragmentFiles, passed_over: FragmentFilter, same_output: bool = False
    ) -> Iterator[Origin]:
        """Yield the ancestors of a fragment, nearest first, with their rows; `EngineError` if a version was cleaned up.

        A row that was updated between two compactions keeps its id but has other values, so only rows that are live in
        every generation are followed.
        """
        queue: list[tuple[FragmentFiles, RowIds | None]] = [(fragment, None)]
        while queue:
            current, alive = queue.pop(0)
            compaction = lineage.made_by(current, same_output)
            parents = [] if compaction is None else [p for p in compaction.replaced if not passed_over(p)]
            if compaction is None or not parents:
                continue
            if alive is None:
                alive = self.rows(fragment.id, self.dataset.version)[1]
            living = Ranges.from_offsets(alive)
            for parent in parents:
                offsets, ids = self.rows(parent.id, compaction.version - 1)
                kept = living.mask(ids)
                yield Origin(parent, offsets[kept], ids[kept])
                queue.append((parent, ids[kept]))


def among(ids: RowIds, wanted: RowIds) -> npt.NDArray[np.bool_]:
    # Row ids form long runs, which are much faster to compare than single ids.
    return Ranges.from_offsets(wanted).mask(ids)


def _key(fragment: FragmentFiles) -> Key:
    # Deletions do not matter here: they only remove rows.
    return fragment.id, repr((fragment.inputs, fragment.where))


class _Waiting:
    """Fragments of unknown origin, each with a version that contains it."""

    def __init__(self, same_output: bool) -> None:
        self.same_output = same_output
        self.since: dict[Key, tuple[FragmentFiles, int]] = {}
        self._by_name: dict[Key | str, list[Key]] = {}

    def add(self, files: FragmentFiles, version: int) -> Key:
        key = _key(files)
        self.since[key] = files, version
        names: list[Key | str] = [key, *self.paths(files)]
        for name in names:
            self._by_name.setdefault(name, []).append(key)
        return key

    def paths(self, files: FragmentFiles) -> list[str]:
        """Return the data files whose writer determines the fragment's origin."""
        output = files.output if self.same_output else ()
        return [path for _, _, path in (*files.inputs, *files.where, *output)]

    def about(self, names: Iterable[Key | str]) -> list[Key]:
        """Return the fragments of unknown origin that have one of these keys or data files."""
        return list({key for name in names for key in self._by_name.get(name, ()) if key in self.since})


class Tracer:
    """Finds the compactions that wrote fragments, and reads as little of the history as possible.

    A fragment is explained once the compaction, or the other operation, that wrote it is known. Rows that did not move
    since record the version of that operation. For other fragments, the tracer reads the history backwards from the
    newest version. It then traces the fragments that a compaction replaced in the same way.
    """

    def __init__(self, history: History, columns: Columns) -> None:
        self.history = history
        self.columns = columns
        self._parents: dict[Key, Compaction] = {}
        self._written: set[str] = set()
        self._asked: set[Key] = set()
        newest = int(history.dataset.version)
        self._oldest = max(newest - _MOST_VERSIONS, 0)
        self._next = newest
        self._gap = False
        self._commits = commits_newest_first(history.dataset, newest, self._oldest + 1)

    def trace(
        self, fragments: Iterable[FragmentFiles], settled: FragmentFilter, since: int = 0, same_output: bool = False
    ) -> Lineage:
        """Trace fragments back to settled ones, whose ancestors are not needed.

        Args:
            since: the oldest version whose commit is relevant.
            same_output: a fragment whose output was written after its compaction counts as explained by that write.
        """
        newest = self.history.dataset
        waiting = _Waiting(same_output)
        for files in fragments:
            waiting.add(files, int(newest.version))
        self._explain(waiting, list(waiting.since), settled)
        while waiting.since and self._next > max(since, self._oldest) and not self._gap:
            # Alternate between reading the next older commit and reading the version that a fragment's rows record.
            commit = next(self._commits)
            self._next, self._gap = commit.version - 1, commit.gone
            self._explain(waiting, waiting.about(self._learn(commit)), settled)
            unasked = next((key for key in waiting.since if key not in self._asked), None)
            if unasked is not None and len(self._asked) < _MOST_ASKED:
                self._asked.add(unasked)
                for version in self.history.written_at(*waiting.since[unasked]):
                    if unasked in waiting.since:
                        self._explain(waiting, waiting.about(self._learn(read_commit(newest, version))), settled)
        return Lineage(self._parents, not waiting.since or (not self._gap and self._next <= since))

    def _explain(self, waiting: _Waiting, keys: list[Key], settled: FragmentFilter) -> None:
        """Remove explained fragments from `waiting`, and add the fragments that they were compacted from."""
        while keys:
            key = keys.pop()
            files, _ = waiting.since[key]
            made = self._parents.get(key)
            if made is not None:
                del waiting.since[key]
                for parent in made.replaced:
                    if parent.live_rows and _key(parent) not in waiting.since and not settled(parent):
                        keys.append(waiting.add(parent, made.version - 1))
            elif not self._written.isdisjoint(waiting.paths(files)):
                del waiting.since[key]

    def _learn(self, commit: Commit) -> Iterable[Key | str]:
        """Record the fragments that a commit wrote; return the keys of compacted ones, or the files that it wrote."""
        import lance

        if isinstance(commit.operation, lance.LanceOperation.Rewrite):
            found: dict[Key, Compaction] = {}
            written = set[str]()
            for group in commit.operation.groups:
                made_of, alone = list(group.old_fragments), len(list(group.new_fragments)) == 1
                # Give every new fragment all old ones as parents: only row ids tell which rows went where.
                replaced = tuple(fragment_files(fragment, self.columns) for fragment in made_of)
                if self._inputs_in(made_of) - self._inputs_in(group.new_fragments):
                    # An input was dropped, and Lance has assigned its field id to another column since.
                    written |= {path_of(file) for fragment in group.new_fragments for file in fragment.files}
                    continue
                for fragment in group.new_fragments:
                    files = fragment_files(fragment, self.columns)
                    found[_key(files)] = Compaction(files, replaced, commit.version, alone)
            self._parents.update(found)
            self._written |= written
            return [*found, *written]
        paths = {path_of(file) for file in files_written(commit.operation)}
        self._written |= paths
        return paths

    @cached_property
    def _inputs(self) -> set[int]:
        inputs = (field for fields in self.columns.inputs for field in fields)
        return field_ids_present(self.history.dataset).intersection(inputs)

    def _inputs_in(self, fragments: Iterable[Any]) -> set[int]:
        """Return the field ids of existing inputs for which fragments hold values."""
        held = {field for fragment in fragments for file in fragment.files for field in file.fields}
        return held & self._inputs
