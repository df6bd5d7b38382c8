"""The hosted workflow and the commit hooks call what exists, and the workflow covers what the package declares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
STEPS = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
COMMANDS = [step for step in STEPS if not step.startswith("sudo apt-get ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_workflow_calls_targets_and_settings_of_the_makefile(command: str) -> None:
    make, target, *settings = re.sub(r"\$\{\{.*?}}", "VALUE", command).split()
    assert make == "make"
    assert re.search(rf"^{target}:.*##", MAKEFILE, re.MULTILINE)
    matrix = JOBS["nightly"]["strategy"]["matrix"]["setting"] if "VALUE" in settings else []
    for setting in {*settings, *matrix} - {"VALUE"}:
        assert f"$({setting.partition('=')[0]}" in MAKEFILE


def test_the_workflow_runs_every_python_and_every_lock() -> None:
    runs = JOBS["test"]["strategy"]["matrix"]["include"]
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    locks = {lock.stem.removeprefix("airflow-") for lock in (ROOT / "requirements").glob("airflow-*.txt")}
    assert {run["python"] for run in runs} == set(declared)
    assert {run["airflow"] for run in runs} == locks | {""}


def test_the_hooks_run_tools_of_the_locked_environment() -> None:
    [source] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    for hook in source["hooks"]:
        tool = re.match(r"\.venv/bin/(\w+)", hook["entry"])
        assert tool
        assert re.search(rf"^{tool[1]}==", locked, re.MULTILINE)
