"""Hooks for the documentation site: references of commands and options, and rendering of docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
import typer

from airflow_geneva.cli.app import app
from airflow_geneva.get_provider_info import get_provider_info
from airflow_geneva.plan.model import Sizing

_COMMANDS = "<!-- commands -->"
_CONFIGURATION = "<!-- configuration -->"
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")
_SEVERAL = re.compile(r"(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.+)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the commands of `airflow-geneva` and the options of Airflow's configuration at a page's markers."""
    for asked, describe in ((_COMMANDS, describe_commands), (_CONFIGURATION, describe_configuration)):
        if asked in markdown:
            markdown = markdown.replace(asked, "\n".join(describe()))
    return markdown


def describe_configuration() -> Iterator[str]:
    """Describe the sections and options of Airflow's configuration as Markdown."""
    for section, about in get_provider_info()["config"].items():
        yield f"{_markdown(about['description'])}\n"
        yield "| option | meaning | default | in the environment |\n|---|---|---|---|"
        for name, option in about["options"].items():
            variable = f"AIRFLOW__{section}__{name}".upper()
            yield f"| `{name}` | {_markdown(option['description'])} | `{option['default']}` | `{variable}` |"


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def describe_commands() -> Iterator[str]:
    """Describe every command of the program as Markdown."""
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
    yield "| argument or option | meaning |\n|---|---|"
    yield from (f"| `{argument.metavar}` | {argument.help} |" for argument in arguments)
    for option in options:
        default = "" if option.default in (None, False) else f" Default: `{option.default}`."
        yield f"| `{', '.join(option.opts)}` | {option.help}{default} |"
    yield ""


class PlainDocstrings(griffe.Extension):
    """Removes Sphinx roles from docstrings, splits entries of several parameters, and shows defaults as values."""

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
    """Return the lines with `a, b: text` split into `a: text` and `b: text`."""
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
