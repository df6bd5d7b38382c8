"""Shared code of the operators: the connection to the database, reading a stored plan, and stopping a task."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowTaskTimeout
from airflow.sdk import BaseOperator

from airflow_geneva.database import Database
from airflow_geneva.errors import CodeChanged, CommitConflict, InvalidInput
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.operators._templated import optional_text, required_text
from airflow_geneva.plan.model import RefreshSpec
from airflow_geneva.plan.saved_plan import SavedPlan, load_plan
from airflow_geneva.plan.shard import Shard
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation

_SOON = timedelta(seconds=30)


def default_policy() -> Any:
    """Return the default retry policy; None before Airflow 3.3, which has only the number of retries.

    After a commit conflict the task is retried soon, as one of its retries. A retry cannot fix a wrong request, schema
    or UDF, so then the task fails at once.
    """
    try:
        from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule
    except ImportError:
        return None
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(CommitConflict, RetryAction.RETRY, _SOON, reason="other writers kept changing the table"),
            RetryRule([InvalidInput, CodeChanged], RetryAction.FAIL, reason="it would fail in the same way"),
        ]
    )


def with_retry_policy(given: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments with the given retry policy, or the default one."""
    policy = given or default_policy()
    return dict(arguments) if policy is None else {**arguments, "retry_policy": policy}


class LanceOperator(BaseOperator):
    """A task that works on a Lance database in its own process.

    Args:
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        retry_policy: Airflow 3.3 and later; None: retry a commit conflict soon, and fail at once on a wrong request.
    """

    template_fields: Sequence[str] = ("lance_conn_id", "database")

    def __init__(
        self,
        *,
        lance_conn_id: str = "lance_default",
        database: str | None = None,
        retry_policy: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_retry_policy(retry_policy, kwargs))
        self.lance_conn_id = lance_conn_id
        self.database = database

    def open_database(self) -> Database:
        return open_database(self.lance_conn_id, self.database)

    def on_kill(self) -> None:
        stop_task()


def open_database(lance_conn_id: str, database: str | None) -> Database:
    """Open the database that templated fields name."""
    return LanceHook(required_text("lance_conn_id", lance_conn_id)).get_database(optional_text(database))


def stop_task() -> None:
    """End the task at its current statement.

    Airflow signals a task to stop and then lets it run on for seconds, in which it could still commit. All writes are
    atomic, so it is safe to stop at any statement. A task that timed out is ending already.
    """
    if not isinstance(sys.exc_info()[1], AirflowTaskTimeout):
        raise SystemExit("Airflow stopped the task. Nothing is half-written; the next try continues from here.")


@dataclass(frozen=True)
class LoadedPlan:
    """A stored plan that a later task has read.

    Args:
        location: its table.
        folder: its job's folder.
        saved: the plan without its fragments.
    """

    location: TableLocation
    folder: JobFolder
    saved: SavedPlan

    @staticmethod
    def of(database: Database, reference: Mapping[str, Any]) -> LoadedPlan:
        """Read the plan that an XCom names, and check its fingerprint.

        Raises:
            InvalidInput: the plan was removed or changed, or is stored beside another table than its own.
        """
        uri, _, _ = str(reference["plan_uri"]).rpartition("/")
        storage = Storage(uri, database.options)
        saved = load_plan(storage, reference["fingerprint"])
        location = TableLocation(saved.work.table, saved.work.table_name, database.options)
        folder = JobFolder.of(location.checkpoints, saved.work.job_id)
        if folder.storage.root != storage.root:
            raise InvalidInput(f"The plan in {uri} is for another table, {saved.work.table}. Clear the plan task.")
        return LoadedPlan(location, folder, saved)

    def load_shard(self, index: int) -> Shard:
        return self.saved.load_shard(self.folder.storage, index)

    @property
    def fingerprint(self) -> str:
        return self.saved.fingerprint

    @property
    def target(self) -> str:
        """The column or view, for log lines."""
        return self.saved.work.target

    @property
    def is_refresh(self) -> bool:
        """Whether the plan is for a view, which is swapped once at the end, not for a column."""
        return isinstance(self.saved.work, RefreshSpec)


def check_shard(shard: Any) -> Mapping[str, Any]:
    """Check the plan task's output for one shard.

    Raises:
        AirflowFailException: it is not such an output, for example because the plan task was cleared.
    """
    if not isinstance(shard, Mapping) or not {"plan_uri", "fingerprint", "shard"} <= shard.keys():
        raise AirflowFailException(
            f"shard is {shard!r:.200}, which no plan task returned. Give one entry of the plan's output: "
            "ApplyOperator.partial(...).expand(shard=plan.output)."
        )
    return shard
