"""Databases for Airflow: created once per test run and then copied."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.support.scratch import SCRATCH


def database_named(name: str) -> Path:
    """Return the path of a database of this process."""
    return SCRATCH / f"{name}.db"


def connection_to(database: Path) -> str:
    """A database's address in Airflow's configuration."""
    return f"sqlite:///{database}"


def migrate(shared: Path) -> Path:
    """Create a database that is only used as a template for copies.

    Args:
        shared: a folder of this test run; the first of its processes creates the database for all.
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
