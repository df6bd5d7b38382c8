"""Recognize computed rows that an update moved, by comparing their values with an earlier version of the table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.checkpoint.facts import ColumnState
from airflow_geneva.engine.checkpoint.provenance import Provenance
from airflow_geneva.engine.lance_io.arrays import column_at, rows_at, single_batch
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.fragments import (
    OFFSET_BITS,
    Columns,
    FragmentFiles,
    TableFields,
    columns_of,
    field_ids_present,
    output_names,
    row_ids,
)
from airflow_geneva.engine.lance_io.manifest import Manifest, read_manifest
from airflow_geneva.engine.lance_io.pylance_internals import take_rows
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.rows_by_id import rows_in_batches
from airflow_geneva.engine.lance_io.siblings import is_group

if TYPE_CHECKING:
    import lance

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ReferenceVersion:
    """A version, and its names of the columns to compare: the inputs and, last, the output's columns."""

    dataset: lance.LanceDataset
    columns: Columns
    names: tuple[str, ...]

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.dataset, self.columns)

    @staticmethod
    def at(dataset: lance.LanceDataset, columns: Columns) -> ReferenceVersion | None:
        """Prepare a version for comparison.

        Returns:
            None if the version lacks one of the columns, a column holds blobs, or an input had other nested fields, so
            that facts are about other values.
        """
        known = TableFields(dataset)
        wanted = [fields[0] for fields in columns.inputs]
        fields = {field for field in columns.output if not is_group(field)}
        if any(field not in known.paths for field in wanted) or not fields <= field_ids_present(dataset):
            return None
        inputs, outputs = tuple(known.paths[field] for field in wanted), output_names(dataset, columns.output, known)
        if any(is_blob(dataset.schema.field(name.partition(".")[0])) for name in (*inputs, *outputs)):
            return None
        if any(columns.names) and columns_of(dataset, inputs, (), None).inputs_text != columns.inputs_text:
            return None
        return ReferenceVersion(dataset, columns, (*inputs, *outputs))

    def in_fragments_of(self, manifest: Mapping[int, FragmentFiles], addresses: Offsets) -> Mask:
        """Return a mask of the rows in fragments that another version also has, with the same inputs and output."""
        kept = [
            fragment_id
            for fragment_id in np.unique(addresses >> 32).tolist()
            if fragment_id in manifest and manifest[fragment_id].signature == self.manifest[fragment_id].signature
        ]
        return np.isin(addresses >> 32, kept)


@dataclass(frozen=True)
class RowsThen:
    """The rows of a fragment, by their offsets, as an earlier version of the table has them.

    Args:
        computed: rows whose inputs and output are the same, by the provenance that they had.
        changed: rows that had a value of a job, and whose inputs or output differ now, or did then.
        existed: all rows that existed then.
        in_place: rows whose fragment at that version is still there.
    """

    computed: dict[Provenance, Ranges]
    changed: Ranges
    existed: Ranges
    in_place: Ranges


def computed_by_value(
    reference: ReferenceVersion,
    state: ColumnState,
    dataset: lance.LanceDataset,
    files: FragmentFiles,
    names: tuple[str, ...],
    unknown: Ranges,
    manifest: Mapping[int, FragmentFiles],
    of_a_job: Collection[int] = (),
) -> RowsThen:
    """Find rows of a fragment that were computed at the reference version and whose inputs and output are unchanged.

    The result is right for any history between the two versions, because only values are compared.

    Args:
        unknown: the rows to look for.
        manifest: that of the planned version.
        of_a_job: fragments of the reference version whose values are a job's, whatever facts say.
    """
    found: dict[Provenance, list[Offsets]] = {}
    there, changed = list[Offsets](), list[Offsets]()
    offsets, ids = row_ids(dataset, files.id, created_by=reference.dataset.version)
    wanted = unknown.mask(offsets)
    for rows in compare_rows(reference, dataset, ids[wanted], names):
        compared = rows.now & OFFSET_BITS
        there.append(compared[reference.in_fragments_of(manifest, rows.then)])
        for provenance, part in _by_provenance(reference, state, rows.then[rows.same], compared[rows.same]).items():
            found.setdefault(provenance, []).append(part)
        before = _by_provenance(reference, state, rows.then[~rows.same], compared[~rows.same])
        changed += [part for provenance, part in before.items() if not provenance.failures]
        changed.append(compared[_stale(reference, state, rows.then, of_a_job)])
    return RowsThen(
        {provenance: Ranges.from_offsets(np.concatenate(parts)) for provenance, parts in found.items()},
        Ranges.union(map(Ranges.from_offsets, changed)),
        Ranges.from_offsets(offsets[wanted]),
        Ranges.union(map(Ranges.from_offsets, there)),
    )


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """Rows in both of two table versions: their ids, their row addresses, and whether their values are the same."""

    ids: RowIds
    now: Offsets
    then: Offsets
    same: Mask


def compare_rows(
    reference: ReferenceVersion, dataset: lance.LanceDataset, ids: RowIds, names: tuple[str, ...]
) -> Iterator[ComparedRows]:
    """Compare rows by id with an earlier version, in batches bounded by bytes; skip rows that one version lacks."""
    for rows in rows_in_batches(dataset, ids, [*names, "_rowaddr"]):
        yield _compare(reference, rows, names)


def _compare(reference: ReferenceVersion, now: pa.RecordBatch, names: tuple[str, ...]) -> ComparedRows:
    ids = now.column("_rowid")
    columns = [*dict.fromkeys(reference.names), "_rowid", "_rowaddr"]
    # Lance silently leaves out ids that the version does not have, so align the rows by the returned ids.
    then = single_batch(take_rows(reference.dataset, ids.to_pylist(), columns))
    order = np.argsort(then.column("_rowid").to_numpy())
    then_ids = then.column("_rowid").to_numpy()[order]
    if len(then_ids) == 0:
        none = np.empty(0, np.int64)
        return ComparedRows(none.astype(np.uint64), none, none, np.empty(0, np.bool_))
    at = np.minimum(np.searchsorted(then_ids, ids.to_numpy()), len(then_ids) - 1)
    alive = then_ids[at] == ids.to_numpy()
    mine, theirs = np.flatnonzero(alive), order[at[alive]]
    alike = np.ones(len(mine), np.bool_)
    for old_name, name in zip(reference.names, names, strict=True):
        old, new = (
            rows_at(column_at(batch, path), pa.array(rows))
            for batch, path, rows in ((then, old_name, theirs), (now, name, mine))
        )
        alike &= same_values(old, new)
    here, there = (rows.column("_rowaddr").to_numpy().astype(np.int64) for rows in (now, then))
    return ComparedRows(ids.to_numpy()[mine], here[mine], there[theirs], alike)


def _by_provenance(
    reference: ReferenceVersion, state: ColumnState, addresses: Any, offsets: Offsets
) -> dict[Provenance, Offsets]:  # fmt: skip
    found: dict[Provenance, list[Offsets]] = {}
    for fragment_id in np.unique(addresses >> 32):
        files = reference.manifest[int(fragment_id)]
        inside = addresses >> 32 == fragment_id
        for provenance, rows in state.known(files.signature, files.physical_rows).items():
            hit = inside.copy()
            hit[inside] = rows.mask(addresses[inside] & OFFSET_BITS)
            if hit.any():
                found.setdefault(provenance, []).append(offsets[hit])
    return {provenance: np.concatenate(parts) for provenance, parts in found.items()}


def _stale(
    reference: ReferenceVersion, state: ColumnState, addresses: Offsets, of_a_job: Collection[int]
) -> Mask:  # fmt: skip
    """Return a mask of the rows that held a value of a job already then although their inputs had changed."""
    found = np.zeros(len(addresses), np.bool_)
    for fragment_id in np.unique(addresses >> 32).tolist():
        files = reference.manifest[fragment_id]
        if fragment_id in of_a_job:
            found |= addresses >> 32 == fragment_id
        elif rows := state.stale(files.signature, files.physical_rows):
            inside = addresses >> 32 == fragment_id
            found[inside] = rows.mask(addresses[inside] & OFFSET_BITS)
    return found


def same_values(left: pa.Array, right: pa.Array) -> Mask:
    """Whether a UDF would get the same value of each row: NULL equals NULL, NaN equals NaN, 0.0 is not -0.0."""
    try:
        return _same(left, right)
    except pa.ArrowNotImplementedError:
        # Arrow cannot compare this type. The rows count as changed: they are computed again, and results stay correct.
        return np.zeros(len(left), np.bool_)


def _same(left: pa.Array, right: pa.Array) -> Mask:
    left, right = _plain(left), _plain(right)
    if left.type != right.type:
        return np.zeros(len(left), np.bool_)
    present = _present(left)
    alike: Mask = present == _present(right)
    both = np.flatnonzero(alike & present)
    if len(both):
        chosen = pa.array(both)
        alike[both] = _same_present(rows_at(left, chosen), rows_at(right, chosen))
    return alike


def _plain(array: pa.Array) -> pa.Array:
    """Decode extension types and dictionaries, so that equal values have equal arrays."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if pt.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    return array


def _present(array: pa.Array) -> Mask:
    present: Mask = np.array(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    return present


def _same_present(left: pa.Array, right: pa.Array) -> Mask:
    """Compare arrays without NULLs on their top level."""
    kind = left.type
    if pt.is_struct(kind):
        parts = zip(left.flatten(), right.flatten(), strict=True)
        alike: Mask = np.ones(len(left), np.bool_)
        for one, other in parts:
            alike &= _same(one, other)
        return alike
    if pt.is_map(kind):
        return _same_lists(_entries(left), _entries(right))
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return _same_lists(left, right)
    if pt.is_floating(kind):
        ours, theirs = left.to_numpy(), right.to_numpy()
        bits = f"u{ours.itemsize}"
        same: Mask = (ours.view(bits) == theirs.view(bits)) | (np.isnan(ours) & np.isnan(theirs))
        return same
    equal: Mask = pc.equal(left, right).to_numpy(zero_copy_only=False)
    return equal


def _entries(maps: pa.MapArray) -> pa.ListArray:
    # A cast would fail on NULL values whose nested fields are not nullable.
    pairs = pa.StructArray.from_arrays([maps.keys, maps.items], ["key", "value"])
    return pa.ListArray.from_arrays(maps.offsets, pairs)


def _same_lists(left: pa.Array, right: pa.Array) -> Mask:
    lengths = pc.list_value_length(left).to_numpy(zero_copy_only=False).astype(np.int64)
    alike: Mask = lengths == pc.list_value_length(right).to_numpy(zero_copy_only=False)
    filled = np.flatnonzero(alike & (lengths > 0))
    if len(filled):
        chosen = pa.array(filled)
        items = _same(pc.list_flatten(rows_at(left, chosen)), pc.list_flatten(rows_at(right, chosen)))
        starts = np.concatenate(([0], np.cumsum(lengths[filled])[:-1]))
        alike[filled] = np.logical_and.reduceat(items, starts)
    return alike
