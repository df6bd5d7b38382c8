"""Routes and templates of the pages. Routes authenticate the user, and answer 404 for objects the user may not see."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse
from starlette.exceptions import HTTPException as HttpError
from starlette.responses import Response

from airflow_geneva.engine import api
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import DamagedRecord, GenevaError, InvalidInput
from airflow_geneva.links.job import PAGES
from airflow_geneva.operators._airflow_internals import user_dependency
from airflow_geneva.pages.access import (
    CurrentUser,
    Maintainer,
    ViewerDep,
    list_databases,
    maintainers,
    open_database,
    table_of_asset,
    visible_database,
)
from airflow_geneva.pages.databases import (
    DatabaseDetails,
    Filters,
    count_freshness_with_above,
    read_database,
    read_graph,
)
from airflow_geneva.pages.documents import answer, database_document, job_document, table_document
from airflow_geneva.pages.jobs import ErrorOrder, ErrorsPage, JobDetails, find_job, list_errors, request_cancel
from airflow_geneva.pages.namespace import PREFIX, failure, router
from airflow_geneva.pages.own_threads import in_own_threads
from airflow_geneva.pages.plan import read_plan
from airflow_geneva.pages.readers import ReaderLost, read
from airflow_geneva.pages.rendering import HEADERS, NOT_KEPT, STATIC, page
from airflow_geneva.pages.runs import JobOfRun, job_of_task, read_jobs_of
from airflow_geneva.pages.tables import compare, describe_whole_table, read_histories, read_versions
from airflow_geneva.pages.visible import VisibleDatabase
from airflow_geneva.pages.xcoms import databases_of, jobs_of_dag, jobs_of_run

logger = logging.getLogger("airflow_geneva.pages")

_COUNT_SECONDS = 2.0
_FIRST_SECONDS = 0.5
_POLL_SECONDS = 2.0
_IDLE_SECONDS = 30.0
_FILES = {"pages.css": "text/css", "pages.js": "text/javascript", "icon.svg": "image/svg+xml"}

# Airflow does not authenticate requests to a plugin's app. Do not mount sub-apps here: they would skip the dependency.
app = FastAPI(
    title="Geneva", dependencies=[Depends(user_dependency())], docs_url=None, redoc_url=None, openapi_url=None,
    redirect_slashes=False,
)  # fmt: skip

app.include_router(router)

FiltersDep = Annotated[Filters, Depends()]
PageNumber = Annotated[int, Query(ge=1, le=40_000)]


@dataclass(frozen=True)
class JobPlace:
    """A job and its page; `conn_id` is None if the job's task used another database than the connection's."""

    conn_id: str | None
    location: TableLocation
    job_id: str
    path: str
    query: tuple[tuple[str, str], ...] = ()

    def url(self, part: str = "", **more: int | str) -> str:
        query = urlencode({**dict(self.query), **more})
        return f"{self.path}{part}" + (f"?{query}" if query else "")


@dataclass(frozen=True)
class TaskPlace:
    """A task instance, all jobs of its DAG run, and the job to which the task belongs, if any."""

    dag_id: str
    run_id: str
    task_id: str
    jobs: tuple[JobOfRun, ...]
    job: JobPlace | None


def task_place(
    request: Request, viewer: ViewerDep, dag_id: str, run_id: str, task_id: str, map_index: str = "-1"
) -> TaskPlace:
    """Return the task that the query names; 403 if the viewer may not read the DAG's task instances."""
    if not viewer.may_read_dag(dag_id):
        raise HTTPException(403)
    # For a task that is not mapped, the UI passes the name of the placeholder.
    index = int(map_index) if map_index.isdecimal() and len(map_index) < 10 else -1
    run_id = _run_id(run_id)
    jobs = tuple(jobs_of_run(dag_id, run_id))
    planned = job_of_task(jobs, task_id, index)
    if planned is None:
        return TaskPlace(dag_id, run_id, task_id, jobs, None)
    request.state.conn_id = planned.lance_conn_id
    query = (("dag_id", dag_id), ("run_id", run_id), ("task_id", task_id), ("map_index", str(index)))
    database = open_database(planned.lance_conn_id)
    location, own = read(viewer, planned.lance_conn_id, planned.locate, database)
    place = JobPlace(planned.lance_conn_id if own else None, location, planned.job_id, "task", query)
    return TaskPlace(dag_id, run_id, task_id, jobs, place)


def _run_id(given: str) -> str:
    # Airflow 3.1 does not encode run ids in the query, where a plus sign means a blank. Run ids have no blanks.
    return given.replace(" ", "+")


def table_place(viewer: ViewerDep, conn_id: str, table: str) -> tuple[VisibleDatabase, TableLocation]:
    """Return the table that the path names, and its database; 404 if the viewer may not see it."""
    if not viewer.may_see_table(conn_id, table):
        raise HTTPException(404)
    opened = visible_database(conn_id, viewer)
    return opened, read(viewer, (conn_id, table), opened.locate, table)


def job_place(viewer: ViewerDep, conn_id: str, table: str, job_id: str) -> JobPlace:
    """Return the job that the path names; 404 if the viewer may not see anything of its database."""
    if not viewer.may_see_database(conn_id):
        raise HTTPException(404)
    path = "/".join(quote(part, safe="") for part in ("databases", conn_id, "tables", table, "jobs", job_id))
    location = read(viewer, (conn_id, table), visible_database(conn_id, viewer).locate, table)
    return JobPlace(conn_id, location, job_id, path)


TaskDep = Annotated[TaskPlace, Depends(in_own_threads(task_place))]
TableDep = Annotated[tuple[VisibleDatabase, TableLocation], Depends(in_own_threads(table_place))]
JobDep = Annotated[JobPlace, Depends(in_own_threads(job_place))]


@app.get("/")
@in_own_threads
def show_databases(request: Request, viewer: ViewerDep) -> HTMLResponse:
    return page(request, "overview.html", databases=list_databases(viewer))


@app.get("/static/{name}")
def send_file(name: str) -> Response:
    if name not in _FILES:
        raise HTTPException(404)
    kept = {**HEADERS, "Cache-Control": "private, max-age=86400"}
    return FileResponse(STATIC / name, media_type=_FILES[name], headers=kept)


@app.get("/task")
@app.get("/task/live")
@in_own_threads
def show_task(
    request: Request, viewer: ViewerDep, task: TaskDep, errors: PageNumber = 1, shards: PageNumber = 1,
    order: ErrorOrder = "newest",
) -> HTMLResponse:  # fmt: skip
    """Show the job that a task works for, or the jobs of its run."""
    if task.job is not None:
        return _job_page(request, viewer, task.job, errors, shards, order)
    if _is_live(request):
        raise HTTPException(404)
    return page(request, "task.html", task=task)


@app.get("/run")
@app.get("/run/live")
@in_own_threads
def show_run(request: Request, viewer: ViewerDep, dag_id: str, run_id: str) -> HTMLResponse:
    """Show the jobs of a DAG run."""
    return _runs_page(request, viewer, dag_id, _run_id(run_id))


@app.get("/dag")
@app.get("/dag/live")
@in_own_threads
def show_dag(request: Request, viewer: ViewerDep, dag_id: str) -> HTMLResponse:
    """Show the newest jobs of a DAG."""
    return _runs_page(request, viewer, dag_id, None)


def _runs_page(request: Request, viewer: CurrentUser, dag_id: str, run_id: str | None) -> HTMLResponse:
    if not viewer.may_read_dag(dag_id):
        raise HTTPException(403)
    began = time.monotonic()
    planned = jobs_of_dag(dag_id) if run_id is None else jobs_of_run(dag_id, run_id)
    found = read(viewer, dag_id, read_jobs_of, planned, databases_of(planned), viewer)
    running = any(one.job is not None and one.job.open for one in found)
    values = {"dag_id": dag_id, "run_id": run_id, "jobs": found, "wait": _pause(began, running)}
    return _live_page(request, "run.html", shares=JobDetails.shares, **values)


# Programs read the same with `.json` behind the path. A table whose own name ends with it is read with it twice.
@app.get("/databases/{conn_id}.json")
@in_own_threads
def send_database(request: Request, viewer: ViewerDep, conn_id: str, filters: FiltersDep) -> Response:
    """Send a database's tables, views and newest jobs; what is still counted has the state `counting`."""
    _, shown = _read_database(request, viewer, conn_id, filters)
    return answer(database_document(conn_id, shown))


@app.get("/databases/{conn_id}/tables/{table}.json")
@in_own_threads
def send_table(request: Request, viewer: ViewerDep, conn_id: str, place: TableDep) -> Response:
    """Send a table or view with the rows that are due, as far as they are known within two seconds."""
    opened, location = place
    key = (conn_id, location.name)
    found = read(viewer, key, count_freshness_with_above, opened, location, _COUNT_SECONDS)
    return answer(table_document(read(viewer, key, describe_whole_table, location), found))


@app.get("/databases/{conn_id}/tables/{table}/jobs/{job_id}.json")
@in_own_threads
def send_job(request: Request, viewer: ViewerDep, job: JobDep) -> Response:
    """Send a job with its shards."""
    return answer(job_document(_find(viewer, job).job))


@app.get("/databases/{conn_id}")
@app.get("/databases/{conn_id}/live")
@in_own_threads
def show_database(request: Request, viewer: ViewerDep, conn_id: str, filters: FiltersDep) -> HTMLResponse:
    began = time.monotonic()
    opened, shown = _read_database(request, viewer, conn_id, filters)
    values = {"opened": opened, "shown": shown, "filters": filters, "shares": JobDetails.shares}
    values["dags"] = maintainers(conn_id, viewer)
    wait = 1.0 if shown.counting else _pause(began, bool(shown.running))
    return _live_page(request, "database.html", conn_id=conn_id, wait=wait, **values)


@app.get("/databases/{conn_id}/counts")
@in_own_threads
def show_counts(request: Request, viewer: ViewerDep, conn_id: str) -> HTMLResponse:
    """Send how many tables and jobs of a database are running, failed, stale or unreadable, for the overview."""
    try:
        _, shown = _read_database(request, viewer, conn_id, Filters())
    except (GenevaError, OSError) as error:
        logger.warning("%s cannot be counted: %s", conn_id, mask_secrets(str(error)))
        return page(request, "_counts.html", conn_id=conn_id, shown=None)
    return page(request, "_counts.html", conn_id=conn_id, shown=shown)


@app.get("/databases/{conn_id}/graph")
@app.get("/databases/{conn_id}/graph/live")
@in_own_threads
def show_graph(
    request: Request, viewer: ViewerDep, conn_id: str, focus: str = "", fold: bool = False
) -> HTMLResponse:  # fmt: skip
    """Show the dependency graph of a database, or of one table, with the freshness of each column and view."""
    opened = _open_seen(viewer, conn_id)
    shown, graph = read(viewer, conn_id, read_graph, opened, _seconds_to_count(request), focus, fold)
    wait = 1.0 if shown.counting else _IDLE_SECONDS
    values = {"shown": shown, "graph": graph, "focus": focus, "fold": fold}
    return _live_page(request, "graph.html", conn_id=conn_id, wait=wait, **values)


@app.get("/databases/{conn_id}/plan")
@app.get("/databases/{conn_id}/plan/live")
@in_own_threads
def show_plan(request: Request, viewer: ViewerDep, conn_id: str) -> HTMLResponse:
    """Show what one run of all columns and views of a database would do, as far as records tell."""
    opened = _open_seen(viewer, conn_id)
    shown, steps = read(viewer, conn_id, read_plan, opened, _seconds_to_count(request))
    wait = 1.0 if shown.counting else _IDLE_SECONDS
    return _live_page(request, "plan.html", conn_id=conn_id, shown=shown, steps=steps, wait=wait)


def _read_database(
    request: Request, viewer: CurrentUser, conn_id: str, filters: Filters
) -> tuple[VisibleDatabase, DatabaseDetails]:
    opened = _open_seen(viewer, conn_id)
    return opened, read(viewer, conn_id, read_database, opened, filters, _seconds_to_count(request))


def _open_seen(viewer: CurrentUser, conn_id: str) -> VisibleDatabase:
    if not viewer.may_see_database(conn_id):
        raise HTTPException(404)
    return visible_database(conn_id, viewer)


def _seconds_to_count(request: Request) -> float:
    return _COUNT_SECONDS if _is_live(request) else _FIRST_SECONDS


@app.get("/asset")
def show_asset(uri: str) -> Response:
    """Redirect from an asset to the page of its table, which checks the viewer's permissions."""
    conn_id, table = (quote(part, safe="") for part in table_of_asset(uri))
    if not (conn_id and table):
        raise HTTPException(404)
    return RedirectResponse(f"databases/{conn_id}/tables/{table}", 303, NOT_KEPT)


@app.get("/databases/{conn_id}/tables/{table}")
@in_own_threads
def show_table(request: Request, viewer: ViewerDep, conn_id: str, place: TableDep) -> HTMLResponse:
    opened, location = place
    described = read(viewer, (conn_id, location.name), describe_whole_table, location)
    source = described.source_in(opened.database)
    linked = source is not None and opened.may_see(source)
    dags = maintainers(conn_id, viewer).get(location.name, [])
    return page(request, "table.html", conn_id=conn_id, table=described, source=source if linked else None, dags=dags)


@app.get("/databases/{conn_id}/tables/{table}/standing")
@in_own_threads
def show_freshness(request: Request, viewer: ViewerDep, conn_id: str, place: TableDep) -> HTMLResponse:
    """Send the freshness of a table's columns and views that can be counted within two seconds."""
    opened, location = place
    found = read(viewer, (conn_id, location.name), count_freshness_with_above, opened, location, _COUNT_SECONDS)
    return page(request, "_standing.html", conn_id=conn_id, table=location.name, standing=found)


@app.get("/databases/{conn_id}/tables/{table}/compare")
@app.get("/databases/{conn_id}/tables/{table}/compare/live")
@in_own_threads
def show_comparison(
    request: Request, viewer: ViewerDep, conn_id: str, place: TableDep, first: str, second: str
) -> HTMLResponse:
    """Compare two columns on a sample of rows, without showing values."""
    opened, location = place
    try:
        key, seconds = (conn_id, location.name), _seconds_to_count(request)
        found = read(viewer, key, compare, opened, location.name, first, second, seconds)
    except InvalidInput:
        raise HTTPException(404) from None
    values = {"first": first, "second": second, "found": found, "wait": 1.0 if found is None else _IDLE_SECONDS}
    return _live_page(request, "comparison.html", conn_id=conn_id, table=location.name, **values)


@app.get("/databases/{conn_id}/tables/{table}/history")
@in_own_threads
def show_history(request: Request, viewer: ViewerDep, conn_id: str, place: TableDep) -> HTMLResponse:
    """Send the newest jobs of a table's columns, or of a view, as small charts."""
    opened, location = place
    found = read(viewer, (conn_id, location.name), read_histories, opened, location)
    return page(request, "_history.html", conn_id=conn_id, histories=found)


@app.get("/databases/{conn_id}/tables/{table}/versions")
@in_own_threads
def show_versions(request: Request, viewer: ViewerDep, conn_id: str, place: TableDep) -> HTMLResponse:
    """Send the newest versions of a table, with the rows that were due after each."""
    opened, location = place
    found = read(viewer, (conn_id, location.name), read_versions, opened, location, _COUNT_SECONDS)
    return page(request, "_versions.html", conn_id=conn_id, table=location.name, found=found)


@app.get("/databases/{conn_id}/tables/{table}/jobs/{job_id}")
@app.get("/databases/{conn_id}/tables/{table}/jobs/{job_id}/live")
@in_own_threads
def show_job(
    request: Request, viewer: ViewerDep, job: JobDep, errors: PageNumber = 1, shards: PageNumber = 1,
    order: ErrorOrder = "newest",
) -> HTMLResponse:  # fmt: skip
    return _job_page(request, viewer, job, errors, shards, order)


@app.post("/task/cancel")
@in_own_threads
def cancel_job_of_task(request: Request, viewer: ViewerDep, task: TaskDep) -> Response:
    """Cancel the job that a task works for."""
    if task.job is None:
        raise HTTPException(404)
    return _cancel(request, viewer, task.job)


@app.post("/databases/{conn_id}/tables/{table}/jobs/{job_id}/cancel")
@in_own_threads
def cancel_job(request: Request, viewer: ViewerDep, job: JobDep) -> Response:
    """Ask the processes of a job to end it, for users who may start runs of its DAG."""
    return _cancel(request, viewer, job)


def _cancel(request: Request, viewer: CurrentUser, place: JobPlace) -> Response:
    if not _may_cancel(viewer, place, _find(viewer, place).job):
        raise HTTPException(403)
    # A page of another site can neither send JSON without asking first, nor hide that it is another one.
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json" or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise HTTPException(415)
    by = f"{viewer.user.get_name()}, in Airflow"
    refused = read(viewer, (place.conn_id, place.location.name), request_cancel, place.location, place.job_id, by)
    if not refused:
        logger.info("%s canceled job %s.", by, place.job_id)
    said = refused or "The job ends after its current calls, and keeps what it computed."
    return answer({"said": said}, 409 if refused else 200)


def _may_cancel(viewer: CurrentUser, place: JobPlace, job: api.Job) -> bool:
    """Whether a user may start the DAG of a job or, of a job that no DAG started, one that writes the table."""
    if not job.open:
        return False
    if job.airflow is not None:
        return viewer.may_trigger_dag(job.airflow.dag_id)
    return place.conn_id is not None and any(
        dag.may_trigger for dag in maintainers(place.conn_id, viewer).get(job.table, [])
    )


def _job_page(
    request: Request, viewer: ViewerDep, place: JobPlace, errors: int, shards: int, order: ErrorOrder
) -> HTMLResponse:
    began = time.monotonic()
    shown = _find(viewer, place, shards)
    cancels = _may_cancel(viewer, place, shown.job)
    values: dict[str, Any] = {"place": place, "shown": shown, "wait": _pause(began, running=True), "dags": []}
    values["cancels"] = cancels
    if not _is_live(request):
        values["linked"] = place.conn_id is not None and viewer.may_see_table(place.conn_id, shown.job.table)
        values["dags"] = _dags_of(viewer, place.conn_id, shown.job) if place.conn_id and not shown.job.open else []
        values["errors"] = _errors(viewer, place, errors, order) if shown.job.errors else None
    return _live_page(request, "job.html", **values)


def _errors(viewer: CurrentUser, place: JobPlace, number: int, order: ErrorOrder) -> ErrorsPage:
    return read(viewer, (place.conn_id, place.location.name), list_errors, place.location, place.job_id, number, order)


def _dags_of(viewer: ViewerDep, conn_id: str, job: api.Job) -> list[Maintainer]:
    """Return the DAG that started a job, or all DAGs that write its view; a table's DAGs may write other columns."""
    found = maintainers(conn_id, viewer).get(job.table, [])
    return [dag for dag in found if job.view or (job.airflow is not None and dag.dag_id == job.airflow.dag_id)]


def _is_live(request: Request) -> bool:
    """Whether the request is for the live part of an open page."""
    return str(request.scope["route"].path).endswith("/live")


def _live_page(request: Request, template: str, **values: Any) -> HTMLResponse:
    """Render a page, or the part of it that is updated."""
    return page(request, f"_{template}" if _is_live(request) else template, **values)


def _pause(began: float, running: bool) -> float:
    """Return the seconds until the next update; more if reading is slow, such as 1,000 shards on an object store."""
    return max(_POLL_SECONDS if running else _IDLE_SECONDS, 10 * (time.monotonic() - began))


def _find(viewer: ViewerDep, place: JobPlace, shards: int = 1) -> JobDetails:
    try:
        shown = read(viewer, (place.conn_id, place.location.name), find_job, place.location, place.job_id, shards)
    except DamagedRecord:
        # Without a record the job's DAG is unknown, so check the permission for the table.
        if place.conn_id is None or not viewer.may_see_table(place.conn_id, place.location.name):
            raise HTTPException(404) from None
        raise
    if shown is None or not viewer.may_see_job(place.conn_id, shown.job):
        raise HTTPException(404)
    return shown


@app.exception_handler(RequestValidationError)
@app.exception_handler(HttpError)
def show_http_error(request: Request, error: HttpError | RequestValidationError) -> Response:
    """Answer with an error page that does not repeat the request; 404 for a malformed URL, 400 for a malformed body."""
    if isinstance(error, HttpError):
        return _error(request, error.status_code)
    return _error(request, 400 if any("body" in one["loc"] for one in error.errors()) else 404)


@app.exception_handler(Exception)
def show_failure(request: Request, error: Exception) -> Response:
    """Answer with an error page without details; the server logs the failure."""
    return _error(request, 500)


@app.exception_handler(OSError)
@app.exception_handler(GenevaError)
def show_error(request: Request, error: GenevaError | OSError) -> Response:
    """Answer with an error of this package or of a store; it is raised only after authorization.

    The message names the database's location, so only viewers who may read the connection see it; that of a lost reader
    process names nothing.
    """
    text = mask_secrets(str(error))
    logger.warning("%s cannot be shown: %s", request.url.path, text)
    viewer = getattr(request.state, "viewer", None)
    conn_id = getattr(request.state, "conn_id", request.path_params.get("conn_id"))
    allowed = viewer is not None and conn_id is not None and viewer.may_read_connection(conn_id)
    allowed = allowed or isinstance(error, ReaderLost)
    title = "Damaged record" if isinstance(error, DamagedRecord) else None
    status = 503 if isinstance(error, OSError) else 404
    return _error(request, status, title, text if allowed else None)


def _error(request: Request, status: int, title: str | None = None, message: str | None = None) -> Response:
    if f"{PAGES}{PREFIX}" in request.url.path:
        return failure(status, message)
    if request.url.path.endswith(".json"):
        return answer({"status": status, "error": message}, status)
    return page(request, "error.html", status, status=status, title=title, message=message)
