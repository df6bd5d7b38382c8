"""Which of many parameters `make test` tries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(fast: int, parameters: Iterable[Any]) -> list[Any]:
    """Return parameters of a test; those after the first few are slow, and only `make test-rest` tries them."""
    return [
        one if at < fast else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow)
        for at, one in enumerate(parameters)
    ]
