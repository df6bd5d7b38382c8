"""The user's handle to a table with computed columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import pyarrow as pa

from airflow_geneva.engine import api
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.display import Rows, Summarized, Summary, counted
from airflow_geneva.engine.results import BackfillResult, BackfillResults
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import is_local
from airflow_geneva.engine.udf import UDF, UdfDefinition, load_udf
from airflow_geneva.engine.udf.definition import ColumnSpecs, origin_of
from airflow_geneva.engine.udf.lancedb import lancedb_view
from airflow_geneva.engine.udf.of_process import find_udf, keep_udf
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark.runner import SparkRunner

if TYPE_CHECKING:
    from lance import LanceDataset
    from typing_extensions import Unpack

    from airflow_geneva.engine.api import (
        BackfillOptions,
        BackfillRequest,
        ColumnComparison,
        ColumnFunction,
        Comparison,
        JobFuture,
        Plan,
        Promoting,
        PromotionPlan,
        RowData,
        SizingOptions,
        Stopwatch,
        TableColumns,
        Udfs,
        ViewColumns,
    )
    from airflow_geneva.query import Query

_HEADINGS = ("column", "type", "")


@dataclass(frozen=True, repr=False)
class Table(Summarized, api.Readable, api.FailedRows):
    """A Lance table with computed columns; opened by :class:`airflow_geneva.Database`.

    Args:
        location: the table's URI, name and credentials.
    """

    location: TableLocation

    @property
    def name(self) -> str:
        """The table's name in its database."""
        return self.location.name

    @property
    def uri(self) -> str:
        """The normalized URI of the table's folder."""
        return self.location.uri

    @property
    def lance(self) -> LanceDataset:
        """The plain pylance dataset at its newest version."""
        return self.location.open()

    @property
    def schema(self) -> pa.Schema:
        """The schema of the newest version."""
        return self.lance.schema

    @property
    def version(self) -> int:
        """The newest version."""
        return int(self.lance.version)

    def _title(self) -> tuple[str, bool]:
        return f"{type(self).__name__} {self.name!r} in {self.location.database_uri}", is_local(self.uri)

    def _summary(self, title: str) -> Summary:
        dataset = self.lance
        key, columns = api.key_columns(dataset.schema), self._columns(dataset.schema)
        shown = [(name, kind, ", ".join(filter(None, (how, "key" * (name in key))))) for name, kind, how in columns]
        return Summary(f"{title}: {self.state(dataset)}", _HEADINGS, shown, self.preview)

    @property
    def key(self) -> tuple[str, ...]:
        """The columns whose values name the table's rows in errors; empty without a key.

        Without one that :meth:`set_key` set, those of Lance's unenforced primary key.
        """
        return api.key_columns(self.schema)

    def set_key(self, key: str | Sequence[str] | None) -> None:
        """Choose the column whose value names a row in errors, beside its row address; it is not checked to be unique.

        The key follows the column when it is renamed. Records of earlier failures stay as they are.

        Args:
            key: a column of text, bytes, whole numbers or dates, or several; None: the table has no key.

        Raises:
            InvalidInput: there is no such column, or its values cannot name rows.
        """
        self._edit.set_key(key)

    @property
    def _edit(self) -> TableColumns | ViewColumns:
        return api.TableColumns(self.location)

    def state(self, dataset: LanceDataset | None = None) -> str:
        """Return a short summary of the contents."""
        dataset = self.lance if dataset is None else dataset
        query = lancedb_view(dataset.schema.metadata)
        of_lancedb = "" if query is None else f", a view of LanceDB: {query}"
        return f"{counted(dataset.count_rows(), 'row')}, version {dataset.version}{of_lancedb}"

    def _columns(self, schema: pa.Schema) -> list[tuple[str, str, str]]:
        return [(field.name, str(field.type), origin_of(field)) for field in schema]

    def history(self, limit: int = 20) -> Rows:
        """List the newest versions and what wrote them: a `pyarrow.Table` that prints as a grid, newest first.

        Args:
            limit: the most versions. On an object store each costs some requests.

        Returns:
            For each version its `time`, the `operation` as Lance calls it, the `columns` that it wrote values of, the
            number of `rows` that it added or that a job made visible with it, and the `job_id` of that job.
        """
        return Rows(api.table_history(self.lance, limit))

    def query(self) -> Query:
        """Start a query of the table, from which a materialized view can be created."""
        from airflow_geneva.query import Query

        return Query(self)

    def search(self, query: None = None) -> Query:
        """Start a query, like :meth:`query`; the name is LanceDB's, and no search is done."""
        if query is not None:
            raise InvalidInput("Only search(None) is supported. For vector and text search use table.lance.")
        return self.query()

    def add(self, data: RowData) -> None:
        """Append rows; computed columns may be left out and are NULL until the next backfill.

        Args:
            data: rows as :meth:`airflow_geneva.Database.create_table` takes them, with any of the table's columns.
        """
        schema = self.schema
        api.GivenRows.of(self.name, data, existing=schema).append(self.location, schema)

    def add_columns(self, columns: ColumnSpecs) -> None:
        """Define computed columns; their values are NULL until a backfill, no data is written.

        Args:
            columns: by name, a UDF, or a UDF with the input columns for its parameters, in order. A UDF may be given by
                its import path. An input may be an earlier column of this argument. Several names in a tuple are
                columns that one call fills: a UDF returns a struct with a field for each, by name or else in order.

        Raises:
            InvalidInput: a column exists, an input is missing or has the wrong type, or the output cannot be stored.

        Example:
            ```python
            table.add_columns({"n": length, "m": (length, ["body"]), "e": "my_project.udfs:embed"})
            table.add_columns({("width", "height"): size_of})
            ```
        """
        self._edit.add(columns)

    def alter_columns(self, columns: ColumnSpecs) -> None:
        """Give computed columns another UDF, or a column of plain data its first; values are kept until a backfill.

        Args:
            columns: as for :meth:`add_columns`; columns that one UDF fills get it together, whichever is named.

        Raises:
            InvalidInput: the column does not exist, or is plain and NOT NULL, or the UDF's output type is not its own.
        """
        self._edit.alter(columns)

    def drop_columns(self, columns: Sequence[str]) -> None:
        """Remove columns, in a new version; values of a computed column are gone for its readers at once.

        Args:
            columns: names of columns.

        Raises:
            InvalidInput: there is no such column, a computed column that stays is computed from one of them, one is the
                table's key, or none would be left.
        """
        self._edit.drop(columns)

    def rename_column(self, column: str, to: str) -> None:
        """Rename a column. A computed column keeps its values and state, and columns computed from it follow.

        A view that reads the column is refreshed again when the column has its former name again, or the view is
        created again.

        Args:
            column: its name.
            to: its new name.

        Raises:
            InvalidInput: there is no such column, or the new name is taken or cannot be a column's name.
        """
        api.TableColumns(self.location).rename(column, to)

    def definition(self, column: str, dataset: LanceDataset | None = None) -> UdfDefinition:
        """Return the stored definition of a computed column; of a view, as the query has it.

        Raises:
            InvalidInput: the column does not exist, or no UDF computes it.
        """
        return self._edit.definition((self.lance if dataset is None else dataset).schema, column)

    def plan_backfill(
        self,
        column: str,
        udf: UDF | str | None = None,
        where: str | None = None,
        read_version: int | None = None,
        on_code_change: str = "error",
        continue_from: str | Sequence[str] | None = None,
        errors_only: bool = False,
        recompute_mixed: bool = False,
        ignore_checkpoints: bool = False,
        run_after: datetime | None = None,
        on_unknown_values: str = "error",
        **sizing: Unpack[SizingOptions],
    ) -> Plan:
        """Plan a backfill: which rows it would compute, and why; writes nothing.

        Args:
            column: the computed column.
            udf: the UDF to use, or its import path; by default the column's own, imported by its path or made in this
                process. A UDF of the same name gets the column's input columns, a UDF of another name its own.
            where: SQL filter on the rows to compute; ``now()`` and similar functions are frozen at ``run_after``.
            read_version: compute only rows that existed at this version.
            on_code_change: what becomes of another UDF version's values; see ``OnCodeChange``.
            continue_from: other versions of the UDF whose values are kept instead of computed again.
            errors_only: compute only rows the UDF failed on, however often; if its code was repaired, all other rows
                keep their values, and later runs go on with the new code.
            recompute_mixed: compute only rows whose value comes from another version.
            ignore_checkpoints: do not use what earlier jobs computed and did not commit; the same as the environment
                variable ``GENEVA_IGNORE_CHECKPOINTS=1``.
            run_after: the time that ``now()`` returns; by default the time of this call.
            on_unknown_values: what becomes of values that no job computed; see ``OnUnknownValues``.
            sizing: see :class:`airflow_geneva.engine.plan.sizing.Sizing`.

        Raises:
            InvalidInput: an argument is not valid, or names something that does not exist.
            CodeChanged: rows hold another UDF version's value, and ``on_code_change`` is ``error``.
            UnknownValues: rows hold a value that no job computed, and ``on_unknown_values`` is ``error``.
        """
        request = api.BackfillRequest.of(locals(), sizing)
        plan, function = self._plan(request, udf)
        udfs = api.Udfs(dict.fromkeys(plan.spec.udfs, function))
        return replace(plan, estimator=partial(api.estimate_plan, self.location, udfs, SparkRunner()))

    @overload
    def backfill(
        self, column: str, udf: UDF | str | None = None, **options: Unpack[BackfillOptions]
    ) -> BackfillResult: ...

    @overload
    def backfill(
        self, column: list[str] | tuple[str, ...], udf: None = None, **options: Unpack[BackfillOptions]
    ) -> BackfillResults: ...

    def backfill(
        self,
        column: str | Sequence[str],
        udf: UDF | str | None = None,
        where: str | None = None,
        read_version: int | None = None,
        on_code_change: str = "error",
        continue_from: str | Sequence[str] | None = None,
        errors_only: bool = False,
        recompute_mixed: bool = False,
        ignore_checkpoints: bool = False,
        runner: str = "auto",
        run_after: datetime | None = None,
        max_failed: int | float | None = None,
        indexes: str | None = None,
        on_unknown_values: str = "error",
        **sizing: Unpack[SizingOptions],
    ) -> BackfillResult | BackfillResults:
        """Compute the missing values of a column, and commit them.

        Args:
            column: the computed column, or several, which are computed one after another with a result each.
            runner: where it is computed; see ``RunnerName``.
            max_failed: fail the job if more than this number of rows fail, or, with a decimal point, more than this
                fraction of the due rows; computed values are visible nevertheless. None: any number may fail.
            indexes: ``update`` brings the indexes over the column up to date after its values are visible.

        The other arguments are those of :meth:`plan_backfill`.

        Raises:
            InvalidInput, CodeChanged, UnknownValues: see :meth:`plan_backfill`; nothing was started.
            JobFailed: the job failed; ``.result`` has the counts of its completed work.
        """
        arguments = locals()
        from airflow_geneva.bar import progress_bar

        several = isinstance(column, (list, tuple))
        columns: Sequence[Any] = column if several else (column,)
        if several and udf is not None:
            raise InvalidInput(f"udf={udf!r:.80} computes one column, and {columns} are several. Leave it out.")
        dataset = self.lance if several else None
        for name in columns if several else ():
            self.definition(name, dataset)  # before the first one runs
        results = dict[str, BackfillResult]()
        for name in columns:
            if name in results:
                continue  # computed with a column of the same function
            request = api.BackfillRequest.of({**arguments, "column": name}, sizing)
            with progress_bar(f"{self.name}.{name}"):
                plan, udfs, watch = self._plan_to_run(request, udf, runner)
                result = api.run_new(plan, self.location, udfs, runner, watch, SparkRunner())
            results |= dict.fromkeys((name, *plan.spec.columns), result)
        return BackfillResults({name: results[name] for name in columns}) if several else results[columns[0]]

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
                sample of rows is computed. By default the column's own UDF, as its code is now.
            sample: number of rows; by default 1,000 of two columns, and 100 that are computed.
            neighbors: of two columns of vectors, the number of nearest neighbors that are compared; 0 for none.
            queries: values that the functions of both columns take, such as texts, whose neighbors are compared; a
                tuple for several inputs. By default sampled rows.

        Raises:
            InvalidInput: there is no such column or code, or an argument is not valid.

        Example:
            ```python
            print(table.compare("embedding", "embedding_v2", queries=["red shoes", "rain jacket"]))
            ```
        """
        dataset = self.lance
        if isinstance(other, str) and (other in dataset.schema.names or ":" not in other):
            rows = 1_000 if sample is None else sample
            function = partial(self._column_function, dataset)
            return api.ColumnComparison.of(self.location, dataset, column, other, function, neighbors, queries, rows)
        if queries is not None:
            raise InvalidInput("queries are for two columns of vectors: table.compare(column, other_column, ...).")
        plan, udf = self._plan(api.BackfillRequest.of_all_rows(column), other)
        return api.Comparison.of_column(plan, udf, self.location, column, 100 if sample is None else sample)

    def backfill_async(
        self, column: str, udf: UDF | str | None = None, runner: str = "auto", **options: Any
    ) -> JobFuture:  # fmt: skip
        """Start a backfill in the background of this process.

        Args:
            column, udf, runner, options: those of :meth:`backfill`.

        Raises:
            InvalidInput, CodeChanged, UnknownValues: see :meth:`plan_backfill`; nothing was started.

        Example:
            ```python
            future = table.backfill_async("n")
            result = future.result()  # meanwhile: future.status()
            ```
        """
        from airflow_geneva.bar import show

        plan, udfs, watch = self._plan_to_run(api.BackfillRequest.of({**options, "column": column}), udf, runner)
        return api.JobFuture.start(plan, self.location, udfs, runner, watch, show, SparkRunner())

    def _plan(
        self,
        request: BackfillRequest,
        udf: UDF | str | None,
        location: TableLocation | None = None,
        dataset: LanceDataset | None = None,
    ) -> tuple[Plan, UDF]:
        location = location or self.location
        dataset = location.open() if dataset is None else dataset
        definition = self.definition(request.column, dataset)
        udf = load_udf(udf) if isinstance(udf, str) else udf
        if udf is not None and not isinstance(udf, UDF):
            raise InvalidInput(f"udf={udf!r} is not a UDF. Give a function made with @udf(...), or its import path.")
        function = udf or self.column_udf(request.column, definition)
        own_inputs = definition.input_columns if udf is None or udf.name == definition.name else None
        return api.plan_request(location, request, function, own_inputs, dataset), function

    def _plan_to_run(
        self, request: BackfillRequest, udf: UDF | str | None, runner: str
    ) -> tuple[Plan, Udfs, Stopwatch]:
        RunnerName.check("runner", runner)
        watch = api.Stopwatch.of_new_job()
        plan, function = self._plan(request, udf, self.location.patient())
        keep_udf(function, self.location.database_uri, api.TableColumns(self.location).described(request.column))
        return plan, api.Udfs(dict.fromkeys(plan.spec.udfs, function)), watch

    def load_columns(
        self,
        source: Any,
        on: str | Sequence[str],
        columns: Sequence[str] | None = None,
        format: str | None = None,
        on_missing: str = "keep",
        on_duplicate: str = "error",
        where: str | None = None,
        adopt: bool = False,
        runner: str = "auto",
        **sizing: Unpack[SizingOptions],
    ) -> BackfillResult:
        """Load values by key from files, another table, a DataFrame or rows in memory, and commit them.

        Only fragments with a value that differs are written. Columns that the table lacks are added. A loaded column is
        not a computed one: a backfill refuses it.

        Args:
            source: a path, a glob, a folder or a URI of Parquet, CSV or JSON lines files, or a list of them; a Lance
                table or view, or its path; a table of pyiceberg; a DataFrame of Spark; or rows, as `add` takes them.
                Files on S3 are read with the storage options of this table, files on other stores with the machine's
                own identity.
            on: the key column, or several; the table and the source both have them. NULL matches nothing.
            columns: the columns to load; by default all of the source but the keys.
            format: ``parquet``, ``csv``, ``json`` or ``lance``; by default the extension of the files. ``iceberg``: the
                source is a table's metadata file, its folder, or ``catalog.namespace.table``; ``spark``: it is the name
                of a table that the session has.
            on_missing: what becomes of rows whose key the source lacks; see ``OnMissing``.
            on_duplicate: which row of several with one key counts; see ``OnDuplicate``.
                Rows of Spark have no order, so only ``error`` is possible.
            where: SQL filter on the rows of the table; the other rows keep their values.
            adopt: load values of a computed column; they count as computed by its function from its current inputs.
            runner: ``inline``: DuckDB checks and joins keys in this process, and spills to disk; ``spark``: a cluster
                does; ``auto``: Spark for files of more than 2 GiB, and for DataFrames and tables of Spark.
            sizing: see :class:`airflow_geneva.engine.plan.sizing.Sizing`.

        Returns:
            The result: `rows_loaded` counts the rows whose values changed, `rows_missing` those whose key the source
            lacks, and `rows_skipped` all others.

        Raises:
            InvalidInput: an argument is not valid, or a column, a type or a key does not fit; nothing was loaded.
            JobFailed: the load failed; ``.result`` has the counts of what is visible.

        Example:
            ```python
            table.load_columns("s3://deliveries/2026-11/*.parquet", on="id", columns=["caption", "embedding"])
            ```
        """
        arguments = locals()
        from airflow_geneva.bar import progress_bar

        RunnerName.check("runner", runner)
        watch, location = api.Stopwatch.of_new_job(), self.location.patient()
        with progress_bar(f"{location.name}.load"):
            plan, runner = api.plan_load(location, api.LoadRequest.of(arguments, sizing), runner, SparkRunner())
            return api.run_new(plan, location, api.Udfs({}), runner, watch, SparkRunner())

    def plan_promotion(
        self, column: str, to: str, keep_as: str, require_complete: bool = True, require_index: bool = True
    ) -> PromotionPlan:
        """Plan a promotion: what stops it, and how many rows of columns and views it makes due; writes nothing.

        The columns and views are those of this database that read `to`, and views of these views.

        Raises:
            InvalidInput: a column does not exist, or a name is taken.
        """
        return api.Promotion(column, to, keep_as, require_complete, require_index).plan(self.location)

    def promote_column(
        self, column: str, to: str, keep_as: str, require_complete: bool = True, require_index: bool = True
    ) -> Promoting:
        """Give a column the name of a live one, in one version of the table; the live one keeps its values.

        Values, index and function change together. Jobs that name `to` use the new function from their next run.
        Columns and views that are computed from `to` keep reading that name, and their rows are due. The same call with
        the names swapped reverts it. A killed call can be repeated. A view's query changes in the same version.

        Args:
            column: the candidate, such as ``embedding_v2``.
            to: the name of the live column, such as ``embedding``.
            keep_as: the live column's new name, such as ``embedding_v1``.
            require_complete: refuse the promotion while rows of the candidate are due.
            require_index: refuse it if the candidate's indexes cover fewer rows than those of the live column.

        Raises:
            InvalidInput: a column does not exist, or a name is taken; or the candidate is not ready, as
                :meth:`plan_promotion` says. Nothing has changed.
            CommitConflict: a job computes one of the columns, or other writers changed the table at every retry.

        Example:
            ```python
            table.promote_column("embedding_v2", to="embedding", keep_as="embedding_v1")
            table.promote_column("embedding_v1", to="embedding", keep_as="embedding_v2")  # the way back
            ```
        """
        return api.Promotion(column, to, keep_as, require_complete, require_index).run(self.location)

    def column_function(self, name: str, version: int | None = None) -> ColumnFunction:
        """Return the function that a column's values come from, to call it on the text of a query, for example.

        It is read from the same version as the values. A search service opens a version once, takes its values, index
        and function, and does so again when `table.version` is another one.

        Args:
            name: the computed column, by its name at that version.
            version: version of the table; by default the newest.

        Raises:
            InvalidInput: there is no such version or computed column, or its UDF cannot be imported here.
            CodeChanged: the code here is not the one that computed the values of that version.

        Example:
            ```python
            embed = table.column_function("embedding", table.version)
            near = {"column": "embedding", "q": embed("a query"), "k": 10}
            ```
        """
        return self._column_function(self.lance if version is None else api.open_version(self.lance, version), name)

    def _column_function(self, dataset: LanceDataset, name: str) -> ColumnFunction:
        return api.ColumnFunction.find(self.location, name, dataset)

    def column_udf(self, column: str, definition: UdfDefinition | None = None) -> UDF:
        """Return the column's own UDF: imported, or of a notebook or script, if this is its process.

        Raises:
            InvalidInput: it was defined in a notebook or script of another process, or cannot be imported here.
        """
        advice = f"Define it again, or pass it: table.backfill({column!r}, udf=...), or move it to a module."
        found = definition or self.definition(column)
        return find_udf(found, self.location.database_uri, f"column {column!r}", advice)
