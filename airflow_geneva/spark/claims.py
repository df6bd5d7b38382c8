"""Which task of a stage computes which group of units: tasks claim groups by files, and none waits for another one."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.files import Storage

_TASK_SECONDS = 60.0
"""Seconds after which a task leaves further groups to the next task: Spark counts the failures of each task."""
_CLAIM = re.compile(r"(\d{1,9})-(\d{1,9})")


@dataclass
class Claims:
    """The claims of a stage's tasks, as far as a worker process knows them.

    A task writes a file that names a group and the task, and then lists all of them. If two tasks claim a group at the
    same time, at least one of them sees both files and leaves the group; if both do, the driver runs it in another
    stage. A task that runs again, because its process died, keeps its groups.

    Args:
        groups: how many there are.
    """

    storage: Storage
    groups: int
    _known: dict[int, set[int]] = field(default_factory=dict)

    @property
    def free(self) -> list[int]:
        """The groups that no task is known to have claimed."""
        return [group for group in range(self.groups) if group not in self._known]

    def look(self) -> None:
        """List the claims."""
        found = defaultdict[int, set[int]](set)
        for name in self.storage.list_files():
            if claim := _CLAIM.fullmatch(name):
                found[int(claim[1])].add(int(claim[2]))
        self._known |= found

    def of(self, task: int) -> list[int]:
        """Return the groups that a task has claimed alone."""
        return sorted(group for group, tasks in self._known.items() if tasks == {task} and group < self.groups)

    def take(self, task: int) -> int | None:
        """Claim a group for a task; None if other tasks have claimed the rest.

        Tasks that claim at the same time choose different groups if there are enough.
        """
        if self.free:
            self.look()
        while free := self.free:
            group = free[task % len(free)]
            self.storage.write_json(f"{group:06}-{task:06}", {})
            self.look()
            if self._known.get(group) == {task}:
                return group
        return None


@dataclass
class OneGroup:
    """The one group of a task whose rows were brought to it.

    Args:
        taken: the group, once it was taken.
    """

    group: int
    taken: list[int] = field(default_factory=list)

    def next(self) -> list[int]:
        found = [] if self.taken else [self.group]
        self.taken += found
        return found


@dataclass
class Share:
    """The groups of one task, which it takes one after another.

    Args:
        again: whether the task runs again, because its process died.
        taken: the groups so far.
    """

    claims: Claims
    task: int
    again: bool
    taken: list[int] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def next(self) -> list[int]:
        """Return the next group, or at first those of an earlier try; none if there is none, or the task took long."""
        if self.taken and time.monotonic() - self._began > _TASK_SECONDS:
            return []
        found = list[int]()
        if self.again and not self.taken:
            self.claims.look()
            found = self.claims.of(self.task)
        if not found and (group := self.claims.take(self.task)) is not None:
            found = [group]
        self.taken += found
        return found
