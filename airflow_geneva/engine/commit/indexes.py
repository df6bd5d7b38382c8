"""Update the indexes on changed columns after their values have become visible."""

from __future__ import annotations

import logging

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.conflicts import commit_tries, is_undecided
from airflow_geneva.engine.lance_io.indexes import Index
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.storage.location import TableLocation

logger = logging.getLogger("airflow_geneva.commit")


def update_indexes(location: TableLocation, field_id: int | None) -> None:
    """Make each index on a column, or each index of a view, cover all rows; write nothing if an index already does.

    The call reads the newest version, so that a call after a kill or after other commits does the remaining work. If
    the values of a covered row changed meanwhile, Lance rejects the commit and the update is repeated.

    Raises:
        CommitConflict: other writers changed the table at every retry.
        EngineError: Lance cannot update an index.
    """
    names = [index.name for index in Index.read(location.open(), field_id) if index.unindexed_rows]
    for name in names:
        for _ in commit_tries(f"table {location.name!r}", f"update its index {name!r}"):
            dataset = location.open()
            left = [index for index in Index.read(dataset, field_id) if index.name == name and index.unindexed_rows]
            fault_point("index.before")
            try:
                with engine_errors():
                    for index in left:
                        dataset.optimize.optimize_indices(index_names=[name], **index.options_to_update())
                        logger.info(
                            "Index %r of %r covers %s.", name, location.name, counted(index.unindexed_rows, "more row")
                        )
            except EngineError as error:
                if is_undecided(error):
                    continue
                raise
            fault_point("index.after")
            break
