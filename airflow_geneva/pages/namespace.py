"""Lance's namespace over HTTP: programs list and open tables, and ask for backfills and refreshes as DAG runs.

All of it is for users who may read the connection; a DAG run is started for those who may start runs of its DAG.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from lance_namespace import (
    AlterTableBackfillColumnsRequest,
    CreateMaterializedViewRequest,
    DeclareTableResponse,
    DescribeTableResponse,
    DescribeTransactionResponse,
    ListNamespacesResponse,
    ListTablesResponse,
    RefreshMaterializedViewRequest,
    errors,
)
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import GenevaError, InvalidInput, mask_secrets
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.namespace import (
    DAGS,
    NOT_YET,
    RUN_STATUS,
    as_namespace_error,
    backfill_options,
    check_view,
    create_options,
    describe_job,
    find_job,
    name_of,
    new_run_id,
    refresh_options,
)
from airflow_geneva.operators._airflow_internals import start_run, state_of_run
from airflow_geneva.pages.access import ViewerDep, VisibleDatabase
from airflow_geneva.pages.own_threads import in_own_threads
from airflow_geneva.pages.rendering import NOT_KEPT
from airflow_geneva.pages.runs import error_of_run, jobs_of_run, read_jobs_of

logger = logging.getLogger("airflow_geneva.pages")

PREFIX = "/namespace/"
_OF_A_TABLE = {"id", "identity", "context", "vend_credentials", "check_declared"}
_CODES = {
    HTTPStatus.BAD_REQUEST: errors.InvalidInputError,
    HTTPStatus.UNAUTHORIZED: errors.UnauthenticatedError,
    HTTPStatus.FORBIDDEN: errors.PermissionDeniedError,
    HTTPStatus.NOT_FOUND: errors.NamespaceNotFoundError,
    HTTPStatus.METHOD_NOT_ALLOWED: errors.UnsupportedOperationError,
    HTTPStatus.SERVICE_UNAVAILABLE: errors.ServiceUnavailableError,
}
_STATUS = {
    errors.ErrorCode.UNSUPPORTED: HTTPStatus.NOT_ACCEPTABLE,
    errors.ErrorCode.NAMESPACE_NOT_FOUND: HTTPStatus.NOT_FOUND,
    errors.ErrorCode.TABLE_NOT_FOUND: HTTPStatus.NOT_FOUND,
    errors.ErrorCode.TRANSACTION_NOT_FOUND: HTTPStatus.NOT_FOUND,
    errors.ErrorCode.TABLE_ALREADY_EXISTS: HTTPStatus.CONFLICT,
    errors.ErrorCode.INVALID_INPUT: HTTPStatus.BAD_REQUEST,
    errors.ErrorCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    errors.ErrorCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    errors.ErrorCode.CONCURRENT_MODIFICATION: HTTPStatus.CONFLICT,
    errors.ErrorCode.INVALID_TABLE_STATE: HTTPStatus.CONFLICT,
    errors.ErrorCode.SERVICE_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}


def failure(status: int, message: str | None) -> Response:
    """Answer with an error in the form of the specification, for an error that no operation expected."""
    kind = _CODES.get(HTTPStatus(status), errors.InternalError)
    return _error(kind(message or HTTPStatus(status).phrase))


def _error(error: errors.LanceNamespaceError) -> Response:
    text = mask_secrets(str(error))
    return JSONResponse({"error": text, "code": int(error.code)}, _STATUS.get(error.code, 500), NOT_KEPT)


class NamespaceRoute(APIRoute):
    """A route that answers errors of this package in the form of the specification."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except errors.LanceNamespaceError as error:
                return _error(error)
            except (GenevaError, OSError, ValidationError) as error:
                kind = InvalidInput(str(error)) if isinstance(error, ValidationError) else error
                logger.warning("%s is not answered: %s", request.url.path, mask_secrets(str(error)))
                return _error(as_namespace_error(kind) or errors.InternalError(str(error)))

        return answer


router = APIRouter(prefix=PREFIX + "{conn_id}/v1", route_class=NamespaceRoute)


def opened(request: Request, viewer: ViewerDep, conn_id: str) -> VisibleDatabase:
    """Return the database of a connection that the user may read; refuse requests that a browser's cookie signs."""
    if "authorization" not in request.headers:
        raise HTTPException(401)
    if not viewer.may_read_connection(conn_id):
        raise HTTPException(403)
    return VisibleDatabase.open(conn_id, viewer)


DatabaseDep = Annotated[VisibleDatabase, Depends(in_own_threads(opened))]


def _parts(given: str, delimiter: str) -> list[str]:
    return [] if given in ("", delimiter) else given.split(delimiter)


async def named(request: Request, id: str, delimiter: str = "$") -> list[str]:
    """Return the parts of the identifier in a path; refuse a body that names something else."""
    if not delimiter:
        raise InvalidInput("The delimiter of the request is empty. Leave it out, or give the one in the path.")
    parts = _parts(id, delimiter)
    try:
        body = parse(await request.body() or b"{}")
    except ValueError as error:
        raise InvalidInput(f"The body of the request is no JSON: {error}.") from None
    found = body.get("id") if isinstance(body, dict) else None
    if found is not None and (
        not isinstance(found, list) or _parts(delimiter.join(map(str, found)), delimiter) != parts
    ):
        raise InvalidInput(f"The path names {parts}, and the body names {found}. Name the same, or leave it out there.")
    return parts


PartsDep = Annotated[list[str], Depends(named)]


def _answer(model: BaseModel) -> Response:
    return JSONResponse(model.model_dump(mode="json", by_alias=True, exclude_none=True), headers=NOT_KEPT)


@router.get("/namespace/{id}/table/list")
@in_own_threads
def list_tables(conn_id: str, database: DatabaseDep, parts: PartsDep) -> Response:
    """List the tables of a namespace."""
    _, names = _below(database, parts)
    return _answer(ListTablesResponse(tables=names))


@router.get("/namespace/{id}/list")
@in_own_threads
def list_namespaces(conn_id: str, database: DatabaseDep, parts: PartsDep) -> Response:
    """List the namespaces in a namespace; a folder of tables has none."""
    namespaces, _ = _below(database, parts)
    return _answer(ListNamespacesResponse(namespaces=namespaces))


@router.post("/namespace/{id}/exists")
@router.post("/namespace/{id}/describe")
@in_own_threads
def find_namespace(conn_id: str, database: DatabaseDep, parts: PartsDep) -> Response:
    """Answer 404 for a namespace that does not exist."""
    _below(database, parts)
    return JSONResponse({}, headers=NOT_KEPT)


def _below(database: VisibleDatabase, within: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the namespaces and tables that lie directly in a namespace."""
    if not database.in_catalog:
        if within:
            raise errors.NamespaceNotFoundError(f"A folder of tables has no namespace {'.'.join(within)!r}.")
        return [], database.tables()
    beginning = "".join(f"{part}." for part in within)
    found = [name.removeprefix(beginning) for name in database.tables() if name.startswith(beginning)]
    if within and not found:
        raise errors.NamespaceNotFoundError(f"There is no namespace {'.'.join(within)!r} with tables.")
    deeper = sorted({name.partition(".")[0] for name in found if "." in name})
    return deeper, [name for name in found if "." not in name]


@router.post("/table/{id}/exists")
@router.post("/table/{id}/describe")
@in_own_threads
def describe_table(conn_id: str, database: DatabaseDep, parts: PartsDep, body: dict[str, Any]) -> Response:
    """Say where a table lies; with the credentials of its store only if the connection's `vend_credentials` is true."""
    _check_fields(body)
    location = database.database.open_table(name_of(parts)).location
    return _answer(DescribeTableResponse(**_access(conn_id, location, body)))


@router.post("/table/{id}/declare")
@in_own_threads
def declare_table(conn_id: str, database: DatabaseDep, parts: PartsDep, body: dict[str, Any]) -> Response:
    """Say where a program may write a new table; nothing is written here."""
    _check_fields(body)
    name = name_of(parts)
    if database.in_catalog:
        raise errors.UnsupportedOperationError(
            f"The tables of connection {conn_id!r} are those of a catalog: declare {name!r} there."
        )
    if database.database.has_table(name):
        raise errors.TableAlreadyExistsError(f"There is a table or view {name!r} already.")
    return _answer(DeclareTableResponse(**_access(conn_id, database.database.location(name), body)))


def _check_fields(body: Mapping[str, Any]) -> None:
    if unknown := sorted(name for name, value in body.items() if value and name not in _OF_A_TABLE):
        raise InvalidInput(f"The fields {unknown} of the request have no counterpart here. Leave them out.")


def _access(conn_id: str, location: TableLocation, body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = body.get("vend_credentials") is not False and LanceHook(conn_id).vends_credentials
    vended = pylance_access(location.options)["storage_options"] if wanted else None
    return {"location": location.uri, "storage_options": vended}


@router.post("/table/{id}/backfill_column")
@in_own_threads
def backfill_column(conn_id: str, database: DatabaseDep, parts: PartsDep, body: dict[str, Any]) -> Response:
    """Start the DAG that backfills on request."""
    asked = AlterTableBackfillColumnsRequest.model_validate(body)
    name = name_of(parts)
    conf = {"table": name, "column": asked.column, **backfill_options(asked)}
    database.database.open_table(name).definition(asked.column)
    return _start(database, conn_id, "backfill", conf)


@router.post("/materialized_view/{id}/refresh")
@in_own_threads
def refresh_view(conn_id: str, database: DatabaseDep, parts: PartsDep, body: dict[str, Any]) -> Response:
    """Start the DAG that refreshes on request."""
    asked = RefreshMaterializedViewRequest.model_validate(body)
    view = database.database.open_view(name_of(parts))
    return _start(database, conn_id, "refresh", {"view": view.name, **refresh_options(asked)})


@router.post("/materialized_view/{id}/create")
@in_own_threads
def create_view(conn_id: str, database: DatabaseDep, parts: PartsDep, body: dict[str, Any]) -> Response:
    """Start the DAG that creates views, which imports the functions of the query; this process never does."""
    asked = CreateMaterializedViewRequest.model_validate(body)
    name = name_of(parts)
    check_view(database.database, name, asked)
    return _start(database, conn_id, "create_view", create_options(name, asked), version=NOT_YET)


def _start(database: VisibleDatabase, conn_id: str, kind: str, conf: Mapping[str, Any], **more: int) -> Response:
    """Start a DAG run, and return its id as the job's, which is `DAG:RUN`."""
    dag_id = LanceHook(conn_id).dag_on_request(kind) or DAGS[kind]
    if not database.viewer.may_trigger_dag(dag_id):
        raise errors.PermissionDeniedError(f"You may not start runs of DAG {dag_id!r}, which answers such requests.")
    run_id = new_run_id()
    start_run(dag_id, run_id, {"lance_conn_id": conn_id, **conf}, database.viewer.user)
    return JSONResponse({"job_id": f"{dag_id}:{run_id}", **more}, headers=NOT_KEPT)


@router.post("/transaction/{id}/describe")
@in_own_threads
def describe_transaction(conn_id: str, database: DatabaseDep, parts: PartsDep) -> Response:
    """Say how a DAG run that was asked for goes, or another job of the database, by its id."""
    dag_id, separated, run_id = (parts or [""])[-1].partition(":")
    if separated:
        return _answer(_describe_run(database, dag_id, run_id))
    job = find_job(database.database, parts)
    if job is None or not database.viewer.may_see_job(conn_id, job):
        raise errors.TransactionNotFoundError(f"There is no job {'.'.join(parts)!r}.")
    return _answer(describe_job(job))


def _describe_run(database: VisibleDatabase, dag_id: str, run_id: str) -> DescribeTransactionResponse:
    state = state_of_run(dag_id, run_id) if database.viewer.may_read_dag(dag_id) else None
    if state is None:
        raise errors.TransactionNotFoundError(f"There is no run {run_id!r} of a DAG {dag_id!r} that you may read.")
    about = {"dag_id": dag_id, "run_id": run_id}
    for found in read_jobs_of(jobs_of_run(dag_id, run_id), database.viewer):
        if found.job is not None:
            about |= {**(describe_job(found.job).properties or {}), "job_id": found.job.id}
    if state == "failed" and "error" not in about and (error := error_of_run(dag_id, run_id)):
        about["error"] = mask_secrets(error)
    return DescribeTransactionResponse(status=RUN_STATUS.get(state, "Queued"), properties=about)


@router.api_route("/{rest:path}", methods=["GET", "POST"])
def refuse(conn_id: str, database: DatabaseDep, rest: str) -> Response:
    """Answer that an operation is not supported here: it belongs to the tables' store, or to the catalog."""
    raise errors.UnsupportedOperationError(
        f"{rest.rpartition('/')[2]!r} is no operation of this server, which lists and describes tables, fills columns, "
        "and creates and refreshes views."
    )
