"""Databases for Airflow: made once in a test run and then copied, in memory where the machine has a folder there."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

# Airflow commits all the time, and nobody needs a test's database after a power cut.
_MEMORY = Path("/dev/shm")
_FOLDER = Path(tempfile.mkdtemp(prefix="airflow-geneva-tests-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


def database_named(name: str) -> Path:
    """Where a database of this process lies."""
    return _FOLDER / f"{name}.db"


def connection_to(database: Path) -> str:
    """A database's address in Airflow's configuration."""
    return f"sqlite:///{database}"


def migrate(shared: Path) -> Path:
    """Make a database that nobody uses but to copy it.

    Args:
        shared: a folder of this test run; the first of its processes makes the database for all.
    """
    made = shared / "new_airflow.db"
    with (shared / "new_airflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            new = database_named("new")
            environment = {**os.environ, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": connection_to(new)}
            command = [sys.executable, "-m", "airflow", "db", "migrate"]
            subprocess.run(command, env=environment, check=True, capture_output=True)
            with closing(sqlite3.connect(new)) as database:
                database.execute("VACUUM INTO ?", [str(made)])
    return made
