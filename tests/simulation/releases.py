"""Another release of the package beside the present one: a process that has imported it, and forks actors of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRESENT, EARLIER = "present", "earlier"
ROOT = Path(__file__).parents[2]
LAST = "7e518852"
"""Stands for the last release until there is one: the commit since which plans and tables are written as today."""
_LONGEST = 1 << 20


def has_history() -> bool:
    """Whether this checkout knows the commit; a shallow clone does not."""
    found = subprocess.run(["git", "cat-file", "-e", f"{LAST}^{{commit}}"], cwd=ROOT, capture_output=True, check=False)
    return found.returncode == 0


def unpack(commit: str, folder: Path) -> Path:
    """Write the package of a commit below a folder; return what comes first on the path then.

    `plan-format` is the present one, with another format of plans.
    """
    home = folder / "release"
    if commit == "plan-format":
        shutil.copytree(ROOT / "airflow_geneva", home / "airflow_geneva", ignore=shutil.ignore_patterns("__pycache__"))
        file = home / "airflow_geneva" / "engine" / "plan" / "saved_plan.py"
        changed, times = re.subn(r"^_FORMAT = (\d+)$", r"_FORMAT = 1\1", file.read_text(), flags=re.MULTILINE)
        assert times == 1
        file.write_text(changed)
        return home
    home.mkdir()
    archive = subprocess.run(["git", "archive", commit, "airflow_geneva"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(home)], input=archive.stdout, check=True)
    return home


class Release:
    """Forks actors of another release; made before this process imports the package.

    Args:
        home: a folder with the package.
        prepare: imports it, as a world does.
        child: runs an actor.
    """

    def __init__(self, home: Path, prepare: Callable[[], None], child: Callable[..., None]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            sys.path.insert(0, str(home))
            try:
                prepare()
                _serve(theirs, home, child)
            finally:
                os._exit(1)
        theirs.close()

    def fork(self, pipe: Connection, **arguments: Any) -> int:
        """Start an actor that talks over a pipe; return its process id."""
        socket.send_fds(self._socket, [json.dumps(arguments).encode()], [pipe.fileno()])
        said = self._socket.recv(_LONGEST)
        if not said:
            sys.exit("the other release has ended")
        return int(said)

    def end(self) -> None:
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _serve(asked: socket.socket, home: Path, child: Callable[..., None]) -> None:
    import airflow_geneva

    assert Path(airflow_geneva.__file__).is_relative_to(home), airflow_geneva.__file__
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nothing is left of an actor that has ended
    while True:
        message, handles, *_ = socket.recv_fds(asked, _LONGEST, 1)
        if not message:
            os._exit(0)
        arguments: Mapping[str, Any] = json.loads(message)
        pid = os.fork()
        if pid == 0:
            asked.close()
            child(Connection(handles[0]), **arguments)
        os.close(handles[0])
        asked.send(str(pid).encode())
