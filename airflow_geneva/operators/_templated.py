"""Parse values of templated fields: a template renders to text, and empty text means None."""

from __future__ import annotations

import json
import re
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException

_NOTHING = ("", "None")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
_TEMPLATE = re.compile(r"\{\{|\{%")


def is_template(value: Any) -> bool:
    """Whether a value is known only at run time: a Jinja template, or the output of a task or a param."""
    return value is not None and (not isinstance(value, str) or bool(_TEMPLATE.search(value)))


def optional_text(value: Any) -> str | None:
    """Return text, or None if it is empty."""
    return None if value is None or str(value).strip() in _NOTHING else str(value).strip()


def required_text(name: str, value: Any) -> str:
    """Return text that is not empty.

    Raises:
        AirflowFailException: it is empty.
    """
    text = optional_text(value)
    if text is None:
        raise AirflowFailException(f"{name}={value!r} is empty. Give the {name}, or check what its template renders.")
    return text


def optional_int(name: str, value: Any) -> int | None:
    """Return a whole number, or None for empty text.

    Raises:
        AirflowFailException: it is not a number.
    """
    text = optional_text(value)
    try:
        if isinstance(value, bool):
            raise ValueError(value)
        return None if text is None else int(text)
    except ValueError:
        raise AirflowFailException(
            f"{name}={value!r} is not a whole number. Give one, or nothing for the default."
        ) from None


def optional_float(name: str, value: Any) -> float | None:
    """Return a number, or None for empty text.

    Raises:
        AirflowFailException: it is not a number.
    """
    text = optional_text(value)
    try:
        if isinstance(value, bool):
            raise ValueError(value)
        return None if text is None else float(text)
    except ValueError:
        raise AirflowFailException(f"{name}={value!r} is not a number. Give one, or nothing for the default.") from None


def parse_bool(name: str, value: Any) -> bool:
    """Return a boolean; empty text is false.

    Raises:
        AirflowFailException: it is neither true nor false.
    """
    text = (optional_text(value) or "false").lower()
    if text not in _TRUE + _FALSE:
        raise AirflowFailException(f"{name}={value!r} is neither true nor false. Give one of them.")
    return text in _TRUE


def parse_json(name: str, value: Any) -> Any:
    """Return a list or an object, which may be given as JSON text; None for empty text.

    Raises:
        AirflowFailException: it is text, but not JSON.
    """
    text = optional_text(value) if isinstance(value, str) else None
    try:
        return json.loads(text) if text else None if isinstance(value, str) else value
    except ValueError:
        raise AirflowFailException(
            f"{name}={value!r:.200} is text, and not the JSON of a list or an object. A template that renders one ends "
            "in '| tojson'."
        ) from None
