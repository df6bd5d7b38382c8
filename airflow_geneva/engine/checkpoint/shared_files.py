"""Facts about data files that tables share: a clone names the files of the table from which it was made.

A manifest names the folder of such a file by a number of the clone's own, so a fragment has another signature there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.facts import ColumnState, Facts, load_state
from airflow_geneva.engine.lance_io.fragments import FileRef, FragmentFiles, columns_in
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.places import base_folders
from airflow_geneva.engine.storage.uri import join, normalize_uri
from airflow_geneva.errors import StorageError

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.checkpoint")

OWN = -1
"""The number of a table's own folder."""
Renumber = Callable[[int], int]
"""Returns the number that another table has for the folder with a number of this one."""


def state_with_bases(dataset: lance.LanceDataset, checkpoints: Storage, output: tuple[int, ...]) -> ColumnState:
    """Read the facts about an output; of a clone that has none, those of the table from which it was made."""
    state = load_state(checkpoints, output[0])
    return _of_bases(dataset, checkpoints, output) if not state.facts and base_folders(dataset) else state


def _of_bases(dataset: lance.LanceDataset, checkpoints: Storage, output: tuple[int, ...]) -> ColumnState:
    """Return what the tables from which a table was cloned recorded about an output, as facts about the clone."""
    # The oldest version of a clone is that of the other table: the facts are about it.
    oldest = min(version["version"] for version in dataset.version_refs())
    then = open_version_or_none(dataset, oldest) or dataset
    tables = []
    for number, base in base_folders(dataset).items():
        if not base.is_dataset_root:
            continue
        place = Storage(join(normalize_uri(base.path), "_checkpoints"), checkpoints.options)
        try:
            facts = load_state(place, output[0]).facts
        except StorageError as error:
            logger.warning("What is recorded beside %s cannot be read: %s", base.path, error)
            continue
        tables.append(renumbered(facts, then, output, partial(_as_own, number), lambda folder: folder).table)
    found = Facts(pa.concat_tables(tables)) if tables else Facts()
    if not found:
        return ColumnState()
    return ColumnState(found, seen=[oldest])


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
        fragments = read_manifest(dataset, columns).values()
        signatures = {_with(files, before).signature: _with(files, now).signature for files in fragments}
        about = facts.table.filter(pc.equal(facts.table["inputs"], inputs))
        named = pa.array([signatures.get(one) for one in about["signature"].to_pylist()], pa.string())
        there = about.set_column(about.schema.get_field_index("signature"), "signature", named)
        kept.append(there.filter(pc.is_valid(named)))
    return Facts(pa.concat_tables(kept).combine_chunks())


def _with(files: FragmentFiles, renumber: Renumber) -> FragmentFiles:
    def refs(group: tuple[FileRef, ...]) -> tuple[FileRef, ...]:
        return tuple((position, renumber(folder), path) for position, folder, path in group)

    return replace(files, inputs=refs(files.inputs), output=refs(files.output))
