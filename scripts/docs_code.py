"""Copy sections of tested files into the documentation's pages, so that the pages are complete in the repository.

A copy starts with the line ``<!-- from PATH: SECTION, SECTION -->``, or without sections for an entire file, and ends
with ``<!-- end -->``. A section of a file is the text between ``--8<-- [start:SECTION]`` and ``--8<-- [end:SECTION]``.
``<!-- from tests -->`` is a table for each section of `docs/operating.md`: what a user does, and the tests that say in
their mark ``shows`` that they show it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LANGUAGES = {".py": "python", ".sh": "bash"}
_PLACE = re.compile(r"^( *)<!-- from ([^\s:]+)(?:: ([^>]+))? -->\n.*?^\1<!-- end -->$", re.MULTILINE | re.DOTALL)
_ACTION = re.compile(r"^(?:### (.+)|\| (?!you \|)(.+?) \| .+ \|)$", re.MULTILINE)
_MARKER = re.compile(r"^.*--8<-- \[.*\n", re.MULTILINE)


def fill(page: str) -> str:
    """Return a page with the current text of its sections; KeyError if a file lacks a section."""
    return _PLACE.sub(_filled, page)


def _filled(place: re.Match[str]) -> str:
    indent, path, names = place.groups()
    if path == "tests":
        return f"<!-- from tests -->\n\n{show_tests()}\n\n<!-- end -->"
    text = (ROOT / path).read_text()
    parts = [_section(text, name) for name in names.split(", ")] if names else [text]
    shown = "".join(textwrap.dedent(_MARKER.sub("", part)) for part in parts).strip("\n")
    if language := _LANGUAGES.get(Path(path).suffix):
        shown = f"```{language}\n{shown}\n```"
    begin = f"<!-- from {path}{f': {names}' if names else ''} -->"
    return textwrap.indent(f"{begin}\n\n{shown}\n\n<!-- end -->", indent)


def _section(text: str, name: str) -> str:
    _, found, rest = text.partition(f"--8<-- [start:{name}]")
    inside, ended, _ = rest.partition(f"--8<-- [end:{name}]")
    if not found or not ended:
        raise KeyError(name)
    return inside.partition("\n")[2].rpartition("\n")[0] + "\n"


def show_tests() -> str:
    """Return the tables of the tests that show what happens when a user acts; KeyError for a line without a test."""
    shown = defaultdict[tuple[str, str], list[str]](list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for line, test in _marks(file):
            shown[line].append(f"`{file.relative_to(ROOT / 'tests').as_posix()}::{test}`")
    tables, section = defaultdict[str, list[str]](list), ""
    for heading, done in _ACTION.findall((ROOT / "docs" / "operating.md").read_text().partition("\n## Sizing")[0]):
        section = heading or section
        if done:
            if not (tests := shown.pop((section, done), [])):
                raise KeyError(f"no test shows what happens in {section}: {done}")
            tables[section].append(f"| {done} | {', '.join(tests)} |\n")
    if shown:
        raise KeyError(f"docs/operating.md lacks {', '.join(map(str, shown))}, which tests say they show")
    return "\n".join(
        f"## {name}\n\n| you | shown by |\n|---|---|\n{''.join(rows)}" for name, rows in tables.items()
    ).rstrip()


def _marks(file: Path) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield section and line of each mark ``shows`` of a file, with the name of its test."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)) if "mark.shows(" in text else ():
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
                section, line = map(ast.literal_eval, mark.args)
                yield (section, line), node.name


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(fill(path.read_text()))
