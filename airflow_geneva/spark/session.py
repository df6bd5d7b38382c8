"""Open a SparkSession, and send the code to its workers."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import airflow_geneva
from airflow_geneva.spark.installation import java_environment
from airflow_geneva.storage.uri import sha256
from airflow_geneva.udf.shipping import UdfReference, zip_code

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


def package_zip() -> bytes:
    """Zip this package, for workers that do not have it installed."""
    folder = Path(airflow_geneva.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.py")):
            info = zipfile.ZipInfo(f"airflow_geneva/{path.relative_to(folder).as_posix()}", (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())
    return buffer.getvalue()


def open_session(concurrency: int) -> SparkSession:
    """Return the active session, or start a local one; `JavaNotFound` if there is no Java to start one."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    # A background thread has no active session of its own; this returns the process's.
    with contextlib.suppress(PySparkRuntimeError):
        return SparkSession.active()
    java = tempfile.TemporaryDirectory(prefix="geneva-java-")
    _shipped_folders.append(java)
    os.environ.update(java_environment(java.name))
    slots = max(1, min(concurrency, os.cpu_count() or 1))
    # Workers of a local session must use this Python; Spark would start the python3 on PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{slots},4]").appName("airflow_geneva")
    for name, value in session_settings().items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def session_settings() -> dict[str, str]:
    """Spark settings of a session that this package starts: quiet, and one BLAS thread per task, to share the cores."""
    settings = {"spark.ui.enabled": "false", "spark.log.level": "WARN", "spark.ui.showConsoleProgress": "false"}
    for name in BLAS_VARIABLES:
        settings[f"spark.executorEnv.{name}"] = "1"
    return settings


BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_shipped: set[tuple[str, str]] = set()
# Spark serves shipped files from these folders, so they stay until this process ends.
_shipped_folders: list[tempfile.TemporaryDirectory[str]] = []


def ship_code(context: SparkContext, udf_references: Iterable[UdfReference]) -> None:
    """Send this package and the UDFs' modules to the workers."""
    archives: dict[str, Callable[[], bytes | None]] = {"airflow_geneva": package_zip}
    for path in (udf_reference.import_path for udf_reference in udf_references):
        if path is not None:
            archives[path.split(":")[0]] = partial(zip_code, path)
    for name, make in archives.items():
        data = make()
        mark = (str(context.applicationId), "" if data is None else sha256(data))
        if data is not None and mark not in _shipped:
            _shipped.add(mark)
            folder = tempfile.TemporaryDirectory(prefix="geneva-code-")
            _shipped_folders.append(folder)
            target = Path(folder.name) / f"{name.replace('.', '_')}-{mark[1][:12]}.zip"
            target.write_bytes(data)
            path_before = list(sys.path)
            context.addPyFile(str(target))
            # The zip is for the workers; on this path it would shadow the module that the user edits.
            sys.path[:] = path_before
