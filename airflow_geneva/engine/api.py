"""The door of the engine: all that the command, and Airflow's operators, sensors, triggers and pages use of it.

A job takes the same steps in a notebook and in Airflow:

1. `plan_request`, `plan_refresh` or `plan_load` finds what is left to compute. Nothing is written.
2. `choose` decides where to compute it, and `record_job` writes the job's record and its plan. From then on any process
   can continue the job.
3. `open_job` opens it there, as a `PlannedJob`: `apply` computes a shard, `commit` verifies it and makes it visible,
   and `finish` swaps a view, records the end, and tidies up. After a kill each step is repeated. `find_unannounced`
   then finds what an asset event has to announce.
4. `read_job` and `read_errors` tell how it goes; `column_freshness` and `view_freshness` what is due since;
   `TableWatcher` waits for new rows; `plan_promotion` and `promote` exchange columns; `find_garbage` and `collect`
   remove what no job needs.

Where files lie, and with which credentials they are opened, is the subject of `engine.storage`. The dag processor and
the API server import this module, so nothing is loaded before it is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.apply.batch_api import StillWaiting
    from airflow_geneva.engine.checkpoint.listing import list_checkpoints
    from airflow_geneva.engine.checkpoint.provenance import version_label
    from airflow_geneva.engine.cleanup import collect, find_garbage
    from airflow_geneva.engine.cleanup.garbage import FileKind, Garbage, parse_ttl
    from airflow_geneva.engine.job.current_errors import ErrorCause, ErrorGroup, count_causes, group_errors
    from airflow_geneva.engine.job.error_records import ErrorRecord, read_errors
    from airflow_geneva.engine.job.estimate import LIMITS, Estimate, Interval
    from airflow_geneva.engine.job.folder import JobFolder, is_job_id
    from airflow_geneva.engine.job.heartbeat import APPROVAL
    from airflow_geneva.engine.job.meter import STEPS_IN_WORDS, JobMeter, Stopwatch, measuring, measured
    from airflow_geneva.engine.job.shard_results import carried_counts
    from airflow_geneva.engine.job.shard_status import ShardStatus, in_parallel
    from airflow_geneva.engine.job.status import Job, job_ids, read_job, read_jobs
    from airflow_geneva.engine.job.table_history import table_history
    from airflow_geneva.engine.lance_io.conflicts import commit_tries, conflict_retries, is_conflict, max_retries
    from airflow_geneva.engine.lance_io.filters import where_columns
    from airflow_geneva.engine.lance_io.given_rows import GivenRows
    from airflow_geneva.engine.lance_io.indexes import Index, read_indexes
    from airflow_geneva.engine.lance_io.pylance_internals import NEWEST_TESTED, written_at
    from airflow_geneva.engine.lance_io.reading import Readable, check_columns
    from airflow_geneva.engine.lance_io.row_ranges import Ranges
    from airflow_geneva.engine.lance_io.rows import RowData
    from airflow_geneva.engine.lance_io.siblings import Output
    from airflow_geneva.engine.lance_io.table_key import key_columns
    from airflow_geneva.engine.lance_io.table_versions import open_version
    from airflow_geneva.engine.lance_io.task_memory import LEAST_TASK_MEMORY, task_memory_bytes
    from airflow_geneva.engine.load.request import LoadRequest, plan_load
    from airflow_geneva.engine.plan.failed_rows import FailedRows, FailedSourceRows
    from airflow_geneva.engine.plan.freshness import (
        NEVER,
        STALE,
        UP_TO_DATE,
        Freshness,
        column_freshness,
        view_freshness,
    )
    from airflow_geneva.engine.plan.model import JobSpec, Plan, RefreshSpec
    from airflow_geneva.engine.plan.request import (
        BackfillOptions,
        BackfillRequest,
        RefreshRequest,
        SizingOptions,
        plan_request,
    )
    from airflow_geneva.engine.plan.saved_plan import SavedPlan, read_saved_plan, shard_summaries
    from airflow_geneva.engine.plan.shard import Shard
    from airflow_geneva.engine.plan.sizing import NOT_WHOLE, Sizing, least_of
    from airflow_geneva.engine.run.announce import find_unannounced
    from airflow_geneva.engine.run.background import JobFuture, start_in_background
    from airflow_geneva.engine.run.choice import RunnerChoice, TooSlow
    from airflow_geneva.engine.run.column_comparison import ColumnComparison, compare_columns
    from airflow_geneva.engine.run.column_function import ColumnFunction, column_function, view_column_function
    from airflow_geneva.engine.run.compare import Comparison, compare_column, compare_view_column, request_for
    from airflow_geneva.engine.run.copying import copy_table
    from airflow_geneva.engine.run.estimate import estimate_between, estimator
    from airflow_geneva.engine.run.load import plan_here
    from airflow_geneva.engine.run.pipeline import PlannedJob, choose, record_job, run_new
    from airflow_geneva.engine.run.prepare import Udfs
    from airflow_geneva.engine.run.promotion import (
        Promoting,
        Promotion,
        PromotionPlan,
        is_promoted,
        plan_promotion,
        promote,
    )
    from airflow_geneva.engine.run.query import TableQuery
    from airflow_geneva.engine.run.record import this_program
    from airflow_geneva.engine.run.table_columns import TableColumns
    from airflow_geneva.engine.run.view import load_udfs
    from airflow_geneva.engine.run.view_columns import ViewColumns
    from airflow_geneva.engine.storage.location import TableLocation
    from airflow_geneva.engine.udf import UDF, load_stored_udf, load_udf
    from airflow_geneva.engine.udf.definition import read_definition, stored_definition
    from airflow_geneva.engine.udf.expect import Expectation
    from airflow_geneva.engine.udf.lancedb import lancedb_column, lancedb_view, refuse_view
    from airflow_geneva.engine.udf.stored import udf_modules
    from airflow_geneva.engine.views.definition import IS_SET, SYSTEM_COLUMNS, ViewDefinition, is_view, visible_columns
    from airflow_geneva.engine.views.resolve import QuerySpec
    from airflow_geneva.engine.views.sources import allow_databases, find_views, locate_source
    from airflow_geneva.engine.views.state import CommittedViewState
    from airflow_geneva.engine.watch.conditions import WaitCondition
    from airflow_geneva.engine.watch.watcher import NewestVersions, Observation, TableWatcher, is_permanent


def plan_refresh(
    view: TableLocation, newest: lance.LanceDataset, sources: Iterable[str], request: RefreshRequest
) -> Plan:  # fmt: skip
    """Plan the refresh of a view from its stored definition; write nothing.

    Args:
        newest: the view's newest version.
        sources: the databases in which its source may lie, beside its own.

    Raises:
        InvalidInput: the request does not fit the view, or its source cannot be opened.
        CodeChanged: the view holds values of other code, and the request does not say what becomes of them.
        UnknownValues: it holds values that no job computed, and the request does not say what becomes of them.
    """
    from airflow_geneva.engine.run.view import plan
    from airflow_geneva.engine.views.definition import ViewDefinition
    from airflow_geneva.engine.views.sources import locate_source

    definition = ViewDefinition.read(newest.schema.metadata, view.name)
    return plan(view, definition, locate_source(view, definition, frozenset(sources)), request, newest)


def open_job(location: TableLocation, job_id: str, fingerprint: str, resumes: bool = False) -> PlannedJob:
    """Open a job by its plan, without its fragments.

    A caller cannot choose a plan, because the code of the plan runs: the record that the planning process wrote must
    name the same plan.

    Args:
        fingerprint: the SHA-256 of the plan.
        resumes: record that a job that has ended goes on.

    Raises:
        InvalidInput: the plan was removed or changed, is for another table, or is not the one that the record names.
    """
    from airflow_geneva.engine.job.folder import RECORD, JobFolder, plan_name
    from airflow_geneva.engine.plan.saved_plan import load_plan
    from airflow_geneva.engine.run.pipeline import PlannedJob

    folder = JobFolder.of(location.checkpoints, job_id)
    load = partial(load_plan, folder.storage, fingerprint)
    saved, record = folder.storage.side_by_side(load, lambda: folder.read(RECORD) or {})
    if (saved.spec.table, saved.spec.job_id) != (location.uri, folder.job_id):
        uri = folder.storage.path(plan_name(fingerprint))
        raise InvalidInput(f"The plan in {uri} is for another table, {saved.spec.table}. Clear the plan task.")
    recorded = record.get("plan")
    if recorded != fingerprint and (recorded is not None or saved.shards):
        raise InvalidInput(
            f"The XCom of the plan task names plan {fingerprint[:16]}, and the record of job {folder.job_id} names "
            f"{'none' if recorded is None else str(recorded)[:16]}: the plan task has planned again since, or the XCom "
            "was edited. Clear the plan task with its downstream tasks."
        )
    if record.get("ended") and resumes:
        folder.update_record(resumed=time.time())
    return PlannedJob(location, saved, record=record)


_HOMES = (
    # The steps of a job.
    ("plan.request", "plan_request"),
    ("load.request", "plan_load"),
    ("run.pipeline", "choose", "record_job", "PlannedJob"),
    ("run.announce", "find_unannounced"),
    # What may be asked of jobs and tables.
    ("job.status", "read_job", "read_jobs"),
    ("job.error_records", "read_errors"),
    ("plan.freshness", "column_freshness", "view_freshness"),
    ("watch.watcher", "TableWatcher"),
    ("run.promotion", "plan_promotion", "promote"),
    ("cleanup", "find_garbage", "collect"),
    # The same in one process.
    ("run.load", "plan_here"),
    ("run.view", "load_udfs"),
    ("run.estimate", "estimator", "estimate_between"),
    ("run.pipeline", "run_new"),
    ("run.background", "start_in_background", "JobFuture"),
    ("run.record", "this_program"),
    # What else is done with columns and views.
    ("run.copying", "copy_table"),
    ("run.compare", "compare_column", "compare_view_column", "request_for", "Comparison"),
    ("run.column_comparison", "compare_columns", "ColumnComparison"),
    ("run.column_function", "column_function", "view_column_function", "ColumnFunction"),
    ("run.table_columns", "TableColumns"),
    ("run.view_columns", "ViewColumns"),
    ("run.promotion", "Promoting", "PromotionPlan"),
    # Requests and plans.
    ("plan.request", "BackfillRequest", "BackfillOptions", "RefreshRequest", "SizingOptions"),
    ("load.request", "LoadRequest"),
    ("plan.sizing", "Sizing", "NOT_WHOLE", "least_of"),
    ("lance_io.task_memory", "LEAST_TASK_MEMORY", "task_memory_bytes"),
    ("plan.model", "Plan", "JobSpec", "RefreshSpec"),
    ("plan.shard", "Shard"),
    ("plan.saved_plan", "SavedPlan", "read_saved_plan", "shard_summaries"),
    # Where and how a job runs.
    ("run.choice", "RunnerChoice", "TooSlow"),
    ("run.prepare", "Udfs"),
    ("job.estimate", "Estimate", "Interval", "LIMITS"),
    ("job.heartbeat", "APPROVAL"),
    ("apply.batch_api", "StillWaiting"),
    ("lance_io.conflicts", "conflict_retries", "commit_tries", "is_conflict", "max_retries"),
    # What a job records.
    ("job.folder", "JobFolder", "is_job_id"),
    ("job.status", "job_ids", "Job"),
    ("job.shard_status", "ShardStatus", "in_parallel"),
    ("job.shard_results", "carried_counts"),
    ("job.meter", "STEPS_IN_WORDS", "JobMeter", "measuring", "Stopwatch", "measured"),
    ("job.table_history", "table_history"),
    ("job.error_records", "ErrorRecord"),
    ("job.current_errors", "ErrorGroup", "group_errors", "ErrorCause", "count_causes"),
    # Tables, views and functions.
    ("lance_io.table_versions", "open_version"),
    ("lance_io.pylance_internals", "written_at"),
    ("lance_io.reading", "check_columns", "Readable"),
    ("lance_io.row_ranges", "Ranges"),
    ("lance_io.rows", "RowData"),
    ("lance_io.given_rows", "GivenRows"),
    ("lance_io.siblings", "Output"),
    ("lance_io.table_key", "key_columns"),
    ("plan.failed_rows", "FailedRows", "FailedSourceRows"),
    ("run.query", "TableQuery"),
    ("lance_io.filters", "where_columns"),
    ("lance_io.indexes", "Index", "read_indexes"),
    ("udf", "UDF", "load_udf", "load_stored_udf"),
    ("udf.stored", "udf_modules"),
    ("udf.expect", "Expectation"),
    ("udf.definition", "read_definition", "stored_definition"),
    ("udf.lancedb", "lancedb_column", "lancedb_view", "refuse_view"),
    ("views.definition", "is_view", "visible_columns", "IS_SET", "SYSTEM_COLUMNS", "ViewDefinition"),
    ("views.resolve", "QuerySpec"),
    ("views.state", "CommittedViewState"),
    ("views.sources", "allow_databases", "find_views", "locate_source"),
    # What is new, due, exchanged or unneeded.
    ("watch.conditions", "WaitCondition"),
    ("watch.watcher", "NewestVersions", "Observation", "is_permanent"),
    ("plan.freshness", "Freshness", "UP_TO_DATE", "STALE", "NEVER"),
    ("run.promotion", "Promotion", "is_promoted"),
    ("checkpoint.listing", "list_checkpoints"),
    ("cleanup.garbage", "Garbage", "FileKind", "parse_ttl"),
    # Names.
    ("checkpoint.provenance", "version_label"),
    ("lance_io.pylance_internals", "NEWEST_TESTED"),
)
_LAZY_EXPORTS = {name: f"airflow_geneva.engine.{home}" for home, *names in _HOMES for name in names}


def __getattr__(name: str) -> object:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_EXPORTS[name]), name)
