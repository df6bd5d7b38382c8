"""The stores of a source's files, opened with pylance's storage options by other libraries than pylance."""

from __future__ import annotations

from typing import Any

import pyarrow.fs as pfs

from airflow_geneva.engine.storage.catalogs import pylance_access
from airflow_geneva.engine.storage.secrets import is_secret
from airflow_geneva.engine.storage.uri import is_local
from airflow_geneva.errors import InvalidInput

Options = tuple[tuple[str, str], ...]

_S3 = {
    "access_key": ("aws_access_key_id", "access_key_id"),
    "secret_key": ("aws_secret_access_key", "secret_access_key"),
    "session_token": ("aws_session_token", "aws_token", "session_token", "token"),
    "region": ("aws_region", "region", "aws_default_region", "default_region"),
    "endpoint": ("aws_endpoint", "aws_endpoint_url", "endpoint", "endpoint_url"),
}


def file_system(uri: str, options: Options) -> tuple[pfs.FileSystem, Any]:
    """Return pyarrow's file system for a URI, with pylance's storage options, and a function from URIs to its paths.

    Raises:
        InvalidInput: the options have credentials that are not passed on to this kind of store.
    """
    if is_local(uri):
        return pfs.LocalFileSystem(), str

    def path(one: str) -> str:
        # On Azure, the account is in the URI: abfss://container@account.dfs.core.windows.net/path.
        place, _, name = one.partition("://")[2].partition("/")
        return f"{place.partition('@')[0]}/{name}"

    if uri.partition("://")[0] != "s3":
        check_unused(uri, options)
        return pfs.FileSystem.from_uri(uri)[0], path
    found: dict[str, Any] = s3_settings(options)
    endpoint = found.pop("endpoint", "")
    if "://" in endpoint:
        found["scheme"], _, endpoint = endpoint.partition("://")
    if endpoint:
        found["endpoint_override"] = endpoint
    return pfs.S3FileSystem(**found), path


def s3_settings(options: Options) -> dict[str, str]:
    """Return the settings of S3 in storage options: ``access_key``, ``secret_key``, ``session_token``..."""
    given = {name.lower(): value for name, value in own_options(options).items()}
    found = {name: next((given[key] for key in keys if key in given), None) for name, keys in _S3.items()}
    return {name: value for name, value in found.items() if value is not None}


def check_unused(uri: str, options: Options) -> None:
    """Refuse credentials for a store that is read with the machine's own identity."""
    if secrets := sorted(
        name for name, value in own_options(options).items() if is_secret(name, value) and name[:4] != "aws_"
    ):
        raise InvalidInput(
            f"Files at {uri.partition('://')[0]}:// are read with the machine's own identity, and not with the storage "
            f"options {secrets} of the table. Load from S3, from a folder, or from a Lance table."
        )


def own_options(options: Options) -> dict[str, str]:
    """Return the settings of the store alone; of a table in a catalog, also those that the catalog hands out."""
    return pylance_access(options)["storage_options"] or {}
