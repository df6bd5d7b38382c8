"""A test's database with its Airflow connections, DAGs and views (`Desk`)."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from airflow.sdk import DAG, task

from airflow_geneva import View
from airflow_geneva.task_groups import BackfillTaskGroup
from tests.airflow.conftest import Desk

ROWS = 10


def make_dag(desk: Desk, **settings: Any) -> DAG:
    """Return a DAG with one task group for the table, one shard per fragment, and a task downstream of the group."""
    arguments = {name: settings.pop(name) for name in ("params", "default_args") if name in settings}
    with DAG(f"dag_{desk.table.name}", schedule=None, **arguments) as dag:

        @task
        def after() -> str:
            return "ran"

        given = {"table": desk.table.name, "column": "n", "inline_below_rows": 10**9, "shard_size": 1, **settings}
        BackfillTaskGroup(**given) >> after()
    return dag


def texts(letters: str) -> list[str]:
    return [f"{letter}{row:02}" for letter in letters for row in range(ROWS)]


def connect_lance(monkeypatch: pytest.MonkeyPatch, desk: Desk, **options: str) -> None:
    connection = {"conn_type": "lance", "host": desk.database.uri, "extra": {"storage_options": options}}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps(connection))


def connect_spark(monkeypatch: pytest.MonkeyPatch, **connection: Any) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", **connection}))


def make_view(desk: Desk, name: str = "v", by: str = "length") -> View:
    function = getattr(importlib.import_module("geneva_dag_udfs"), by)
    return desk.table.query().select({"text": "text", "n": function}).create_materialized_view(desk.database, name)
