"""Find the refresh that wrote a view's rows, and whether other writers have changed them since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot, load_snapshot, remove_snapshot, snapshot_key
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.outbox import JOB_PROPERTY
from airflow_geneva.engine.lance_io.fragments import OFFSET_BITS, field_ids
from airflow_geneva.engine.lance_io.history import (
    Commit,
    commits_newest_first,
    commits_of_version,
    files_written,
    was_overtaken,
)
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.table_versions import (
    manifest_of,
    open_version_to_read,
    read_transaction,
)
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.storage.documents import well_typed
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.views.definition import BASE_VERSION_KEY, IS_SET, SOURCE_ROW_ID, ViewDefinition, own_columns
from airflow_geneva.engine.views.rows import RowIdArray
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

SOURCE_VERSION = "geneva.view.src_version"
SNAPSHOT = "geneva.view.snapshot"
PLAN = "geneva.view.plan"
LOOKED_AT = "geneva.view.looked_at"
"""Transaction property of a swap: the view version on which the refresh prepared it."""
SWAP_KEY = "geneva::view::swap"
"""Schema metadata that repeats job and snapshot of the newest swap, in case its transaction is cleaned up."""

_STATE = "state/view"
_NOTE, _INTENTS = f"{_STATE}/watermark.json", f"{_STATE}/intents"


@dataclass(frozen=True)
class Swap:
    """The swap that wrote a view's rows; its job is "" if there was no swap.

    Args:
        snapshot: key of the swap's snapshot. It is unique per swap, because a job that plans again may swap again.
        changed: describes changes of the rows by other writers since; "" for none. Otherwise the content is unknown.
        placeholders: whether the view may have rows that are not set.
        restores: versions since the swap that restored an earlier one, with that one, newest first.
    """

    job_id: str = ""
    source_version: int = 0
    snapshot: str = ""
    plan: str = ""
    changed: str = ""
    placeholders: bool = True
    restores: tuple[tuple[int, int], ...] = ()

    @property
    def identity(self) -> str:
        """Identify the current rows: equal as long as no refresh and no other writer changed them."""
        return f"{self.snapshot} {self.changed}" if self.changed else self.snapshot

    @property
    def metadata(self) -> dict[str, str]:
        """The entries about this swap for the schema metadata."""
        return {BASE_VERSION_KEY: str(self.source_version), SWAP_KEY: f"{self.job_id} {self.snapshot}"}

    def is_mirrored(self, dataset: lance.LanceDataset) -> bool:
        found = dataset.schema.metadata or {}
        return all(found.get(key.encode(), b"").decode() == value for key, value in self.metadata.items())


_UNKNOWN = Swap(changed="unknown")
_A_SWAP_AND_ITS_METADATA = 2
_FOUND: ProcessMemo[tuple[str, int, int], Swap] = ProcessMemo(64)
"""Newest swaps by URI, version and time of the version; cached, because the history of a version does not change."""


def newest_swap(location: TableLocation, dataset: lance.LanceDataset) -> Swap:
    """Find the swap whose rows a version of a view shows; follow restores. The result is cached for each version."""
    import lance

    key = (location.uri, int(dataset.version), written_at(dataset))
    if (known := _FOUND.get(key)) is not None:
        return known
    changed, placeholders, restores = "", False, list[tuple[int, int]]()
    following: Commit | None = None
    # Read back to the newest swap, however far: every commit since then may have changed rows.
    for commit in commits_of_version(dataset, at_once=_A_SWAP_AND_ITS_METADATA):
        swap = _swap_of(commit)
        if swap and not changed and was_overtaken(dataset, commit, following):
            continue
        following = commit
        # Lance rebases a commit on those that came after its preparation, and records that it had read them.
        since = int(commit.properties[LOOKED_AT]) + 1 if swap else 0
        if isinstance(commit.operation, lance.LanceOperation.Restore):
            restores.append((commit.version, int(commit.operation.version)))
        others = reversed([*commits_newest_first(dataset, commit.version - 1, since)]) if swap else [commit]
        for other in others:
            did = _changes(dataset, other)
            if did is None:
                return replace(_noted(location, dataset, changed), restores=tuple(restores))
            changed, placeholders = changed or did.strip("?"), placeholders or bool(did)
        if swap:
            found = _FOUND[key] = replace(swap, changed=changed, placeholders=placeholders, restores=tuple(restores))
            return found
    return Swap(changed=changed, restores=tuple(restores))


def taken_back(dataset: lance.LanceDataset, restores: Iterable[tuple[int, int]]) -> Iterator[str]:
    """Describe the expectations that restores removed from a view and that its definition still lacks."""
    now = ViewDefinition.read(dataset.schema.metadata).expectations_by_first_name
    for version, restored in restores:
        try:
            with engine_errors():
                before = manifest_of(dataset, version - 1).schema.metadata
            lost = [pair for pair in ViewDefinition.read(before).expectations_by_first_name if pair not in now]
        except (EngineError, InvalidInput):  # cleaned up, or another system's definition
            continue
        if lost:
            listed = ", ".join(f"{one} of column {column!r} ({one.level})" for column, one in lost)
            yield (
                f"a restore to version {restored} took back what view.expect had said: {listed}. Call "
                "view.expect(...) again to check them."
            )


def _swap_of(commit: Commit) -> Swap | None:
    """Read a commit as a swap; None for any other commit."""
    said = commit.properties
    if SOURCE_VERSION not in said:
        return None
    return Swap(said[JOB_PROPERTY], int(said[SOURCE_VERSION]), said[SNAPSHOT], said[PLAN])


def _changes(dataset: lance.LanceDataset, commit: Commit) -> str | None:
    """Describe a commit's changes of rows: "" for none, "?" for rows that may not be set; None if it was cleaned up."""
    import lance

    made, version, operation = lance.LanceOperation, commit.version, commit.operation
    if commit.gone:
        return None
    if version == 1:
        return ""
    if isinstance(operation, made.Append):
        set_rows = _appended_set_rows(dataset, version, operation)
        return None if set_rows is None else f"append at version {version}" if set_rows else "?"
    fields: set[int] = set()
    if isinstance(operation, made.DataReplacement):
        fields = {field for file in files_written(operation) for field in file.fields}
    elif isinstance(operation, made.Update):
        fields = set(operation.fields_modified)
    elif not isinstance(operation, (made.Delete, made.Overwrite)):
        return ""
    # Columns that users added to the view do not count.
    ours = set(own_columns(dataset.schema)).intersection(dataset.schema.names) if fields else ()
    if fields and not any(fields.intersection(field_ids(dataset, name)) for name in ours):
        return ""
    return f"{type(operation).__name__.lower()} at version {version}"


def _appended_set_rows(dataset: lance.LanceDataset, version: int, operation: Any) -> bool | None:
    """Whether an append added rows that are set; None if they can no longer be read."""
    paths = {file.path for file in files_written(operation)}
    try:
        with engine_errors():
            for fragment in open_version_to_read(dataset, version).get_fragments():
                if paths & {file.path for file in fragment.metadata.files} and fragment.count_rows(filter=IS_SET):
                    return True
    except (EngineError, InvalidInput):
        return None
    return False


def _noted(location: TableLocation, dataset: lance.LanceDataset, changed: str) -> Swap:
    """Read the swap from the schema metadata; its content is unknown if a later swap may have been committed."""
    metadata = dataset.schema.metadata or {}
    job_id, snapshot = _mirrored(dataset)
    if not job_id or read_intents(location) - {snapshot}:
        return _UNKNOWN
    return Swap(job_id, int(metadata.get(BASE_VERSION_KEY.encode(), b"0")), snapshot, changed=changed)


def _mirrored(dataset: lance.LanceDataset) -> tuple[str, str]:
    job_id, _, snapshot = (dataset.schema.metadata or {}).get(SWAP_KEY.encode(), b"").decode().partition(" ")
    return job_id, snapshot


def snapshot_of_version(dataset: lance.LanceDataset, version: int) -> str:
    """Return the snapshot that a version's transaction names; "" if it is not a swap."""
    transaction = read_transaction(dataset, version)
    return str(((transaction.transaction_properties if transaction else None) or {}).get(SNAPSHOT, ""))


def snapshot_in_metadata(dataset: lance.LanceDataset) -> str:
    """Return the snapshot that the schema metadata of a version names, or ""."""
    return _mirrored(dataset)[1]


def write_intent(location: TableLocation, snapshot: str) -> None:
    """Record, by its snapshot, a swap that the job is about to commit."""
    location.checkpoints.write_json(f"{_INTENTS}/{snapshot}.json", {})


def read_intents(location: TableLocation) -> set[str]:
    """Return the snapshots of swaps that jobs began: the newest swap, and others whose outcome is not recorded."""
    return {name.removesuffix(".json") for name in location.checkpoints.list_folder(_INTENTS)[1]}


def list_state(location: TableLocation) -> tuple[set[str], int]:
    """Return the result of `read_intents` and the number of unpacked snapshots, from one listing."""
    names = location.checkpoints.list_files(_STATE)
    intents = {name.rpartition("/")[2].removesuffix(".json") for name in names if name.startswith(f"{_INTENTS}/")}
    return intents, sum(snapshot_key(name) is not None for name in names)


def drop_intents(location: TableLocation, snapshots: Iterable[str]) -> None:
    """Delete the records of swaps that another swap followed, or that can no longer be committed."""
    location.checkpoints.delete_all(f"{_INTENTS}/{snapshot}.json" for snapshot in snapshots)


@dataclass(frozen=True)
class AdvanceNote:
    """States that the swap with a snapshot also reflects a later source version, which changed no row of the view."""

    swap: str
    source_version: int
    snapshot: str


def write_advance_note(location: TableLocation, note: AdvanceNote) -> None:
    """Record a later source version without writing a table version; remove the previous note's snapshot if unnamed."""
    before = read_advance_note(location)
    location.checkpoints.write_json(_NOTE, asdict(note))
    fault_point("advance.written")
    # A reader that has the old note but not yet its snapshot reads the note again, see `CommittedViewState.snapshot`.
    if before is not None and before.snapshot not in {note.snapshot, note.swap, *read_intents(location)}:
        remove_snapshot(location.checkpoints, before.snapshot)


def read_advance_note(location: TableLocation) -> AdvanceNote | None:
    """Read the note beside a view, if there is one."""
    try:
        return well_typed(AdvanceNote(**(location.checkpoints.read_document(_NOTE) or {})))
    except TypeError:
        return None


class CommittedViewState:
    """The content of a version of a view; parts are read on demand."""

    def __init__(self, location: TableLocation, dataset: lance.LanceDataset) -> None:
        self.location = location
        self.dataset = dataset
        self.newest: Swap
        self._note: AdvanceNote | None
        look = partial(newest_swap, location, dataset), partial(read_advance_note, location)
        self.newest, self._note = location.checkpoints.side_by_side(*look)

    @property
    def source_version(self) -> int | None:
        """The source version that the view reflects; None as for `snapshot`."""
        if self.newest.changed:
            return None
        # A refresh that found no rows has made no swap.
        if self._note is not None and self._note.swap == self.newest.snapshot:
            return self._note.source_version
        return self.newest.source_version if self.newest.job_id else None

    @property
    def settled(self) -> bool:
        """Whether a refresh without new, changed or vanished rows would leave the view as it is."""
        return not self.newest.placeholders and self.newest.is_mirrored(self.dataset)

    @property
    def taken_back(self) -> list[str]:
        """Expectations that restores since the newest swap removed from the view."""
        return list(taken_back(self.dataset, self.newest.restores))

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The source as the view reflects it.

        None before the first refresh, if the document is lost, and if other writers changed the rows.
        """
        definition = ViewDefinition.read(self.dataset.schema.metadata, self.location.name)
        if self.newest.changed or (found := self._stored_snapshot({*definition.keys.values()})) is None:
            return None
        return found.renamed({key: name for name, key in definition.keys.items()})

    def _stored_snapshot(self, keys: set[str]) -> Snapshot | None:
        note = self._note
        while note is not None and note.swap == self.newest.snapshot:
            found = load_snapshot(self.location.checkpoints, note.snapshot)
            if found is not None:
                if keys.isdisjoint(found.dropped):
                    return found
                break  # a restore brought the columns back, or the commit that drops them never came
            missed, note = note, read_advance_note(self.location)
            if note == missed:
                break
        return load_snapshot(self.location.checkpoints, self.newest.snapshot) if self.newest.job_id else None

    @cached_property
    def shown(self) -> Ranges:
        """Source row ids of the rows that are set."""
        return Ranges.union(self._shown_by_fragment.values())

    def fragments_with(self, ids: Ranges) -> tuple[int, ...]:
        """Return the fragments of the view that hold rows of the given source rows."""
        first, last = int(ids.starts[0]), int(ids.ends[-1])
        return tuple(at for at, held in sorted(self._shown_by_fragment.items()) if held.within(first, last) & ids)

    @cached_property
    def _shown_by_fragment(self) -> dict[int, Ranges]:
        scanner = self.dataset.scanner(columns=[SOURCE_ROW_ID], filter=IS_SET, with_row_address=True)
        parts: dict[int, list[RowIdArray]] = {}
        for batch in scanner.to_batches():
            ids, places = batch.column(SOURCE_ROW_ID), batch.column("_rowaddr").to_numpy() >> OFFSET_BITS.bit_length()
            for at in np.unique(places).tolist():
                found = ids if places[0] == places[-1] else ids.filter(pa.array(places == at))
                parts.setdefault(int(at), []).append(found.drop_null().to_numpy())
        return {at: Ranges.from_offsets(np.concatenate(found)) for at, found in parts.items()}
