"""Compare two Arrow arrays row by row, whatever their type."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Mask = npt.NDArray[np.bool_]


def same_values(left: pa.Array, right: pa.Array) -> Mask:
    """For every row, whether both arrays hold the same value; NULL equals NULL and NaN equals NaN.

    Args:
        left, right: arrays of one type and length.
    """
    if left.type != right.type:
        return np.zeros(len(left), np.bool_)
    present = _present(left)
    alike: Mask = present == _present(right)
    both = np.flatnonzero(alike & present)
    if len(both):
        chosen = pa.array(both)
        alike[both] = _same_present(left.take(chosen), right.take(chosen))
    return alike


def _present(array: pa.Array) -> Mask:
    present: Mask = np.array(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    return present


def _same_present(left: pa.Array, right: pa.Array) -> Mask:
    """The comparison of arrays without NULLs on their top level."""
    kind = left.type
    if isinstance(left, pa.ExtensionArray):
        return same_values(left.storage, right.storage)
    if pt.is_dictionary(kind):
        return same_values(left.dictionary_decode(), right.dictionary_decode())
    if pt.is_struct(kind):
        parts = zip(left.flatten(), right.flatten(), strict=True)
        alike: Mask = np.ones(len(left), np.bool_)
        for one, other in parts:
            alike &= same_values(one, other)
        return alike
    if pt.is_map(kind):
        pairs = pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
        return _same_lists(left.cast(pairs), right.cast(pairs))
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return _same_lists(left, right)
    if pt.is_float16(kind):
        return _same_present(left.cast(pa.float32()), right.cast(pa.float32()))
    try:
        equal: Mask = pc.equal(left, right).to_numpy(zero_copy_only=False)
    except pa.ArrowNotImplementedError:
        # A type that Arrow cannot compare: its rows count as changed, which costs work and is never wrong.
        return np.zeros(len(left), np.bool_)
    if pt.is_floating(kind):
        equal = equal | pc.and_(pc.is_nan(left), pc.is_nan(right)).to_numpy(zero_copy_only=False)
    return equal


def _same_lists(left: pa.Array, right: pa.Array) -> Mask:
    lengths = pc.list_value_length(left).to_numpy(zero_copy_only=False).astype(np.int64)
    alike: Mask = lengths == pc.list_value_length(right).to_numpy(zero_copy_only=False)
    filled = np.flatnonzero(alike & (lengths > 0))
    if len(filled):
        chosen = pa.array(filled)
        items = same_values(pc.list_flatten(left.take(chosen)), pc.list_flatten(right.take(chosen)))
        starts = np.concatenate(([0], np.cumsum(lengths[filled])[:-1]))
        alike[filled] = np.logical_and.reduceat(items, starts)
    return alike
