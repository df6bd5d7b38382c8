"""The failed rows of a table: which they are, and why."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.engine.job.current_errors import ErrorGroups, failing_now, group_errors
from airflow_geneva.engine.job.error_records import ErrorRecord
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.freshness import (
    addresses_of_rows,
    errors_of_columns,
    failed_rows_of_columns,
    failed_rows_of_source,
    ids_of_rows,
)
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.definition import definition_in, read_definition
from airflow_geneva.engine.views.definition import ViewDefinition, filled_by
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    from lance import LanceDataset


class FailedRows(ABC):
    """What a table or view says of its failed rows."""

    location: TableLocation

    @property
    @abstractmethod
    def lance(self) -> LanceDataset:
        """The dataset at its newest version."""

    def get_errors(
        self, job_id: str | None = None, column_name: str | None = None, history: bool = False
    ) -> list[ErrorRecord]:
        """Return the error records of the rows that fail now, newest first: the newest record of each.

        A row fails now if it is NULL because a UDF failed on it, or if the last job of its column failed or still runs,
        and met the failure.

        Args:
            job_id: all records of this job.
            column_name: only records of this column.
            history: all records of all jobs, also of rows that have a value now.

        Raises:
            InvalidInput: there is no such job of this table, or no such column and no record of one.
        """
        records = errors_of_columns(self.location.checkpoints, self.lance.schema, job_id, column_name)
        if not records and column_name is not None:
            check_columns(self.location.name, self.lance.schema.names, [column_name])
        if not records and job_id is not None and job_id not in job_ids(self.location.checkpoints):
            raise InvalidInput(
                f"There is no job {job_id!r} of table {self.location.name!r}. "
                f"db.jobs(table={self.location.name!r}) lists its newest."
            )
        if job_id is not None or history or not records:
            return records
        there = set(self.lance.schema.names)
        records = [record for record in records if record.column in there]  # not of a column that was dropped
        return failing_now(self.location.checkpoints, records, self._failed_ids)

    def group_errors(
        self, job_id: str | None = None, column_name: str | None = None, history: bool = False
    ) -> ErrorGroups:
        """Group what :meth:`get_errors` returns by exception and message, with a count and an example.

        A notebook shows the list of groups as a table.

        Args:
            job_id, column_name, history: as for :meth:`get_errors`.
        """
        return group_errors(self.get_errors(job_id, column_name, history))

    def _failed_ids(self, column: str) -> set[int]:
        """Return the row ids of the rows that are NULL because the UDF of a column failed."""
        dataset = self.lance
        return ids_of_rows(dataset, failed_rows_of_columns(dataset, self.location.checkpoints, [column]))

    def get_failed_row_addresses(self, job_id: str | None = None, column_name: str | None = None) -> list[int]:
        """Return the row addresses of failed rows, ascending.

        Args:
            job_id: rows that failed in this job, at their addresses then; None: rows that are NULL now because the UDF
                failed on them, at their current addresses.
            column_name: only rows of this column.

        Raises:
            InvalidInput: ``job_id`` is not a job id, or the column is not a computed column.
        """
        if job_id is not None:
            return sorted({record.row_address for record in self.get_errors(job_id, column_name)})
        dataset = self.lance
        if column_name is not None:
            read_definition(self.location.name, dataset.schema, column_name)
            names = [column_name]
        else:
            names = [field.name for field in dataset.schema if definition_in(field) is not None]
        found = failed_rows_of_columns(dataset, self.location.checkpoints, names)
        return sorted(set(addresses_of_rows(found)))


@dataclass(frozen=True)
class FailedSourceRows:
    """The rows of a view's source that are NULL or missing in the view because a UDF failed on them.

    Args:
        dataset, source: the newest versions of the view and of its source.
    """

    view: TableLocation
    dataset: LanceDataset
    source: LanceDataset

    def addresses(self, column: str | None) -> list[int]:
        """Return their addresses in the source, ascending; of a column, only those on which its UDF failed."""
        return sorted(addresses_of_rows(self._rows(column)))

    def ids(self, column: str) -> set[int]:
        """Return the ids of those on which the UDF of a column failed."""
        return ids_of_rows(self.source, self._rows(column))

    def _rows(self, column: str | None) -> Iterator[tuple[int, Ranges]]:
        definition = ViewDefinition.read(self.dataset.schema.metadata, self.view.name)
        snapshot = CommittedViewState(self.view, self.dataset).snapshot
        if snapshot is not None:
            made_by = None if column is None else filled_by(definition.columns).get(column, column)
            reads = [one.name for one in definition.reads]
            yield from failed_rows_of_source(self.source, reads, snapshot, made_by)
