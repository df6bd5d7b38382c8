"""What the cases aim at: a ratio to pylance alone in the same run, or a figure of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Aim:
    """An aim of one case.

    Args:
        unit: of the figure: ``times``, which is the ratio of the best seconds to those of pylance alone, ``s``, ``ms``,
            ``kB``, ``MB`` or ``%``.
        aim: the largest figure that meets it; in ``%``, the smallest.
        find: finds the figure in the results; raises LookupError if they lack it.
    """

    case: str
    unit: str
    aim: float
    find: Callable[[Results], float]


@dataclass(frozen=True)
class Standing:
    """The figure that a run measured for an aim."""

    aim: Aim
    figure: float

    @property
    def met(self) -> bool:
        more = self.aim.unit == "%"
        return self.figure >= self.aim.aim if more else self.figure <= self.aim.aim


def stand(results: Results) -> Iterator[Standing]:
    """Compare the results with the aims of the cases that were measured."""
    for aim in AIMS:
        try:
            figure = aim.find(results)
        except LookupError:
            continue
        yield Standing(aim, figure)


def _viewed(results: Results, rows: int, change: str) -> Mapping[str, Any]:
    for run in results["view"]:
        if (run["rows"], run["runner"]) == (rows, "inline"):
            return dict(run["changes"][change])
    raise LookupError(rows)


def _ratio(sides: Mapping[str, Any]) -> float:
    return float(min(sides["ours"]) / min(sides["floor"]))


def _view(rows: int, change: str) -> Callable[[Results], float]:
    return lambda results: _ratio(_viewed(results, rows, change))


def _column(case: str) -> Callable[[Results], float]:
    def find(results: Results) -> float:
        for run in results["compare"]:
            if (run["case"], run["runner"]) == (case, "inline"):
                return _ratio(run)
        raise LookupError(case)

    return find


def _fragment(kind: str) -> Callable[[Results], float]:
    return lambda results: 1e3 * min(results["small"]["seconds"][kind]["ours"]) / int(results["small"]["fragments"])


def _cold(case: str, side: str, figure: str) -> Callable[[Results], float]:
    def find(results: Results) -> float:
        for run in results["once"]:
            if (run["case"], run["side"]) == (case, side):
                return float(run[figure])
        raise LookupError(case)

    return find


def _far(name: str, ratio: bool = False) -> Callable[[Results], float]:
    def find(results: Results) -> float:
        for at in (results["far"] or {}).get("at", ()):
            if at["ms"] == 50:
                alone = at["runs"]["pylance alone"]["seconds"] if ratio else 1.0
                return float(at["runs"][name]["seconds"] / alone)
        raise LookupError(name)

    return find


def _busy(side: str) -> Callable[[Results], float]:
    return lambda results: 100 * float(results["busy"]["at"]["50 ms"][side]["busy"])


def _links(results: Results) -> float:
    return 100 * min(float(run["busy"]) for run in results["links"]["runs"] if run["runner"] == "inline")


def _near(results: Results) -> float:
    """The runs whose remaining time was within 30 %, of those that stated one."""
    runs = [run for run in results["time_left"]["runs"] if run["known"]]
    return 100 * sum(abs(run["said"] / run["left"] - 1) <= 0.3 for run in runs) / len(runs)


def _inside(results: Results) -> float:
    return 100 * sum(job["seconds"]["inside"] for job in results["estimate"]) / len(results["estimate"])


AIMS = (
    Aim("view of 16M rows, first refresh", "times", 1.6, _view(16_000_000, "first refresh")),
    Aim("view of 16M rows, 10 % more rows", "times", 2.1, _view(16_000_000, "10 % more rows")),
    Aim("view of 16M rows, update of 1 %", "times", 1.0, _view(16_000_000, "update of 1 %, in every fragment")),
    Aim(
        "view of 16M rows, compaction of its source",
        "s",
        0.03,
        lambda results: float(min(_viewed(results, 16_000_000, "compaction")["ours"])),
    ),
    Aim("view of 1M rows, first refresh", "times", 1.2, _view(1_000_000, "first refresh")),
    Aim("column of 16M rows, first backfill", "times", 1.6, _column("a16m")),
    Aim("column of 1M rows, first backfill", "times", 1.6, _column("a")),
    Aim("column, a fragment of 10 rows", "ms", 4, _fragment("column")),
    Aim("view, a fragment of 10 rows", "ms", 5, _fragment("view")),
    Aim("import of the package on a worker", "s", 0.4, lambda results: float(min(results["start"]["imports"]))),
    Aim("column of 20,000 fragments of 10 rows", "s", 80, _cold("20k", "inline", "inside")),
    Aim("memory for these 20,000 fragments", "MB", 400, lambda found: _cold("20k", "inline", "peak_self")(found) / 1e6),
    Aim("column, 50 ms away, first backfill", "times", 1.5, _far("column, first", ratio=True)),
    Aim("column, 50 ms away, one new row", "s", 1.3, _far("column, one new row")),
    Aim("commit of 1,000 staged fragments, 50 ms away", "s", 5, _far("staged fragments, commit")),
    Aim("a device busy inline, 50 ms away", "%", 98, _busy("ours, images that need no decoding, inline")),
    Aim("a device busy on Spark, 50 ms away", "%", 97, _busy("ours, images that need no decoding, spark")),
    Aim("a function of files behind links busy, 50 ms away", "%", 95, _links),
    Aim("time left at half time within 30 %", "%", 90, _near),
    Aim("costs inside the interval of their plan", "%", 90, _inside),
    Aim("the largest page", "kB", 100, lambda results: max(page["bytes"] for page in results["pages"]["pages"]) / 1e3),
    Aim("the slowest page", "s", 0.3, lambda results: max(min(page["seconds"]) for page in results["pages"]["pages"])),
)
