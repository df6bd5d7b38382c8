"""Skipped rows: check their number against the limits of the error policy, and write error records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.provenance import RowsByColumn
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.failures import RowFailure
from airflow_geneva.engine.job.error_records import FATAL, ErrorRecord, newest_records, write_errors
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.plan.model import JobSpec
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.error_policy import SKIP, Policy, Skip, rules_of
from airflow_geneva.errors import UdfError


class SkipCount:
    """Counts the rows that a job skips, by rule, including those of earlier attempts; shared by a task's threads.

    `failed` is the number of rows that failed in this attempt, including rows that had failed in earlier jobs and the
    row that ended the attempt.
    """

    def __init__(self, policy: Policy, job_rows: int, before: Mapping[int, int] | None = None) -> None:
        self.policy = policy
        self.job_rows = job_rows
        self.before = dict(before or {})
        self.failed = 0
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def counted(self) -> dict[int, int]:
        return dict(self._counts)

    def add_failed(self, rows: int) -> None:
        with self._lock:
            self.failed += rows

    def add(self, counts: Mapping[int, int]) -> None:
        """Add skipped rows, by rule; `UdfError` if there are more than the policy allows."""
        with self._lock:
            self._counts.update(counts)
        self.check()

    def check(self, elsewhere: Mapping[int, int] | None = None) -> None:
        """Compare the counts with the limits, including rows that other tasks have skipped meanwhile; see `add`."""
        total = Counter(self.before) + Counter(self._counts) + Counter(elsewhere or {})
        message = exceeded_limit(self.policy, total, self.job_rows)
        if message is not None:
            raise UdfError(message)


def error_records(
    spec: JobSpec, fragment: FragmentTask, failures: Sequence[RowFailure], offsets: Offsets, ids: RowIds
) -> tuple[ErrorRecord, ...]:
    """Describe the failures of a batch of a fragment, whose rows have these offsets and ids."""
    if not failures:
        return ()
    failed = failed_offsets(failures, offsets)
    runs = np.ones(len(failed), np.int64)
    for before, rows in spec.tried(fragment):
        runs[rows.mask(failed)] = before + 1
    now = time.time()
    source = spec.source_name if spec.rows_of is spec.read else f"groups of {spec.source_name}"
    records, makers = [], dict[str, tuple[str, str, str]]()
    for failure, offset, attempt in zip(failures, failed.tolist(), runs.tolist(), strict=True):
        for one in (failure, *failure.also):
            if one.column not in makers:
                makers[one.column] = _maker(spec, one.column)
            column, udf, udf_version = makers[one.column]
            records.append(
                ErrorRecord(
                    job_id=spec.job_id,
                    column=column,
                    udf=udf,
                    udf_version=udf_version,
                    row_address=fragment.id << 32 | offset,
                    row_id=int(ids[failure.index]),
                    exception=one.exception,
                    message=one.message,
                    traceback=spec.with_source_paths(one.traceback),
                    attempt=attempt,
                    calls=one.calls,
                    rule=one.rule,
                    time=now,
                    source=source,
                )
            )
    return tuple(records)


def failed_offsets(failures: Sequence[RowFailure], offsets: Offsets) -> Offsets:
    """Return the offsets of the rows of a batch that failed."""
    return offsets[[failure.index for failure in failures]] if failures else offsets[:0]


def failed_columns(failures: Sequence[RowFailure], offsets: Offsets) -> RowsByColumn:
    """Return the failed rows of a view by the columns that failed on them."""
    found: dict[str, list[int]] = {}
    for failure in failures:
        for one in (failure, *failure.also) if failure.column else ():
            found.setdefault(one.column, []).append(int(offsets[failure.index]))
    return tuple((name, Ranges.from_offsets(rows)) for name, rows in sorted(found.items()))


def _maker(spec: JobSpec, column: str) -> tuple[str, str, str]:
    """Return a column with the name and version of its UDF; for a view, of the UDF of that column."""
    udf = spec.udfs.get(column)
    if udf is not None:
        return column, udf.name, udf.version
    return spec.column or spec.identity.column, spec.identity.udf, spec.identity.version


def write_records(spec: JobSpec, fragment: FragmentTask, job: Storage, records: Sequence[ErrorRecord]) -> None:
    """Write error records of a fragment to the job's folder."""
    if records:
        first, last = records[0].offset, records[-1].offset
        write_errors(job, f"v{spec.version}-frag-{fragment.id}-rows-{first}-{last}", records)


def fatal_failure(error: UdfError, row: int) -> RowFailure:
    """Describe the error that ended a job for its error record; ``row`` is the position within the batch."""
    if (call := error.call) is not None:
        return RowFailure(row, FATAL, call.exception, call.message, call.traceback, calls=1, column=error.column)
    cause = error.__cause__
    name = f"{type(cause).__module__}.{type(cause).__qualname__}" if cause is not None else "UdfError"
    return RowFailure(row, FATAL, exception=name, message=str(error), traceback="", calls=1, column=error.column)


def skipped_before(location: TableLocation, spec: JobSpec) -> dict[int, int]:
    """Count the rows that a job has skipped so far, by rule, without rows that had failed in earlier jobs."""
    if not has_limits(spec):
        return {}
    records = newest_records(JobFolder.of(location.checkpoints, spec.job_id).storage, ("rule",))
    new = records.filter((pc.field("rule") != FATAL) & (pc.field("attempt") == 1))
    # A row of a view counts for the first column that failed on it; of the same time, that record comes first.
    rules = new.group_by("row_id", use_threads=False).aggregate([("rule", "first")])
    return dict(Counter(rules["rule_first"].to_numpy().tolist()))


def has_limits(spec: JobSpec) -> bool:
    """Whether a UDF's error policy limits the number of rows that a job may skip."""
    policies = [udf.on_error for udf in spec.udfs.values()]
    if "skip" in policies and spec.rows > (SKIP.most_of(spec.rows) or 0):
        return True
    rules = [rule for policy in policies if not isinstance(policy, str) for rule in policy]
    return any(rule.get("max_count") or rule.get("max_fraction") for rule in rules)


def exceeded_limit(policy: Policy, counts: Mapping[int, int], job_rows: int) -> str | None:
    """Return a message about the first exceeded limit of a `Skip` rule, or None; counts are by position of the rule."""
    for at, rule in enumerate(rules_of(policy)):
        found = counts.get(at, 0)
        if not isinstance(rule, Skip) or not found:
            continue
        most = rule.most_of(job_rows)
        if most is not None and found > most:
            name = 'on_error="skip"' if rule == SKIP else _describe(rule)
            remedy = f"on_error=[{_describe(replace(rule, max_count=None, max_fraction=None))}]"
            return (
                f"{name} lets a job skip at most {counted(int(most), 'row')} of {job_rows:,}, and {found:,} failed. "
                f"Fix the function or its inputs, or allow more: {remedy} allows any number."
            )
    return None


def _describe(rule: Skip) -> str:
    classes = rule.exc if isinstance(rule.exc, tuple) else (rule.exc,)
    names = ", ".join(cls.__qualname__ for cls in classes)
    limits = [
        f"{name}={value}"
        for name, value in (("max_count", rule.max_count), ("max_fraction", rule.max_fraction))
        if value is not None
    ]
    return f"Skip({', '.join([f'({names})' if len(classes) > 1 else names, *limits])})"
