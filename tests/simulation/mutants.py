"""Defects of the protocol that worlds must find: the package with one guard removed or one order turned around.

``python -m tests.simulation --mutant NAME --seeds 2000`` runs worlds with one, until the first that goes wrong.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.guards import GUARDS, Guard

PACKAGE = Path(__file__).parents[2] / "airflow_geneva"


@dataclass(frozen=True)
class Mutant:
    """A defect, and the scenario in which it shows itself; "" for all of them."""

    name: str
    guard: Guard
    scenario: str = ""


def mutant(name: str, why: str, code: str, without: str, scenario: str = "") -> Mutant:
    return Mutant(name, Guard(why, code, without, ()), scenario)


MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "swap-on-another-base",
        "A refresh that was planned on another state of the view is swapped all the same.",
        "if newest.identity != swap.based_on:",
        "if False:",
        "view",
    ),
)


def find(name: str) -> Mutant:
    return next(one for one in MUTANTS if one.name == name)


def mutate(name: str, folder: Path) -> Path:
    """Write a copy of the package with a defect below a folder; return what comes first on the path then."""
    guard = GUARDS[int(name.removeprefix("guard-"))] if name.startswith("guard-") else find(name).guard
    home = folder / "mutant"
    copy = home / "airflow_geneva"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = guard.file(copy)
    file.write_text(file.read_text(encoding="utf-8").replace(guard.code, guard.without), encoding="utf-8")
    return home
