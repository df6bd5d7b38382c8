"""What tests let a reader process do; it is imported there, without Airflow."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from airflow_geneva.pages.visible import Viewer

PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
"""What pylance raises out of its native code; it cannot be imported."""


class Everybody(Viewer):
    """A user with all rights."""

    def may_read_dag(self, dag_id: str) -> bool:
        return True

    def may_read_connection(self, conn_id: str) -> bool:
        return True

    def may_see_table(self, conn_id: str, table: str) -> bool:
        return True

    def may_see_source(self, uri: str, table: str) -> bool:
        return True


def own_process() -> int:
    return os.getpid()


def loaded(*names: str) -> list[str]:
    return [name for name in names if name in sys.modules]


def environment() -> dict[str, str]:
    return dict(os.environ)


def may_see(viewer: Viewer, *tables: str) -> list[bool]:
    return [viewer.may_see_table("c", table) for table in tables]


def die(code: int) -> None:
    os._exit(code)


def wait_and_say(folder: str, word: str) -> str:
    """Wait for a file, after saying by another that it waits."""
    Path(folder, f"{word}.waits").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return word


def burn() -> None:
    while True:
        pass


def eat() -> int:
    return len(b"x" * 40_000_000_000)


def eat_natively() -> Any:
    import pyarrow as pa

    return pa.allocate_buffer(40_000_000_000).size


def panic() -> None:
    raise PANIC("called `Option::unwrap()` on a `None` value")


def fail() -> None:
    raise LookupError("not here")


def time_out() -> None:
    raise TimeoutError("the store is away")


def ask_in_background(viewer: Viewer) -> None:
    """Return before a thread has been told what it asked."""
    threading.Thread(target=viewer.may_see_table, args=("c", "docs"), daemon=True).start()
    time.sleep(0.1)


def fail_oddly() -> None:
    raise type("Local", (Exception,), {})("cannot be pickled")


def much() -> bytes:
    return b"x" * 100_000_000


def limit_and_burn() -> None:
    """Use CPU time with a limit that is soon reached."""
    from airflow_geneva.pages import reader

    reader.MOST_CPU_SECONDS = 1
    reader.allow_cpu_time()
    burn()
