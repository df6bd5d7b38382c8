"""What is public is deprecated before it goes: the sentence has one form, and its release comes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
from typing_extensions import deprecated

import airflow_geneva

PUBLIC = ("", ".assets", ".errors", ".functions", ".hooks", ".operators", ".sensors", ".task_groups", ".triggers")
FORM = re.compile(r"[\w.]+ is deprecated since (\d+\.\d+\.\d+) and will be removed in (\d+\.\d+)\.0\. Use .+\.")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def deprecations(module: ModuleType) -> Iterator[str]:
    """Find the sentences of what a module exports, and of the methods of its classes."""
    for name in getattr(module, "__all__", ()):
        exported = getattr(module, name)
        for value in (exported, *(vars(exported).values() if isinstance(exported, type) else ())):
            if said := getattr(getattr(value, "fget", value), "__deprecated__", None):
                yield said


def problem(said: str, version: str) -> str:
    """Say what is wrong with a sentence in a version, or nothing."""
    if not (form := FORM.fullmatch(said)):
        return f"{said!r} is not of the form {FORM.pattern!r}"
    since, gone = (_numbers(part)[:2] for part in form.groups())
    if not since < gone:
        return f"{said!r} warns for less than a minor version"
    if _numbers(version)[:2] >= gone:
        return f"{said!r}: it had to go in this release"
    return ""


@pytest.mark.parametrize("module", PUBLIC)
def test_what_is_deprecated_says_since_when_until_when_and_what_instead(module: str) -> None:
    found = deprecations(import_module(f"airflow_geneva{module}"))
    assert [said for said in found if problem(said, airflow_geneva.__version__)] == []


def test_the_check_finds_what_is_said_wrongly_or_had_to_go() -> None:
    class Old:
        @deprecated("Old.rows is deprecated since 0.3.0 and will be removed in 0.5.0. Use Old.to_arrow.")
        def rows(self) -> None: ...

        @property
        @deprecated("gone soon")
        def size(self) -> int:
            return 0

    module = ModuleType("old")
    vars(module).update(__all__=["Old"], Old=Old)
    good, bad = deprecations(module)
    assert problem(good, "0.4.2") == ""
    assert "had to go" in problem(good, "0.5.0")
    assert "less than a minor version" in problem(good.replace("0.5.0", "0.3.0"), "0.3.0")
    assert "not of the form" in problem(bad, "0.4.2")
    with pytest.warns(DeprecationWarning, match="Use Old.to_arrow"):
        Old().rows()
