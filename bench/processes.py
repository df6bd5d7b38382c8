"""Memory and processor time of this process and of those it started."""

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
    """Largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def peak_children() -> int:
    """Sum of the largest resident sizes of the living processes below this one, in bytes; shared pages count twice."""
    return sum(_peak(child) for child in _below())


def cpu_seconds(below: bool = True) -> float:
    """Processor time so far of this process with all its threads, and of the living ones below it if wanted."""
    return time.process_time() + sum(_cpu(child) for child in _below()) if below else time.process_time()


class TreePeak:
    """The largest memory that this process and those below it take together while a block runs.

    Pages that processes share count once. Java is counted apart.

    Attributes:
        python: bytes of all processes that are not Java.
        jvm: bytes of those that are.
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
