"""Decide which checkpoints a job reuses, and which of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from airflow_geneva.checkpoint.provenance import Failures, PriorFailures
from airflow_geneva.checkpoint.records import StagedFragment
from airflow_geneva.lance_io.row_ranges import Ranges


@dataclass(frozen=True)
class ReuseRules:
    """Which checkpoints a job reuses.

    Args:
        job_id: the job; rows that failed in this job do not run again in it.
        prefixes: key prefixes with their UDF versions; the job's own comes first.
        agreement: hash of the output type and the declared deps; a version's values are reused only if it is equal.
    """

    job_id: str
    prefixes: tuple[tuple[str, str], ...]
    agreement: str = ""

    @property
    def prefix(self) -> str:
        return self.prefixes[0][0]

    @property
    def version(self) -> str:
        return self.prefixes[0][1]

    @cached_property
    def versions(self) -> dict[str, str]:
        return dict(self.prefixes)

    def usable_rows(self, staged: StagedFragment, version: str, tried: PriorFailures) -> Ranges:
        """Return the rows of a staged file whose values this job can reuse."""
        if version != self.version:
            mine = staged.computed if staged.agreement == self.agreement else Ranges.empty()
            return mine - staged.failures.all - Ranges.union(rows for _, rows in staged.taken)
        foreign = Ranges.union(rows for maker, rows in staged.taken if maker not in self.versions.values())
        return staged.computed - foreign - self.failed_in_other_runs(staged.failures, tried)

    def done_rows(self, staged: StagedFragment, tried: PriorFailures) -> Ranges:
        """Return the rows that are done in this job once its own staged file is committed."""
        return staged.looked_at - (staged.computed - self.usable_rows(staged, self.version, tried))

    def failed_in_other_runs(self, failures: Failures, tried: PriorFailures) -> Ranges:
        """Return the rows that failed, but not in this run of this job."""
        return failures.all - failures.standing(self.job_id, tried)
