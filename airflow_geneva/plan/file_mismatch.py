"""Report fragment checkpoints that the plan cannot use, because they were computed from data files since replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from airflow_geneva.checkpoint.reuse import CheckpointIndex
from airflow_geneva.plan.shard import FragmentWork

_MOST_SHOWN = 5
_MOST_FILES = 8


@dataclass(frozen=True)
class Mismatch:
    """A fragment checkpoint that was computed from other data files than the fragment has now.

    Args:
        fragment: the fragment's id.
        expected: data files of the fragment that the checkpoint was not computed from.
        found: data files that the checkpoint was computed from and the fragment no longer has; None if the
            checkpoint cannot be read.
    """

    fragment: int
    expected: tuple[str, ...]
    found: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"fragment {self.fragment}: {self._difference()}"

    def _difference(self) -> str:
        if self.found is None:
            return f"expected {_listed(self.expected)}, found a checkpoint that cannot be read"
        if self.expected and self.found:
            return f"expected {_listed(self.expected)}, found {_listed(self.found)}"
        if self.expected:
            return f"expected {_listed(self.expected)} as well"
        if self.found:
            return f"found {_listed(self.found)}, which the fragment no longer has"
        return "expected other columns in the same data files"


@dataclass(frozen=True)
class Mismatches:
    """All mismatches of a plan.

    Args:
        shown: the first few.
        more: number of the others.
    """

    shown: tuple[Mismatch, ...] = ()
    more: int = 0


def find_mismatches(index: CheckpointIndex | None, works: Sequence[FragmentWork]) -> Mismatches:
    """Find fragments in a plan that only have a checkpoint for other data files; read the first few checkpoints.

    Args:
        index: the checkpoints that the plan may reuse; None: no checkpoints.
        works: the plan's fragments.
    """
    by_id = {work.id: work for work in works}
    stale: dict[int, tuple[str, int]] = {}
    if index is None:
        return Mismatches()
    for place in index.places():
        work = by_id.get(place[1])
        if work is not None and place != work.place and index.is_staged(place):
            stale[work.id] = max(place, stale.get(work.id, place))
    numbers = sorted(number for number in stale if not index.is_staged(by_id[number].place))
    shown: list[Mismatch] = []
    for number in numbers[:_MOST_SHOWN]:
        staged = index.staged_at(stale[number])
        now, then = set(by_id[number].files.source_paths()), set(staged.src_data_files if staged else ())
        found = tuple(sorted(then - now)) if staged else None
        shown.append(Mismatch(number, tuple(sorted(now - then)), found))
    return Mismatches(tuple(shown), len(numbers) - len(shown))


def _listed(paths: tuple[str, ...]) -> str:
    rest = len(paths) - _MOST_FILES
    return f"[{', '.join(paths[:_MOST_FILES])}{f' and {rest} more' if rest > 0 else ''}]"
