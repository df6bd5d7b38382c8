"""Start processes quickly: a server with all imports done forks them, because importing takes a second.

lance may be imported before a fork as long as no function of it was called; it is first used in the children.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any

_PRELOAD = (
    "lance",
    "lance.commit",
    "lance.file",
    "lance.fragment",
    "airflow_geneva.database",
    "airflow_geneva.table",
    "airflow_geneva.engine.plan.request",
    "airflow_geneva.engine.run.pipeline",
    "airflow_geneva.engine.cleanup",
    "tests.support.harness",
)


class Forge:
    """Runs functions of modules in fresh processes, several at a time, and reports how each ended."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.forge"]
        self._zygote = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.errors: dict[int, str] = {}
        """The tracebacks of the processes that ended with an exception, by process id."""
        atexit.register(self.close)

    def start(self, function: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> int:
        """Start ``module:function(**arguments)`` in a new process; return its id."""
        order = {"function": function, "arguments": dict(arguments), "environment": dict(environment)}
        self._tell(order)
        return int(self._answer()["started"])

    def wait(self, pid: int) -> int:
        """Return the exit code of a process, negative if a signal ended it."""
        self._tell({"wait": pid})
        answer = self._answer()
        if answer["error"]:
            self.errors[pid] = answer["error"]
        return int(answer["ended"])

    def run(self, function: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> int:
        return self.wait(self.start(function, arguments, environment))

    def close(self) -> None:
        """End the server; children that no caller waits for end by themselves."""
        if self._zygote.poll() is None and self._zygote.stdin is not None:
            self._zygote.stdin.close()
            self._zygote.wait()

    def _tell(self, order: Mapping[str, Any]) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._zygote.stdout is not None
        answer: dict[str, Any] = json.loads(self._zygote.stdout.readline())
        return answer


@functools.cache
def forge() -> Forge:
    """Return the server of this test run."""
    return Forge()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    # The output of children goes to standard error, so that it does not mix with the answers.
    os.dup2(2, 1)
    for name in _PRELOAD:
        importlib.import_module(name)
    errors = dict[int, int]()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            with os.fdopen(errors.pop(order["wait"])) as error:
                answer = {"ended": os.waitstatus_to_exitcode(status), "error": error.read()}
        else:
            pid, errors_of_it = _fork(order)
            errors[pid] = errors_of_it
            answer = {"started": pid}
        print(json.dumps(answer), file=answers, flush=True)


def _fork(order: Mapping[str, Any]) -> tuple[int, int]:
    """Start a process; return its id and where to read the traceback of its exception after its end."""
    module, _, name = order["function"].partition(":")
    importlib.import_module(module)
    # A child of the child does not inherit the pipe, so that reading ends with the child.
    error, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, error
    code = 1
    try:
        os.environ.update(order["environment"])
        getattr(importlib.import_module(module), name)(**order["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
        os.write(write, traceback.format_exc().encode()[-4096:])  # a pipe holds that much without a reader
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
