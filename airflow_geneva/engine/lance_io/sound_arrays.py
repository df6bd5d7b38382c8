"""Arrow arrays from outside the package: validate them in full, find the rows that are not valid, align their buffers.

pylance writes an array as it is. A table with bytes that are not UTF-8 in a text column, or with a dictionary index out
of range, can no longer be scanned, compacted or indexed, and rows cannot be deleted from it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import nested_types

_ALIGNED, _OF_16_BYTES = 8, 16
Mask = npt.NDArray[np.bool_]


def sound(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return an array that pylance can write and read back: the same array, or an aligned copy.

    Raises:
        pa.ArrowInvalid: the array is not valid, in whole or in some rows; see `unsound_rows`.
    """
    values.validate(full=True)
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array(map(aligned, values.chunks), values.type)
    return aligned(values)


def aligned(values: pa.Array) -> pa.Array:
    """Copy an array whose buffers begin at addresses that its type does not allow: pylance panics on it."""
    size = _OF_16_BYTES if any(map(_is_wide, nested_types(values.type))) else _ALIGNED
    moved = any(buffer is not None and buffer.address % size for buffer in values.buffers())
    return pa.concat_arrays([values]) if moved else values


def unsound_rows(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return the rows of an array that are not valid; empty if it is valid, or not valid as a whole."""
    try:
        values.validate()
    except pa.ArrowInvalid:
        return np.empty(0, np.int64)
    return np.flatnonzero(_unsound(values))


def missing_field(values: pa.Array) -> str | None:
    """Return the name of a nested field that is NULL where its type says that it is not; None if there is none."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType) or not kind.num_fields or not _has_required(kind):
        return None
    if pt.is_struct(kind):
        given = values.filter(values.is_valid()) if values.null_count else values
        parts = [(field, given.field(at)) for at, field in enumerate(kind)]
    elif pt.is_map(kind):
        # A cast to a list of structs does not know extension types.
        first, last = (values.offsets[at].as_py() for at in (0, -1))
        pairs = (kind.key_field, values.keys), (kind.item_field, values.items)
        parts = [(field, part.slice(first, last - first)) for field, part in pairs]
    else:
        parts = [(kind.value_field, _flattened(values))]
    for field, part in parts:
        if not field.nullable and part.null_count:
            return str(field.name)
        if found := missing_field(part):
            return found
    return None


def _flattened(lists: pa.Array) -> pa.Array:
    """Return the values of lists; pyarrow flattens NULL among lists of some types only, and filters others only."""
    try:
        return lists.flatten()
    except pa.ArrowNotImplementedError:
        return lists.filter(lists.is_valid()).flatten()


def _has_required(kind: pa.DataType) -> bool:
    fields = [kind.field(at) for at in range(kind.num_fields)]
    return any(not field.nullable or _has_required(field.type) for field in fields)


def _is_wide(data_type: pa.DataType) -> bool:
    return bool(pt.is_decimal(data_type) or pt.is_string_view(data_type) or pt.is_binary_view(data_type))


def _is_sound(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _unsound(values: pa.Array) -> Mask:
    kind, rows = values.type, len(values)
    found = np.zeros(rows, np.bool_)
    if not rows or _is_sound(values):
        return found
    if isinstance(kind, pa.BaseExtensionType):
        return _unsound(values.storage)
    if pt.is_struct(kind):
        for at in range(kind.num_fields):
            found |= _unsound(values.field(at))
        return found
    if pt.is_fixed_size_list(kind):
        size = kind.list_size
        items = values.values.slice(values.offset * size, rows * size)
        return np.logical_or.reduce(_unsound(items).reshape(rows, size), axis=1) if size else found
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_map(kind):
        parts = (values.keys, values.items) if pt.is_map(kind) else (values.values,)
        return _of_lists(values.offsets.to_numpy(), np.any([_unsound(part) for part in parts], axis=0))
    if pt.is_dictionary(kind):
        return _of_indices(values, _unsound(values.dictionary))
    _halve(values, 0, found)
    return found


def _of_lists(offsets: npt.NDArray[np.int64], bad_items: Mask) -> Mask:
    starts, ends = offsets[:-1], offsets[1:]
    outside = (starts < 0) | (ends < starts) | (ends > len(bad_items))
    until = np.concatenate([[0], np.cumsum(bad_items)])
    found: Mask = outside | (until[np.where(outside, 0, ends)] > until[np.where(outside, 0, starts)])
    return found


def _of_indices(values: pa.Array, bad_values: Mask) -> Mask:
    given = np.asarray(values.is_valid())
    indices = values.indices.fill_null(0).to_numpy(zero_copy_only=False)
    outside = (indices < 0) | (indices >= len(bad_values))
    if not len(bad_values):
        return given
    found: Mask = given & (outside | bad_values[np.where(outside, 0, indices)])
    return found


def _halve(values: pa.Array, start: int, found: Mask) -> None:
    if _is_sound(values):
        return
    if len(values) == 1:
        found[start] = True
        return
    middle = len(values) // 2
    _halve(values.slice(0, middle), start, found)
    _halve(values.slice(middle), start + middle, found)
