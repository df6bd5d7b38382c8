"""Reuse checkpoints that another version of a UDF computed (``continue_from``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow_geneva.checkpoint.keys import key_part
from airflow_geneva.checkpoint.provenance import rows_that
from airflow_geneva.checkpoint.reuse import CheckpointIndex
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.errors import InvalidInput
from airflow_geneva.lance_io.fragments import row_ids
from airflow_geneva.plan.model import BackfillSpec
from airflow_geneva.plan.reusable_files import is_staged_readable
from airflow_geneva.plan.shard import FragmentWork
from airflow_geneva.storage.files import Storage

if TYPE_CHECKING:
    import lance


def check_continue_from(checkpoints: Storage, work: BackfillSpec) -> None:
    """Refuse versions whose values must not be mixed with those of the current version.

    Raises:
        InvalidInput: no job of such a version is recorded, or it had other inputs, another filter, output type or deps.
    """
    if not work.continue_from:
        return
    jobs = list(_jobs_of(checkpoints, work.column))
    for version in work.continue_from:
        then = [job for job in jobs if job.get("udf_version") == version]
        if version == work.udf_version or not then:
            why = "that is the current version" if version == work.udf_version else "no job of that version is recorded"
            found = ", ".join(sorted({str(job.get("udf_version")) for job in jobs} - {work.udf_version})) or "none"
            raise InvalidInput(
                f"continue_from={version!r}: {why}. Other versions that worked on column {work.column!r} of table "
                f"{work.table_name!r}: {found}."
            )
        differences = [_differences(job, work) for job in then]
        if all(differences):
            raise InvalidInput(
                f"continue_from={version!r}: values of that version cannot be mixed with those of version "
                f"{work.udf_version}: {'; '.join(differences[0])}. Leave continue_from out to compute the rows again."
            )


def _jobs_of(checkpoints: Storage, column: str) -> Iterator[dict[str, Any]]:
    """Yield the job records of a column, newest first."""
    names, _ = checkpoints.list_folder("jobs")
    for name in reversed(names):
        try:
            job: dict[str, Any] = checkpoints.folder("jobs", name).read_json("job.json")
        except (FileNotFoundError, ValueError):
            continue
        if job.get("column") == column:
            yield job


def _differences(job: dict[str, Any], work: BackfillSpec) -> list[str]:
    """Describe how a job's settings differ from the current ones."""
    then: list[tuple[str, Any, Any]] = [
        ("name", job.get("udf"), work.udf_name),
        ("inputs", job.get("inputs"), list(work.inputs)),
        ("where", job.get("where"), work.where),
    ]
    found = [f"its {what} was {before!r} and is {now!r}" for what, before, now in then if before != now]
    if job.get("agreement") != work.agreement:
        found.append("its output type or its declared deps were different")
    return found


def continue_from_notes(
    dataset: lance.LanceDataset, store: CheckpointStore, work: BackfillSpec, fragments: Sequence[FragmentWork]
) -> Iterator[str]:
    """Yield one note for each other version that has checkpoints of rows that are about to run."""
    open_rows = {
        f.place: (f, f.missing - rows_that(f.known, lambda p: not p.failures)) for f in fragments if not f.staged
    }
    if work.ignore_checkpoints or not any(rows for _, rows in open_rows.values()):
        return
    for version in _versions_there(store, work):
        reuse_rules = replace(work, continue_from=(version,)).reuse_rules
        index = CheckpointIndex(store, replace(reuse_rules, prefixes=reuse_rules.prefixes[1:]))
        rows = 0
        for place in index.places() & set(open_rows):
            fragment, wanted = open_rows[place]
            held = index.held(
                place, (), wanted, partial(row_ids, dataset, fragment.id),
                lambda staged: is_staged_readable(dataset, staged, work.column),
            )  # fmt: skip
            rows += len(held.computed)
        if rows:
            named = _named(store, work.column, version)
            yield f'{rows:,} rows are checkpointed by UDF version {named}: continue_from="{named}" would save them.'


def _versions_there(store: CheckpointStore, work: BackfillSpec) -> list[str]:
    """Return the other versions of the UDF that have checkpoints for the column."""
    head, _, tail = _folder(work, "\0").partition("\0")
    folders, _ = store.storage.list_folder()
    named = [name for name in folders if name.startswith(head) and name.endswith(tail)]
    found = [name[len(head) : len(name) - len(tail)] for name in named]
    known = {key_part(version) for version in (work.udf_version, *work.continue_from)}
    return [version for version in found if version not in known]


def _named(store: CheckpointStore, column: str, part: str) -> str:
    """Return the version that a part of a folder's name stands for."""
    versions = (str(job.get("udf_version")) for job in _jobs_of(store.storage, column))
    return next((version for version in versions if key_part(version) == part), part)


def _folder(work: BackfillSpec, version: str) -> str:
    """Return the name of the folder of a version's checkpoints."""
    prefix = replace(work.identity, version="v").prefix.partition("_where-")[0]
    return prefix.replace("_ver-v_col-", f"_ver-{version}_col-", 1)
