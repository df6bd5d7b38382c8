"""Read fields out of many protobuf messages at once, into arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
_VARINT, _EIGHT, _PART, _FOUR = 0, 1, 2, 5
_MOST_TAG = 1 << 16


@dataclass(frozen=True, eq=False)
class Occurrences:
    """Where a field occurs: the number of its message, its begin and its end; a numeric field has its value in both."""

    message: Numbers
    begin: Numbers
    end: Numbers


def parts_of(data: bytes, field: int) -> tuple[Numbers, Numbers]:
    """Return where the parts with a field's number begin and end in one message.

    Raises:
        ValueError: it is not a protobuf message.
    """
    begins, ends = list[int](), list[int]()
    at, size = 0, len(data)
    wanted = field << 3 | _PART
    try:
        while at < size:
            if data[at] == wanted:
                # Inlined, because there may be a million parts; most lengths have two bytes.
                length, more = data[at + 1], data[at + 2]
                if length < 128:
                    at += 2
                elif more < 128:
                    length, at = length - 128 + (more << 7), at + 3
                else:
                    length, at = _varint(data, at + 1)
                begins.append(at)
                at += length
                ends.append(at)
                continue
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _PART:
                length, at = _varint(data, at)
                at += length
            elif kind == _VARINT:
                _, at = _varint(data, at)
            else:
                at += _fixed(kind)
    except IndexError as error:
        raise ValueError("the message ends in a number") from error
    if at != size:
        raise ValueError("the message ends in a part")
    return np.array(begins, np.int64), np.array(ends, np.int64)


def read_parts(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Yield the number, the value and the raw bytes of each field of one message, in order.

    Raises:
        ValueError: it is not a protobuf message.
    """
    at = 0
    try:
        while at < len(data):
            begin = at
            tag, at = _varint(data, at)
            kind, value = tag & 7, 0
            if kind == _VARINT:
                value, at = _varint(data, at)
            elif kind == _PART:
                length, at = _varint(data, at)
                at += length
            else:
                at += _fixed(kind)
            yield tag >> 3, data[at - length : at] if kind == _PART else value, data[begin:at]
    except IndexError as error:
        raise ValueError("the message ends in a number") from error
    if at != len(data):
        raise ValueError("the message ends in a part")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value, shift = value & 127, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def packed_numbers(data: bytes) -> tuple[int, ...]:
    """Decode a packed field of signed numbers."""
    found, at = list[int](), 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value - (1 << 64) if value >> 63 else value)
    return tuple(found)


def fields_of(data: Bytes, begins: Numbers, ends: Numbers, fields: Collection[int]) -> dict[int, Occurrences]:
    """Find fields in many messages; each step reads the next field of all of them.

    Raises:
        ValueError: they are not protobuf messages.
    """
    found: dict[int, list[tuple[Numbers, Numbers, Numbers]]] = {field: [] for field in fields}
    number = np.flatnonzero(ends > begins)
    at, end = begins[number], ends[number]
    while len(number):
        tags, at = _varints(data, at)
        after = at.copy()
        if int(tags.max()) > _MOST_TAG:
            raise ValueError("there is no field with such a number")
        for tag in np.flatnonzero(np.bincount(tags)).tolist():
            mine = np.flatnonzero(tags == tag)
            kind, value = tag & 7, at[mine]
            if kind == _VARINT:
                value, stop = _varints(data, value)
            elif kind == _PART:
                length, value = _varints(data, value)
                stop = value + length
            else:
                stop = value + _fixed(kind)
            after[mine] = stop
            if tag >> 3 in found:
                found[tag >> 3].append((number[mine], value, value if kind == _VARINT else stop))
        if (after > end).any():
            raise ValueError("a message ends in a part")
        more = np.flatnonzero(after < end)
        number, at, end = number[more], after[more], end[more]
    return {field: _joined(steps) for field, steps in found.items()}


def _fixed(kind: int) -> int:
    if kind not in (_EIGHT, _FOUR):
        raise ValueError(f"there is no wire type {kind}")
    return 8 if kind == _EIGHT else 4


def _varints(data: Bytes, at: Numbers) -> tuple[Numbers, Numbers]:
    """Read a varint at each position; also return where they end."""
    if len(at) and int(at.max()) >= len(data):
        raise ValueError("a message ends in a number")
    value = data[at].astype(np.int64)
    at = at + 1
    more, shift = np.flatnonzero(value >= 128), 7
    value[more] &= 127
    while len(more):
        if shift > 63 or int(at[more].max()) >= len(data):
            raise ValueError("a number does not end")
        byte = data[at[more]].astype(np.int64)
        at[more] += 1
        value[more] |= (byte & 127) << shift
        more, shift = more[byte >= 128], shift + 7
    return value, at


def _joined(steps: list[tuple[Numbers, Numbers, Numbers]]) -> Occurrences:
    """Join the results of all steps, ordered by message, and within a message by occurrence."""
    if not steps:
        return Occurrences(*(np.empty(0, np.int64) for _ in range(3)))
    message, begin, end = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    if (message[1:] < message[:-1]).any():
        order = np.argsort(message, kind="stable")
        message, begin, end = message[order], begin[order], end[order]
    return Occurrences(message, begin, end)
