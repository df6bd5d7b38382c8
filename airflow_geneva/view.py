"""The user's handle to a materialized view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.storage.files import freeze_options
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import allowed_places, with_places
from airflow_geneva.engine.udf import UDF, load_udf
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark.runner import SparkRunner
from airflow_geneva.table import Table

if TYPE_CHECKING:
    from lance import LanceDataset
    from typing_extensions import Unpack

    from airflow_geneva.engine.api import (
        BackfillRequest,
        ColumnComparison,
        ColumnFunction,
        Comparison,
        FailedSourceRows,
        JobFuture,
        Plan,
        QuerySpec,
        RefreshRequest,
        SizingOptions,
        Stopwatch,
        Udfs,
        ViewColumns,
        ViewDefinition,
    )
    from airflow_geneva.engine.udf.expect import Expectation


@dataclass(frozen=True, repr=False)
class View(Table):
    """A table that holds a query's result as of the last refresh; created by ``create_materialized_view``.

    Reading it returns the rows of the last refresh and the query's columns. ``view.lance`` is raw: it has the two
    system columns, and rows that no refresh has computed yet.

    Args:
        sources: other databases in which its source may lie; see :meth:`airflow_geneva.Database.open_view`.
    """

    sources: tuple[str, ...] = field(default=(), compare=False)

    @property
    def view_definition(self) -> ViewDefinition:
        """The view's query.

        Raises:
            InvalidInput: the view was made by another system.
        """
        return api.ViewDefinition.read(self.lance.schema.metadata, self.name)

    def source(self, storage_options: Mapping[str, str] | None = None) -> Table:
        """Open the view's source: a table or a view.

        Args:
            storage_options: credentials of the source's database; by default the view's own.

        Raises:
            InvalidInput: the source does not exist, or is in another database that `sources` does not name.
        """
        return self._source(self.view_definition, storage_options)

    def _source(self, definition: ViewDefinition, storage_options: Mapping[str, str] | None = None) -> Table:
        from airflow_geneva.database import Database

        found = api.locate_source(self.location, definition, self.sources)
        given = found.options if storage_options is None else freeze_options(storage_options)
        options = with_places(given, allowed_places(found.options))
        try:
            return Database(found.database_uri, options).open_table(found.name)
        except InvalidInput as error:
            raise InvalidInput(f"View {self.name!r} is computed from {found.name!r}. {error}") from None

    @property
    def schema(self) -> pa.Schema:
        """The schema of the query's columns."""
        whole = self.lance.schema
        return pa.schema([whole.field(name) for name in api.visible_columns(whole)], metadata=whole.metadata)

    def _visible(self, schema: pa.Schema) -> tuple[list[str], str | None]:
        return api.visible_columns(schema), api.IS_SET

    def state(self, dataset: LanceDataset | None = None) -> str:
        """Return a short summary of the contents."""
        dataset = self.lance if dataset is None else dataset
        definition = api.ViewDefinition.read(dataset.schema.metadata, self.name)
        source = definition.source_table
        state = api.CommittedViewState(self.location, dataset)
        version = api.source_version_of(self.location, definition, state)
        shown = f"refreshed to its version {version}"
        if version is None:
            shown = "changed by another writer since its refresh" if state.newest.changed else "never refreshed"
        kind = "view" if definition.grouping is None else "view of groups"
        return f"{counted(dataset.count_rows(api.IS_SET), 'row')}, a {kind} of {source!r}, {shown}"

    def _columns(self, schema: pa.Schema) -> list[tuple[str, str, str]]:
        origin = {column.name: column.origin for column in api.ViewDefinition.read(schema.metadata, self.name).columns}
        return [(name, str(schema.field(name).type), origin.get(name, "")) for name in api.visible_columns(schema)]

    @property
    def key(self) -> tuple[str, ...]:
        """The columns whose values name the view's rows in errors: its own key, or its source's if the view has it."""
        dataset = self.lance
        if own := api.key_columns(dataset.schema):
            return own
        definition = api.ViewDefinition.read(dataset.schema.metadata, self.name)
        if definition.grouping is not None:
            return ()
        return definition.columns_of_key(api.key_columns(self._source(definition).schema))

    @property
    def _edit(self) -> ViewColumns:
        return api.ViewColumns(self.location, lambda: self._source(self.view_definition).location)

    @property
    def _unopened(self) -> ViewColumns:
        """The columns, without a check that the source can be opened: it may have been dropped."""
        definition = self.view_definition
        return api.ViewColumns(self.location, lambda: api.locate_source(self.location, definition, self.sources))

    def get_failed_row_addresses(self, job_id: str | None = None, column_name: str | None = None) -> list[int]:
        """Return the source row addresses of rows on which a UDF failed, ascending.

        Args:
            job_id: rows that failed in this job, at their addresses then; None: rows that are NULL or missing in the
                view now because a UDF failed on them, at their current addresses.
            column_name: only rows on which the UDF of this column failed.

        Raises:
            InvalidInput: ``job_id`` is not a job id, or the column is not one that a UDF fills.
        """
        if job_id is not None:
            return super().get_failed_row_addresses(job_id, column_name)
        definition = self.view_definition
        if column_name is not None and column_name not in definition.filled_by:
            raise InvalidInput(
                f"Column {column_name!r} of view {self.name!r} has no UDF that could fail. Those with one: "
                f"{', '.join(definition.filled_by) or 'none'}."
            )
        return self._failed(definition).addresses(column_name)

    def _failed_ids(self, column: str) -> set[int]:
        return self._failed(self.view_definition).ids(column)

    def _failed(self, definition: ViewDefinition) -> FailedSourceRows:
        dataset = self.lance
        if definition.grouping is None:
            return api.FailedSourceRows(self.location, dataset, self._source(definition).lance)
        groups = api.groups_of(self.location)
        return api.FailedSourceRows(self.location, dataset, dataset if groups is None else groups)

    def _refuse_for_groups(self, what: str) -> None:
        definition = self.view_definition
        if definition.grouping is not None:
            raise InvalidInput(
                f"View {self.name!r} {what}: it has one row for all rows of {definition.source_table!r} with the same "
                f"{', '.join(definition.grouping.keys)}. Create a view with another query instead."
            )

    def plan_refresh(
        self,
        src_version: int | None = None,
        max_rows_per_fragment: int | None = None,
        on_code_change: str = "error",
        ignore_checkpoints: bool = False,
        errors_only: bool = False,
        on_unknown_values: str = "error",
        **sizing: Unpack[SizingOptions],
    ) -> Plan:
        """Plan a refresh: which rows it would compute, and why; writes nothing.

        The rows of a view of groups are groups: the touched ones.

        Args:
            src_version: the source version to refresh to, which may be an earlier one; by default the newest.
            max_rows_per_fragment: rows of each new fragment of the view.
            on_code_change: what becomes of another UDF version's values; see ``OnCodeChange``.
            ignore_checkpoints: do not use what earlier jobs computed.
            errors_only: run only rows on which a UDF failed, however often; the view stays at the source version that
                it shows. If a UDF was repaired, all other rows keep their values, and later refreshes go on with the
                new code.
            on_unknown_values: what becomes of rows without a record of their source rows; see ``OnUnknownValues``.
            sizing: see :class:`airflow_geneva.engine.plan.sizing.Sizing`.

        Raises:
            InvalidInput: the source no longer fits the view, or an argument is not valid.
            CodeChanged: the view holds another UDF version's values, and ``on_code_change`` is ``error``.
            UnknownValues: the record of the view's rows is missing, and ``on_unknown_values`` does not say what to do
                or cannot be done.
        """
        request = api.RefreshRequest.of(locals(), sizing)
        plan, udfs = self._plan_refresh(request, self.location)
        return replace(plan, estimator=partial(api.estimate_plan, self.location, udfs, SparkRunner()))

    def refresh(
        self,
        src_version: int | None = None,
        max_rows_per_fragment: int | None = None,
        on_code_change: str = "error",
        ignore_checkpoints: bool = False,
        runner: str = "auto",
        max_failed: int | float | None = None,
        indexes: str | None = None,
        errors_only: bool = False,
        on_unknown_values: str = "error",
        **sizing: Unpack[SizingOptions],
    ) -> BackfillResult:
        """Update the view to its source in one commit; the cost depends on what changed.

        Args:
            runner: where it is computed; see ``RunnerName``.
            max_failed: fail the job, and leave the view unchanged, if more than this number of rows fail, or, with a
                decimal point, more than this fraction of the due rows. None: any number may fail.
            indexes: ``update`` brings the indexes of the view up to date after the new rows are visible.

        The other arguments are those of :meth:`plan_refresh`.

        Raises:
            InvalidInput, CodeChanged, UnknownValues: see :meth:`plan_refresh`; nothing was started.
            JobFailed: the job failed; the view is unchanged.
        """
        request = api.RefreshRequest.of(locals(), sizing)
        from airflow_geneva.bar import progress_bar

        with progress_bar(self.name):
            plan, udfs, watch = self._plan_refresh_to_run(request, runner)
            return api.run_new(plan, self.location, udfs, runner, watch, SparkRunner())

    def refresh_async(self, runner: str = "auto", **options: Any) -> JobFuture:
        """Start a refresh in the background of this process.

        Args:
            runner, options: those of :meth:`refresh`.

        Raises:
            InvalidInput, CodeChanged, UnknownValues: see :meth:`plan_refresh`; nothing was started.
        """
        from airflow_geneva.bar import show

        plan, udfs, watch = self._plan_refresh_to_run(api.RefreshRequest.of(options), runner)
        return api.JobFuture.start(plan, self.location, udfs, runner, watch, show, SparkRunner())

    def _plan_refresh_to_run(self, request: RefreshRequest, runner: str) -> tuple[Plan, Udfs, Stopwatch]:
        RunnerName.check("runner", runner)
        watch = api.Stopwatch.of_new_job()
        return *self._plan_refresh(request, self.location.patient(), to_run=True), watch

    def _plan_refresh(
        self, request: RefreshRequest, location: TableLocation, to_run: bool = False
    ) -> tuple[Plan, Udfs]:  # fmt: skip
        dataset = location.open()
        plan = self._plan_version(dataset, request, location, to_run)
        return plan, api.Udfs.of_refresh(plan, api.ViewDefinition.read(dataset.schema.metadata, self.name))

    def _plan_version(
        self,
        dataset: LanceDataset,
        request: RefreshRequest,
        location: TableLocation | None = None,
        to_run: bool = False,
    ) -> Plan:
        """Plan the refresh of the view's newest version, which the caller has opened; see `api.plan_refresh`."""
        try:
            return api.plan_refresh(location or self.location, dataset, self.sources, request, to_run)
        except InvalidInput:
            self.source()  # which says more if it is the source that cannot be opened
            raise

    def _plan_with(self, udfs: Mapping[str, UDF]) -> Plan:
        """Plan a refresh as if columns had other UDFs, with the inputs of a UDF of the same name; write nothing."""
        return self._unopened.plan_altered(udfs)

    def duplicates(self, columns: Sequence[str] = ()) -> pa.Table:
        """Return which rows of the source are duplicates of which, of a view whose query deduplicates.

        It has the rows of all clusters of several rows, at the source version that the view shows, one cluster after
        another, and first in each the row that the view keeps. Reads the hashes of all rows that the filter selects, or
        computes them if they are lost; writes nothing.

        Args:
            columns: columns of the source to read, such as its key.

        Returns:
            table: `row_id` is the row id in the source, `duplicate_of` that of the row that is kept instead, NULL for
                this row itself, and `cluster` the smallest row id in the cluster; then the given columns.

        Raises:
            InvalidInput: the query does not deduplicate, the source has no such column, or the view has to be refreshed
                first.
        """
        if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
            raise InvalidInput(f'columns={columns!r:.200} is not valid: give names in a list, such as ["id"].')
        definition = self.view_definition
        return api.read_duplicates(self.location, definition, self._source(definition).location, tuple(columns))

    def compare(
        self,
        column: str,
        other: UDF | str | None = None,
        sample: int | None = None,
        neighbors: int = 10,
        queries: Sequence[Any] | None = None,
    ) -> Comparison | ColumnComparison:
        """Show the values of a column beside those of another column, or those that other code gives; keep nothing.

        Args:
            other: another column, whose stored values are compared; or other code, or its import path, with which a
                sample of rows is computed. By default the view's own UDF, as its code is now.
            sample: number of rows; by default 1,000 of two columns, and 100 that are computed, of the source version
                that the view was refreshed to.
            neighbors, queries: of two columns of vectors, see :meth:`Table.compare`.
        """
        definition = self.view_definition
        if isinstance(other, str) and (":" not in other or other in self.schema.names):
            return super().compare(column, other, sample, neighbors, queries)
        self._refuse_for_groups("cannot be compared with what other code gives")
        given = load_udf(other) if isinstance(other, str) else other
        rows = 100 if sample is None else sample
        source = self._source(definition).location
        return api.Comparison.of_view(self.location, definition, source, column, given, rows)

    def _column_function(self, dataset: LanceDataset, name: str) -> ColumnFunction:
        definition = api.ViewDefinition.read(dataset.schema.metadata, self.name)
        self._refuse_for_groups("has no function that takes values of one row")
        return api.ColumnFunction.find(self.location, name, dataset, self._source(definition).lance)

    def expect(self, columns: Mapping[str, Expectation | Sequence[Expectation]]) -> None:
        """Set the conditions that values must meet to become visible, replacing earlier conditions of the view.

        They apply to columns of any kind, also SQL expressions. The conditions of a UDF are checked as well.

        Raises:
            InvalidInput: there is no such column, or its values cannot be checked so.

        Example:
            ```python
            view.expect({"letters": [expect.not_null(), expect.between(1, 1_000)]})
            ```
        """
        self._edit.expect(columns)

    def add(self, data: Any) -> NoReturn:
        """Always raises: a view's rows come from its query."""
        raise InvalidInput(
            f"Rows cannot be added to view {self.name!r}: they come from its query. Add them to its source, "
            f"{self.view_definition.source_table!r}, and refresh the view."
        )

    def add_columns(self, columns: Mapping[Any, QuerySpec]) -> None:
        """Add columns to the query; the next refresh computes them, and carries all other values.

        Args:
            columns: by name, a UDF, its import path with its inputs, a column of the source, or an SQL expression over
                them, as for :meth:`airflow_geneva.query.Query.add_columns`. An input is a column of the view or else
                of the source. For a view of groups, an SQL aggregate, or a UDF of the rows of a group, as in `agg`.

        Raises:
            InvalidInput: a column exists, or it does not fit the source.

        Example:
            ```python
            view.add_columns({"words": count_words, "chars": (length, ["body"])})
            view.refresh()  # runs count_words and length only
            ```
        """
        self._edit.add(columns)

    def alter_columns(self, columns: Mapping[Any, QuerySpec]) -> None:
        """Give computed columns another UDF or other inputs; values are kept until a refresh.

        The next refresh asks what to do with them, as if the code of their UDF had changed: see `on_code_change`.

        Args:
            columns: as for :meth:`add_columns`, with UDFs only; columns that one UDF fills get it together.

        Raises:
            InvalidInput: no UDF computes the column, or the UDF's output type is not the column's.
        """
        self._edit.alter(columns)

    def drop_columns(self, columns: Sequence[str]) -> None:
        """Remove columns from the query, and with them their values, in a new version; nothing is computed for it.

        Raises:
            InvalidInput: there is no such column, another column is computed from it, the view is exploded by it, it is
                the view's key, a column of the key of groups, or no column would be left.
        """
        self._unopened.drop(columns)

    def rename_column(self, column: Any, to: Any) -> NoReturn:
        """Always raises: a view's columns come from its query."""
        self._refuse_columns([column])

    def _refuse_columns(self, columns: Any) -> NoReturn:
        named = list(columns) if isinstance(columns, (Mapping, Sequence)) else columns
        raise InvalidInput(
            f"Columns {named!r:.200} of view {self.name!r} cannot be renamed: other names would be read by those who "
            "use the view. Add a column with the other name, and drop this one."
        )

    def _plan(self, request: BackfillRequest, *_: Any, **_given: Any) -> NoReturn:
        column = request.column
        raise InvalidInput(
            f"View {self.name!r} cannot be backfilled: its query computes column {column!r}. Call view.refresh()."
        )
