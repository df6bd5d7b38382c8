"""Pack the code of UDFs when a job is planned, and unpack it where it runs: an archive is imported like a folder."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import re
import shutil
import stat
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path, PurePosixPath
from typing import Any

from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.errors import InvalidInput

MAX_FILES = 20_000
"""Maximum number of files in an archive."""
MAX_FILE_BYTES = 50_000_000
"""Maximum size of a file in an archive; put models and data where the workers can read them."""
MAX_BYTES = 250_000_000
"""Maximum size of all files in an archive."""
MOST_ARCHIVE_BYTES = 2 * MAX_BYTES
"""Maximum size of an archive, which also has the names of the files."""

_PACKAGE = __package__.partition(".")[0]
_COMMENT = b"code of airflow_geneva"
_NAME = re.compile(r"-([0-9a-f]{16})\.zip")
_UNPACKED = "unpacked-code"
_ADVICE = "Put data and models outside the package, where workers can read them, or the UDF into a package of its own"
_READS = 3
_KEPT_SECONDS = 7 * 86_400.0
# A module that only one version of Python on one platform can import: `fast.cpython-311-x86_64-linux-gnu.so`.
_COMPILED = re.compile(r"([^/.]+)((?:\.[\w-]+)?\.(?:so|pyd))")


def archive_name(name: str, archive: bytes) -> str:
    """Return the file name of an archive, which its contents are a part of."""
    return f"{name}-{sha256(archive)[:16]}.zip"


@dataclass(frozen=True)
class CodeArchive:
    """The zip archive of a UDF's module or package, stored beside the plan: its name, digest and origin.

    Args:
        root: the folder on the planning process's Python path that has the code; "" if unknown.
    """

    zip: str
    sha256: str
    root: str = ""

    def read(self, job: Storage) -> bytes | None:
        """Return the archive from the folder of its job; None if it was removed, or is not what was planned."""
        try:
            found = job.read_bytes(self.zip, MOST_ARCHIVE_BYTES)
        except (FileNotFoundError, ValueError):
            return None
        return found if sha256(found) == self.sha256 and archive_name("code", found) == self.zip else None

    def with_source_paths(self, text: str) -> str:
        """Replace the archive's path on executors with its root, for example in a traceback."""
        if not self.root:
            return text
        return re.sub(rf"[^\s\"']*/{re.escape(self.zip)}(?=/)", self.root.replace("\\", r"\\"), text)


def zip_code(import_path: str) -> bytes | None:
    """Zip the top-level package or module of a UDF; the same files give the same bytes.

    For a namespace package (folders without `__init__.py`) the zip holds the first regular package on the path to the
    module, or, if there is none, the top-level folder that contains the module. Links are followed.

    Returns None for modules that every worker has: the standard library and this package.

    Raises:
        InvalidInput: a worker would import another module of that name; or a file cannot be packed.
    """
    module = import_path.partition(":")[0]
    top = module.partition(".")[0]
    if top == _PACKAGE:
        return None
    if top in sys.stdlib_module_names:
        if is_of_python(_spec_of(module)):
            return None
        raise InvalidInput(
            f"The code of UDF {import_path!r} cannot be packed: {top!r} is also a module of Python's standard library, "
            "which workers may have imported already. Rename the module."
        )
    root, start = _code_of(module)
    packing = _Packing(import_path, root)
    entries = packing.read(start)
    # Python before 3.13 finds a namespace package inside a zip only if its folder has an entry.
    folders = {f"{parent.as_posix()}/" for name in entries for parent in PurePosixPath(name).parents if parent.name}
    buffer = io.BytesIO()
    # Stored, not deflated: the bytes that deflate writes depend on the machine's zlib.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = _COMMENT
        for name in sorted(folders | entries.keys()):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = (0o40755 << 16) | 0x10 if name.endswith("/") else 0o100644 << 16
            archive.writestr(info, entries.get(name, b""))
    return buffer.getvalue()


def code_root(import_path: str) -> str:
    """Return the folder on the Python path in which the code of a UDF was found."""
    return str(_code_of(import_path.partition(":")[0])[0])


def is_of_python(spec: ModuleSpec | None) -> bool:
    """Whether a module is a part of Python itself."""
    if spec is None or spec.origin is None or not os.path.isabs(spec.origin):
        return spec is not None and spec.origin is not None
    parts = Path(spec.origin).parts
    home = Path(sysconfig.get_path("stdlib")).parts
    return parts[: len(home)] == home and parts[len(home)] not in ("site-packages", "dist-packages")


def _spec_of(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"The code of module {module!r} cannot be packed: it is not found ({error}).") from error


def _code_of(module: str) -> tuple[Path, Path]:
    """Return the folder on the Python path where a module was found, and the folder or file in it to pack."""
    spec = _spec_of(module)
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


@dataclass(frozen=True)
class _Packing:
    """Reads the files of a package or module, which lies in the folder `root`."""

    import_path: str
    root: Path

    def read(self, start: Path) -> dict[str, bytes]:
        """Return the contents of the files by name; all are of one time, even if someone changes them meanwhile."""
        for _ in range(_READS):
            before = dict(self._list(start))
            size = sum(state.st_size for _, state in before.values())
            if size > MAX_BYTES:
                raise self._refused(f"its files have {size:,} bytes together, and {MAX_BYTES:,} are allowed. {_ADVICE}")
            found = {name: self._read(path) for name, (path, _) in before.items()}
            if _signature(before) == _signature(dict(self._list(start))):
                return found
        raise self._refused("its files change while they are read")

    def _list(self, start: Path) -> Iterator[tuple[str, tuple[Path, os.stat_result]]]:
        for count, path in enumerate([start] if start.is_file() else self._files(start, ())):
            if count == MAX_FILES:
                raise self._refused(f"{_shown(start)} has more than {MAX_FILES:,} files. {_ADVICE}")
            name = path.relative_to(self.root).as_posix()
            try:
                name.encode()
            except UnicodeEncodeError:
                raise self._refused(f"the name of {_shown(path)} is not UTF-8") from None
            if _leads_out(name):
                raise self._refused(
                    f"the name of {_shown(path)} leads out of a folder on some systems. Rename the file"
                )
            state = self._stat(path)
            if state.st_size > MAX_FILE_BYTES:
                raise self._refused(
                    f"{_shown(path)} has {state.st_size:,} bytes, and a file that is packed with the code may have "
                    f"{MAX_FILE_BYTES:,}. Put it outside the package, where workers can read it"
                )
            yield name, (path, state)

    def _files(self, folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
        """Yield the files below a folder; links are followed, and nothing is opened."""
        state = self._stat(folder)
        here = (state.st_dev, state.st_ino)
        if here in above:
            raise self._refused(f"{_shown(folder)} is a link to a folder that contains it")
        for path in self._entries(folder):
            if path.name.startswith(".") or path.name.endswith(".pyc") or path.name == "__pycache__":
                continue
            mode = self._stat(path).st_mode
            if stat.S_ISDIR(mode):
                yield from self._files(path, (*above, here))
            elif stat.S_ISREG(mode):
                yield path
            else:
                raise self._refused(f"{_shown(path)} is neither a file nor a folder")

    def _entries(self, folder: Path) -> list[Path]:
        try:
            return sorted(folder.iterdir())
        except OSError as error:
            raise self._refused(f"{_shown(folder)} cannot be read ({error.strerror})") from error

    def _stat(self, path: Path) -> os.stat_result:
        try:
            return path.stat()
        except OSError as error:
            to = f", a link to {os.readlink(path)!r}," if path.is_symlink() else ""
            raise self._refused(f"{_shown(path)}{to} cannot be read ({error.strerror})") from error

    def _read(self, path: Path) -> bytes:
        try:
            # What is no file any more must not block.
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            with open(handle, "rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self._refused(f"{_shown(path)} cannot be read ({error.strerror})") from error

    def _refused(self, why: str) -> InvalidInput:
        return InvalidInput(f"The code of UDF {self.import_path!r} cannot be packed: {why}.")


def _shown(path: Path) -> str:
    return repr(os.fsencode(path).decode(errors="backslashreplace"))


def _signature(files: Mapping[str, tuple[Path, os.stat_result]]) -> dict[str, tuple[int, ...]]:
    return {name: (at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, (_, at) in files.items()}


class DamagedArchive(Exception):
    """An archive is not as it was packed."""


def is_archive(path: str) -> bool:
    """Whether a path leads to an archive of UDFs' code."""
    if _NAME.search(path) is None:
        return False
    try:
        with open(path, "rb") as file:
            file.seek(-len(_COMMENT), os.SEEK_END)
            return file.read() == _COMMENT
    except OSError:
        return False


def unpacked(path: str) -> Path:
    """Return the folder with the files of an archive; processes of one machine share it.

    It lies beside the archive and is removed with it. If that place is read-only, it lies in a folder of the user for
    temporary files, from which what was not used for a week is removed.

    Raises:
        DamagedArchive: the archive is not as it was packed.
    """
    name = os.path.basename(path)
    try:
        return _unpack_into(Path(path).parent / _UNPACKED, path, name)
    except OSError:
        own = Path(tempfile.gettempdir()) / f"airflow-geneva-code-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        state = own.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise DamagedArchive(f"{own} belongs to another user, so {path} cannot be unpacked") from None
        for left in own.iterdir():
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _KEPT_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        found = _unpack_into(own, path, name)
        with suppress(OSError):
            os.utime(found)
        return found


def _unpack_into(place: Path, path: str, name: str) -> Path:
    target = place / name
    if target.is_dir():
        return target
    entries = _read_archive(path)
    place.mkdir(mode=0o700, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=place))
    try:
        for entry, content in entries:
            file = draft / entry
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        try:
            os.rename(draft, target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _read_archive(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive, checked as whatever comes from elsewhere: names, kinds, sizes, and the hash."""
    name, size = os.path.basename(path), os.stat(path).st_size
    if size > MOST_ARCHIVE_BYTES:
        raise DamagedArchive(f"{path} has {size:,} bytes")
    data = Path(path).read_bytes()
    hashed = _NAME.search(name)
    if hashed is None or sha256(data)[:16] != hashed[1]:
        raise DamagedArchive(f"{path} is not what was packed: its SHA-256 differs")
    return read_entries(data)


def read_entries(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive with their names, after all are checked.

    Raises:
        DamagedArchive: it is no zip, or has what `zip_code` does not write: compressed entries, links, names that lead
            out of a folder, more or larger files than allowed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            if len(infos) > 2 * MAX_FILES or sum(info.file_size for info in infos) > MAX_BYTES:
                raise DamagedArchive("the archive has more files or bytes than allowed")
            if len({info.filename for info in infos}) != len(infos):
                raise DamagedArchive("the archive has two entries of one name")
            for info in infos:
                _check_entry(info)
            yield from ((info.filename, archive.read(info)) for info in infos if not info.is_dir())
    except DamagedArchive:
        raise
    except Exception as error:
        raise DamagedArchive(f"the archive is damaged: {error}") from error


def _leads_out(name: str) -> bool:
    """Whether a name may lead out of the folder in which an archive is unpacked, on any system."""
    parts = name.split("/")
    return ":" in parts[0] or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts)


def _check_entry(info: zipfile.ZipInfo) -> None:
    name, kind = info.filename, stat.S_IFMT(info.external_attr >> 16)
    if _leads_out(name.removesuffix("/")):
        raise DamagedArchive(f"the archive has an entry {name!r:.200}, which may lead out of its folder")
    if kind != (stat.S_IFDIR if info.is_dir() else stat.S_IFREG):
        raise DamagedArchive(f"entry {name!r:.200} of the archive is neither a file nor a folder")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
        raise DamagedArchive(f"entry {name!r:.200} of the archive is compressed or encrypted")
    if info.file_size > MAX_FILE_BYTES:
        raise DamagedArchive(f"entry {name!r:.200} of the archive has {info.file_size:,} bytes")


def foreign_modules(names: Iterable[str]) -> list[str]:
    """Return the compiled modules that this Python cannot import, if it cannot import another file of that name."""
    found = dict[str, list[str]]()
    usable = set[str]()
    for name in names:
        folder, _, file = name.rpartition("/")
        stem = f"{folder}/{file.partition('.')[0]}"
        if file.endswith(tuple(SOURCE_SUFFIXES)):
            usable.add(stem)
        elif compiled := _COMPILED.fullmatch(file):
            found.setdefault(stem, []).append(name)
            if compiled[2] in EXTENSION_SUFFIXES:
                usable.add(stem)
    return sorted(name for stem, files in found.items() if stem not in usable for name in files)


class _Nothing:
    """Finds no module: what an archive would hide is found behind it."""

    def find_spec(self, name: str, target: object = None) -> None:
        return None

    def invalidate_caches(self) -> None:
        pass


_folder_hook = FileFinder.path_hook(
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)

unused: dict[str, str] = {}
"""Why archives on this process's path are not used, by path."""


def _hook(path: str) -> Any:
    """Find modules of an archive in the folder where it is unpacked; a hook of Python's import for `sys.path`."""
    if not is_archive(path):
        raise ImportError
    try:
        folder = unpacked(path)
    except (DamagedArchive, OSError) as error:
        # An error here would end every import of the process.
        unused[path] = f"{path} cannot be unpacked ({error})"
        return _Nothing()
    names = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if "__pycache__" not in file.parts)
    if foreign := foreign_modules(names):
        unused[path] = f"{foreign[0]} was compiled for another Python or platform than {sys.version.split()[0]} here"
        return _Nothing()
    return _folder_hook(str(folder))


def install() -> None:
    """Let this process import archives from folders, where compiled modules work, and data is found by `__file__`."""
    if _hook not in sys.path_hooks:
        sys.path_hooks.insert(0, _hook)
        for path in [path for path in sys.path_importer_cache if is_archive(path)]:
            del sys.path_importer_cache[path]


def prefer(names: Iterable[str]) -> list[str]:
    """Let this process import from the archives of these names before others; return the modules of others.

    A worker of Spark that ran another job still has the archives and the modules of that job.
    """
    wanted = set(names)
    ours = [at for at, path in enumerate(sys.path) if _NAME.search(os.path.basename(path))]
    chosen = [path for path in sys.path if os.path.basename(path) in wanted]
    if not chosen:
        return []
    rest = [path for path in sys.path if path not in chosen]
    ordered = [*rest[: ours[0]], *chosen, *rest[ours[0] :]]
    if ordered != sys.path:
        sys.path[:] = ordered
    found = []
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        archive = next((part for part in origin.split(os.sep) if part.endswith(".zip") and _NAME.search(part)), None)
        if archive is not None and archive not in wanted and not name.startswith(f"{_PACKAGE}.") and name != _PACKAGE:
            found.append(name)
    return found
