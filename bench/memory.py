"""Peak memory of this process and of those it started."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_self() -> int:
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def peak_children() -> int:
    """Sum of the largest resident sizes of the living processes below this one, in bytes; shared pages count twice."""
    return sum(_peak(child) for child in psutil.Process().children(recursive=True))


def _peak(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return int(process.memory_info().rss)
    except (OSError, psutil.Error):
        return 0
