"""A pool of idle UDF worker processes: starting a new one may load a model."""

from __future__ import annotations

import os
import threading

from airflow_geneva.apply.isolation.process import WorkerKey, WorkerLost, WorkerProcess
from airflow_geneva.udf.shipping import UdfReference


class WorkerPool:
    """The idle worker processes of this process; each exits after a minute without orders."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[WorkerProcess] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def acquire(self, udf_reference: UdfReference) -> WorkerProcess:
        """Return a worker process for a UDF: an idle one or a new one.

        Raises:
            Unfit: the UDF cannot be set up in a new worker.
        """
        worker_key = WorkerKey.of(udf_reference)
        while (child := self._take(worker_key)) is not None:
            if child.answers_still():
                return child
        return WorkerProcess(worker_key, self.forget)

    def release_worker(self, child: WorkerProcess) -> None:
        """Return a worker to the pool; kill it if it is in the middle of an order."""
        if not child.at_rest or child.owner != os.getpid():
            child.close()
            return
        try:
            child.rest()
        except WorkerLost:
            return
        with self.lock:
            self.idle.append(child)
        if child.process.returncode is not None:
            self.forget(child)

    def forget(self, child: WorkerProcess) -> None:
        """Remove a worker that exited while it was idle."""
        with self.lock:
            if child not in self.idle:
                return
            self.idle.remove(child)
        child.close_pipes()

    def _take(self, worker_key: WorkerKey) -> WorkerProcess | None:
        with self.lock:
            # The worker returned last is the least likely to exit now.
            for at in range(len(self.idle) - 1, -1, -1):
                if self.idle[at].worker_key == worker_key:
                    return self.idle.pop(at)
        return None

    def _after_fork(self) -> None:
        """Drop the pool in a forked process: it has only copies of the pipes, and the workers belong to its parent."""
        for child in self.idle:
            for pipe in child.pipes:
                os.close(pipe)
        self.idle = []
        self.lock = threading.Lock()


POOL = WorkerPool()
