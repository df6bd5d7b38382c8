"""Count how many rows of a column or a view are up to date, and list the failed rows, without loading its code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from airflow_geneva.engine.checkpoint.facts import fields_with_state, load_state
from airflow_geneva.engine.checkpoint.provenance import MOST_RUNS, Provenance, by_code_version, failed_rows, rows_that
from airflow_geneva.engine.checkpoint.view_snapshot import Origin, Snapshot
from airflow_geneva.engine.job.error_records import ErrorRecord, read_errors
from airflow_geneva.engine.lance_io.fragments import (
    FragmentFiles,
    TableFields,
    garbage_collector_off,
    live_offsets,
    output_ids,
    row_ids,
)
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.lance_io.table_versions import open_version
from airflow_geneva.engine.plan.computed_rows import ComputedRows
from airflow_geneva.engine.plan.due_columns import Decisions, DueColumns
from airflow_geneva.engine.plan.refresh import choose_rows, columns_then, compare_source
from airflow_geneva.engine.plan.shared_files import computed_from_current_inputs
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.definition import definition_in, former_names, read_definition
from airflow_geneva.engine.views.definition import ViewDefinition, view_columns
from airflow_geneva.engine.views.group_tables import BEGUN, TOUCHED_GROUPS, UNKNOWN, GroupTables
from airflow_geneva.engine.views.hidden import clusters_store, read_touched
from airflow_geneva.engine.views.sources import locate_source
from airflow_geneva.engine.views.state import CommittedViewState

if TYPE_CHECKING:
    import lance
    import pyarrow as pa


@dataclass(frozen=True)
class Freshness:
    """How fresh a column or a view is; values of every code version count as computed.

    `pending` rows are new or changed, or failed and run again. `failed` rows hold no value; the `given_up` ones among
    them failed in the maximum number of runs. `versions`: number of a column's rows with a value, by code version.
    `touched`: which groups, or clusters of duplicates, the newest change touched, and which is the largest.
    """

    UP_TO_DATE: ClassVar[str] = "up to date"
    STALE: ClassVar[str] = "stale"
    NEVER: ClassVar[str] = "never computed"

    rows: int
    pending: int
    gone: int = 0
    failed: int = 0
    given_up: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)
    computed: bool = True
    touched: str = ""

    @property
    def state(self) -> str:
        """``up to date``, ``stale`` or ``never computed``."""
        if self.pending or self.gone:
            return self.STALE if self.computed else self.NEVER
        return self.UP_TO_DATE


def column_freshness(
    dataset: lance.LanceDataset, checkpoints: Storage, inputs: Sequence[str], column: str
) -> Freshness:  # fmt: skip
    """Count a column's rows; values of every code version count as computed."""
    with garbage_collector_off():
        computed_rows = computed_from_current_inputs(dataset, checkpoints, inputs, column)
        counts, versions = Counter(rows=0, pending=0, failed=0, given_up=0), Counter[str]()
        for files in computed_rows.manifest.values():
            found = _whole(files, computed_rows) or _rows(dataset, files, computed_rows)
            counts.update({name: getattr(found, name) for name in counts})
            versions.update(found.versions)
    computed = bool(versions or counts["failed"])
    failed, given_up = counts["failed"], counts["given_up"]
    return Freshness(counts["rows"], counts["pending"], 0, failed, given_up, dict(versions), computed)


def _whole(files: FragmentFiles, computed_rows: ComputedRows) -> Freshness | None:
    """Count a fragment that one code version completed, from facts alone; None if there is no such fact."""
    if not files.live_rows or not files.output:
        return Freshness(files.live_rows, files.live_rows)
    for made in computed_rows.state.of_all_rows(files.signature, files.deletion):
        if not made.failures:
            given_up = computed_rows.given_up(files, made.version)
            done = files.live_rows - given_up
            return Freshness(files.live_rows, 0, 0, given_up, given_up, {made.maker: done} if done else {})
    return None


def _rows(dataset: lance.LanceDataset, files: FragmentFiles, computed_rows: ComputedRows) -> Freshness:
    live = live_offsets(dataset, files)
    known = computed_rows.resolve(files, live)
    made = by_code_version(known, live)
    failed = (failed_rows(known) & live) - Ranges.union(made.values())
    given_up = failed & rows_that(known, lambda provenance: provenance.failures >= MOST_RUNS)
    pending = live - Ranges.union(made.values()) - given_up
    return Freshness(
        len(live), len(pending), 0, len(failed), len(given_up), {maker: len(rows) for maker, rows in made.items()}
    )


def computed_offsets(
    dataset: lance.LanceDataset, checkpoints: Storage, inputs: Sequence[str], column: str
) -> Iterator[tuple[FragmentFiles, Ranges]]:
    """Yield the fragments of a column with the live rows that hold a computed value."""
    computed_rows = computed_from_current_inputs(dataset, checkpoints, inputs, column)
    for files in computed_rows.manifest.values():
        live = live_offsets(dataset, files)
        yield files, Ranges.union(by_code_version(computed_rows.resolve(files, live), live).values())


def view_freshness(
    dataset: lance.LanceDataset,
    definition: ViewDefinition,
    view_state: CommittedViewState,
    instead: Mapping[str, str] | None = None,
) -> Freshness:
    """Count a view's rows.

    Args:
        instead: source columns to read in place of others, by the name of the replaced column; by default none.
    """
    definition.check_source(dataset)
    snapshot = view_state.snapshot
    computed = bool(view_state.newest.identity)
    rows = dataset.count_rows()
    names = tuple((instead or {}).get(column.name, column.name) for column in definition.reads)
    with garbage_collector_off():
        due = DueColumns.unchanged(definition.columns, dict(snapshot.code) if snapshot else {})
        decide = Decisions(due, lambda: view_state.shown, definition.explode)
        changes = compare_source(dataset, names, snapshot, decide, instead)
        chosen, gone, _ = choose_rows(dataset, definition, changes, snapshot, view_state)
    leaving = Ranges.empty()
    if snapshot is not None and gone:
        # Only rows that the view shows can leave it; the query did not select the others before.
        leaving = gone & view_state.shown - Ranges.union(item.ids_of(item.rows) for item in chosen)
    again = sum(len(offsets & fragment.rows) for fragment in changes.changed for _, offsets in fragment.tried)
    return Freshness(
        rows=rows,
        pending=sum(len(item.rows) for item in chosen),
        gone=len(leaving),
        failed=changes.given_up + again,
        given_up=changes.given_up,
        computed=computed,
    )


def groups_freshness(
    source: lance.LanceDataset, definition: ViewDefinition, shown: CommittedViewState, hidden: GroupTables
) -> Freshness:
    """Count the rows of the source that groups lack or must lose, and the groups that the view lacks or must lose."""
    lost = hidden.state_for(definition, shown.snapshot) == UNKNOWN
    if lost or hidden.rows is None or hidden.groups is None or hidden.shown is None:
        rows, pending = source.count_rows(), source.count_rows(definition.source_where)
        gone = 0 if pending or not lost else len(shown.shown)
        return Freshness(rows, pending, gone, computed=lost and bool(shown.newest.identity))
    # Columns may have been added to the view since its table `rows` was made.
    rows_of = replace(ViewDefinition.read(hidden.rows.schema.metadata), reads=definition.source_reads)
    of_rows = view_freshness(source, rows_of, hidden.shown)
    of_groups = view_freshness(hidden.groups, definition, shown)
    begun = hidden.state == BEGUN or hidden.source_version is None
    if begun and (of_rows.pending or of_rows.gone):
        # These are the rows whose groups the view lacks.
        return replace(of_groups, rows=of_rows.rows, pending=of_rows.pending, gone=of_rows.gone)
    return replace(
        of_groups,
        rows=of_rows.rows,
        pending=of_rows.pending + of_groups.pending,
        gone=of_rows.gone + of_groups.gone,
        touched="" if hidden.commit is None else f"{TOUCHED_GROUPS}{hidden.commit.told}",
    )


@dataclass(frozen=True)
class FreshnessCount:
    """What is read to count the rows of a column, or of a view, and the count itself.

    Args:
        read: the version of the table; of a view, its newest version, and the version of its source; of a view of
            groups, those of its hidden tables between them.
    """

    read: tuple[lance.LanceDataset, ...]
    count: Callable[[], Freshness]

    @staticmethod
    def of_column(
        table: TableLocation, column: str, version: int | None = None, opened: lance.LanceDataset | None = None
    ) -> FreshnessCount:
        """Prepare to count the rows of a column at a version of its table, by default the newest.

        Args:
            opened: the newest version, if the caller has opened it.

        Raises:
            InvalidInput: there is no such version, or the column is not a computed one.
        """
        dataset = _at(table.open() if opened is None else opened, version)
        inputs = read_definition(table.name, dataset.schema, column).input_columns or ()
        return FreshnessCount((dataset,), partial(column_freshness, dataset, table.checkpoints, inputs, column))

    @staticmethod
    def of_view(
        view: TableLocation,
        sources: Iterable[str] = (),
        version: int | None = None,
        opened: lance.LanceDataset | None = None,
    ) -> FreshnessCount:
        """Prepare to count the rows of a view at a version of its source, by default the newest.

        Args:
            sources: the databases in which its source may lie, beside its own.
            opened: the view's newest version, if the caller has opened it.

        Raises:
            InvalidInput: there is no such version, or the source cannot be opened.
        """
        dataset = view.open() if opened is None else opened
        definition = ViewDefinition.read(dataset.schema.metadata, view.name)
        source = _at(locate_source(view, definition, sources).open(), version)
        show = partial(CommittedViewState, view, dataset)  # which makes a request
        if definition.deduplicate is not None:
            told = partial(read_touched, clusters_store(view))
            count = lambda: replace(view_freshness(source, definition, show()), touched=told())  # noqa: E731
            return FreshnessCount((dataset, source), count)
        if definition.grouping is None:
            return FreshnessCount((dataset, source), lambda: view_freshness(source, definition, show()))
        hidden = GroupTables.open(view)
        read = [one for one in (hidden.rows, hidden.groups) if one is not None]
        return FreshnessCount((dataset, *read, source), lambda: groups_freshness(source, definition, show(), hidden))

    @property
    def key(self) -> tuple[tuple[str, int, int], ...]:
        """What was read; another count of the same is equal until a job has run."""
        return tuple((one.uri, int(one.version), written_at(one)) for one in self.read)

    @property
    def version(self) -> int:
        """The version of the table, or of the view's source."""
        return int(self.read[-1].version)

    def written(self, version: int) -> float:
        """Return when a version of the table, or of the view's source, was written, in seconds since the epoch."""
        return written_at(open_version(self.read[-1], version)) / 1e9


def _at(dataset: lance.LanceDataset, version: int | None) -> lance.LanceDataset:
    return dataset if version is None else open_version(dataset, version)


FailedRows: TypeAlias = Iterator[tuple[int, Ranges]]
"""Fragments with rows whose last UDF call failed, and the physical offsets of these rows."""


def addresses_of_rows(failed: FailedRows) -> Iterator[int]:
    return (fragment << 32 | offset for fragment, rows in failed for offset in rows.offsets().tolist())


def ids_of_rows(dataset: lance.LanceDataset, failed: FailedRows) -> set[int]:
    found: set[int] = set()
    for fragment, rows in failed:
        offsets, ids = row_ids(dataset, fragment)
        found.update(ids[rows.mask(offsets)].tolist())
    return found


def failed_rows_of_columns(dataset: lance.LanceDataset, checkpoints: Storage, columns: Sequence[str]) -> FailedRows:
    """Yield the rows of a table version for which the last UDF call of one of these columns failed."""
    fields = TableFields(dataset)
    outputs = [output_ids(dataset, output, fields) for output in Output.all_of(dataset, columns)]
    known = fields_with_state(checkpoints) if len(outputs) > 1 else {output[0] for output in outputs}
    for output in outputs:
        if output[0] not in known:
            continue
        state = load_state(checkpoints, output[0])
        for inputs in sorted(state.other_inputs("")):
            yield from _failed(dataset, ComputedRows.from_inputs(dataset, output, state, inputs, fields))


def failed_rows_of_source(
    dataset: lance.LanceDataset, reads: Sequence[str], snapshot: Snapshot, column: str | None
) -> FailedRows:
    """Yield the rows of a version of a view's source for which the last UDF call of a column of the view failed.

    Args:
        column: the column with the UDF, or None for any.
    """
    columns, names = columns_then(dataset, tuple(reads), snapshot)
    state = snapshot.state(columns.inputs_text)

    def holds(provenance: Provenance) -> bool:
        return column is None or column in dict(Origin.of(provenance).failed)

    yield from _failed(dataset, ComputedRows(dataset, columns, names, state), holds)


def _failed(
    dataset: lance.LanceDataset, computed_rows: ComputedRows, holds: Callable[[Provenance], bool] = lambda _: True
) -> FailedRows:
    for files in computed_rows.manifest.values():
        live = live_offsets(dataset, files)
        # The facts about a fragment name all rows in it that failed.
        facts = files.signature in computed_rows.state.facts
        known = computed_rows.of(files) if facts else computed_rows.resolve(files, live)
        if failed := rows_that(known, lambda provenance: provenance.failures > 0 and holds(provenance)) & live:
            yield files.id, failed


def errors_of_columns(
    checkpoints: Storage, schema: pa.Schema, job_id: str | None, column: str | None
) -> list[ErrorRecord]:
    """Read the error records of a job and a column, newest first, including records under the column's former names.

    If several columns have had a name, the function in a record decides to which of them it belongs.
    """
    of = {field.name: udf for field in schema if (udf := definition_in(field)) is not None}
    of |= {column.name: column.udf for column in view_columns(schema) if column.udf}
    owners: dict[str, list[str]] = {}
    for name in of:
        for called in (name, *former_names(schema, name)):
            owners.setdefault(called, []).append(name)

    # A record names the first of the columns that one call filled, which may have been dropped.
    heirs: dict[str, str] = {}
    for name in of:
        if (output := Output.in_schema(schema, name)).fields:
            heirs.setdefault(of[name].name, output.column)

    def now(record: ErrorRecord) -> str:
        there = owners.get(record.column, [])
        alike = [name for name in there if of[name].name == record.udf] if len(there) > 1 else there
        return (alike or [record.column if record.column in schema.names else heirs.get(record.udf, record.column)])[0]

    siblings = () if column is None else Output.in_schema(schema, column).columns
    found = read_errors(checkpoints, job_id, None if column in of else column)
    named = [replace(record, column=now(record)) for record in found]
    return [record for record in named if column is None or record.column in siblings]
