"""The door of the engine: what nouns, the command, and Airflow's operators, sensors, triggers and pages use of it.

A job takes the same steps in a notebook and in Airflow:

1. `plan_request`, `plan_refresh` or `plan_load` finds what is left to compute. Nothing is written, but the hidden
   tables of a view of groups, or of a deduplicated view.
2. `choose` decides where to compute it, and `record_job` writes the job's record and its plan. From then on any process
   can continue the job.
3. `open_job` opens it there, as a `PlannedJob`: `apply` computes a shard, `commit` verifies it and makes it visible,
   and `finish` swaps a view, records the end, and tidies up. After a kill each step is repeated. `find_unannounced`
   then finds what an asset event has to announce.

`run_new` takes these steps in one process, and `JobFuture.start` in a thread of it. The other functions answer
questions about jobs and tables, copy a table, or clean up beside it. The rest are methods of values:
`Plan.estimate_between` says what a job of other rows would take, `TableColumns.define` defines columns, `Promotion.run`
gives a column the name of another, `ColumnComparison.of` compares two, `ColumnFunction.find` returns what computed one,
`GivenRows` are written, and `TableWatcher` waits for new ones.

Where files lie, and with which credentials they are opened, is the subject of `engine.storage`, what a function is that
of `engine.udf`. The dag processor and the API server import this module, so nothing is loaded before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from airflow_geneva.engine.runtime import time
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    # With `as` they are names of this module to the type checkers of users, too.
    import lance

    from airflow_geneva.engine.apply.batch_api import StillWaiting as StillWaiting
    from airflow_geneva.engine.checkpoint.listing import list_checkpoints as list_checkpoints
    from airflow_geneva.engine.cleanup import clean_up as clean_up
    from airflow_geneva.engine.cleanup.garbage import FileKind as FileKind, Garbage as Garbage
    from airflow_geneva.engine.job.current_errors import ErrorCause as ErrorCause, JobErrors as JobErrors
    from airflow_geneva.engine.job.error_records import ErrorRecord as ErrorRecord
    from airflow_geneva.engine.job.estimate import Estimate as Estimate, Interval as Interval
    from airflow_geneva.engine.job.folder import JobFolder as JobFolder
    from airflow_geneva.engine.job.heartbeat import APPROVAL as APPROVAL
    from airflow_geneva.engine.job.meter import JobMeter as JobMeter, Stopwatch as Stopwatch
    from airflow_geneva.engine.job.shard_status import ShardStatus as ShardStatus
    from airflow_geneva.engine.job.status import Job as Job, JobList as JobList, read_job as read_job
    from airflow_geneva.engine.job.table_history import table_history as table_history
    from airflow_geneva.engine.lance_io.conflicts import conflict_retries as conflict_retries
    from airflow_geneva.engine.lance_io.given_rows import GivenRows as GivenRows
    from airflow_geneva.engine.lance_io.indexes import Index as Index
    from airflow_geneva.engine.lance_io.pylance_internals import NEWEST_TESTED as NEWEST_TESTED
    from airflow_geneva.engine.lance_io.reading import Readable as Readable
    from airflow_geneva.engine.lance_io.row_ranges import Ranges as Ranges
    from airflow_geneva.engine.lance_io.rows import RowData as RowData
    from airflow_geneva.engine.lance_io.siblings import Output as Output
    from airflow_geneva.engine.lance_io.table_key import key_columns as key_columns
    from airflow_geneva.engine.lance_io.table_versions import open_version as open_version
    from airflow_geneva.engine.load.request import LoadRequest as LoadRequest
    from airflow_geneva.engine.plan.failed_rows import FailedRows as FailedRows, FailedSourceRows as FailedSourceRows
    from airflow_geneva.engine.plan.freshness import Freshness as Freshness, FreshnessCount as FreshnessCount
    from airflow_geneva.engine.plan.model import JobSpec as JobSpec, Plan as Plan, RefreshSpec as RefreshSpec
    from airflow_geneva.engine.plan.request import (
        BackfillOptions as BackfillOptions,
        BackfillRequest as BackfillRequest,
        RefreshRequest as RefreshRequest,
        SizingOptions as SizingOptions,
        plan_request as plan_request,
    )
    from airflow_geneva.engine.plan.saved_plan import SavedPlan as SavedPlan
    from airflow_geneva.engine.plan.shard import Shard as Shard
    from airflow_geneva.engine.plan.sizing import Sizing as Sizing
    from airflow_geneva.engine.run.announce import find_unannounced as find_unannounced
    from airflow_geneva.engine.run.background import JobFuture as JobFuture
    from airflow_geneva.engine.run.choice import RunnerChoice as RunnerChoice, TooSlow as TooSlow
    from airflow_geneva.engine.run.column_comparison import ColumnComparison as ColumnComparison
    from airflow_geneva.engine.run.column_function import ColumnFunction as ColumnFunction
    from airflow_geneva.engine.run.compare import Comparison as Comparison
    from airflow_geneva.engine.run.copying import copy_table as copy_table
    from airflow_geneva.engine.run.duplicates import read_duplicates as read_duplicates
    from airflow_geneva.engine.run.estimate import estimate_plan as estimate_plan
    from airflow_geneva.engine.run.load import plan_load as plan_load
    from airflow_geneva.engine.run.pipeline import (
        PlannedJob as PlannedJob,
        choose as choose,
        record_job as record_job,
        run_new as run_new,
    )
    from airflow_geneva.engine.run.prepare import Udfs as Udfs
    from airflow_geneva.engine.run.promotion import (
        Promoting as Promoting,
        Promotion as Promotion,
        PromotionPlan as PromotionPlan,
    )
    from airflow_geneva.engine.run.query import TableQuery as TableQuery
    from airflow_geneva.engine.run.table_columns import TableColumns as TableColumns
    from airflow_geneva.engine.run.view_columns import ViewColumns as ViewColumns
    from airflow_geneva.engine.storage.location import TableLocation as TableLocation
    from airflow_geneva.engine.views.deduplication import Deduplication as Deduplication
    from airflow_geneva.engine.views.definition import (
        IS_SET as IS_SET,
        ViewDefinition as ViewDefinition,
        is_view as is_view,
        visible_columns as visible_columns,
    )
    from airflow_geneva.engine.views.group_tables import (
        groups_of as groups_of,
        source_version_of as source_version_of,
    )
    from airflow_geneva.engine.views.grouping import Grouped as Grouped
    from airflow_geneva.engine.views.resolve import QuerySpec as QuerySpec
    from airflow_geneva.engine.views.sources import (
        find_views as find_views,
        locate_source as locate_source,
    )
    from airflow_geneva.engine.views.state import CommittedViewState as CommittedViewState
    from airflow_geneva.engine.watch.conditions import WaitCondition as WaitCondition
    from airflow_geneva.engine.watch.watcher import (
        NewestVersions as NewestVersions,
        Observation as Observation,
        TableWatcher as TableWatcher,
    )


def plan_refresh(
    view: TableLocation,
    newest: lance.LanceDataset,
    sources: Iterable[str],
    request: RefreshRequest,
    to_run: bool = False,
) -> Plan:
    """Plan the refresh of a view from its stored definition.

    It writes nothing, unless it is a view of groups or a deduplicated view.

    Args:
        newest: the view's newest version.
        sources: the databases in which its source may lie, beside its own.
        to_run: whether the plan will be run. Then it brings the hidden tables of a view of groups, or of a deduplicated
            view, to the version of the source; otherwise it writes nothing. It cannot be run then, and of a
            deduplicated view it has all rows that may be due.

    Raises:
        InvalidInput: the request does not fit the view, or its source cannot be opened.
        CodeChanged: the view holds values of other code, and the request does not say what becomes of them.
        UnknownValues: it holds values that no job computed, and the request does not say what becomes of them.
    """
    from airflow_geneva.engine.run.view import plan
    from airflow_geneva.engine.views.definition import ViewDefinition
    from airflow_geneva.engine.views.sources import locate_source

    definition = ViewDefinition.read(newest.schema.metadata, view.name)
    source = locate_source(view, definition, frozenset(sources))
    if definition.grouping is not None:
        from airflow_geneva.engine.run.groups import plan_groups

        return plan_groups(view, definition, source, request, newest, to_run)
    if definition.deduplicate is not None and to_run:
        from airflow_geneva.engine.run.duplicates import plan_deduplicated

        return plan_deduplicated(view, definition, source, request, newest)
    return plan(view, definition, source, request, newest)


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
    # A job: plan it, choose where it runs, record it, take its steps.
    ("plan.request", "plan_request"),
    ("run.load", "plan_load"),
    ("run.pipeline", "choose", "record_job"),
    ("run.announce", "find_unannounced"),
    # The same in one process, and what it would take.
    ("run.pipeline", "run_new"),
    ("run.estimate", "estimate_plan"),
    # Questions about jobs.
    ("job.status", "read_job"),
    # Questions about tables and views.
    ("job.table_history", "table_history"),
    ("checkpoint.listing", "list_checkpoints"),
    ("lance_io.table_key", "key_columns"),
    ("lance_io.table_versions", "open_version"),
    ("views.definition", "is_view", "visible_columns"),
    ("views.sources", "find_views", "locate_source"),
    ("views.group_tables", "groups_of", "source_version_of"),
    # Changes.
    ("run.copying", "copy_table"),
    ("cleanup", "clean_up"),
    ("lance_io.conflicts", "conflict_retries"),
    # Values: what is asked for,
    ("plan.request", "BackfillRequest", "BackfillOptions", "RefreshRequest", "SizingOptions"),
    ("load.request", "LoadRequest"),
    ("plan.sizing", "Sizing"),
    ("run.promotion", "Promotion"),
    ("watch.conditions", "WaitCondition"),
    ("lance_io.given_rows", "GivenRows"),
    ("lance_io.rows", "RowData"),
    ("run.query", "TableQuery"),
    ("views.deduplication", "Deduplication"),
    ("views.resolve", "QuerySpec"),
    ("views.grouping", "Grouped"),
    ("run.duplicates", "read_duplicates"),
    ("run.table_columns", "TableColumns"),
    ("run.view_columns", "ViewColumns"),
    # a job from its plan to its end,
    ("plan.model", "Plan", "JobSpec", "RefreshSpec"),
    ("plan.saved_plan", "SavedPlan"),
    ("plan.shard", "Shard"),
    ("run.pipeline", "PlannedJob"),
    ("run.prepare", "Udfs"),
    ("run.choice", "RunnerChoice", "TooSlow"),
    ("run.background", "JobFuture"),
    ("apply.batch_api", "StillWaiting"),
    ("job.meter", "JobMeter", "Stopwatch"),
    # what it records,
    ("job.folder", "JobFolder"),
    ("job.status", "Job", "JobList"),
    ("job.shard_status", "ShardStatus"),
    ("job.error_records", "ErrorRecord"),
    ("job.current_errors", "ErrorCause", "JobErrors"),
    ("job.estimate", "Estimate", "Interval"),
    ("job.heartbeat", "APPROVAL"),
    # and what is found.
    ("plan.freshness", "Freshness", "FreshnessCount"),
    ("plan.failed_rows", "FailedRows", "FailedSourceRows"),
    ("watch.watcher", "TableWatcher", "NewestVersions", "Observation"),
    ("run.promotion", "Promoting", "PromotionPlan"),
    ("run.compare", "Comparison"),
    ("run.column_comparison", "ColumnComparison"),
    ("run.column_function", "ColumnFunction"),
    ("cleanup.garbage", "Garbage", "FileKind"),
    ("lance_io.indexes", "Index"),
    ("lance_io.reading", "Readable"),
    ("lance_io.row_ranges", "Ranges"),
    ("lance_io.siblings", "Output"),
    ("lance_io.pylance_internals", "NEWEST_TESTED"),
    ("views.definition", "ViewDefinition", "IS_SET"),
    ("views.state", "CommittedViewState"),
)
_LAZY_EXPORTS = {name: f"airflow_geneva.engine.{home}" for home, *names in _HOMES for name in names}


def __getattr__(name: str) -> object:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_EXPORTS[name]), name)
