"""`make` and scripts/setup_env.sh: which environment, which interpreter, and which versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_geneva.engine.lance_io.pylance_internals import NEWEST_TESTED

ROOT = Path(__file__).parents[2]


def _executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _setup(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    """The script up to where the environment would be made."""
    _executable(tmp_path / "bin/uv", "exit 1")
    return subprocess.run(
        [ROOT / "scripts/setup_env.sh", tmp_path / "venv", "requirements/dev.txt"],
        env={"PATH": f"{tmp_path / 'bin'}:{os.defpath}", "HOME": str(tmp_path), "PYTHON": python},
        capture_output=True,
        text=True,
    )


def test_a_version_is_found_in_pyenv_where_its_shim_does_not_run(tmp_path: Path) -> None:
    _executable(tmp_path / "bin/python3.13", "exit 127")
    _executable(tmp_path / ".pyenv/versions/3.13.7/bin/python", f'exec "{sys.executable}" "$@"')
    assert _setup(tmp_path, "3.13").stdout == f"install: making {tmp_path / 'venv'} with {sys.executable}\n"
    assert f"with {sys.executable}" in _setup(tmp_path, f"no-such-python {sys.executable}").stdout


def test_a_version_that_is_not_there_is_refused_with_where_it_was_looked_for(tmp_path: Path) -> None:
    _executable(tmp_path / "bin/python3.13", "exit 127")
    refused = _setup(tmp_path, "3.13")
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        f"install: no Python 3.10 to 3.13 found (looked at: python3.13 on PATH, and {tmp_path}/.pyenv/versions).",
        "install: Put python3.13 on PATH, or install it with pyenv.",
    ]


@pytest.mark.parametrize(
    ("given", "environment", "lock"),
    [
        ([], ".venv", "dev"),
        (["PYTHON=/usr/bin/python3.13"], ".venv", "dev"),
        (["PYTHON=3.13", "AIRFLOW=3.1"], ".venv-3.1-py3.13", "airflow-3.1"),
        (["AIRFLOW=3.4"], ".venv-3.4", "airflow-3.4"),
        (["LOWEST=1"], ".venv-lowest", "lowest"),
        (["RECIPES=1"], ".venv-recipes", "recipes"),
        (["CELERY=1"], ".venv-celery", "celery"),
        (["STORE=azurite"], ".venv", "dev"),
        (["PYLANCE=latest", "PYTHON=3.12"], ".venv-pylance-latest-py3.12", "dev"),
    ],
)
def test_each_choice_has_an_environment_of_its_own(given: list[str], environment: str, lock: str) -> None:
    # Without what the `make test-all` that runs this was itself given.
    clean = {"PATH": os.environ["PATH"]}
    said = subprocess.run(
        ["make", "-Bn", "test-all", *given], cwd=ROOT, env=clean, capture_output=True, text=True, check=True
    )
    assert f"scripts/setup_env.sh {environment} requirements/{lock}.txt" in said.stdout
    assert f"{environment}/bin/python -m pytest" in said.stdout


@pytest.mark.parametrize(
    ("setting", "needed"),
    [("CELERY=1", "redis-server postgresql"), ("STORE=azurite", "npm")],
)
def test_what_a_choice_lacks_is_named_before_anything_is_installed(tmp_path: Path, setting: str, needed: str) -> None:
    make = shutil.which("make")
    assert make
    found = [f"FOUND={tmp_path}", f"AZURITE={tmp_path}/azurite"]
    command = [make, "--no-print-directory", "test-all", setting, *found]
    refused = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert refused.returncode == 2
    said = f"test: {setting} needs {needed}. Install (Debian, Ubuntu): apt-get install -y {needed}"
    assert refused.stderr.splitlines()[0] == said


@pytest.mark.parametrize("lock", sorted(path.name for path in (ROOT / "requirements").glob("*.txt")))
def test_every_locked_version_has_hashes(lock: str) -> None:
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements" / lock).read_text())
    pins = [entry for entry in entries if not entry.startswith("#")]
    assert pins
    assert [entry.partition("\n")[0] for entry in pins if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry)] == []


@pytest.mark.parametrize("file", ["Makefile", "scripts/setup_env.sh", "scripts/check_dist.sh"])
def test_what_installs_a_lock_asks_for_its_hashes(file: str) -> None:
    text = re.sub(r" *\\\n\s*", " ", (ROOT / file).read_text())
    installs = [line for line in text.splitlines() if re.search(r"(install|with_pip) .*-r ", line)]
    assert installs
    assert [line for line in installs if "--require-hashes" not in line] == []
    # Not even what builds the package is fetched beside the lock.
    assert not re.search(r"install .*-e \.|-m build", text) or "isolation" in text


def test_the_newest_tested_pylance_is_the_locked_one() -> None:
    assert f"\npylance=={NEWEST_TESTED} " in (ROOT / "requirements/dev.txt").read_text()
