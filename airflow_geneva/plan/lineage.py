"""Which fragments a compacted fragment was made of, as the table's history says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from airflow_geneva.checkpoint.fragment import RowIds
from airflow_geneva.checkpoint.ranges import Offsets, Ranges
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.lance_io.history import Commit, commits_back, read_commit
from airflow_geneva.plan.manifest import Columns, FragmentFiles, fragment_files, open_fragment, row_ids

if TYPE_CHECKING:
    import lance

_MOST_VERSIONS = 1_000
_MOST_ASKED = 64

Passed = Callable[[FragmentFiles], bool]


@dataclass(frozen=True)
class Compaction:
    """One fragment that a compaction made.

    Args:
        made: the fragment as compaction left it.
        replaced: the fragments its rows came from.
        version: the table version that the compaction wrote.
        alone: whether it got all of their rows.
    """

    made: FragmentFiles
    replaced: tuple[FragmentFiles, ...]
    version: int
    alone: bool


Key = tuple[int, str]
"""A fragment's id, and the files its inputs lie in."""


@dataclass(frozen=True)
class Lineage:
    """Direct ancestors by compaction.

    Args:
        parents: the compaction that made a fragment.
        complete: whether the history could be read as far back as asked.
    """

    parents: dict[Key, Compaction]
    complete: bool

    def made_by(self, fragment: FragmentFiles, same_output: bool = False) -> Compaction | None:
        """The compaction a fragment came out of, unless its inputs are no longer as compaction left them.

        Args:
            same_output: ask that of its output too, as whoever trusts the old output values must.
        """
        found = self.parents.get(_key(fragment)) if self.parents else None
        return None if found is None or (same_output and found.made.output != fragment.output) else found

    def ancestors(self, fragment: FragmentFiles, passed_over: Passed) -> Iterator[FragmentFiles]:
        """The fragments one was made of, nearest first, save for some with all that they were made of."""
        queue = [fragment]
        while queue:
            found = self.made_by(queue.pop(0))
            parents = [] if found is None else [parent for parent in found.replaced if not passed_over(parent)]
            yield from parents
            queue.extend(parents)


NO_LINEAGE = Lineage({}, True)


@dataclass(frozen=True, eq=False)
class Origin:
    """Rows of a fragment that is gone which live on, as they were, in a compacted one.

    Args:
        fragment: the fragment that is gone.
        offsets: their physical offsets in it.
        row_ids: their row ids.
    """

    fragment: FragmentFiles
    offsets: Offsets
    row_ids: RowIds


@dataclass(frozen=True)
class History:
    """Reads the row ids of fragments that are gone, each once.

    Args:
        dataset: the table at the planned version.
    """

    dataset: lance.LanceDataset
    _rows: dict[tuple[int, int], tuple[Offsets, RowIds]] = field(default_factory=dict)
    _versions: dict[int, lance.LanceDataset] = field(default_factory=dict)

    def rows(self, fragment_id: int, version: int) -> tuple[Offsets, RowIds]:
        """Physical offsets and row ids of a fragment's live rows at a version.

        Raises:
            LookupError: the version is an older one, and was cleaned up.
        """
        if (fragment_id, version) not in self._rows:
            with self._reading(version):
                self._rows[fragment_id, version] = row_ids(self._at(version), fragment_id)
        return self._rows[fragment_id, version]

    def written_at(self, fragment: FragmentFiles, version: int) -> list[int]:
        """The versions in which a fragment was written last and first if that was no compaction, as a row says."""
        names = ["_row_last_updated_at_version", "_row_created_at_version"]
        try:
            with self._reading(version):
                row = open_fragment(self._at(version), fragment.id).scanner(columns=names, limit=1).to_table()
        except LookupError:
            return []
        return list(dict.fromkeys(int(row[name][0].as_py()) for name in names if len(row)))

    def _reading(self, version: int) -> AbstractContextManager[None]:
        """Turn what is raised about older versions, which a plan can do without, into a ``LookupError``."""
        if version == self.dataset.version:
            return nullcontext()
        return engine_errors(lambda error: LookupError(f"version {version} cannot be read: {error}"))

    def _at(self, version: int) -> lance.LanceDataset:
        if version == self.dataset.version:
            return self.dataset
        if version not in self._versions:
            self._versions[version] = self.dataset.checkout_version(version)
        return self._versions[version]

    def origins(
        self, lineage: Lineage, fragment: FragmentFiles, passed_over: Passed, same_output: bool = False
    ) -> Iterator[Origin]:
        """The fragments one was made of, nearest first, with the rows that came from there.

        A row that was updated between two compactions goes on under its id with other values, so every generation is
        asked who was still alive in it.

        Args:
            passed_over: fragments of which neither the rows nor the ancestors are of interest.

        Raises:
            LookupError: a version from before a compaction was cleaned up.
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
            living = _id_set(alive)
            for parent in parents:
                offsets, ids = self.rows(parent.id, compaction.version - 1)
                kept = living.mask(ids.view(np.int64))
                yield Origin(parent, offsets[kept], ids[kept])
                queue.append((parent, ids[kept]))


def among(ids: RowIds, wanted: RowIds) -> npt.NDArray[np.bool_]:
    """For each row id, whether it is one of those wanted."""
    return _id_set(wanted).mask(ids.view(np.int64))


def _id_set(ids: RowIds) -> Ranges:
    # Row ids lie in long runs, which are compared much faster than single ones.
    return Ranges.from_offsets(ids.view(np.int64))


def _key(fragment: FragmentFiles) -> Key:
    # Deletions aside, because rows only ever leave.
    return fragment.id, repr((fragment.inputs, fragment.where))


class _Waiting:
    """Fragments that are not explained yet, with a version that has them.

    Args:
        same_output: whether files of the output explain a fragment too.
    """

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
        """The data files of which each tells, by who wrote it, where the fragment comes from."""
        output = files.output if self.same_output else ()
        return [path for _, _, path in (*files.inputs, *files.where, *output)]

    def about(self, names: Iterable[Key | str]) -> list[Key]:
        """Those among them that have one of these keys or data files."""
        return list({key for name in names for key in self._by_name.get(name, ()) if key in self.since})


class Tracer:
    """Finds out by which compactions fragments were made, and reads as little of the history for it as it can.

    A fragment is explained when the compaction that made it is known, or that it was written by something else. Rows
    that were never moved since say in which version that was; for the others the history is read from its newest
    version back. Fragments that were compacted are asked the same about.

    Args:
        history: the rows and versions of the table.
        columns: the columns that matter.
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
        self._commits = commits_back(history.dataset, newest, self._oldest + 1)

    def trace(
        self, fragments: Iterable[FragmentFiles], settled: Passed, since: int = 0, same_output: bool = False
    ) -> Lineage:
        """Follow fragments back to those that are settled.

        Args:
            settled: fragments whose own ancestors are of no interest.
            since: the oldest version whose commit can matter.
            same_output: a fragment whose output was written since it was compacted is explained by that.
        """
        newest = self.history.dataset
        waiting = _Waiting(same_output)
        for files in fragments:
            waiting.add(files, int(newest.version))
        self._explain(waiting, list(waiting.since), settled)
        while waiting.since and self._next > max(since, self._oldest) and not self._gap:
            # One version after the other, and in turn the fragments themselves: the sooner one of them knows.
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

    def _explain(self, waiting: _Waiting, keys: list[Key], settled: Passed) -> None:
        """Take out of some that wait who is explained, and put in the fragments that they were compacted from."""
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
        """Keep where fragments come from by a commit; returns those that it compacted, or the files that it wrote."""
        import lance

        made, did = lance.LanceOperation, commit.operation
        if isinstance(did, made.Rewrite):
            found: dict[Key, Compaction] = {}
            for group in did.groups:
                made_of, alone = list(group.old_fragments), len(list(group.new_fragments)) == 1
                # Which old rows went into which new fragment, row ids tell: every new one gets all the old ones.
                replaced = tuple(fragment_files(fragment, self.columns) for fragment in made_of)
                for fragment in group.new_fragments:
                    files = fragment_files(fragment, self.columns)
                    found[_key(files)] = Compaction(files, replaced, commit.version, alone)
            self._parents.update(found)
            return found
        written: list[Any] = []
        if isinstance(did, (made.Append, made.Overwrite)):
            written = [file for fragment in did.fragments for file in fragment.files]
        elif isinstance(did, made.DataReplacement):
            written = [group.new_file for group in did.replacements]
        elif isinstance(did, made.Update):
            fields = set(did.fields_modified)
            written = [file for fragment in did.new_fragments for file in fragment.files]
            in_place = (file for fragment in did.updated_fragments for file in fragment.files)
            written += [file for file in in_place if fields & set(file.fields)]
        paths = {file._path for file in written}
        self._written |= paths
        return paths
