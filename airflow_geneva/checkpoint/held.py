"""Which rows of a fragment are already computed somewhere in the store, and their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import pyarrow as pa

from airflow_geneva.checkpoint.fragment import (
    ROW_ID,
    VALUE,
    RowIds,
    StagedFragment,
    read_range,
    read_staged,
)
from airflow_geneva.checkpoint.keys import FragmentKey, parse_key
from airflow_geneva.checkpoint.provenance import Tried
from airflow_geneva.checkpoint.ranges import Offsets, Ranges
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.checkpoint.trust import Trust
from airflow_geneva.errors import StorageError


class BrokenFile(StorageError):
    """A checkpoint or staged data file gives no values: it is damaged or gone, or another job replaced it.

    Attributes:
        source: key of the checkpoint, or name of the data file.
    """

    def __init__(self, source: str) -> None:
        super().__init__(f"{source} is damaged or gone. Run again: the rows in it are computed again.")
        self.source = source


RowIdLookup = Callable[[], tuple[Offsets, RowIds]]
"""Gives the live rows of the fragment at hand: physical offsets and row ids, in physical order."""


@dataclass(frozen=True)
class Ancestor:
    """A fragment that another one was compacted from.

    Args:
        place: its (srcfiles, fragment id).
        rows: physical offsets, in the compacted fragment, of the rows that came from it as they were; a row that was
            updated before the compaction has the same id and other values.
    """

    place: tuple[str, int]
    rows: Ranges


@dataclass(frozen=True, eq=False)
class HeldPiece:
    """Computed rows of one fragment that lie in one file.

    Args:
        key: of the checkpoint that told of them.
        source: the same key, of a range checkpoint; of a fragment checkpoint, the name of its staged data file.
        staged: whether ``source`` is a staged data file.
        offsets: physical offsets in the fragment at hand, ascending.
        positions: where in the file their values are.
        row_ids: their row ids.
        job_id: the job that computed them ("" when several did).
        version: the UDF version that computed them.
        failed: those the job gave up, by offset in the fragment at hand; their value is NULL.
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

    def only(self, keep: Ranges) -> HeldPiece:
        mask = keep.mask(self.offsets)
        return replace(
            self,
            offsets=self.offsets[mask],
            positions=self.positions[mask],
            row_ids=self.row_ids[mask],
            failed=self.failed & keep,
        )


@dataclass(frozen=True)
class Held:
    """Everything usable that the store has for one fragment.

    Args:
        pieces: computed rows, no row twice.
        looked_at: rows of this very fragment known to need no further look under the filter.
    """

    pieces: tuple[HeldPiece, ...]
    looked_at: Ranges

    @property
    def failed(self) -> Ranges:
        """Computed rows that the job gave up."""
        return Ranges.union(piece.failed for piece in self.pieces)

    @property
    def by_job(self) -> dict[str, int]:
        """How many rows each job computed."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            counts[piece.job_id] = counts.get(piece.job_id, 0) + len(piece.offsets)
        return counts

    def taken(self, version: str) -> tuple[tuple[str, Ranges], ...]:
        """Rows that other versions than the given one computed, by version."""
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
        """Rows for which nothing is left to run."""
        return self.computed | self.looked_at


class KeyIndex:
    """The keys that a job trusts, listed once, by fragment.

    Args:
        store: the checkpoint store.
        trust: whose checkpoints are used.
        places: the (srcfiles, fragment id) of interest, or None for all; a few are listed faster than all.
    """

    def __init__(self, store: CheckpointStore, trust: Trust, places: Iterable[tuple[str, int]] | None = None) -> None:
        self.store = store
        self.trust = trust
        self._keys: dict[tuple[str, int], list[str]] = {}
        self._staged_places: set[tuple[str, int]] = set()
        self._last: tuple[str, StagedFragment | None] = ("", None)
        sources = None if places is None else {source for source, _ in places}
        for prefix, _ in trust.prefixes:
            # Texts that end at a folder's edge, so that no other folder is listed.
            wanted = (
                [f"{prefix}_srcfiles-"]
                if sources is None
                else [f"{prefix}_srcfiles-{source}_frag-" for source in sources]
            )
            for key in (key for start in wanted for key in store.list_keys(start)):
                parsed = parse_key(key)
                if parsed is not None and parsed.fragment.prefix == prefix:
                    place = (parsed.fragment.srcfiles, parsed.fragment.fragment)
                    self._keys.setdefault(place, []).append(key)
                    if parsed.range is None and prefix == trust.prefix:
                        self._staged_places.add(place)

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self._keys

    def places(self) -> set[tuple[str, int]]:
        """All (srcfiles, fragment id) that have checkpoints."""
        return set(self._keys)

    def keys_at(self, place: tuple[str, int]) -> list[str]:
        return self._keys.get(place, [])

    def is_staged(self, place: tuple[str, int]) -> bool:
        """Whether a place has a fragment checkpoint of the job's own version."""
        return place in self._staged_places

    def staged_at(self, place: tuple[str, int]) -> StagedFragment | None:
        """The fragment checkpoint of a place, if there is a readable one."""
        return self._staged(str(FragmentKey(self.trust.prefix, *place))) if self.is_staged(place) else None

    def _staged(self, key: str) -> StagedFragment | None:
        # It is asked for twice in a row: whether it fits as it is, and for its rows.
        if key != self._last[0]:
            self._last = key, read_staged(self.store, key)
        return self._last[1]

    def held(
        self,
        place: tuple[str, int],
        ancestors: Iterable[Ancestor],
        wanted: Ranges,
        row_ids: RowIdLookup,
        staged_usable: Callable[[StagedFragment], bool],
        tried: Tried = (),
    ) -> Held:
        """Find computed rows among the wanted ones.

        Args:
            place: (srcfiles, id) of the fragment at hand; its checkpoints match by physical offset.
            ancestors: fragments it was compacted from; their checkpoints match by row id.
            wanted: physical offsets of interest.
            row_ids: called at most once, and only when ancestors have checkpoints.
            staged_usable: whether a staged data file is there to be read.
            tried: wanted rows that failed before.
        """
        pieces: list[HeldPiece] = []
        looked_at = Ranges.empty()
        open_rows = wanted
        lookup: tuple[Offsets, RowIds] | None = None
        for source in [Ancestor(place, wanted), *ancestors]:
            for key in self.keys_at(source.place):
                if not open_rows:
                    return Held(tuple(pieces), looked_at)
                found, seen = self._pieces(key, staged_usable, tried if source.place == place else None)
                if source.place == place:
                    looked_at = looked_at | (seen & wanted)
                for piece in found:
                    if source.place != place:
                        lookup = lookup or row_ids()
                        piece = _moved(piece, lookup)
                    piece = piece.only(open_rows & source.rows)
                    if len(piece.offsets):
                        pieces.append(piece)
                        open_rows = open_rows - Ranges.from_offsets(piece.offsets)
        return Held(tuple(pieces), looked_at)

    def _pieces(
        self, key: str, staged_usable: Callable[[StagedFragment], bool], tried: Tried | None
    ) -> tuple[list[HeldPiece], Ranges]:
        """What a key stands for: its usable rows, a piece for each version that computed some, and all it looked at.

        Args:
            tried: rows that failed before; None for a fragment's ancestors, whose failures are tried again.
        """
        parsed = parse_key(key)
        if parsed is None:
            return [], Ranges.empty()
        trust, version = self.trust, self.trust.versions[parsed.fragment.prefix]
        if parsed.range is not None:
            content = read_range(self.store, key)
            if content is None or content.agreement != trust.agreement:
                return [], Ranges.empty()
            again = content.failures.all
            if tried is not None and version == trust.version:
                again = trust.to_try_again(content.failures, tried)
            positions = np.arange(len(content.offsets), dtype=np.int64)
            failed = content.failures.all - again
            piece = HeldPiece(
                key, key, False, content.offsets, positions, content.row_ids, content.failures.job_id, version, failed
            )
            return [piece.only(Ranges.of(0, 1 << 32) - again) if again else piece], content.looked_at - again
        staged = self._staged(key)
        if staged is None or not staged_usable(staged):
            return [], Ranges.empty()
        offsets = staged.computed.offsets()
        job_id = staged.by_job[0][0] if len(staged.by_job) == 1 else ""
        usable = trust.usable_rows(staged, version, () if tried is None else tried)
        failed = staged.failures.all & usable
        if tried is None:
            usable, failed = usable - failed, Ranges.empty()
        positions = np.arange(len(offsets), dtype=np.int64) if staged.dense else offsets
        piece = HeldPiece(key, staged.file, True, offsets, positions, staged.row_ids, job_id, version, failed)
        taken = [(maker, rows & usable) for maker, rows in staged.taken]
        own = piece.only(usable - Ranges.union(rows for _, rows in taken))
        pieces = [own, *(replace(piece.only(rows), version=maker) for maker, rows in taken)]
        return pieces, staged.looked_at - (staged.computed - usable)


def _moved(piece: HeldPiece, lookup: tuple[Offsets, RowIds]) -> HeldPiece:
    """Follow rows by their ids into the fragment they live in now."""
    offsets, live_ids = lookup
    order = np.argsort(piece.row_ids, kind="stable")
    if len(order) == 0:
        return piece
    ids = piece.row_ids[order]
    at = np.minimum(np.searchsorted(ids, live_ids), len(order) - 1)
    hit = ids[at] == live_ids
    positions = piece.positions[order][at[hit]]
    return replace(piece, offsets=offsets[hit], positions=positions, row_ids=live_ids[hit])


def read_values(store: CheckpointStore, piece: HeldPiece, room: float = inf) -> pa.Array:
    """Values of a piece of a range checkpoint, in the order of its offsets.

    Args:
        room: bytes that they may take.

    Raises:
        TooWide: they take more.
        BrokenFile: the checkpoint is damaged, gone, or holds other rows than when it was found: another job that read
            the table at another version may write the same key.
    """
    try:
        batch = store.read(piece.source, [VALUE, ROW_ID], piece.positions, room)
    except KeyError as error:
        raise BrokenFile(piece.source) from error
    if not np.array_equal(batch.column(ROW_ID).to_numpy(zero_copy_only=False), piece.row_ids):
        raise BrokenFile(piece.source)
    return batch.column(VALUE)
