"""Hooks for the documentation site: references of commands and options, and rendering of docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import griffe
import typer

from airflow_geneva.cli.app import app
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.get_provider_info import get_provider_info

_COMMANDS = "<!-- commands -->"
_CONFIGURATION = "<!-- configuration -->"
_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")
_ENTRY = re.compile(r" {4}(\w+): ")
_UNPACKED = re.compile(r"Unpack\[(\w+)\]")
_SEVERAL = re.compile(r"(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.+)")
_THOSE = re.compile(r"The arguments are those of `([\w.]+TaskGroup)`\.")


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
            default = f"`{option['default']}`" if option["default"] else "none"
            yield f"| `{name}` | {_markdown(option['description'])} | {default} | `{variable}` |"


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
    """Removes Sphinx roles from docstrings, and lists each parameter separately, wherever it is documented.

    A signature that ends with `**shared: Unpack[Fields]` shows the fields, and a class whose `__init__` ends with
    `**kwargs` shows the parameters of its base class. A parameter without a description gets that of the field of
    `Sizing`.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        _make_plain(obj)
        self._complete(obj)

    def _repeat(self, obj: griffe.Object, names: Iterable[str]) -> None:
        """Describe parameters as the class does that the docstring names."""
        named = _THOSE.search(obj.docstring.value) if obj.docstring is not None else None
        if obj.docstring is None or named is None:
            return
        group = obj.modules_collection[f"airflow_geneva.{named[1]}"]
        about: dict[str, list[str]] = {}
        for one in (group.parent["GroupArguments"], group):
            _make_plain(one)
            about |= _described(one)
        lines = [line for name in names for line in about.get(name, ())]
        obj.docstring.value = obj.docstring.value.replace(named[0], "\n".join(["Args:", *lines]))

    def _complete(self, obj: griffe.Object) -> None:
        function = obj.members.get("__init__") if isinstance(obj, griffe.Class) else obj
        if obj.path in self._done or not isinstance(function, griffe.Function) or obj.docstring is None:
            return
        self._done.add(obj.path)
        own = function.parameters
        self._repeat(obj, [one.name for one in own])
        last = list(own)[-1] if len(own) else None
        if last is None or last.kind is not griffe.ParameterKind.var_keyword:
            return
        unpacked = _UNPACKED.fullmatch(str(last.annotation))
        if unpacked:
            holder = obj.modules_collection[obj.resolve(unpacked[1])]
            found = []
            for name, field in holder.attributes.items():
                default = "None" if "None" in str(field.annotation) else "..."
                kind = griffe.ParameterKind.keyword_only
                found.append(griffe.Parameter(name, annotation=field.annotation, kind=kind, default=default))
        else:
            bases = obj.resolved_bases if isinstance(obj, griffe.Class) else []
            holder = next((base for base in bases if base.path.startswith("airflow_geneva.")), None)
            if holder is None:
                return
            self._complete(holder)
            found = [one for one in holder.parameters if one.kind is griffe.ParameterKind.keyword_only]
        sizing = obj.modules_collection["airflow_geneva.engine.plan.sizing.Sizing"]
        for one in (sizing, holder):
            _make_plain(one)
        about = {**_described(sizing), **_described(holder)}
        del own[last.name]
        added = [parameter for parameter in found if parameter.name not in own]
        for parameter in added:
            if hasattr(Sizing, parameter.name):
                parameter.default = repr(getattr(Sizing(), parameter.name))
            own.add(parameter)
        if not unpacked:
            own.add(last)
        lines = [line for parameter in added for line in about[parameter.name]]
        obj.docstring.value = "\n".join(_insert(obj.docstring.value.splitlines(), lines, last.name, bool(unpacked)))


def _make_plain(obj: griffe.Object) -> None:
    if obj.docstring is not None:
        text = _ROLE.sub(lambda role: f"`{role[1].removeprefix('airflow_geneva.')}`", obj.docstring.value)
        obj.docstring.value = "\n".join(_one_each(text.splitlines()))


def _described(obj: griffe.Object) -> dict[str, list[str]]:
    """Return the lines of a docstring about each parameter."""
    found: dict[str, list[str]] = {}
    inside = False
    for line in obj.docstring.value.splitlines() if obj.docstring else ():
        if entry := _ENTRY.match(line):
            found[entry[1]] = [line] if inside else []
        elif inside and line.startswith("     "):
            found[list(found)[-1]].append(line)
        else:
            inside = line == "Args:"
    return found


def _insert(lines: list[str], more: list[str], kwargs: str, replaces: bool) -> Iterator[str]:
    """Insert lines at the end of the arguments, before or instead of the line about `**kwargs`."""
    at = lines.index("Args:") + 1
    while at < len(lines) and lines[at] and not lines[at].startswith(f"    {kwargs}:"):
        at += 1
    rest = lines[at:]
    yield from [*lines[:at], *more, *(rest[1:] if replaces and rest and rest[0] else rest)]


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
