"""Documents of every kind that were changed at random give an error of this package or the right answer, cheaply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fuzzing import MOST_KB, NOW

ROOT = Path(__file__).parents[2]
KINDS = 30


def fuzz(folder: Path, count: int, seed: int) -> None:
    """Read changed documents in a process of its own, which a crash would end."""
    command = [sys.executable, "-m", "tests.support.fuzzing", str(folder), str(count), str(seed)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    left = (folder / NOW).read_bytes()[:2_000] if ended.returncode else b""
    assert ended.returncode == 0, f"{ended.stderr[-2_000:]}\n{left!r}"
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["memory_kb"] < MOST_KB
    assert len(found["kinds"]) >= KINDS
    print(f"{count:,} documents of {len(found['kinds'])} kinds, {found['memory_kb'] / 1024:.0f} MB above idle")


@pytest.mark.slow
def test_changed_documents_are_an_error_or_the_right_answer(tmp_path: Path) -> None:
    fuzz(tmp_path, 350, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_changed_documents_are_an_error_or_the_right_answer(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path, 1_000, seed)
