"""Mask credentials in texts, by the secrets that this process knows and by what a text itself shows to be one."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

from airflow_geneva.engine.process_memo import ProcessMemo

# A user without a password is masked only in http(s) URLs: in abfss://container@account it is a container.
_USER = re.compile(r"\b(https?://(?=[^\s/]+@)|[a-z][a-z0-9+.-]{0,30}://(?=[^\s/@:]*:[^\s/]*@))[^\s/]+@", re.IGNORECASE)
_SIGNATURE = re.compile(
    r"([?&;](?:sig|signature|token|access_token|x-[a-z]+-(?:signature|credential|security-token))=|\bAccountKey=)[^\s&);]+",
    re.IGNORECASE,
)
# As name=value, or as in the repr of a dict; "token = next(...)" is a line of code.
_NAMED = re.compile(
    r"(?<![a-z0-9])((?:password|passwd|pwd|secret|token|(?:api|secret|account)[_-]?key|access[_-]key)"
    r"(?:=['\"]?|['\"]: ?['\"]))[^\s&;,'\")}]+|(\bbearer\s+)[a-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)

# Keys that tell by their own form what they are: of OpenAI and others, Hugging Face, GitHub, Slack, AWS.
_KEY = re.compile(
    r"\b(?:sk-(?=[\w-]{0,200}\d)[\w-]{12,200}|hf_\w{20,200}|gh[pousr]_\w{20,200}|xox[abprs]-[\w-]{10,200}|A[KS]IA[0-9A-Z]{16})\b"
)
# Variables whose values are secrets; not those that name a file, a URL or a folder, such as PWD.
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:PASSWORD|PASSWD|SECRET|TOKEN|CREDENTIALS?|(?:API|ACCESS|ACCOUNT|SECRET|FERNET|PRIVATE|STORAGE)_?KEY)(?:_ID)?$"
)
_CONNECTION = re.compile(r"AIRFLOW_CONN_|.*_SQL_ALCHEMY_CONN$|.*_RESULT_BACKEND$|.*_BROKER_URL$|.*DATABASE_URL$")

_LEAST_SECRET = 6
"""Shorter secrets are left in texts: they would hide parts of words."""
_LEAST_WORD = 12
_REGION = re.compile(r"[a-z]{2,9}-[a-z]+-?\d")
_MOST_SECRETS = 512
_SERVICE = ("OPENAI_API_KEY", "OPENAI_BASE_URL")


def service_variables(connection: str | None = None) -> tuple[str, str]:
    """Return the variables with the key and the URL of a model service, or of one that a connection names."""
    suffix = "" if connection is None else "_" + re.sub(r"[^A-Z0-9]", "_", connection.upper())
    return f"{_SERVICE[0]}{suffix}", f"{_SERVICE[1]}{suffix}"


def is_service_variable(name: str) -> bool:
    """Whether an environment variable is one of a model service."""
    return name.startswith(_SERVICE) or name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID")


_secrets: ProcessMemo[str, tuple[str, ...]] = ProcessMemo(_MOST_SECRETS)
"""The forms of each secret. They are the process's: its loggers mask the secrets of all stores that it has opened."""


def remember_secrets(values: Iterable[str]) -> None:
    """Mask these values in all texts of this process from now on, and the forms in which URLs and JSON hold them.

    Values of fewer than six characters, numbers, short words and regions are left out. The newest 512 are kept.
    """
    for value in values:
        if not _is_ordinary(value):
            _secrets[value] = _forms(value)


def _is_ordinary(value: str) -> bool:
    """Whether a value may stand in a text for something else: a word, a number, a region, a truth value."""
    word = value.isalpha() and len(value) < _LEAST_WORD
    return len(value) < _LEAST_SECRET or word or value.isdecimal() or _REGION.fullmatch(value) is not None


@lru_cache(maxsize=256)
def _forms(value: str) -> tuple[str, ...]:
    """Return how a value may stand in a text: as it is, as a part of a URL, a header, JSON or Python's repr."""
    packed = base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()
    quoted = (quote(value, safe=""), quote(value), quote_plus(value), json.dumps(value)[1:-1], repr(value)[1:-1])
    return tuple(dict.fromkeys((value, *quoted, packed, packed.rstrip("="))))


_environment: tuple[dict[Any, Any], list[str]] = {}, []
"""The environment when it was last looked through, and the forms of its secrets."""


def _forms_of_environment() -> list[str]:
    """Return how secrets of the environment may stand in a text; looks through it again only after it changed."""
    global _environment
    now = os.environ._data  # type: ignore[attr-defined]  # all public ways decode every variable at every call
    if now != _environment[0]:
        _environment = (
            dict(now),
            [f for value in _secrets_of_environment() if not _is_ordinary(value) for f in _forms(value)],
        )
    return _environment[1]


def _secrets_of_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        kind = _kind_of(name)
        if kind == "secret" and (name.startswith(_SERVICE[0]) or not value.startswith("/")):
            yield value
        elif kind == "connection" and (password := _password_of(value)):
            yield password


def _kind_of(variable: str) -> str:
    """Return whether an environment variable holds a "secret" or a "connection" with a password; "" if neither."""
    if variable.startswith(_SERVICE[0]) or _SECRET_VARIABLE.search(variable):
        return "secret"
    return "connection" if _CONNECTION.match(variable) else ""


def _password_of(connection: str) -> str:
    """Return the password in the URL or the JSON of a connection; "" if there is none."""
    with suppress(ValueError, AttributeError):
        if connection.startswith("{"):
            return str(json.loads(connection).get("password") or "")
        return unquote(urlsplit(connection).password or "")
    return ""


def mask_secrets(text: str) -> str:
    """Mask credentials in a text before it is stored or shown: pylance's errors repeat the endpoint URL as given.

    Masked are the secrets of the environment and those given to `remember_secrets`, by their values; and what the text
    itself shows to be one.
    """
    forms = [form for forms in tuple(_secrets.values()) for form in forms]
    forms += _forms_of_environment()
    for form in sorted((form for form in forms if form in text), key=len, reverse=True):
        text = text.replace(form, "***")
    masked = _SIGNATURE.sub(r"\1***", _USER.sub(r"\1***@", text))
    return _KEY.sub("***", _NAMED.sub(lambda found: f"{found[1] or found[2]}***", masked))


class _Masking(logging.Filter):
    """Masks credentials in the messages of a logger, also those of errors that others raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        with suppress(Exception):  # logging reports a message that does not fit its arguments
            record.msg, record.args = mask_secrets(record.getMessage()), ()
        return True


LOGGERS = ("apply", "commit", "functions", "job", "lance_io", "limits", "lineage", "pages", "plan", "progress",
           "query", "run", "spark", "storage", "udf")  # fmt: skip
"""The package's loggers, below `airflow_geneva`; a filter of that one would see none of their messages."""

_masking = _Masking()
for _name in LOGGERS:
    logging.getLogger(f"airflow_geneva.{_name}").addFilter(_masking)
