"""Facts about data files that tables share: a clone names the files of the table from which it was made.

A manifest names the folder of such a file by a number of the clone's own, so a fragment has another signature there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.facts import SEEN, STALE, ColumnState, Fact, Facts, load_state
from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    FileRef,
    FragmentFiles,
    columns_in,
    columns_of,
    output_names,
)
from airflow_geneva.engine.lance_io.manifest import Manifest, read_manifest
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.plan.computed_rows import ComputedRows
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import base_folders, name_of
from airflow_geneva.engine.storage.uri import join, normalize_uri
from airflow_geneva.errors import GenevaError

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.plan")

OWN = -1
"""The number of a table's own folder."""
Renumber = Callable[[int], int]
"""Returns the number that another table has for the folder with a number of this one."""


def state_with_bases(
    dataset: lance.LanceDataset, checkpoints: Storage, columns: Columns, clones: tuple[str, ...] = ()
) -> ColumnState:
    """Read the facts about an output; of a clone that has none, those of the table from which it was made.

    Args:
        clones: the folders of the clones that were made from this table.
    """
    state = load_state(checkpoints, columns.output[0])
    if state.facts or state.defined or not (bases := base_folders(dataset)):
        return state
    # The oldest version of a clone is that of the other table: the facts are about it.
    oldest = min(version["version"] for version in dataset.version_refs())
    if (then := open_version_or_none(dataset, oldest)) is None:
        then = dataset
    tables, clones = [], (*clones, normalize_uri(dataset.uri))
    for number, base in bases.items():
        uri = normalize_uri(base.path)
        if base.is_dataset_root and uri not in clones:
            facts = _recorded_beside(uri, then, checkpoints, columns, clones)
            before = partial(_as_own, number)
            tables.append(renumbered(facts, then, columns.output, before, lambda folder: folder).table)
    found = Facts(pa.concat_tables(tables)) if tables else Facts()
    return ColumnState(found, seen=[oldest]) if found else ColumnState()


def _recorded_beside(
    uri: str, clone: lance.LanceDataset, checkpoints: Storage, columns: Columns, clones: tuple[str, ...]
) -> Facts:
    """Return all facts about an output of the table from which a clone was made, with those in its history.

    Args:
        clone: the oldest version of the clone, which is the version of the table.
    """
    beside = Storage(join(uri, "_checkpoints"), checkpoints.options)
    facts = Facts()
    try:
        state = load_state(beside, columns.output[0])
        facts = state.facts
        place = TableLocation(uri, name_of(clone), tuple(sorted((clone.initial_storage_options or {}).items())), True)
        base = place.open(int(clone.version))
        facts = facts.until(int(base.version))  # the table goes its own way since
        there, inputs = columns_in(base, columns.inputs_text, columns.output)
        state = state_with_bases(base, beside, there, clones)
        state = replace(state, facts=state.facts.until(int(base.version)))
        if state.facts:
            names = (*inputs, *output_names(base, columns.output))
            facts = facts_with_history(state, ComputedRows.of_column(base, there, names, state))
    except GenevaError as error:
        logger.warning("What is recorded beside %s cannot be read, or not all of it: %s", uri, error)
    return facts


def facts_with_history(state: ColumnState, computed: ComputedRows) -> Facts:
    """Return all facts about an output, and as facts what a plan would find in the history of the table."""
    version, inputs = int(computed.dataset.version), computed.columns.inputs_text
    found = [
        Fact(traced.files.signature, STALE, traced.stale, version, None, inputs)
        for traced in computed.trace()
        if traced.stale
    ]
    found += [fact for part in (computed, *computed.previous) for fact in part.learned if fact.kind != SEEN]
    return Facts(pa.concat_tables([state.facts.table, Facts.of(found).table]))


def computed_from_current_inputs(
    dataset: lance.LanceDataset, checkpoints: Storage, inputs: Sequence[str], column: str
) -> ComputedRows:
    """Find the rows of a column that were computed from the columns which have its inputs' names now."""
    columns = columns_of(dataset, inputs, (), column)
    state = state_with_bases(dataset, checkpoints, columns).about(columns.inputs_text)
    return ComputedRows(dataset, columns, (*inputs, *output_names(dataset, columns.output)), state)


def _as_own(base: int, folder: int) -> int:
    return OWN if folder == base else folder


def renumbered(
    facts: Facts, dataset: lance.LanceDataset, output: tuple[int, ...], before: Renumber, now: Renumber
) -> Facts:
    """Return the facts about the fragments of a version, with the signatures that these have in another table.

    Facts about evaluated filters are left out.

    Args:
        before, now: the numbers of folders in the table of the facts, and in the other one, by those of the version.
    """
    kept = [facts.table.slice(0, 0)]
    for inputs in facts.table["inputs"].unique().to_pylist():
        if not inputs:
            continue
        columns, _ = columns_in(dataset, inputs, output)
        signatures = renamed_signatures(read_manifest(dataset, columns), before, now)
        about = facts.table.filter(pc.equal(facts.table["inputs"], inputs))
        named = pa.array([signatures.get(one) for one in about["signature"].to_pylist()], pa.string())
        there = about.set_column(about.schema.get_field_index("signature"), "signature", named)
        kept.append(there.filter(pc.is_valid(named)))
    return Facts(pa.concat_tables(kept).combine_chunks())


def renamed_signatures(manifest: Manifest, before: Renumber, now: Renumber) -> dict[str, str]:
    """Return the signatures of fragments with the numbers `now`, by those with the numbers `before`."""
    return {_with(files, before).signature: _with(files, now).signature for files in manifest.values()}


def _with(files: FragmentFiles, renumber: Renumber) -> FragmentFiles:
    def refs(group: tuple[FileRef, ...]) -> tuple[FileRef, ...]:
        return tuple((position, renumber(folder), path) for position, folder, path in group)

    return replace(files, inputs=refs(files.inputs), output=refs(files.output))
