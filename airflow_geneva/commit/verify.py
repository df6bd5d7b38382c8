"""Check at the newest version that staged files still fit; Lance does not check a ``DataReplacement``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.checkpoint.provenance import Provenance, add_rows, prior_failures_of
from airflow_geneva.checkpoint.records import StagedFragment
from airflow_geneva.lance_io.fragments import FragmentFiles, live_offsets
from airflow_geneva.lance_io.row_ranges import Ranges
from airflow_geneva.plan.reusable_checkpoints import staged_fits
from airflow_geneva.plan.shard import FragmentWork

if TYPE_CHECKING:
    import lance

_THREADS = 8


@dataclass(frozen=True)
class Candidate:
    """A staged fragment on its way into the table."""

    work: FragmentWork
    staged: StagedFragment

    def outcome(self, version: str) -> dict[Provenance, Ranges]:
        """Return the provenance of the fragment's rows after its file is committed.

        Args:
            version: the UDF version that computed the file.
        """
        staged = self.staged
        found = {provenance: rows - staged.computed for provenance, rows in self.work.kept}
        add_rows(found, [(Provenance(version, maker), rows) for maker, rows in staged.taken])
        add_rows(found, [(Provenance(version, failures=runs), rows) for runs, rows in staged.failures.rows])
        apart = Ranges.union([staged.failures.all, *(rows for _, rows in staged.taken)])
        add_rows(found, [(Provenance(version), staged.computed - apart)])
        return found

    def only_failed_again(self, version: str) -> bool:
        """Whether the UDF failed only on rows that it failed on before, so that their values are NULL already."""
        failed = Ranges.union(rows for _, rows in prior_failures_of(self.work.known, version))
        computed = self.staged.computed
        return (
            bool(self.work.files.output and computed)
            and computed == self.staged.failures.all
            and failed.contains(computed)
        )

    def output(self, field_id: int) -> tuple[tuple[int, int, str], ...]:
        """The output files that the fragment will have."""
        return ((field_id, -1, self.staged.file),)


@dataclass(frozen=True)
class Verification:
    """Which candidates can be committed at a version.

    Args:
        fitting: candidates that fit.
        done: candidates whose file is in the table already, from an earlier try of the same commit.
        left: the other candidates, each with the reason.
    """

    fitting: tuple[Candidate, ...]
    done: tuple[Candidate, ...]
    left: tuple[tuple[Candidate, str], ...]


def verify(
    dataset: lance.LanceDataset,
    manifest: Mapping[int, FragmentFiles],
    candidates: Iterable[Candidate],
    output_fields: tuple[int, ...],
) -> Verification:
    """Compare every candidate with the newest version.

    Args:
        dataset: the table at its newest version.
        manifest: its fragments.
        output_fields: field ids of the output column at that version.
    """

    def judge(candidate: Candidate) -> tuple[Candidate, str]:
        return candidate, _reason(dataset, manifest.get(candidate.work.id), candidate, output_fields)

    with ThreadPoolExecutor(_THREADS) as pool:
        judged = list(pool.map(judge, candidates))
    return Verification(
        tuple(c for c, reason in judged if reason == ""),
        tuple(c for c, reason in judged if reason == _DONE),
        tuple((c, reason) for c, reason in judged if reason not in ("", _DONE)),
    )


_DONE = "committed already"


def _reason(
    dataset: lance.LanceDataset, now: FragmentFiles | None, candidate: Candidate, output_fields: tuple[int, ...]
) -> str:
    planned, staged = candidate.work.files, candidate.staged
    if now is None:
        return "the fragment is gone (compacted, updated or deleted)"
    if not output_fields:
        return "the column was dropped"
    if now.output == candidate.output(output_fields[0]) and now.inputs == planned.inputs:
        return _DONE
    if now.inputs != planned.inputs or now.physical_rows != planned.physical_rows:
        return "its inputs were replaced"
    if now.output != staged.output_files:
        return "another writer wrote the column"
    live = live_offsets(dataset, now)
    if not staged_fits(dataset, staged, now, live, candidate.work.due & live, output_fields, staged.looked_at):
        return "its staged file no longer fits (rows were restored, the column was replaced, or the file is missing)"
    return ""
