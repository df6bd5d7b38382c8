"""How the code of this package and of UDFs gets to the workers of a session."""

from __future__ import annotations

import io
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import airflow_geneva
from airflow_geneva.spark.connect import is_connect
from airflow_geneva.storage.uri import sha256
from airflow_geneva.udf.shipping import UdfReference, zip_code

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_sent: set[tuple[str, str]] = set()
# Spark serves sent files from these folders, so they stay until this process ends.
_sent_folders: list[tempfile.TemporaryDirectory[str]] = []


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


def add_archives(session: SparkSession, paths: Iterable[str]) -> None:
    """Send zipped code to the workers of a session."""
    path_before = list(sys.path)
    for path in paths:
        if is_connect(session):
            session.addArtifacts(path, pyfile=True)
        else:
            session.sparkContext.addPyFile(path)
    # The zips are for the workers; on this path they would shadow the modules that the user edits.
    sys.path[:] = path_before


def send_code(session: SparkSession, udf_references: Iterable[UdfReference]) -> None:
    """Send this package and the UDFs' modules to the workers."""
    place = str(session.session_id if is_connect(session) else session.sparkContext.applicationId)  # type: ignore[attr-defined]
    archives: dict[str, Callable[[], bytes | None]] = {"airflow_geneva": package_zip}
    for path in (udf_reference.import_path for udf_reference in udf_references):
        if path is not None:
            archives[path.split(":")[0]] = partial(zip_code, path)
    for name, make in archives.items():
        data = make()
        mark = (place, "" if data is None else sha256(data))
        if data is not None and mark not in _sent:
            folder = tempfile.TemporaryDirectory(prefix="geneva-code-")
            _sent_folders.append(folder)
            target = Path(folder.name) / f"{name.replace('.', '_')}-{mark[1][:12]}.zip"
            target.write_bytes(data)
            add_archives(session, [str(target)])
            _sent.add(mark)
