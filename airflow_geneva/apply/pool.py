"""Children at rest, kept for the next batch: starting one may mean to load a model."""

from __future__ import annotations

import os
import threading

from airflow_geneva.apply.supervisor import Child, Lost, Workplace
from airflow_geneva.udf_parcel import UdfParcel


class ChildPool:
    """The children of this process that nobody uses; each ends by itself after a minute."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Child] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def hire(self, parcel: UdfParcel) -> Child:
        """A child that runs this UDF, at rest before or new.

        Raises:
            Unfit: the UDF cannot be set up in a new one.
        """
        workplace = Workplace.of(parcel)
        while (child := self._take(workplace)) is not None:
            if child.answers_still():
                return child
        return Child(workplace, self.forget)

    def give_back(self, child: Child) -> None:
        """Keep a child for others; one that is in the middle of something is killed."""
        if not child.at_rest or child.owner != os.getpid():
            child.close()
            return
        try:
            child.rest()
        except Lost:
            return
        with self.lock:
            self.idle.append(child)
        if child.process.returncode is not None:
            self.forget(child)

    def forget(self, child: Child) -> None:
        """Let go of a child that has ended while nobody used it."""
        with self.lock:
            if child not in self.idle:
                return
            self.idle.remove(child)
        child.close_pipes()

    def _take(self, workplace: Workplace) -> Child | None:
        with self.lock:
            # The last one given back is the least likely to leave now.
            for at in range(len(self.idle) - 1, -1, -1):
                if self.idle[at].workplace == workplace:
                    return self.idle.pop(at)
        return None

    def _after_fork(self) -> None:
        """Leave the children to the process that was forked: here are only copies of the pipes."""
        for child in self.idle:
            for pipe in child.pipes:
                os.close(pipe)
        self.idle = []
        self.lock = threading.Lock()


POOL = ChildPool()
