"""A namespace of Lance whose columns and views this package computes, for programs that know only the specification."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from lance_namespace import (
    AlterTableBackfillColumnsRequest,
    AlterTableBackfillColumnsResponse,
    CreateMaterializedViewRequest,
    CreateMaterializedViewResponse,
    DescribeTransactionRequest,
    DescribeTransactionResponse,
    LanceNamespace,
    RefreshMaterializedViewRequest,
    RefreshMaterializedViewResponse,
    errors,
)

from airflow_geneva.database import Database, connect_namespace
from airflow_geneva.engine import api
from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.storage.arrow_documents import read_schema
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.udf import load_stored_udf
from airflow_geneva.errors import (
    CodeChanged,
    CommitConflict,
    GenevaError,
    InvalidInput,
    NoSuchTable,
    TableRemade,
    UnknownValues,
)
from airflow_geneva.query import Query
from airflow_geneva.view import View

_ABOUT_THE_CALL = {"id", "identity", "context"}
# Fields of the specification, by the names of this package's arguments.
_BACKFILL = {
    "where": "where",
    "read_version": "read_version",
    "concurrency": "concurrency",
    "intra_applier_concurrency": "intra_applier_concurrency",
    "checkpoint_size": "checkpoint_size",
    "min_checkpoint_size": "min_checkpoint_size",
    "max_checkpoint_size": "max_checkpoint_size",
    "batch_checkpoint_flush_interval_seconds": "checkpoint_interval",
    "task_size": "task_size",
    "num_frags": "num_frags",
    "commit_granularity": "commit_granularity",
}
_REFRESH = {
    "src_version": "src_version",
    "max_rows_per_fragment": "max_rows_per_fragment",
    "concurrency": "concurrency",
    "intra_applier_concurrency": "intra_applier_concurrency",
    "source_task_size": "task_size",
}
_GROUPS = ("group_by", "agg", "order_by", "max_group_rows")
_QUERY = ("source", "select", "where", "shuffle", "limit", "offset", "explode", "deduplicate", *_GROUPS)
_COLUMNS = ("select", "agg")
_STATUS = {"PENDING": "Queued", "RUNNING": "Running", "DONE": "Succeeded", "PARTIAL": "Succeeded", "FAILED": "Failed"}


class GenevaNamespace(LanceNamespace):
    """Any namespace of Lance, with three more operations: backfill a column, create and refresh a view.

    All other operations are those of the namespace that it wraps. Jobs run in the background of this process.

    Args:
        impl: the kind of the wrapped namespace, as `lance_namespace.connect` takes it: ``dir``, ``rest``, or the path
            of a class.
        runner: ``inline`` computes in this process, ``spark`` on the active SparkSession or a local one; ``auto`` in
            this process what takes less than ten seconds there.
        properties: the properties of the wrapped namespace.

    Raises:
        InvalidInput: there is no such kind of namespace, or it takes other properties.

    Example:
        ```python
        import lance_namespace

        catalog = lance_namespace.connect(
            "airflow_geneva.namespace.GenevaNamespace", {"impl": "dir", "root": "path/to/db", "runner": "inline"}
        )
        ```
    """

    def __init__(self, impl: str, runner: str = "auto", **properties: str) -> None:
        RunnerName.check("runner", runner)
        self._runner = runner
        self._database = connect_namespace(impl, properties)

    @property
    def wrapped(self) -> LanceNamespace:
        """The namespace that answers all other operations."""
        return self._database.lance

    def namespace_id(self) -> str:
        return f"GenevaNamespace {{ {self.wrapped.namespace_id()} }}"

    def alter_table_backfill_columns(
        self, request: AlterTableBackfillColumnsRequest
    ) -> AlterTableBackfillColumnsResponse:
        """Start a backfill of a column, and return the id of its job."""
        with answering():
            options, table = backfill_options(request), self._database.open_table(name_of(request.id))
            job_id = table.backfill_async(request.column, runner=self._runner, **options).job_id
        return AlterTableBackfillColumnsResponse(job_id=job_id)

    def refresh_materialized_view(self, request: RefreshMaterializedViewRequest) -> RefreshMaterializedViewResponse:
        """Start a refresh of a view, and return the id of its job."""
        with answering():
            options = refresh_options(request)
            return RefreshMaterializedViewResponse(job_id=self._refresh(name_of(request.id), options))

    def create_materialized_view(self, request: CreateMaterializedViewRequest) -> CreateMaterializedViewResponse:
        """Create a view from a query in the form of :func:`read_query`, and refresh it if data are asked for."""
        with answering():
            name = name_of(request.id)
            view = create_view(self._database, name, request)
            started = self._refresh(name, {}) if request.with_no_data is False else None
        return CreateMaterializedViewResponse(version=view.version, job_id=started)

    def describe_transaction(self, request: DescribeTransactionRequest) -> DescribeTransactionResponse:
        """Describe a job by its id, or by the parts of its table's name and its id, which reads that table only."""
        with answering():
            job = find_job(self._database, request.id or [])
        return self.wrapped.describe_transaction(request) if job is None else describe_job(job)

    def _refresh(self, name: str, options: Mapping[str, Any]) -> str:
        return self._database.open_view(name).refresh_async(self._runner, **options).job_id


def _passed_on(name: str) -> Callable[..., Any]:
    def operation(self: GenevaNamespace, *given: Any, **named: Any) -> Any:
        return getattr(self.wrapped, name)(*given, **named)

    operation.__name__ = name
    operation.__doc__ = getattr(LanceNamespace, name).__doc__
    return operation


for _name, _operation in vars(LanceNamespace).items():
    if not _name.startswith("_") and callable(_operation) and _name not in vars(GenevaNamespace):
        setattr(GenevaNamespace, _name, _passed_on(_name))


def name_of(parts: list[str] | None) -> str:
    """Return a table's name from its identifier in a request."""
    if not parts:
        raise InvalidInput("The request names no table: its id is empty.")
    return ".".join(parts)


def backfill_options(request: AlterTableBackfillColumnsRequest) -> dict[str, Any]:
    """Return the arguments of a backfill besides its column; InvalidInput for fields that have no counterpart."""
    return _options(request, _BACKFILL, {"column"})


def refresh_options(request: RefreshMaterializedViewRequest) -> dict[str, Any]:
    """Return the arguments of a refresh; InvalidInput for fields that have no counterpart."""
    return _options(request, _REFRESH, set())


def _options(request: Any, known: Mapping[str, str], own: set[str]) -> dict[str, Any]:
    given = {name: value for name, value in request.model_dump().items() if value is not None}
    if unknown := sorted(given.keys() - known.keys() - own - _ABOUT_THE_CALL):
        raise InvalidInput(f"The fields {unknown} of the request have no counterpart here. Leave them out.")
    return {known[name]: value for name, value in given.items() if name in known}


def create_view(database: Database, name: str, request: CreateMaterializedViewRequest) -> View:
    """Create the view that a request defines.

    Raises:
        InvalidInput: the query is not one of this package, or the request asks for what views here do not have.
        TableAlreadyExistsError: there is a table or view of that name.
    """
    _check_request(database, name, request)
    return read_query(database, request.source_query, request.output_schema).create_materialized_view(database, name)


def check_view(database: Database, name: str, request: CreateMaterializedViewRequest) -> None:
    """Raise the errors of :func:`create_view` that are found without the code of UDFs, of which none is imported."""
    given, schema = _check_request(database, name, request), request.output_schema
    for part in _COLUMNS:
        columns = given.get(part)
        if isinstance(columns, dict) and (udfs := [column for column in columns if isinstance(columns[column], list)]):
            for column in udfs:
                _column(column, columns[column], load=str)
            rest = {column: sql for column, sql in columns.items() if column not in udfs}
            given, schema = {**given, part: rest or None, "explode": None}, ""
    read_query(database, json.dumps(given), schema)


def _check_request(database: Database, name: str, request: CreateMaterializedViewRequest) -> dict[str, Any]:
    """Refuse what views here do not have, and return the arguments of the query."""
    if request.udtf_spec is not None or request.kind == "udtf":
        raise InvalidInput(
            "Views here have no table functions. Compute a list per row with a UDF, and give its column as 'explode'."
        )
    if request.auto_refresh:
        raise InvalidInput("auto_refresh is not known here: a DAG on the source's asset, or a schedule, refreshes.")
    given = _arguments(request.source_query)
    if (request.kind == "chunker") != (given.get("explode") is not None):
        raise InvalidInput(f"A view of kind {request.kind!r} does not fit: 'explode' of the query makes a 'chunker'.")
    if database.has_table(name):
        raise errors.TableAlreadyExistsError(f"There is a table or view {name!r} already.")
    return given


def read_query(database: Database, text: str, output_schema: str = "") -> Query:
    """Return the query of a request: a JSON object with the arguments of a :class:`airflow_geneva.Query`.

    `source` is the name of a table or view; `select` maps columns to SQL expressions, or to an import path of a UDF and
    its inputs, `["my_project.udfs:embed", ["text"]]`; `where`, `shuffle` (a seed), `limit`, `offset`, `explode`,
    `deduplicate` (an object with its arguments), and `group_by` (a list) with `agg` (as `select`, with SQL aggregates),
    `order_by` and `max_group_rows` are optional. A UDF is imported only if the source of its module makes one of that
    name.

    Args:
        text: the JSON object.
        output_schema: the expected columns of the query, an Arrow schema in base64; empty: any.

    Raises:
        InvalidInput: it is something else, or does not fit its table.
    """
    given = _arguments(text)
    query = database.open_table(given.pop("source")).query()
    for part in _COLUMNS:
        if (columns := given.get(part)) is not None:
            if not isinstance(columns, dict):
                raise InvalidInput(f"{part}={columns!r:.100} is no JSON object that maps columns to expressions.")
            given[part] = {name: _column(name, one) for name, one in columns.items()}
    if (where := given.pop("where", None)) is not None:
        query = query.where(where)
    query = _grouped(query, {name: given.pop(name, None) for name in _GROUPS})
    if (how := given.pop("deduplicate", None)) is not None:
        query = query.deduplicate(**api.Deduplication.arguments(how))
    for name, argument in given.items():
        query = query if argument is None else getattr(query, name)(argument)
    found = query.output_schema()
    if output_schema and not _same(expected := _schema(output_schema), found):
        raise InvalidInput(
            f"output_schema is not that of the query, whose columns are {_columns(found)}, and not "
            f"{_columns(expected)}. Correct it, or leave it empty."
        )
    return query


def _grouped(query: Query, given: Mapping[str, Any]) -> Query:
    keys, columns, order, most = given.values()
    if keys is None:
        if named := [name for name, value in given.items() if value is not None]:
            raise InvalidInput(f"{named[0]} is about groups of rows, and group_by is not given. Give it, too.")
        return query
    if not isinstance(keys, list):
        raise InvalidInput(f"group_by={keys!r:.100} is no JSON list of columns.")
    return query.group_by(*keys).agg(columns or {}, () if order is None else order, most)


def _arguments(text: str) -> dict[str, Any]:
    try:
        given = parse(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("source"), str) or set(given) - set(_QUERY):
        raise InvalidInput(
            f"source_query={text!r:.200} is not a query of this package. Give a JSON object with 'source', and of "
            f'{", ".join(map(repr, _QUERY[1:]))} what it has: {{"source": "docs", "select": {{"n": "length(text)"}}}}.'
        )
    return given


def _column(name: str, given: Any, load: Callable[[str], Any] = load_stored_udf) -> Any:
    if isinstance(given, str) and ":" not in given.partition("'")[0]:
        return given
    match given:
        case [str() as path, list() as inputs]:
            return load(path), inputs
    raise InvalidInput(
        f'Column {name!r} is given as {given!r:.100}. Give SQL, or a UDF with its inputs: ["module:name", ["text"]].'
    )


def _schema(text: str) -> pa.Schema:
    try:
        return read_schema(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise InvalidInput(f"output_schema is no Arrow schema in base64: {error}.") from None


def _same(one: pa.Schema, other: pa.Schema) -> bool:
    return [(field.name, field.type) for field in one] == [(field.name, field.type) for field in other]


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def find_job(database: Database, parts: list[str]) -> api.Job | None:
    """Return the job of an identifier; None if there is none, and it may be a transaction of another system."""
    *table, job_id = parts or [""]
    try:
        if not table:
            return database.job(job_id)
        return next((job for job in database.jobs(None, ".".join(table)) if job.id == job_id), None)
    except InvalidInput:
        return None


def describe_job(job: api.Job) -> DescribeTransactionResponse:
    """Return the status of a job; its property `rows_left` counts the rows that a PARTIAL one leaves for the next."""
    counted = ("rows_total", "rows_pending", "rows_computed", "rows_reused", "rows_skipped", "rows_failed", "rows_left")
    about = {name: str(getattr(job, name)) for name in counted}
    about |= {"state": job.state, "target": job.target, "kind": job.kind}
    about |= {"error": job.error} if job.error else {}
    if job.commits:
        about["version"] = str(job.commits[-1])
    return DescribeTransactionResponse(status="Failed" if job.dead else _STATUS[job.state], properties=about)


_ERRORS: tuple[tuple[type[Exception], type[errors.LanceNamespaceError]], ...] = (
    (NoSuchTable, errors.TableNotFoundError),
    (TableRemade, errors.ConcurrentModificationError),
    (CommitConflict, errors.ConcurrentModificationError),
    (CodeChanged, errors.InvalidTableStateError),
    (UnknownValues, errors.InvalidTableStateError),
    (InvalidInput, errors.InvalidInputError),
    (OSError, errors.ServiceUnavailableError),
    (GenevaError, errors.InternalError),
)


def as_namespace_error(error: Exception) -> errors.LanceNamespaceError | None:
    """Return the error of the specification for an error of this package; None if it is another one."""
    return next((kind(str(error)) for ours, kind in _ERRORS if isinstance(error, ours)), None)


@contextmanager
def answering() -> Iterator[None]:
    """Raise the errors of the specification in place of this package's."""
    try:
        yield
    except (GenevaError, OSError) as error:
        converted = as_namespace_error(error)
        assert converted is not None
        raise converted from error
