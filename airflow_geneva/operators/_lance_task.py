"""What the operators that work on Lance tables share: their connection, an opened plan, and how they are stopped."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowTaskTimeout
from airflow.sdk import BaseOperator

from airflow_geneva.database import Database
from airflow_geneva.errors import InvalidInput
from airflow_geneva.hooks.lance import LanceHook
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.location import TableLocation
from airflow_geneva.operators._retries import with_retry_policy
from airflow_geneva.operators._templated import optional_text, required_text
from airflow_geneva.plan.document import SavedPlan, load_plan
from airflow_geneva.plan.fragment_work import Shard
from airflow_geneva.storage import Storage


class LanceOperator(BaseOperator):
    """A task that works on a Lance database in its own process.

    Args:
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        retry_policy: from Airflow 3.3 on, when to try again; None: a commit conflict soon, a wrong request not at all.
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
        stop_here()


def open_database(lance_conn_id: str, database: str | None) -> Database:
    """The database that templated fields name."""
    return LanceHook(required_text("lance_conn_id", lance_conn_id)).get_database(optional_text(database))


def stop_here() -> None:
    """End the task at the very statement it is at.

    Airflow tells a task to stop and then lets it go on for seconds, in which it could still commit. Everything that is
    written is written whole or not at all, so any statement will do. A task that timed out is ending already.
    """
    if not isinstance(sys.exc_info()[1], AirflowTaskTimeout):
        raise SystemExit("The task was told to stop. Nothing is half-written; the next try goes on from here.")


@dataclass(frozen=True)
class OpenPlan:
    """A plan read back by a later task.

    Args:
        location: its table.
        folder: its job's folder.
        saved: the plan without its fragments.
    """

    location: TableLocation
    folder: JobFolder
    saved: SavedPlan

    @staticmethod
    def of(database: Database, reference: Mapping[str, Any]) -> OpenPlan:
        """Read the plan that an XCom names, and check it against the fingerprint there.

        Raises:
            InvalidInput: it is gone, was changed, or lies beside another table than the one it is about.
        """
        uri, _, _ = str(reference["plan_uri"]).rpartition("/")
        storage = Storage(uri, database.options)
        saved = load_plan(storage, reference["fingerprint"])
        location = TableLocation(saved.work.table, saved.work.table_name, database.options)
        folder = JobFolder.of(location.checkpoints, saved.work.job_id)
        if folder.storage.root != storage.root:
            raise InvalidInput(f"The plan in {uri} is about another table, {saved.work.table}. Clear the plan task.")
        return OpenPlan(location, folder, saved)

    def load_shard(self, index: int) -> Shard:
        return self.saved.load_shard(self.folder.storage, index)

    @property
    def fingerprint(self) -> str:
        return self.saved.fingerprint

    @property
    def target(self) -> str:
        """What is computed, for log lines."""
        return self.saved.work.target

    @property
    def is_refresh(self) -> bool:
        """Whether it is about a view, which is swapped once at the end, and not about a column."""
        return self.saved.swap is not None


def check_shard(shard: Any) -> Mapping[str, Any]:
    """What the plan task said about one shard.

    Raises:
        AirflowFailException: it is something else, for example because the plan task was cleared.
    """
    if not isinstance(shard, Mapping) or not {"plan_uri", "fingerprint", "shard"} <= shard.keys():
        raise AirflowFailException(
            f"shard is {shard!r:.200}, which no plan task returned. Give one entry of the plan's output: "
            "ApplyOperator.partial(...).expand(shard=plan.output)."
        )
    return shard
