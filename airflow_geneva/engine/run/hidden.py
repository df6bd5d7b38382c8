"""Views of a view's source that lie in the folder of the view, and are refreshed before it: no database lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_geneva.engine.choices import RunnerName
from airflow_geneva.engine.commit.group_table import compact, has_many_fragments
from airflow_geneva.engine.job.meter import JobMeter, Stopwatch
from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.results import DONE
from airflow_geneva.engine.run.pipeline import run_new
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.view import plan
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.definition import ViewDefinition, is_view
from airflow_geneva.engine.views.rows import create_view
from airflow_geneva.errors import CommitConflict, InvalidInput

if TYPE_CHECKING:
    import lance

_TRIES = 5
_ROWS_PER_FRAGMENT = 1 << 20


@dataclass(frozen=True)
class HiddenView:
    """A view that another one needs.

    Args:
        definition, schema: its query, and the columns of that.
        source: where the source of both views lies.
    """

    location: TableLocation
    definition: ViewDefinition
    schema: pa.Schema
    source: TableLocation

    def refreshed(self, version: int) -> lance.LanceDataset:
        """Return the view as it shows a version of the source; create and refresh it in this process if necessary.

        Raises:
            JobFailed: the job failed.
            CommitConflict: other refreshes changed it again and again.
        """
        for _ in range(_TRIES):
            dataset = self._open()
            definition, planned = self._plan(dataset, version)
            if planned.swap is not None and planned.swap.idle:
                return dataset
            with JobMeter(self.location.name).measuring():  # the meter of the caller is that of the view
                udfs = Udfs.of_refresh(planned, definition)
                result = run_new(planned, self.location, udfs, RunnerName.INLINE, Stopwatch())
            if has_many_fragments(self.location.open()):
                compact(self.location)
            # Another refresh may go to another version at the same time.
            if result.state == DONE:
                return self.location.open(result.version) if result.commits else dataset
        raise CommitConflict(
            f"{self.location.uri} was changed by other refreshes of its view {_TRIES} times. Refresh the view again."
        )

    def showing(self, version: int) -> lance.LanceDataset | None:
        """Return the view if a refresh to a version of the source would change no row; write nothing."""
        dataset = self._existing()
        if dataset is None:
            return None
        _, planned = self._plan(dataset, version)
        swap = planned.swap
        return dataset if swap is not None and not (planned.shards or swap.gone or swap.renumbered) else None

    def _plan(self, dataset: lance.LanceDataset, version: int) -> tuple[ViewDefinition, Plan]:
        request = RefreshRequest(src_version=version, on_code_change="recompute", on_unknown_values="recompute")
        definition = ViewDefinition.read(dataset.schema.metadata, self.location.name)
        return definition, plan(self.location, definition, self.source, request, dataset)

    def _existing(self) -> lance.LanceDataset | None:
        """Open the view if there is one, and it has this query."""
        if not self.location.exists():
            return None
        found = self.location.open()
        metadata = found.schema.metadata
        same = is_view(metadata) and not ViewDefinition.read(metadata).differences(self.definition)
        return found if same else None

    def _open(self) -> lance.LanceDataset:
        """Open the view, which is created if there is none, or one of another query."""
        import lance

        if (found := self._existing()) is not None:
            return found
        if self.location.exists():
            lance.LanceDataset.drop(self.location.uri, **self.location.access)
        schema = self.schema.with_metadata(self.definition.metadata())
        try:
            create_view(self.location, schema, (), _ROWS_PER_FRAGMENT, self.definition.source_version)
        except InvalidInput:
            if not self.location.exists():
                raise
        return self.location.open()
