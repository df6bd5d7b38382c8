"""Lay out a directed graph in layers, for an SVG that the server draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

NODE_WIDTH, NODE_HEIGHT = 196, 40
_BETWEEN_LAYERS, _BETWEEN_NODES, _MARGIN = 64, 14, 8
_SWEEPS = 4
MOST_NODES = 2_000
_ALONE_IN_A_ROW = 4

Key = tuple[str, ...]


@dataclass(frozen=True)
class Node:
    """A table, view or column; the key of a column is its table and name. x and y are the upper left corner.

    `above` names the stale column or view above one that is up to date.
    """

    key: Key
    state: str
    kind: str
    above: str = ""
    x: int = 0
    y: int = 0


@dataclass(frozen=True)
class Graph:
    """Nodes with their places, the paths of the edges between them, and the size of the picture.

    `left_out` is the number of nodes that are not drawn.
    """

    nodes: tuple[Node, ...]
    paths: tuple[str, ...]
    width: int
    height: int
    left_out: int = 0


def lay_out(nodes: Sequence[Node], edges: Sequence[tuple[Key, Key]]) -> Graph:
    """Place each node right of its predecessors and near the mean of its neighbors; nodes without edges come last.

    Only the first nodes of a very large graph are drawn, and `left_out` counts the others.
    """
    drawn = nodes[:MOST_NODES]
    known = {node.key for node in drawn}
    kept = tuple((a, b) for a, b in edges if a in known and b in known)
    places, paths, width, height = _place(tuple(node.key for node in drawn), kept)
    placed = tuple(replace(node, x=x, y=y) for node, (x, y) in zip(drawn, places, strict=True))
    return Graph(placed, paths, width, height, len(nodes) - len(drawn))


@lru_cache(maxsize=32)
def _place(
    keys: tuple[Key, ...], edges: tuple[tuple[Key, Key], ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...], int, int]:
    """Return the positions of nodes, the paths of edges, and the size; cached, because open pages request it again."""
    linked = {key for edge in edges for key in edge}
    layers = _order(_layers([key for key in keys if key in linked], edges), edges)
    tallest = max(map(len, layers), default=0)
    alone = [key for key in keys if key not in linked]
    columns = max(len(layers), min(len(alone), _ALONE_IN_A_ROW))
    step_x, step_y = NODE_WIDTH + _BETWEEN_LAYERS, NODE_HEIGHT + _BETWEEN_NODES
    places: dict[Key, tuple[int, int]] = {}
    for column, layer in enumerate(layers):
        above = (tallest - len(layer)) * step_y // 2
        places.update(
            {key: (_MARGIN + column * step_x, _MARGIN + above + row * step_y) for row, key in enumerate(layer)}
        )
    below = _MARGIN + tallest * step_y + (_BETWEEN_NODES if layers else 0)
    for at, key in enumerate(alone):
        row, column = divmod(at, columns)
        places[key] = (_MARGIN + column * step_x, below + row * step_y)
    width = max((x for x, _ in places.values()), default=0) + NODE_WIDTH + _MARGIN
    height = max((y for _, y in places.values()), default=0) + NODE_HEIGHT + _MARGIN
    paths = tuple(_path(places[a], places[b]) for a, b in edges)
    return tuple(places[key] for key in keys), paths, width, height


def _layers(keys: Sequence[Key], edges: Sequence[tuple[Key, Key]]) -> list[list[Key]]:
    """Put each node one layer after the last of its predecessors; edges that close a cycle are ignored."""
    depth, waits_for = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
    after: dict[Key, list[Key]] = {}
    for a, b in edges:
        after.setdefault(a, []).append(b)
        waits_for[b] += 1
    ready = deque(key for key in keys if not waits_for[key])
    done = set(ready)
    for opened in [*ready, *keys]:
        # Only cycles and the nodes after them remain: open each cycle at its first node.
        if opened not in done:
            ready.append(opened)
            done.add(opened)
        while ready:
            key = ready.popleft()
            for other in after.get(key, ()):
                if other not in done:
                    depth[other] = max(depth[other], depth[key] + 1)
                    waits_for[other] -= 1
                    if not waits_for[other]:
                        ready.append(other)
                        done.add(other)
    layers: list[list[Key]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for key in keys:
        layers[depth[key]].append(key)
    return [layer for layer in layers if layer]


def _order(layers: list[list[Key]], edges: Sequence[tuple[Key, Key]]) -> list[list[Key]]:
    """Order the nodes of each layer by the mean position of their neighbors, so that few edges cross."""
    neighbors: dict[Key, list[Key]] = {}
    for a, b in edges:
        neighbors.setdefault(a, []).append(b)
        neighbors.setdefault(b, []).append(a)
    rows = {key: row / len(one) for one in layers for row, key in enumerate(one)}
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            layer.sort(key=lambda key: _mean(rows, neighbors.get(key, ()), rows[key]))
            rows.update((key, row / len(layer)) for row, key in enumerate(layer))
    return layers


def _mean(rows: Mapping[Key, float], keys: Sequence[Key], otherwise: float) -> float:
    return sum(rows[key] for key in keys) / len(keys) if keys else otherwise


def _path(start: tuple[int, int], end: tuple[int, int]) -> str:
    """A curve from the right side of one node to the left side of another."""
    x1, y1 = start[0] + NODE_WIDTH, start[1] + NODE_HEIGHT // 2
    x2, y2 = end[0], end[1] + NODE_HEIGHT // 2
    bend = max((x2 - x1) // 2, 24)
    return f"M{x1} {y1} C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"
