"""What a table's manifest says about its fragments, as far as one column is concerned."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from airflow_geneva.checkpoint.keys import md5
from airflow_geneva.checkpoint.ranges import Ranges
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

FileRef = tuple[int, int, str]
"""(id of the column's field, base id or -1, path) of one data file that holds part of a column."""


@dataclass(frozen=True)
class Columns:
    """The columns that matter to one piece of work, by field id, so that a rename changes nothing.

    Args:
        inputs: for each input of the UDF, in its order, the field ids of the column and all its children.
        where: the same for the columns a filter mentions.
        output: the same for the output column; ``output[0]`` names the column. A view's source has none.
    """

    inputs: tuple[tuple[int, ...], ...]
    where: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]

    @property
    def inputs_text(self) -> str:
        """The inputs by field id, as facts name them."""
        return ",".join(str(fields[0]) for fields in self.inputs)

    @cached_property
    def roles(self) -> dict[int, list[tuple[str, int]]]:
        """Which columns a field id belongs to."""
        found: dict[int, list[tuple[str, int]]] = {}
        groups = [("i", self.inputs), ("w", self.where), ("o", (self.output,))]
        for role, columns in groups:
            for position, fields in enumerate(columns):
                for field_id in fields:
                    found.setdefault(field_id, []).append((role, position))
        return found

    @cached_property
    def _parts(self) -> dict[tuple[int, ...], tuple[tuple[str, int], ...]]:
        return {}

    def parts(self, fields: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """Which columns a data file with these field ids holds a part of; most files of a table have the same."""
        key = tuple(fields)
        found = self._parts.get(key)
        if found is None:
            found = tuple(sorted({part for field_id in key for part in self.roles.get(field_id, ())}))
            self._parts[key] = found
        return found


@dataclass(frozen=True)
class FragmentFiles:
    """One fragment: its rows, and the data files of the columns that matter.

    Args:
        id: fragment id.
        physical_rows: rows in its data files, deleted ones included.
        deletion: identity of its deletion file, "" when nothing is deleted.
        deleted: number of deleted rows.
        inputs, where, output: data files, in the order of the columns; a column without a file is all NULL. Of a view's
            source, where none of the columns has a file, `inputs` names the rows instead.
        bytes: size of the files that hold the inputs, for sizing reads.
    """

    id: int
    physical_rows: int
    deletion: str
    deleted: int
    inputs: tuple[FileRef, ...]
    where: tuple[FileRef, ...]
    output: tuple[FileRef, ...]
    bytes: int

    @property
    def live_rows(self) -> int:
        return self.physical_rows - self.deleted

    @cached_property
    def srcfiles(self) -> str:
        """Hash of the files the result is computed from: inputs and filter columns, in their order."""
        return md5(repr((self.inputs, self.where)))

    @cached_property
    def signature(self) -> str:
        """Hash of what a computed value depends on and lies in: input files and output files."""
        return self.signature_with(self.output)

    def signature_with(self, output: Sequence[FileRef]) -> str:
        """The signature this fragment will have once its output lies in other files."""
        return md5(repr((self.inputs, tuple(output))))

    def where_signature(self, output: Sequence[FileRef] | None = None) -> str:
        """Hash of everything a filter's verdict and the value depend on."""
        return md5(repr((self.inputs, self.where, self.output if output is None else tuple(output))))

    def source_paths(self) -> list[str]:
        """Paths of the files of inputs and filter columns, sorted."""
        return sorted({path for _, _, path in (*self.inputs, *self.where)})

    def to_json(self) -> list[Any]:
        return [
            self.id, self.physical_rows, self.deletion, self.deleted, self.inputs, self.where, self.output, self.bytes,
        ]  # fmt: skip

    @staticmethod
    def from_json(document: Sequence[Any]) -> FragmentFiles:
        fid, rows, deletion, deleted, inputs, where, output, size = document
        return FragmentFiles(fid, rows, deletion, deleted, _refs(inputs), _refs(where), _refs(output), size)


def _refs(items: Sequence[Sequence[Any]]) -> tuple[FileRef, ...]:
    return tuple((int(a), int(b), str(c)) for a, b, c in items)


def field_ids(dataset: lance.LanceDataset, column: str) -> tuple[int, ...]:
    """Ids of a column and of everything nested in it; files name the leaves, metadata the column.

    Raises:
        InvalidInput: the table has no such column.
    """
    wanted = dataset.lance_schema.field(column)
    if wanted is None:
        raise InvalidInput(f"There is no column {column!r}. Columns: {', '.join(dataset.schema.names)}.")
    found: list[int] = []
    queue = [wanted]
    while queue:
        current = queue.pop(0)
        found.append(current.id())
        queue.extend(current.children())
    return tuple(found)


def columns_of(
    dataset: lance.LanceDataset, inputs: Sequence[str], where: Sequence[str], output: str | None
) -> Columns:  # fmt: skip
    """Look the columns up at one version of the table; a view's source has no output."""
    return Columns(
        tuple(field_ids(dataset, name) for name in inputs),
        tuple(field_ids(dataset, name) for name in sorted(where)),
        () if output is None else field_ids(dataset, output),
    )


def fields_present(dataset: lance.LanceDataset, fields: tuple[int, ...]) -> tuple[int, ...]:
    """The field ids of a column if a version still has it, whatever its name; else none."""
    by_id = {column.id(): column.name() for column in dataset.lance_schema.fields()}
    return field_ids(dataset, by_id[fields[0]]) if fields[0] in by_id else ()


def read_manifest(
    dataset: lance.LanceDataset, columns: Columns, only: set[int] | None = None
) -> dict[int, FragmentFiles]:
    """All fragments of a version, or some, by id; no data is read."""
    with garbage_collector_off():
        # Asking for some by id spares a commit in a table of 100,000 fragments the look at all of them.
        fragments = dataset.get_fragments() if only is None else map(dataset.get_fragment, sorted(only))
        found = (fragment_files(f.metadata, columns) for f in fragments if f is not None)
        return {files.id: files for files in found}


def fragment_files(metadata: Any, columns: Columns) -> FragmentFiles:
    """Reduce one fragment's metadata to what matters."""
    files: dict[str, list[tuple[int, int, str]]] = {"i": [], "w": [], "o": []}
    size = 0
    for data_file in metadata.files:
        parts = columns.parts(data_file.fields)
        if not parts:
            continue
        base, path = -1 if data_file.base_id is None else data_file.base_id, data_file._path
        for role, position in parts:
            files[role].append((position, base, path))
        if parts[0][0] == "i":
            size += data_file.file_size_bytes or 0
    deletion = metadata.deletion_file
    identity, deleted = "", 0
    if deletion is not None:
        named = deletion.asdict()
        identity = f"{named['read_version']}-{named['id']}-{named['num_deleted_rows']}"
        deleted = named["num_deleted_rows"] or 0
    inputs = _in_order(files["i"], columns.inputs)
    if not inputs and not columns.output:
        # What a view reads is all NULL or constant here, so which rows there are is all that it depends on.
        inputs = ((-1, -1, _rows_identity(metadata)),)
    return FragmentFiles(
        metadata.id,
        metadata.physical_rows,
        identity,
        deleted,
        inputs,
        _in_order(files["w"], columns.where),
        # Files may come back in a new fragment with new row ids, as a view's do when it is restored and refreshed.
        # Rows that have an output are known by its file.
        _in_order(files["o"], (columns.output,)) if columns.output else ((-1, -1, str(metadata.id)),),
        size,
    )


def _rows_identity(metadata: Any) -> str:
    """The rows of a fragment by their ids, deleted ones included."""
    ids = metadata.row_id_meta
    return f"rows-{md5(repr((metadata.physical_rows, None if ids is None else ids.asdict())))}"


def _in_order(files: list[tuple[int, int, str]], columns: tuple[tuple[int, ...], ...]) -> tuple[FileRef, ...]:
    if len(files) > 1:
        files.sort()
    return tuple([(columns[position][0], base, path) for position, base, path in files])


def open_fragment(dataset: lance.LanceDataset, fragment_id: int) -> lance.LanceFragment:
    """A fragment of a version that is known to have it.

    Raises:
        InvalidInput: it does not.
    """
    found = dataset.get_fragment(fragment_id)
    if found is None:
        raise InvalidInput(f"Version {dataset.version} of {dataset.uri} has no fragment {fragment_id}.")
    return found


def live_offsets(dataset: lance.LanceDataset, fragment: FragmentFiles) -> Ranges:
    """Physical offsets of the rows that are not deleted; reads the deletion file, no column."""
    if not fragment.deletion:
        return Ranges.of(0, fragment.physical_rows)
    parts: list[Ranges] = []
    for batch in open_fragment(dataset, fragment.id).scanner(columns=[], with_row_address=True).to_batches():
        parts.append(Ranges.from_offsets(batch.column("_rowaddr").to_numpy().astype(np.int64) & 0xFFFFFFFF))
    return Ranges.union(parts)


def row_ids(dataset: lance.LanceDataset, fragment_id: int) -> tuple[Any, Any]:
    """Physical offsets and row ids of the live rows of a fragment, in physical order."""
    scanner = open_fragment(dataset, fragment_id).scanner(columns=[], with_row_address=True, with_row_id=True)
    table = scanner.to_table()
    offsets = table.column("_rowaddr").to_numpy().astype(np.int64) & 0xFFFFFFFF
    return offsets, table.column("_rowid").to_numpy()


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Millions of small objects are made while reading a manifest; collecting between them triples the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
