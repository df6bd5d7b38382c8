"""Lance's namespace over HTTP: programs list and open tables, and ask for backfills and refreshes as DAG runs.

All of it is for users who may read the connection; a DAG run is started for those who may start runs of its DAG. Each
route depends on the user of a token, then on these rights, and only then on the body of the request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from http import HTTPStatus
from secrets import token_hex
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

from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.namespace import (
    as_namespace_error,
    backfill_options,
    describe_job,
    name_of,
    refresh_options,
)
from airflow_geneva.operators._airflow_internals import start_run, state_of_run, user_of_token
from airflow_geneva.pages.access import CurrentUser, visible_database
from airflow_geneva.pages.namespace_reads import (
    check_backfill,
    check_new_view,
    find_visible_job,
    locate_existing,
    locate_new,
    name_of_view,
    names_below,
)
from airflow_geneva.pages.own_threads import in_own_threads
from airflow_geneva.pages.readers import read
from airflow_geneva.pages.rendering import NOT_KEPT
from airflow_geneva.pages.runs import read_jobs_of
from airflow_geneva.pages.visible import VisibleDatabase
from airflow_geneva.pages.xcoms import databases_of, error_of_run, jobs_of_run

logger = logging.getLogger("airflow_geneva.pages")

DAGS = {"backfill": "geneva_backfill", "refresh": "geneva_refresh", "create_view": "geneva_create_view"}
"""The DAGs that answer requests, unless the connection names others."""
PREFIX = "/namespace/"
MOST_BYTES = 1_000_000
"""The body of a request; more is answered by 413."""
_NOT_YET = 0
"""The version of a view that a DAG run is going to create; versions of Lance begin at 1."""
_RUN_STATUS = {"queued": "Queued", "running": "Running", "success": "Succeeded", "failed": "Failed"}
_OF_A_TABLE = {"id", "identity", "context", "vend_credentials", "check_declared"}
_CODES = {
    HTTPStatus.BAD_REQUEST: errors.InvalidInputError,
    HTTPStatus.UNAUTHORIZED: errors.UnauthenticatedError,
    HTTPStatus.FORBIDDEN: errors.PermissionDeniedError,
    HTTPStatus.NOT_FOUND: errors.NamespaceNotFoundError,
    HTTPStatus.METHOD_NOT_ALLOWED: errors.UnsupportedOperationError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: errors.InvalidInputError,
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
    # The specification has no code of its own for it.
    kept = status if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else None
    return _error(kind(message or HTTPStatus(status).phrase), kept)


def _error(error: errors.LanceNamespaceError, status: int | None = None) -> Response:
    text = mask_secrets(str(error))
    status = status or int(_STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR))
    return JSONResponse({"error": text, "code": int(error.code)}, status, NOT_KEPT)


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


async def token_viewer(request: Request) -> CurrentUser:
    """Return the user of the bearer token; a browser's cookie does not count, because other sites can use it."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise HTTPException(401)
    request.state.viewer = CurrentUser(await user_of_token(token.strip()))
    return request.state.viewer  # type: ignore[no-any-return]


TokenViewerDep = Annotated[CurrentUser, Depends(token_viewer)]


def opened(viewer: TokenViewerDep, conn_id: str) -> VisibleDatabase:
    """Return the database of a connection that the user may read."""
    if not viewer.may_read_connection(conn_id):
        raise HTTPException(403)
    return visible_database(conn_id, viewer)


DatabaseDep = Annotated[VisibleDatabase, Depends(in_own_threads(opened))]


def starter(kind: str) -> Any:
    """Return a dependency on the DAG that answers requests of a kind, of which the user may start runs."""

    def dag_to_start(conn_id: str, viewer: TokenViewerDep, database: DatabaseDep) -> str:
        dag_id = LanceHook(conn_id).dag_on_request(kind) or DAGS[kind]
        if not viewer.may_trigger_dag(dag_id):
            message = f"You may not start runs of DAG {dag_id!r}, which answers such requests."
            raise errors.PermissionDeniedError(message)
        return dag_id

    return Depends(in_own_threads(dag_to_start))


async def document(request: Request, database: DatabaseDep) -> Any:
    """Return the JSON document that is the body of a request, which is not read before the user's right is known."""
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise HTTPException(413)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413)
    try:
        return parse(bytes(body) or b"{}")
    except ValueError as error:
        raise InvalidInput(f"The body of the request is no JSON: {error}.") from None


DocumentDep = Annotated[Any, Depends(document)]


async def fields_of(body: DocumentDep) -> dict[str, Any]:
    """Return the body of a request, which must be a JSON object."""
    if not isinstance(body, dict):
        raise InvalidInput(f"The body of the request is {body!r:.100} and no JSON object. Give one.")
    return body


BodyDep = Annotated[dict[str, Any], Depends(fields_of)]


def _parts(given: str, delimiter: str) -> list[str]:
    return [] if given in ("", delimiter) else given.split(delimiter)


async def named(id: str, body: DocumentDep, delimiter: str = "$") -> list[str]:
    """Return the parts of the identifier in a path; refuse a body that names something else."""
    if not delimiter:
        raise InvalidInput("The delimiter of the request is empty. Leave it out, or give the one in the path.")
    parts = _parts(id, delimiter)
    found = body.get("id") if isinstance(body, dict) else None
    if found is not None and (
        not isinstance(found, list) or _parts(delimiter.join(map(str, found)), delimiter) != parts
    ):
        what = f"The path names {parts}, and the body names {found!r:.200}. Name the same, or leave it out there."
        raise InvalidInput(what)
    return parts


PartsDep = Annotated[list[str], Depends(named)]


def _answer(model: BaseModel) -> Response:
    return JSONResponse(model.model_dump(mode="json", by_alias=True, exclude_none=True), headers=NOT_KEPT)


@router.get("/namespace/{id}/table/list")
@in_own_threads
def list_tables(conn_id: str, database: DatabaseDep, parts: PartsDep) -> Response:
    """List the tables of a namespace."""
    _, names = _below(conn_id, database, parts)
    return _answer(ListTablesResponse(tables=names))


@router.get("/namespace/{id}/list")
@in_own_threads
def list_namespaces(conn_id: str, database: DatabaseDep, parts: PartsDep) -> Response:
    """List the namespaces in a namespace; a folder of tables has none."""
    namespaces, _ = _below(conn_id, database, parts)
    return _answer(ListNamespacesResponse(namespaces=namespaces))


@router.post("/namespace/{id}/exists")
@router.post("/namespace/{id}/describe")
@in_own_threads
def find_namespace(conn_id: str, database: DatabaseDep, parts: PartsDep) -> Response:
    """Answer 404 for a namespace that does not exist."""
    _below(conn_id, database, parts)
    return JSONResponse({}, headers=NOT_KEPT)


def _below(conn_id: str, database: VisibleDatabase, within: list[str]) -> tuple[list[str], list[str]]:
    return read(database.viewer, conn_id, names_below, database, within)


@router.post("/table/{id}/exists")
@router.post("/table/{id}/describe")
@in_own_threads
def describe_table(conn_id: str, database: DatabaseDep, parts: PartsDep, body: BodyDep) -> Response:
    """Say where a table lies; with the credentials of its store only if the connection's `vend_credentials` is true."""
    _check_fields(body)
    name = name_of(parts)
    location = read(database.viewer, (conn_id, name), locate_existing, database, name)
    return _answer(DescribeTableResponse(**_access(conn_id, location, body)))


@router.post("/table/{id}/declare")
@in_own_threads
def declare_table(conn_id: str, database: DatabaseDep, parts: PartsDep, body: BodyDep) -> Response:
    """Say where a program may write a new table; nothing is written here."""
    _check_fields(body)
    name = name_of(parts)
    if database.in_catalog:
        raise errors.UnsupportedOperationError(
            f"The tables of connection {conn_id!r} are those of a catalog: declare {name!r} there."
        )
    location = read(database.viewer, (conn_id, name), locate_new, database, name)
    return _answer(DeclareTableResponse(**_access(conn_id, location, body)))


def _check_fields(body: Mapping[str, Any]) -> None:
    if unknown := sorted(name for name, value in body.items() if value and name not in _OF_A_TABLE):
        raise InvalidInput(f"The fields {unknown} of the request have no counterpart here. Leave them out.")


def _access(conn_id: str, location: TableLocation, body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = body.get("vend_credentials") is not False and LanceHook(conn_id).vends_credentials
    vended = pylance_access(location.options)["storage_options"] if wanted else None
    return {"location": location.uri, "storage_options": vended}


@router.post("/table/{id}/backfill_column")
@in_own_threads
def backfill_column(
    conn_id: str,
    viewer: TokenViewerDep,
    database: DatabaseDep,
    dag_id: Annotated[str, starter("backfill")],
    parts: PartsDep,
    body: BodyDep,
) -> Response:
    """Start the DAG that backfills on request."""
    asked = AlterTableBackfillColumnsRequest.model_validate(body)
    name = name_of(parts)
    conf = {"table": name, "column": asked.column, **backfill_options(asked)}
    read(database.viewer, (conn_id, name), check_backfill, database, name, asked.column)
    return _start(viewer, conn_id, dag_id, conf)


@router.post("/materialized_view/{id}/refresh")
@in_own_threads
def refresh_view(
    conn_id: str,
    viewer: TokenViewerDep,
    database: DatabaseDep,
    dag_id: Annotated[str, starter("refresh")],
    parts: PartsDep,
    body: BodyDep,
) -> Response:
    """Start the DAG that refreshes on request."""
    asked = RefreshMaterializedViewRequest.model_validate(body)
    name = name_of(parts)
    view = read(database.viewer, (conn_id, name), name_of_view, database, name)
    return _start(viewer, conn_id, dag_id, {"view": view, **refresh_options(asked)})


@router.post("/materialized_view/{id}/create")
@in_own_threads
def create_view(
    conn_id: str,
    viewer: TokenViewerDep,
    database: DatabaseDep,
    dag_id: Annotated[str, starter("create_view")],
    parts: PartsDep,
    body: BodyDep,
) -> Response:
    """Start the DAG that creates views, which imports the functions of the query; this process never does."""
    asked = CreateMaterializedViewRequest.model_validate(body)
    name = name_of(parts)
    read(database.viewer, (conn_id, name), check_new_view, database, name, asked)
    query = {"source_query": asked.source_query, "output_schema": asked.output_schema}
    conf = {"view": name, **query, "with_no_data": asked.with_no_data is not False}
    return _start(viewer, conn_id, dag_id, conf, version=_NOT_YET)


def _start(viewer: CurrentUser, conn_id: str, dag_id: str, conf: Mapping[str, Any], **more: int) -> Response:
    """Start a DAG run, and return its id as the job's, which is `DAG:RUN`."""
    run_id = f"namespace__{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.%f}__{token_hex(4)}"
    start_run(dag_id, run_id, {"lance_conn_id": conn_id, **conf}, viewer.user)
    return JSONResponse({"job_id": f"{dag_id}:{run_id}", **more}, headers=NOT_KEPT)


@router.post("/transaction/{id}/describe")
@in_own_threads
def describe_transaction(conn_id: str, viewer: TokenViewerDep, database: DatabaseDep, parts: PartsDep) -> Response:
    """Say how a DAG run that was asked for goes, or another job of the database, by its id."""
    dag_id, separated, run_id = (parts or [""])[-1].partition(":")
    if separated:
        return _answer(_describe_run(viewer, dag_id, run_id))
    job = read(database.viewer, conn_id, find_visible_job, database, parts)
    if job is None:
        raise errors.TransactionNotFoundError(f"There is no job {'.'.join(parts)!r}.")
    return _answer(describe_job(job))


def _describe_run(viewer: CurrentUser, dag_id: str, run_id: str) -> DescribeTransactionResponse:
    state = state_of_run(dag_id, run_id) if viewer.may_read_dag(dag_id) else None
    if state is None:
        raise errors.TransactionNotFoundError(f"There is no run {run_id!r} of a DAG {dag_id!r} that you may read.")
    about = {"dag_id": dag_id, "run_id": run_id}
    planned = jobs_of_run(dag_id, run_id)
    for found in read(viewer, dag_id, read_jobs_of, planned, databases_of(planned), viewer):
        if found.job is not None:
            about |= {**(describe_job(found.job).properties or {}), "job_id": found.job.id}
    unexplained = state == "failed" and "error" not in about
    if unexplained and viewer.may_read_xcoms(dag_id) and (error := error_of_run(dag_id, run_id)):
        about["error"] = mask_secrets(error)
    return DescribeTransactionResponse(status=_RUN_STATUS.get(state, "Queued"), properties=about)


@router.api_route("/{rest:path}", methods=["GET", "POST"])
def refuse(conn_id: str, database: DatabaseDep, rest: str) -> Response:
    """Answer that an operation is not supported here: it belongs to the tables' store, or to the catalog."""
    raise errors.UnsupportedOperationError(
        f"{rest.rpartition('/')[2]!r} is no operation of this server, which lists and describes tables, fills columns, "
        "and creates and refreshes views."
    )
