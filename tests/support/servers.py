"""PostgreSQL and Redis servers for single tests, with Debian's programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.stack import START_SECONDS, free_port, wait_for

NOBODY_NEEDS_IT_AFTER_A_POWER_CUT = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


@contextmanager
def run_postgresql() -> Iterator[str]:
    """Start a PostgreSQL with an empty database; yields its address as SQLAlchemy writes it."""
    port = free_port()
    # It does not run as root. Folders of pytest are closed to all but their owner.
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="airflow-geneva-postgresql-"))
    if user:
        shutil.chown(folder, user, user)
    how: dict[str, Any] = {"user": user, "group": user, "extra_groups": [] if user else None, "cwd": folder}
    data = str(folder / "db")
    made = ["initdb", "--username=airflow", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", data]
    place = ["-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", str(folder)]
    settings = [word for setting in NOBODY_NEEDS_IT_AFTER_A_POWER_CUT for word in ("-c", setting)]
    ready = ["pg_isready", "--quiet", "--host=127.0.0.1", f"--port={port}"]
    try:
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, **how)
        server = subprocess.Popen(["postgres", *place, *settings], stderr=subprocess.DEVNULL, **how)
        try:
            wait_for(lambda: subprocess.run(ready, check=False).returncode == 0, START_SECONDS, "PostgreSQL")
            yield f"postgresql+psycopg2://airflow@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # it does not wait for its clients
            server.wait()
    finally:
        shutil.rmtree(folder)


@contextmanager
def run_redis(folder: Path) -> Iterator[str]:
    """Start a Redis that keeps nothing on disk; yields its address."""
    port = free_port()
    settings = {"bind": "127.0.0.1", "port": str(port), "dir": str(folder), "save": "", "appendonly": "no"}
    command = ["redis-server", *(word for name, value in settings.items() for word in (f"--{name}", value))]
    ping = ["redis-cli", "-p", str(port), "ping"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: subprocess.run(ping, capture_output=True).returncode == 0, START_SECONDS, "Redis")
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()
