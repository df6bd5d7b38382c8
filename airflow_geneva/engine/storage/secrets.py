"""Tell which storage options, and which properties of a catalog, are secrets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from airflow_geneva.engine.masking import remember_secrets
from airflow_geneva.engine.storage.documents import parse

CATALOG = "geneva_namespace"
"""Storage option: the JSON of what `lance_namespace.connect` takes, `impl` and `properties`."""
TABLE = "geneva_table"
"""Storage option: the name of the table in the catalog whose credentials are asked for."""

OTHERS = "geneva_source_namespaces"
"""Storage option: the JSON of other catalogs, in which sources of views lie, by their URI."""

PLACES = "geneva_allowed_places"
"""Storage option: the JSON of the places that may be opened beside the table's database; URIs without credentials."""

PLACE_OPTIONS = "geneva_place_options"
"""Storage option: the JSON of the storage options of allowed places, by their URI."""

# Every other option counts as a secret.
_HARMLESS_NAMES = """
account_name allow_http allow_invalid_certificates aws_allow_http aws_default_region aws_ec2_metadata_disabled
aws_endpoint aws_endpoint_url aws_region aws_s3_express aws_server_side_encryption aws_skip_signature
aws_unsigned_payload aws_virtual_hosted_style_request azure_endpoint azure_storage_account_name
azure_storage_endpoint azure_storage_use_emulator client_max_retries client_retry_timeout connect_timeout
download_retry_count endpoint endpoint_url geneva_store_patience geneva_table google_bucket http1_only http2_only
pool_idle_timeout pool_max_idle_per_host region request_timeout s3_express skip_signature timeout
unsigned_payload use_emulator user_agent virtual_hosted_style_request
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
# Of the properties of a catalog.
_HARMLESS_PROPERTIES = frozenset(
    ("catalog", "catalog_id", "delimiter", "endpoint", "manifest_enabled", "region", "root", "uri", "warehouse")
)


def is_secret(name: str, value: str) -> bool:
    return name != PLACES and (name.lower() not in _HARMLESS or "@" in value or "?" in value)


def plain_name(name: str) -> str:
    """Return the name of a catalog's property without the kind of catalog before it, as in `unity.endpoint`."""
    return name.rpartition(".")[2]


def secret_values(options: Mapping[str, str]) -> list[str]:
    """Return the secret values and the passwords in them; an empty list means that the machine's identity is used."""
    values = [value for name, value in _all_values(options) if value]
    for value in list(values):
        with contextlib.suppress(ValueError):
            values.append(urlsplit(value).password or "")
    return [value for value in values if value]


@functools.lru_cache(maxsize=256)
def remember_options(options: tuple[tuple[str, str], ...]) -> None:
    """Mask the secret values of storage options in all texts of this process from now on."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # opening them raises the error
        # Of a URL only the password: the rest says which store it is.
        remember_secrets(
            value for value in secret_values(dict(options)) if "?" in value or not urlsplit(value).password
        )


def _all_values(options: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if name == OTHERS:
            for other in parse(value).values():
                yield from _all_values({CATALOG: other})
        elif name == PLACE_OPTIONS:
            for given in parse(value).values():
                for what, text in _all_values(given):
                    yield what, text
                    # A header holds its kind before the secret: "Bearer eyJh...".
                    yield from ((what, word) for word in text.split()[1:])
        elif name == CATALOG:
            for what, given in parse(value)["properties"].items():
                known = plain_name(what) in _HARMLESS_PROPERTIES and not what.startswith(("headers.", "storage."))
                if not known and is_secret(what.removeprefix("storage."), given):
                    yield what, given
                    # A header holds its kind before the secret: "Bearer eyJh...".
                    yield from ((what, word) for word in given.split()[1:])
        elif is_secret(name, value):
            yield name, value
