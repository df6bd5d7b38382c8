"""Compare two Arrow arrays of any type row by row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Mask = npt.NDArray[np.bool_]


def same_values(left: pa.Array, right: pa.Array) -> Mask:
    """Return for every row whether a UDF would get the same value: NULL equals NULL, NaN equals NaN, 0.0 is not -0.0.

    Args:
        left, right: arrays of one type and length.
    """
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
        alike[both] = _same_present(left.take(chosen), right.take(chosen))
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
        items = _same(pc.list_flatten(left.take(chosen)), pc.list_flatten(right.take(chosen)))
        starts = np.concatenate(([0], np.cumsum(lengths[filled])[:-1]))
        alike[filled] = np.logical_and.reduceat(items, starts)
    return alike
