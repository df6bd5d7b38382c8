"""The sizes of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from airflow_geneva.engine.lance_io.task_memory import (
    DEFAULT_TASK_MEMORY,
    LEAST_TASK_MEMORY,
    batch_bytes,
    checkpoint_bytes,
    task_memory_bytes,
)
from airflow_geneva.errors import InvalidInput

_NOT_WHOLE = (
    *("checkpoint_interval", "checkpoint_cost", "price_per_slot_hour", "max_seconds", "max_cost"),
    *("num_cpus", "num_gpus"),
)


@dataclass(frozen=True)
class Sizing:
    """Sizes of shards, tasks, batches, checkpoints and commits.

    Args:
        concurrency: Spark task slots per spark-submit; in Airflow, by default `[geneva] concurrency`.
        intra_applier_concurrency: threads per slot.
        batch_size: rows per UDF call.
        checkpoint_size: the most rows of one checkpoint.
        min_checkpoint_size, max_checkpoint_size: bounds of the adaptive size.
        checkpoint_interval: seconds between two checkpoints of a task.
        checkpoint_cost: the most money that calls cost between two checkpoints of a task; None: the cost of 500 calls,
            or about a tenth of the task's cost so far, but at least the cost of one second.
        task_size: rows per Spark task.
        task_shuffle_diversity: number of regions of the table from which tasks take fragments in turn.
        shard_size: fragments per shard.
        commit_granularity: fragments per Lance commit; None: enough to keep a backfill at about 100 commits.
        task_memory_bytes: bytes of rows that a task slot holds at a time; see `lance_io.task_memory`.
        price_per_slot_hour: of one task slot or thread, in any currency, for estimates and `max_cost`; in Airflow, by
            default `[geneva] price_per_slot_hour`.
        num_frags: the number of due fragments of which the job takes rows; the others are left for the next run.
        skip_frags: the number of due fragments before these, which are left, too.
        max_rows: the most rows on which the UDF runs; the others are left for the next run, and the job is PARTIAL.
        max_seconds: seconds of computing, added up over shards, after which the job stops in the same way.
        max_cost: cost of slots and rows after which the job stops in the same way.
        num_cpus, num_gpus: CPUs and GPUs per call, in place of those that the UDFs declare.
        memory: bytes per call, or text as `"4g"`, in place of the UDFs'.
    """

    concurrency: int = 8
    intra_applier_concurrency: int = 1
    batch_size: int | None = None
    checkpoint_size: int | None = None
    min_checkpoint_size: int | None = None
    max_checkpoint_size: int | None = None
    checkpoint_interval: float = 10.0
    checkpoint_cost: float | None = None
    task_size: int | None = None
    task_shuffle_diversity: int | None = None
    shard_size: int | None = None
    commit_granularity: int | None = None
    task_memory_bytes: int = DEFAULT_TASK_MEMORY
    price_per_slot_hour: float | None = None
    num_frags: int | None = None
    skip_frags: int | None = None
    max_rows: int | None = None
    max_seconds: float | None = None
    max_cost: float | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None

    @staticmethod
    def is_whole(name: str) -> bool:
        """Whether a size is a whole number."""
        return name not in _NOT_WHOLE

    @staticmethod
    def least(name: str) -> int:
        """Return the least value of a size."""
        if name == "task_memory_bytes":
            return LEAST_TASK_MEMORY
        return 0 if name in (*_NOT_WHOLE, "skip_frags") else 1

    @staticmethod
    def check_number(name: str, value: object) -> None:
        """Raise `InvalidInput` if a value is no number that the size may be."""
        least, above = Sizing.least(name), name == "num_cpus"
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < least or (above and value == least):  # type: ignore[operator]
            wanted = "above" if above else "of at least"
            raise InvalidInput(f"{name}={value!r} is not valid: give a number {wanted} {least}.")

    @staticmethod
    def task_memory(default: int) -> int:
        """Return `task_memory_bytes` of new plans: the environment variable, else the given default."""
        return task_memory_bytes(default)

    @property
    def resources(self) -> dict[str, Any]:
        """What was asked for the calls of this job, in place of what its UDFs declare."""
        given = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "memory": self.memory}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def frags(self) -> str:
        """The limits on fragments, for messages; "" if there are none."""
        given = {"num_frags": self.num_frags, "skip_frags": self.skip_frags}
        return ", ".join(f"{name}={number}" for name, number in given.items() if number)

    @property
    def watched(self) -> bool:
        """Whether the job has a cap on its seconds or its cost."""
        return self.max_seconds is not None or self.max_cost is not None

    @property
    def batch_bytes(self) -> int:
        return batch_bytes(self.task_memory_bytes)

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.task_memory_bytes)
