"""`CleanupCheckpointsOperator`, and the DAG that shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_geneva.operators import CleanupCheckpointsOperator
from airflow_geneva.table import Table
from tests.airflow.conftest import Desk
from tests.support.driving import DagBag, Driver

pytestmark = pytest.mark.airflow

EXAMPLE = Path(__file__).parents[2] / "dags_examples" / "cleanup.py"


def grow_old(table: Table) -> None:
    for folder in ("_checkpoints", "data"):
        for path in Path(table.uri, folder).rglob("*"):
            os.utime(path, (1_000_000_000, 1_000_000_000))


def compute(desk: Desk) -> None:
    desk.define(n="length")
    desk.append("ab")
    desk.table.backfill("n", runner="inline")


def clean(desk: Desk, conf: dict[str, Any] | None = None, **arguments: Any) -> Driver:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        CleanupCheckpointsOperator(task_id="clean_up", **arguments)
    return Driver.trigger(dag, conf).go()


def jobs_of(table: Table) -> list[Path]:
    return list(Path(table.uri, "_checkpoints", "jobs").iterdir())


@pytest.mark.core
def test_all_tables_are_cleaned_and_what_went_is_counted(desk: Desk) -> None:
    compute(desk)
    other = desk.database.create_table("other", [{"text": "x"}])
    grow_old(desk.table)
    run = clean(desk)
    assert run.state == "success", run.errors
    result = run.xcom("clean_up")
    assert (result["tables"], result["dry_run"], result["notes"]) == (2, False, [])
    assert result["kinds"]["checkpoints"]["files"] == 1, "those of both fragments"
    assert result["kinds"]["jobs"]["files"] > 0
    assert result["files"] == sum(kind["files"] for kind in result["kinds"].values())
    assert result["bytes"] > 0
    assert jobs_of(desk.table) == []
    assert desk.values() == {f"{letter}{row:02}": 3 for letter in "ab" for row in range(10)}
    assert other.count_rows() == 1


def test_fields_are_templates(desk: Desk) -> None:
    compute(desk)
    grow_old(desk.table)
    templates = {
        "table": "{{ dag_run.conf['table'] }}",
        "ttl": "{{ dag_run.conf['ttl'] }}",
        "dry_run": "{{ dag_run.conf['dry'] }}",
    }
    run = clean(desk, {"table": desk.table.name, "ttl": "12h", "dry": True}, **templates)
    result = run.xcom("clean_up")
    assert (result["tables"], result["dry_run"]) == (1, True)
    assert result["files"] > 0
    assert jobs_of(desk.table)


def test_what_is_young_stays(desk: Desk) -> None:
    compute(desk)
    assert clean(desk).xcom("clean_up")["files"] == 0
    assert jobs_of(desk.table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ttl": "{{ 'soon' }}"}, "'soon' is not an age"),
        ({"ttl": "{{ '' }}"}, "Give the ttl"),
        ({"dry_run": "perhaps"}, "neither true nor false"),
        ({"table": "nothing"}, "There is no table 'nothing'"),
    ],
)
def test_what_makes_no_sense_is_refused(desk: Desk, arguments: dict[str, Any], message: str) -> None:
    compute(desk)
    grow_old(desk.table)
    run = clean(desk, **arguments)
    assert run.state == "failed"
    assert message in run.error("clean_up")
    assert jobs_of(desk.table)


def test_a_table_that_cannot_be_opened_fails_the_task_and_keeps_no_other_from_being_cleaned(desk: Desk) -> None:
    compute(desk)
    grow_old(desk.table)
    Path(desk.database.uri, "aaa.lance", "_versions").mkdir(parents=True)
    run = clean(desk)
    assert run.state == "failed"
    assert "'aaa' cannot be opened" in run.error("clean_up")
    assert jobs_of(desk.table) == []


def read_example() -> DAG:
    bag = DagBag(EXAMPLE)
    assert not bag.import_errors
    return bag.dags["cleanup"]


def test_the_example_runs_as_it_is_shown(desk: Desk) -> None:
    compute(desk)
    grow_old(desk.table)
    assert read_example().catchup is False
    told = Driver.trigger(read_example(), {"dry_run": True}).go()
    assert told.state == "success", told.errors
    assert told.xcom("clean_up")["files"] > 0
    assert jobs_of(desk.table)
    done = Driver.trigger(read_example()).go()
    assert done.xcom("clean_up")["files"] == told.xcom("clean_up")["files"]
    assert jobs_of(desk.table) == []
