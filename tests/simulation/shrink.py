"""Leave of a failing world what matters: the shortest beginning, the fewest faults, the fewest changes of turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.simulation.world import Move

Fails = Callable[[Sequence[Move]], bool]


def shrink(moves: Sequence[Move], fails: Fails, may: Callable[[], bool]) -> list[Move]:
    """Return fewer moves that still fail; after them all go on in turn, without faults.

    Args:
        fails: whether a world with these moves goes wrong.
        may: whether there is time for another world.
    """
    best = list(moves)

    def still(tried: list[Move]) -> bool:
        nonlocal best
        if not may() or not fails(tried):
            return False
        best = tried
        return True

    low, high = 0, len(best)
    while low < high and may():
        middle = (low + high) // 2
        if still(best[:middle]):
            high = middle
        else:
            low = middle + 1
    for at in reversed([at for at, move in enumerate(best) if move.kind not in ("go", "time")]):
        if at < len(best):
            still([*best[:at], replace(best[at], kind="go"), *best[at + 1 :]])
    size = max(len(best) // 4, 1)
    while may():
        for start in range(0, len(best), size):
            still([*best[:start], *best[start + size :]])
        if size == 1:
            break
        size //= 2
    return best


_READS = re.compile(r"^(read|list|exists|open|rmdir)\b")

_FOLDERS = re.compile(r"(?<= )\S*/(?=[^/\s]+)")


def told(trace: Sequence[str]) -> str:
    """Return a trace without what only reads, with a paragraph for each turn of an actor."""
    lines: list[str] = []
    last = ""
    for line in trace:
        actor, _, said = line.partition(" ")
        thread, _, point = said.partition(" ")
        if not thread.isdigit():
            point = said
        if _READS.match(point) and "->" not in point:
            continue
        point = _FOLDERS.sub("", point)
        if actor == last and "->" not in point:
            lines[-1] += f", {point}"
        else:
            lines.append(f"  {actor}: {point}")
        last = actor
    return "\n".join(lines)
