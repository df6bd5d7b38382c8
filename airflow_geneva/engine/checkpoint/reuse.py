"""Find the checkpoints that a job can reuse, and read the rows and values in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.keys import FragmentKey, parse_key
from airflow_geneva.engine.checkpoint.provenance import Failures, PriorFailures, RowsByColumn, join_columns
from airflow_geneva.engine.checkpoint.records import ROW_ID, VALUE, StagedFragment, read_range, read_staged
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.runtime import threading
from airflow_geneva.engine.storage.files import AT_A_TIME
from airflow_geneva.errors import StorageError

_MOST_RECENT = 2 * AT_A_TIME


@dataclass(frozen=True)
class ReuseRules:
    """Which checkpoints a job reuses.

    Args:
        job_id: the job; rows that failed in this job do not run again in it.
        prefixes: key prefixes with their UDF versions; the job's own comes first.
        agreement: hash of the output type and the declared deps; a version's values are reused only if it is equal.
    """

    job_id: str
    prefixes: tuple[tuple[str, str], ...]
    agreement: str = ""

    @property
    def prefix(self) -> str:
        return self.prefixes[0][0]

    @property
    def version(self) -> str:
        return self.prefixes[0][1]

    @cached_property
    def versions(self) -> dict[str, str]:
        return dict(self.prefixes)

    def usable_rows(self, staged: StagedFragment, version: str, tried: PriorFailures) -> Ranges:
        """Return the rows of a staged file whose values this job can reuse."""
        if version != self.version:
            mine = staged.computed if staged.agreement == self.agreement else Ranges.empty()
            return mine - staged.failures.all - Ranges.union(rows for _, rows in staged.taken)
        foreign = Ranges.union(rows for maker, rows in staged.taken if maker not in self.versions.values())
        return staged.computed - foreign - self.failed_in_other_runs(staged.failures, tried)

    def done_rows(self, staged: StagedFragment, tried: PriorFailures) -> Ranges:
        """Return the rows that are done in this job once its own staged file is committed."""
        return staged.filter_evaluated - (staged.computed - self.usable_rows(staged, self.version, tried))

    def failed_in_other_runs(self, failures: Failures, tried: PriorFailures) -> Ranges:
        """Return the rows that failed in another job or another run of this job."""
        return failures.all - failures.standing(self.job_id, tried)


class BrokenFile(StorageError):
    """A checkpoint (`source` is its key) or data file (its name) is damaged or missing, or another job replaced it."""

    def __init__(self, source: str) -> None:
        super().__init__(f"{source} is damaged or missing. Run again: the rows in it are computed again.")
        self.source = source


RowIdLookup = Callable[[], tuple[Offsets, RowIds]]
"""Returns the live rows of the fragment: physical offsets and row ids, in physical order."""


@dataclass(frozen=True)
class Ancestor:
    """A fragment that a compaction merged into another one.

    Args:
        place: its (srcfiles, fragment id).
        rows: physical offsets, in the new fragment, of this fragment's rows that are unchanged. They exclude a row that
            was updated before the compaction, which keeps its id but has other values.
    """

    place: tuple[str, int]
    rows: Ranges


@dataclass(frozen=True, eq=False)
class CheckpointedRows:
    """Computed rows of one fragment in one file.

    Args:
        source: for a range checkpoint, its key; for a fragment checkpoint, the name of its staged data file.
        positions: positions of their values in the file.
        job_id: the job that computed them; "" if several did.
        failed: physical offsets of rows that failed; their value is NULL.
        failed_columns: of a view, these rows by the columns whose UDFs failed on them.
    """

    key: str
    source: str
    staged: bool
    offsets: Offsets
    positions: Offsets
    row_ids: RowIds
    job_id: str
    version: str
    failed: Ranges = field(default_factory=Ranges.empty)
    failed_columns: RowsByColumn = ()

    def only(self, keep: Ranges) -> CheckpointedRows:
        mask = keep.mask(self.offsets)
        return replace(
            self,
            offsets=self.offsets[mask],
            positions=self.positions[mask],
            row_ids=self.row_ids[mask],
            failed=self.failed & keep,
            failed_columns=join_columns([self.failed_columns], keep),
        )


@dataclass(frozen=True)
class ReusableRows:
    """All usable rows in the store for one fragment, and all rows for which the filter is already evaluated."""

    pieces: tuple[CheckpointedRows, ...]
    filter_evaluated: Ranges

    @property
    def failed(self) -> Ranges:
        """Computed rows on which the UDF failed."""
        return Ranges.union(piece.failed for piece in self.pieces)

    @property
    def failed_columns(self) -> RowsByColumn:
        """The failed rows of a view by the columns whose UDFs failed on them."""
        return join_columns(piece.failed_columns for piece in self.pieces)

    @property
    def by_job(self) -> dict[str, int]:
        """The number of rows that each job computed."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            counts[piece.job_id] = counts.get(piece.job_id, 0) + len(piece.offsets)
        return counts

    def taken(self, version: str) -> tuple[tuple[str, Ranges], ...]:
        """Rows that UDF versions other than the given one computed, by version."""
        makers = sorted({piece.version for piece in self.pieces} - {version})
        return tuple(
            (maker, Ranges.union(Ranges.from_offsets(p.offsets) for p in self.pieces if p.version == maker))
            for maker in makers
        )

    @property
    def computed(self) -> Ranges:
        return Ranges.from_offsets(np.concatenate([p.offsets for p in self.pieces])) if self.pieces else Ranges.empty()

    @property
    def done(self) -> Ranges:
        """Rows that need no UDF call."""
        return self.computed | self.filter_evaluated


class CheckpointIndex:
    """The checkpoint keys that a job may reuse, by fragment; listed once, on first use.

    Args:
        places: (srcfiles, id) of the fragments of interest; only their folders are listed. None: all fragments.
        written: the known content of some keys, which are neither listed nor read.
    """

    def __init__(
        self,
        store: CheckpointStore,
        reuse_rules: ReuseRules,
        places: Iterable[tuple[str, int]] | None = None,
        written: Mapping[str, StagedFragment] | None = None,
    ) -> None:
        self.store = store
        self.written = {} if written is None else written
        self.reuse_rules = reuse_rules
        self._starts = {""} if places is None else {f"{source}_frag-" for source, _ in places}
        self._recent: dict[str, StagedFragment | None] = {}
        self._lock = threading.Lock()

    @cached_property
    def _keys(self) -> dict[tuple[str, int], list[str]]:
        found: dict[tuple[str, int], list[str]] = {}
        for prefix, _ in self.reuse_rules.prefixes:
            for start in self._starts:
                # The prefix ends at a folder boundary, so the store lists no other folder.
                for key in self.store.list_keys(f"{prefix}_srcfiles-{start}", many=not start):
                    parsed = parse_key(key)
                    if parsed is not None and parsed.fragment.prefix == prefix:
                        found.setdefault((parsed.fragment.srcfiles, parsed.fragment.fragment), []).append(key)
        return found

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self._keys

    def places(self) -> set[tuple[str, int]]:
        """All (srcfiles, fragment id) pairs that have checkpoints."""
        return set(self._keys)

    def is_staged(self, place: tuple[str, int]) -> bool:
        """Whether a place has a fragment checkpoint of the job's own UDF version."""
        key = str(FragmentKey(self.reuse_rules.prefix, *place))
        return key in self.written or key in self._keys.get(place, ())

    def staged_at(self, place: tuple[str, int]) -> StagedFragment | None:
        """Read the fragment checkpoint of a place; None if it is missing or unreadable."""
        return self._staged(str(FragmentKey(self.reuse_rules.prefix, *place))) if self.is_staged(place) else None

    def _staged(self, key: str) -> StagedFragment | None:
        # Callers call this twice in a row: to check whether the file fits as it is, then for its rows.
        if (found := self.written.get(key) or self._recent.get(key)) is None:
            found = read_staged(self.store, key)
            with self._lock:
                if len(self._recent) >= _MOST_RECENT:
                    del self._recent[next(iter(self._recent))]
                self._recent[key] = found
        return found

    def held(
        self,
        place: tuple[str, int],
        ancestors: Iterable[Ancestor],
        wanted: Ranges,
        row_ids: RowIdLookup,
        staged_usable: Callable[[StagedFragment], bool],
        tried: PriorFailures = (),
    ) -> ReusableRows:
        """Find the wanted rows in checkpoints: in those of the place by offset, in those of ancestors by row id.

        `row_ids` is called at most once, and only if ancestors have checkpoints.
        """
        pieces: list[CheckpointedRows] = []
        filter_evaluated = Ranges.empty()
        open_rows = wanted
        lookup: tuple[Offsets, RowIds] | None = None
        for source in [Ancestor(place, wanted), *ancestors]:
            moved: MovedRows | None = None
            for key in self._keys.get(source.place, ()):
                if not open_rows:
                    return ReusableRows(tuple(pieces), filter_evaluated)
                if source.place != place:
                    lookup = lookup or row_ids()
                    moved = moved or MovedRows.of(lookup, source.rows)
                found, seen = self._pieces(key, staged_usable, tried, moved)
                if moved is None:
                    filter_evaluated = filter_evaluated | (seen & wanted)
                for piece in found:
                    piece = piece.only(open_rows & source.rows)
                    if len(piece.offsets):
                        pieces.append(piece)
                        open_rows = open_rows - Ranges.from_offsets(piece.offsets)
        return ReusableRows(tuple(pieces), filter_evaluated)

    def _pieces(
        self,
        key: str,
        staged_usable: Callable[[StagedFragment], bool],
        tried: PriorFailures,
        moved: MovedRows | None = None,
    ) -> tuple[list[CheckpointedRows], Ranges]:
        """Read the usable rows of a key, one piece per UDF version, and all rows that it covers.

        Args:
            moved: for an ancestor's key, the current offsets of its rows, which the pieces then use.
        """
        parsed = parse_key(key)
        if parsed is None:
            return [], Ranges.empty()
        reuse_rules, version = self.reuse_rules, self.reuse_rules.versions[parsed.fragment.prefix]
        if parsed.range is not None:
            content = read_range(self.store, key)
            if content is None or content.agreement != reuse_rules.agreement:
                return [], Ranges.empty()
            again = content.failures.all
            if version == reuse_rules.version:
                then = moved.back(tried, content.offsets, content.row_ids) if moved else tried
                again = reuse_rules.failed_in_other_runs(content.failures, then)
            positions = np.arange(len(content.offsets), dtype=np.int64)
            failed = content.failures.all - again
            job_id, columns = content.failures.job_id, join_columns([content.failures.columns], failed)
            piece = CheckpointedRows(
                key, key, False, content.offsets, positions, content.row_ids, job_id, version, failed, columns
            )
            piece = piece.only(Ranges.of(0, 1 << 32) - again) if again else piece
            return [moved.follow(piece) if moved else piece], content.filter_evaluated - again
        pieces, filter_evaluated = list[CheckpointedRows](), Ranges.empty()
        staged = self._staged(key)
        for one in () if staged is None else (staged, *staged.earlier):
            if staged_usable(one):
                found, seen = self._staged_pieces(key, one, version, tried, moved)
                pieces, filter_evaluated = [*pieces, *found], filter_evaluated | seen
        return pieces, filter_evaluated

    def _staged_pieces(
        self, key: str, staged: StagedFragment, version: str, tried: PriorFailures, moved: MovedRows | None
    ) -> tuple[list[CheckpointedRows], Ranges]:
        """Read the usable rows of a staged file, as `_pieces` does."""
        reuse_rules = self.reuse_rules
        offsets, ids = staged.computed.offsets(), staged.row_ids
        job_id = staged.by_job[0][0] if len(staged.by_job) == 1 else ""
        then = moved.back(tried, offsets, ids) if moved else tried
        usable = reuse_rules.usable_rows(staged, version, then)
        positions = np.arange(len(offsets), dtype=np.int64) if staged.dense else offsets
        failed = staged.failures.all & usable
        columns = join_columns([staged.failures.columns], failed)
        piece = CheckpointedRows(key, staged.file, True, offsets, positions, ids, job_id, version, failed, columns)
        taken = [(maker, rows & usable) for maker, rows in staged.taken]
        own = piece.only(usable - Ranges.union(rows for _, rows in taken))
        pieces = [own, *(replace(piece.only(rows), version=maker) for maker, rows in taken)]
        if moved:
            pieces = [moved.follow(piece) for piece in pieces]
        return pieces, staged.filter_evaluated - (staged.computed - usable)


@dataclass(frozen=True, eq=False)
class MovedRows:
    """The positions of an ancestor's rows in the current fragment: ascending physical offsets, and row ids."""

    offsets: Offsets
    row_ids: RowIds

    @staticmethod
    def of(lookup: tuple[Offsets, RowIds], rows: Ranges) -> MovedRows:
        mask = rows.mask(lookup[0])
        return MovedRows(lookup[0][mask], lookup[1][mask])

    def back(self, tried: PriorFailures, offsets: Offsets, row_ids: RowIds) -> PriorFailures:
        """Return which rows of the ancestor, given by offsets and row ids, failed in earlier runs."""
        ids = ((runs, self.row_ids[rows.mask(self.offsets)]) for runs, rows in tried)
        return tuple((runs, Ranges.from_offsets(offsets[np.isin(row_ids, failed)])) for runs, failed in ids)

    def follow(self, piece: CheckpointedRows) -> CheckpointedRows:
        """Return the part of a piece that holds these rows, by their offsets in the current fragment."""
        order = np.argsort(piece.row_ids, kind="stable")
        if len(order) == 0:
            return piece
        ids = piece.row_ids[order]
        at = np.minimum(np.searchsorted(ids, self.row_ids), len(order) - 1)
        hit = ids[at] == self.row_ids
        source, offsets = order[at[hit]], self.offsets[hit]

        def moved(rows: Ranges) -> Ranges:
            return Ranges.from_offsets(offsets[rows.mask(piece.offsets[source])])

        columns = ((name, moved(rows)) for name, rows in piece.failed_columns)
        return replace(
            piece,
            offsets=offsets,
            positions=piece.positions[source],
            row_ids=self.row_ids[hit],
            failed=moved(piece.failed),
            failed_columns=tuple((name, rows) for name, rows in columns if rows),
        )


def read_values(store: CheckpointStore, piece: CheckpointedRows, room: float = inf) -> pa.Array:
    """Read the values of a piece of a range checkpoint, in the order of its offsets.

    Raises:
        BatchTooLarge: the values take more than `room` bytes.
        BrokenFile: the checkpoint is damaged or missing, or its rows changed since it was found: another job that
            reads another table version may overwrite the key.
    """
    try:
        batch = store.read(piece.source, [VALUE, ROW_ID], piece.positions, room)
    except KeyError as error:
        raise BrokenFile(piece.source) from error
    if not np.array_equal(batch.column(ROW_ID).to_numpy(zero_copy_only=False), piece.row_ids):
        raise BrokenFile(piece.source)
    return batch.column(VALUE)
