"""The installed version of Spark, read from its files without importing it.

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
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

NEWEST_SPARK = "4.2.0"  # the newest pyspark-client there is, and so the newest version both can have


@dataclass(frozen=True)
class SparkInstallation:
    """The Spark that this environment's `spark-submit` would start.

    Attributes:
        python_version: The version in Spark's Python files; None if they are missing.
        jars_version: The version of Spark's jars; None if there are none.
        pyspark: The version of the distribution pyspark; None if it is not installed.
        client: The version of the distribution pyspark-client; None if it is not installed.
        altered_files: Number of pyspark's Python files that are missing or differ from the distribution's.
        foreign_home: The SPARK_HOME of the jars, if they are not the package's own.
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
    """Read what is installed; None if there is no pyspark."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    home = Path(os.environ.get("SPARK_HOME") or package)
    return SparkInstallation(
        python_version=_python_version(package),
        jars_version=_jars_version(home / "jars"),
        pyspark=_distribution_version("pyspark"),
        client=_distribution_version("pyspark-client"),
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


def _jars_version(jars: Path) -> str | None:
    # Two versions of the jar in one folder are an error too: Java would run the one that it finds first.
    versions = {jar.stem.rpartition("-")[2] for jar in jars.glob("spark-core_*.jar")}
    return " and ".join(sorted(versions)) or None


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
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
            if not path.is_file() or _record_hash(path) != recorded:
                yield name


def _record_hash(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
