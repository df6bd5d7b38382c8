"""Read fragments, and their data files and deletion files for given columns, from a table's manifest."""

from __future__ import annotations

import copy
import gc
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import find_field
from airflow_geneva.engine.lance_io.blobs import is_blob, scan_descriptors
from airflow_geneva.engine.lance_io.messages import packed_numbers, read_parts
from airflow_geneva.engine.lance_io.pylance_internals import path_of
from airflow_geneva.engine.lance_io.row_ranges import Offsets, Ranges, RowIds
from airflow_geneva.engine.lance_io.siblings import Output, is_group, sibling_of
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.engine_errors import is_engine_error, is_unavailable, reason_of, remedy_of
from airflow_geneva.engine.storage.uri import join, md5
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

OFFSET_BITS = 0xFFFFFFFF
_REPLACED = -2
"""Stands in Lance's manifest for the field id of a column of a file whose values another file replaced."""
_MOST_BYTES_OF_A_RANGE = 26
FileRef = tuple[int, int, str]
"""(id of the column's field, base id or -1, path) of one data file that holds part of a column."""


@dataclass(frozen=True)
class Columns:
    """The columns that one job reads and writes, each as its own and its nested field ids; names do not matter.

    `output` begins with the number that identifies it in facts: the column's own id, or the number of a group of
    siblings, followed by the ids of all of them. It is empty for a view's source. Functions and filters find nested
    fields by name, so `names` are hashes of the nested names, for the inputs and then the columns of `where`; "" for a
    column without a struct.
    """

    inputs: tuple[tuple[int, ...], ...]
    where: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def read(self) -> Columns:
        """The inputs and the columns of `where`, all as inputs, without the output."""
        return Columns((*self.inputs, *self.where), (), (), self.names)

    @property
    def inputs_text(self) -> str:
        """The inputs' field ids, as facts store them; a struct adds its nested field ids and a hash of their names."""
        return ",".join(self._texts[: len(self.inputs)])

    @property
    def nested(self) -> str:
        """The nested fields of all structs that are read, as in checkpoint keys; "" if there is no struct."""
        return ",".join(text for text, named in zip(self._texts, self.names, strict=False) if named)

    @property
    def _texts(self) -> list[str]:
        columns = (*self.inputs, *self.where)
        names = self.names or ("",) * len(columns)
        return [
            ".".join([*map(str, fields), named]) if named else str(fields[0])
            for fields, named in zip(columns, names, strict=True)
        ]

    @cached_property
    def roles(self) -> dict[int, list[tuple[str, int]]]:
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
        """Return the columns in a data file with these field ids; cached, because most files have the same fields."""
        key = tuple(fields)
        found = self._parts.get(key)
        if found is None:
            found = tuple(sorted({part for field_id in key for part in self.roles.get(field_id, ())}))
            self._parts[key] = found
        return found


@dataclass(frozen=True)
class FragmentFiles:
    """One fragment with the data files of a job's columns, in column order; an all-NULL column has no file.

    Args:
        deletion: identity of its deletion file; "" if no row is deleted.
        inputs: data files of the inputs. If none of the columns of a view's source has a file, it identifies the rows.
        bytes: size of the files that hold the inputs.
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
        """Hash of the files that the result is computed from: inputs and filter columns, in order."""
        return md5(repr((self.inputs, self.where)))

    @cached_property
    def signature(self) -> str:
        """Hash of the input files and the output files."""
        return self.signature_with(self.output)

    def signature_with(self, output: Sequence[FileRef]) -> str:
        return md5(repr((self.inputs, tuple(output))))

    def where_signature(self, output: Sequence[FileRef] | None = None) -> str:
        """Hash of all files on which the filter's result and the value depend."""
        return md5(repr((self.inputs, self.where, self.output if output is None else tuple(output))))

    def source_paths(self) -> list[str]:
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
    """Return the ids of a column and all its nested fields: data files list the leaves, the schema lists the column."""
    return tuple(field.id() for field in _fields_of(dataset, column))


def output_ids(dataset: lance.LanceDataset, output: Output | str, known: TableFields | None = None) -> tuple[int, ...]:
    """Return the ids of the columns of an output, or of a column and its siblings; first the number of a group.

    Args:
        known: the fields of the dataset, if they are known.
    """
    output = Output.of(dataset, output) if isinstance(output, str) else output
    ids = [found for name in output.columns for found in (known.ids[name] if known else field_ids(dataset, name))]
    return tuple(ids if output.group is None else [output.group, *ids])


def output_names(
    dataset: lance.LanceDataset, output: tuple[int, ...], known: TableFields | None = None
) -> tuple[str, ...]:
    """Return the names that the columns of an output have in a version, in the order of the table."""
    columns = (known or TableFields(dataset)).columns
    return tuple(name for _, name in sorted(columns[field] for field in set(output) if field in columns))


def field_ids_present(dataset: lance.LanceDataset) -> set[int]:
    """Return the ids of all columns and all fields nested in them."""
    return {field.id() for field in _with_nested(dataset.lance_schema.fields())}


def metadata_by_id(dataset: lance.LanceDataset) -> dict[int, Mapping[str, str]]:
    """Return the metadata of all fields, by their field ids."""
    return {field.id(): field.metadata for field in _with_nested(dataset.lance_schema.fields())}


def _fields_of(dataset: lance.LanceDataset, column: str) -> list[Any]:
    wanted = dataset.lance_schema.field(column)
    if wanted is None:
        raise InvalidInput(f"There is no column {column!r}. Columns: {', '.join(dataset.schema.names)}.")
    return _with_nested([wanted])


def _with_nested(fields: list[Any]) -> list[Any]:
    """Return fields and all fields nested in them, parents first."""
    found = list(fields)
    for field in found:
        found.extend(field.children())
    return found


def ids_by_name(dataset: lance.LanceDataset) -> dict[str, tuple[int, ...]]:
    """Return the result of `field_ids` for each column, and for each field of structs by its path."""
    schema = dataset.schema  # pylance builds it on every access
    found = [(field.name(), field, schema.field(field.name())) for field in dataset.lance_schema.fields()]
    for path, field, known in found:
        if pt.is_struct(known.type):
            found += [(f"{path}.{one.name()}", one, known.type.field(one.name())) for one in field.children()]
    return {path: tuple(nested.id() for nested in _with_nested([field])) for path, field, _ in found}


class TableFields:
    """The fields of one table version, looked up once for many columns; a lookup reads the whole schema."""

    def __init__(self, dataset: lance.LanceDataset) -> None:
        self._dataset = dataset
        self._texts = dict[str, str]()

    @cached_property
    def columns(self) -> dict[int, tuple[int, str]]:
        """The position and the name of each column, by its field id."""
        return {field.id(): (at, field.name()) for at, field in enumerate(self._dataset.lance_schema.fields())}

    @cached_property
    def ids(self) -> dict[str, tuple[int, ...]]:
        """The result of `ids_by_name`."""
        return ids_by_name(self._dataset)

    @cached_property
    def paths(self) -> dict[int, str]:
        """The paths of columns and of fields of structs, by their field ids."""
        return {found[0]: path for path, found in self.ids.items()}

    def inputs_text(self, path: str) -> str:
        """Return how facts name an input."""
        if path not in self._texts:
            self._texts[path] = columns_of(self._dataset, (path,), (), None).inputs_text
        return self._texts[path]


def columns_of(
    dataset: lance.LanceDataset, inputs: Sequence[str], where: Sequence[str], output: Output | str | None
) -> Columns:  # fmt: skip
    """Look up the columns at one version of the table; a view's source has no output."""
    return Columns(
        tuple(field_ids(dataset, name) for name in inputs),
        tuple(field_ids(dataset, name) for name in sorted(where)),
        () if output is None else output_ids(dataset, output),
        tuple(_nested_names(dataset, name) for name in (*inputs, *sorted(where))),
    )


def columns_in(
    dataset: lance.LanceDataset,
    inputs: str,
    output: tuple[int, ...],
    known: TableFields | None = None,
) -> tuple[Columns, tuple[str, ...]]:
    """Look up the inputs in a fact; they may have been dropped since.

    Args:
        inputs: field ids, as `Columns.inputs_text` returns them.
        known: the fields of the dataset, if they are known.

    Returns:
        The columns of the fact, and their names in this version; the name is "" if the version lacks the input, or
        has other nested fields in it.
    """
    known = known or TableFields(dataset)
    fields, hashes, names = list[tuple[int, ...]](), list[str](), list[str]()
    for text in inputs.split(","):
        *ids, named = text.split(".") if "." in text else (text, "")
        # Data files still name the fields of a dropped column.
        then, name = tuple(map(int, ids)), known.paths.get(int(ids[0]), "")
        if name and not named:
            then = known.ids[name]
        elif name and known.inputs_text(name) != text:
            name = ""
        fields.append(then)
        hashes.append(named)
        names.append(name)
    return Columns(tuple(fields), (), output, tuple(hashes)), tuple(names)


def _nested_names(dataset: lance.LanceDataset, column: str) -> str:
    """Hash the names of the fields nested in a column; "" if it contains no struct other than a blob's."""
    field = find_field({field.name: field for field in dataset.schema}, column)
    if field is None or is_blob(field) or not _has_struct(field.type):
        return ""
    return md5(repr([nested.name() for nested in _fields_of(dataset, column)[1:]]))[:8]


def _has_struct(kind: pa.DataType) -> bool:
    if pt.is_map(kind):
        return _has_struct(kind.key_type) or _has_struct(kind.item_type)
    return pt.is_struct(kind) or any(_has_struct(kind.field(at).type) for at in range(kind.num_fields))


def fields_present(dataset: lance.LanceDataset, fields: tuple[int, ...]) -> tuple[int, ...]:
    """Return what `output_ids` returns for an output if a version still has a column of it, under any name; else ()."""
    if not is_group(fields[0]):
        names = output_names(dataset, fields[:1])
        return field_ids(dataset, names[0]) if names else ()
    if len(fields) > 1:
        names = output_names(dataset, fields)
    else:
        found = ((field.name(), sibling_of(field)) for field in dataset.lance_schema.fields())
        names = tuple(name for name, sibling in found if sibling is not None and sibling.group == fields[0])
    ids = tuple(nested for name in names for nested in field_ids(dataset, name))
    return (fields[0], *ids) if ids else ()


def read_fragments(dataset: lance.LanceDataset, columns: Columns, ids: set[int]) -> dict[int, FragmentFiles]:
    """Return some fragments of a version, by id, without reading data; `lance_io.manifest` reads all of them."""
    with garbage_collector_off():
        fragments = map(dataset.get_fragment, sorted(ids))
        found = (fragment_files(f.metadata, columns) for f in fragments if f is not None)
        return {files.id: files for files in found}


def fragment_files(metadata: Any, columns: Columns) -> FragmentFiles:
    """Extract the files of the given columns from one fragment's metadata."""
    files: dict[str, list[tuple[int, int, str]]] = {"i": [], "w": [], "o": []}
    size = 0
    for data_file in metadata.files:
        parts = columns.parts(data_file.fields)
        if not parts:
            continue
        base, path = -1 if data_file.base_id is None else data_file.base_id, path_of(data_file)
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
        # All columns that the view reads are NULL or constant here, so its content depends only on which rows exist.
        inputs = ((-1, -1, _rows_identity(metadata)),)
    return FragmentFiles(
        metadata.id,
        metadata.physical_rows,
        identity,
        deleted,
        inputs,
        _in_order(files["w"], columns.where),
        # The same input files can return in a new fragment with other row ids, for example after a view was restored
        # and refreshed. An output file identifies the rows; without one, the fragment id does.
        _in_order(files["o"], (columns.output,)) if columns.output else ((-1, -1, str(metadata.id)),),
        size,
    )


def _rows_identity(metadata: Any) -> str:
    """Identify the rows of a fragment by their ids, including deleted rows."""
    ids = metadata.row_id_meta
    return f"rows-{md5(repr((metadata.physical_rows, None if ids is None else ids.asdict())))}"


def _in_order(files: list[tuple[int, int, str]], columns: tuple[tuple[int, ...], ...]) -> tuple[FileRef, ...]:
    if len(files) > 1:
        files.sort()
    return tuple([(columns[position][0], base, path) for position, base, path in files])


def with_data_file(fragment: Any, file: Any) -> Any:
    """Return a fragment's metadata with an additional data file, whose columns replace those in earlier files."""
    columns, files = set(file.fields), []
    for before in fragment.files:
        fields = [_REPLACED if field in columns else field for field in before.fields]
        if any(field != _REPLACED for field in fields):
            kept = copy.copy(before)
            kept.fields = fields
            files.append(kept)
    return replace(fragment, files=[*files, file])


def replace_columns(dataset: lance.LanceDataset, files: Mapping[int, Any]) -> Any:
    """Return the operation that puts the columns of one data file into each fragment, in place of those it has.

    Lance replaces columns of which a fragment has none or all. If a fragment has only some of them, the operation
    states the fragments' files as they are in this version, so it conflicts with every other change of a fragment.

    Args:
        files: descriptions of data files with the same columns, by the id of their fragment.
    """
    import lance

    made = lance.LanceOperation
    fields = {field for file in files.values() for field in file.fields}
    fragments = [open_fragment(dataset, at).metadata for at in files] if len(fields) > 1 else []
    present = [len({field for file in one.files for field in file.fields} & fields) for one in fragments]
    if not any(0 < count < len(fields) for count in present):
        return made.DataReplacement([made.DataReplacementGroup(at, file) for at, file in files.items()])
    stable = dataset.has_stable_row_ids
    return made.Update(
        updated_fragments=[with_data_file(one, files[one.id]) for one in fragments],
        fields_modified=sorted(fields),
        update_mode="rewrite_columns",
        updated_fragment_offsets={one.id: bitmap_of_all(one.physical_rows) for one in fragments} if stable else None,
    )


def bitmap_of_all(rows: int) -> bytes:
    """Return the offsets of all rows as a Roaring bitmap in its portable format: one run for every 65,536 rows.

    pylance's own `Bitmap` stores 128 KB for a million rows, and takes 0.4 s.
    """
    sizes = [min(rows - start, 1 << 16) for start in range(0, rows, 1 << 16)]
    count = len(sizes)
    head = struct.pack("<HH", 12347, count - 1) + ((1 << count) - 1).to_bytes(-(-count // 8), "little")
    head += b"".join(struct.pack("<HH", at, size - 1) for at, size in enumerate(sizes))
    if count >= 4:
        first = len(head) + 4 * count
        head += struct.pack(f"<{count}I", *range(first, first + 6 * count, 6))
    return head + b"".join(struct.pack("<HHH", 1, 0, size - 1) for size in sizes)


def open_fragment(dataset: lance.LanceDataset, fragment_id: int) -> lance.LanceFragment:
    found = dataset.get_fragment(fragment_id)
    if found is None:
        raise InvalidInput(f"Version {dataset.version} of {dataset.uri} has no fragment {fragment_id}.")
    return found


def damaged_file(
    dataset: lance.LanceDataset,
    fragment_id: int,
    inputs: Sequence[str],
    error: BaseException,
    rows: int = 1_024,
    limit: int | None = None,
) -> str | None:
    """Return the damaged data file because of which a fragment could not be read, with the column and the reason.

    Args:
        inputs: the columns that were read, or paths of fields in them.
        error: what the read raised.
        rows: rows to read at once.
        limit: bytes of the files that are read ahead.

    Returns:
        None if the store is unavailable or lacks the file, or if the columns can be read by themselves: SQL may fail on
        values.
    """
    if not _is_decoding_error(error):
        return None
    fragment = open_fragment(dataset, fragment_id)
    for name in dict.fromkeys(path.partition(".")[0] for path in inputs):
        scanner = scan_descriptors(fragment, [name], batch_size=rows, batch_readahead=1, io_buffer_size=limit)
        try:
            for _ in scanner.to_batches():
                pass
        except BaseException as found:  # a panic of pylance is no Exception
            if not _is_decoding_error(found):
                raise
            ids = set(field_ids(dataset, name))
            paths = [file.path for file in fragment.metadata.files if ids & set(file.fields)]
            return f"column {name!r} of data file {join(dataset.uri, 'data', *paths[:1])}: {reason_of(found)}"
    return None


def _is_decoding_error(error: BaseException) -> bool:
    return is_engine_error(error) and not is_unavailable(error) and not remedy_of(error)


def live_offsets(dataset: lance.LanceDataset, fragment: FragmentFiles) -> Ranges:
    """Return the physical offsets of the rows that are not deleted; reads only the deletion file."""
    if not fragment.deletion:
        return Ranges.of(0, fragment.physical_rows)
    batches = open_fragment(dataset, fragment.id).scanner(columns=[], with_row_address=True).to_batches()
    return Ranges.union(Ranges.from_offsets(offsets_of(batch)) for batch in batches)


def consecutive_row_ids(fragment: lance.LanceFragment) -> range | None:
    """Return the ids of a fragment's physical rows if they ascend one by one; reads the manifest only."""
    from lance.fragment import RowIdSequence

    metadata: Any = fragment.metadata
    stored = None if metadata.row_id_meta is None else metadata.row_id_meta.asdict()
    inline = stored.get("Inline", []) if stored else []
    # A single segment of type range is two tags with lengths, then its start (if not 0), then its end.
    size = len(inline)
    if not 4 < size <= _MOST_BYTES_OF_A_RANGE or inline[:4] != [10, size - 2, 10, size - 4]:
        return None
    numbers = packed_numbers(bytes(inline[4:]))
    start = numbers[1] if len(numbers) == 4 else 0
    ids = range(start, start + metadata.physical_rows)
    one_range: Any = RowIdSequence(ids).to_inline_metadata()
    return ids if one_range.asdict() == stored else None


def newest_row(fragment: lance.LanceFragment) -> int | None:
    """Return the newest version that created a row of a fragment; None if the manifest does not say so."""
    metadata: Any = fragment.metadata
    stored = metadata.created_at_version_meta
    inline = None if stored is None else parse(stored.json()).get("inline")
    if not inline:
        return None
    runs = (read_parts(run) for _, run, _ in read_parts(bytes(inline)) if isinstance(run, bytes))
    versions = [value for run in runs for field, value, _ in run if field == 2 and isinstance(value, int)]
    return max(versions, default=None)


def stored_row_ids(row_ids: Offsets) -> Any:
    """Return the metadata of a new fragment whose first rows have these ids; Lance gives ids to the others."""
    from lance.fragment import RowIdSequence

    return RowIdSequence(pa.array(row_ids, pa.uint64())).to_inline_metadata() if len(row_ids) else None


def row_ids(
    dataset: lance.LanceDataset, fragment_id: int, created_by: int | None = None
) -> tuple[Offsets, RowIds]:  # fmt: skip
    """Return offsets and ids, in physical order, of a fragment's live rows, or only of those that a version created."""
    fragment = open_fragment(dataset, fragment_id)
    ids = None if created_by is not None or fragment.metadata.deletion_file else consecutive_row_ids(fragment)
    if ids is not None:
        return np.arange(len(ids), dtype=np.int64), np.arange(ids.start, ids.stop, dtype=np.uint64)
    existed = None if created_by is None else f"_row_created_at_version <= {created_by}"
    table = fragment.scanner(columns=[], filter=existed, with_row_address=True, with_row_id=True).to_table()
    return offsets_of(table), table.column("_rowid").to_numpy()


def offsets_of(rows: pa.Table | pa.RecordBatch) -> Offsets:
    """Return the physical offsets of rows that were read with row addresses: the low 32 bits of an address."""
    offsets: Offsets = rows.column("_rowaddr").to_numpy().view(np.int64) & OFFSET_BITS
    return offsets


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Turn the garbage collector off: a manifest creates millions of objects, and collections triple the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
