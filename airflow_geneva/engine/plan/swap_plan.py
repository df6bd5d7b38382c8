"""The rows that a refresh removes from a view and adds to it, as its plan stores them."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from airflow_geneva.engine.checkpoint.provenance import RowsByColumn
from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot
from airflow_geneva.engine.lance_io.row_ranges import MOST_RANGES_OF_TABLE, Ranges
from airflow_geneva.engine.plan.renumbered_rows import RenumberedRows
from airflow_geneva.engine.storage.arrow_documents import from_bytes, to_bytes
from airflow_geneva.engine.storage.documents import LARGEST_PLAN, MOST_PLAN_VALUES, parse

ALL_ROW_IDS = Ranges.of(0, (1 << 63) - 1)
"""All possible source row ids, for a swap that removes every row."""


@dataclass(frozen=True, eq=False)
class SwapPlan:
    """The swap of a refresh.

    Args:
        based_on: identifies the view's state at planning; "" before the first swap.
        gone: source row ids whose rows leave the view.
        advances: whether `snapshot` differs from the view's current snapshot, even if no row changes.
        idle: whether there is nothing to do as long as the view stays at its version.
        renumbered: source rows with new ids but the same values: the view's rows stay, under the new ids.
    """

    based_on: str
    gone: Ranges
    snapshot: Snapshot
    advances: bool
    max_rows_per_fragment: int | None
    shuffle_seed: int | None = None
    idle: bool = False
    renumbered: RenumberedRows = field(default_factory=RenumberedRows)

    def snapshot_with(self, failed: Mapping[str, RowsByColumn], names: Mapping[str, str]) -> Snapshot:
        """Return the snapshot after the swap.

        Args:
            failed: the rows that failed in this refresh, by the signature of their fragment and by column.
            names: the names of the columns in the snapshot, by their names in the plan.
        """
        fragments = (
            fragment.failing([(names[name], rows) for name, rows in failed.get(fragment.signature, ())])
            for fragment in self.snapshot.fragments
        )
        return replace(self.snapshot, fragments=tuple(fragments))

    def dump(self) -> bytes:
        """Serialize the swap for the plan; the snapshot is compressed as in packs, and base64-encoded."""
        document = {
            "based_on": self.based_on,
            "gone": self.gone.to_json(MOST_RANGES_OF_TABLE),
            "snapshot": b64encode(to_bytes(self.snapshot.to_batch(), "zstd")).decode(),
            "advances": self.advances,
            "max_rows_per_fragment": self.max_rows_per_fragment,
            "shuffle_seed": self.shuffle_seed,
            "idle": self.idle,
            "renumbered": self.renumbered.to_json(),
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @staticmethod
    def load(data: bytes) -> SwapPlan:
        document = parse(data, LARGEST_PLAN, MOST_PLAN_VALUES)
        gone = Ranges.from_json(document.pop("gone"), MOST_RANGES_OF_TABLE)
        snapshot = Snapshot.from_batch(from_bytes(b64decode(document.pop("snapshot"))))
        renumbered = RenumberedRows.from_json(document.pop("renumbered"))
        return SwapPlan(**document, gone=gone, snapshot=snapshot, renumbered=renumbered)
