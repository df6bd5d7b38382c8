"""The context of a backfill's tasks: look up what the checkpoint store has of a fragment, and stage its data file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.provenance import Failures
from airflow_geneva.checkpoint.records import RowRuns, StagedFragment, encode_runs, merge_runs
from airflow_geneva.checkpoint.reuse import CheckpointIndex, ReusableRows, ReuseRules
from airflow_geneva.checkpoint.store import CheckpointStore, LanceCheckpointStore
from airflow_geneva.errors import InvalidInput
from airflow_geneva.job.folder import JobFolder
from airflow_geneva.lance_io.fragments import field_ids, live_offsets, row_ids
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.model import JobSpec
from airflow_geneva.plan.reusable_files import is_staged_readable, staged_fits
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.storage.files import Storage
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.write.column_file import ColumnFileWriter, assemble

if TYPE_CHECKING:
    import lance


@dataclass(frozen=True)
class BackfillContext:
    """The context that all units of a backfill share.

    Args:
        dataset: the table at the planned version.
        store: its checkpoints.
        work: the job.
        job: the job's folder.
    """

    dataset: lance.LanceDataset
    store: CheckpointStore
    work: JobSpec
    job: Storage

    @staticmethod
    def at(location: TableLocation, work: JobSpec) -> BackfillContext:
        """Open the table, its checkpoints and the job's folder.

        Raises:
            InvalidInput: the table or its planned version does not exist any more.
            TableRemade: the table was dropped and created again.
        """
        checkpoints = location.checkpoints
        job = JobFolder.of(checkpoints, work.job_id).storage
        try:
            dataset = location.open(work.version)
        except InvalidInput as error:
            # If the whole table is unreachable or was created again, raise that error instead.
            location.open()
            work.read.look(location.options)
            raise InvalidInput(
                f"Version {work.version} of table {work.table_name!r}, on which column {work.column!r} was planned, "
                "was cleaned up. Checkpoints are kept. Clear the plan task with its downstream tasks; outside of "
                "Airflow, run the backfill again."
            ) from error
        work.read.check(dataset)
        return BackfillContext(dataset, LanceCheckpointStore(checkpoints), work, job)

    @cached_property
    def reuse_rules(self) -> ReuseRules:
        return self.work.reuse_rules(*self.work.continue_from)

    @property
    def output_fields(self) -> tuple[int, ...]:
        return field_ids(self.dataset, self.work.column)

    def index(self, fragment: FragmentWork) -> CheckpointIndex:
        return CheckpointIndex(
            self.store, self.reuse_rules, [fragment.place, *(ancestor.place for ancestor in fragment.ancestors)]
        )

    def staged(self, fragment: FragmentWork, index: CheckpointIndex, live: Ranges) -> StagedFragment | None:
        """Return the fragment's staged data file if it can be committed as it is."""
        staged = index.staged_at(fragment.place)
        if staged is None:
            return None
        settled = self.reuse_rules.done_rows(staged, self.work.tried(fragment))
        due = fragment.due & live
        fits = staged_fits(self.dataset, staged, fragment.files, live, due, self.output_fields, settled)
        return staged if fits else None

    def held(self, fragment: FragmentWork, index: CheckpointIndex, wanted: Ranges) -> ReusableRows:
        """Return the fragment's computed rows that the store has."""
        return index.held(
            fragment.place,
            fragment.ancestors,
            wanted,
            lambda: row_ids(self.dataset, fragment.id),
            lambda staged: is_staged_readable(self.dataset, staged, self.work.column),
            self.work.tried(fragment),
        )

    def stage(self, fragment: FragmentWork, held: ReusableRows) -> StagedFragment:
        """Assemble a fragment's data file from checkpoints and old values.

        Raises:
            BrokenFile: a checkpoint or staged file is damaged, or was removed meanwhile.
        """
        live, limit = live_offsets(self.dataset, fragment.files), self.work.sizing.batch_bytes
        parts = assemble(self.dataset, self.store, fragment.files, live, self.work.column, held.pieces, limit)
        writer = ColumnFileWriter(self.dataset, self.work.column)
        for part in parts:
            writer.put(part)
        offsets, ids = row_ids(self.dataset, fragment.id)
        computed = held.computed
        mask = computed.mask(offsets)
        runs = merge_runs([encode_runs(offsets[mask], ids[mask])])
        taken = held.taken(self.work.udf_version)
        return self.record(fragment, writer.finish(), live, runs, held.done & live, held.by_job, held.failed, taken)

    def record(
        self,
        fragment: FragmentWork,
        file: str,
        live: Ranges,
        runs: RowRuns,
        looked_at: Ranges,
        by_job: Mapping[str, int],
        failed: Ranges,
        taken: tuple[tuple[str, Ranges], ...] = (),
    ) -> StagedFragment:
        """Write the fragment checkpoint of a finished data file."""
        files = fragment.files
        staged = StagedFragment(
            file=file,
            src_data_files=tuple(files.source_paths()),
            output_field_ids=self.output_fields,
            output_files=files.output,
            deletion=files.deletion,
            live=live,
            physical_rows=files.physical_rows,
            runs=runs,
            looked_at=looked_at,
            by_job=tuple(sorted(by_job.items())),
            failures=Failures.next(self.work.job_id, failed, self.work.tried(fragment)),
            taken=taken,
            agreement=self.work.agreement,
        )
        self.store[str(self.work.key(fragment))] = staged.to_batch()
        return staged
