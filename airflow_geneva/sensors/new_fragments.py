"""Sensor that waits for rows that a view or a column does not include yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowSkipException, conf
from airflow.sdk import BaseSensorOperator, Context, PokeReturnValue

from airflow_geneva.assets import seconds
from airflow_geneva.engine import api
from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.storage.uri import normalize_uri
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._lance_task import (
    failing_at_once,
    is_template,
    open_database,
    optional_int,
    optional_text,
    parse_bool,
    required_text,
    stop_task,
)
from airflow_geneva.triggers.new_fragments import NewFragmentsTrigger


class NewFragmentsSensor(BaseSensorOperator):
    """Wait until a table has rows that a view or a column does not include yet, or that were added after a version.

    Compaction writes new fragments but no new rows, so the sensor ignores it. The sensor waits if the table does not
    exist yet or cannot be reached; for a view or column that does not exist yet all rows are new. In a table that was
    dropped and created again all rows are new, even if its version is lower. Rows that a restore brings back are new,
    and rows that it removes are deleted. Rows that a backfill's `where` excluded are new to the column. If the store
    denies access, or the connection does not exist, the sensor fails immediately.

    Each poke reads the state from the table and the commit times of its versions, so it misses nothing between two
    pokes, and all modes give the same result. The clocks of writers should agree with Airflow's. While the table, and
    the view, have no new version, a poke lists their versions and reads nothing else; in `mode="reschedule"`, where
    each poke is a new process, it opens the table.

    Returns the table, its `version`, `from_version` (None if all rows are new), the number of `fragments` with such
    rows, the first hundred `fragment_ids`, and `new_rows`, `changed_rows` and `deleted_rows`.

    Args:
        table: the table's name.
        since: `"view:long_docs"`, a view of the table; `"column:n"`, a computed column of it; or a version of it.
        changed_rows: for a view or a version, also count updated and deleted rows. For a column, rows whose inputs were
            updated always count.
        min_new_rows: wait for at least this many rows that count.
        min_new_fragments: wait for at least this many fragments with such rows.
        quiet_period: wait until the table has had no new version for this long, in seconds or as a timedelta.
        max_wait: ignore the last three conditions once a row has waited this long. With `exponential_backoff` also the
            longest pause.
        deferrable: wait in the triggerer, without a worker slot; by default `[operators] default_deferrable`.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        kwargs: as for every sensor: `poke_interval`, `timeout`, `mode="poke"` or `"reschedule"`, `soft_fail`.

    Example:
        ```python
        NewFragmentsSensor(task_id="wait", table="docs", since="view:long_docs", quiet_period=60, deferrable=True)
        ```
    """

    template_fields: Sequence[str] = (
        *("table", "since", "changed_rows", "min_new_rows", "min_new_fragments", "lance_conn_id", "database"),
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
        self._watcher: api.TableWatcher | None = None
        if not any(map(is_template, (table, since))):
            api.WaitCondition(table, str(since))  # raises InvalidInput while the DAG is parsed

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
        """Return the trigger's event."""
        if event is None or "error" in event:
            reason = "The trigger ended without an event." if event is None else event["error"]
            raise AirflowFailException(reason)
        self.log.info("The trigger found new rows: %s", event)
        return dict(event)

    def poke(self, context: Context) -> PokeReturnValue:
        from airflow_geneva.engine.storage.engine_errors import panics_as_errors

        wanted = self._wanted()
        if self._watcher is None or self._watcher.wanted != wanted:
            self._watcher = api.TableWatcher(wanted)
        try:
            with panics_as_errors():
                database = open_database(self.lance_conn_id, self.database)
                found = self._watcher.step(database, datetime.now(timezone.utc))
        except AirflowFailException:
            raise
        except Exception as error:
            if api.TableWatcher.is_permanent(error):
                raise AirflowFailException(mask_secrets(str(error))) from error
            self.log.warning("Cannot check table %s, trying again later: %s", wanted.table, mask_secrets(str(error)))
            return PokeReturnValue(is_done=False)
        if found is None:
            self.log.info("Table %s has not changed since the last poke.", wanted.table)
            return PokeReturnValue(is_done=False)
        self.log.info(found.told)
        return PokeReturnValue(is_done=found.event is not None, xcom_value=found.event)

    def on_kill(self) -> None:
        stop_task()

    def _wanted(self) -> api.WaitCondition:
        with failing_at_once(InvalidInput):
            return api.WaitCondition(
                table=required_text("table", self.table),
                since=required_text("since", self.since),
                changed_rows=parse_bool("changed_rows", self.changed_rows),
                min_new_rows=optional_int("min_new_rows", self.min_new_rows),
                min_new_fragments=optional_int("min_new_fragments", self.min_new_fragments),
                quiet_period=seconds(self.quiet_period),
                max_wait=seconds(self.max_wait),
            )

    def _trigger(self) -> NewFragmentsTrigger:
        database = optional_text(self.database)
        # Reject a URI with credentials here, before Airflow stores the trigger's arguments in its database.
        with failing_at_once(InvalidInput):
            database = database and normalize_uri(database)
        return NewFragmentsTrigger(
            **asdict(self._wanted()),
            lance_conn_id=required_text("lance_conn_id", self.lance_conn_id),
            database=database,
            poll_interval=max(self.poke_interval, 1.0),
            once=True,
        )
