"""Values of templated fields: a template always gives text, and an empty one means None."""

from __future__ import annotations

from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException

_NOTHING = ("", "None")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def optional_text(value: Any) -> str | None:
    """Text, or None for an empty one."""
    return None if value is None or str(value).strip() in _NOTHING else str(value).strip()


def required_text(name: str, value: Any) -> str:
    """Text that is not empty.

    Raises:
        AirflowFailException: it is.
    """
    text = optional_text(value)
    if text is None:
        raise AirflowFailException(f"{name}={value!r} is empty. Give the {name}, or look at what its template renders.")
    return text


def optional_int(name: str, value: Any) -> int | None:
    """A whole number, or None for an empty text.

    Raises:
        AirflowFailException: it is something else.
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
    """A number, or None for an empty text.

    Raises:
        AirflowFailException: it is something else.
    """
    text = optional_text(value)
    try:
        if isinstance(value, bool):
            raise ValueError(value)
        return None if text is None else float(text)
    except ValueError:
        raise AirflowFailException(f"{name}={value!r} is not a number. Give one, or nothing for the default.") from None


def truth(name: str, value: Any) -> bool:
    """A truth value; an empty text is false.

    Raises:
        AirflowFailException: it is neither true nor false.
    """
    text = (optional_text(value) or "false").lower()
    if text not in _TRUE + _FALSE:
        raise AirflowFailException(f"{name}={value!r} is neither true nor false. Give one of them.")
    return text in _TRUE
