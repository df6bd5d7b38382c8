"""Run worlds as a user does, in a process of their own."""

from __future__ import annotations

import subprocess
import sys


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
