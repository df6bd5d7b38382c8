"""The steps of an actor at its store: each request waits for its turn, and may fail as the seed decides.

A local folder fails with errors of a disk. Under `file-object-store://` the engine takes its way to an object store,
and requests fail with that store's answers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

from tests.simulation.kernel import KERNEL, START

SCHEME = "file-object-store://"
LANCE_CLOCK = 1_899_000_000.0
"""Before it lie the times that the real clock of this machine gives to files; later ones are those of a world."""

ANSWERS = {
    "503": "Generic S3 error: Server returned non-2xx status code: 503 Service Unavailable: SlowDown",
    "reset": "Generic S3 error: HTTP error: error sending request, connection reset by peer",
    "409": "Generic S3 error: Server returned non-2xx status code: 409 Conflict: ConditionalRequestConflict",
    "412": "Generic S3 error: Server returned non-2xx status code: 412 Precondition Failed",
    "timeout": "Generic S3 error: HTTP error: request timed out, operation timed out",
    "eio": "[Errno 5] Input/output error",
}
FOLDER = ""


def short(name: object) -> str:
    """Return a path as traces have it, relative to the database."""
    return str(name).replace(SCHEME, "").replace(FOLDER, "").lstrip("/")


def request(kind: str, name: object, call: Callable[[], Any], changes: bool = False) -> Any:
    """Make a request to the store when its turn comes: "go", or an answer such as "503", or "503!" after it landed."""
    outcome = KERNEL.step(f"{kind} {short(name)}".strip())
    if outcome == "go":
        found = call()
    else:
        answer = outcome.rstrip("!")
        if outcome.endswith("!"):
            call()
        raise OSError(5, "Input/output error") if answer == "eio" else OSError(ANSWERS[answer])
    if changes:
        stamp_times()
    return found


def stamp_times() -> None:
    """Give the files that have the time of this machine the time of the world."""
    if KERNEL.coordinator is None:
        return
    now = START + KERNEL.now
    ahead = [FOLDER]
    while ahead:
        with os.scandir(ahead.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)
                elif entry.stat(follow_symlinks=False).st_mtime < LANCE_CLOCK:
                    os.utime(entry.path, (now, now))


def steps_of_storage() -> None:
    """Let each request of `Storage` be a step; under an object store those of pylance's file session are."""
    from airflow_geneva.engine.storage import files

    def stepped(name: str, kind: str, changes: bool = False) -> None:
        inner = getattr(files.Storage, name)

        @wraps(inner)
        def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.local:
                return inner(self, *args, **kwargs)
            about = self.path(args[0] if args and isinstance(args[0], str) else "")
            return request(kind, about, lambda: inner(self, *args, **kwargs), changes)

        setattr(files.Storage, name, asked)

    for name in ("write_bytes", "open_writer"):
        stepped(name, "write", changes=True)
    for name in ("read_bytes", "read_part", "open_reader"):
        stepped(name, "read")
    stepped("exists", "exists")
    stepped("delete", "delete")
    stepped("list_files", "list")
    stepped("list_folder", "list")
    stepped("remove_empty_folders", "rmdir")
    entries = files.Storage.list_entries

    def list_entries(self: Any, *args: Any, **kwargs: Any) -> Any:
        return request("list", self.root, lambda: entries(self, *args, **kwargs))

    files.Storage.list_entries = list_entries  # type: ignore[method-assign]
    opened = files._session
    files._session = lambda root, *rest: Session(root, opened(root, *rest)) if "://" in root else opened(root, *rest)  # type: ignore[assignment]

    download = files._download

    def downloaded(session: Any, name: str, *rest: Any) -> Any:
        # It reads a pipe in a thread while pylance writes it: no other thread may take its turn between the two.
        return request("read", f"{session.root}/{name}", lambda: download(session.inner, name, *rest))

    files._download = downloaded


class Session:
    """A pylance file session each of whose requests is a step."""

    _KINDS: ClassVar = {
        "upload_file": ("write", 1),
        "open_writer": ("write", 0),
        "open_reader": ("read", 0),
        "read_range": ("read", 0),
        "contains": ("exists", 0),
        "delete_file": ("delete", 0),
        "list": ("list", 0),
        "list_with_delimiter": ("list", 0),
    }

    def __init__(self, root: str, inner: Any) -> None:
        self.root, self.inner = root, inner

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.inner, name)
        if name not in self._KINDS:
            return inner
        kind, at = self._KINDS[name]

        def asked(*args: Any, **kwargs: Any) -> Any:
            about = f"{self.root}/{args[at] or ''}" if len(args) > at else self.root
            return request(kind, about, lambda: inner(*args, **kwargs), kind == "write")

        return asked


def steps_of_lance() -> None:
    """Let opening a table's newest version, and committing, be steps."""
    import lance

    opened, commit = lance.LanceDataset.__init__, lance.LanceDataset.commit

    def init(self: Any, uri: Any, version: Any = None, *args: Any, **kwargs: Any) -> None:
        kind = "open" if version is None else f"open v{version}"
        request(kind, Path(str(uri)).name, lambda: opened(self, uri, version, *args, **kwargs))

    def committed(base: Any, *args: Any, **kwargs: Any) -> Any:
        name = Path(str(base if isinstance(base, (str, Path)) else base.uri)).name
        return request("commit", name, lambda: commit(base, *args, **kwargs), changes=True)

    lance.LanceDataset.__init__ = init  # type: ignore[method-assign]
    lance.LanceDataset.commit = staticmethod(committed)  # type: ignore[method-assign]


_HEX = re.compile(r"[0-9a-f]{8,}|(?<=\.tmp)\w{6}\b")


class Canonical:
    """Numbers what is random in the names of a trace, in the order in which it appears first."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        return _HEX.sub(lambda found: self._numbers.setdefault(found[0], f"#{len(self._numbers)}"), text)
