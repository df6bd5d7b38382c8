"""Wait for rows that a view or a column has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowSkipException, conf
from airflow.sdk import BaseSensorOperator, Context, PokeReturnValue

from airflow_geneva.assets import seconds
from airflow_geneva.errors import InvalidInput, without_secrets
from airflow_geneva.operators._lance_task import open_database, stop_here
from airflow_geneva.operators._templated import optional_int, optional_text, required_text, truth
from airflow_geneva.triggers._looking import is_hopeless, look
from airflow_geneva.triggers._wanted import Wanted
from airflow_geneva.triggers.new_fragments import NewFragmentsTrigger
from airflow_geneva.uri import normalize_uri


class NewFragmentsSensor(BaseSensorOperator):
    """Wait until a table has rows that a view or a column has not seen, or that came after a version.

    Compaction makes fragments and no rows, so it is not waited for. A table that is not there yet is waited for, and so
    is one that cannot be reached for a while; a view or a column that is not there yet has seen nothing. A table that
    was dropped and made again is new as a whole, also when its version is lower. Rows that a restore brings back are
    new, and those it takes away are deleted. Rows that a backfill's `where` left out have not been seen by the column.
    When the store refuses, or there is no such connection, the sensor fails at once.

    What is waited for is derived from the table each time, by the times at which Lance says that versions were
    committed, so nothing is lost between two looks, and all modes agree. The clocks of those who write should agree
    with Airflow's.

    Returns the table, its `version`, `from_version` (None when nothing was seen before), the number of `fragments` with
    such rows, the first hundred `fragment_ids`, and `new_rows`, `changed_rows` and `deleted_rows`.

    Args:
        table: the table's name.
        since: `"view:long_docs"`, a view of the table; `"column:n"`, a computed column of it; or a version of it.
        changed_rows: of a view or a version, rows that were updated or deleted count too. To a column, rows whose
            inputs were updated are new in any case.
        min_new_rows: wait for so many rows that count.
        min_new_fragments: wait for so many fragments with such rows.
        quiet_period: wait until the table has had no new version for so long, in seconds or as a timedelta.
        max_wait: do not wait for all that any more once something has been there for so long. With
            `exponential_backoff` also the longest pause.
        deferrable: wait in the triggerer, with no worker slot; by default as `[operators] default_deferrable` says.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        kwargs: as for every sensor: `poke_interval`, `timeout`, `mode="poke"` or `"reschedule"`, `soft_fail`.

    Example:
        ```python
        NewFragmentsSensor(task_id="wait", table="docs", since="view:long_docs", quiet_period=60, deferrable=True)
        ```
    """

    template_fields: Sequence[str] = (
        "table",
        "since",
        "changed_rows",
        "min_new_rows",
        "min_new_fragments",
        "lance_conn_id",
        "database",
    )

    def __init__(
        self,
        *,
        table: str,
        since: str | int,
        changed_rows: bool | str = False,
        min_new_rows: int | str | None = None,
        min_new_fragments: int | str | None = None,
        quiet_period: timedelta | float | None = None,
        max_wait: timedelta | float | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        lance_conn_id: str = "lance_default",
        database: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_wait=max_wait, **kwargs)
        self.table = table
        self.since = since
        self.changed_rows = changed_rows
        self.min_new_rows = min_new_rows
        self.min_new_fragments = min_new_fragments
        self.quiet_period = quiet_period
        self.deferrable = deferrable
        self.lance_conn_id = lance_conn_id
        self.database = database

    def execute(self, context: Context) -> Any:
        if not self.deferrable:
            return super().execute(context)
        try:
            found = self.poke(context)
            trigger = self._trigger()
        except AirflowFailException as error:
            if self.soft_fail or self.never_fail:
                raise AirflowSkipException(f"Skipping: {error}") from error
            raise
        if found.is_done:
            return found.xcom_value
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=self.timeout))
        return None

    def execute_complete(self, context: Context, event: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Go on with what the trigger found."""
        if event is None or "error" in event:
            told = "The trigger ended without an event." if event is None else event["error"]
            raise AirflowFailException(told)
        self.log.info("The triggerer found what is waited for: %s", event)
        return dict(event)

    def poke(self, context: Context) -> PokeReturnValue:
        wanted = self._wanted()
        try:
            database = open_database(self.lance_conn_id, self.database)
            found = look(database, wanted, None, datetime.now(timezone.utc))
        except AirflowFailException:
            raise
        except Exception as error:
            if is_hopeless(error):
                raise AirflowFailException(without_secrets(str(error))) from error
            self.log.warning(
                "Cannot look at table %s, trying again later: %s", wanted.table, without_secrets(str(error))
            )
            return PokeReturnValue(is_done=False)
        self.log.info(found.told)
        return PokeReturnValue(is_done=found.event is not None, xcom_value=found.event)

    def on_kill(self) -> None:
        stop_here()

    def _wanted(self) -> Wanted:
        try:
            return Wanted(
                table=required_text("table", self.table),
                since=required_text("since", self.since),
                changed_rows=truth("changed_rows", self.changed_rows),
                min_new_rows=optional_int("min_new_rows", self.min_new_rows),
                min_new_fragments=optional_int("min_new_fragments", self.min_new_fragments),
                quiet_period=seconds(self.quiet_period),
                max_wait=seconds(self.max_wait),
            )
        except InvalidInput as error:
            raise AirflowFailException(str(error)) from error

    def _trigger(self) -> NewFragmentsTrigger:
        database = optional_text(self.database)
        try:
            # What names its credentials is refused here, before it could be written into the trigger's row.
            database = database and normalize_uri(database)
        except InvalidInput as error:
            raise AirflowFailException(str(error)) from error
        return NewFragmentsTrigger(
            **asdict(self._wanted()),
            lance_conn_id=required_text("lance_conn_id", self.lance_conn_id),
            database=database,
            poll_interval=max(self.poke_interval, 1.0),
            once=True,
        )
