"""Tables that a catalog names: where one lies, and with which credentials it is opened.

A catalog is a namespace in Lance's words. Its connection is a storage option of this package, so that it reaches
Spark's driver and executors with the other options, and no plan, log or file. pylance asks the catalog for credentials
again before they expire, in everything that is opened with `pylance_access`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow_geneva.engine.masking import mask_secrets
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.engine_errors import describe_store_error
from airflow_geneva.engine.storage.outages import StorageOptions, pylance_options, wait_out
from airflow_geneva.engine.storage.refusals import is_access_refused
from airflow_geneva.engine.storage.secrets import (
    CATALOG,
    OTHERS,
    PLACE_OPTIONS,
    PLACES,
    TABLE,
    plain_name,
    remember_options,
)
from airflow_geneva.engine.storage.uri import normalize_uri
from airflow_geneva.errors import GenevaError, InvalidInput, NoSuchTable, StorageError

if TYPE_CHECKING:
    from lance_namespace import LanceNamespace

SCHEME = "namespace://"
"""The URI of a catalog is `namespace://IMPL/ADDRESS`."""
_EXPIRES = "expires_at_millis"
_OFFSET = "refresh_offset_millis"
_EARLIER = 60.0
"""pylance asks for new credentials this many seconds before the old ones expire, unless an option says otherwise."""
_ADDRESSES = ("uri", "endpoint", "root", "region")
"""Properties that say where the catalog is, also with its kind before them, as in `unity.endpoint`."""
_OWN = (CATALOG, TABLE, OTHERS, PLACES, PLACE_OPTIONS)
"""Storage options of this package, which pylance does not get."""
_NO_SUCH = re.compile(r"NotFound|does not exist", re.IGNORECASE)
_EXAMPLE = 'connect_namespace("rest", {"uri": "https://catalog.example"})'


@dataclass(frozen=True)
class TableInCatalog:
    """The catalog's answer about a table; `options` are storage options of pylance, with credentials."""

    uri: str
    options: tuple[tuple[str, str], ...] = field(repr=False)
    managed_versioning: bool

    @property
    def is_current(self) -> bool:
        """Whether its credentials are good for longer than pylance would use them."""
        found = dict(self.options)
        return _EXPIRES not in found or int(found[_EXPIRES]) - int(found[_OFFSET]) > 1000 * time.time()


def catalog_option(impl: Any, properties: Any) -> str:
    """Return the value of the storage option for a catalog.

    Raises:
        InvalidInput: it does not map text to text, or an address holds a password.
    """
    if not isinstance(impl, str) or not impl:
        raise InvalidInput(f"impl={impl!r:.100} names no kind of catalog. Give one such as 'rest': {_EXAMPLE}.")
    if not isinstance(properties, Mapping):
        raise InvalidInput(f"The properties of a catalog are given by name, not as a {type(properties).__name__}.")
    if wrong := [name for name, value in properties.items() if not (isinstance(name, str) and isinstance(value, str))]:
        raise InvalidInput(f"The properties of a catalog are text, which {wrong} are not: quote them.")
    for name, value in properties.items():
        if plain_name(name) in _ADDRESSES and "://" in value:
            try:
                normalize_uri(value)
            except InvalidInput as error:
                raise InvalidInput(f"The property {name!r} of the catalog is not valid. {error}") from None
    return json.dumps({"impl": impl, "properties": dict(properties)}, sort_keys=True)


def of_table(options: StorageOptions, name: str) -> StorageOptions:
    """Return storage options for a table; a catalog answers for each table with other credentials."""
    found = dict(options)
    return tuple(sorted({**found, TABLE: name}.items())) if CATALOG in found else options


def catalog_uri(options: StorageOptions) -> str | None:
    """Return `namespace://IMPL/ADDRESS`, which names a catalog in plans and views without its credentials."""
    found = dict(options).get(CATALOG)
    if found is None:
        return None
    impl, properties = _parse(found)
    # Headers, and settings of the tables' store, are no place of the catalog.
    own = [name for name in properties if not name.startswith(("headers.", "storage."))]
    given = {plain_name(name): properties[name] for name in own}
    place = next((given[name] for name in _ADDRESSES if name in given), "")
    return f"{SCHEME}{impl}/{place}".rstrip("/")


def folder_of(options: StorageOptions) -> str | None:
    """Return the folder that a catalog lists, if it is one, as the user named it."""
    impl, properties = _parse(dict(options)[CATALOG])
    return normalize_uri(properties["root"]) if impl == "dir" and properties.get("root") else None


def with_sources(options: StorageOptions, sources: Iterable[StorageOptions]) -> StorageOptions:
    """Add the catalogs of other databases to the storage options of a view, so that a source in them can be opened."""
    found = dict(options)
    others = dict(_others(options))
    for source in sources:
        place = catalog_uri(source)
        if place is not None and place != catalog_uri(options):
            others[place] = dict(source)[CATALOG]
    return tuple(sorted({**found, OTHERS: json.dumps(others, sort_keys=True)}.items())) if others else options


def options_in(options: StorageOptions, database_uri: str) -> StorageOptions:
    """Return the storage options with which a source in a database is opened, from those of a view of it.

    Raises:
        InvalidInput: it is in another catalog, whose properties are not known.
    """
    if database_uri == (catalog_uri(options) or ""):
        return options
    found = {name: value for name, value in options if name not in (CATALOG, TABLE)}
    if database_uri.startswith(SCHEME):
        others = _others(options)
        if database_uri not in others:
            raise InvalidInput(
                f"The source is in another catalog, {database_uri!r:.300}, whose properties are not known. Give it: "
                "db.open_view(name, sources=[connect_namespace(...)]), in Airflow as source_namespaces in the extra "
                "of the connection."
            )
        found[CATALOG] = others[database_uri]
    return tuple(sorted(found.items()))


def _others(options: StorageOptions) -> dict[str, str]:
    found: dict[str, str] = parse(dict(options).get(OTHERS) or "{}")
    return found


def pylance_access(options: StorageOptions, patient: bool = True) -> dict[str, Any]:
    """Return arguments of pylance that open a table or its files; in a catalog, they let pylance renew credentials.

    Args:
        patient: let pylance's own retries last as long as the patience.
    """
    remember_options(options)  # here, because processes that unpickle options do not freeze them
    given = dict(options) if not patient else pylance_options(options) or {}
    kept = {name: value for name, value in given.items() if name not in _OWN}
    if CATALOG not in dict(options):
        return {"storage_options": kept or None}
    known = {**kept, **dict(describe(options).options)}
    return {"storage_options": known or None, "namespace_client": client(options), "table_id": table_id(options)}


def commit_access(options: StorageOptions) -> dict[str, Any]:
    """Return arguments of pylance for a dataset or a commit, which the catalog may have to record."""
    access = pylance_access(options)
    if "table_id" in access:
        access["namespace_client_managed_versioning"] = describe(options).managed_versioning
    return access


def options_for(catalog: Any, table: list[str]) -> StorageOptions:
    """Return the storage options for a table that was opened with a client of this process."""
    options = next(options for (options, _), known in tuple(_clients.items()) if known is catalog)
    return of_table(options, ".".join(table))


def table_id(options: StorageOptions) -> list[str]:
    return dict(options)[TABLE].split(".")


def client(options: StorageOptions) -> LanceNamespace:
    """Return this process's client of a catalog.

    Raises:
        InvalidInput: there is no such kind of catalog, or it needs other properties.
    """
    key = tuple(pair for pair in options if pair[0] != TABLE), os.getpid()
    return _clients.once(key, lambda: _connect(dict(options)[CATALOG]))


_clients: ProcessMemo[tuple[StorageOptions, int], LanceNamespace] = ProcessMemo()
"""The clients by options and process id. They are the process's: pylance's datasets keep them, for `options_for`."""
_described: ProcessMemo[tuple[StorageOptions, int], TableInCatalog] = ProcessMemo(4096)
"""What catalogs said until the credentials in it expire; all that opens a table in this process would ask again."""


def describe(options: StorageOptions, anew: bool = False) -> TableInCatalog:
    """Return what the catalog says about a table; asks again when its credentials expire.

    Args:
        anew: ask now, because the table may have been moved.

    Raises:
        NoSuchTable: the catalog has no such table.
        StorageError: the catalog does not answer, or refuses.
    """
    key = options, os.getpid()
    found = None if anew else _described.get(key)
    if found is None or not found.is_current:
        from lance_namespace import DescribeTableRequest

        name = dict(options)[TABLE]
        request = DescribeTableRequest(id=table_id(options))
        with asking(options, f"table {name!r}"):
            answer = ask(options, lambda catalog: catalog.describe_table(request))
            found = _read(name, answer)
        _described[key] = found
    return found


def declare(options: StorageOptions) -> TableInCatalog:
    """Name a new table in the catalog, and return where its files are to be written."""
    from lance_namespace import DeclareTableRequest

    name = dict(options)[TABLE]
    with asking(options, f"table {name!r}"):
        answer = client(options).declare_table(DeclareTableRequest(id=table_id(options)))
        return _read(name, answer)


def forget(options: StorageOptions) -> None:
    """Remove the name of a table from the catalog, and leave its files."""
    from lance_namespace import DeregisterTableRequest

    with asking(options, f"table {dict(options)[TABLE]!r}"):
        client(options).deregister_table(DeregisterTableRequest(id=table_id(options)))


def drop(options: StorageOptions) -> None:
    """Let the catalog remove a table with its files; if it only knows names, the files are deleted here."""
    import lance
    from lance_namespace import DropTableRequest, errors

    with asking(options, f"table {dict(options)[TABLE]!r}"):
        try:
            client(options).drop_table(DropTableRequest(id=table_id(options)))
            return
        except (errors.UnsupportedOperationError, NotImplementedError):
            place, access = describe(options, anew=True).uri, pylance_access(options)
    forget(options)
    lance.LanceDataset.drop(place, storage_options=access["storage_options"])


def _read(name: str, answer: Any) -> TableInCatalog:
    if not answer.location:
        raise InvalidInput(f"The catalog does not say where table {name!r} lies, so it cannot be opened.")
    options = dict(answer.storage_options or {})
    if _EXPIRES in options and _OFFSET not in options:
        # Else pylance would ask before each request for credentials that are good for less than a minute.
        good = int(options[_EXPIRES]) / 1000 - time.time()
        options[_OFFSET] = str(int(1000 * max(0.0, min(_EARLIER, good / 3))))
    vended = tuple(sorted(options.items()))
    remember_options(vended)
    return TableInCatalog(normalize_uri(answer.location), vended, answer.managed_versioning is True)


def ask(options: StorageOptions, request: Callable[[LanceNamespace], Any]) -> Any:
    """Send a request to a catalog, and repeat it while the catalog does not answer."""
    from lance_namespace import ServiceUnavailableError, ThrottlingError

    def send() -> Any:
        try:
            return request(client(options))
        except (ServiceUnavailableError, ThrottlingError) as error:
            raise ConnectionError(f"error sending request: {error}") from error

    return wait_out(catalog_uri(options) or "", options, send)


def names_in_catalog(options: StorageOptions, within: list[str]) -> list[str]:
    """Return the sorted names of a namespace's tables, and of those in the namespaces below it.

    Raises:
        InvalidInput: the catalog lists nothing there; some begin with a namespace that has to be given.
    """
    from lance_namespace import ListNamespacesRequest, ListTablesRequest

    delimiter = _parse(dict(options)[CATALOG])[1].get("delimiter", "$")
    where = f"namespace {'.'.join(within)!r}" if within else "the namespaces"

    def whole(name: str) -> list[str]:
        """Return an id; some catalogs list whole ids instead of names."""
        for parts in (name.split(delimiter), name.split(".")):
            if len(parts) > len(within) and parts[: len(within)] == within:
                return parts
        return [*within, name]

    def ids(part: str, request: Callable[[str | None, LanceNamespace], Any]) -> Iterator[list[str]]:
        token: str | None = None
        while True:
            answer = ask(options, partial(request, token))
            yield from (parts for parts in map(whole, getattr(answer, part) or ()) if all(map(_is_part, parts)))
            token = answer.page_token
            if not token:
                return

    def tables(token: str | None, catalog: LanceNamespace) -> Any:
        return catalog.list_tables(ListTablesRequest(id=within, page_token=token))

    def namespaces(token: str | None, catalog: LanceNamespace) -> Any:
        return catalog.list_namespaces(ListNamespacesRequest(id=within, page_token=token))

    found, refusals = [set[str](), set[str]()], list[InvalidInput]()
    # Some catalogs have no tables outside of a namespace, or no namespaces in another.
    for names, part, request in zip(found, ("tables", "namespaces"), (tables, namespaces), strict=True):
        try:
            with asking(options, where):
                names.update(".".join(parts) for parts in ids(part, request))
        except InvalidInput as error:
            refusals.append(error)
    if len(refusals) == len(found):
        raise refusals[-1]
    direct, below = found
    return sorted(direct.union(*(names_in_catalog(options, name.split(".")) for name in below)))


def _is_part(name: str) -> bool:
    """Whether a name can be a part of a table's name; names with a dot or a slash are left out."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_\-]*", name) is not None


@contextmanager
def asking(options: StorageOptions, about: str) -> Iterator[None]:
    """Convert the errors of a catalog, whichever classes it has for them; their text shows none of its properties."""
    from lance_namespace import LanceNamespaceError, errors

    try:
        yield
    except GenevaError:
        raise
    except Exception as error:
        place, text = catalog_uri(options), mask_secrets(describe_store_error(error)).rstrip(".")
        # Catalogs that are no part of pylance raise errors of their own.
        own = "" if isinstance(error, LanceNamespaceError) else f"{type(error).__name__}: {error}"
        if isinstance(error, (errors.TableNotFoundError, errors.NamespaceNotFoundError)) or _NO_SUCH.search(own):
            raise NoSuchTable(f"The catalog {place} has no {about}: {text}.") from None
        if isinstance(error, (errors.UnauthenticatedError, errors.PermissionDeniedError)) or is_access_refused(own):
            raise StorageError(
                f"The catalog {place} refuses to answer about {about}: {text}. Correct the properties, such as "
                "'headers.Authorization', or what they permit."
            ) from None
        unable = (errors.UnsupportedOperationError, errors.InvalidInputError, NotImplementedError, ValueError)
        if isinstance(error, unable) or "InvalidInput" in own:
            raise InvalidInput(f"The catalog {place} cannot do that with {about}: {text}.") from None
        what = "does not answer" if isinstance(error, ConnectionError) else "reports an error"
        raise StorageError(f"The catalog {place} {what} about {about}: {text}.") from None


def _parse(option: str) -> tuple[str, dict[str, str]]:
    found = parse(option)
    return found["impl"], found["properties"]


def _connect(option: str) -> LanceNamespace:
    import lance_namespace

    impl, properties = _parse(option)
    remember_options(((CATALOG, option),))
    with suppress(ImportError):
        import_module("lance_namespace_impls")  # registers the names of other kinds of catalogs, such as glue
    try:
        return lance_namespace.connect(impl, properties)
    except ValueError as error:
        text = mask_secrets(str(error))
        raise InvalidInput(
            f"No catalog of the kind {impl!r} can be opened with the properties {sorted(properties)}: {text}. Give "
            f"'rest', 'dir' or the path of a class, and the properties that it takes: {_EXAMPLE}."
        ) from None
