"""Read an entire database for the pages: the state of its tables and views, and its dependency graph."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from graphlib import CycleError, TopologicalSorter
from urllib.parse import urlencode

from airflow_geneva.database import Database
from airflow_geneva.engine import api
from airflow_geneva.engine.api import Freshness
from airflow_geneva.engine.results import FAILED
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import GenevaError
from airflow_geneva.pages.graph import Graph, Key, Node, lay_out
from airflow_geneva.pages.jobs import JOBS_A_PAGE, JobsPage, list_jobs
from airflow_geneva.pages.tables import ColumnRow, CountCache, FreshnessView, count_freshness, describe_table, freshness
from airflow_geneva.pages.visible import VisibleDatabase

COUNTING, UNKNOWN, RUNNING, WAITING, PLAIN = "counting", "unknown", "running", "waiting", "table"
TROUBLED = "failed"
STALE_ABOVE = "source is stale"
"""Up to date with columns or views that are not, or that are computed from such ones."""
_WORST_FIRST = (UNKNOWN, RUNNING, WAITING, Freshness.STALE, Freshness.NEVER, STALE_ABOVE, Freshness.UP_TO_DATE)
_KEPT_SECONDS = 60.0
_CARDS = CountCache(kept_seconds=_KEPT_SECONDS)


@dataclass(frozen=True)
class TableCard:
    """A table or view on a database's page.

    `computed` is its computed columns, or the view itself, each with its freshness. `source` is the table of this
    database that a view reads, and `elsewhere` the definition of a view that reads another database. `jobs` are the
    newest jobs of its columns, by name. `stale_above` names the stale column or view above those that are up to date.
    `expands`: a row of a view's source may make several rows of the view due.
    """

    name: str
    rows: int = 0
    computed: tuple[ColumnRow, ...] = ()
    is_view: bool = False
    source: str | None = None
    elsewhere: api.ViewDefinition | None = None
    counting: bool = False
    broken: bool = False
    jobs: Mapping[str, api.Job] | None = None
    stale_above: Mapping[str, str] = field(default_factory=dict)
    expands: bool = False

    def state_of(self, item: ColumnRow) -> str:
        job = (self.jobs or {}).get(item.name)
        if job is not None and job.open:
            return WAITING if job.time_left is not None and job.time_left.waits else RUNNING
        found = item.standing.state if item.standing else UNKNOWN
        return STALE_ABOVE if found == Freshness.UP_TO_DATE and item.name in self.stale_above else found

    @property
    def state(self) -> str:
        """The most urgent state of its computed columns, or ``table`` if it has none."""
        if self.counting or self.broken:
            return UNKNOWN if self.broken else COUNTING
        found = {self.state_of(item) for item in self.computed}
        return next((state for state in _WORST_FIRST if state in found), PLAIN)

    @property
    def failing(self) -> list[api.Job]:
        """The newest jobs of its columns, or of the view, that failed."""
        newest = self.jobs or {}
        return [
            newest[item.name] for item in self.computed if item.name in newest and newest[item.name].state == FAILED
        ]

    @property
    def troubled(self) -> bool:
        """Whether a newest job failed, or rows failed."""
        return bool(self.failing or self.failed)

    def urgency(self) -> tuple[object, ...]:
        """Sort cards worst first: failed jobs, then states, then failed rows."""
        places = (*_WORST_FIRST, COUNTING, PLAIN)
        return not self.failing, places.index(self.state), not self.failed, self.name

    @property
    def pending(self) -> int:
        return sum(item.standing.pending for item in self.computed if item.standing)

    @property
    def failed(self) -> int:
        return sum(item.standing.failed for item in self.computed if item.standing)


def read_cards(
    opened: VisibleDatabase,
    names: Sequence[str],
    jobs: Sequence[api.Job],
    seconds: float,
    counts: CountCache | None = None,
) -> list[TableCard]:
    """Count pending rows of tables and views within a time limit; cards without a count yet are marked.

    A count is cached in `counts`, or until a newer one of `jobs`, newest first, starts or ends.
    """
    until = time.monotonic() + seconds
    newest: dict[str, dict[str, api.Job]] = {}
    for job in jobs:
        own = newest.setdefault(job.table, {})
        for target in job.columns or (job.view or "",):
            if target not in own or (job.open and not own[target].open):
                own[target] = job
    cards, cards_of = [], counts or _CARDS
    for name in names:
        own = newest.get(name, {})
        key = (opened.database, name, *((job.id, job.state) for job in own.values()))
        try:
            found = cards_of.get(opened.database.uri, key, partial(_read, opened.database, name, own), until)
            if found is not None and (sources := opened.sources_of(found.elsewhere)):
                # Only for users who may see the source: all others share a result that says that access is refused.
                count = partial(_read, opened.database, name, own, sources)
                found = cards_of.get(opened.database.uri, (*key, sources), count, until)
        except BaseException as error:
            if not is_failure(error):
                raise
            found = TableCard(name, broken=True)
        cards.append(replace(found or TableCard(name, counting=True), jobs=own))
    return cards


def _read(database: Database, name: str, jobs: Mapping[str, api.Job], sources: tuple[str, ...] = ()) -> TableCard:
    location = database.location(name)
    described = describe_table(location)

    def counted(item: ColumnRow) -> ColumnRow:
        asked = replace(item, sources=sources, job=jobs.get(item.name))
        try:
            found = None if item.error else freshness(location, asked, opened=described.dataset)
            return replace(item, standing=found)
        except GenevaError as error:
            return replace(item, error=str(error))

    computed = tuple(map(counted, described.computed))
    source = described.source_in(database)
    is_view = described.own is not None or described.error is not None
    elsewhere = described.definition if source is None else None
    made_of = described.definition
    expands = made_of is not None and (made_of.explode is not None or made_of.compares_rows)
    broken = described.error is not None
    return TableCard(name, described.rows, computed, is_view, source, elsewhere, broken=broken, expands=expands)


@dataclass(frozen=True)
class Filters:
    """A user's filters on a database.

    Args:
        table: part of a name.
        fresh: a state of tables and views, or ``failed``: with a failed newest job, or failed rows.
        state, dag: of jobs.
        since: only jobs that started in the last ``24h``, ``7d``, ...
        before: only jobs before this one.
    """

    table: str = ""
    fresh: str = ""
    state: str = ""
    dag: str = ""
    since: str = ""
    before: str = ""

    def chooses(self, card: TableCard) -> bool:
        return self.fresh in ("", card.state) or (self.fresh == TROUBLED and card.troubled)

    def query(self, **other: str) -> str:
        """Return the query of a URL with some filters changed."""
        chosen = {name: value for name, value in asdict(replace(self, **other)).items() if value}
        return f"?{urlencode(chosen)}" if chosen else ""


@dataclass(frozen=True)
class DatabaseDetails:
    """The data of a database's page: the filtered cards, and in `states` the counts of all cards, and of troubled ones.

    `missing` is the folder of a local database that does not exist on the API server's machine.
    """

    cards: tuple[TableCard, ...]
    states: Mapping[str, int]
    running: tuple[api.Job, ...]
    listed: JobsPage
    missing: str | None = None
    troubled: int = 0

    @property
    def counting(self) -> bool:
        return COUNTING in self.states

    @property
    def stale(self) -> int:
        """The number of tables and views that are stale, or computed from what is stale."""
        return sum(self.states.get(state, 0) for state in (Freshness.STALE, Freshness.NEVER, STALE_ABOVE))


def read_database(
    opened: VisibleDatabase, filters: Filters, seconds: float, counts: CountCache | None = None
) -> DatabaseDetails:  # fmt: skip
    """Read the tables, views and jobs that the viewer may see, worst first; counts that take longer are left out."""
    newest = list_jobs(opened)
    names = [name for name in opened.database.table_names() if filters.table.lower() in name.lower()]
    listed = newest
    if filters != replace(Filters(), fresh=filters.fresh):
        listed = list_jobs(
            opened, filters.before or None, names, JOBS_A_PAGE, filters.state, filters.dag, filters.since
        )
    cards = read_cards(opened, [name for name in names if opened.may_see(name)], newest.jobs, seconds, counts)
    cards = sorted(_knowing_above(opened, cards, newest.jobs, seconds, counts), key=TableCard.urgency)
    states = Counter(card.state for card in cards)
    chosen = tuple(filter(filters.chooses, cards))
    running = tuple(job for job in newest.jobs if job.open and job.table in names)
    troubled = sum(card.troubled for card in cards)
    return DatabaseDetails(chosen, states, running, listed, opened.missing, troubled)


def _knowing_above(
    opened: VisibleDatabase,
    cards: list[TableCard],
    jobs: Sequence[api.Job],
    seconds: float,
    counts: CountCache | None = None,
) -> list[TableCard]:
    """Add what is stale above each column and view, also in tables that are not among `cards`."""
    known = {card.name: card for card in cards}
    while missing := {card.source for card in known.values() if card.source} - set(known):
        more = read_cards(opened, [name for name in sorted(missing) if opened.may_see(name)], jobs, seconds, counts)
        known |= dict.fromkeys(missing, TableCard("", counting=True)) | {card.name: card for card in more}
    found = find_stale_above([card for card in known.values() if card.name])
    return [replace(card, stale_above=found.get(card.name, {})) for card in cards]


def count_freshness_with_above(opened: VisibleDatabase, location: TableLocation, seconds: float) -> FreshnessView:
    """Count pending rows within a time limit, and say what is stale above columns and views that are up to date."""
    until = time.monotonic() + seconds
    found = count_freshness(opened, location, seconds)
    if found.counting:
        return found
    jobs = [row.job for row in (*found.columns, *found.views) if row.job]
    names = [location.name, *(row.name for row in found.views)]
    left = max(until - time.monotonic(), 0.0)
    cards = _knowing_above(opened, read_cards(opened, names, jobs, left), jobs, left)
    above = {
        name: stale for card in cards for name, stale in card.stale_above.items() if card.is_view or card is cards[0]
    }

    def add(row: ColumnRow) -> ColumnRow:
        fresh = row.standing is not None and row.standing.state == Freshness.UP_TO_DATE
        return replace(row, stale_above=above.get(row.name, "")) if fresh else row

    waits = any(card.counting for card in cards)
    return FreshnessView(tuple(map(add, found.columns)), tuple(map(add, found.views)), waits)


def find_stale_above(cards: Sequence[TableCard]) -> dict[str, dict[str, str]]:
    """Return, by table and by column or view, the name of a stale column or view from which it is computed."""
    above: dict[Key, list[Key]] = {}
    for origin, key in edges_of({card.name: card for card in cards}):
        above.setdefault(key, []).append(origin)
    states = {
        (card.name, *(() if card.is_view else (item.name,))): item.standing.state
        for card in cards
        for item in card.computed
        if item.standing
    }
    found: dict[Key, str] = {}
    try:
        ordered = list(TopologicalSorter(above).static_order())
    except CycleError:
        return {}
    for key in ordered:
        for origin in above.get(key, ()):
            stale = ".".join(origin) if states.get(origin) in (Freshness.STALE, Freshness.NEVER) else found.get(origin)
            if stale:
                found.setdefault(key, stale)
    tables: dict[str, dict[str, str]] = {}
    for key, stale in found.items():
        tables.setdefault(key[0], {})[key[-1]] = stale
    return tables


def read_graph(
    opened: VisibleDatabase, seconds: float, focus: str = "", fold: bool = False
) -> tuple[DatabaseDetails, Graph]:
    """Read a database, and lay out its dependency graph."""
    shown = read_database(opened, Filters(), seconds)
    return shown, draw_graph(shown.cards, focus, fold)


def draw_graph(cards: Sequence[TableCard], focus: str = "", fold: bool = False) -> Graph:
    """Lay out the dependency graph: tables, then columns, then views; tables without dependents are at the bottom.

    Args:
        focus: a table or view: only what it reads and feeds is drawn; by default everything.
        fold: draw a table with its columns as one node, in the most urgent state of its columns.
    """
    edges = set(edges_of({card.name: card for card in cards}))
    nodes = [node for card in cards for node in _nodes(card)]
    if fold:
        edges = {(a[:1], b[:1]) for a, b in edges if a[0] != b[0]}
        states = {card.name: card.state for card in cards}
        nodes = [replace(node, state=states[node.key[0]]) for node in nodes if len(node.key) == 1]
    if focus:
        kept = _linked(focus, edges) | _linked(focus, {(b, a) for a, b in edges})
        nodes = [node for node in nodes if node.key in kept or node.key[0] == focus]
    return lay_out(nodes, sorted(edges))


def _linked(table: str, edges: Iterable[tuple[Key, Key]]) -> set[Key]:
    """Return what is reached by edges from a table, its columns, or a view."""
    after: dict[Key, list[Key]] = {}
    for a, b in edges:
        after.setdefault(a, []).append(b)
    found, ahead = set[Key](), [key for key in after if key[0] == table]
    while ahead:
        new = [key for key in after.get(ahead.pop(), ()) if key not in found]
        found.update(new)
        ahead += new
    return found


def _nodes(card: TableCard) -> Iterator[Node]:
    kind = "view" if card.is_view else "table"
    state = card.state if card.is_view or card.broken else PLAIN
    yield Node((card.name,), state, kind, card.stale_above.get(card.name, "") if card.is_view else "")
    if not card.is_view:
        for column in card.computed:
            yield Node((card.name, column.name), card.state_of(column), "column", card.stale_above.get(column.name, ""))


def edges_of(cards: Mapping[str, TableCard]) -> Iterator[tuple[Key, Key]]:
    """Yield what is computed from what: a table, column or view, and a column or view."""
    computed = {card.name: {item.name for item in card.computed if not card.is_view} for card in cards.values()}

    def origins(table: str, inputs: Sequence[str]) -> Iterator[Key]:
        found: list[Key] = [(table, name) for path in inputs if (name := path.partition(".")[0]) in computed[table]]
        yield from found or [(table,)]

    for card in cards.values():
        for item in card.computed:
            if not card.is_view:
                yield from ((origin, (card.name, item.name)) for origin in origins(card.name, item.inputs))
            elif card.source in cards:
                yield from ((origin, (card.name,)) for origin in origins(str(card.source), item.inputs))
