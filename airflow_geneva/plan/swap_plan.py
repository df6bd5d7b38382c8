"""The plan of a swap: the change that a refresh makes to its view at the end, in one commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from airflow_geneva.checkpoint.provenance import PriorFailures
from airflow_geneva.checkpoint.view_snapshot import Snapshot, load_snapshot, save_snapshot, snapshot_file
from airflow_geneva.errors import InvalidInput
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.storage.files import Storage

ALL_ROW_IDS = Ranges.of(0, (1 << 63) - 1)
"""All possible source row ids, for a swap that removes every row."""


@dataclass(frozen=True, eq=False)
class SwapPlan:
    """The swap of a refresh.

    Args:
        based_on: identifies the view's state at planning; "" before the first swap.
        gone: source row ids whose rows leave the view.
        snapshot: the source as the view will reflect it.
        advances: whether `snapshot` differs from what the view reflects now, even if no row changes.
        max_rows_per_fragment: rows of each new fragment; None: one new fragment per source fragment.
        shuffle_seed: seed of the hash that the new rows are sorted by; None: the source's order.
    """

    based_on: str
    gone: Ranges
    snapshot: Snapshot
    advances: bool
    max_rows_per_fragment: int | None
    shuffle_seed: int | None = None

    def snapshot_with(self, failed: Mapping[str, PriorFailures]) -> Snapshot:
        """Return the snapshot with the rows that failed in this refresh.

        Args:
            failed: by fragment signature, the failed rows by the number of runs.
        """
        fragments = tuple(
            replace(fragment, failed=(*fragment.failed, *failed.get(fragment.signature, ())))
            for fragment in self.snapshot.fragments
        )
        return replace(self.snapshot, fragments=fragments)

    def save(self, job: Storage) -> tuple[str, str]:
        """Write the swap plan into the job's folder; return the document's name and SHA-256."""
        key = save_snapshot(job, "plan", self.snapshot)
        name = f"swap-{key.rpartition('.')[2]}.json"
        document = {
            "based_on": self.based_on,
            "gone": self.gone.to_json(),
            "snapshot": key,
            "snapshot_sha256": sha256(job.read_bytes(snapshot_file(key))),
            "advances": self.advances,
            "max_rows_per_fragment": self.max_rows_per_fragment,
            "shuffle_seed": self.shuffle_seed,
        }
        data = json.dumps(document, separators=(",", ":")).encode()
        job.write_bytes(name, data)
        return name, sha256(data)

    @staticmethod
    def load(job: Storage, name: str, data: bytes) -> SwapPlan:
        """Read a swap plan.

        Args:
            name: the document's name.
            data: the document's content, whose digest the caller has checked.

        Raises:
            InvalidInput: the snapshot that it names is missing or was changed.
        """
        document = json.loads(data)
        key = document["snapshot"]
        try:
            unchanged = sha256(job.read_bytes(snapshot_file(key))) == document["snapshot_sha256"]
        except FileNotFoundError:
            unchanged = False
        snapshot = load_snapshot(job, key) if unchanged else None
        if snapshot is None:
            raise InvalidInput(
                f"The document {job.path(snapshot_file(key))} that belongs to {name} is gone or was changed. "
                "Clear the plan task with its downstream tasks."
            )
        gone = Ranges.from_json(document["gone"])
        return SwapPlan(
            document["based_on"],
            gone,
            snapshot,
            document["advances"],
            document["max_rows_per_fragment"],
            document["shuffle_seed"],
        )


def sha256(data: bytes) -> str:
    """Return the SHA-256 of a plan's document, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()
