"""The messages that the page on troubleshooting quotes are those that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "\0"


@cache
def texts() -> tuple[str, ...]:
    """Every text of the package's code, with a mark for each value that is put into it."""
    return tuple(text for file in sorted((ROOT / "airflow_geneva").rglob("*.py")) for text in texts_of(file))


def texts_of(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted() -> list[str]:
    """What stands as code in the first cell of a row of a table."""
    cells = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def occurs(message: str) -> bool:
    pattern = re.compile(".*?".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in texts())


def test_messages_are_found_on_the_page() -> None:
    assert len(quoted()) >= 70, "the tables were damaged"
    assert all(len(message.replace("…", "").strip()) >= 12 for message in quoted()), "too short to tell anything"


@pytest.mark.parametrize("message", quoted())
def test_the_code_says_what_the_page_quotes(message: str) -> None:
    assert occurs(message), f"no text of the package has it: {message}"


@pytest.mark.parametrize("message", ["Column … is not defined in view …", "There is no tea in …. Tables:"])
def test_what_the_code_does_not_say_is_not_found(message: str) -> None:
    assert not occurs(message)
