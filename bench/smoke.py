"""``make bench CASES=smoke``: the ratios of short cases to pylance alone, compared with the last release."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

NAME = "smoke"
CASES = ("a", "b", "d", "e")
RUNNERS = ("inline",)
# A ratio depends little on the machine; the rest is noise of a shared machine.
_ALLOWED = 1.5
_RECORD = Path(__file__).with_name("smoke.json")


def ratios(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return by case the ratio of our median seconds to those of pylance alone."""
    return {run["case"]: round(median(run["ours"]) / median(run["floor"]), 2) for run in runs}


def record(version: str, runs: Sequence[Mapping[str, Any]], file: Path = _RECORD) -> None:
    """Store the ratios of a release."""
    file.write_text(json.dumps({"version": version, "ratios": ratios(runs)}, indent=2) + "\n")


def compare(runs: Sequence[Mapping[str, Any]], file: Path = _RECORD) -> str:
    """Return a table of the ratios now and at the last release.

    Raises:
        SystemExit: a ratio is more than 1.5 times that of the release.
    """
    release = json.loads(file.read_text())
    now, slower = ratios(runs), list[str]()
    lines = [f"| case | {release['version']} | now |", "|---|---:|---:|"]
    for case, ratio in now.items():
        before = release["ratios"][case]
        lines.append(f"| {case} | {before} | {ratio} |")
        if ratio > _ALLOWED * before:
            slower.append(
                f"Case {case} takes {ratio} times as long as pylance alone; {before} in {release['version']}."
            )
    table = "\n".join(lines)
    if slower:
        raise SystemExit(f"{table}\n\n" + "\n".join(slower))
    return table
