"""How many bytes of rows a task slot holds: one budget for reads, UDF calls, windows and checkpoints."""

from __future__ import annotations

import os

from airflow_geneva.errors import InvalidInput

VARIABLE = "GENEVA_TASK_MEMORY_BYTES"
DEFAULT_TASK_MEMORY = 128 << 20
LEAST_TASK_MEMORY = 1 << 10


def task_memory_bytes(default: int = DEFAULT_TASK_MEMORY) -> int:
    """The budget of new plans: as ``GENEVA_TASK_MEMORY_BYTES`` says, else the given default.

    Raises:
        InvalidInput: the variable does not hold a number of bytes.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < LEAST_TASK_MEMORY:
        raise InvalidInput(
            f"{VARIABLE}={text!r} is not a number of bytes: set it to a whole number of {LEAST_TASK_MEMORY} or more, "
            f"such as {DEFAULT_TASK_MEMORY} for 128 MB, or unset it."
        )
    return int(text)


def batch_bytes(task_memory: int) -> int:
    """Bytes of rows that are read, computed or put together at once: inputs, outputs and copies are there together."""
    return max(task_memory // 4, 1)


def checkpoint_bytes(task_memory: int) -> int:
    """Bytes of output that wait for a checkpoint: writing one copies them."""
    return max(task_memory // 2, 1)
