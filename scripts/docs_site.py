"""What the documentation's site is built with: the command line's reference, and docstrings as they are meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
import typer

from airflow_geneva.cli import app
from airflow_geneva.plan.values import Sizing

_COMMANDS = "<!-- commands -->"
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")
_SEVERAL = re.compile(r"(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.+)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands of `airflow-geneva` where a page asks for them."""
    return markdown.replace(_COMMANDS, "\n".join(describe_commands())) if _COMMANDS in markdown else markdown


def describe_commands() -> Iterator[str]:
    """Every command of the program as Markdown, from the program itself."""
    yield from _describe(typer.main.get_command(app), "airflow-geneva")


def _describe(command: Any, name: str) -> Iterator[str]:
    for sub in getattr(command, "commands", {}).values():
        yield from _describe(sub, f"{name} {sub.name}")
    if hasattr(command, "commands"):
        return
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    yield f"## {name}\n"
    yield f"```text\n{' '.join([name, *(argument.metavar for argument in arguments), '[OPTIONS]'])}\n```\n"
    yield f"{command.help}\n"
    yield "| | |\n|---|---|"
    yield from (f"| `{argument.metavar}` | {argument.help} |" for argument in arguments)
    for option in options:
        default = "" if option.default in (None, False) else f" Default: `{option.default}`."
        yield f"| `{', '.join(option.opts)}` | {option.help}{default} |"
    yield ""


class PlainDocstrings(griffe.Extension):
    """Docstrings without Sphinx's roles, with an entry for each of several parameters, and defaults as values."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: f"`{role[1].removeprefix('airflow_geneva.')}`", obj.docstring.value)
            obj.docstring.value = "\n".join(_one_each(text.splitlines()))
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                default = str(parameter.default or "")
                if default.startswith("_DEFAULT."):
                    parameter.default = repr(getattr(Sizing(), default.removeprefix("_DEFAULT.")))


def _one_each(lines: list[str]) -> Iterator[str]:
    """The lines, with `a, b: text` as `a: text` and `b: text`."""
    at = 0
    while at < len(lines):
        match = _SEVERAL.fullmatch(lines[at])
        end = at + 1
        while match and end < len(lines) and lines[end].startswith(match["indent"] + " "):
            end += 1
        if match is None:
            yield lines[at]
        else:
            for name in match["names"].split(", "):
                yield f"{match['indent']}{name}: {match['text']}"
                yield from lines[at + 1 : end]
        at = end
