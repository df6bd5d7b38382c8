"""Wait for rows that a view or a column has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, Context, PokeReturnValue
from airflow.sdk.exceptions import AirflowFailException

from airflow_geneva.commit.contents import ViewContents
from airflow_geneva.database import Database
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._lance_task import open_database, stop_here
from airflow_geneva.operators._templated import required_text, truth
from airflow_geneva.plan.unseen import Unseen, unseen_by_column, unseen_by_view, unseen_since
from airflow_geneva.table import Table
from airflow_geneva.view import View

if TYPE_CHECKING:
    import lance


class NewFragmentsSensor(BaseSensorOperator):
    """Wait until a table has fragments with rows that a view or a column has not seen, or that came after a version.

    Compaction makes fragments and no rows, so it is not waited for. A table that is not there yet is waited for; a view
    or a column that is not there yet has seen nothing. Rows that a backfill's `where` left out have not been seen by
    the column. Looking costs a look at the table's file lists, and reads data only where they changed.

    Returns the table's version and how many such fragments it has.

    Args:
        table: the table's name.
        since: `"view:long_docs"`, a view of the table; `"column:n"`, a computed column of it; or a version of it.
        changed_rows: of a view or a version, rows that were updated or deleted count too. To a column, rows whose
            inputs were updated are new in any case.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        kwargs: as for every sensor: `poke_interval`, `timeout`, `mode="poke"` or `"reschedule"`, `soft_fail`.

    Example:
        ```python
        NewFragmentsSensor(task_id="wait", table="docs", since="view:long_docs", mode="reschedule", poke_interval=300)
        ```
    """

    template_fields: Sequence[str] = ("table", "since", "changed_rows", "lance_conn_id", "database")

    def __init__(
        self,
        *,
        table: str,
        since: str | int,
        changed_rows: bool | str = False,
        lance_conn_id: str = "lance_default",
        database: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.since = since
        self.changed_rows = changed_rows
        self.lance_conn_id = lance_conn_id
        self.database = database

    def poke(self, context: Context) -> PokeReturnValue:
        kind, name = _parse(self.since)
        changed_rows = truth("changed_rows", self.changed_rows)
        database = open_database(self.lance_conn_id, self.database)
        wanted = required_text("table", self.table)
        if not database.location(wanted).exists():
            self.log.info("Table %s is not there yet.", wanted)
            return PokeReturnValue(is_done=False)
        table = database.open_table(wanted)
        dataset = table.lance
        if kind == "view":
            found = _unseen_by_view(database, table, dataset, name, changed_rows)
        elif kind == "column":
            found = _unseen_by_column(table, dataset, name)
        else:
            found = unseen_since(dataset, int(name), changed_rows)
        self.log.info(
            "Version %s of table %s has %s fragments with rows that are new since %s%s.",
            dataset.version, wanted, found.fragments, self.since, ", and rows are gone" if found.deletions else "",
        )  # fmt: skip
        seen = {"table": wanted, "since": str(self.since), "version": dataset.version, "fragments": found.fragments}
        return PokeReturnValue(is_done=bool(found), xcom_value=seen if found else None)

    def on_kill(self) -> None:
        stop_here()


def _parse(since: str | int) -> tuple[str, str]:
    text = required_text("since", since)
    kind, colon, name = text.partition(":")
    if text.isdigit():
        return "version", text
    if not (colon and name and kind in ("view", "column")):
        raise AirflowFailException(
            f'since={since!r} is not understood. Give "view:<name>", "column:<name>", or a version of the table.'
        )
    return kind, name


def _unseen_by_view(
    database: Database, table: Table, dataset: lance.LanceDataset, name: str, changed_rows: bool
) -> Unseen:  # fmt: skip
    if not database.location(name).exists():
        return unseen_by_view(dataset, (), None, changed_rows)
    view = database.open_table(name)
    if not isinstance(view, View):
        raise AirflowFailException(f"since='view:{name}': {name!r} is a table and not a view.")
    definition = view.view_definition
    if view.source().uri != table.uri:
        raise AirflowFailException(
            f"View {name!r} is made from {definition.source_table!r} in {definition.source_database}, and not from "
            f"{table.name!r} in {database.uri}. Give the sensor the table that the view is made from."
        )
    reads = [column.name for column in definition.reads]
    return unseen_by_view(dataset, reads, ViewContents(view.location, view.lance).snapshot, changed_rows)


def _unseen_by_column(table: Table, dataset: lance.LanceDataset, column: str) -> Unseen:
    if column not in dataset.schema.names:
        return unseen_by_view(dataset, (), None, changed_rows=False)
    try:
        inputs = table.definition(column, dataset).input_columns or ()
    except InvalidInput as error:
        raise AirflowFailException(str(error)) from error
    return unseen_by_column(dataset, table.location.checkpoints, inputs, column)
