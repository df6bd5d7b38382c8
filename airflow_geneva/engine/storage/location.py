"""Locate and open tables, and tell which of their storage options are secrets."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from airflow_geneva.engine.lance_io.engine_errors import engine_errors, is_outage
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.outages import STORE_PATIENCE, pylance_options, wait_out, with_patience
from airflow_geneva.engine.storage.uri import is_local, is_name, join
from airflow_geneva.errors import GenevaError, InvalidInput, StorageError

if TYPE_CHECKING:
    import lance

# On every DataReplacement commit Lance warns on standard error that the operation is unstable, and Airflow logs that
# as an error. The user can do nothing about it. Lance reads the variable once, on import; the user's own value wins.
os.environ.setdefault("LANCE_LOG", "warn,lance_table::transaction::manifest_build=error")

_EXAMPLE = 'Give a JSON object of strings, such as {"aws_region": "eu-west-1", "aws_endpoint": "https://minio:9000"}.'

_CACHE_BYTES = 64 << 20
# Every other option counts as a secret.
_HARMLESS_NAMES = """
account_name allow_http allow_invalid_certificates aws_allow_http aws_default_region aws_ec2_metadata_disabled
aws_endpoint aws_endpoint_url aws_region aws_s3_express aws_server_side_encryption aws_skip_signature
aws_unsigned_payload aws_virtual_hosted_style_request azure_endpoint azure_storage_account_name
azure_storage_endpoint azure_storage_use_emulator client_max_retries client_retry_timeout connect_timeout
download_retry_count endpoint endpoint_url geneva_store_patience google_bucket http1_only http2_only
pool_idle_timeout pool_max_idle_per_host region request_timeout s3_express skip_signature timeout
unsigned_payload use_emulator user_agent virtual_hosted_style_request
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


@dataclass(frozen=True)
class TableLocation:
    """A Lance table, with its storage options (credentials) as sorted pairs."""

    uri: str
    name: str
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def checkpoints(self) -> Storage:
        return Storage(join(self.uri, "_checkpoints"), self.options)

    @property
    def limits(self) -> Storage:
        """The folder that stores the limits of its database."""
        return Storage(join(self.database_uri, "_geneva", "limits"), self.options)

    @property
    def database_uri(self) -> str:
        return self.uri.rpartition("/")[0]

    @property
    def storage_options(self) -> dict[str, str] | None:
        return pylance_options(self.options)

    def patient(self, seconds: int = STORE_PATIENCE) -> TableLocation:
        """Return this location with a patience (maximum wait during an outage of its store), unless it has one."""
        return replace(self, options=with_patience(self.uri, self.options, seconds))

    def exists(self) -> bool:
        """Whether the table has a version; a process that was killed while creating it leaves only files."""
        return bool(Storage(self.uri, self.options).list_folder("_versions")[1])

    def open(self, version: int | None = None) -> lance.LanceDataset:
        """Open the newest version, or the given one.

        Raises:
            InvalidInput: the table or version does not exist.
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
            return wait_out(
                self.uri,
                self.options,
                lambda: lance.dataset(
                    self.uri, version=version, storage_options=self.storage_options, session=_session(os.getpid())
                ),
            )


def table_names(database_uri: str, options: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the sorted names of a database's tables; folders without a valid table name are left out."""
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

    made: Any = lance
    return made.Session(metadata_cache_size_bytes=_CACHE_BYTES)


def read_storage_options(given: Any) -> dict[str, str]:
    """Parse storage options, a JSON object or its text, as strings; error messages contain no values."""
    if given is None or given == "":
        return {}
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except ValueError:
            raise InvalidInput(f"storage_options is text, but not JSON. {_EXAMPLE}") from None
    if not isinstance(found, Mapping):
        raise InvalidInput(f"storage_options is of type {type(found).__name__}. {_EXAMPLE}")
    return {name: _option_text(name, value) for name, value in found.items() if value is not None}


def is_secret(name: str, value: str) -> bool:
    return name.lower() not in _HARMLESS or "@" in value or "?" in value


def secret_values(options: Mapping[str, str]) -> list[str]:
    """Return the secret values and the passwords in them; an empty list means that the machine's identity is used."""
    values = [value for name, value in options.items() if value and is_secret(name, value)]
    for value in list(values):
        with contextlib.suppress(ValueError):
            values.append(urlsplit(value).password or "")
    return [value for value in values if value]


def _option_text(name: Any, value: Any) -> str:
    if not isinstance(name, str):
        raise InvalidInput(f"storage_options has a key of type {type(name).__name__}. {_EXAMPLE}")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise InvalidInput(f"The storage option {name!r} is of type {type(value).__name__}. {_EXAMPLE}")
