"""Storage options: parse them for pylance, and tell which of them are secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from airflow_geneva.errors import InvalidInput

_HARMLESS = frozenset(
    {
        "account_name",
        "allow_http",
        "allow_invalid_certificates",
        "aws_allow_http",
        "aws_default_region",
        "aws_ec2_metadata_disabled",
        "aws_endpoint",
        "aws_endpoint_url",
        "aws_region",
        "aws_s3_express",
        "aws_server_side_encryption",
        "aws_skip_signature",
        "aws_unsigned_payload",
        "aws_virtual_hosted_style_request",
        "azure_storage_account_name",
        "azure_storage_use_emulator",
        "client_max_retries",
        "client_retry_timeout",
        "connect_timeout",
        "download_retry_count",
        "endpoint",
        "endpoint_url",
        "google_bucket",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "region",
        "request_timeout",
        "s3_express",
        "skip_signature",
        "timeout",
        "unsigned_payload",
        "use_emulator",
        "user_agent",
        "virtual_hosted_style_request",
    }
)


def read_storage_options(given: Any) -> dict[str, str]:
    """Parse storage options from a connection's extra field.

    Args:
        given: a JSON object, or its text; None and "" mean no options. Booleans and numbers become strings.

    Raises:
        InvalidInput: it is something else; the message does not repeat it, because it may hold a secret.
    """
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
    return {_name(name): _text(name, value) for name, value in found.items() if value is not None}


_EXAMPLE = 'Give a JSON object of strings, such as {"aws_region": "eu-west-1", "aws_endpoint": "https://minio:9000"}.'


def is_secret(name: str, value: str) -> bool:
    """Whether an option must not be shown; every option counts as secret unless it is known to be harmless."""
    return name.lower() not in _HARMLESS or "@" in value


def secret_values(options: Mapping[str, str]) -> list[str]:
    """Return the secret values, and the passwords in them; none means that the machine's own identity is used."""
    values = [value for name, value in options.items() if value and is_secret(name, value)]
    return values + [password for value in values if (password := _password(value))]


def _password(value: str) -> str | None:
    try:
        return urlsplit(value).password
    except ValueError:
        return None


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise InvalidInput(f"storage_options has a key of type {type(name).__name__}. {_EXAMPLE}")
    return name


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise InvalidInput(f"The storage option {name!r} is of type {type(value).__name__}. {_EXAMPLE}")
