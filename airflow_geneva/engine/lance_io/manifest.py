"""The fragments of one table version as arrays: a table may have a million, too many for one object per fragment."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from functools import cached_property
from hashlib import md5
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    FileRef,
    FragmentFiles,
    fragment_files,
    garbage_collector_off,
    open_fragment,
)
from airflow_geneva.engine.lance_io.messages import Bytes, Numbers, Occurrences, fields_of, packed_numbers, parts_of
from airflow_geneva.engine.lance_io.pylance_internals import count_fragments, serialized_manifest

if TYPE_CHECKING:
    import lance

logger = logging.getLogger("airflow_geneva.lance_io")

INPUTS, WHERE, OUTPUT = 0, 1, 2
Mask = npt.NDArray[np.bool_]

# Numbers of the protobuf fields that are read from a manifest, a fragment, a data file and a deletion file.
_FRAGMENTS = 2
_ID, _FILES, _DELETION, _ROWS = 1, 2, 3, 4
_PATH, _FIELDS, _SIZE, _BASE = 1, 2, 6, 7
_READ_VERSION, _NUMBER, _DELETED = 2, 3, 4
_AT_ONCE = 1 << 16
"""The number of references that are formatted at a time."""
_FEW = 128
"""Up to this number of fragments, reading and hashing them one by one is faster than as arrays."""
_ESCAPED = r"[^ !#-&(-\[\]-~]"
"""A character that `repr` or JSON may escape."""


class _Style(NamedTuple):
    """How a tuple of file references is written as text."""

    begin: str
    between: str
    end: str
    end_of_one: str
    quote: str
    escape: Callable[[str], str]


_REPR = _Style("(", ", ", ")", ",)", "'", repr)
_JSON = _Style("[", ",", "]", "]", '"', json.dumps)


@dataclass(frozen=True, eq=False)
class _Refs:
    """References to data files, one for each column in a file, ordered by fragment, role and column."""

    owner: Numbers
    role: Numbers
    field: Numbers
    base: Numbers
    path: pa.LargeStringArray

    def among(self, at: Numbers) -> list[tuple[int, FileRef]]:
        numbers = (self.role[at].tolist(), self.field[at].tolist(), self.base[at].tolist())
        paths = self.path.take(pa.array(at)).to_pylist()
        return [(role, ref) for role, *ref in zip(*numbers, paths, strict=True)]  # type: ignore[misc]

    def texts(self, at: Numbers, style: _Style) -> pa.StringArray:
        """Format the references at the given positions."""
        path, labels = self.path.take(pa.array(at)).cast(pa.string()), (self.field[at] + 1) << 32 | (self.base[at] + 1)
        distinct, of = np.unique(labels, return_inverse=True)
        begins = [
            f"{style.begin}{(label >> 32) - 1}{style.between}{(label & 0xFFFFFFFF) - 1}{style.between}{style.quote}"
            for label in distinct.tolist()
        ]
        begin = pa.array(begins, pa.string()).take(pa.array(of))
        texts = _concatenate(begin, path, f"{style.quote}{style.end}")
        escaped = pc.match_substring_regex(path, _ESCAPED)
        if pc.any(escaped).as_py():
            slow = [
                f"{start.removesuffix(style.quote)}{style.escape(name)}{style.end}"
                for start, name in zip(begin.filter(escaped).to_pylist(), path.filter(escaped).to_pylist(), strict=True)
            ]
            texts = pc.replace_with_mask(texts, escaped, pa.array(slow, pa.string()))
        return texts


class Manifest(Mapping[int, FragmentFiles]):
    """The fragments of a version, by ascending id; creates a `FragmentFiles` on access.

    Args:
        deletion: as in `FragmentFiles`; like the other arrays, one value for each fragment.
    """

    def __init__(
        self,
        ids: Numbers,
        physical_rows: Numbers,
        deleted: Numbers,
        deletion: pa.StringArray,
        size: Numbers,
        refs: _Refs,
    ) -> None:
        self.ids = ids
        self.physical_rows = physical_rows
        self.live_rows = physical_rows - deleted
        self.deletion = deletion
        self._deleted = deleted
        self._size = size
        self._refs = refs
        self._bounds = np.searchsorted(refs.owner, np.arange(len(ids) + 1))

    @staticmethod
    def of(fragments: Iterable[FragmentFiles]) -> Manifest:
        """Make a manifest from `FragmentFiles` objects."""
        ordered = sorted(fragments, key=lambda files: files.id)
        refs = [
            (at, role, *ref)
            for at, files in enumerate(ordered)
            for role, group in enumerate((files.inputs, files.where, files.output))
            for ref in group
        ]
        owner, role, field, base = np.array([ref[:4] for ref in refs], np.int64).reshape(-1, 4).T.copy()
        found = _Refs(owner, role, field, base, pa.array([ref[4] for ref in refs], pa.large_string()))
        sizes = [(files.id, files.physical_rows, files.deleted, files.bytes) for files in ordered]
        ids, rows, deleted, size = np.array(sizes, np.int64).reshape(-1, 4).T.copy()
        deletion = pa.array([files.deletion for files in ordered], pa.string())
        return Manifest(ids, rows, deleted, deletion, size, found)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __getitem__(self, fragment_id: int) -> FragmentFiles:
        for found in self.at(self.positions([fragment_id])):
            return found
        raise KeyError(fragment_id)

    def values(self) -> ValuesView[FragmentFiles]:
        return _Fragments(self)

    def positions(self, ids: Iterable[int]) -> Numbers:
        """Return the positions of the given fragment ids, without ids that do not exist."""
        wanted = np.array(sorted(set(ids)), np.int64)
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        return at[self.ids[at] == wanted] if len(self.ids) else at[:0]

    @cached_property
    def has_deletion(self) -> Mask:
        """Which fragments have a deletion file."""
        found: Mask = pc.not_equal(self.deletion, "").to_numpy(zero_copy_only=False)
        return found

    @cached_property
    def has_output(self) -> Mask:
        """Which fragments have a data file with the output column."""
        found = np.zeros(len(self.ids), np.bool_)
        found[self._refs.owner[self._refs.role == OUTPUT]] = True
        return found

    def at(self, positions: Numbers) -> list[FragmentFiles]:
        """Return the fragments at the given positions."""
        numbers = (array[positions].tolist() for array in (self.ids, self.physical_rows, self._deleted, self._size))
        deletions = self.deletion.take(pa.array(positions)).to_pylist()
        entries, ends = _ranges(self._bounds, positions)
        refs, begin, found = self._refs.among(entries), 0, []
        for fid, rows, deleted, size, deletion, end in zip(*numbers, deletions, ends.tolist(), strict=True):
            files: tuple[list[FileRef], ...] = ([], [], [])
            for role, ref in refs[begin:end]:
                files[role].append(tuple(ref))  # type: ignore[arg-type]
            begin = end
            inputs, where, output = map(tuple, files)
            found.append(FragmentFiles(fid, rows, deletion, deleted, inputs, where, output, size))
        return found

    @cached_property
    def signatures(self) -> pa.StringArray:
        """`FragmentFiles.signature` of each fragment."""
        if len(self) <= _FEW:
            return pa.array([files.signature for files in self.values()], pa.string())
        hashes: list[str] = []
        for part in self.parts(np.arange(len(self.ids))):
            texts = _concatenate("(", self._texts(INPUTS, part, _REPR), ", ", self._texts(OUTPUT, part, _REPR), ")")
            hashes += [md5(text, usedforsecurity=False).hexdigest() for text in texts.cast(pa.binary()).to_pylist()]
        return pa.array(hashes, pa.string())

    def documents(self, positions: Numbers) -> Iterator[pa.StringArray]:
        """Yield the JSON texts of `FragmentFiles.to_json` for fragments without a deletion file."""
        for part in self.parts(positions):
            numbers = (array[part] for array in (self.ids, self.physical_rows, self._size))
            ids, rows, size = (pa.array(array).cast(pa.string()) for array in numbers)
            inputs, where, output = (self._texts(role, part, _JSON) for role in (INPUTS, WHERE, OUTPUT))
            yield _concatenate("[", ids, ",", rows, ',"",0,', inputs, ",", where, ",", output, ",", size, "]")

    def parts(self, positions: Numbers) -> Iterator[Numbers]:
        """Split positions so that a part has few references: a UDF with 300 inputs has 300 per fragment."""
        step = max(1, _AT_ONCE * len(self) // max(len(self), len(self._refs.owner), 1))
        for begin in range(0, len(positions), step):
            yield positions[begin : begin + step]

    @cached_property
    def _of_role(self) -> tuple[tuple[Numbers, Numbers], ...]:
        """For each role, the positions of its references, and where those of each fragment begin."""
        found = (np.flatnonzero(self._refs.role == role) for role in (INPUTS, WHERE, OUTPUT))
        return tuple((at, np.searchsorted(self._refs.owner[at], np.arange(len(self.ids) + 1))) for at in found)

    def _texts(self, role: int, positions: Numbers, style: _Style) -> pa.StringArray:
        refs, bounds = self._of_role[role]
        at, ends = _ranges(bounds, positions)
        counts = np.diff(ends, prepend=0)
        texts = self._refs.texts(refs[at], style)
        if not (counts == 1).all():
            offsets = pa.array(np.concatenate(([0], ends)), pa.int32())
            texts = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), style.between)
        end = pa.array([style.end, style.end_of_one], pa.string()).take(pa.array((counts == 1).astype(np.int8)))
        return _concatenate(style.begin, texts, end)


class _Fragments(ValuesView[FragmentFiles]):
    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._manifest = manifest

    def __iter__(self) -> Iterator[FragmentFiles]:
        for part in self._manifest.parts(np.arange(len(self._manifest))):
            yield from self._manifest.at(part)


def read_manifest(dataset: lance.LanceDataset, columns: Columns) -> Manifest:
    """Return all fragments of a version, without reading data.

    To pickle a dataset, pylance returns its manifest as bytes, which is faster than fragments as objects. Fragments are
    read one by one if there are few, or if the bytes do not have the documented format.
    """
    with garbage_collector_off():
        try:
            if count_fragments(dataset) <= _FEW:
                return _one_by_one(dataset, columns)
            found = _decode(dataset, serialized_manifest(dataset), columns)
            if len(found) == count_fragments(dataset) and _fits(dataset, columns, found):
                return found
            raise ValueError("it has other fragments than the table")
        except (AttributeError, ValueError) as error:
            logger.warning("Reading the fragments of %s one by one: pylance's manifest, %s.", dataset.uri, error)
            return _one_by_one(dataset, columns)


def _one_by_one(dataset: lance.LanceDataset, columns: Columns) -> Manifest:
    return Manifest.of(fragment_files(fragment.metadata, columns) for fragment in dataset.get_fragments())


def _fits(dataset: lance.LanceDataset, columns: Columns, found: Manifest) -> bool:
    """Whether the first and the last fragment equal the ones that pylance returns."""
    return all(
        files == fragment_files(open_fragment(dataset, files.id).metadata, columns)
        for files in found.at(np.array([0, len(found) - 1][: len(found)], np.int64))
    )


def _decode(dataset: lance.LanceDataset, manifest: bytes, columns: Columns) -> Manifest:
    data = np.frombuffer(manifest, np.uint8)
    begins, ends = parts_of(manifest, _FRAGMENTS)
    numbers = fields_of(data, begins, ends, (_ID, _FILES, _DELETION, _ROWS))
    ids = _single(numbers[_ID], len(begins))
    if (np.diff(ids) <= 0).any():
        order = np.argsort(ids, kind="stable")
        numbers = fields_of(data, begins[order], ends[order], (_ID, _FILES, _DELETION, _ROWS))
        ids = ids[order]
    deletion, deleted = _deletions(data, numbers[_DELETION], len(ids))
    refs, size = _references(data, numbers[_FILES], columns, len(ids))
    if not columns.output:
        refs = _of_view(dataset, columns, refs, ids)
    return Manifest(ids, _single(numbers[_ROWS], len(ids)), deleted, deletion, size, refs)


def _deletions(data: Bytes, found: Occurrences, count: int) -> tuple[pa.StringArray, Numbers]:
    parts = fields_of(data, found.begin, found.end, (_READ_VERSION, _NUMBER, _DELETED))
    read_version, number, deleted = (_single(parts[field], len(found.begin)) for field in parts)
    names = [
        f"{version}-{name}-{rows or None}"
        for version, name, rows in zip(
            read_version.tolist(), number.view(np.uint64).tolist(), deleted.tolist(), strict=True
        )
    ]
    of, rows = np.zeros(count, np.int64), np.zeros(count, np.int64)
    of[found.message] = np.arange(1, len(names) + 1)
    rows[found.message] = deleted
    return pa.array(["", *names], pa.string()).take(pa.array(of)), rows


def _references(data: Bytes, found: Occurrences, columns: Columns, count: int) -> tuple[_Refs, Numbers]:
    """Return the references to the files that hold the columns, and the size of each fragment's input files."""
    files = fields_of(data, found.begin, found.end, (_PATH, _FIELDS, _SIZE, _BASE))
    if not np.array_equal(files[_PATH].message, np.arange(len(found.begin))):
        raise ValueError("it has a data file without a path")
    order = [("i", at) for at in range(len(columns.inputs))] + [("w", at) for at in range(len(columns.where))]
    slots = {part: slot for slot, part in enumerate([*order, ("o", 0)])}
    fields = np.array([column[0] if column else -1 for column in (*columns.inputs, *columns.where, columns.output)])
    roles = np.repeat((INPUTS, WHERE, OUTPUT), (len(columns.inputs), len(columns.where), 1))

    of, held = np.zeros(len(found.begin), np.int64), [columns.parts(())]
    named = _strings(data, files[_FIELDS], pa.large_binary()).dictionary_encode()
    of[files[_FIELDS].message] = named.indices.to_numpy() + 1
    held += [columns.parts(packed_numbers(text)) for text in named.dictionary.to_pylist()]
    size = _single(files[_SIZE], len(found.begin))
    has_inputs = np.array([any(role == "i" for role, _ in parts) for parts in held])[of]
    sizes = np.bincount(found.message[has_inputs], size[has_inputs], minlength=count).astype(np.int64)

    counts = np.array([len(parts) for parts in held], np.int64)
    flat = np.array([slots[part] for parts in held for part in parts], np.int64)
    at, _ = _ranges(np.concatenate(([0], np.cumsum(counts))), of)
    file = np.repeat(np.arange(len(of)), counts[of])
    owner, slot, base = found.message[file], flat[at], _single(files[_BASE], len(of), -1)[file]
    order_of = (
        np.lexsort((base, slot, owner)) if (np.diff(owner * len(fields) + slot) <= 0).any() else np.arange(len(file))
    )
    owner, slot, base, file = owner[order_of], slot[order_of], base[order_of], file[order_of]
    paths = files[_PATH]
    path = _strings(data, Occurrences(file, paths.begin[file], paths.end[file]), pa.large_string())
    key = owner * len(fields) + slot
    if len(again := np.flatnonzero(np.diff(key) == 0)):
        # Several files hold parts of one nested column.
        mixed = np.flatnonzero(np.isin(key, key[again]))
        names = path.take(pa.array(mixed)).to_pylist()
        ranked = sorted(zip(key[mixed].tolist(), base[mixed].tolist(), names, mixed.tolist(), strict=True))
        sorted_by = np.arange(len(key))
        sorted_by[mixed] = [place for *_, place in ranked]
        base, path = base[sorted_by], path.take(pa.array(sorted_by))
    return _Refs(owner, roles[slot], fields[slot], base, path), sizes


def _of_view(dataset: lance.LanceDataset, columns: Columns, refs: _Refs, ids: Numbers) -> _Refs:
    """Add references that identify the rows of a view's source, as `fragment_files` does."""
    without = np.setdiff1d(np.arange(len(ids)), refs.owner[refs.role == INPUTS])
    rows = [fragment_files(open_fragment(dataset, fid).metadata, columns).inputs[0][2] for fid in ids[without].tolist()]
    owner = np.concatenate((refs.owner, without, np.arange(len(ids))))
    role = np.concatenate((refs.role, np.full(len(without), INPUTS), np.full(len(ids), OUTPUT)))
    named = pa.array(ids).cast(pa.large_string())
    path = pa.concat_arrays([refs.path, pa.array(rows, pa.large_string()), named])
    none = np.full(len(without) + len(ids), -1)
    field, base = np.concatenate((refs.field, none)), np.concatenate((refs.base, none))
    order = np.lexsort((role, owner))
    return _Refs(owner[order], role[order], field[order], base[order], path.take(pa.array(order)))


def _single(found: Occurrences, count: int, default: int = 0) -> Numbers:
    """Return the values of a numeric field that occurs at most once in a message."""
    values = np.full(count, default, np.int64)
    values[found.message] = found.begin
    return values


def _strings(data: Bytes, found: Occurrences, kind: pa.DataType) -> pa.Array:
    """Copy parts of a buffer into an array; most parts have the same length."""
    lengths = found.end - found.begin
    order = np.argsort(lengths, kind="stable")
    arrays, at = [pa.array([], kind)], 0
    for length, count in zip(*np.unique(lengths, return_counts=True), strict=True):
        begins = found.begin[order[at : at + count]]
        text = np.lib.stride_tricks.sliding_window_view(data, length)[begins] if length else np.empty(0, np.uint8)
        offsets = np.arange(count + 1, dtype=np.int64) * length
        arrays.append(pa.Array.from_buffers(kind, int(count), [None, pa.py_buffer(offsets), pa.py_buffer(text)]))
        at += count
    joined = pa.concat_arrays(arrays)
    return joined if len(arrays) == 2 else joined.take(pa.array(np.argsort(order, kind="stable")))


def _ranges(bounds: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
    """Return the indexes from `bounds[p]` to `bounds[p + 1]` for each position p, and where those of each end."""
    begins, counts = bounds[positions], bounds[positions + 1] - bounds[positions]
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begins - (ends - counts), counts), ends


def _concatenate(*texts: pa.StringArray | str) -> pa.StringArray:
    return pc.binary_join_element_wise(*texts, "")
