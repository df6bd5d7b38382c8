"""Write error records and range checkpoints of one fragment, and pass its rows on to their data file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.applier import StepResult
from airflow_geneva.engine.apply.batch_api import StillWaiting
from airflow_geneva.engine.apply.queues import Unkept
from airflow_geneva.engine.apply.skipped_rows import write_records
from airflow_geneva.engine.checkpoint.provenance import Failures, join_columns
from airflow_geneva.engine.checkpoint.records import (
    RangeContent,
    RowRuns,
    computed_rows,
    decode_runs,
    merge_runs,
    write_range,
)
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.job.error_records import ErrorRecord
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.table_key import RowNames
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import StorageError

logger = logging.getLogger("airflow_geneva.apply")
_NO_IDS = np.empty(0, np.uint64)


def joint_filter_evaluated(steps: Sequence[StepResult], runs: RowRuns) -> Ranges:
    """Return the rows on which a step evaluated the filter; `runs` are the rows on which the UDF ran in these steps."""
    found = [step.filter_evaluated for step in steps]
    parts = [computed_rows(runs)] if None in found else []
    return Ranges.union([*parts, *(rows for rows in found if rows is not None)])


@dataclass
class CheckpointWriter:
    """Collects the steps of one fragment until their checkpoint is due; `on_kept` is called when it is written."""

    store: CheckpointStore
    job: Storage
    spec: JobSpec
    fragment: FragmentTask
    on_kept: Callable[[Unkept], None]
    names: RowNames
    most: int | None = None
    steps: list[StepResult] = field(default_factory=list)
    records: list[ErrorRecord] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def keep(self, steps: Iterable[StepResult], keep_last: bool = True) -> Generator[StepResult, None, None]:
        """Yield the steps, and write their checkpoints; after an error, also a checkpoint of the last steps.

        ``keep_last`` also writes a checkpoint of the last steps without an error; a caller that stages the whole
        fragment does not need it.
        """
        try:
            for step in steps:
                self.records += step.records
                if step.start == step.end:
                    continue
                self._add(step)
                yield step
                if step.unkept is not None:
                    self._flush()
                    self.on_kept(step.unkept)
        except StillWaiting:
            self._flush()
            raise
        except BaseException:
            try:
                self._flush()
            except StorageError as unkept:
                logger.warning(
                    "Cannot write a last checkpoint, so the rows computed since the one before are lost: %s", unkept
                )
            raise
        if keep_last:
            self._flush()
        else:
            self._write_records()

    def _add(self, step: StepResult) -> None:
        self.rows += len(step.values)
        self.bytes += step.values.nbytes
        if self.bytes > self.spec.sizing.checkpoint_bytes // 2 or (self.most is not None and self.rows > self.most):
            self._flush()
            self.rows, self.bytes = len(step.values), step.values.nbytes
        self.steps.append(replace(step, row_ids=_NO_IDS))

    def _flush(self) -> None:
        # Write the errors first: the checkpoint says that failed rows need not run again.
        self._write_records()
        if self.steps:
            runs = merge_runs([step.runs for step in self.steps])
            filter_evaluated = joint_filter_evaluated(self.steps, runs)
            values = pa.concat_arrays([step.values for step in self.steps])
            offsets, ids = decode_runs(runs)
            failed = Ranges.union(step.failed for step in self.steps)
            columns = join_columns(step.failed_columns for step in self.steps)
            failures = Failures.next(self.spec.job_id, failed, self.spec.tried(self.fragment), columns)
            rows = RangeContent(offsets, ids, filter_evaluated, failures, self.spec.agreement)
            write_range(self.store, self.spec.key(self.fragment), self.steps[0].start, self.steps[-1].end, values, rows)
        self.steps, self.rows, self.bytes = [], 0, 0

    def _write_records(self) -> None:
        named = zip(self.records, self.names.of([record.row_id for record in self.records]), strict=True)
        records = [replace(record, key=key) if key else record for record, key in named]
        write_records(self.spec, self.fragment, self.job, records)
        self.records = []
