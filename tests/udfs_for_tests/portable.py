"""Functions whose code version is compared between Pythons: the standard library only, and every kind of reference."""

from __future__ import annotations

import datetime
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from random import randint
from typing import Any, Optional

STOP_WORDS = {"the", "a", "of", "and"}
LIMITS = {"short": 3, "long": [10.5, None, (1, b"\x00", "ü")]}
WORD = re.compile(r"\w+", re.IGNORECASE)
Text = Optional[str]  # noqa: UP045
_loaded = None


def plain(x):
    return x * 2 + 1


def documented(x: int, *, scale: float = 1.5) -> float:
    """What this says does not matter."""
    # Nor does this.
    total = 0.0
    for i in range(x):
        total += math.sin(i) * scale
    return total


def with_references(text: Text) -> int:
    words = [w for w in WORD.findall(text or "") if w.lower() not in STOP_WORDS]
    return sum(_weigh(word) for word in words) + len(LIMITS) + randint(0, 0)


def _weigh(word: str) -> int:
    return len(word) if (n := len(word)) > LIMITS["short"] else _weigh(word + "!") + n


def with_fstrings(x: int, y: float) -> str:
    return f"{x!r:>{10}} and {y:.2f}tail{x=} {'nested'}{{}}"


def with_match(value: Any) -> Any:
    match value:
        case {"kind": "a", **rest}:
            return rest
        case [first, *others]:
            return first, others
        case int() | float() as number:
            return number
    return None


def with_state(text: str) -> Any:
    global _loaded
    if _loaded is None:
        _loaded = json.loads(Path(text).read_text())
    try:
        return _loaded[text]
    except KeyError as error:
        raise ValueError(text) from error


def with_lambda(values: list[int], key: Callable[[int], int] = lambda v: -v) -> list[int]:
    first, *_ = sorted(values, key=key)
    return [v for v in values if (lambda w: w > first)(v)] + [~first, first**2, first // 3 or 1]


@functools.cache
def with_decorator(day: datetime.date) -> int:
    with_nested: dict[str, int] = {}

    def inner(x: int) -> None:
        nonlocal with_nested
        with_nested = {**with_nested, str(x): x}

    inner(day.year)
    return len(with_nested)


class Base:
    factor = 3

    def scaled(self, x: int) -> int:
        return x * self.factor


class Model(Base):
    """A class UDF."""

    def __init__(self, bias: int = 7) -> None:
        self.bias = bias

    def __call__(self, x: int) -> int:
        return super().scaled(x) + self.bias

    @property
    def size(self) -> int:
        return len(STOP_WORDS)


def _make_closure(step: int, names: tuple[str, ...]):
    def closure(x: int) -> str:
        return names[x % step]

    return closure


closure = _make_closure(2, ("a", "b"))
model = Model(bias=9)
anonymous = lambda x: x + LIMITS["short"]  # noqa: E731

EVERYTHING = (
    *("plain", "documented", "with_references", "with_fstrings", "with_match", "with_state", "with_lambda"),
    *("with_decorator", "Model", "closure", "model", "anonymous"),
)
