"""Where pylance draws the names of its files from: a few lines of C, preloaded, that give them out by a seed.

Without a C compiler the names are random. Then worlds run all the same, but two runs of a seed may take other ways,
because what is sorted by name has another order.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("chance.c")
_PRELOADED = "SIMULATION_CHANCE"


def has_compiler() -> bool:
    return sys.platform == "linux" and shutil.which("cc") is not None


def preload(program: str = "tests.simulation") -> None:
    """Start a program again with pylance's chance in our hand, and with sets in the same order each time."""
    if os.environ.get("PYTHONHASHSEED") == "0":
        return
    # Where listings have no order, pylance asks a hint for the newest version. A commit that gets the number of a
    # removed version turns that hint back, and every reader finds the older version from then on.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "LANCE_USE_VERSION_HINT": "0"}
    if has_compiler():
        made = Path(
            tempfile.gettempdir(), f"simulation-{os.getuid()}-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
        )
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
                draft = Path(scratch) / made.name
                subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(draft), str(SOURCE)], check=True)
                draft.replace(made)
        environment |= {"LD_PRELOAD": str(made), _PRELOADED: "1"}
    os.execve(sys.executable, [sys.executable, "-m", program, *sys.argv[1:]], environment)


def seed(number: int) -> None:
    if os.environ.get(_PRELOADED):
        ctypes.CDLL(None).simulation_seed(ctypes.c_uint64(number))
