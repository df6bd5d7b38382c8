"""Promote a column in one Lance commit: it gets the name of a live column, which stays under another name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.checkpoint.provenance import MOST_RUNS
from airflow_geneva.engine.display import Described, counted
from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.engine.lance_io.conflicts import commit_tries, is_undecided
from airflow_geneva.engine.lance_io.fragments import ids_by_name, metadata_by_id
from airflow_geneva.engine.lance_io.history import commits_newest_first, read_commit
from airflow_geneva.engine.lance_io.indexes import Index
from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.lance_io.schemas import changed_schema
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.plan.freshness import Freshness, column_freshness, view_freshness
from airflow_geneva.engine.results import Checked
from airflow_geneva.engine.run.expectations import StoredValues
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.definition import (
    FORMER_NAMES_KEY,
    Promoted,
    check_column_name,
    names_before,
    promoted_metadata,
    readers_of,
    renamed_inputs,
    stored_definition,
)
from airflow_geneva.engine.udf.expect import FAIL
from airflow_geneva.engine.views.definition import (
    IS_SET,
    QUERY_KEY,
    OutputColumn,
    ViewDefinition,
    is_view,
    view_columns,
)
from airflow_geneva.engine.views.sources import find_views
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.errors import CommitConflict, GenevaError, InvalidInput, StorageError

if TYPE_CHECKING:
    import lance
    import pyarrow as pa
    from lance.schema import LanceSchema

logger = logging.getLogger("airflow_geneva.run")
_MOST_JOBS = 1_000
"""The number of newest jobs that are searched for running ones."""
PROMOTION_PROPERTY = "geneva.promotion"
"""Transaction property of a promotion: the promoted column, its new name, and the new name of the live column."""
_VERIFIED_AT = "geneva.promotion.verified_at"
"""The version that was verified: Lance records another one as read if it rebases the commit."""
_MOST_VERSIONS, _COMMITS_AT_ONCE = 100, 8
"""The number of newest versions that are searched for the commit of a promotion that died right after it."""


@dataclass(frozen=True)
class Promotion:
    """A request to promote a column.

    Args:
        column: the candidate.
        to: the name of the live column, which the candidate gets.
        keep_as: the new name of the live column.
        require_complete: refuse a candidate with due rows.
        require_index: refuse a candidate whose indexes cover less than those of the live column.
    """

    column: str
    to: str
    keep_as: str
    require_complete: bool = True
    require_index: bool = True

    def check(self, table: str, schema: pa.Schema) -> None:
        for name in ("column", "to", "keep_as"):
            check_column_name(getattr(self, name))
        for name in ("require_complete", "require_index"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidInput(f"{name}={value!r} is not valid: give True or False.")
        if len({self.column, self.to, self.keep_as}) < 3:
            raise InvalidInput(
                f"promote_column({self.column!r}, to={self.to!r}, keep_as={self.keep_as!r}) needs three names. With "
                "two of them equal, a task that Airflow tries again after a kill could undo what its first try did."
            )
        view = [one.name for one in view_columns(schema)]
        check_columns(table, view or schema.names, [self.column, self.to])
        if self.keep_as in schema.names:
            drop = "" if view else f", or drop that column first: table.drop_columns([{self.keep_as!r}])"
            raise InvalidInput(
                f"Column {self.to!r} of table {table!r} cannot be kept as {self.keep_as!r}: there is such a column. "
                f"Choose another name{drop}."
            )

    @property
    def said(self) -> str:
        """The value of `PROMOTION_PROPERTY`."""
        return f"{self.column}, {self.to}, {self.keep_as}"

    def is_done(self, dataset: lance.LanceDataset) -> bool:
        """Whether an earlier attempt made the promotion, and no other promotion to the name followed."""
        names = dataset.schema.names
        promoted = Promoted.of(dataset.schema.field(self.to)) if self.to in names else None
        if promoted is None or self.column in names or self.keep_as not in names:
            return False
        return (promoted.column, promoted.kept_as) == (self.column, self.keep_as)

    def _verified_at(self, dataset: lance.LanceDataset) -> int:
        """Return the version that was verified for the promotion.

        Return the newest one if the commit is not found, or if the schema changed since, for that says what is wanted.
        """
        import lance

        made, newest = lance.LanceOperation, int(dataset.version)
        for commit in commits_newest_first(dataset, newest, max(newest - _MOST_VERSIONS, 0) + 1, _COMMITS_AT_ONCE):
            if commit.properties.get(PROMOTION_PROPERTY) == self.said:
                return int(commit.properties.get(_VERIFIED_AT, newest))
            if isinstance(commit.operation, (made.Project, made.Merge, made.Overwrite, made.Restore)):
                break
        return newest

    def plan(self, location: TableLocation) -> PromotionPlan:
        """Check whether the column can be promoted, and count the rows that this makes due; write nothing."""
        dataset = location.open()
        self.check(location.name, dataset.schema)
        return _Verifier(location, self).plan(dataset)

    def run(self, location: TableLocation) -> Promoting:
        """Promote the column if it is ready at the newest version; see `Table.promote_column`."""
        location = location.patient()
        verifier, plan = _Verifier(location, self), None
        for _ in commit_tries(f"table {location.name!r}", f"promote column {self.column!r}"):
            dataset = location.open()
            if self.is_done(dataset):
                # An outage hid the outcome of this process's own commit, or one before it may have died right after it.
                verified = self._verified_at(dataset) if plan is None else plan.version
                _repeat_metadata(location, dataset, range(verified + 1, int(dataset.version) + 1))
                return Promoting(location.name, self, int(dataset.version), plan)
            self.check(location.name, dataset.schema)
            plan = verifier.plan(dataset)
            plan.check()
            if committed := _commit(location, dataset, self):
                return Promoting(location.name, self, committed, plan)
        raise AssertionError("commit_tries raises after the last try")

    def __str__(self) -> str:
        return f"{self.column!r} to {self.to!r}, with the column before it kept as {self.keep_as!r}"


@dataclass(frozen=True)
class DueAfter:
    """A column or view that reads the promoted name, and its rows that are due after the promotion.

    Args:
        rows: number of due rows after the promotion; an upper bound if `at_most`.
        before: number of these rows that are due without the promotion.
        error: why the number is unknown.
    """

    kind: str
    name: str
    rows: int
    before: int = 0
    at_most: bool = False
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"{self.kind} {self.name!r}: not known ({self.error})"
        at_most = "at most " if self.at_most else ""
        now = f", {self.before:,} of them already" if self.before else ""
        return f"{self.kind} {self.name!r}: {at_most}{counted(self.rows, 'row')} due{now}"


@dataclass(frozen=True)
class Candidate:
    """The properties of a column at one version that matter for a promotion.

    Args:
        call: how it is computed; "" for a column of plain values.
        freshness: of a computed column.
    """

    name: str
    call: str
    rows: int
    freshness: Freshness | None
    indexes: tuple[Index, ...]

    @staticmethod
    def of(location: TableLocation, dataset: lance.LanceDataset, name: str) -> Candidate:
        definition = stored_definition(dataset.schema, name)
        found = None
        if definition is not None:
            found = column_freshness(dataset, location.checkpoints, definition.input_columns or (), name)
        indexes = tuple(Index.read(dataset, ids_by_name(dataset)[name][0]))
        rows = int(dataset.count_rows()) if found is None else found.rows
        return Candidate(name, "" if definition is None else definition.call, rows, found, indexes)

    @staticmethod
    def of_view(dataset: lance.LanceDataset, column: OutputColumn) -> Candidate:
        """Look at a column of a view, all of whose columns have values of the same source rows."""
        indexes = tuple(Index.read(dataset, ids_by_name(dataset)[column.name][0]))
        return Candidate(column.name, column.origin, int(dataset.count_rows(IS_SET)), None, indexes)

    @property
    def rows_due(self) -> int:
        return 0 if self.freshness is None else self.freshness.pending

    @property
    def rows_failed(self) -> int:
        """Rows without a value because the function failed on them."""
        return 0 if self.freshness is None else self.freshness.failed

    def lacks(self, live: Candidate) -> Iterator[str]:
        """Describe each index of a live column that covers more rows than any similar index of this column."""
        for index in live.indexes:
            alike = [one for one in self.indexes if _alike(one, index)]
            best = max(alike, key=lambda one: one.rows, default=None)
            if best is None:
                yield f"{index.kind} index {index.name!r} covers {live.name!r}, and none covers {self.name!r}"
            elif best.rows < index.rows:
                yield (
                    f"index {best.name!r} covers {counted(best.rows, 'row')} of {self.name!r}, and {index.name!r} "
                    f"{counted(index.rows, 'row')} of {live.name!r}"
                )

    def __str__(self) -> str:
        parts = [counted(self.rows, "row")]
        if self.freshness is not None:
            parts += [f"{self.rows_due:,} due", f"{self.rows_failed:,} failed"]
        parts += [f"index {one.name!r} ({one.kind}) covers {one.rows:,}" for one in self.indexes]
        return f"{self.name!r}: {', '.join(parts)}; {self.call or 'plain values'}"


def _alike(one: Index, other: Index) -> bool:
    return one.kind == other.kind or (one.of_vectors and other.of_vectors)


@dataclass(frozen=True, repr=False)
class PromotionPlan(Described):
    """The effects of a promotion, and the reasons that prevent it.

    Args:
        version: the version of the table that was checked.
        candidate, live: the two columns.
        checked: the results of the candidate's expectations.
        due: columns and views with rows that the promotion makes due, including those that read these.
        followers: columns that are computed from the candidate, and continue to read it under its new name.
        refused: why the promotion is not possible; empty if it is.
        busy: the running jobs for which it has to wait.
    """

    table: str
    asked: Promotion
    version: int
    candidate: Candidate
    live: Candidate
    checked: tuple[Checked, ...]
    due: tuple[DueAfter, ...]
    followers: tuple[str, ...]
    refused: tuple[str, ...]
    busy: tuple[str, ...]

    def check(self) -> None:
        """Raise an error if anything prevents the promotion."""
        asked = f"Column {self.asked.column!r} of table {self.table!r} cannot be promoted to {self.asked.to!r}"
        if self.refused:
            raise InvalidInput(f"{asked}: {'. '.join(self.refused)}.")
        if self.busy:
            raise CommitConflict(f"{asked} now: {'. '.join(self.busy)}.")

    def without_values(self) -> PromotionPlan:
        """Return the plan without the values of rows."""
        return replace(self, checked=tuple(one.without_values() for one in self.checked))

    @property
    def rows_due(self) -> int:
        """Rows of the candidate without a value of their current inputs."""
        return self.candidate.rows_due

    @property
    def columns(self) -> dict[str, int]:
        """Rows of other computed columns that are due after the promotion, by column."""
        return {one.name: one.rows for one in self.due if one.kind == "column"}

    @property
    def views(self) -> dict[str, int]:
        """Rows of views that are due after the promotion, by view."""
        return {one.name: one.rows for one in self.due if one.kind == "view"}

    def __str__(self) -> str:
        lines = [f"Promotion of {self.asked}, in table {self.table!r}, at version {self.version}"]
        lines += [f"  candidate {self.candidate}", f"  live {self.live}"]
        lines += [f"  {one}" for one in self.checked]
        lines += [f"  {one}" for one in self.due]
        lines += [f"  column {name!r} goes on to read it, as {self.asked.to!r}" for name in self.followers]
        lines += [f"  Not possible: {why}" for why in (*self.refused, *self.busy)]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Promoting(Described):
    """The result of a promotion.

    Args:
        version: the version that it wrote; the newest version if an earlier attempt wrote it.
        plan: the plan that it followed; None if an earlier attempt made the promotion.
    """

    table: str
    asked: Promotion
    version: int
    plan: PromotionPlan | None

    @property
    def already(self) -> bool:
        """Whether an earlier attempt made the promotion."""
        return self.plan is None

    @property
    def way_back(self) -> str:
        """The call that undoes the promotion."""
        asked = self.asked
        return f"table.promote_column({asked.keep_as!r}, to={asked.to!r}, keep_as={asked.column!r})"

    def __str__(self) -> str:
        made = "was promoted already" if self.already else f"promoted in version {self.version}"
        lines = [f"{self.table}: {self.asked.column!r} is {self.asked.to!r} now, {made}"]
        if self.plan is not None:
            if self.plan.rows_due:
                lines.append(f"  {counted(self.plan.rows_due, 'row')} due for the next backfill of {self.asked.to!r}")
            lines += [f"  {one}" for one in (*self.plan.checked, *self.plan.due)]
        return "\n".join([*lines, f"  The way back: {self.way_back}"])


def _definition_of_view(dataset: lance.LanceDataset) -> ViewDefinition | None:
    """Return the definition of a view; None for a table."""
    metadata = dataset.schema.metadata
    return ViewDefinition.read(metadata) if is_view(metadata) else None


def _commit(location: TableLocation, dataset: lance.LanceDataset, asked: Promotion) -> int | None:
    """Commit at a version; return the new version, or None if the promotion has to be verified again."""
    ids = {name: found[0] for name, found in ids_by_name(dataset).items()}
    metadata = promoted_metadata(dataset.schema, ids, asked.column, asked.to, asked.keep_as)
    query, names = None, {asked.column: asked.to, asked.to: asked.keep_as}
    if (definition := _definition_of_view(dataset)) is not None:
        query = {QUERY_KEY: definition.promoted(asked.column, asked.to, asked.keep_as).to_json()}
        for name, renamed in names.items():
            metadata[ids[name]][FORMER_NAMES_KEY] = names_before(dataset.schema, name, renamed)
    schema = changed_schema(dataset, {ids[name]: renamed for name, renamed in names.items()}, metadata, query)
    properties = {PROMOTION_PROPERTY: asked.said, _VERIFIED_AT: str(dataset.version)}
    return _commit_schema(location, dataset, schema, properties, f"promote column {asked.column!r}")


@dataclass(frozen=True)
class QueryChange:
    """A view's query after a change, and the columns that its table gets or loses with it."""

    query: ViewDefinition
    added: tuple[pa.Field, ...] = ()
    dropped: tuple[str, ...] = ()


def change_query(
    location: TableLocation, change: Callable[[ViewDefinition, lance.LanceDataset], QueryChange | None]
) -> None:
    """Change a view's query, in a commit that conflicts with promotions: neither takes back what the other wrote.

    Args:
        change: returns the change of a version's query, or None if there is nothing to change. If other writers
            commit meanwhile, or the outcome of the commit is not known, it is called again with a newer version.
    """
    location = location.patient()
    for _ in commit_tries(f"view {location.name!r}", "change its query"):
        dataset = location.open()
        now = ViewDefinition.read(dataset.schema.metadata, location.name)
        if (wanted := change(now, dataset)) is None or wanted == QueryChange(now):
            return
        ids = ids_by_name(dataset)
        dropped = {field for name in wanted.dropped for field in ids[name]}
        query = {QUERY_KEY: wanted.query.to_json()}
        schema = changed_schema(dataset, {}, {}, query, wanted.added, dropped)
        if _commit_schema(location, dataset, schema, {}, "change the query"):
            return


def _commit_schema(
    location: TableLocation, dataset: lance.LanceDataset, schema: LanceSchema, properties: dict[str, str], what: str
) -> int | None:
    """Commit a schema at a version; return the new version, or None if other writers have to be looked at first."""
    import lance

    transaction = lance.Transaction(
        read_version=dataset.version,
        # Without `preserves_nullability` Lance reports every append, update and replaced column as a conflict.
        operation=lance.LanceOperation.Project(schema),
        transaction_properties=properties,
    )
    table = PlannedTable.of(location, dataset).stamped(location.options)
    try:
        committed = table.commit_transaction(
            location.options, lambda: transaction, before="promote.before", after="promote.after"
        )
    except OSError as error:
        if is_undecided(error):
            return None
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"Cannot {what} of {dataset.uri}: {error}. Check space and permissions, then run it again: nothing has "
            "changed."
        ) from error
    _repeat_metadata(location, committed, range(int(dataset.version) + 1, int(committed.version)))
    return int(committed.version)


def _repeat_metadata(location: TableLocation, dataset: lance.LanceDataset, versions: range) -> None:
    """Write metadata of other commits again that the commit of the promotion has replaced, unless it is there."""
    import lance

    made = lance.LanceOperation
    of_schema, of_fields = dict[str, Any](), dict[int, dict[str, Any]]()
    for version in versions:
        operation = read_commit(dataset, version).operation
        if isinstance(operation, made.UpdateConfig):
            of_schema |= operation.schema_metadata_updates.updates if operation.schema_metadata_updates else {}
            for at, one in (operation.field_metadata_updates or {}).items():
                of_fields[at] = {**of_fields.get(at, {}), **one.updates}
    if not (of_schema or of_fields):
        return
    for _ in commit_tries(f"table {location.name!r}", "write its metadata again"):
        newest = location.open()
        known, there = newest.schema.metadata or {}, metadata_by_id(newest)
        schema = _not_yet(of_schema, {name.decode(): value.decode() for name, value in known.items()})
        fields = {at: _not_yet(updates, there[at]) for at, updates in of_fields.items() if at in there}
        changed = {at: made.UpdateMap(updates, False) for at, updates in fields.items() if updates}
        if not (schema or changed):
            return
        again = made.UpdateConfig(
            schema_metadata_updates=made.UpdateMap(schema, False) if schema else None,
            field_metadata_updates=changed or None,
        )
        try:
            lance.LanceDataset.commit(newest, lance.Transaction(newest.version, again), **location.access)
        except OSError as error:
            if is_undecided(error):
                continue
            raise
        logger.info("Wrote metadata of table %r again that the promotion had replaced.", location.name)
        return


def _not_yet(updates: Mapping[str, str | None], there: Mapping[str, str]) -> dict[str, str | None]:
    """Return the updates that metadata does not show; None removes a name."""
    return {name: value for name, value in updates.items() if there.get(name) != value}


@dataclass
class _Verifier:
    """Plans a promotion at each version that it may be committed on.

    `planned` is the last plan.
    """

    location: TableLocation
    asked: Promotion
    planned: PromotionPlan | None = None
    _stored: StoredValues | None = field(default=None, init=False)
    _of_view: bool = field(default=False, init=False)

    def plan(self, dataset: lance.LanceDataset) -> PromotionPlan:
        asked, schema, self._of_view = self.asked, dataset.schema, is_view(dataset.schema.metadata)
        # pylance refuses two concurrent reads of one dataset object.
        looks = [partial(self._candidate, copy(dataset), name) for name in (asked.column, asked.to)]
        (candidate, live), busy, _ = self.location.checkpoints.side_by_side(
            lambda: self.location.checkpoints.side_by_side(*looks), lambda: tuple(self._busy()), lambda: self._views
        )
        checked = tuple(self._judge(dataset))
        refused = [*self._refused(candidate, live, checked), *self._refused_by_readers(dataset)]
        if self._of_view:
            refused += self._refused_by_query(dataset)
        # Counted once: it takes longest, and does not decide whether the promotion is possible.
        due = self.planned.due if self.planned is not None else tuple(self._due_after(dataset))
        self.planned = PromotionPlan(
            self.location.name,
            asked,
            int(dataset.version),
            candidate,
            live,
            checked,
            due,
            tuple(name for name in readers_of(schema, [asked.column])),
            tuple(refused),
            busy,
        )
        return self.planned

    def _candidate(self, dataset: lance.LanceDataset, name: str) -> Candidate:
        if (view := _definition_of_view(dataset)) is not None:
            return Candidate.of_view(dataset, view.column(name))
        return Candidate.of(self.location, dataset, name)

    def _judge(self, dataset: lance.LanceDataset) -> list[Checked]:
        definition = stored_definition(dataset.schema, self.asked.column)
        if definition is None or not definition.expectations:
            return []
        self._stored = self._stored or StoredValues(self.location, self.asked.column, definition)
        return self._stored.check(dataset)

    def _refused(self, candidate: Candidate, live: Candidate, checked: Sequence[Checked]) -> Iterator[str]:
        asked = self.asked
        if asked.require_complete and candidate.rows_due:
            yield (
                f"{counted(candidate.rows_due, 'row')} of {candidate.rows:,} are due. Compute them: "
                f"table.backfill({asked.column!r}). Or give require_complete=False: they are NULL or old for readers "
                "until the next backfill"
            )
        yield from (str(one) for one in checked if one.level == FAIL and not one.passed)
        if asked.require_index and (lacking := list(candidate.lacks(live))):
            of_table = f'table.backfill({asked.column!r}, indexes="update")'
            update = 'view.refresh(indexes="update")' if self._of_view else of_table
            yield (
                f"{'; '.join(lacking)}. Create it: table.lance.create_index({asked.column!r}, ...), or bring it up to "
                f"date: {update}. Or give require_index=False"
            )

    def _refused_by_query(self, dataset: lance.LanceDataset) -> Iterator[str]:
        """Say what of a view's query, or of the refreshes that computed its rows, stops it."""
        asked, state = self.asked, CommittedViewState(self.location, dataset)
        yield from ViewDefinition.read(dataset.schema.metadata).refuses(asked.column, asked.to, asked.keep_as)
        if not asked.require_complete:
            return
        fragments = state.snapshot.fragments if state.snapshot else ()
        failed = sum(len(rows) for one in fragments for origin, rows in one.unusual if 0 < origin.runs < MOST_RUNS)
        if state.snapshot is None:
            yield "the view shows the rows of no refresh. Refresh it: view.refresh(). Or give require_complete=False"
        elif failed:
            yield (
                f"a function failed on {counted(failed, 'row')}, which run again in the next refresh: view.refresh(). "
                "Or give require_complete=False"
            )
        elif versions := [version for name, version in state.snapshot.older if name == asked.column]:
            yield (
                f"rows of {asked.column!r} may hold values of its UDF's version {', '.join(versions)}. Compute them: "
                'view.refresh(on_code_change="recompute"). Or give require_complete=False'
            )

    def _busy(self) -> Iterator[str]:
        """Name the running jobs of either column."""
        checkpoints = self.location.checkpoints
        for job in read_jobs(checkpoints, job_ids(checkpoints)[:_MOST_JOBS]):
            if job.open and not (job.columns and {self.asked.column, self.asked.to}.isdisjoint(job.columns)):
                yield (
                    f"job {job.id} computes {job.target}. Wait until it has ended: db.job({job.id!r}) shows how far "
                    "it is, and one that was killed counts as dead some minutes later"
                )

    def _refused_by_readers(self, dataset: lance.LanceDataset) -> Iterator[str]:
        """Yield a reason for each view that could not be refreshed any more."""
        types = [dataset.schema.field(name).type for name in (self.asked.to, self.asked.column)]
        for name, (_, definition) in self._views.items():
            reads = {column.name for column in definition.reads}
            if self.asked.column in reads:
                yield (
                    f"view {name!r} reads {self.asked.column!r}, and would no longer find it. Create the view again "
                    f"without it, or with {self.asked.to!r} afterwards"
                )
            elif self.asked.to in reads and types[0] != types[1]:
                yield (
                    f"view {name!r} reads {self.asked.to!r} as {types[0]}, and {self.asked.column!r} is {types[1]}. "
                    "Drop the view, and create it again after the promotion"
                )

    @cached_property
    def _views(self) -> Mapping[str, tuple[TableLocation, ViewDefinition]]:
        return find_views(self.location)

    def _due_after(self, dataset: lance.LanceDataset) -> Iterator[DueAfter]:
        """Count due rows after the promotion in columns and views that read the column, directly or through others."""
        asked, checkpoints, total = self.asked, self.location.checkpoints, int(dataset.count_rows())
        changed, direct = {asked.to}, readers_of(dataset.schema, [asked.to])
        direct.pop(asked.column, None)
        for name in direct:
            definition = stored_definition(dataset.schema, name)
            inputs = tuple((definition.input_columns or ()) if definition else ())
            instead = renamed_inputs(inputs, {asked.to: asked.column})
            try:
                after, before = (column_freshness(dataset, checkpoints, given, name) for given in (instead, inputs))
                yield DueAfter("column", name, after.pending, before.pending)
            except InvalidInput as lacking:  # the candidate lacks a nested field
                yield DueAfter("column", name, total, at_most=True, error=str(lacking))
                after = Freshness(total, total)
            changed |= {name} if after.pending else set()
        while later := readers_of(dataset.schema, sorted(changed)).keys() - changed - direct.keys() - {asked.column}:
            yield from (DueAfter("column", name, total, at_most=True) for name in sorted(later))
            changed |= later
        for name, (view, query) in self._views.items():
            reads = {column.name for column in query.reads}
            if reads & changed:
                found = self._due_of_view(name, view, query, dataset, bool(reads & (changed - {asked.to})))
                yield found
                if found.rows or found.error:
                    yield from _later_views(view, {name})

    def _due_of_view(
        self,
        name: str,
        view: TableLocation,
        definition: ViewDefinition,
        dataset: lance.LanceDataset,
        later: bool,
    ) -> DueAfter:
        """Count a view's due rows; an upper bound if it also reads columns that change `later`."""
        try:
            state = CommittedViewState(view, view.open())
            instead = {self.asked.to: self.asked.column}
            after = view_freshness(dataset, definition, state, instead)
            before = view_freshness(dataset, definition, state)
        except (GenevaError, OSError) as error:
            return DueAfter("view", name, 0, error=str(error))
        rows = max(after.pending, _shown_rows(view)) if later else after.pending
        return DueAfter("view", name, rows, before.pending, at_most=later)


def _later_views(view: TableLocation, seen: set[str]) -> Iterator[DueAfter]:
    """Count the rows of views that read a view, directly or through others, because a refresh replaces its rows."""
    for name, (location, _) in find_views(view).items():
        if name not in seen:
            seen.add(name)
            yield DueAfter("view", name, _shown_rows(location), at_most=True)
            yield from _later_views(location, seen)


def _shown_rows(view: TableLocation) -> int:
    return int(view.open().count_rows(IS_SET))
