"""Read tables and views and their newest jobs for the pages, and count what is due in them."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_geneva.database import Database
from airflow_geneva.engine import api
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.results import DONE
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.timeouts import StoreThreads
from airflow_geneva.engine.storage.uri import without_credentials
from airflow_geneva.engine.udf.definition import definition_in, stored_definition
from airflow_geneva.engine.udf.lancedb import lancedb_column, lancedb_view
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError
from airflow_geneva.pages.jobs import JOBS_A_PAGE, list_jobs
from airflow_geneva.pages.visible import VisibleDatabase

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

_T = TypeVar("_T")
_Key = tuple[Hashable, Hashable]

_JOBS_OF_COLUMNS = 25
_AT_ONCE = 2
_MOST_ASKED = 8
_KEPT_SECONDS, _KNOWN_SECONDS = 5.0, 600.0
_KNOWN: ProcessMemo[tuple[object, ...], api.Freshness] = ProcessMemo(1024)
"""Cached counts; the key contains the versions that were read and the newest job, so a change of one ends its use."""
_JOBS_SHOWN, _MOST_READ = 30, 300
_MOST_BARS, _LEAST_BARS = 90, 3
"""Jobs in the history of all columns together, and the fewest of each: of many columns the newest are shown."""
_VERSIONS_SHOWN, _MOST_COUNTS = 50, 100
"""Versions on a page, and the most counts of one column at one version for it."""
_SAMPLED = 200
"""Rows that a comparison of two columns reads."""


class CountCache:
    """Runs counts in a few threads per store, so that a store that hangs blocks no other.

    Results are cached for a few seconds, so that a page that polls for several counts gets each of them. The names of
    counts hold the options of their store: what the credentials of one connection read is not shown for another one.
    """

    def __init__(self, at_once: int = _AT_ONCE, kept_seconds: float = _KEPT_SECONDS) -> None:
        self._kept_seconds = kept_seconds
        self._threads = StoreThreads("geneva-count", at_once)
        self._lock = threading.Lock()
        self._asked: dict[_Key, Future[Any]] = {}
        self._ended: dict[_Key, float] = {}

    def get(self, store: Hashable, name: Hashable, count: Callable[[], _T], until: float) -> _T | None:
        """Return the result of a count, or raise its exception; None if it is not ready in time: then ask again.

        Requests for the same store and name share one thread. `until` is a time of ``time.monotonic``.
        """
        future = self._start((store, name), count)
        if future is None:
            return None
        wait([future], max(until - time.monotonic(), 0.0))
        return future.result() if future.done() else None

    def _start(self, key: _Key, count: Callable[[], _T]) -> Future[_T] | None:
        now = time.monotonic()
        with self._lock:
            for old, ended in list(self._ended.items()):
                if now - ended > self._kept_seconds:
                    del self._ended[old], self._asked[old]
            if key not in self._asked:
                if sum(one[0] == key[0] and one not in self._ended for one in self._asked) >= _MOST_ASKED:
                    # A table that changes constantly gives new keys faster than the counts finish.
                    return None
                self._asked[key] = self._threads.submit(key[0], lambda: self._make(key, count))
            return self._asked[key]

    def _make(self, key: _Key, count: Callable[[], _T]) -> _T:
        try:
            found = count()
        except BaseException:
            with self._lock:
                del self._asked[key]
            raise
        with self._lock:
            self._ended[key] = time.monotonic()
        return found


_COUNTS = CountCache()
_OLD_COUNTS = CountCache(kept_seconds=_KNOWN_SECONDS)
"""Counts at a version, which change with the newest jobs only: kept until those of all versions on a page are made."""


@dataclass(frozen=True)
class ColumnRow:
    """A column or view as a row of a table's page.

    `what` describes its UDF or query; None for plain data. `elsewhere` says that LanceDB computes it. `standing` is its
    freshness; None while it is counted, and for plain data. `error` says why the freshness is unknown. `job` is the
    newest job that the viewer may see. `inputs` are the columns from which it is computed. `since` is the time since
    which it has been stale: None while it is searched, 0 if unknown. `sources` are other databases in which the viewer
    may see the view's source. `stale_above` names a stale column or view from which one that is up to date is computed.
    """

    name: str
    type: str
    what: str | None
    standing: api.Freshness | None = None
    error: str | None = None
    job: api.Job | None = None
    inputs: tuple[str, ...] = ()
    since: float | None = None
    is_view: bool = False
    sources: tuple[str, ...] = ()
    elsewhere: bool = False
    stale_above: str = ""

    @property
    def is_computed(self) -> bool:
        return self.what is not None and not self.elsewhere

    @property
    def running(self) -> bool:
        return self.job is not None and self.job.open

    @property
    def urgent(self) -> bool:
        """Whether it is not up to date, or rows of it failed."""
        state = self.standing and (self.standing.state, self.standing.failed)
        return self.running or bool(self.stale_above) or state != (api.Freshness.UP_TO_DATE, 0)

    @property
    def counting(self) -> bool:
        return self.is_computed and self.error is None and (self.standing is None or self.since is None)


@dataclass(frozen=True)
class TableDetails:
    """The data of a table's or view's page, without the system columns of a view.

    `definition` is the query of a view of this package, `own` the row of the view itself, and `error` what is wrong
    with it. `note` says that LanceDB maintains the table as a view.
    """

    name: str
    version: int
    rows: int
    fragments: int
    columns: tuple[ColumnRow, ...]
    dataset: lance.LanceDataset = field(repr=False)
    definition: api.ViewDefinition | None = None
    own: ColumnRow | None = None
    error: str | None = None
    note: str | None = None

    @property
    def computed(self) -> tuple[ColumnRow, ...]:
        """The view itself, or the computed columns of a table."""
        return (self.own,) if self.own else tuple(column for column in self.columns if column.is_computed)

    @cached_property
    def indexes(self) -> list[api.Index]:
        return api.Index.read(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "dataset": None}  # of this process only

    def source_in(self, database: Database) -> str | None:
        made_of = self.definition
        if made_of is None or made_of.source_database != without_credentials(database.uri):
            return None
        return made_of.source_table


def describe_table(location: TableLocation) -> TableDetails:
    """Describe a table from its manifest; unlike pylance, tell a missing table from a store that does not answer."""
    name = location.name
    try:
        dataset = location.open()
    except InvalidInput as error:
        if not location.exists():
            raise InvalidInput(f"There is no table {name!r} at {location.uri}.") from None
        raise StorageError(str(error)) from error
    described = partial(
        TableDetails,
        name=name,
        version=int(dataset.version),
        rows=int(dataset.count_rows()),
        fragments=int(dataset.stats.dataset_stats()["num_fragments"]),
        dataset=dataset,
    )
    schema = dataset.schema  # pylance makes it anew each time
    if not api.is_view(schema.metadata):
        query = lancedb_view(schema.metadata)
        note = None if query is None else f"A materialized view that LanceDB maintains: {query}"
        return described(columns=tuple(map(_column, schema)), note=note)
    kept = [schema.field(name) for name in api.visible_columns(schema)]
    try:
        definition = api.ViewDefinition.read(schema.metadata, name)
    except GenevaError as error:
        plain = tuple(ColumnRow(part.name, str(part.type), None) for part in kept)
        return described(columns=plain, error=str(error))
    said = {column.name: column.describe() for column in definition.columns}
    columns = tuple(ColumnRow(part.name, str(part.type), said.get(part.name)) for part in kept)
    return described(columns=columns, definition=definition, own=_view_row(name, definition))


def describe_whole_table(location: TableLocation) -> TableDetails:
    """Describe a table with its indexes."""
    described = describe_table(location)
    _ = described.indexes
    return described


def _column(found: pa.Field) -> ColumnRow:
    name, kind = found.name, str(found.type)
    try:
        definition = definition_in(found)
    except GenevaError as error:
        return ColumnRow(name, kind, "a UDF", error=str(error))
    if definition is None:
        how = lancedb_column(found)
        return ColumnRow(name, kind, None if how is None else f"LanceDB: {how}", elsewhere=how is not None)
    inputs = definition.input_columns or ()
    made_by = definition.function_name
    return ColumnRow(name, kind, f"{made_by} (version {definition.version}) of {', '.join(inputs)}", inputs=inputs)


def _view_row(name: str, definition: api.ViewDefinition) -> ColumnRow:
    return ColumnRow(
        name, "", _query(definition), inputs=tuple(column.name for column in definition.source_reads), is_view=True
    )


def _query(definition: api.ViewDefinition) -> str:
    if definition.grouping is not None:
        names = ", ".join(column.name for column in definition.columns)
        return f"{names} of {definition.source_table}: {definition.grouping}"
    where = f" where {definition.where}" if definition.where else ""
    limit = f" limit {definition.limit}" if definition.limit is not None else ""
    names = ", ".join(column.name for column in definition.columns)
    without = f" without duplicates ({definition.deduplicate})" if definition.deduplicate else ""
    return f"{names} of {definition.source_table}{where}{without}{limit}"


@dataclass(frozen=True)
class FreshnessView:
    columns: tuple[ColumnRow, ...]
    views: tuple[ColumnRow, ...]
    counting: bool


def count_freshness(opened: VisibleDatabase, location: TableLocation, seconds: float) -> FreshnessView:
    """Count pending rows within a time limit; ask again for unfinished counts."""
    until = time.monotonic() + seconds
    described = describe_table(location)
    newest = _newest_jobs(opened, location.name, _JOBS_OF_COLUMNS)
    sources = opened.sources_of(described.definition)
    computed = [replace(item, job=newest.get(item.name), sources=sources) for item in described.computed]
    shown = [_with_count(location, described.version, item, until, described.dataset) for item in computed]
    views = _views_of(opened, location, described.version, until)
    if opened.place is None:  # an error may contain the URI
        shown, views = _without_errors(shown), views and _without_errors(views)
    whole = views is not None and not any(item.counting for item in (*shown, *views))
    return FreshnessView(tuple(shown), tuple(views or ()), not whole)


def _without_errors(items: list[ColumnRow]) -> list[ColumnRow]:
    return [replace(item, error="It cannot be read.") if item.error else item for item in items]


def _with_count(
    location: TableLocation, version: int, item: ColumnRow, until: float, opened: lance.LanceDataset | None = None
) -> ColumnRow:  # fmt: skip
    """Count the pending rows of a column or view and, if it is stale, find out since when."""
    if item.error:
        return item
    name = (location.name, version, item.name, item.sources)
    counted = _counted(item, location, name, lambda: freshness(location, item, opened=copy.copy(opened)), until)
    if counted.standing is None or counted.error:
        return counted
    if counted.standing.state != api.Freshness.STALE or item.job is None or item.running:
        return replace(counted, since=0.0)
    try:
        asked = (*name, "since", item.job.id)
        since = _COUNTS.get(location.database_uri, asked, lambda: stale_since(location, counted), until)
    except BaseException as error:
        if not is_failure(error):
            raise
        since = 0.0  # an old version was cleaned up
    return replace(counted, since=since)


def freshness(
    location: TableLocation, item: ColumnRow, version: int | None = None, opened: lance.LanceDataset | None = None
) -> api.Freshness:
    """Count the rows of a column, or of a view, at a version of its table, or of its source; by default the newest.

    A count of the same versions and the same newest job is reused if it is less than ten minutes old.
    """
    asked = _asked(location, item, version, opened)
    job = item.job and (item.job.id, item.job.state, item.job.ended)
    key = asked.key, item.name, job, int(time.monotonic() / _KNOWN_SECONDS)
    found = _KNOWN.get(key) or asked.count()
    _KNOWN[key] = found
    return found


def _asked(
    location: TableLocation, item: ColumnRow, version: int | None, opened: lance.LanceDataset | None
) -> api.FreshnessCount:
    if item.is_view:
        return api.FreshnessCount.of_view(location, item.sources, version, opened)
    return api.FreshnessCount.of_column(location, item.name, version, opened)


def stale_since(location: TableLocation, item: ColumnRow) -> float:
    """Return when a stale column or view became so after its newest job; 0 if that job left it stale.

    Once stale, it stays so until the next job, so the first such version is found by bisection.
    """
    job, opened = item.job, location.open()
    if job is None or job.state != DONE or job.rows_left:
        return 0.0
    newest = _asked(location, item, None, opened)
    first = job.version if item.is_view else max(job.commits, default=job.version)
    last = newest.version
    while first < last:
        middle = (first + last) // 2
        if freshness(location, item, middle, opened).state == api.Freshness.UP_TO_DATE:
            first = middle + 1
        else:
            last = middle
    return newest.written(last)


def _counted(
    item: ColumnRow, location: TableLocation, name: tuple[object, ...], count: Callable[[], api.Freshness], until: float
) -> ColumnRow:
    try:
        return replace(item, standing=_COUNTS.get(location.database_uri, name, count, until))
    except BaseException as error:
        if not is_failure(error):
            raise
        return replace(item, error=str(error) or type(error).__name__)


def _views_of(opened: VisibleDatabase, location: TableLocation, version: int, until: float) -> list[ColumnRow] | None:
    """Return the views of a table; None until the search of the database has finished."""
    found = _COUNTS.get(location.database_uri, (location, "views"), lambda: _find_views(location), until)
    if found is None:
        return None
    visible = [name for name in opened.tables() if name in found]
    rows = [replace(found[name], job=_newest_jobs(opened, name, 1).get(name)) for name in visible]
    return [_with_count(opened.database.location(view.name), version, view, until) for view in rows]


def _find_views(source: TableLocation) -> dict[str, ColumnRow]:
    return {name: _view_row(name, definition) for name, (_, definition) in api.find_views(source).items()}


def _newest_jobs(opened: VisibleDatabase, table: str, most: int) -> Mapping[str, api.Job]:
    newest: dict[str, api.Job] = {}
    for job in list_jobs(opened, names=[table], most=most).jobs:
        for name in job.columns or (job.view or "",):
            newest.setdefault(name, job)
    return newest


def compare(opened: VisibleDatabase, name: str, first: str, second: str, seconds: float) -> str | None:
    """Compare two columns of a table on a sample of rows, without showing values; None after `seconds`.

    Raises:
        InvalidInput: there is no such table or column, or the columns cannot be compared.
    """
    table, until = opened.database.open_table(name), time.monotonic() + seconds
    if unknown := {first, second}.difference(table.schema.names):  # any other text would be used as an import path
        raise InvalidInput(f"Table {name!r} has no columns {sorted(unknown)}.")

    def count() -> str:
        return table.compare(first, second, sample=_SAMPLED).without_values()

    asked = (opened.database, name, table.version, first, second, "compare")
    return _COUNTS.get(opened.database.uri, asked, count, until)


@dataclass(frozen=True)
class TableVersion:
    """A version of a table or view, and what wrote it.

    `rows` is the number of rows that it added, or that a job made visible with it. `due` is the number of rows that
    were due after it, in all computed columns together; None if it is not known. `job` is None if no job wrote it, if
    the record is deleted, or if the viewer may not see it.
    """

    number: int
    written: float
    operation: str
    columns: tuple[str, ...]
    rows: int | None
    job: api.Job | None
    due: int | None


@dataclass(frozen=True)
class VersionList:
    """The newest versions of a table or view, newest first; `counting`: some numbers of due rows will be known soon."""

    versions: tuple[TableVersion, ...]
    counting: bool


def read_versions(opened: VisibleDatabase, location: TableLocation, seconds: float) -> VersionList:
    """List the newest versions of a table, and count the rows that were due after each within a time limit.

    At most 100 counts are made: of a table with many computed columns, for its newest versions only. After a swap of a
    view, the rows were due that its job left.
    """
    until = time.monotonic() + seconds
    described = describe_table(location)
    dataset, name = described.dataset, (location, described.version, "versions")
    history = _COUNTS.get(location.database_uri, name, lambda: api.table_history(dataset, _VERSIONS_SHOWN), until)
    if history is None:
        return VersionList((), counting=True)
    jobs = {job.id: job for job in list_jobs(opened, names=[location.name], most=_VERSIONS_SHOWN).jobs}
    newest = {column: job for job in reversed(jobs.values()) for column in job.columns}
    readable = [] if described.own else [item for item in described.computed if not item.error]
    computed = [replace(item, job=newest.get(item.name)) for item in readable]
    counted = _MOST_COUNTS // len(computed) if computed else 0
    shown = {column.name for column in described.columns}
    versions, counting = list[TableVersion](), False
    for at, row in enumerate(history.to_pylist()):
        number, job = row["version"], jobs.get(row["job_id"])
        due: int | None = None
        if described.own:
            due = job.rows_left if job else None
        elif at < counted:
            of = tuple((item.name, item.job and (item.job.id, item.job.state)) for item in computed)
            key = location, number, row["time"], of
            count = partial(_due_after, location, number, computed, dataset)
            try:
                due = _OLD_COUNTS.get(location.database_uri, key, count, until)
                counting |= due is None
            except BaseException as error:
                if not is_failure(error):
                    raise  # else the version was cleaned up
        columns = tuple(column for column in row["columns"] if column in shown)
        written = row["time"].timestamp()
        versions.append(TableVersion(number, written, row["operation"] or "", columns, row["rows"], job, due))
    return VersionList(tuple(versions), counting)


def _due_after(location: TableLocation, version: int, computed: list[ColumnRow], opened: lance.LanceDataset) -> int:
    """Count the rows that are due in columns at a version; none in a column that was not defined then."""
    schema = api.open_version(copy.copy(opened), version).schema
    there = [item for item in computed if item.name in schema.names and stored_definition(schema, item.name)]
    return sum(freshness(location, item, version, copy.copy(opened)).pending for item in there)


@dataclass(frozen=True)
class JobHistory:
    """The newest ended jobs of a column or view, oldest first."""

    name: str
    jobs: tuple[api.Job, ...]

    @property
    def charts(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        return (
            ("due", tuple(job.rows_pending for job in self.jobs)),
            ("rows", tuple(job.rows_computed for job in self.jobs)),
            ("seconds", tuple(job.took for job in self.jobs)),
            ("failed", tuple(job.rows_failed for job in self.jobs)),
            *(
                [("cost", tuple(round(job.cost or 0.0, 4) for job in self.jobs))]
                if any(job.cost for job in self.jobs)
                else []
            ),
        )


def read_histories(opened: VisibleDatabase, location: TableLocation) -> list[JobHistory]:
    """Read the newest jobs of a table's columns, or of a view, that the viewer may see, until each has enough."""
    names = [item.name for item in describe_table(location).computed]
    each = min(max(_MOST_BARS // max(len(names), 1), _LEAST_BARS), _JOBS_SHOWN)
    most = min(_JOBS_SHOWN * max(len(names), 1), _MOST_READ)
    found, newest, older = dict[str, list[api.Job]](), list[str](), None
    for read in range(0, most, JOBS_A_PAGE):
        page = list_jobs(opened, older, [location.name], min(JOBS_A_PAGE, most - read))
        for job in page.jobs:
            for name in job.columns or (job.view or "",):
                if name in names and not job.open:
                    found.setdefault(name, []).append(job)
        newest, older = list(found)[: _MOST_BARS // _LEAST_BARS], page.older
        whole = len(newest) == min(len(names), _MOST_BARS // _LEAST_BARS)
        if older is None or (whole and all(len(found[name]) >= each for name in newest)):
            break
    return [JobHistory(name, tuple(found[name][:each][::-1])) for name in names if name in newest]
