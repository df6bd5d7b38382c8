"""The tests that a page of the documentation names beside what they show."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]


def named_tests(text: str) -> list[tuple[str, str]]:
    """Return the file below `tests/`, and the function, of each test that a Markdown text names."""
    return re.findall(r"`((?:\w+/)+test_\w+\.py)::(test_\w+)`", text)


def is_test(file: str, name: str) -> bool:
    """Whether a file below `tests/` defines a test of that name."""
    path = TESTS / file
    return path.is_file() and name in _functions_of(path)


@cache
def _functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}
