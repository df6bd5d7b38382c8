"""Which fragments a compacted fragment was made of, read off the table's history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.plan.manifest import Columns, FragmentFiles, fragment_files
from airflow_geneva.storage import is_engine_error

if TYPE_CHECKING:
    import lance

_MOST_VERSIONS = 1_000


@dataclass(frozen=True)
class Lineage:
    """Direct ancestors by compaction.

    Args:
        parents: (fragment id, its input and filter files) to the fragment as compaction left it, and what it replaced.
        complete: whether the history could be read as far back as asked.
    """

    parents: dict[tuple[int, str], tuple[FragmentFiles, tuple[FragmentFiles, ...]]]
    complete: bool

    def of(self, fragment: FragmentFiles, same_output: bool = False) -> tuple[FragmentFiles, ...]:
        """The fragments one was directly made of; none unless its inputs are as compaction left them.

        Args:
            same_output: ask that of its output too, as whoever trusts the old output values must.
        """
        found = self.parents.get((fragment.id, content_key(fragment)))
        if found is None or (same_output and found[0].output != fragment.output):
            return ()
        return found[1]

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

    parents: dict[tuple[int, str], tuple[FragmentFiles, tuple[FragmentFiles, ...]]] = {}
    lineage = Lineage(parents, True)
    newest = dataset.version
    for version in range(newest, max(since, newest - _MOST_VERSIONS), -1):
        try:
            transaction = dataset.read_transaction(version)
        except BaseException as error:
            if not is_engine_error(error):
                raise
            return Lineage(parents, False)
        operation = None if transaction is None else transaction.operation
        if not isinstance(operation, lance.LanceOperation.Rewrite):
            continue
        for group in operation.groups:
            # Which old rows went into which new fragment is told by row ids, so every new one gets all the old ones.
            replaced = tuple(fragment_files(fragment, columns) for fragment in group.old_fragments)
            for fragment in group.new_fragments:
                made = fragment_files(fragment, columns)
                parents[(made.id, content_key(made))] = (made, replaced)
        if enough(lineage):
            return lineage
    return Lineage(parents, newest - since <= _MOST_VERSIONS)
