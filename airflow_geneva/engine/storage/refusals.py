"""Which errors of stores, catalogs and the operating system say that access was refused; the one list of them."""

from __future__ import annotations

import re

# What object stores, catalogs and pylance write: `403 Forbidden`, `HTTP 401`, `status code: 403`, and codes of AWS.
_BY_STORE = re.compile(
    r"\b40[13] [A-Z]|\bHTTP 40[13]\b|status(?: code)?:? 40[13]\b"
    r"|lacked (?:the necessary privileges|valid authentication)"
    r"|AccessDenied|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|UnrecognizedClient"
)
# Not permitted (1) and permission denied (13).
_BY_SYSTEM = re.compile(r"\(os error (?:1|13)\)|permission denied", re.IGNORECASE)


def refused_by_store(error: BaseException | str) -> bool:
    """Whether a store or a catalog rejects the credentials, or does not permit what was asked with them."""
    return _BY_STORE.search(str(error)) is not None


def is_access_refused(error: BaseException | str) -> bool:
    """Whether access was refused, by a store, a catalog or the operating system: the same request fails again."""
    return isinstance(error, PermissionError) or refused_by_store(error) or _BY_SYSTEM.search(str(error)) is not None
