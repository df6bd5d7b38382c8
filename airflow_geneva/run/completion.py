"""Stage fragments from checkpoints; if a file turns out to be broken, compute its rows again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from airflow_geneva.checkpoint.records import StagedFragment
from airflow_geneva.checkpoint.reuse import BrokenFile, CheckpointIndex, ReusableRows
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.errors import StorageError
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.shard import FragmentWork

logger = logging.getLogger("airflow_geneva.run")

_MOST_BROKEN = 100


class UnitContext(Protocol):
    """The context in which the fragments of a column or view are staged."""

    @property
    def store(self) -> CheckpointStore: ...

    def index(self, fragment: FragmentWork) -> CheckpointIndex: ...

    def held(self, fragment: FragmentWork, index: CheckpointIndex, wanted: Ranges) -> ReusableRows: ...

    def stage(self, fragment: FragmentWork, held: ReusableRows) -> StagedFragment: ...


def stage_computed(
    unit_context: UnitContext,
    fragment: FragmentWork,
    wanted: Ranges,
    held: ReusableRows,
    compute: Callable[[Ranges], None] | None = None,
) -> StagedFragment | None:
    """Stage a fragment from the rows that the store has; None if rows are missing.

    Args:
        wanted: the rows that the fragment needs.
        held: the rows that the store has of them.
        compute: computes missing rows into the store; None: do not compute.

    Raises:
        StorageError: files break or disappear again and again, or cannot be written.
    """
    computed = Ranges.empty()
    for _ in range(_MOST_BROKEN):
        missing = wanted - held.done
        if not missing:
            try:
                return unit_context.stage(fragment, held)
            except BrokenFile as broken:
                pieces = [piece for piece in held.pieces if piece.source == broken.source]
                remove_broken(unit_context.store, broken, {piece.key for piece in pieces})
                computed = computed - Ranges.union(Ranges.from_offsets(piece.offsets) for piece in pieces)
        elif compute is None or missing & computed:
            break
        else:
            compute(missing)
            computed = computed | missing
        held = unit_context.held(fragment, unit_context.index(fragment), wanted)
    if compute is None:
        return None
    raise StorageError(
        f"Checkpoints of fragment {fragment.id} changed or broke again and again while it was assembled. Run the "
        "task again; if the error returns, run with ignore_checkpoints=True."
    )


def remove_broken(store: CheckpointStore, broken: BrokenFile, keys: Iterable[str]) -> None:
    """Remove the checkpoints that name a broken file, so that its rows count as missing; keep a replaced file's.

    Args:
        keys: keys of these checkpoints.
    """
    if broken.__cause__ is not None:
        logger.warning("Cannot read %s; its rows count as missing: %s", broken.source, broken.__cause__)
        for key in keys:
            del store[key]
