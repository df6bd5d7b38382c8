"""The work for one fragment, and the shards that group fragments."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from airflow_geneva.engine.checkpoint.provenance import Provenance
from airflow_geneva.engine.checkpoint.reuse import Ancestor
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.fragments import FragmentFiles
from airflow_geneva.engine.lance_io.manifest import Manifest
from airflow_geneva.engine.lance_io.messages import Numbers
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.renumbered_rows import RenumberedRows
from airflow_geneva.engine.storage.documents import LARGEST_PLAN, MOST_PLAN_VALUES, parse
from airflow_geneva.errors import InvalidInput

FRAGMENTS_PER_SHARD = 4_096
SHARDS_UNASKED = 64
MOST_SHARDS = 1_024
COMMITS_UNASKED = 100
_MADE_AT_ONCE = 256
NONE: Numbers = np.empty(0, np.int64)
FRAGMENTS_PER_COMMIT = 64


@dataclass(frozen=True)
class CarriedRows:
    """Rows of a fragment of a view's source on which only some UDFs run; the view keeps their other values.

    A planner that gives a `FragmentTask` such rows says: for these rows, compute these columns and carry the others.
    The rows are also due, and their ids are gone in the `SwapPlan`, because their values move to a new row. The columns
    must include every UDF column that reads one of them. All other due rows of the fragment are computed whole.

    Args:
        runs: sets of UDF columns, which may be empty, each with the physical offsets of the rows on which only these
            run. No row is in two sets, and the view shows each row.
        view_fragments: the fragments of the planned version of the view that hold these rows.
        renumbered: those of these rows that the view knows by another id.
    """

    runs: tuple[tuple[tuple[str, ...], Ranges], ...]
    view_fragments: tuple[int, ...] = ()
    renumbered: RenumberedRows = field(default_factory=RenumberedRows, compare=False)

    @cached_property
    def rows(self) -> Ranges:
        return Ranges.union(rows for _, rows in self.runs)

    def within(self, rows: Ranges) -> CarriedRows | None:
        """Return the part of it that lies in these rows; None if there is none."""
        runs = tuple((columns, found) for columns, held in self.runs if (found := held & rows))
        return replace(self, runs=runs) if runs else None

    def to_json(self) -> list[Any]:
        runs = [[columns, rows.to_json()] for columns, rows in self.runs]
        return [runs, self.view_fragments, *([self.renumbered.to_json()] if self.renumbered else [])]

    @staticmethod
    def from_json(document: Sequence[Any]) -> CarriedRows:
        runs, fragments, *renumbered = document
        found = tuple((tuple(map(str, columns)), Ranges.from_json(rows)) for columns, rows in runs)
        return CarriedRows(
            found, tuple(map(int, fragments)), RenumberedRows.from_json(renumbered[0] if renumbered else ())
        )


@dataclass(frozen=True)
class FragmentTask:
    """The work for one fragment.

    Args:
        due: physical offsets to run; with a filter, the offsets on which to evaluate it.
        missing: the due rows that no checkpoint holds.
        rows: number of rows that are selected and due.
        kept: rows on which the UDF ran earlier, by provenance; rows that do not run now keep their value.
        stale: rows that hold a value of a job although their inputs changed since.
        partial: whether this job leaves other due rows of the fragment, so that it does not stage a file of it.
        carried: of a view, the due rows on which only some UDFs run; None: every UDF runs on every due row.
        selected: with a filter, the due rows that it selects; not stored with the plan.
    """

    files: FragmentFiles
    reason: str
    due: Ranges
    missing: Ranges
    rows: int
    staged: bool = False
    ancestors: tuple[Ancestor, ...] = ()
    kept: tuple[tuple[Provenance, Ranges], ...] = ()
    partial: bool = False
    carried: CarriedRows | None = None
    stale: Ranges = field(default_factory=Ranges.empty)
    selected: Ranges | None = field(default=None, compare=False)

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
        """The most rows on which the UDF will run: due rows that no checkpoint holds."""
        return min(self.rows, len(self.missing_selected))

    @property
    def chosen(self) -> Ranges:
        """The due rows that a filter selects; all due rows if there is none."""
        return self.due if self.selected is None else self.selected

    @property
    def missing_selected(self) -> Ranges:
        """The missing rows that a filter selects; all missing rows if there is none."""
        return self.missing if self.selected is None else self.missing & self.selected

    def rows_by_column(self, columns: Iterable[str], among: Ranges) -> dict[str, int]:
        """Count the rows of a view's fragment on which each UDF column runs, among the given due rows."""
        carried = self.carried
        whole = len(among if carried is None else among - carried.rows)
        found = dict.fromkeys(columns, whole)
        for names, rows in carried.runs if carried else ():
            for name in names:
                found[name] += len(rows & among)
        return found

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
            [[provenance.kind, rows.to_json()] for provenance, rows in self.kept],
            *([self.partial] if self.partial or self.carried or self.stale else []),
            *([self.carried.to_json() if self.carried else None] if self.carried or self.stale else []),
            *([self.stale.to_json()] if self.stale else []),
        ]

    @staticmethod
    def from_json(document: Sequence[Any]) -> FragmentTask:
        files, reason, due_rows, missing, rows, staged, ancestors, kept, *more = document
        due = Ranges.from_json(due_rows)
        return FragmentTask(
            FragmentFiles.from_json(files),
            reason,
            due,
            due if missing is None else Ranges.from_json(missing),
            rows,
            staged,
            tuple(Ancestor((str(a), int(b)), Ranges.from_json(found)) for a, b, found in ancestors),
            tuple((found, Ranges.from_json(held)) for what, held in kept if (found := Provenance.of(what))),
            bool(more and more[0]),
            CarriedRows.from_json(more[1]) if len(more) > 1 and more[1] else None,
            Ranges.from_json(more[2]) if len(more) > 2 else Ranges.empty(),
        )


class FragmentTasks(Sequence[FragmentTask]):
    """The work for many fragments, in order of their ids; it creates each `FragmentTask` on access.

    Args:
        single: the fragments that the planner inspected one by one.
        manifest, whole, reason: the other fragments, at the ascending positions `whole` of the manifest. All of their
            rows are due, for the same reason, and have no known values.
    """

    def __init__(
        self,
        single: Iterable[FragmentTask] = (),
        manifest: Manifest | None = None,
        whole: Numbers = NONE,
        reason: str = "",
    ) -> None:
        self.single = tuple(sorted(single, key=lambda task: task.id))
        self.manifest = Manifest.of(()) if manifest is None else manifest
        self.whole = whole
        self.reason = reason
        self._single_ids = np.array([task.id for task in self.single], np.int64)
        self._whole_ids = self.manifest.ids[whole]
        self._ids = np.sort(np.concatenate((self._single_ids, self._whole_ids)))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[FragmentTask]:
        return heapq.merge(self.single, self._made(self.whole), key=lambda task: task.id)

    @overload
    def __getitem__(self, at: int) -> FragmentTask: ...
    @overload
    def __getitem__(self, at: slice) -> FragmentTasks: ...
    def __getitem__(self, at: int | slice) -> FragmentTask | FragmentTasks:
        if isinstance(at, int):
            (found,) = self._within(self._ids[at], self._ids[at])
            return found
        ids = self._ids[at]
        return self._within(ids[0], ids[-1]) if len(ids) else FragmentTasks()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FragmentTasks) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _within(self, low: int, high: int) -> FragmentTasks:
        """Return the work for fragment ids from `low` to `high`."""
        a, b = np.searchsorted(self._single_ids, (low, high + 1)).tolist()
        c, d = np.searchsorted(self._whole_ids, (low, high + 1)).tolist()
        return FragmentTasks(self.single[a:b], self.manifest, self.whole[c:d], self.reason)

    def _made(self, positions: Numbers) -> Iterator[FragmentTask]:
        for begin in range(0, len(positions), _MADE_AT_ONCE):
            for files in self.manifest.at(positions[begin : begin + _MADE_AT_ONCE]):
                live = Ranges.of(0, files.physical_rows)
                yield FragmentTask(files, self.reason, live, live, files.physical_rows)

    def with_ids(self, ids: Iterable[int]) -> FragmentTasks:
        """Return the work for the given fragment ids."""
        wanted = set(ids)
        some = self.whole[np.isin(self._whole_ids, list(wanted))]
        return FragmentTasks((task for task in self.single if task.id in wanted), self.manifest, some, self.reason)

    def replaced(self, tasks: Iterable[FragmentTask]) -> FragmentTasks:
        """Return all work, with the given tasks in place of those for the same fragments."""
        new = {task.id: task for task in tasks}
        rest = (task for task in self.single if task.id not in new)
        whole = self.whole[~np.isin(self._whole_ids, list(new))]
        return FragmentTasks((*rest, *new.values()), self.manifest, whole, self.reason)

    @property
    def not_staged(self) -> FragmentTasks:
        rest = (task for task in self.single if not task.staged)
        return FragmentTasks(rest, self.manifest, self.whole, self.reason)

    @property
    def rows(self) -> int:
        return sum(task.rows for task in self.single) + int(self.manifest.physical_rows[self.whole].sum())

    @property
    def rows_to_run(self) -> int:
        return sum(task.rows_to_run for task in self.single) + int(self.manifest.physical_rows[self.whole].sum())

    def dump(self) -> Iterator[str]:
        """Yield the JSON text of each fragment's work, in any order."""
        for task in self.single:
            yield json.dumps(task.to_json(), separators=(",", ":"))
        reason, sizes = json.dumps(self.reason), iter(self.manifest.physical_rows[self.whole].tolist())
        for texts in self.manifest.documents(self.whole):
            for files in texts.to_pylist():
                rows = next(sizes)
                yield f"[{files},{reason},[[0,{rows}]],null,{rows},false,[],[]]"


@dataclass(frozen=True)
class Shard:
    """Fragments that one spark-submit applies and one task commits."""

    index: int
    fragments: FragmentTasks

    @property
    def rows(self) -> int:
        return self.fragments.rows

    @property
    def title(self) -> str:
        """A readable name of the shard: ``fragments 0-7, 7,213 rows``."""
        count = len(self.fragments)
        first, last = (self.fragments[0].id, self.fragments[-1].id) if count else (0, -1)
        ids = f"{first}-{last}" if last > first else str(first)
        many = f"fragments {ids}" if count > 1 else f"fragment {ids}"
        return f"{many if count == last - first + 1 else f'{count:,} of {many}'}, {counted(self.rows, 'row')}"

    @property
    def to_apply(self) -> FragmentTasks:
        return self.fragments.not_staged

    @property
    def rows_to_run(self) -> int:
        return self.to_apply.rows_to_run

    def dump(self) -> bytes:
        """Serialize the shard for the plan; compact, because a plan may have a million fragments."""
        return f'{{"index":{self.index},"fragments":[{",".join(self.fragments.dump())}]}}'.encode()

    @staticmethod
    def load(data: bytes, most_bytes: int = LARGEST_PLAN, most_values: int = MOST_PLAN_VALUES) -> Shard:
        """Parse what `dump` gave; `ValueError` or another error of `DAMAGED` if it is something else."""
        document = parse(data, most_bytes, most_values)
        return Shard(document["index"], FragmentTasks(FragmentTask.from_json(item) for item in document["fragments"]))


def cut_shards(ordered: FragmentTasks, shard_size: int | None) -> tuple[Shard, ...]:
    """Group fragments into shards; without a given size into few, because each costs a spark-submit."""
    size = shard_size
    if size is None:
        size = max(FRAGMENTS_PER_SHARD, -(-len(ordered) // SHARDS_UNASKED))
    elif -(-len(ordered) // size) > MOST_SHARDS:
        least = -(-len(ordered) // MOST_SHARDS)
        raise InvalidInput(
            f"shard_size={size} would cut {len(ordered):,} fragments into more than {MOST_SHARDS:,} shards, which is "
            f"as many mapped tasks as Airflow allows. Use shard_size={least} or more, or leave it out."
        )
    return tuple(Shard(i, ordered[at : at + size]) for i, at in enumerate(range(0, len(ordered), size)))


def fragments_per_commit(fragments: int, shards: int) -> int:
    """Return the default minimum of fragments per commit; every commit rewrites the whole manifest."""
    return max(FRAGMENTS_PER_COMMIT, -(-fragments // max(COMMITS_UNASKED // shards, 1)))
