"""Visit every state of a model breadth first, and check what has to hold in each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)


class Step(NamedTuple, Generic[S]):
    """One thing that may happen next.

    Args:
        actor: who does it.
        action: what is done: the name of the fault point that the actor passes then, or a word.
        fair: whether it happens in the end if nothing else does; not of kills and of what others do.
    """

    actor: str
    action: str
    state: S
    fair: bool = True


Steps = Callable[[S], Iterable[Step[S]]]
Check = Callable[[S], str]
"""Returns what is wrong with a state, or an empty string."""


class Violation(AssertionError):
    """A state breaks an invariant, or a path does not end; the message has the shortest way there."""


@dataclass
class Graph(Generic[S]):
    """All reachable states, by the step that first led to each."""

    came_from: dict[S, tuple[S, Step[S]] | None] = field(default_factory=dict)
    fair: dict[S, tuple[S, ...]] = field(default_factory=dict)
    taken: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def ends(self) -> Iterator[S]:
        """The states in which only faults and others may do anything."""
        return (state for state, after in self.fair.items() if not after)

    def way_to(self, state: S) -> list[Step[S]]:
        """Return a shortest way from a start to a state."""
        way: list[Step[S]] = []
        while (came := self.came_from[state]) is not None:
            state, step = came
            way.append(step)
        return way[::-1]

    def told(self, state: S) -> str:
        return "\n".join(f"  {step.actor:8} {step.action}" for step in self.way_to(state))


def explore(starts: Iterable[S], steps: Steps[S], invariants: Mapping[str, Check[S]]) -> Graph[S]:
    """Visit all states.

    Raises:
        Violation: an invariant does not hold in a state.
    """
    graph, todo = Graph[S](), deque[S]()

    def visit(state: S, came: tuple[S, Step[S]] | None) -> None:
        graph.came_from[state] = came
        todo.append(state)
        for name, check in invariants.items():
            if wrong := check(state):
                raise Violation(f"{name}: {wrong}\n{graph.told(state)}")

    for state in starts:
        visit(state, None)
    while todo:
        state = todo.popleft()
        after: list[S] = []
        for step in steps(state):
            kind = step.actor, step.action
            graph.taken[kind] = graph.taken.get(kind, 0) + 1
            if step.state not in graph.came_from:
                visit(step.state, (state, step))
            if step.fair:
                after.append(step.state)
        graph.fair[state] = tuple(after)
    return graph


def check_ends(graph: Graph[S], check: Check[S]) -> None:
    """Check that without faults every way from every state ends, and that all is well there.

    Raises:
        Violation: a way goes round in a circle, or ends in a state with which something is wrong.
    """
    for state in graph.ends:
        if wrong := check(state):
            raise Violation(f"end: {wrong}\n{graph.told(state)}")
    waiting = dict.fromkeys(graph.fair, 0)
    for after in graph.fair.values():
        for state in after:
            waiting[state] += 1
    todo = [state for state, before in waiting.items() if not before]
    left = len(waiting)
    while todo:
        left -= 1
        for state in graph.fair[todo.pop()]:
            waiting[state] -= 1
            if not waiting[state]:
                todo.append(state)
    if left:
        circle = next(state for state, before in waiting.items() if before)
        raise Violation(f"end: {left} states from which a way goes round in a circle, such as\n{graph.told(circle)}")
