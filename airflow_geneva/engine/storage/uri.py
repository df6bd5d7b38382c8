"""Normalized URIs of databases and tables, and the rules for table names."""

from __future__ import annotations

import hashlib
import os
import re
from urllib.parse import urlsplit, urlunsplit

from airflow_geneva.errors import InvalidInput

_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_ONE_SLASH = re.compile(r"^(?:abfss?|az|gs|s3|wasbs?):/(?!/)", re.IGNORECASE)
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")


def normalize_uri(uri: str | os.PathLike[str]) -> str:
    """Normalize a location, so that all spellings give one checkpoint key: no trailing slash, absolute local paths.

    Raises `InvalidInput` if the URI contains credentials, because they would appear in messages and logs.
    """
    if not isinstance(uri, (str, os.PathLike)) or not (text := str(os.fspath(uri))):
        raise InvalidInput(f"{uri!r:.200} is neither a path nor a URI. Give one such as s3://bucket/db.")
    if text.lower().startswith("file:"):
        text = _path_of(text)
    if found := _ONE_SLASH.match(text):
        raise InvalidInput(
            f"A URI was given that begins with {found[0]!r}. It needs two slashes: {found[0]}/bucket/db."
        )
    if not _SCHEME.match(text):
        return os.path.realpath(os.path.expanduser(text))
    try:
        parts = urlsplit(text)
    except ValueError:
        raise InvalidInput("The URI that was given is malformed. Give one such as s3://bucket/db.") from None
    user = parts.netloc.rpartition("@")[0]
    container = parts.scheme in _CONTAINER_SCHEMES and ":" not in user
    if (user and not container) or parts.query or parts.fragment:
        raise _holds_more(parts.scheme)
    return text.rstrip("/")


def _path_of(uri: str) -> str:
    """Return the local path in a file URI."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise InvalidInput("The URI that was given is malformed. Give a path, or a URI such as file:///db.") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise _holds_more("file")
    if parts.netloc not in ("", "localhost"):
        raise InvalidInput(
            f"The URI names the machine {parts.netloc!r}, and only files of this one can be opened. Give a path, or a "
            "URI such as file:///db."
        )
    return parts.path


def _holds_more(scheme: str) -> InvalidInput:
    return InvalidInput(
        f"A URI of scheme {scheme!r} was given that holds a user, a password, a query or a fragment (after '#'). It "
        "would appear in logs and plans. Leave them out, and give credentials as storage_options."
    )


def without_credentials(uri: str) -> str:
    """Return a normalized URI without user, password and query, which is safe to store and show."""
    if is_local(uri):
        return uri
    parts = urlsplit(uri)
    user, _, host = parts.netloc.rpartition("@")
    # A user without a password is a container name, as in abfss://container@account.
    return urlunsplit((parts.scheme, host if ":" in user else parts.netloc, parts.path, "", ""))


def is_local(uri: str) -> bool:
    return not _SCHEME.match(uri)


def web_server(scheme: str, host: str) -> str:
    """Return the host of an `http` or `https` URI in one form: in small letters, and without the scheme's own port."""
    name, _, port = host.lower().rpartition(":")
    return name if name and port in ("", {"http": "80", "https": "443"}[scheme]) else host.lower()


def join(uri: str, *parts: str) -> str:
    return "/".join([uri.rstrip("/"), *parts])


def check_name(name: str, what: str) -> str:
    """Return a table or view name unchanged; `InvalidInput` if it is hidden or would lead outside its folder."""
    if not isinstance(name, str) or not is_name(name):
        raise InvalidInput(
            f"{name!r} is not a {what} name. Use letters, digits, '_', '-' and '.' (no '/', no '..', at most 200 "
            "characters), starting with a letter, digit or '_'."
        )
    return name


def is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and ".." not in name and len(name) <= 200


def md5(text: str) -> str:
    """Hash a user-given string for use in a key."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def sha256(data: bytes) -> str:
    """Hash a file's content as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()
