"""Import UDFs by their paths, and send them and their code to other processes."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import io
import linecache
import os
import signal
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from airflow_geneva.engine.udf.decorator import IMPORT_PATH, UDF, find_in_module, release_instances
from airflow_geneva.engine.udf.packages import how_to_install, missing_package
from airflow_geneva.engine.udf.unpicklable import what_cannot_be_pickled
from airflow_geneva.errors import InvalidInput

MAX_FILE_BYTES = 50_000_000
"""Maximum size of a file in the zip; put models and data where the workers can read them."""


def load_udf(import_path: str) -> UDF:
    """Import the UDF at `"module:name"`.

    Raises:
        InvalidInput: the path is malformed, its module cannot be imported here, or there is no `@udf` object.
    """
    module_name, name = split_path(import_path)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # SystemExit, too, must not end this process
        if _is_from_outside(error):
            raise
        raise cannot_import(import_path, error) from error
    found = find_in_module(module, name)
    if isinstance(found, UDF):
        return found
    udfs = sorted(name for name, value in vars(module).items() if isinstance(value, UDF))
    what = f"there is no {name!r} in it" if found is None else f"{name!r} in it is a {type(found).__name__}"
    raise InvalidInput(
        f"UDF {import_path!r} cannot be loaded: {what}, and an import path is used only if it leads to a @udf object. "
        f"The UDFs of module {module.__name__!r} are {udfs!r}."
    )


def split_path(import_path: str) -> tuple[str, str]:
    """Return the module and the name of an import path; `InvalidInput` if it is malformed."""
    found = IMPORT_PATH.fullmatch(import_path)
    if found is None:
        raise InvalidInput(
            f'UDF path {import_path!r} is malformed. Give "module:name", such as "my_project.udfs:embed".'
        )
    return found[1], found[2]


def _is_from_outside(error: BaseException) -> bool:
    """Whether a signal ended an import, as Ctrl-C and Airflow's timeouts do, rather than the imported code."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        last, at = at, at.tb_next
    if isinstance(error, (Exception, SystemExit)):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS"


def cannot_import(import_path: str, error: BaseException) -> InvalidInput:
    """Describe an import that raised."""
    module = import_path.partition(":")[0]
    package = missing_package(repr(error))
    todo = "Put the module where this process finds it, and install what it imports."
    if package and package != module.partition(".")[0]:
        todo = f"{how_to_install(package)} Or, if it is a module of yours, put it into one of these places."
    return InvalidInput(
        f"UDF {import_path!r} cannot be loaded: importing module {module!r} raised {error!r}. "
        f"Python {sys.version.split()[0]} looked in {sys.path[:5]!r} and {max(len(sys.path) - 5, 0)} more places. "
        f"{todo}"
    )


def zip_code(import_path: str) -> bytes | None:
    """Zip the top-level package or module of a UDF; the same files give the same bytes.

    For a namespace package (folders without `__init__.py`) the zip holds the first regular package on the path to the
    module, or, if there is none, the top-level folder that contains the module.

    Returns None for modules that every worker has: the standard library and this package.
    """
    module = import_path.partition(":")[0]
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == __package__.partition(".")[0]:
        return None
    root, start = _code_of(module)
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


def code_root(import_path: str) -> str:
    """Return the folder on the Python path in which the code of a UDF was found."""
    return str(_code_of(import_path.partition(":")[0])[0])


def _code_of(module: str) -> tuple[Path, Path]:
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
    """Refers to a UDF, or its stage, in another process: by import path and planned code version, or as a pickle."""

    import_path: str | None
    version: str
    pickled: bytes | None = field(default=None, repr=False)
    stage: bool = False

    @staticmethod
    def of(udf: UDF, stage: bool = False) -> UdfReference:
        """Refer to a UDF, or to its stage; `InvalidInput` if it has no import path, and cannot be pickled."""
        path, version = udf.import_path, udf.code_version
        if udf.dedup:
            _ = udf.value_identity  # computed here, where its source is available
        sent = (udf.stage if stage else None) or udf
        try:
            return UdfReference(path, version, None if path else cloudpickle.dumps(sent), stage)
        except Exception as error:
            raise InvalidInput(
                f"UDF {sent.name!r} cannot be sent to another process: {what_cannot_be_pickled(sent.func)} cannot be "
                f"pickled ({error}). Create it inside the function, or in the __init__ of a class, or put the UDF into "
                "a module, which the other process imports."
            ) from error

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
        return (udf.stage if self.stage else None) or udf


def _forget_module(import_path: str) -> None:
    top = import_path.split(":")[0].split(".")[0]
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]
    release_instances(top)
    importlib.invalidate_caches()
    linecache.clearcache()
