"""Copy sections of tested files into the documentation's pages, so that the pages are complete in the repository.

A copy starts with the line ``<!-- from PATH: SECTION, SECTION -->``, or without sections for an entire file, and ends
with ``<!-- end -->``. A section of a file is the text between ``--8<-- [start:SECTION]`` and ``--8<-- [end:SECTION]``.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LANGUAGES = {".py": "python", ".sh": "bash"}
_PLACE = re.compile(r"^( *)<!-- from ([^\s:]+)(?:: ([^>]+))? -->\n.*?^\1<!-- end -->$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^.*--8<-- \[.*\n", re.MULTILINE)


def fill(page: str) -> str:
    """Return a page with the current text of its sections; KeyError if a file lacks a section."""
    return _PLACE.sub(_filled, page)


def _filled(place: re.Match[str]) -> str:
    indent, path, names = place.groups()
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


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(fill(path.read_text()))
