"""Give the functions of `airflow_geneva.functions` the key and URL of an Airflow connection."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from airflow.providers.common.compat.sdk import AirflowNotFoundException
from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_geneva.engine.masking import service_variables
from airflow_geneva.hooks.lance import missing_connection


@contextmanager
def openai_connection(openai_conn_id: str | None, named: Iterable[str] = ()) -> Iterator[None]:
    """Set `OPENAI_API_KEY` and `OPENAI_BASE_URL` in the block, from the password and the host of a connection.

    Args:
        openai_conn_id: the connection, in the form of Airflow's OpenAI provider; None: the environment is unchanged.
        named: connections that functions name themselves, such as `embeddings(connection="voyage")`; each sets separate
            variables, such as `OPENAI_API_KEY_VOYAGE`.

    Raises:
        InvalidInput: there is no such connection.
    """
    given: dict[str, str] = {}
    if openai_conn_id is not None:
        given |= _variables(openai_conn_id, service_variables())
    for name in dict.fromkeys(named):
        given |= _variables(name, service_variables(name))
    before = {name: os.environ.pop(name, None) for name in given}
    os.environ.update({name: value for name, value in given.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _variables(conn_id: str, names: tuple[str, str]) -> dict[str, str]:
    try:
        found = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        remedy = 'Define it: {"conn_type": "openai", "password": "the key", "host": "https://api.openai.com/v1"}.'
        raise missing_connection(conn_id, remedy) from None
    key, url = found.password or "none", found.host or ""
    mask_secret(key)
    return dict(zip(names, (key, url), strict=True))
