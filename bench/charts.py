"""The charts at the beginning of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.cases import CASES
from bench.plot import plot_bars, plot_lines

_SIDES = {"ours": "airflow_geneva, inline", "floor": "pylance alone", "peer": "LanceDB"}
_LARGEST = 16_000_000


@dataclass(frozen=True)
class Chart:
    """An SVG image, and its place beside the page."""

    file: str
    title: str
    image: str


def draw(results: Mapping[str, Any]) -> Iterator[Chart]:
    """Draw the charts whose cases were measured."""
    views = {run["rows"]: run["changes"] for run in results["view"] if run["runner"] == "inline"}
    columns = {run["rows"]: run["changes"] for run in results.get("peer") or ()}
    if _LARGEST in views:
        changes = {f"view, {name}": sides for name, sides in views[_LARGEST].items()}
        yield _bars("alone", "Seconds at 16M rows, and of pylance alone", changes, "ours", "floor")
        if _LARGEST in columns:
            both = {**changes, **{name.replace(":", ","): one for name, one in columns[_LARGEST].items()}}
            yield _bars("lancedb", "Seconds at 16M rows, and of LanceDB, which evaluates SQL", both, "ours", "peer")
    measured = {(run["case"], run["runner"]): min(run["ours"]) for run in results["compare"]}
    geneva = {
        case.title: {
            **{runner: measured[name, runner] for runner in ("inline", "spark") if (name, runner) in measured},
            "geneva, measured elsewhere": float(case.peer.split()[0]),
        }
        for name, case in CASES.items()
        if case.peer and (name, "inline") in measured
    }
    if geneva:
        title = "Seconds to fill a column, and of geneva on another machine of two cores"
        yield Chart("images/geneva.svg", title, plot_bars(title, geneva))
    if results.get("far"):
        yield _by_distance(results["far"])
    if len(views) > 1 and set(views) <= set(columns):
        sizes = {
            f"{what}, {rows:,} rows": changes[rows][name]
            for what, changes, name in (("column", columns, "column: first"), ("view", views, "first refresh"))
            for rows in sorted(views)
        }
        yield _bars("size", "Seconds of a first run by the number of rows", sizes, "ours", "floor", "peer")


def _bars(name: str, title: str, groups: Mapping[str, Mapping[str, Any]], *sides: str) -> Chart:
    best = {
        group: {_SIDES[side]: min(taken[side]) for side in sides if side in taken} for group, taken in groups.items()
    }
    return Chart(f"images/{name}.svg", title, plot_bars(title, best))


def _by_distance(found: Mapping[str, Any]) -> Chart:
    sides = sorted(found["at"], key=lambda at: at["ms"])
    names = ("pylance alone", "column, first", "view, first", "column, one new row", "column, nothing to do")
    lines = {name: [at["runs"][name]["seconds"] for at in sides] for name in names}
    title = "Seconds of a run by the latency of the store"
    return Chart(
        "images/far.svg", title, plot_lines(title, "latency in ms", "seconds", lines, [at["ms"] for at in sides])
    )
