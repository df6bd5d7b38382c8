"""Where values to load come from: files, a table, or rows in memory; read in parts, each in a fixed order."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.fs as pfs
import pyarrow.parquet as pq

from airflow_geneva.engine.apply.reader import ReadSize, joint_width, read_rows
from airflow_geneva.engine.lance_io.fragments import columns_of, live_offsets
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.pylance_internals import written_at
from airflow_geneva.engine.lance_io.rows import as_rows
from airflow_geneva.engine.lance_io.task_memory import RowsPerBudget, batch_bytes, task_memory_bytes
from airflow_geneva.engine.load.iceberg import (
    IcebergTable,
    find_iceberg,
    iceberg_places,
    iceberg_properties,
    open_iceberg,
    properties_of,
)
from airflow_geneva.engine.load.parsing import (
    csv_names,
    guess_csv,
    guess_json,
    incomplete,
    json_names,
    parsed_type,
    read_csv,
    read_json,
)
from airflow_geneva.engine.load.stores import Options, file_system, own_options
from airflow_geneva.engine.load.texts import CheckedText
from airflow_geneva.engine.runtime import uuid
from airflow_geneva.engine.storage.catalogs import catalog_uri
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.engine_errors import EngineError
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.places import with_places
from airflow_geneva.engine.storage.uri import is_local, normalize_uri, sha256
from airflow_geneva.engine.views.definition import IS_SET, is_view, visible_columns
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

FORMATS = ("parquet", "csv", "json", "lance", "iceberg", "spark")
_TEXTS = ("csv", "json")
_EXTENSIONS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json",
    ".lance": "lance",
}  # fmt: skip
_BATCH_ROWS = 16_384
_PAGES = 4 << 20
"""Bytes of a column of a Parquet file to read at once."""
_TABLE_PARTS = 64
PART_BITS = 40
"""Rows of a source are numbered: the number of the part, then that of the row in it, in this many bits."""


@dataclass(frozen=True)
class LoadSource:
    """A source of rows, without its credentials.

    Args:
        format: one of `FORMATS`, or ``memory``.
        paths: the files, or the one table's URI: of an Iceberg table, that of its metadata file; of a table of Spark,
            its name; of a DataFrame, none.
        table: the name of a Lance table that lies in the catalog of the table to load into.
        version: of a Lance table; the snapshot's id of an Iceberg table.
        state: sizes and times of the files, by which a later delivery differs; the number of fragments of a Lance
            table, and the time of its version, by which a table made again differs; size and number of the files of an
            Iceberg table. Spark has no such thing, so each plan differs.
        places: of a table that was given as an object, where it may name files, beside the places of the job.
        rows: rows in memory, which only this process has.
        frame: the DataFrame, and its `columns` as Arrow has them, in a process with a session of Spark.
        properties: how pyiceberg opens the table in this process, credentials too.
    """

    format: str
    paths: tuple[str, ...] = ()
    version: int | None = None
    state: tuple[str, ...] = ()
    table: str | None = None
    places: tuple[str, ...] = ()
    rows: pa.Table | None = field(default=None, repr=False, compare=False)
    frame: Any = field(default=None, repr=False, compare=False)
    columns: pa.Schema | None = field(default=None, repr=False, compare=False)
    properties: Options | None = field(default=None, repr=False, compare=False)

    @property
    def on_spark(self) -> bool:
        """Whether only Spark has its rows."""
        return self.format == "spark"

    @property
    def is_text(self) -> bool:
        """Whether its columns have no types of their own, so `typed` gives them some."""
        return self.format in _TEXTS

    @property
    def name(self) -> str:
        """A short name for messages."""
        if self.format == "memory":
            return "the rows that were given"
        if not self.paths:
            return "the DataFrame"
        more = f" and {len(self.paths) - 1:,} more files" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}"

    @property
    def size_bytes(self) -> int:
        """The size of its files; 0 if it is unknown."""
        return sum(int(one.partition(" ")[0]) for one in self.state if " " in one)

    def to_json(self) -> str:
        values = {"format": self.format, "paths": self.paths, "version": self.version, "state": self.state}
        values |= {} if self.table is None else {"table": self.table}
        values |= {"places": self.places} if self.places else {}
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> LoadSource:
        values = parse(text)
        paths, state = tuple(values["paths"]), tuple(values["state"])
        places = tuple(values.get("places", ()))
        return LoadSource(values["format"], paths, values["version"], state, values.get("table"), places)

    @property
    def in_memory(self) -> bool:
        """Whether this process has more of it than the JSON text."""
        return not self.paths or bool(self.properties)

    @property
    def fingerprint(self) -> str:
        """A hash that differs if the values may differ."""
        if self.rows is not None and not self.state:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self.rows.schema) as writer:
                writer.write_table(self.rows)
            return sha256(sink.getvalue())
        return sha256(self.to_json().encode())

    def schema(self, options: Options) -> pa.Schema:
        """Return the names and types of its columns; all columns of a text are strings.

        Raises:
            InvalidInput: it cannot be read.
        """
        if self.rows is not None:
            return self.rows.schema
        if self.columns is not None:
            return self.columns
        if self.format == "lance":
            found = self._table(options).schema
            return pa.schema([found.field(name) for name in visible_columns(found)])
        if self.format == "iceberg":
            return self._iceberg(options).schema()
        if self.on_spark:
            raise InvalidInput(
                f'Only Spark has the rows of {self.name}. Use runner="spark", or write them to files, and load these.'
            )
        with _reading(self.name):
            if self.is_text:
                with self._text(0, options) as text:
                    names = csv_names(text) if self.format == "csv" else json_names(text)
                    return pa.schema([(name, pa.string()) for name in names])
            return self._files(self.paths[:1], options).schema

    def typed(self, found: pa.Schema, table: pa.Schema, names: Sequence[str], options: Options) -> pa.Schema:
        """Return columns of a schema, those of a text with types that their texts are read as.

        Columns that the table has are read for their types there. For all others, the whole text is read.

        Args:
            found: what `schema` returned.

        Raises:
            InvalidInput: no type holds all values of a column.
        """
        if not self.is_text:
            return pa.schema([found.field(name) for name in names])
        types = {name: parsed_type(table.field(name).type, self.format) for name in names if name in table.names}
        if new := [name for name in names if name not in types]:
            with _reading(self.name):
                types |= (guess_csv if self.format == "csv" else guess_json)(self._texts(options), new)
        return pa.schema([(name, types[name]) for name in names])

    def check_unchanged(self, options: Options) -> None:
        """Raise `InvalidInput` if files are not those that were planned; a table is read at its version."""
        if self.format == "lance":
            if self.state[1:] and self.state[1] != str(written_at(self._table(options))):
                raise self._changed(self.paths[0])
            return
        if self.format in ("iceberg", "spark", "memory"):
            return
        files, names = file_system(self.paths[0], options)
        with _reading(self.name):
            now = files.get_file_info([names(path) for path in self.paths])
        for path, then, one in zip(self.paths, self.state, now, strict=True):
            if one.type != pfs.FileType.File or f"{one.size} {one.mtime_ns}" != then:
                raise self._changed(path)

    @staticmethod
    def _changed(path: str) -> InvalidInput:
        return InvalidInput(
            f"{path!r} has changed since the load was planned. Plan it again; in Airflow, clear the plan task with its "
            "downstream tasks."
        )

    def parts(self) -> int:
        """Return the number of parts, which can be read apart from each other."""
        if self.format in ("lance", "iceberg"):
            return max(1, min(int(self.state[0].split()[-1]), _TABLE_PARTS))
        return 1 if self.format == "memory" else len(self.paths)

    def read(self, part: int, schema: pa.Schema, options: Options) -> Iterator[pa.RecordBatch]:
        """Read columns of a part in their order; `schema` has their names, and their types in the source."""
        names = schema.names
        with _reading(self.name):
            if self.rows is not None:
                yield from self.rows.select(names).to_batches(_BATCH_ROWS)
            elif self.format == "lance":
                yield from _read_table(self._table(options), part, self.parts(), names)
            elif self.format == "iceberg":
                for batch in self._iceberg(options).read(part, self.parts(), names):
                    for start in range(0, batch.num_rows, _BATCH_ROWS):
                        yield batch.slice(start, _BATCH_ROWS)
            else:
                path = self.paths[part]
                if self.format == "parquet":
                    files, names_of = file_system(path, options)
                    with (
                        files.open_input_file(names_of(path)) as stream,
                        pq.ParquetFile(stream, pre_buffer=False, buffer_size=_PAGES) as file,
                        _int96_as_micros(files, names_of(path), file, schema) as micros,
                    ):
                        yield from _read_parquet(file, micros, path, schema)
                else:
                    with self._text(part, options) as text:
                        yield from (read_csv if self.format == "csv" else read_json)(text, schema)

    def _table(self, options: Options) -> Any:
        return _lance_at(self.paths[0], self.table, with_places(options, self.places)).open(self.version)

    def _iceberg(self, options: Options) -> IcebergTable:
        properties = iceberg_properties(self.paths[0], options) if self.properties is None else self.properties
        return open_iceberg(self.paths[0], properties, iceberg_places(self.paths[0], properties, options))

    def _files(self, paths: Sequence[str], options: Options) -> pds.Dataset:
        files, names = file_system(paths[0], options)
        return pds.dataset([names(path) for path in paths], format=self.format, filesystem=files)

    @contextmanager
    def _text(self, part: int, options: Options) -> Iterator[CheckedText]:
        path = self.paths[part]
        files, names = file_system(path, options)
        with files.open_input_stream(names(path)) as stream:
            yield CheckedText(stream, path, self.format)

    def _texts(self, options: Options) -> Iterator[CheckedText]:
        for part in range(len(self.paths)):
            with self._text(part, options) as text:
                yield text


def _read_table(table: lance.LanceDataset, part: int, parts: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read a part of the fragments of a Lance table; of a view the rows that were computed."""
    fragments = list(read_manifest(table, columns_of(table, names, (), None)).values())
    share = -(-len(fragments) // parts)
    shown = IS_SET if is_view(table.schema.metadata) else None
    size = ReadSize.of(table, names, batch_bytes(task_memory_bytes()))
    for files in fragments[part * share : (part + 1) * share]:
        window = (0, files.physical_rows)
        for rows in read_rows(table, files, live_offsets(table, files), window, names, shown, size):
            yield rows.columns if rows.selected is None else rows.columns.filter(pa.array(rows.selected))


def _read_parquet(
    file: pq.ParquetFile, micros: pq.ParquetFile | None, path: str, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Read a file page by page, in batches that fit into the budget; datasets of Arrow hold whole row groups.

    Args:
        micros: the file with its times of type INT96 in microseconds, if it has any.
    """
    _check_complete(path, file.schema_arrow.names, schema.names)
    old = [] if micros is None else _int96_names(file, schema)
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        fitting = RowsPerBudget(batch_bytes(task_memory_bytes()), joint_width(schema.types))
        fitting.record(group.num_rows, group.total_byte_size)
        rows = min(fitting.careful_rows, _BATCH_ROWS)
        right = micros.iter_batches(rows, [number], old, use_threads=False) if micros is not None else repeat(None)
        for batch, times in zip(
            file.iter_batches(rows, [number], schema.names, use_threads=False), right, strict=False
        ):
            for name in old:
                _check_times(path, name, batch.column(name), times.column(name))
            columns = [batch.column(field.name).cast(field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


@contextmanager
def _int96_as_micros(
    files: pfs.FileSystem, name: str, file: pq.ParquetFile, schema: pa.Schema
) -> Iterator[pq.ParquetFile | None]:
    """Open a file again that has times of type INT96, which Arrow reads in nanoseconds and wraps around unseen."""
    if not _int96_names(file, schema):
        yield None
        return
    with (
        files.open_input_file(name) as stream,
        pq.ParquetFile(stream, pre_buffer=False, buffer_size=_PAGES, coerce_int96_timestamp_unit="us") as micros,
    ):
        yield micros


def _int96_names(file: pq.ParquetFile, schema: pa.Schema) -> list[str]:
    stored = [file.schema.column(at) for at in range(len(file.schema))]
    paths = [one.path for one in stored if one.physical_type == "INT96"]
    return [name for name in schema.names if any(path == name or path.startswith(f"{name}.") for path in paths)]


def _check_times(path: str, name: str, nanos: pa.Array, micros: pa.Array) -> None:
    if not nanos.cast(micros.type, safe=False).equals(micros):
        raise InvalidInput(
            f"Column {name!r} of {path} has times of Parquet's type INT96 before 1677-09-21 or after 2262-04-11, which "
            "do not fit into nanoseconds. Write the column as TIMESTAMP_MICROS (Spark: "
            "spark.sql.parquet.outputTimestampType)."
        )


def _check_complete(path: str, there: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a file without a column that others have: Arrow would read NULL, which would replace values."""
    if missing := [name for name in names if name not in there]:
        raise incomplete(path, missing[0])


def find_source(text: str) -> LoadSource:
    """Return the source of a planned load from its JSON text.

    Raises:
        InvalidInput: its rows are in the memory of the process that planned the load.
    """
    source = LoadSource.from_json(text)
    if not source.paths:
        what = "The DataFrame was" if source.on_spark else "The rows to load were"
        raise InvalidInput(
            f"{what} in the memory of the process that planned the load. Write them to a file, and load that."
        )
    return source


class _reading:
    """Explain errors of Arrow and of stores about a source."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (pa.ArrowException, OSError, EngineError)):
            raise InvalidInput(
                f"Cannot read {self.name}: {error}. Check the files, their format and access."
            ) from error


def open_source(given: Any, format: str | None, options: Options) -> LoadSource:
    """Return a source, with its files listed.

    Args:
        given: a path, a glob, a folder or a URI, or several; a table or view of Lance; a table of Iceberg; a DataFrame
            or the name of a table of Spark; or rows in memory.
        format: one of `FORMATS`; None: by the extension of the first file.

    Raises:
        InvalidInput: there is nothing there, or its format is unknown.
    """
    if format is not None and format not in FORMATS:
        raise InvalidInput(
            f"format={format!r} is unknown. Use one of {', '.join(map(repr, FORMATS))}, or leave it out."
        )
    location = getattr(given, "location", None)
    if isinstance(location, TableLocation):
        beside = location.in_catalog and catalog_uri(location.options) == catalog_uri(options)
        found = _of_dataset(location.uri, location.open(), location.name if beside else None)
        return replace(found, places=location.places.roots)
    if _is_a("pyspark.sql", "DataFrame", given):
        return LoadSource("spark", state=(uuid.uuid4().hex,), frame=given)
    if _is_a("pyiceberg.table", "Table", given):
        return _of_iceberg(given.metadata_location, properties_of(given), options)
    if format in ("iceberg", "spark") and not isinstance(given, (str, os.PathLike)):
        raise InvalidInput(
            f"format={format!r} needs the name of one table as the source, not a {type(given).__name__}."
        )
    if format == "spark":
        return LoadSource("spark", (os.fspath(given),), state=(uuid.uuid4().hex,))
    if format == "iceberg":
        return _of_iceberg(*find_iceberg(os.fspath(given), options), options)
    if isinstance(given, (str, os.PathLike)) or _are_paths(given):
        places = [given] if isinstance(given, (str, os.PathLike)) else list(given)
        return _of_paths([os.fspath(place) for place in places], format, options)
    if hasattr(given, "to_table") and hasattr(given, "uri") and hasattr(given, "version"):
        return _of_dataset(normalize_uri(given.uri), given)
    rows = as_rows(given, None)
    table = rows if isinstance(rows, pa.Table) else rows.read_all()
    found = LoadSource("memory", rows=table)
    return replace(found, state=(found.fingerprint,))


def _is_a(module: str, name: str, given: Any) -> bool:
    """Whether an object is of a class of an optional package, which is loaded then."""
    return module in sys.modules and isinstance(given, getattr(sys.modules[module], name))


def _of_iceberg(location: str, properties: Options, options: Options) -> LoadSource:
    table = open_iceberg(location, properties, iceberg_places(location, properties, options))
    size, files = table.size()
    return LoadSource("iceberg", (location,), table.snapshot_id, (f"{size} {files}",), properties=properties)


def _lance_at(uri: str, name: str | None, options: Options) -> TableLocation:
    """Return the location of a Lance table; a table without a name in the catalog is opened by its path."""
    if name is None and catalog_uri(options) is not None:
        options = tuple(sorted(own_options(options).items()))
    return TableLocation(uri, uri.rpartition("/")[2] if name is None else name, options, alone=name is None)


def _of_dataset(uri: str, dataset: lance.LanceDataset, table: str | None = None) -> LoadSource:
    state = str(len(dataset.get_fragments())), str(written_at(dataset))
    return LoadSource("lance", (uri,), int(dataset.version), state, table)


def _are_paths(given: Any) -> bool:
    return (
        isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, (str, os.PathLike)) for one in given)
    )


def _of_paths(places: Sequence[str], format: str | None, options: Options) -> LoadSource:
    if len(places) == 1 and _format_of(places[0], format) == "lance":
        uri = normalize_uri(places[0])
        return _of_dataset(uri, _lance_at(uri, None, options).open())
    found: dict[str, str] = {}
    for place in places:
        listed = dict(_list(place, format, options))
        if not listed:
            raise InvalidInput(
                f"There is no file at {place!r}. Give a path, a glob such as 'values/*.parquet', or a folder."
            )
        found |= listed
    paths = sorted(found)
    kind = _format_of(paths[0], format)
    if kind is None or kind == "lance":
        raise InvalidInput(
            f"The format of {paths[0]!r} is not known by its extension. Say it: format={FORMATS[0]!r}, or another of "
            f"{', '.join(FORMATS[1:])}."
        )
    if others := sorted({path for path in paths if _format_of(path, format) != kind}):
        raise InvalidInput(f"{paths[0]!r} is {kind}, and {others[0]!r} is not. Load each format on its own.")
    if kind in _TEXTS:  # Spark writes a file without a byte for a partition without a row
        paths = [path for path in paths if not found[path].startswith("0 ")] or paths
    return LoadSource(kind, tuple(paths), None, tuple(found[path] for path in paths))


def _format_of(path: str, format: str | None) -> str | None:
    return format or _EXTENSIONS.get(os.path.splitext(path.rstrip("/").removesuffix(".gz"))[1].lower())


def _list(place: str, format: str | None, options: Options) -> Iterator[tuple[str, str]]:
    """Yield the files at a place, each with its size and time."""
    uri = place if "://" not in place else normalize_uri(place)
    if is_local(uri):
        local = os.path.realpath(os.path.expanduser(uri.removeprefix("file://")))
        named = os.path.exists(local) or not glob.has_magic(local)
        matching = [local] if named else sorted(glob.glob(local, recursive=True))
        for path in matching:
            if os.path.isdir(path):
                inside = (os.path.join(top, name) for top, _, names in os.walk(path) for name in names)
                files = [one for one in inside if _is_data(one[len(path) :]) and _format_of(one, format)]
            else:
                files = [path] if os.path.exists(path) else []
            for one in files:
                about = os.stat(one)
                yield one, f"{about.st_size} {about.st_mtime_ns}"
        return
    bucket = "/".join(uri.split("/")[:3])
    with _reading(uri):
        files, names = file_system(uri, options)
        pattern = names(uri)
        root = pattern
        if glob.has_magic(pattern):
            root = pattern[: next(at for at, letter in enumerate(pattern) if letter in "*?[")].rpartition("/")[0]
        about = files.get_file_info(root)
        if about.type == pfs.FileType.File:
            listed = [about]
        else:
            listed = files.get_file_info(pfs.FileSelector(root, recursive=True, allow_not_found=True))
        for one in listed:
            fits = fnmatch.fnmatchcase(one.path, pattern) if glob.has_magic(pattern) else True
            fits = fits and _is_data(one.path[len(root) :])
            if one.type == pfs.FileType.File and fits and _format_of(one.path, format):
                yield f"{bucket}/{one.path.partition('/')[2]}", f"{one.size} {one.mtime_ns}"


def _is_data(path: str) -> bool:
    """Whether a path in a folder is not hidden, as `_SUCCESS` and temporary files are."""
    return not any(part.startswith(("_", ".")) for part in path.split("/") if part)
