"""What a refresh does to its view at the end, all at once."""

from __future__ import annotations

import json
from dataclasses import dataclass

from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.checkpoint.snapshot import Snapshot, load_snapshot, save_snapshot
from airflow_geneva.errors import InvalidInput
from airflow_geneva.storage import Storage


@dataclass(frozen=True, eq=False)
class SwapPlan:
    """The swap of a refresh.

    Args:
        based_on: job id of the swap that the view showed when this one was planned; "" before the first.
        gone: source row ids whose rows leave the view.
        snapshot: what the view will reflect.
        max_rows_per_fragment: rows of each new fragment; None: as the source's fragments come.
        shuffle_seed: the new rows are ordered by their hash; None: as they lie in the source.
    """

    based_on: str
    gone: Ranges
    snapshot: Snapshot
    max_rows_per_fragment: int | None
    shuffle_seed: int | None = None

    def save(self, job: Storage) -> str:
        """Keep it in the job's folder; returns the name to load it by."""
        key = save_snapshot(job, "plan", self.snapshot)
        name = f"swap-{key.rpartition('.')[2]}.json"
        document = {
            "based_on": self.based_on,
            "gone": self.gone.pairs(),
            "snapshot": key,
            "max_rows_per_fragment": self.max_rows_per_fragment,
            "shuffle_seed": self.shuffle_seed,
        }
        job.write_bytes(name, json.dumps(document, separators=(",", ":")).encode())
        return name

    @staticmethod
    def load(job: Storage, name: str) -> SwapPlan:
        """Read one back.

        Raises:
            InvalidInput: it is gone or damaged.
        """
        try:
            document = job.read_json(name)
            snapshot = load_snapshot(job, document["snapshot"])
        except (FileNotFoundError, ValueError):
            snapshot = None
        if snapshot is None:
            raise InvalidInput(
                f"The plan document {job.path(name)} is gone. Clear the plan task with its downstream tasks."
            )
        gone = Ranges.from_pairs(document["gone"])
        return SwapPlan(
            document["based_on"], gone, snapshot, document["max_rows_per_fragment"], document["shuffle_seed"]
        )  # fmt: skip
