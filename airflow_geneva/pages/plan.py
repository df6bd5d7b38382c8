"""What one run of all columns and views would do, as far as records and freshness tell: no code is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from airflow_geneva.engine import api
from airflow_geneva.engine.results import FAILED
from airflow_geneva.pages.databases import DatabaseDetails, Filters, TableCard, edges_of, read_database
from airflow_geneva.pages.graph import Key
from airflow_geneva.pages.tables import ColumnRow
from airflow_geneva.pages.visible import VisibleDatabase


@dataclass(frozen=True)
class Step:
    """A column or view that a run would compute.

    Args:
        now: the rows that are due; None while they are counted.
        most: the most rows that run once everything above it has run; None if that cannot be known without its code.
        because: names of what is due above it.
        seconds, cost: of `most` rows, at the speed and price of its newest job.
        blocked: why it would not run, or not to its end.
    """

    table: str
    name: str
    now: int | None
    most: int | None
    because: tuple[str, ...] = ()
    seconds: float | None = None
    cost: float | None = None
    blocked: str = ""
    job: api.Job | None = None

    @property
    def runs(self) -> bool:
        return self.now != 0 or self.most != 0

    @property
    def exact(self) -> bool:
        return not self.because and self.most is not None


def read_plan(opened: VisibleDatabase, seconds: float) -> tuple[DatabaseDetails, tuple[Step, ...]]:
    """Read a database, and list its columns and views in order of dependency."""
    shown = read_database(opened, Filters(), seconds)
    return shown, tuple(plan_steps({card.name: card for card in shown.cards}))


def plan_steps(cards: Mapping[str, TableCard]) -> Iterator[Step]:
    """Yield the columns and views of a database, each after those from which it is computed."""
    items = {_key(card, item): (card, item) for card in cards.values() for item in card.computed}
    above: dict[Key, list[Key]] = {key: [] for key in items}
    for origin, key in edges_of(cards):
        if origin in items:
            above[key].append(origin)
    try:
        ordered = list(TopologicalSorter(above).static_order())
    except CycleError:
        ordered = list(items)
    steps: dict[Key, Step] = {}
    for key in ordered:
        steps[key] = _step(key, *items[key], [steps[origin] for origin in dict.fromkeys(above[key]) if origin in steps])
        yield steps[key]


def _key(card: TableCard, item: ColumnRow) -> Key:
    return (card.name,) if card.is_view else (card.name, item.name)


def _step(key: Key, card: TableCard, item: ColumnRow, above: list[Step]) -> Step:
    job, found = (card.jobs or {}).get(item.name), item.standing
    now = None if found is None else found.pending + found.gone
    running = [step for step in above if step.runs]
    most = now
    for step in running:
        most = None if most is None or step.most is None or card.expands else most + step.most
    if most is not None and found is not None and not card.is_view:
        most = min(most, found.rows)
    blocked = item.error or ""
    if job is not None and job.state == FAILED:
        blocked = f"its newest job failed: {(job.error or 'for an unknown reason').partition(chr(10))[0]}"
    if held := [step.name for step in above if step.blocked]:
        blocked = blocked or f"{', '.join(held)}, from which it is computed, is blocked"
    computed = 0 if job is None or most is None else job.rows_run or job.rows_computed
    took = job.seconds.get("apply") if job is not None else None
    return Step(
        card.name, ".".join(key), now, most, tuple(step.name for step in running),
        seconds=took * most / computed if computed and took and most else None,
        cost=job.cost * most / computed if computed and job is not None and job.cost and most else None,
        blocked=blocked, job=job,
    )  # fmt: skip
