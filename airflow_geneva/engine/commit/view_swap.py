"""Replace a view's old rows with new ones in one commit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.checkpoint.view_snapshot import Snapshot, new_snapshot_key, save_snapshot
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.outbox import JOB_PROPERTY, ROWS_PROPERTY
from airflow_geneva.engine.lance_io.conflicts import commit_tries, is_undecided
from airflow_geneva.engine.lance_io.data_file import DataFileWriter
from airflow_geneva.engine.lance_io.fragments import (
    field_ids,
    offsets_of,
    open_fragment,
    stored_row_ids,
    with_data_file,
)
from airflow_geneva.engine.lance_io.history import commits_newest_first, was_overtaken
from airflow_geneva.engine.lance_io.indexes import Index
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges
from airflow_geneva.engine.lance_io.staged_files import StagedFiles
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.plan.model import RefreshSpec
from airflow_geneva.engine.plan.renumbered_rows import RenumberedRows
from airflow_geneva.engine.plan.swap_plan import ALL_ROW_IDS, SwapPlan
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import check_manifest
from airflow_geneva.engine.views.definition import IS_SET, SOURCE_ROW_ID, view_columns
from airflow_geneva.engine.views.rows import PLACEHOLDER_FIELDS, RowIdArray
from airflow_geneva.engine.views.state import (
    LOOKED_AT,
    PLAN,
    SNAPSHOT,
    SOURCE_VERSION,
    AdvanceNote,
    Swap,
    drop_intents,
    list_state,
    newest_swap,
    snapshot_in_metadata,
    write_advance_note,
    write_intent,
)

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.commit")

_MOST_VERSIONS = 1_000
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class NewRows:
    """The rows of a staged file; the first ones get these row ids, which the rows have that they replace."""

    file: str
    rows: int
    row_ids: RowIdArray = field(default_factory=lambda: _NO_ROWS)


def swap_rows(
    location: TableLocation,
    spec: RefreshSpec,
    plan: str,
    swap: SwapPlan,
    files: Sequence[NewRows],
    data: StagedFiles,
    snapshot: Callable[[], Snapshot],
    opened: lance.LanceDataset | None = None,
) -> Swapped:
    """Remove rows and all placeholders from a view, renumber some, and add the rows of the staged files.

    If no row stays, the new rows replace the view's version as a whole, and the commit conflicts with every other one.
    An update costs Lance 0.3 us for each new row; it is made where rows stay, or indexes, which a replacement drops.

    Call `mirror_swap` afterwards.

    Args:
        opened: the newest version, if it was just opened.
        snapshot: checks the new rows and returns the snapshot of the view after the swap; called only if needed.

    Raises:
        CommitConflict: other writers changed the view at every retry.
        TableRemade: the view was dropped and created again; a commit to the new table is undone.
    """
    key, content, saved = "", None, False
    for _ in commit_tries(f"view {spec.table_name!r}", "swap its rows"):
        dataset, opened = location.open() if opened is None else opened, None
        whole = bool(files) and not Index.read(dataset)  # with all of its rows, a view would lose its indexes
        if files and not whole:
            dataset = _with_a_fragment(dataset, location, spec.written)
        spec.written.check(dataset)
        newest = newest_swap(location, dataset)
        if newest.identity != swap.based_on:
            done = version_of_plan(dataset, plan)
            if done:
                return Swapped(done)
            # If the newest swap is unknown, it may be this one, which the store answered with a conflict.
            drop_intents(location, [key] if key and newest.snapshot else ())
            others = f"other writers changed the view's rows meanwhile ({newest.changed})" if newest.changed else ""
            return Swapped(why=others or "another refresh replaced the view's rows meanwhile")
        if promoted := promoted_meanwhile(dataset, spec):
            return Swapped(why=promoted)
        removed, updated, anchor = _rows_to_remove(dataset, swap.gone, newest.placeholders)
        updated = _renumber_rows(dataset, swap.renumbered, updated)
        anchor = [one for one in anchor if one.id not in {other.id for other in updated}]
        empty = not removed and not updated and not files
        if empty and not swap.advances:
            return Swapped()
        if content is None:
            key, content = new_snapshot_key(spec.job_id), snapshot()
        if empty:
            save_snapshot(location.checkpoints, key, content)
            write_advance_note(location, AdvanceNote(swap.based_on, spec.version, key))
            return Swapped()

        whole = whole and len(removed) == len(dataset.get_fragments())
        transaction = partial(_swap_of_rows, dataset, spec, plan, key, removed, updated + anchor, files, data, whole)
        begun, loose = set[str](), list[int]()
        first = partial(_announce, location, key, None if saved else content, begun, loose)
        swapped = _commit(location, spec, plan, transaction, first, whole)
        if swapped is None:
            saved = saved or bool(loose)
            continue
        # Two swaps conflict: a swap that began earlier was committed earlier or can no longer be committed.
        result = Swapped(int(swapped.version), dropped=frozenset(begun), snapshots=loose[-1] + 1)
        if swapped.version > dataset.version + 1:
            return result
        return replace(result, view=swapped, newest=Swap(spec.job_id, spec.version, key, plan, placeholders=False))
    raise AssertionError("commit_tries raises after its last try")


def _commit(
    location: TableLocation,
    spec: RefreshSpec,
    plan: str,
    transaction: Callable[[], lance.Transaction],
    first: Callable[[], object],
    whole: bool,
) -> lance.LanceDataset | None:
    """Commit a swap; return None if the caller has to look whether it landed, or if it came too late."""
    newer = list[Any]()

    def look(committed: lance.LanceDataset) -> None:
        newest = location.open() if whole else committed
        newer.extend([newest] if newest.version > committed.version else [])

    try:
        swapped = spec.written.commit_transaction(
            location.options,
            transaction,
            before="swap.before",
            after="swap.after",
            first=first,
            then=look,
            at_once=whole,
        )
    except OSError as error:
        if not is_undecided(error):
            raise
        return None
    if newer and version_of_plan(newer[0], plan) is None:
        return None
    return swapped


def promoted_meanwhile(dataset: lance.LanceDataset, spec: RefreshSpec) -> str:
    """Return why staged files, which name their columns, do not fit a version of the view; "" if they do."""
    planned = [(column.name, column.key) for column in spec.definition.columns]
    now = [(column.name, column.key) for column in view_columns(dataset.schema)]
    return "" if now == planned else "the columns of the view changed meanwhile"


def _swap_of_rows(
    dataset: lance.LanceDataset,
    spec: RefreshSpec,
    plan: str,
    snapshot: str,
    removed: list[int],
    updated: list[Any],
    files: Sequence[NewRows],
    data: StagedFiles,
    whole: bool,
) -> lance.Transaction:
    import lance
    from lance.fragment import FragmentMetadata

    described = zip(data.data_files(dataset, [new.file for new in files]), files, strict=True)
    added = [
        FragmentMetadata(0, [file], physical_rows=new.rows, row_id_meta=stored_row_ids(new.row_ids))
        for file, new in described
    ]
    replaced = lance.LanceOperation.Overwrite(dataset.lance_schema, added) if whole else None
    return lance.Transaction(
        read_version=dataset.version,
        operation=replaced or replace_rows(dataset, removed, updated, added),
        transaction_properties={
            JOB_PROPERTY: spec.job_id,
            ROWS_PROPERTY: str(sum(new.rows for new in files)),
            SOURCE_VERSION: str(spec.version),
            SNAPSHOT: snapshot,
            PLAN: plan,
            LOOKED_AT: str(dataset.version),
        },
    )


def _announce(location: TableLocation, key: str, snapshot: Snapshot | None, begun: set[str], loose: list[int]) -> None:
    """Write the snapshot of a swap, unless it is None, and the intent to swap.

    Collect the intents of other swaps, and the number of snapshots that are not packed.
    """
    save = [] if snapshot is None else [partial(save_snapshot, location.checkpoints, key, snapshot)]
    parts = partial(list_state, location), partial(write_intent, location, key)
    intents, snapshots = location.checkpoints.side_by_side(*save, *parts)[-2]
    begun.update(intents - {key})
    loose.append(snapshots)


@dataclass(frozen=True)
class Swapped:
    """The result of a swap.

    Args:
        version: the version that this call or an earlier attempt of the same plan wrote; None if there is none.
        why: the reason if nothing was written although the plan has changes.
        view, newest: that version and its newest swap, if no other writer committed meanwhile.
        dropped: the intents of earlier swaps, which are no longer needed.
        snapshots: the number of snapshots that are not packed; None: unknown.
    """

    version: int | None = None
    why: str = ""
    view: lance.LanceDataset | None = None
    newest: Swap | None = None
    dropped: frozenset[str] = frozenset()
    snapshots: int | None = None


def version_of_plan(dataset: lance.LanceDataset, plan: str) -> int | None:
    """Find the version whose swap completed a plan, among the newest thousand readable versions.

    An older swap is not found: the job then reports its rows as left, and the next plan corrects that.
    """
    newest, following = int(dataset.version), None
    for commit in commits_newest_first(dataset, newest, max(newest - _MOST_VERSIONS, 0) + 1):
        if commit.gone:
            return None
        if commit.properties.get(PLAN) == plan:
            return None if was_overtaken(dataset, commit, following) else commit.version
        following = commit
    return None


def _with_a_fragment(dataset: lance.LanceDataset, location: TableLocation, planned: PlannedTable) -> lance.LanceDataset:
    """Append a placeholder if a view is empty, so that two concurrent swaps share a fragment and conflict."""
    import lance
    from lance.fragment import DataFile, FragmentMetadata

    if not dataset.get_fragments():
        # Write the data file directly: an append of rows would need values for non-nullable columns that users added.
        writer = DataFileWriter(dataset, PLACEHOLDER_FIELDS)
        writer.write(pa.record_batch([pa.array([-1]), pa.array([False])], schema=PLACEHOLDER_FIELDS))
        fragment = FragmentMetadata(id=0, files=[DataFile.create(dataset, writer.finish())], physical_rows=1)
        transaction = lance.Transaction(dataset.version, lance.LanceOperation.Append([fragment]))
        dataset = planned.commit_transaction(
            location.options, lambda: transaction, before="ground.write", after="swap.ground"
        )
    return dataset


def _rows_to_remove(
    dataset: lance.LanceDataset, gone: Ranges, placeholders: bool
) -> tuple[list[int], list[Any], list[Any]]:
    """Return what `without_rows` does, without the rows of source rows and without placeholders."""
    if gone == ALL_ROW_IDS:
        return sorted(fragment.fragment_id for fragment in dataset.get_fragments()), [], []
    out, unset = _rows_by_fragment(dataset, gone, placeholders) if gone or placeholders else ({}, Counter[int]())
    return without_rows(dataset, {at: np.concatenate(parts) for at, parts in out.items()}, unset)


def replace_rows(
    dataset: lance.LanceDataset, removed: list[int], updated: list[Any], added: list[Any]
) -> lance.LanceOperation.Update:
    """Return the operation that removes and adds rows; `removed` and `updated` are from `without_rows`."""
    import lance

    return lance.LanceOperation.Update(
        removed_fragment_ids=removed,
        updated_fragments=updated,
        new_fragments=added,
        fields_modified=[],
        # Otherwise Lance treats them as moved rows and as covered by indexes, and searches do not find them.
        fields_for_preserving_frag_bitmap=[n for name in dataset.schema.names for n in field_ids(dataset, name)],
        update_mode="rewrite_rows",
    )


def without_rows(
    dataset: lance.LanceDataset, out: Mapping[int, Offsets], unset: Counter[int]
) -> tuple[list[int], list[Any], list[Any]]:
    """Return the fragments to remove, those that lose rows, and the lowest fragment if it stays unchanged.

    Lance commits two changes that share no fragment, so every change includes the lowest fragment.

    Args:
        out: the addresses of rows, by fragment.
        unset: the number of other rows that are not set, by fragment; all of them are removed.
    """
    fragments = {fragment.fragment_id: fragment for fragment in dataset.get_fragments()}
    removed: list[int] = []
    updated: list[Any] = []
    for at in sorted({*out, *unset}):
        addresses = out.get(at, _NO_ROWS)
        if len(addresses) + unset[at] == fragments[at].count_rows():
            removed.append(at)
            continue
        listed = ",".join(map(str, addresses.tolist()))
        conditions = [f"_rowaddr IN ({listed})"] if listed else []
        conditions += [f"NOT coalesce({IS_SET}, false)"] if unset[at] else []
        updated.append(fragments[at].delete(" OR ".join(conditions)))
    lowest = min(fragments, default=-1)
    stays = lowest in fragments and lowest not in out and not unset[lowest]
    return removed, updated, [fragments[lowest].metadata] if stays else []


def _renumber_rows(dataset: lance.LanceDataset, renumbered: RenumberedRows, updated: list[Any]) -> list[Any]:
    """Write new source row ids for unchanged rows, one file per fragment, which replaces the earlier ids.

    The rows keep their place and their own row ids. Return the fragments to update; some of them may lose other rows.
    """
    from lance.fragment import DataFile

    found, known = set[int](), Ranges.from_offsets(renumbered.old)
    for batch in dataset.scanner(columns=[SOURCE_ROW_ID], with_row_address=True).to_batches() if renumbered else ():
        stays = known.mask(batch.column(SOURCE_ROW_ID).fill_null(-1).to_numpy())
        found.update(np.unique(batch.column("_rowaddr").to_numpy()[stays] >> 32).tolist())
    changed = {fragment.id: fragment for fragment in updated}
    for at in sorted(found):
        fragment = open_fragment(dataset, at)
        rows = fragment.scanner(columns=[SOURCE_ROW_ID], with_row_address=True).to_table()
        ids = np.full(fragment.physical_rows, -1)
        ids[offsets_of(rows)] = renumbered.follow(rows.column(SOURCE_ROW_ID).to_numpy())
        writer = DataFileWriter(dataset, pa.schema([PLACEHOLDER_FIELDS.field(SOURCE_ROW_ID)]))
        writer.write(pa.record_batch([pa.array(ids)], schema=writer.schema))
        file = DataFile.create(dataset, writer.finish())
        changed[at] = with_data_file(changed.get(at, fragment.metadata), file)
    return list(changed.values())


def _rows_by_fragment(
    dataset: lance.LanceDataset, gone: Ranges, placeholders: bool
) -> tuple[dict[int, list[Offsets]], Counter[int]]:
    """Return, by fragment, the addresses of the rows to remove, and the number of other rows that are not set."""
    out: dict[int, list[Offsets]] = {}
    unset: Counter[int] = Counter()
    columns = [SOURCE_ROW_ID, IS_SET] if placeholders else [SOURCE_ROW_ID]
    # One scan over all fragments is much faster than one scan per small fragment.
    for batch in dataset.scanner(columns=columns, with_row_address=True).to_batches():
        ids = batch.column(SOURCE_ROW_ID).fill_null(-1).to_numpy()
        addresses = batch.column("_rowaddr").to_numpy().astype(np.int64)
        places = addresses >> 32
        going = gone.mask(ids)
        for at in np.unique(places[going]).tolist():
            out.setdefault(at, []).append(addresses[going & (places == at)])
        if placeholders:
            others = ~batch.column(IS_SET).fill_null(False).to_numpy(zero_copy_only=False) & ~going
            for at, count in zip(*np.unique(places[others], return_counts=True), strict=True):
                unset[int(at)] += int(count)
    return out, unset


def mirror_swap(location: TableLocation, swapped: Swapped) -> lance.LanceDataset:
    """Copy the newest swap's transaction properties to the schema metadata, unless it already has them.

    Drop the intents of earlier swaps, and return the newest version of the view.
    """
    both = partial(_mirror_swap, location, swapped), partial(drop_intents, location, swapped.dropped)
    found: lance.LanceDataset = location.checkpoints.side_by_side(*both)[0]
    return found


def _mirror_swap(location: TableLocation, swapped: Swapped) -> lance.LanceDataset:
    import lance

    dataset = location.open() if swapped.view is None else swapped.view
    newest = swapped.newest or newest_swap(location, dataset)
    if newest.job_id and not newest.is_mirrored(dataset):
        fault_point("mirror.write")
        before = snapshot_in_metadata(dataset)
        try:
            update = lance.LanceOperation.UpdateConfig(
                schema_metadata_updates=lance.LanceOperation.UpdateMap({**newest.metadata}, False)
            )
            transaction = lance.Transaction(dataset.version, update)
            with engine_errors():
                dataset = check_manifest(lance.LanceDataset.commit(location.open(), transaction, **location.access))
        except EngineError as error:
            logger.warning("The view's metadata could not be brought up to date: %s", error)
        else:
            fault_point("mirror.written")
            # A job that died right after the newest swap left the record of the swap before it.
            drop_intents(location, {before} - {"", newest.snapshot, *swapped.dropped})
    return dataset
