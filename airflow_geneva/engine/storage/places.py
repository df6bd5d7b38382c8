"""Places: the folders that a process may open files in, and the one function that tells whether a URI lies in one.

Manifests, blobs and metadata name files by URI, and anyone with write access to a table chooses these names. The places
of a table are the root of its database, what the user named, and `allowed_places`. They are a storage option of this
package, so that they reach Spark's driver and executors with the other options.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.files import freeze_options
from airflow_geneva.engine.storage.secrets import PLACE_OPTIONS, PLACES
from airflow_geneva.engine.storage.uri import normalize_uri, web_server, without_credentials
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

Options = tuple[tuple[str, str], ...]

# A query or a fragment is no part of a place, and libraries do not agree about it.
_URI = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*):(?://(?P<host>[^/?#\\]*))?(?P<path>[^?#\\]*)", re.IGNORECASE)
_BEGINS_WITH_SCHEME = re.compile(r"[a-z][a-z0-9+.\-]*:", re.IGNORECASE)
_LOCAL = ("file", "file-object-store", "file+uring")
"""Schemes by which pylance opens a local file."""
_SAME = {"s3a": "s3", "s3n": "s3"}
_HAS_DEFAULT_HOST = ("hdfs", "viewfs")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MOST_DECODINGS = 4


@dataclass(frozen=True)
class _Address:
    """Where a URI leads.

    Args:
        readings: its path as each number of percent-decodings gives it; for each, the folders and the name that it may
            be resolved to: with links followed before or after `..`.
    """

    scheme: str
    host: str
    readings: tuple[frozenset[tuple[str, ...]], ...]

    def lies_in(self, place: _Address) -> bool:
        """Whether every library, whatever it decodes and resolves, finds it in the place."""
        if (self.scheme, self.host) != (place.scheme, place.host):
            return False
        for number, paths in enumerate(self.readings):
            folders = place.readings[min(number, len(place.readings) - 1)]
            if not all(any(path[: len(folder)] == folder for folder in folders) for path in paths):
                return False
        return True


def is_absolute(uri: str) -> bool:
    """Whether a text leads to a file by itself, without the folder of the document that names it."""
    return uri.startswith(("/", "~")) or _BEGINS_WITH_SCHEME.match(uri) is not None


def _address(uri: str) -> _Address | None:
    """Return where a path or URI leads; None if that depends on who reads it."""
    if not uri or _CONTROL.search(uri) or uri != uri.strip() or uri.startswith("~"):
        return None
    try:
        uri.encode()
    except UnicodeEncodeError:
        return None
    if not _BEGINS_WITH_SCHEME.match(uri):
        return _found("", "", uri, local=True)
    parts = _URI.fullmatch(uri)
    if parts is None:
        return None
    scheme, host, path = parts["scheme"].lower(), parts["host"], parts["path"]
    if scheme in _LOCAL:
        path = unquote(path)
        return _found("", "", path, local=True) if host in (None, "", "localhost") and path.startswith("/") else None
    if host is None or ":" in host.rpartition("@")[0]:  # a user without a password is a container of Azure
        return None
    if not host and scheme not in _HAS_DEFAULT_HOST:
        return None
    if scheme in ("http", "https"):
        host = web_server(scheme, host)
    return _found(_SAME.get(scheme, scheme), host, path, local=False)


def _found(scheme: str, host: str, path: str, local: bool) -> _Address | None:
    readings = []
    for text in _decodings(path):
        if text is None or _CONTROL.search(text) or (not local and "\\" in text):
            return None
        if local:
            paths = {os.path.realpath(one) for one in {text, os.path.normpath(text)}}
            readings.append(frozenset(tuple(_names(one)) for one in paths))
            continue
        resolved = _resolve(_names(text))
        if resolved is None:
            return None
        readings.append(frozenset({tuple(_names(text)), resolved}))
    return _Address(scheme, host, tuple(readings))


def _decodings(path: str) -> Iterator[str | None]:
    """Yield a path, and what it is after each percent-decoding that changes it; None at last if there is no end."""
    for _ in range(_MOST_DECODINGS):
        yield path
        decoded = unquote(path)
        if decoded == path:
            return
        path = decoded
    yield None


def _names(path: str) -> list[str]:
    """Return the parts of a path; an empty part within it is one."""
    names = path.removeprefix("/").rstrip("/")
    return names.split("/") if names else []


def _resolve(names: list[str]) -> tuple[str, ...] | None:
    """Follow `.` and `..`; None if they lead out of the bucket."""
    found: list[str] = []
    for name in names:
        if name == ".." and not found:
            return None
        if name == "..":
            found.pop()
        elif name != ".":
            found.append(name)
    return tuple(found)


@dataclass(frozen=True)
class Places:
    """Folders of a local disk or an object store, by their normalized URIs."""

    roots: tuple[str, ...]

    @cached_property
    def _addresses(self) -> list[_Address]:
        return [found for found in map(_address, self.roots) if found is not None]

    def to_json(self) -> str:
        return json.dumps(self.roots)

    def hold(self, uri: str) -> bool:
        """Whether a path or URI lies in one of the places.

        Scheme, host and path are compared; links, `..` and percent-encoding are resolved. A URI that libraries may read
        in several ways lies in a place only if all of them lead there.
        """
        found = _address(uri)
        return found is not None and any(map(found.lies_in, self._addresses))

    def check(self, uri: str, document: str) -> None:
        """Raise `InvalidInput` if a URI that a document names lies in none of the places.

        Args:
            document: what names it, to begin a sentence.
        """
        if not self.hold(uri):
            raise InvalidInput(
                f"{document} names {_shown(uri)!r}, which lies in no place that may be opened: neither in the database "
                "nor in what you named. Anyone with write access to the table chooses such a name. If it is right, "
                "allow the folder: connect(..., allowed_places=[...]), in Airflow allowed_places in the extra of the "
                "connection, or [geneva] allowed_places, of the command --allowed-place."
            )


def allow_databases(given: Iterable[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """Normalize URIs of databases to the form in view definitions; `InvalidInput` if one is not valid."""
    if isinstance(given, (str, os.PathLike)):
        raise InvalidInput(f"sources={given!r} is one database. Give a list of them: sources=[{str(given)!r}].")
    return tuple(without_credentials(normalize_uri(one)) for one in given or ())


def allow_places(given: Any) -> tuple[str, ...]:
    """Normalize folders that a user allows; `InvalidInput` if one is not valid."""
    if isinstance(given, (str, os.PathLike)):
        raise InvalidInput(f"allowed_places={given!r} is one place. Give a list: allowed_places=[{str(given)!r}].")
    try:
        found = [normalize_uri(one) for one in given or ()]
    except TypeError:
        kind = type(given).__name__  # its values may be secrets
        raise InvalidInput(f"allowed_places is no list of paths and URIs, but a {kind}. Give one.") from None
    for one in found:
        if _address(one) is None:
            raise InvalidInput(f"allowed_places names {one!r:.300}, which is no folder. Give one such as s3://bucket.")
    return tuple(sorted(set(found)))


def with_allowed(options: Options, given: Any) -> Options:
    """Add the places that a user allows to storage options: a list of them, or the storage options of each.

    Raises:
        InvalidInput: a place is no folder, or its storage options do not map text to text.
    """
    places = allow_places(given)
    if isinstance(given, Mapping):
        own = {normalize_uri(place): dict(freeze_options(found)) for place, found in given.items() if found}
        before = parse(dict(options).get(PLACE_OPTIONS) or "{}")
        if own:
            options = (*options, (PLACE_OPTIONS, json.dumps({**before, **own}, sort_keys=True)))
    return with_places(options, places)


def options_of_place(options: Options, uri: str) -> Options | None:
    """Return the storage options of the innermost place that holds a file, of those that have some; or else None."""
    own = parse(dict(options).get(PLACE_OPTIONS) or "{}")
    held = [place for place in own if Places((place,)).hold(uri)]
    return freeze_options(own[max(held, key=len)]) if held else None


def with_places(options: Options, places: Iterable[str]) -> Options:
    """Add places to storage options."""
    found = sorted({*allowed_places(options), *places})
    return tuple(sorted({**dict(options), PLACES: json.dumps(found)}.items())) if found else options


def places_of(dataset: lance.LanceDataset) -> Places:
    """Return the places of an opened table; if it was not opened by its location, its own folder only."""
    found = allowed_places((dataset.initial_storage_options or {}).items())
    return Places(found or (dataset.uri,))


def check_manifest(dataset: lance.LanceDataset) -> lance.LanceDataset:
    """Return an opened version; sends no request.

    Raises:
        InvalidInput: its manifest names a folder (a base path) outside of its places, in which its files would be read.
    """
    for base in dataset.base_paths().values():
        places_of(dataset).check(base.path, f"The manifest of version {dataset.version} of table {name_of(dataset)!r}")
    return dataset


def base_folders(dataset: lance.LanceDataset) -> dict[int, Any]:
    """Return the base paths of a manifest by their numbers: folders outside of its own in which files of a table lie.

    Raises:
        InvalidInput: as `check_manifest`.
    """
    return dict(check_manifest(dataset).base_paths())


def name_of(dataset: lance.LanceDataset) -> str:
    """Return the name of an opened table's folder, for messages."""
    return dataset.uri.rstrip("/").rpartition("/")[2].removesuffix(".lance")


def allowed_places(options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return the places in storage options."""
    return tuple(parse(dict(options).get(PLACES) or "[]"))


def _shown(uri: str) -> str:
    """Return a URI for a message, without a query, which may hold a signature, and without a user."""
    try:
        return without_credentials(uri.partition("?")[0])[:300]
    except ValueError:
        return uri.partition(":")[0]
