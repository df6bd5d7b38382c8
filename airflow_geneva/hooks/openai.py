"""Give the functions of `airflow_geneva.functions` the key and URL of an Airflow connection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from airflow.providers.common.compat.sdk import AirflowNotFoundException
from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_geneva.hooks.lance import missing_connection


@contextmanager
def openai_connection(openai_conn_id: str | None) -> Iterator[None]:
    """Set `OPENAI_API_KEY` and `OPENAI_BASE_URL` in the block, from the password and the host of a connection.

    Args:
        openai_conn_id: the connection, as OpenAI's own provider has them; None: the environment stays as it is.

    Raises:
        InvalidInput: there is no such connection.
    """
    if openai_conn_id is None:
        yield
        return
    try:
        found = BaseHook.get_connection(openai_conn_id)
    except AirflowNotFoundException:
        remedy = 'Define it: {"conn_type": "openai", "password": "the key", "host": "https://api.openai.com/v1"}.'
        raise missing_connection(openai_conn_id, remedy) from None
    given = {"OPENAI_API_KEY": found.password or "none", "OPENAI_BASE_URL": found.host or ""}
    mask_secret(given["OPENAI_API_KEY"])
    before = {name: os.environ.pop(name, None) for name in given}
    os.environ.update({name: value for name, value in given.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
