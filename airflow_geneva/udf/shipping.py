"""Send a UDF and its code to another process."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import linecache
import os
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from airflow_geneva.errors import InvalidInput
from airflow_geneva.udf.decorator import UDF, load_udf

MAX_FILE_BYTES = 50_000_000
"""Largest file that may be in the zip; put models and data where the workers can read them."""


def zip_code(import_path: str) -> bytes | None:
    """Zip the top-level package or module of a UDF; the same files give the same bytes.

    For a namespace package (folders without `__init__.py`) the zip holds the first regular package on the path to the
    module, or, if there is none, the top-level folder that contains the module.

    Returns:
        The zip, or None for modules that every worker has: the standard library and this package.

    Raises:
        InvalidInput: the module has no files on this machine, or a file is larger than 50 MB.
    """
    module = import_path.partition(":")[0]
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == __package__.partition(".")[0]:
        return None
    root, start = _locate(module)
    files = [start] if start.is_file() else list(_files(start))
    entries = {path.relative_to(root).as_posix(): path for path in files}
    # Python before 3.13 finds a namespace package inside a zip only if its folder has an entry.
    folders = {f"{parent.as_posix()}/" for name in entries for parent in Path(name).parents if parent.name}
    buffer = io.BytesIO()
    # Stored, not deflated: the bytes that deflate writes depend on the machine's zlib.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(folders | entries.keys()):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = (0o40755 << 16) | 0x10 if name.endswith("/") else 0o100644 << 16
            archive.writestr(info, b"" if name.endswith("/") else _read(entries[name], import_path))
    return buffer.getvalue()


def code_sha256(code: bytes) -> str:
    """The SHA-256 of a code zip, as 64 hex digits."""
    return hashlib.sha256(code).hexdigest()


def _locate(module: str) -> tuple[Path, Path]:
    """Return the folder on the Python path where a module was found, and the folder or file in it to pack."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"The code of module {module!r} cannot be packed: it is not found ({error}).") from error
    parts = module.split(".")
    origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
    if origin is None or not origin.is_file():
        raise InvalidInput(
            f"The code of module {module!r} cannot be packed: it is not a file on this machine "
            f"(found: {spec.origin if spec else None}). Put the UDF into a .py file on the Python path."
        )
    depth = len(parts) if origin.name.startswith("__init__.") else len(parts) - 1
    root = origin.parents[depth]
    if depth == 0:
        return root, origin
    packages = [root.joinpath(*parts[: level + 1]) for level in range(depth)]
    return root, next((folder for folder in packages if any(folder.glob("__init__.*"))), packages[0])


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith(".") and not name.endswith(".pyc"))


def _read(path: Path, import_path: str) -> bytes:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InvalidInput(
            f"The code of UDF {import_path!r} cannot be packed: {str(path)!r} has {size:,} bytes, and a file that is "
            f"packed with the code may have {MAX_FILE_BYTES:,}. Put it outside the package, where workers can read it."
        )
    return path.read_bytes()


@dataclass(frozen=True)
class UdfReference:
    """Refers to a UDF in another process: by its import path, or as a pickle if it has none.

    The imported UDF must have the planned code version.
    """

    import_path: str | None
    version: str
    pickled: bytes | None = field(default=None, repr=False)

    @staticmethod
    def of(udf: UDF) -> UdfReference:
        path = udf.import_path
        return UdfReference(path, udf.code_version, None if path else cloudpickle.dumps(udf))

    def open(self) -> UDF:
        """Load the UDF; `InvalidInput` if it cannot be imported here, or has another code version than planned."""
        if self.import_path is None:
            made: UDF = cloudpickle.loads(self.pickled)
            return made
        udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            # A Spark worker that ran an earlier job still has that job's version of the module.
            _forget_module(self.import_path)
            udf = load_udf(self.import_path)
        if udf.code_version != self.version:
            raise InvalidInput(
                f"UDF {self.import_path!r} has version {udf.code_version} on the worker, and {self.version} was "
                "planned: another copy of its module comes first on the worker's path. Remove that one, or start a new "
                "session."
            )
        return udf


def _forget_module(import_path: str) -> None:
    top = import_path.split(":")[0].split(".")[0]
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    linecache.clearcache()
