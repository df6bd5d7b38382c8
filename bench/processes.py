"""Memory and CPU time of this process and its descendants."""

from __future__ import annotations

import resource
import sys
import threading
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_EVERY_SECONDS = 0.1
_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_self() -> int:
    """Return the peak resident size of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def peak_children() -> int:
    """Return the sum of the peak resident sizes of living descendants, in bytes; shared pages count repeatedly."""
    return sum(_peak(child) for child in _below())


def cpu_seconds(below: bool = True) -> float:
    """Return the CPU time of this process with all its threads, and optionally of its living descendants."""
    return time.process_time() + sum(_cpu(child) for child in _below()) if below else time.process_time()


class TreePeak:
    """Measures the peak memory of this process and its descendants together while a block runs.

    Shared pages count once. Java is counted separately.

    Attributes:
        python: bytes of all processes that are not Java.
        jvm: bytes of Java processes.
    """

    def __enter__(self) -> TreePeak:
        self.python = self.jvm = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            sizes = {False: 0, True: 0}
            for process in (psutil.Process(), *_below()):
                try:
                    sizes[process.name() == "java"] += _size(process)
                except psutil.Error:
                    continue
            self.python, self.jvm = max(self.python, sizes[False]), max(self.jvm, sizes[True])


def _size(process: psutil.Process) -> int:
    linux = sys.platform == "linux"
    return int(process.memory_full_info().pss if linux else process.memory_info().rss)


def _below() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def _cpu(process: psutil.Process) -> float:
    try:
        spent = process.cpu_times()
        return float(spent.user + spent.system)
    except psutil.Error:
        return 0.0


def _peak(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return int(process.memory_info().rss)
    except (OSError, psutil.Error):
        return 0
