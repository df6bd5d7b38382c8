"""The work for one fragment, and the shards that group fragments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from airflow_geneva.checkpoint.provenance import Provenance
from airflow_geneva.checkpoint.reuse import Ancestor
from airflow_geneva.errors import InvalidInput
from airflow_geneva.lance_io.fragments import FragmentFiles
from airflow_geneva.lance_io.row_ranges import Ranges

FRAGMENTS_PER_SHARD = 4_096
SHARDS_UNASKED = 64
MOST_SHARDS = 1_024
COMMITS_UNASKED = 100
FRAGMENTS_PER_COMMIT = 64


@dataclass(frozen=True)
class FragmentWork:
    """The work for one fragment.

    Args:
        due: physical offsets to run; with a filter, the offsets on which to evaluate it.
        missing: the due rows that no checkpoint holds.
        rows: number of rows that are selected and due.
        kept: rows that the UDF ran on earlier, by provenance; those that do not run now keep their value.
    """

    files: FragmentFiles
    reason: str
    due: Ranges
    missing: Ranges
    rows: int
    staged: bool = False
    ancestors: tuple[Ancestor, ...] = ()
    kept: tuple[tuple[Provenance, Ranges], ...] = ()

    @cached_property
    def known(self) -> dict[Provenance, Ranges]:
        return dict(self.kept)

    @property
    def id(self) -> int:
        return self.files.id

    @property
    def place(self) -> tuple[str, int]:
        """Its (srcfiles, fragment id), which locates its checkpoints below the prefix."""
        return self.files.srcfiles, self.files.id

    @property
    def rows_to_run(self) -> int:
        """Most rows that the UDF will run on: due rows that no checkpoint holds."""
        return min(self.rows, len(self.missing))

    @property
    def status(self) -> str:
        """``to do``, ``partly done`` or ``staged``."""
        if self.staged:
            return "staged"
        return "to do" if self.missing == self.due else "partly done"

    def to_json(self) -> list[Any]:
        return [
            self.files.to_json(),
            self.reason,
            self.due.to_json(),
            None if self.missing == self.due else self.missing.to_json(),
            self.rows,
            self.staged,
            [[*ancestor.place, ancestor.rows.to_json()] for ancestor in self.ancestors],
            [[provenance.what, rows.to_json()] for provenance, rows in self.kept],
        ]

    @staticmethod
    def from_json(document: Sequence[Any]) -> FragmentWork:
        files, reason, due_rows, missing, rows, staged, ancestors, kept = document
        due = Ranges.from_json(due_rows)
        return FragmentWork(
            FragmentFiles.from_json(files),
            reason,
            due,
            due if missing is None else Ranges.from_json(missing),
            rows,
            staged,
            tuple(Ancestor((str(a), int(b)), Ranges.from_json(found)) for a, b, found in ancestors),
            tuple((found, Ranges.from_json(held)) for what, held in kept if (found := Provenance.of(what))),
        )


@dataclass(frozen=True)
class Shard:
    """Fragments that one spark-submit applies and one task commits."""

    index: int
    fragments: tuple[FragmentWork, ...]

    @property
    def rows(self) -> int:
        return sum(work.rows for work in self.fragments)

    @property
    def to_apply(self) -> tuple[FragmentWork, ...]:
        return tuple(work for work in self.fragments if not work.staged)

    @property
    def rows_to_run(self) -> int:
        return sum(work.rows_to_run for work in self.to_apply)

    def dump(self) -> bytes:
        """Serialize the shard for the plan; compact, because a plan may have 100,000 fragments."""
        works = [work.to_json() for work in self.fragments]
        return json.dumps({"index": self.index, "fragments": works}, separators=(",", ":")).encode()

    @staticmethod
    def load(data: bytes) -> Shard:
        document = json.loads(data)
        return Shard(document["index"], tuple(FragmentWork.from_json(item) for item in document["fragments"]))


def cut_shards(works: Sequence[FragmentWork], shard_size: int | None) -> tuple[Shard, ...]:
    """Group fragments into shards, as few as possible unless a size is given: each costs a spark-submit."""
    ordered = sorted(works, key=lambda work: work.id)
    size = shard_size
    if size is None:
        size = max(FRAGMENTS_PER_SHARD, -(-len(ordered) // SHARDS_UNASKED))
    elif -(-len(ordered) // size) > MOST_SHARDS:
        least = -(-len(ordered) // MOST_SHARDS)
        raise InvalidInput(
            f"shard_size={size} would cut {len(ordered):,} fragments into more than {MOST_SHARDS:,} shards, which is "
            f"as many mapped tasks as Airflow allows. Use shard_size={least} or more, or leave it out."
        )
    return tuple(Shard(i, tuple(ordered[at : at + size])) for i, at in enumerate(range(0, len(ordered), size)))


def fragments_per_commit(fragments: int, shards: int) -> int:
    """Return the default for the fewest fragments per commit: every commit rewrites the whole manifest."""
    return max(FRAGMENTS_PER_COMMIT, -(-fragments // max(COMMITS_UNASKED // shards, 1)))
