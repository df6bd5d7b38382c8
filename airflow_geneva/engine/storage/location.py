"""Locate and open tables, in a folder or by a catalog."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from airflow_geneva.engine.storage import catalogs
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.engine_errors import engine_errors, is_outage
from airflow_geneva.engine.storage.files import Storage, freeze_options
from airflow_geneva.engine.storage.outages import STORE_PATIENCE, wait_out, with_patience
from airflow_geneva.engine.storage.places import Places, allowed_places, check_manifest, options_of_place, with_places
from airflow_geneva.engine.storage.requests import count_requests
from airflow_geneva.engine.storage.secrets import PLACES
from airflow_geneva.engine.storage.uri import check_name, is_local, is_name, join
from airflow_geneva.errors import GenevaError, InvalidInput, NoSuchTable, StorageError

if TYPE_CHECKING:
    import lance

# On every DataReplacement commit Lance warns on standard error that the operation is unstable, and on the first write
# into a catalog that the table is new; Airflow logs that as an error. The user can do nothing about it. Lance reads the
# variable once, on import; the user's own value wins.
os.environ.setdefault(
    "LANCE_LOG", "warn,lance_table::transaction::manifest_build=error,lance::dataset::write::insert=error"
)

_EXAMPLE = 'Give a JSON object of strings, such as {"aws_region": "eu-west-1", "aws_endpoint": "https://minio:9000"}.'

_CACHE_BYTES = 128 << 20
"""Holds the manifest of a table with 100,000 fragments, which a process would else read at each opening."""


@dataclass(frozen=True)
class TableLocation:
    """A Lance table, with its storage options (credentials) as sorted pairs.

    Args:
        alone: whether the user named this table only, and not the database in which it lies.
    """

    uri: str
    name: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    alone: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", catalogs.of_table(self.options, self.name))

    def to_document(self) -> list[Any]:
        """Return it, with its credentials, for a process that this one starts."""
        return [self.uri, self.name, self.options, self.alone]

    @staticmethod
    def of_document(document: list[Any]) -> TableLocation:
        uri, name, options, alone = document
        return TableLocation(uri, name, freeze_options(dict(options)), alone)

    @property
    def in_catalog(self) -> bool:
        return catalogs.catalog_uri(self.options) is not None

    @property
    def checkpoints(self) -> Storage:
        return Storage(join(self.uri, "_checkpoints"), self.options)

    @property
    def limits(self) -> Storage:
        """The folder that stores the limits of its database; in a catalog, credentials are for one table only."""
        if self.in_catalog:
            return self.checkpoints.folder("limits")
        return Storage(join(self.database_uri, "_geneva", "limits"), self.options)

    @property
    def database_uri(self) -> str:
        """The folder of its database, or `namespace://IMPL/ADDRESS` of its catalog."""
        return catalogs.catalog_uri(self.options) or self.uri.rpartition("/")[0]

    @cached_property
    def places(self) -> Places:
        """What the table may name: its database, what a catalog that lists a folder names, and the allowed places."""
        own = [self.uri if self.in_catalog or self.alone else self.database_uri]
        listed = catalogs.folder_of(self.options) if self.in_catalog else None
        return Places(tuple(dict.fromkeys([*own, *([listed] if listed else []), *allowed_places(self.options)])))

    def options_at(self, uri: str) -> tuple[tuple[str, str], ...]:
        """Return the storage options for a file in one of its places: those of the place, or its own."""
        own = tuple((name, value) for name, value in self.options if not name.startswith("geneva_"))
        return own if (found := self.options_of_place(uri)) is None else found

    def options_of_place(self, uri: str) -> tuple[tuple[str, str], ...] | None:
        """Return the storage options that the user gave for the place of a file; None: none."""
        return options_of_place(self.options, uri)

    @property
    def source_options(self) -> tuple[tuple[str, str], ...]:
        """The storage options to open a source with that is loaded into the table: its places are the table's, too."""
        return with_places(self.options, self.places.roots)

    @property
    def access(self) -> dict[str, Any]:
        """Arguments of pylance that open the table or commit to it; what is opened with them knows its places."""
        access = catalogs.commit_access(self.options)
        return {**access, "storage_options": {**(access["storage_options"] or {}), PLACES: self.places.to_json()}}

    def is_named(self) -> bool:
        """Whether the catalog still says that the table lies here; asks it. A table in a folder needs no catalog."""
        if not self.in_catalog:
            return True
        try:
            return catalogs.describe(self.options, anew=True).uri == self.uri
        except NoSuchTable:
            return False

    def where_committed(self) -> TableLocation:
        """Return where commits go: a catalog that manages versions records them in the table that has the name now."""
        now = catalogs.describe(self.options) if self.in_catalog else None
        return replace(self, uri=now.uri) if now is not None and now.managed_versioning else self

    def patient(self, seconds: int = STORE_PATIENCE) -> TableLocation:
        """Return this location with a patience (maximum wait during an outage of its store), unless it has one."""
        return replace(self, options=with_patience(self.uri, self.options, seconds))

    def exists(self) -> bool:
        """Whether the table has a version; a process that was killed while creating it leaves only files."""
        return bool(Storage(self.uri, self.options).list_folder("_versions")[1])

    def open(self, version: int | None = None) -> lance.LanceDataset:
        """Open the newest version, or the given one.

        Raises:
            InvalidInput: the table or version does not exist, or its manifest names a folder outside of its places.
            StorageError: the store does not respond.
        """
        import lance

        def closed(error: BaseException) -> GenevaError:
            what = f"Table {self.name!r}" if version is None else f"Version {version} of table {self.name!r}"
            if is_outage(error):
                return StorageError(f"{what} cannot be opened, because {self.uri} does not answer: {error}.")
            return InvalidInput(
                f"{what} cannot be opened at {self.uri}: {error}. Check the name, the location and the credentials"
                + ("." if version is None else "; a version that was cleaned up cannot be opened.")
            )

        if Storage(self.uri).is_linked(self.uri):
            raise closed(OSError("it is a symbolic link, which is not followed"))
        with engine_errors(closed):
            found = wait_out(
                self.uri,
                self.options,
                lambda: lance.LanceDataset(self.uri, version, session=_session(os.getpid()), **self.access),
            )
        return check_manifest(found)


class DatabaseLocation(Protocol):
    """Where the tables of a database are found, as a :class:`airflow_geneva.Database` says it."""

    @property
    def uri(self) -> str: ...

    @property
    def options(self) -> tuple[tuple[str, str], ...]: ...


def locate(database_uri: str, name: str, options: tuple[tuple[str, str], ...]) -> TableLocation:
    """Return the location of a table; in a folder it may not exist.

    Raises:
        InvalidInput: the name is not valid, or a catalog has no such table (`NoSuchTable`).
    """
    check_name(name, "table")
    if catalogs.catalog_uri(options) is None:
        return TableLocation(join(database_uri, f"{name}.lance"), name, options)
    return TableLocation(catalogs.describe(catalogs.of_table(options, name), anew=True).uri, name, options)


def locate_or_none(database_uri: str, name: str, options: tuple[tuple[str, str], ...]) -> TableLocation | None:
    """Return the location of a table; None if a catalog does not name it."""
    try:
        return locate(database_uri, name, options)
    except NoSuchTable:
        return None


@contextmanager
def locate_new(database_uri: str, name: str, options: tuple[tuple[str, str], ...]) -> Iterator[TableLocation]:
    """Yield where a table can be written; a catalog names a new one first, and forgets it if the block fails."""
    location = locate_or_none(database_uri, name, options)
    if location is not None:
        yield location
        return
    own = catalogs.of_table(options, name)
    place = TableLocation(catalogs.declare(own).uri, name, own)
    try:
        yield place
    except BaseException:
        with suppress(GenevaError):
            catalogs.forget(own)
        raise


def table_names(database_uri: str, options: tuple[tuple[str, str], ...], namespace: Sequence[str] = ()) -> list[str]:
    """Return the sorted names of a database's tables; folders without a valid table name are left out."""
    if catalogs.catalog_uri(options) is not None:
        return catalogs.names_in_catalog(options, list(namespace))
    folders, _ = Storage(database_uri, options).list_folder()
    tables = [name for name in folders if name.endswith(".lance")]
    if is_local(database_uri):
        # A process that was killed while creating a table leaves a folder without a version.
        tables = [name for name in tables if os.path.isdir(join(database_uri, name, "_versions"))]
    return [name for name in (folder.removesuffix(".lance") for folder in tables) if is_name(name)]


@functools.cache
def _session(_pid: int) -> Any:
    """Return this process's Lance session, whose caches avoid reading an unchanged manifest again."""
    import lance

    count_requests()
    made: Any = lance
    return made.Session(metadata_cache_size_bytes=_CACHE_BYTES)


def read_storage_options(given: Any) -> dict[str, str]:
    """Parse storage options, a JSON object or its text, as strings; error messages contain no values."""
    if given is None or given == "":
        return {}
    found = given
    if isinstance(given, str):
        try:
            found = parse(given)
        except ValueError:
            raise InvalidInput(f"storage_options is text, but not JSON. {_EXAMPLE}") from None
    if not isinstance(found, Mapping):
        raise InvalidInput(f"storage_options is of type {type(found).__name__}. {_EXAMPLE}")
    return {name: _option_text(name, value) for name, value in found.items() if value is not None}


def _option_text(name: Any, value: Any) -> str:
    if not isinstance(name, str):
        raise InvalidInput(f"storage_options has a key of type {type(name).__name__}. {_EXAMPLE}")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise InvalidInput(f"The storage option {name!r} is of type {type(value).__name__}. {_EXAMPLE}")
