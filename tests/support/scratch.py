"""The folder of a test run's files: in memory, if the machine has room there."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ENOUGH = 4 << 30


def _is_fit() -> bool:
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return False
    about = os.statvfs(_MEMORY)
    # Tests write programs and run them.
    return not about.f_flag & getattr(os, "ST_NOEXEC", 0) and about.f_bavail * about.f_frsize >= _ENOUGH


# Tests write hundreds of thousands of small files, which a disk takes minutes to write and minutes to remove. Airflow
# commits constantly, and a test's database need not survive a power failure.
if _is_fit():
    tempfile.tempdir = os.environ["TMPDIR"] = str(_MEMORY)

SCRATCH = Path(tempfile.mkdtemp(prefix="airflow-geneva-tests-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
