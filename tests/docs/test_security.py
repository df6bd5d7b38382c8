"""Each promise of SECURITY.md names tests that exist, and each limit has the value of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.named_tests import is_test, named_tests

PAGE = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
ROWS = "| limit | value | constant |\n|---|---|---|\n"
UNITS = {
    "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
    "bytes": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0,
}  # fmt: skip
AIRFLOW_SIDE = ("hooks.", "operators.", "pages.", "triggers.")


@dataclass(frozen=True)
class Promise:
    """One bullet: a sentence, and the tests in the line below it."""

    sentence: str
    tests: tuple[tuple[str, str], ...]

    def faults(self) -> Iterator[str]:
        if not self.tests:
            yield f"no test is named beside: {self.sentence}"
        if not re.fullmatch(r"(?:[^.]|\.(?! ))+\.", self.sentence):
            yield f"not one sentence: {self.sentence}"


@dataclass(frozen=True)
class Limit:
    """One row of a table of limits; the constant is named by its path below the package."""

    name: str
    value: str
    constant: str

    def in_page(self) -> float:
        """The value that the page tells, in bytes or seconds where it has a unit."""
        found = re.fullmatch(r"(\d[\d,]*(?:\.\d+)?)(?: (\w+))?", self.value)
        if found is None or (found[2] and found[2] not in UNITS):
            raise ValueError(f"{self.value!r} is no number, or no number with one of the units {', '.join(UNITS)}")
        return float(found[1].replace(",", "")) * UNITS.get(found[2], 1.0)

    def in_code(self) -> float:
        module, _, name = f"airflow_geneva.{self.constant}".rpartition(".")
        found = getattr(import_module(module), name)
        return found.total_seconds() if isinstance(found, timedelta) else float(found)


def sections(text: str, level: int = 2) -> dict[str, str]:
    """Return what stands below each heading of a level."""
    parts = re.split(rf"^{'#' * level} (.+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def promises_in(text: str) -> list[Promise]:
    bullets = re.findall(r"^- (.+(?:\n  .+)*)", text, re.MULTILINE)
    told = [bullet.partition("\\\n  Test") for bullet in bullets]
    return [Promise(" ".join(sentence.split()), tuple(named_tests(named))) for sentence, _, named in told]


def limits_in(text: str) -> list[Limit]:
    """Return the rows of the tables of limits; `ValueError` for a row that is not of their form."""
    rows = [row for table in text.split(ROWS)[1:] for row in table.partition("\n\n")[0].strip().splitlines()]
    found = [re.fullmatch(r"\| (.+) \| (.+) \| `([\w.]+)` \|", row) for row in rows]
    if wrong := [row for row, match in zip(rows, found, strict=True) if match is None]:
        raise ValueError(f"no row of a table of limits: {wrong[0]}")
    return [Limit(*match.groups()) for match in found if match]


def faults_of_door(text: str) -> Iterator[str]:
    """What the section of a door lacks."""
    if not text.lstrip().startswith("Attacker: "):
        yield "it does not say at once who the attacker is"
    if not promises_in(text):
        yield "it promises nothing"
    if len(re.findall(r"^\|[-:| ]+\|$", text, re.MULTILINE)) != text.count(ROWS):
        yield f"its table does not begin with {ROWS!r}"


PROMISED, RIGHTS, NOT_PROMISED = "What is promised", "Who can do what", "What is not promised"
PARTS = sections(PAGE)
DOORS = sections(PARTS.get("Doors", ""), 3)
FACTS = promises_in(PAGE.partition(f"## {PROMISED}")[2])


def test_every_promise_is_one_sentence_with_a_test_beside_it() -> None:
    assert len(FACTS) >= 50, "the page was damaged"
    assert [fault for fact in FACTS for fault in fact.faults()] == []


@pytest.mark.parametrize(("file", "test"), sorted({test for fact in FACTS for test in fact.tests}))
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    assert is_test(file, test)


def test_nothing_but_bullets_is_promised() -> None:
    for heading, text in sections(PARTS[PROMISED], 3).items():
        assert re.fullmatch(r"\n(?:- .+\n(?:  .+\n)*)+\n?", text), heading


def test_every_right_says_what_its_owner_can_and_cannot_do() -> None:
    rights = sections(PARTS[RIGHTS], 3)
    assert len(rights) >= 6
    for heading, text in rights.items():
        can, parted, cannot = text.partition("\nThey cannot:\n\n")
        assert can.startswith("\nThey can "), heading
        assert promises_in(cannot) if parted else can.endswith("\nNothing is promised.\n\n"), heading
        assert not promises_in(can), heading


def test_what_is_not_promised_is_said_in_bold() -> None:
    _, *said = PARTS[NOT_PROMISED].strip().split("\n\n")
    assert [part for part in said if not part.startswith(("**", "- "))] == []


@pytest.mark.parametrize("door", DOORS)
def test_a_door_says_who_attacks_what_is_promised_and_its_limits(door: str) -> None:
    assert list(faults_of_door(DOORS[door])) == []


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(limit, marks=pytest.mark.airflow if limit.constant.startswith(AIRFLOW_SIDE) else (), id=limit.name)
        for limit in limits_in(PAGE)
    ],
)
def test_a_limit_is_that_of_the_code(limit: Limit) -> None:
    assert limit.in_page() == limit.in_code()


DOOR = f"""
Attacker: someone who may write to a table's folder.

- A document of more than 1 MB is
  refused. Always.\\
  Tests: `package/test_doors.py::test_nothing_goes_around_a_door`,
  `docs/test_nowhere.py::test_nothing`
- Nothing else happens.

{ROWS}| file of code | 50 MB | `engine.udf.code_archive.MAX_FILE_BYTES` |
| the same | 49 MB | `engine.udf.code_archive.MAX_FILE_BYTES` |
"""


def test_the_page_is_read_as_it_is_meant() -> None:
    """Otherwise the tests above find nothing, and pass."""
    first, second = promises_in(DOOR)
    assert first.sentence == "A document of more than 1 MB is refused. Always."
    assert [is_test(*test) for test in first.tests] == [True, False]
    assert list(first.faults()) == [f"not one sentence: {first.sentence}"]
    assert list(second.faults()) == ["no test is named beside: Nothing else happens."]
    assert list(Promise("Version 1.5 of `a.b` is read.", first.tests).faults()) == []
    right, wrong = limits_in(DOOR)
    assert right.in_page() == right.in_code() != wrong.in_page()
    assert list(faults_of_door(DOOR)) == []
    assert len(list(faults_of_door("Nobody.\n\n| limit | value |\n|---|---|\n| a | 1 |\n"))) == 3
    assert sections(f"## Doors\n### One\n{DOOR}## Other\n### Two\n") == {
        "Doors": f"### One\n{DOOR}", "Other": "### Two\n",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "number"),
    [("3", 3), ("3,000", 3000), ("1.5 s", 1.5), ("2 min", 120), ("64 KiB", 65536), ("1 MB", 10**6), ("7 days", 604800)],
)
def test_a_value_has_a_unit_or_none(value: str, number: float) -> None:
    assert Limit("", value, "").in_page() == number


@pytest.mark.parametrize("value", ["", "many", "1 mile", "1 MB or so", "-1"])
def test_a_value_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="is no number"):
        Limit("", value, "").in_page()


def test_a_row_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="no row of a table of limits"):
        limits_in(f"{ROWS}| body | 1 MB | pages/app.py |\n")
