"""The hosted workflow and the commit hooks call what exists, and the workflow covers what the package declares."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").glob("*.yml")}
JOBS: dict[str, Any] = WORKFLOWS["ci"]["jobs"]
STEPS = [
    step["run"]
    for flow in WORKFLOWS.values()
    for job in flow["jobs"].values()
    for step in job["steps"]
    if "run" in step
]
COMMANDS = [step for step in STEPS if not step.startswith("sudo apt-get ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_workflow_calls_targets_and_settings_of_the_makefile(command: str) -> None:
    make, target, *settings = re.sub(r"\$\{\{.*?}}", "VALUE", command).replace('"', "").split()
    assert make == "make"
    assert re.search(rf"^{target}:.*##", MAKEFILE, re.MULTILINE)
    matrix = JOBS["nightly"]["strategy"]["matrix"]["setting"] if "VALUE" in settings else []
    for setting in {*settings, *matrix} - {"VALUE"}:
        assert re.search(rf"\$\((?:filter 3\.%,\$\()?{setting.partition('=')[0]}\b", MAKEFILE)


def test_the_workflow_runs_every_python_and_every_lock() -> None:
    runs = JOBS["test"]["strategy"]["matrix"]["versions"]
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    locks = {lock.stem.removeprefix("airflow-") for lock in (ROOT / "requirements").glob("airflow-*.txt")}
    assert {run["python"] for run in runs} == set(declared)
    assert {run["airflow"] for run in runs} == locks | {""}
    assert WORKFLOWS["release"]["jobs"]["dist"]["strategy"]["matrix"]["python"] == declared


def test_the_table_of_what_is_tested_names_every_setting_of_the_workflow() -> None:
    table = (ROOT / "SUPPORT.md").read_text()
    runs = JOBS["test"]["strategy"]["matrix"]["versions"]
    [pythons] = re.findall(r"^\| Python \| (.+?) \|", table, re.MULTILINE)
    [airflows] = re.findall(r"^\| Airflow \| (.+?) \|", table, re.MULTILINE)
    assert set(re.findall(r"3\.\d+", pythons)) == {run["python"] for run in runs}
    assert set(re.findall(r"3\.\d+", airflows)) == {run["airflow"] or "3.3" for run in runs}
    nightly = [setting.split() for setting in JOBS["nightly"]["strategy"]["matrix"]["setting"]]
    # All tests run at night with every combination that the others run with.
    assert [f"PYTHON={run['python']}" + f" AIRFLOW={run['airflow']}" * bool(run["airflow"]) for run in runs] == [
        " ".join(setting) for setting in nightly[: len(runs)]
    ]
    for _, setting in nightly[len(runs) :]:
        assert f"`{setting}`" in table


def test_a_tag_releases_only_what_says_that_it_is_this_release() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "airflow_geneva" / "__init__.py").read_text())
    assert version
    assert re.search(
        rf"^## {re.escape(version[1])} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    wrong = subprocess.run(["make", "released", "VERSION=0.0.1"], cwd=ROOT, capture_output=True, text=True)
    assert "__version__ is not 0.0.1" in wrong.stderr


def test_the_hooks_run_tools_of_the_locked_environment() -> None:
    [source] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    locked = (ROOT / "requirements" / "dev.txt").read_text()
    for hook in source["hooks"]:
        tool = re.match(r"\.venv/bin/(\w+)", hook["entry"])
        assert tool
        assert re.search(rf"^{tool[1]}==", locked, re.MULTILINE)
