"""Whose checkpoints a job uses, and which rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from airflow_geneva.checkpoint.fragment import StagedFragment
from airflow_geneva.checkpoint.provenance import Failures, Tried
from airflow_geneva.checkpoint.ranges import Ranges


@dataclass(frozen=True)
class Trust:
    """Whose checkpoints a job uses.

    Args:
        job_id: the job; only what it gave up itself need not run again.
        prefixes: key prefixes with the UDF version they stand for; the job's own comes first.
        agreement: digest of what versions must have in common to take values over from one another.
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

    def usable_rows(self, staged: StagedFragment, version: str, tried: Tried) -> Ranges:
        """Rows of a staged file whose values serve this job."""
        if version != self.version:
            mine = staged.computed if staged.agreement == self.agreement else Ranges.empty()
            return mine - staged.failures.all - Ranges.union(rows for _, rows in staged.taken)
        foreign = Ranges.union(rows for maker, rows in staged.taken if maker not in self.versions.values())
        return staged.computed - foreign - self.to_try_again(staged.failures, tried)

    def settled_rows(self, staged: StagedFragment, tried: Tried) -> Ranges:
        """Rows for which nothing is left to do in this job once its own staged file is committed."""
        return staged.looked_at - (staged.computed - self.usable_rows(staged, self.version, tried))

    def to_try_again(self, failures: Failures, tried: Tried) -> Ranges:
        """Rows that were given up, and not by this job in this run."""
        return failures.all - failures.standing(self.job_id, tried)
