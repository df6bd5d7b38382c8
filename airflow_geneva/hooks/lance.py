"""Open a Lance database through an Airflow connection."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, conf
from airflow.sdk import BaseHook, Connection
from airflow.sdk.log import mask_secret

from airflow_geneva.engine.display import counted
from airflow_geneva.engine.masking import mask_secrets, remember_secrets
from airflow_geneva.engine.storage.catalogs import catalog_option, catalog_uri, with_sources
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.files import freeze_options
from airflow_geneva.engine.storage.location import read_storage_options
from airflow_geneva.engine.storage.places import with_allowed
from airflow_geneva.engine.storage.secrets import CATALOG, secret_values
from airflow_geneva.engine.storage.uri import is_local, normalize_uri
from airflow_geneva.errors import GenevaError, InvalidInput
from airflow_geneva.get_provider_info import get_provider_info

if TYPE_CHECKING:
    from airflow_geneva.database import Database


_AWS_KEYS = frozenset(
    {"aws_access_key_id", "aws_secret_access_key", "aws_session_token", "region_name", "endpoint_url", "service_config"}
)


class LanceHook(BaseHook):
    """A Lance database, named by an Airflow connection of type `lance`.

    The connection's host is the database's URI, and its extra field holds `storage_options`, a JSON object in pylance's
    form. Without credentials in it, the machine's own identity is used. For tables that a catalog names, there is no
    host, and the extra field holds `namespace`, as `connect_namespace` takes it:
    `{"impl": "rest", "properties": {"uri": "https://catalog.example"}}`. A list of such objects, `source_namespaces`,
    names other catalogs, in which sources of views lie. `allowed_places` lists folders outside of the database in which
    tables may name files, as `connect` takes them, or is an object that names the connection of each, or null; those of
    `[geneva] allowed_places` are added. The connection of a place holds `storage_options`, for S3 it may be one of type
    `aws` with keys, region and endpoint; that of an `https://` place gives the headers of requests: its extra
    field `headers`, and its login and password, or its password alone as a bearer token.

    Args:
        lance_conn_id: the connection.

    Example:
        ```python
        table = LanceHook("lance_default").get_database().open_table("docs")
        ```
    """

    conn_name_attr = "lance_conn_id"
    default_conn_name = "lance_default"
    conn_type = "lance"
    hook_name = "Lance"

    def __init__(self, lance_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.lance_conn_id = lance_conn_id
        self._of_places: dict[str, Connection] = {}

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Return the fields of the connection form: the database's URI and its storage options."""
        form = get_provider_info()["connection-types"][0]["ui-field-behaviour"]
        return {name.replace("-", "_"): fields for name, fields in form.items()}

    @cached_property
    def storage_options(self) -> dict[str, str]:
        """Credentials and settings for pylance; from the first access on Airflow masks the secrets in logs."""
        options = read_storage_options(self._extra.get("storage_options"))
        if catalog := self._catalog("namespace", self._extra.get("namespace")):
            options[CATALOG] = catalog
        others = (self._catalog("source_namespaces", one) for one in self._list("source_namespaces"))
        sources = [freeze_options({CATALOG: other}) for other in others if other]
        options = dict(with_allowed(with_sources(freeze_options(options), sources), self._allowed_places()))
        secrets = secret_values(options)
        remember_secrets([*secrets, self._connection.password or ""])
        for secret in secrets:
            mask_secret(secret)
        return options

    @property
    def vends_credentials(self) -> bool:
        """Whether programs that ask Airflow for a table get the storage options: `vend_credentials` of the extra."""
        return self._extra.get("vend_credentials") is True

    def dag_on_request(self, kind: str) -> str | None:
        """Return the DAG that answers requests of a kind, such as `backfill`, by the extra field `backfill_dag`."""
        found = self._extra.get(f"{kind}_dag")
        return found if isinstance(found, str) and found else None

    @property
    def is_lance(self) -> bool:
        """Whether the connection is one of type `lance`."""
        return bool(self._connection.conn_type == self.conn_type)

    @property
    def uri(self) -> str:
        """The database's normalized URI.

        Raises:
            InvalidInput: the connection has no URI, or a path relative to the process's working directory.
        """
        if found := catalog_uri(freeze_options(self.storage_options)):
            return found
        return _absolute(self._host, f"The host of Airflow connection {self.lance_conn_id!r}")

    def get_database(self, database: str | None = None) -> Database:
        """Open the database.

        Args:
            database: another URI to use with the connection's storage options.
        """
        from airflow_geneva.database import Database, connect

        options = self.storage_options
        if CATALOG in options:
            if database in (None, self.uri):
                return Database(self.uri, freeze_options(options))
            options = {name: value for name, value in options.items() if name != CATALOG}
        return connect(_absolute(database, "database") if database else self.uri, options)

    def get_conn(self) -> Database:
        return self.get_database()

    async def aread(self) -> LanceHook:
        """Read the connection in a trigger, so that :meth:`get_database` can be called in a thread later.

        Before Airflow 3.3 a thread of the triggerer must not call Airflow, and masking a secret does call it.
        """
        try:
            self._connection = await self.aget_connection(self.lance_conn_id)
        except AirflowNotFoundException:
            raise self._missing() from None
        named = self._given_places()
        for conn_id in filter(None, named.values()) if isinstance(named, dict) else ():
            with suppress(AirflowNotFoundException):
                self._of_places[conn_id] = await self.aget_connection(conn_id)
        # Fill both cached properties.
        _ = self._host, self.storage_options
        return self

    def test_connection(self) -> tuple[bool, str]:
        """List the tables, for the button of the connection form."""
        try:
            database = self.get_database()
            if is_local(database.uri) and not os.path.isdir(database.uri):
                return False, f"There is no folder {database.uri} on this machine."
            names = database.table_names()
        except (GenevaError, OSError) as error:
            # A store's error repeats the token that it rejects, and Airflow does not mask this text.
            return False, mask_secrets(str(error))
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        return True, f"{counted(len(names), 'table')} in {database.uri}" + (f": {shown}" if names else "")

    @cached_property
    def _connection(self) -> Connection:
        try:
            return self.get_connection(self.lance_conn_id)
        except AirflowNotFoundException:
            raise self._missing() from None

    def _allowed_places(self) -> Mapping[str, Mapping[str, str] | None]:
        """Return the places that the connection and Airflow's configuration allow, with their storage options."""
        given = self._given_places()
        if isinstance(given, list) and all(isinstance(one, str) for one in given):
            given = dict.fromkeys(given)
        if not isinstance(given, dict) or not all(one is None or isinstance(one, str) for one in given.values()):
            raise InvalidInput(
                f"allowed_places in the extra field of Airflow connection {self.lance_conn_id!r} is neither a list of "
                'URIs, such as ["s3://bucket/photos"], nor an object with a connection for each, such as '
                '{"s3://bucket/photos": "photos_s3", "https://archive.example": "archive"}, or null.'
            )
        what = f"A place in allowed_places of Airflow connection {self.lance_conn_id!r}"
        configured = str(conf.get("geneva", "allowed_places", fallback="")).replace(",", " ").split()
        found = {_absolute(one, "A place in [geneva] allowed_places"): None for one in configured}
        named = {_absolute(place, what): conn_id for place, conn_id in given.items()}
        return {**found, **{place: conn_id and self._options_of(place, conn_id) for place, conn_id in named.items()}}

    def _given_places(self) -> Any:
        given = self._extra.get("allowed_places") or []
        with suppress(ValueError):
            given = parse(given) if isinstance(given, str) else given
        return given

    def _options_of(self, place: str, conn_id: str) -> dict[str, str]:
        """Return the storage options of a place from its connection; for a web server, the headers of requests."""
        try:
            connection = self._of_places.get(conn_id) or self.get_connection(conn_id)
        except AirflowNotFoundException:
            remedy = f"Connection {self.lance_conn_id!r} names it for {place}. Define it, or give null for none."
            raise missing_connection(conn_id, remedy) from None
        if not place.lower().startswith(("http://", "https://")):
            return _of_store(place, conn_id, connection)
        headers = read_storage_options(connection.extra_dejson.get("headers"))
        if connection.login:
            packed = base64.b64encode(f"{connection.login}:{connection.password or ''}".encode()).decode()
            headers["authorization"] = f"Basic {packed}"
        elif connection.password:
            headers["authorization"] = f"Bearer {connection.password}"
        return headers

    def _list(self, name: str) -> list[Any]:
        given = self._extra.get(name) or []
        with suppress(ValueError):
            given = parse(given) if isinstance(given, str) else given
        return given if isinstance(given, list) else [given]

    def _catalog(self, name: str, given: Any) -> str | None:
        """Return the storage option of a catalog that the extra field names."""
        try:
            found = parse(given) if isinstance(given, str) and given.strip() else given or None
        except ValueError:
            found = given
        if found is None:
            return None
        if not isinstance(found, Mapping) or not {"impl", "properties"} >= found.keys():
            raise InvalidInput(
                f"{name} in the extra field of Airflow connection {self.lance_conn_id!r} is not of the form "
                '{"impl": "rest", "properties": {"uri": "https://catalog.example"}}. Give it, or leave it out.'
            )
        return catalog_option(found.get("impl"), found.get("properties") or {})

    @cached_property
    def _host(self) -> str:
        """The database's URI; Airflow splits one that is part of a connection URI into host and schema."""
        given, connection = self._extra.get("uri"), self._connection
        if given:
            return str(given)
        host, schema = connection.host or "", connection.schema or ""
        if connection.port and "://" in host:
            host = f"{host}:{connection.port}"
        return f"{host}/{schema}" if schema else host

    @cached_property
    def _extra(self) -> Mapping[str, Any]:
        given = self._connection.extra
        try:
            found = parse(given) if isinstance(given, str) and given.strip() else given or {}
        except ValueError:
            found = None
        if not isinstance(found, Mapping):
            raise InvalidInput(
                f"The extra field of Airflow connection {self.lance_conn_id!r} is not a JSON object. Give one such as "
                '{"storage_options": {"aws_region": "eu-west-1"}}, or leave it empty.'
            )
        _ = self._connection.extra_dejson  # makes Airflow mask the secrets in it
        return found

    def _missing(self) -> InvalidInput:
        variable = f"AIRFLOW_CONN_{self.lance_conn_id.upper()}"
        return missing_connection(
            self.lance_conn_id,
            f'Define it in the UI, or in the environment: {variable}=\'{{"conn_type": "lance", '
            '"host": "s3://bucket/database", "extra": {"storage_options": {"aws_region": "eu-west-1"}}}\'',
        )


def _of_store(place: str, conn_id: str, connection: Connection) -> dict[str, str]:
    """Return the storage options of a disk or an object store from the connection of a place."""
    extra = connection.extra_dejson
    if (given := extra.get("storage_options")) or connection.conn_type == LanceHook.conn_type:
        return read_storage_options(given)
    what = f"Airflow connection {conn_id!r}, which allowed_places names for {place},"
    if connection.conn_type != "aws" or not place.lower().startswith(("s3://", "s3a://", "s3n://")):
        raise InvalidInput(
            f"{what} is one of type {connection.conn_type!r}, which holds nothing for it. Name one of type 'lance' "
            "with storage_options in its extra field, for S3 also one of type 'aws', or null for none."
        )
    if others := sorted(name for name in extra.keys() - _AWS_KEYS if extra[name]):
        raise InvalidInput(
            f"{what} has {', '.join(others)}, which only Airflow's own AWS hooks follow. Give keys, or null for the "
            "identity of the machine."
        )
    found = {
        "aws_access_key_id": connection.login or extra.get("aws_access_key_id"),
        "aws_secret_access_key": connection.password or extra.get("aws_secret_access_key"),
        "aws_session_token": extra.get("aws_session_token"),
        "aws_region": extra.get("region_name"),
        "aws_endpoint": _endpoint_of_s3(extra.get("service_config")) or extra.get("endpoint_url"),
    }
    if str(found["aws_endpoint"]).lower().startswith("http://"):
        found["allow_http"] = "true"
    return {name: str(value) for name, value in found.items() if value}


def _endpoint_of_s3(services: Any) -> str | None:
    of_s3 = services.get("s3") if isinstance(services, Mapping) else None
    return of_s3.get("endpoint_url") if isinstance(of_s3, Mapping) else None


def missing_connection(conn_id: str, remedy: str) -> InvalidInput:
    """Describe a connection that Airflow does not find; one in the environment exists, but cannot be parsed."""
    what = "cannot be read" if f"AIRFLOW_CONN_{conn_id.upper()}" in os.environ else "does not exist"
    return InvalidInput(f"Airflow connection {conn_id!r} {what}. {remedy}")


def _absolute(uri: str, what: str) -> str:
    if "://" not in uri and not os.path.isabs(os.path.expanduser(uri)):
        raise InvalidInput(
            f"{what} is {uri!r}, a relative path, which differs per worker. Give a URI such as s3://bucket/database, "
            "or an absolute path."
        )
    return normalize_uri(uri)
