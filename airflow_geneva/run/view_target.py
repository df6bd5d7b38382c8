"""The context of a refresh's tasks: look up what the store has of a source fragment, and stage its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_geneva.checkpoint.provenance import Failures
from airflow_geneva.checkpoint.records import RowRuns, StagedFragment, encode_runs, merge_runs
from airflow_geneva.checkpoint.reuse import CheckpointIndex, ReusableRows, ReuseRules, read_values
from airflow_geneva.checkpoint.store import CheckpointStore, LanceCheckpointStore
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.lance_io.arrays import convert_array
from airflow_geneva.lance_io.fragments import row_ids
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.reusable_files import is_view_file_complete, is_view_file_readable
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.write.pieces import WINDOW_ROWS, CheckpointedRowsReader, fit_rows
from airflow_geneva.write.view_file import ViewFileWriter, read_view_rows

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True)
class RefreshContext:
    """The context that all units of a refresh share.

    Args:
        source: the source at the planned version.
        view: the view.
        store: the view's checkpoints.
        work: the job.
        job: the job's folder.
    """

    source: lance.LanceDataset
    view: lance.LanceDataset
    store: CheckpointStore
    work: JobSpec
    job: Storage

    @staticmethod
    def at(location: TableLocation, work: JobSpec) -> RefreshContext:
        """Open the source, the view, its checkpoints and the job's folder.

        Raises:
            InvalidInput: the source, the view, or the planned version of the source does not exist any more.
            TableRemade: the source or the view was dropped and created again.
        """
        source = TableLocation(work.source, work.read.name, location.options).open(work.version)
        work.read.check(source)
        view = location.open()
        work.written.check(view)
        job = JobFolder.of(location.checkpoints, work.job_id).storage
        return RefreshContext(source, view, LanceCheckpointStore(location.checkpoints), work, job)

    @cached_property
    def reuse_rules(self) -> ReuseRules:
        return self.work.reuse_rules()

    def index(self, fragment: FragmentWork) -> CheckpointIndex:
        return CheckpointIndex(self.store, self.reuse_rules, [fragment.place])

    def staged(self, fragment: FragmentWork, index: CheckpointIndex) -> StagedFragment | None:
        """Return the fragment's staged rows if they can be swapped in as they are."""
        staged = index.staged_at(fragment.place)
        if staged is None or staged.computed != fragment.due:
            return None
        if not self.reuse_rules.done_rows(staged, self.work.tried(fragment)).contains(fragment.due):
            return None
        return staged if is_view_file_complete(self.view, staged) else None

    def held(self, fragment: FragmentWork, index: CheckpointIndex, wanted: Ranges) -> ReusableRows:
        """Return the fragment's computed rows that the store has."""
        return index.held(
            fragment.place,
            (),
            wanted,
            lambda: row_ids(self.source, fragment.id),
            lambda staged: is_view_file_readable(self.view, self.work, staged),
            self.work.tried(fragment),
        )

    def stage(self, fragment: FragmentWork, held: ReusableRows) -> StagedFragment:
        """Assemble the rows from checkpoints.

        Raises:
            BrokenFile: a checkpoint or staged file is damaged, or was removed meanwhile.
        """
        writer = ViewFileWriter(self.view, self.work.explode, self.work.plain_blobs)
        due = fragment.due.offsets()
        runs: list[RowRuns] = []
        reader = CheckpointedRowsReader(
            held.pieces,
            self.work.sizing.batch_bytes,
            lambda part, room: (
                read_view_rows(self.view, part.source, part.positions, room)
                if part.staged
                else read_values(self.store, part, room)
            ),
        )
        at = 0
        while at < len(due):
            start = int(due[at])
            until = min(at + WINDOW_ROWS, len(due))
            end = reader.end_of_window(start, int(due[until - 1]) + 1)
            parts, rows = fit_rows(partial(reader.read, start), end - start)
            offsets = np.concatenate([part.offsets for part, _ in parts])
            order = np.argsort(offsets, kind="stable")
            ids = np.concatenate([part.row_ids for part, _ in parts])[order]
            kind = parts[0][1].type
            values = pa.concat_arrays([convert_array(values, kind) for _, values in parts])
            writer.put(values.take(pa.array(order)), ids)
            runs.append(encode_runs(offsets[order], ids))
            at = int(np.searchsorted(due, start + rows))
        return self.record(fragment, writer, merge_runs(runs), held.by_job, held.failed)

    def record(
        self,
        fragment: FragmentWork,
        writer: ViewFileWriter,
        runs: RowRuns,
        by_job: Mapping[str, int],
        failed: Ranges,
    ) -> StagedFragment:
        """Finish the data file, and write the fragment checkpoint that names it."""
        files = fragment.files
        staged = StagedFragment(
            file=writer.finish(),
            src_data_files=tuple(files.source_paths()),
            output_field_ids=tuple(field.id() for field in self.view.lance_schema.fields()),
            output_files=(),
            deletion=files.deletion,
            live=fragment.due,
            physical_rows=writer.rows,
            runs=runs,
            looked_at=fragment.due,
            by_job=tuple(sorted(by_job.items())),
            failures=Failures.next(self.work.job_id, failed, self.work.tried(fragment)),
            agreement=self.work.agreement,
            dense=True,
        )
        self.store[str(self.work.key(fragment))] = staged.to_batch()
        return staged
