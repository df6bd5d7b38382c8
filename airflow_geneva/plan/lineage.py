"""Which fragments a compacted fragment was made of, read off the table's history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from airflow_geneva.checkpoint.fragment import RowIds
from airflow_geneva.checkpoint.ranges import Offsets, Ranges
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.plan.manifest import Columns, FragmentFiles, fragment_files, row_ids

if TYPE_CHECKING:
    import lance

_MOST_VERSIONS = 1_000


@dataclass(frozen=True)
class Compaction:
    """One fragment that a compaction made.

    Args:
        made: the fragment as compaction left it.
        replaced: the fragments its rows came from.
        version: the table version that the compaction wrote.
    """

    made: FragmentFiles
    replaced: tuple[FragmentFiles, ...]
    version: int


@dataclass(frozen=True)
class Lineage:
    """Direct ancestors by compaction.

    Args:
        parents: by fragment id and its input and filter files, the compaction that made it.
        complete: whether the history could be read as far back as asked.
    """

    parents: dict[tuple[int, str], Compaction]
    complete: bool

    def made_by(self, fragment: FragmentFiles, same_output: bool = False) -> Compaction | None:
        """The compaction a fragment came out of, unless its inputs are no longer as compaction left them.

        Args:
            same_output: ask that of its output too, as whoever trusts the old output values must.
        """
        found = self.parents.get((fragment.id, content_key(fragment))) if self.parents else None
        return None if found is None or (same_output and found.made.output != fragment.output) else found

    def of(self, fragment: FragmentFiles, same_output: bool = False) -> tuple[FragmentFiles, ...]:
        """The fragments one was directly made of."""
        found = self.made_by(fragment, same_output)
        return () if found is None else found.replaced

    def ancestors(self, fragment: FragmentFiles, same_output: bool = False) -> tuple[FragmentFiles, ...]:
        """All fragments one was made of, nearest first."""
        found: list[FragmentFiles] = []
        queue = list(self.of(fragment, same_output))
        while queue:
            current = queue.pop(0)
            found.append(current)
            queue.extend(self.of(current, same_output))
        return tuple(found)


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
        if (fragment_id, version) not in self._rows and version == self.dataset.version:
            self._rows[fragment_id, version] = row_ids(self.dataset, fragment_id)
        elif (fragment_id, version) not in self._rows:
            with engine_errors(lambda error: LookupError(f"version {version} cannot be read: {error}")):
                if version not in self._versions:
                    self._versions[version] = self.dataset.checkout_version(version)
                self._rows[fragment_id, version] = row_ids(self._versions[version], fragment_id)
        return self._rows[fragment_id, version]

    def origins(self, lineage: Lineage, fragment: FragmentFiles, same_output: bool = False) -> Iterator[Origin]:
        """All fragments one was made of, nearest first, with the rows that came from there.

        A row that was updated between two compactions goes on under its id with other values, so every generation is
        asked who was still alive in it.

        Raises:
            LookupError: a version from before a compaction was cleaned up.
        """
        queue = [(fragment, self.rows(fragment.id, self.dataset.version)[1])]
        while queue:
            current, alive = queue.pop(0)
            compaction = lineage.made_by(current, same_output)
            if compaction is None:
                continue
            living = _id_set(alive)
            for parent in compaction.replaced:
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


def content_key(fragment: FragmentFiles) -> str:
    """The files a fragment's inputs lie in; deletions aside, because rows only ever leave."""
    return repr((fragment.inputs, fragment.where))


def read_lineage(
    dataset: lance.LanceDataset, columns: Columns, since: int, enough: Callable[[Lineage], bool]
) -> Lineage:  # fmt: skip
    """Walk the compactions from the newest version back.

    Args:
        since: the oldest version whose transaction can matter.
        enough: told what is known after every compaction found; True ends the walk.
    """
    import lance

    parents: dict[tuple[int, str], Compaction] = {}
    lineage = Lineage(parents, True)
    newest = dataset.version
    for version in range(newest, max(since, newest - _MOST_VERSIONS), -1):
        try:
            with engine_errors():
                transaction = dataset.read_transaction(version)
        except EngineError:
            return Lineage(parents, False)
        operation = None if transaction is None else transaction.operation
        if not isinstance(operation, lance.LanceOperation.Rewrite):
            continue
        for group in operation.groups:
            # Which old rows went into which new fragment is told by row ids, so every new one gets all the old ones.
            replaced = tuple(fragment_files(fragment, columns) for fragment in group.old_fragments)
            for fragment in group.new_fragments:
                made = fragment_files(fragment, columns)
                parents[(made.id, content_key(made))] = Compaction(made, replaced, version)
        if enough(lineage):
            return lineage
    return Lineage(parents, newest - since <= _MOST_VERSIONS)
