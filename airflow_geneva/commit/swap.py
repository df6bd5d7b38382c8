"""Swap a view's new rows in and its old ones out, in one commit."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.checkpoint.snapshot import Snapshot, load_snapshot
from airflow_geneva.commit.shard import is_conflict, max_retries
from airflow_geneva.errors import CommitConflict
from airflow_geneva.faults import fault_point
from airflow_geneva.job.announcement import JOB_PROPERTY
from airflow_geneva.location import TableLocation
from airflow_geneva.plan.values import Work
from airflow_geneva.storage import is_engine_error
from airflow_geneva.view_definition import BASE_VERSION_KEY, IS_SET, SOURCE_ROW_ID

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.commit")

SOURCE_VERSION = "geneva.view.src_version"
SNAPSHOT = "geneva.view.snapshot"
PLAN = "geneva.view.plan"
SWAP_KEY = "geneva::view::swap"
"""Schema metadata that repeats job and snapshot of the newest swap, for when its transaction is cleaned away."""

_MOST_VERSIONS = 1_000


@dataclass(frozen=True)
class Swap:
    """A swap that a view's contents descend from.

    Args:
        job_id: who did it; "" when there was none.
        source_version: the source version it reflects.
        snapshot: key of the document about it.
        plan: fingerprint of the plan it carried out.
    """

    job_id: str = ""
    source_version: int = 0
    snapshot: str = ""
    plan: str = ""


def newest_swap(dataset: lance.LanceDataset) -> Swap:
    """The swap whose rows a version of a view shows; a restore is followed."""
    import lance

    version = int(dataset.version)
    for _ in range(_MOST_VERSIONS):
        if version < 1:
            return Swap()
        try:
            transaction = dataset.read_transaction(version)
        except BaseException as error:
            if not is_engine_error(error):
                raise
            return _noted(dataset)
        properties = (transaction.transaction_properties if transaction else None) or {}
        if SOURCE_VERSION in properties:
            return Swap(
                properties[JOB_PROPERTY], int(properties[SOURCE_VERSION]), properties[SNAPSHOT], properties[PLAN]
            )  # fmt: skip
        operation = None if transaction is None else transaction.operation
        version = int(operation.version) if isinstance(operation, lance.LanceOperation.Restore) else version - 1
    return _noted(dataset)


def _noted(dataset: lance.LanceDataset) -> Swap:
    metadata = dataset.schema.metadata or {}
    job_id, _, snapshot = metadata.get(SWAP_KEY.encode(), b"").decode().partition(" ")
    return Swap(job_id, int(metadata.get(BASE_VERSION_KEY.encode(), b"0")), snapshot) if job_id else Swap()


@dataclass(frozen=True)
class Note:
    """Says that a swap also reflects a later source version, in which nothing of the view changed.

    Args:
        swap: job id of the swap it is about; for any other it does not count.
        source_version: the source version.
        snapshot: key of the document about it.
    """

    swap: str
    source_version: int
    snapshot: str


_NOTE = "state/view/advanced.json"


def write_note(location: TableLocation, note: Note) -> None:
    """Advance a view beside its table; writes no version."""
    location.checkpoints.write_json(_NOTE, asdict(note))


def read_note(location: TableLocation) -> Note | None:
    """The note beside a view, if there is one."""
    try:
        return Note(**location.checkpoints.read_json(_NOTE))
    except (FileNotFoundError, ValueError, TypeError):
        return None


class ViewContents:
    """What a version of a view shows; read as far as it is asked for.

    Args:
        location: the view.
        dataset: one version of it.
    """

    def __init__(self, location: TableLocation, dataset: lance.LanceDataset) -> None:
        self.location = location
        self.dataset = dataset
        self.newest = newest_swap(dataset)

    @property
    def swap(self) -> str:
        return self.newest.job_id

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """What it reflects; None before the first refresh, and when the document is lost."""
        note = read_note(self.location)
        if note is not None and note.swap == self.newest.job_id:
            found = load_snapshot(self.location.checkpoints, note.snapshot)
            if found is not None:
                return found
        return load_snapshot(self.location.checkpoints, self.newest.snapshot) if self.newest.job_id else None

    @cached_property
    def shown(self) -> Ranges:
        """Source row ids of the rows that are set."""
        scanner = self.dataset.scanner(columns=[SOURCE_ROW_ID], filter=IS_SET)
        parts = [batch.column(0).to_numpy() for batch in scanner.to_batches() if batch.num_rows]
        return Ranges.from_offsets(np.concatenate(parts)) if parts else Ranges.empty()


def swap_rows(
    location: TableLocation,
    work: Work,
    plan: str,
    based_on: str,
    gone: Ranges,
    files: Sequence[tuple[str, int]],
    snapshot: str,
    check: Callable[[], str],
) -> tuple[int | None, str]:
    """Take rows out of a view and put new ones in.

    Args:
        plan: fingerprint of the plan, by which a swap that was done already is known.
        based_on: job id of the swap that was planned on.
        gone: source row ids whose rows go; placeholders go in any case.
        files: names and rows of the staged data files.
        snapshot: key of the document about what the view reflects afterwards.
        check: asked before every try why not, if not.

    Returns:
        The version written, or the one this job wrote before, or None; and why nothing was written.

    Raises:
        CommitConflict: others kept changing the view for longer than the retries allow.
    """
    import lance
    from lance.fragment import DataFile, FragmentMetadata

    attempts = max_retries()
    for attempt in range(attempts + 1):
        dataset = location.open()
        newest = newest_swap(dataset)
        if newest.plan == plan:
            return _version_of(dataset, plan), ""
        if newest.job_id != based_on:
            return None, "another refresh replaced the view's rows meanwhile"
        if why := check():
            return None, why
        removed, updated, anchor = _rows_out(dataset, gone)
        new = [FragmentMetadata(id=0, files=[DataFile.create(dataset, n)], physical_rows=rows) for n, rows in files]
        if not removed and not updated and not new:
            write_note(location, Note(based_on, work.version, snapshot))
            return None, ""
        transaction = lance.Transaction(
            read_version=dataset.version,
            operation=lance.LanceOperation.Update(
                removed_fragment_ids=removed,
                # Two swaps without a fragment in common would both be committed.
                updated_fragments=updated or anchor,
                new_fragments=new,
                fields_modified=[],
                update_mode="rewrite_rows",
            ),
            transaction_properties={
                JOB_PROPERTY: work.job_id,
                SOURCE_VERSION: str(work.version),
                SNAPSHOT: snapshot,
                PLAN: plan,
            },
        )
        fault_point("swap.before")
        try:
            done = lance.LanceDataset.commit(dataset.uri, transaction, storage_options=dataset._storage_options)
        except OSError as error:
            if not is_conflict(error):
                raise
            logger.info("Commit conflict at version %s, try %s of %s.", dataset.version, attempt + 1, attempts)
            time.sleep(min(0.05 * 2**attempt, 5.0) * random.uniform(0.5, 1.5))
            continue
        fault_point("swap.after")
        return int(done.version), ""
    raise CommitConflict(
        f"Others changed view {work.table_name!r} at every one of {attempts + 1} tries to swap its rows. Nothing is "
        "lost: run the task again when it is quieter, or raise GENEVA_VERSION_CONFLICT_MAX_RETRIES."
    )


def _version_of(dataset: lance.LanceDataset, plan: str) -> int:
    """The version that carried a plan out."""
    for version in range(int(dataset.version), 0, -1):
        transaction = dataset.read_transaction(version)
        if ((transaction.transaction_properties if transaction else None) or {}).get(PLAN) == plan:
            return version
    return int(dataset.version)


def _rows_out(dataset: lance.LanceDataset, gone: Ranges) -> tuple[list[int], list[Any], list[Any]]:
    """Fragments that go whole, those that lose rows, and the lowest of those that stay as they are."""
    removed: list[int] = []
    updated: list[Any] = []
    kept: list[Any] = []
    for fragment in sorted(dataset.get_fragments(), key=lambda fragment: fragment.fragment_id):
        table = fragment.to_table(columns=[SOURCE_ROW_ID, IS_SET])
        ids = table.column(SOURCE_ROW_ID).to_numpy()
        out = ~table.column(IS_SET).fill_null(False).to_numpy(zero_copy_only=False) | gone.mask(ids)
        if out.all():
            removed.append(fragment.fragment_id)
        elif out.any():
            listed = ",".join(map(str, np.unique(ids[out & gone.mask(ids)]).tolist()))
            condition = f"NOT coalesce({IS_SET}, false)" + (f" OR {SOURCE_ROW_ID} IN ({listed})" if listed else "")
            updated.append(fragment.delete(condition))
        else:
            kept.append(fragment.metadata)
    return removed, updated, kept[:1]


def mirror_swap(location: TableLocation) -> None:
    """Repeat in the schema metadata what the newest swap says, if it is not there already."""
    dataset = location.open()
    newest = newest_swap(dataset)
    wanted: dict[str, str | None] = {
        BASE_VERSION_KEY: str(newest.source_version),
        SWAP_KEY: f"{newest.job_id} {newest.snapshot}",
    }
    metadata = dataset.schema.metadata or {}
    if newest.job_id and any(metadata.get(key.encode(), b"").decode() != value for key, value in wanted.items()):
        try:
            dataset.update_schema_metadata(wanted)
        except BaseException as error:
            if not is_engine_error(error):
                raise
            logger.warning("The view's metadata could not be brought up to date: %s", error)
