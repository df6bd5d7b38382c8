"""What `make mutants` removes is where the list says, and so are the tests that must notice it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import airflow_geneva
from tests.mutants.guards import GUARDS
from tests.simulation.mutants import MUTANTS
from tests.simulation.scenarios import SCENARIOS

TESTS = Path(__file__).parents[1]


def test_every_guard_is_in_the_package_once_and_can_be_removed() -> None:
    package = Path(airflow_geneva.__file__).parent
    left: dict[Path, str] = {}
    for guard in GUARDS:
        file = guard.file(package)
        left[file] = left.get(file, file.read_text(encoding="utf-8")).replace(guard.code, guard.without)
    for text in left.values():
        ast.parse(text)


def test_every_mutant_of_worlds_is_in_the_package_once_and_can_be_made() -> None:
    package = Path(airflow_geneva.__file__).parent
    for one in MUTANTS:
        text = one.guard.file(package).read_text(encoding="utf-8")
        ast.parse(text.replace(one.guard.code, one.guard.without))
        assert one.scenario in SCENARIOS
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 24


def test_every_guard_names_tests_that_exist() -> None:
    for test in {test for guard in GUARDS for test in guard.tests}:
        file, _, name = test.partition("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(" if name else "^def test_", text, re.MULTILINE), test


def test_no_removal_is_listed_twice() -> None:
    assert len({(guard.code, guard.without) for guard in GUARDS}) == len(GUARDS)
