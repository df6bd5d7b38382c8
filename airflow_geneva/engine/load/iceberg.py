"""Tables of Iceberg as sources: pyiceberg reads them, one data file at a time, and applies deletes.

A table is pinned by its metadata file, which never changes: it names the snapshot, the schema and all files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import map_leaves
from airflow_geneva.engine.load.stores import Options, check_unused, s3_settings
from airflow_geneva.engine.masking import mask_secrets, remember_secrets
from airflow_geneva.engine.storage.places import Places, allowed_places, is_absolute
from airflow_geneva.engine.storage.secrets import secret_values
from airflow_geneva.engine.storage.uri import is_local, normalize_uri
from airflow_geneva.errors import GenevaError, InvalidInput

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.table import FileScanTask, Table

_METADATA = ".metadata.json"
_LONGEST_HINT = 1024
_S3 = {
    "access_key": "s3.access-key-id",
    "secret_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
    "region": "s3.region",
    "endpoint": "s3.endpoint",
}


class IcebergTable:
    """A table as one of its metadata files describes it.

    Args:
        properties: those of pyiceberg's file system, credentials too.
    """

    def __init__(self, table: Table, properties: Options) -> None:
        self._table = table
        self._properties = properties

    @property
    def snapshot_id(self) -> int | None:
        """The id of the current snapshot; None if there is none yet."""
        snapshot = self._table.current_snapshot()
        return None if snapshot is None else snapshot.snapshot_id

    def schema(self) -> pa.Schema:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        found = schema_to_pyarrow(self._table.schema(), include_field_ids=False)
        return pa.schema([(field.name, map_leaves(field.type, _usual)) for field in found])

    def size(self) -> tuple[int, int]:
        """Return the size of the data files, and their number."""
        return sum(task.file.file_size_in_bytes for task in self._tasks), len(self._tasks)

    def read(self, part: int, parts: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read columns of a part of the data files, in the order of their paths, without deleted rows."""
        from pyiceberg.io.pyarrow import ArrowScan

        size = -(-len(self._tasks) // parts)
        with _explaining(self._table.metadata_location, self._properties):
            scan = self._table.scan(selected_fields=tuple(names))
            arrow = ArrowScan(self._table.metadata, self._table.io, scan.projection(), scan.row_filter)
            for task in self._tasks[part * size : (part + 1) * size]:
                yield from arrow.to_record_batches([task])

    @cached_property
    def _tasks(self) -> list[FileScanTask]:
        with _explaining(self._table.metadata_location, self._properties):
            found = sorted(self._table.scan().plan_files(), key=lambda task: task.file.file_path)
            for file in (file for task in found for file in (task.file, *task.delete_files)):
                self._table.io.new_input(file.file_path)  # which checks where it lies
            return found


@lru_cache(maxsize=8)
def open_iceberg(location: str, properties: Options, places: Places) -> IcebergTable:
    """Open a table by its metadata file, or by a folder with a ``version-hint.text``.

    Args:
        properties: of the file system; the table's own are not used, because its writer chooses them.
        places: where the files may lie that the metadata names.

    Raises:
        InvalidInput: it cannot be read, or names files outside of the places.
    """
    _check_installed()
    with _explaining(location, properties, _NAME_IT):
        from pyiceberg.catalog.noop import NoopCatalog
        from pyiceberg.serializers import FromInputFile
        from pyiceberg.table import Table

        files = _files(properties, places, f"The Iceberg table {location}")
        if not location.endswith(_METADATA):
            with files.new_input(f"{location}/metadata/version-hint.text").open() as stream:
                hint = stream.read(_LONGEST_HINT).decode().strip()
            name = f"v{hint}{_METADATA}" if hint.isdecimal() else f"{hint.removesuffix(_METADATA)}{_METADATA}"
            location = f"{location}/metadata/{name}"
        metadata = FromInputFile.table_metadata(files.new_input(location))
        catalog = NoopCatalog("static-table")
        return IcebergTable(Table(("static-table", location), metadata, location, files, catalog), properties)


def _files(properties: Options, places: Places, document: str) -> FileIO:
    """Return a file system for pyiceberg that opens only files in the allowed places."""
    from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

    class Files(PyArrowFileIO):
        def new_input(self, location: str) -> PyArrowFile:
            scheme, _, path = self.parse_location(location, self.properties)
            places.check(path if scheme == "file" else location, document)
            return super().new_input(location)

    return Files(dict(properties))


def iceberg_places(location: str, properties: Options, options: Options) -> Places:
    """Return where a table may name files: its folder, the warehouse of its catalog, and the places of the job."""
    folder = normalize_uri(location)
    if folder.endswith(_METADATA):
        folder = folder.rpartition("/")[0].removesuffix("/metadata")
    warehouse = str(dict(properties).get("warehouse") or "")  # of a service, it may be a name
    named = [normalize_uri(warehouse)] if is_absolute(warehouse) and "/" in warehouse else []
    return Places(tuple(dict.fromkeys([folder, *named, *allowed_places(options)])))


def find_iceberg(name: str, options: Options) -> tuple[str, Options]:
    """Return the metadata file of a table, and the properties that open it.

    Args:
        name: the path or URI of its metadata file or its folder; or ``catalog.namespace.table``, with a catalog that
            pyiceberg's configuration names.
        options: storage options; those of S3 are used for paths. A catalog has its own properties.
    """
    _check_installed()
    if "/" in name or "." not in name or name.endswith(_METADATA):
        uri = normalize_uri(name)
        properties = iceberg_properties(uri, options)
        places = iceberg_places(uri, properties, options)
        # The cache would hide that a folder's table has changed.
        return open_iceberg.__wrapped__(uri, properties, places)._table.metadata_location, properties
    from pyiceberg.catalog import load_catalog
    from pyiceberg.io.pyarrow import PyArrowFileIO

    def load_files(properties: Mapping[str, Any] = MappingProxyType({}), location: str | None = None) -> FileIO:
        return PyArrowFileIO({**found.properties, **properties})

    catalog, _, identifier = name.partition(".")
    with _explaining(name, (), _NAME_IT):
        found = load_catalog(catalog)
        # Else the table's own properties would choose the class.
        found._load_file_io = load_files  # type: ignore[method-assign]
        table = found.load_table(identifier)
        return table.metadata_location, properties_of(table)


def properties_of(table: Table) -> Options:
    """Return the properties of a table's file system, credentials too, without those of the table's metadata.

    The user configured those of the catalog. A catalog's answer may add credentials, and no class that is imported.
    """
    given = dict(table.catalog.properties)
    answered = {
        key: value
        for key, value in table.io.properties.items()
        if key not in table.metadata.properties and not key.endswith("-impl")
    }
    return tuple(sorted({**answered, **given}.items()))


def iceberg_properties(location: str, options: Options) -> Options:
    """Return pyiceberg's properties for a file, from storage options.

    Raises:
        InvalidInput: the options have credentials that are not passed on to this kind of store.
    """
    if is_local(location):
        return ()
    if location.partition("://")[0] not in ("s3", "s3a", "s3n"):
        check_unused(location, options)
        return ()
    return tuple(sorted((_S3[name], value) for name, value in s3_settings(options).items()))


def _usual(kind: pa.DataType) -> pa.DataType:
    """Return the type that other files have for the same values."""
    if pt.is_large_string(kind):
        return pa.string()
    return pa.binary() if pt.is_large_binary(kind) else kind


def _check_installed() -> None:
    try:
        import pyiceberg  # noqa: F401
    except ImportError:
        raise InvalidInput(
            "pyiceberg reads tables of Iceberg: pip install 'airflow-geneva[iceberg]'; on executors of Spark, too."
        ) from None


_NAME_IT = (
    "Name its metadata file, its folder if that has a version-hint.text, or catalog.namespace.table, with a catalog of "
    "pyiceberg's configuration."
)
_USE_SPARK = 'A session of Spark that has its catalog can read it: format="spark".'


@contextmanager
def _explaining(name: str, properties: Options, remedy: str = _USE_SPARK) -> Iterator[None]:
    """Explain errors of pyiceberg, catalogs and stores without secrets."""
    try:
        yield
    except GenevaError:
        raise
    except Exception as error:
        hidden = {
            key.removeprefix("s3."): str(value)
            for key, value in properties
            if key not in ("type", "warehouse") and (key != "uri" or "@" in str(value))
        }
        remember_secrets(secret_values(hidden))
        text = mask_secrets(f"{type(error).__name__}: {error}").rstrip(".")
        raise InvalidInput(f"Cannot read the Iceberg table {name}: {text}. {remedy}") from None
