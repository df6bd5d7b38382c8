"""How the code of this package and of UDFs gets to the workers of a session."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import io
import marshal
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import airflow_geneva
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark.connect import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_geneva.engine.plan.model import JobSpec
    from airflow_geneva.engine.run.prepare import Udfs

_sent: ProcessMemo[tuple[str, str], tempfile.TemporaryDirectory[str]] = ProcessMemo()
"""The folders of sent files by session and name. Spark serves the files from them until this process ends."""


@functools.cache
def package_zip() -> bytes:
    """Zip this package, for workers that do not have it installed.

    Beside each module lies what this Python compiled it to: without it every worker process compiles 130 modules. A
    worker with another version of Python ignores that and reads the module.
    """
    folder = Path(airflow_geneva.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*.py")):
            name = f"airflow_geneva/{path.relative_to(folder).as_posix()}"
            for suffix, data in (("", path.read_bytes()), ("c", _compiled(path))):
                info = zipfile.ZipInfo(name + suffix, (1980, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, data, compresslevel=1)  # half the time of the default, for 8 % more bytes
    return buffer.getvalue()


def _compiled(path: Path) -> bytes:
    """Return a module as a `.pyc` that is valid whatever the time of its source."""
    code = importlib.machinery.SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code)


def planned_archives(spec: JobSpec, job: Storage) -> dict[str, bytes]:
    """Return zips of this package and of a plan's UDFs, by file name.

    Raises:
        InvalidInput: the UDFs' code was removed, or is not the planned code.
    """
    archives = package_archive()
    for code in spec.codes:
        if (found := code.read(job)) is None:
            raise InvalidInput(
                f"The code {job.path(code.zip)} was removed, or is not the planned code (its SHA-256 differs). Clear "
                "the plan task with its downstream tasks."
            )
        archives[code.zip] = found
    return archives


def send_code(session: SparkSession, udfs: Udfs) -> Udfs:
    """Send this package and the UDFs' modules to the workers; return references to the UDFs with this code."""
    from airflow_geneva.engine.udf.code_archive import archive_name, zip_code

    references = udfs.sent()
    paths = {path for reference in references.references if (path := reference.import_path) is not None}
    modules = {path.split(":")[0].replace(".", "_"): path for path in paths}
    zips = {name: archive for name, path in sorted(modules.items()) if (archive := zip_code(path)) is not None}
    archives = {archive_name(name, archive): archive for name, archive in zips.items()}
    send_archives(session, {**package_archive(), **archives})
    return references.with_archives(tuple(archives))


def send_archives(session: SparkSession, archives: Mapping[str, bytes]) -> None:
    """Send zipped code to the workers, each once a session."""
    place = str(session.session_id if is_connect(session) else session.sparkContext.applicationId)  # type: ignore[attr-defined]
    for name, data in archives.items():
        _sent.once((place, name), functools.partial(_send, session, name, data))


def _send(session: SparkSession, name: str, data: bytes) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="geneva-code-")
    target = Path(folder.name) / name
    target.write_bytes(data)
    path_before = list(sys.path)
    if is_connect(session):
        session.addArtifacts(str(target), pyfile=True)
        folder.cleanup()  # the server has a copy
    else:
        session.sparkContext.addPyFile(str(target))
    # The zip is for the workers; on this path it would shadow the modules that the user edits.
    sys.path[:] = path_before
    return folder


def package_archive() -> dict[str, bytes]:
    """Return the zip of this package by its file name, which its contents are a part of."""
    from airflow_geneva.engine.udf.code_archive import archive_name

    return {archive_name("airflow_geneva", package_zip()): package_zip()}
