"""``python -m tests.mutants [PART ...]``: remove each guard in a copy of the package, and run its tests.

With parts of paths, only the guards of those modules: ``commit/ view_state.py``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tests.mutants.guards import GUARDS, Guard

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 900
PASSED, FAILED = 0, 1


def run(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run tests against a copy of the package; return pytest's exit code and its last lines."""
    paths = [str(Path("tests", test.removesuffix("::"))) for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not soak"]
    command += ["--import-mode=importlib", "--no-header", "--tb=line", *paths]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {LONGEST_SECONDS} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])


def survives(copy: Path, file: Path, guard: Guard) -> str:
    """Remove a guard from a file, run its tests, and put it back; return "" if they fail, else what they said."""
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(guard.code, guard.without), encoding="utf-8")
    try:
        compile(file.read_text(encoding="utf-8"), file.name, "exec")
        code, said = run(copy, guard.tests)
    finally:
        file.write_text(whole, encoding="utf-8")
    return "" if code == FAILED else f"pytest ended with {code}: {said.splitlines()[-1] if said else ''}"


def main(parts: list[str]) -> int:
    console = Console(highlight=False, soft_wrap=True)
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="geneva-mutants-") as folder:
        copy = Path(folder)
        for name in ("airflow_geneva", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        package = copy / "airflow_geneva"
        places = {guard: guard.file(package) for guard in GUARDS}
        shown = {guard: str(file.relative_to(package)) for guard, file in places.items()}
        guards = [guard for guard in GUARDS if not parts or any(part in shown[guard] for part in parts)]
        code, said = run(copy, tuple(dict.fromkeys(test for guard in guards for test in guard.tests)))
        if code != PASSED:
            console.print("The tests fail with all guards in place:", said, markup=False)
            return 2
        for guard in guards:
            began = time.monotonic()
            why_not = survives(copy, places[guard], guard)
            survivors += bool(why_not)
            state = "[red]survived[/]" if why_not else "[green]caught  [/]"
            seconds = f"{time.monotonic() - began:4.0f} s"
            console.print(f"{state} {seconds}  {shown[guard]:30} {escape(guard.why)} [red]{escape(why_not)}[/]")
    console.print(f"{len(guards) - survivors} of {len(guards)} removals were caught.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
