"""Section `[geneva]` of Airflow's configuration: what it changes, what goes before it, and what a wrong value gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import lance
import pytest

from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.engine.plan.request import check_sizing
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.get_provider_info import get_provider_info
from airflow_geneva.operators import _lance_task
from airflow_geneva.operators._lance_task import Configuration
from airflow_geneva.operators.plan import read_sizing
from tests.airflow.conftest import Desk
from tests.support.desk import make_dag
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow

OPTIONS = get_provider_info()["config"]["geneva"]["options"]


def configure(monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
    for name, value in options.items():
        monkeypatch.setenv(f"AIRFLOW__GENEVA__{name.upper()}", value)


def go(desk: Desk, **settings: Any) -> Driver:
    """Run a backfill of one fragment in an Airflow whose Spark cannot be reached."""
    desk.append("a")
    desk.define(n="length")
    return Driver.trigger(make_dag(desk, **{"inline_below_rows": None, **settings})).go()


@pytest.fixture(autouse=True)
def no_spark(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", "host": "nowhere"}))


def went_to_spark(run: Driver) -> bool:
    if run.state == "success":
        return False
    assert "'nowhere', which Spark does not know" in run.error("backfill.shards.apply", 0)
    return True


def concurrency(run: Driver) -> int:
    summary = run.xcom("backfill.plan", "summary")
    folder = summary["plan_uri"].rpartition("/")[0]
    return load_plan(Storage(folder, {}), summary["fingerprint"]).spec.sizing.concurrency


def test_without_it_every_shard_goes_to_spark_with_the_slots_that_python_users_get(desk: Desk) -> None:
    run = go(desk)
    assert went_to_spark(run)
    assert concurrency(run) == Sizing().concurrency == int(OPTIONS["concurrency"]["default"])


@pytest.mark.core
@pytest.mark.parametrize(
    ("configured", "given", "expected"),
    [("11", None, False), ("11", "", False), ("10", None, True), ("11", 0, True), ("11", "10", True), ("0", 11, False)],
)
def test_small_shards_are_computed_in_their_task_unless_the_task_says_otherwise(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, configured: str, given: Any, expected: bool
) -> None:
    configure(monkeypatch, inline_below_rows=configured)
    assert went_to_spark(go(desk, inline_below_rows=given)) is expected


@pytest.mark.parametrize(("given", "expected"), [(None, 3), ("", 3), (5, 5), ("{{ 2 + 3 }}", 5)])
def test_a_plan_asks_for_the_configured_slots_unless_its_task_says_otherwise(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, given: Any, expected: int
) -> None:
    configure(monkeypatch, concurrency="3", inline_below_rows="100")
    assert concurrency(go(desk, concurrency=given)) == expected


@pytest.mark.parametrize(
    ("configured", "given", "expected"),
    [(None, None, "success"), ("fail", None, "failed"), ("fail", "", "failed"), ("fail", "warn", "success")],
)
def test_a_partial_run_is_red_where_it_says_so_unless_the_task_says_otherwise(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, configured: str | None, given: Any, expected: str
) -> None:
    configure(monkeypatch, **({} if configured is None else {"on_partial": configured}))
    run = go(desk, inline_below_rows=100, max_rows=5, on_partial=given)
    assert (run.state, run.states()["backfill.finish"]) == (expected, expected)


@pytest.mark.parametrize(("variable", "tries"), [(None, 2), ("0", 1)])
def test_a_commit_is_tried_again_as_often_as_it_says_or_the_seeds_variable_before_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, variable: str | None, tries: int
) -> None:
    configure(monkeypatch, version_conflict_max_retries="1", inline_below_rows="100")
    if variable:
        monkeypatch.setenv("GENEVA_VERSION_CONFLICT_MAX_RETRIES", variable)
    commit = lance.LanceDataset.commit

    def busy(*arguments: Any, **more: Any) -> Any:
        desk.table.location.open().restore()
        return commit(*arguments, **more)

    monkeypatch.setattr(lance.LanceDataset, "commit", busy)
    told = go(desk).error("backfill.shards.commit", 0)
    assert f"at every one of {tries} tries" in told
    assert "[geneva] version_conflict_max_retries" in told


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("inline_below_rows", "many"),
        ("inline_below_rows", "-1"),
        ("concurrency", "0"),
        ("concurrency", ""),
        ("version_conflict_max_retries", "1.5"),
        ("task_memory_bytes", "128m"),
        ("on_partial", "red"),
        ("store_patience", "5m"),
    ],
)
def test_a_wrong_value_stops_the_plan_and_is_named(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    configure(monkeypatch, **{option: value})
    run = go(desk, default_args={"retries": 1})
    assert run.state == "failed"
    assert run.tries("backfill.plan") == 1
    told = run.error("backfill.plan")
    assert f"[geneva] {option} is {value!r}" in told
    assert f"AIRFLOW__GENEVA__{option.upper()}" in told
    assert read_jobs(desk.table.location.checkpoints, job_ids(desk.table.location.checkpoints)) == []


@pytest.mark.parametrize(("variable", "expected"), [(None, 50_000_000), ("2000", 2_000)])
def test_a_plan_takes_over_the_memory_of_a_task_slot(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    configure(monkeypatch, task_memory_bytes="50000000")
    if variable:
        monkeypatch.setenv("GENEVA_TASK_MEMORY_BYTES", variable)
    assert check_sizing(read_sizing({"batch_size": 7}, Configuration.read())).task_memory_bytes == expected


def test_an_option_that_tasks_do_not_know_yet_stops_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    info = get_provider_info()
    info["config"]["geneva"]["options"]["new"] = {**OPTIONS["concurrency"], "default": "text"}
    monkeypatch.setattr(_lance_task, "get_provider_info", lambda: info)
    defaults = (0, 0, 8, 10, 128 << 20, 0.0, "warn", ("airflow_geneva.functions",), (), 300)
    assert Configuration.read() == Configuration(*defaults)


@pytest.mark.core
def test_tasks_read_every_option_that_airflow_describes() -> None:
    assert [field.name for field in fields(Configuration)] == list(OPTIONS)


@pytest.mark.parametrize(("modules", "planned"), [("", False), ("elsewhere, makers_here", True)])
def test_a_udf_that_a_factory_made_is_imported_if_its_module_is_named(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, modules: str, planned: bool
) -> None:
    configure(monkeypatch, udf_modules=modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "makers_here.py").write_text("import geneva_dag_udfs\ndef make(): return geneva_dag_udfs.length\n")
    (tmp_path / "lengths_here.py").write_text("import makers_here\nlength = makers_here.make()\n")
    desk.append("a")
    desk.define(n="length")
    key, field = "geneva::udf", desk.table.lance.schema.field("n")
    stored = field.metadata[key.encode()].decode().replace("geneva_dag_udfs:length", "lengths_here:length")
    desk.table.lance.update_field_metadata({"n": {key: stored}})
    run = Driver.trigger(make_dag(desk)).go()
    if planned:
        assert run.state == "success"
    else:
        assert "makes no UDF of 'length'" in run.error("backfill.plan")
        assert "makers_here" not in sys.modules


def test_a_wrong_value_of_the_seeds_variable_stops_the_plan_too(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENEVA_VERSION_CONFLICT_MAX_RETRIES", "often")
    assert "GENEVA_VERSION_CONFLICT_MAX_RETRIES='often' is not valid" in go(desk).error("backfill.plan")


# One process for all: Airflow takes seconds to start.
ASK = """
import sys
from airflow.__main__ import main

for command in sys.argv[1].split(","):
    sys.argv = ["airflow", "config", *command.split()]
    main()
    print("---", flush=True)
"""


@pytest.fixture(scope="module")
def told_by_airflow(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What Airflow says of the whole section, and then of each option's value."""
    home = tmp_path_factory.mktemp("configured")
    (home / "airflow.cfg").write_text("[geneva]\ninline_below_rows = 17\n")
    commands = ["list --section geneva --include-descriptions", *(f"get-value geneva {name}" for name in OPTIONS)]
    told = subprocess.run(
        [sys.executable, "-c", ASK, ",".join(commands)],
        env={**os.environ, "AIRFLOW_HOME": str(home), "AIRFLOW__GENEVA__CONCURRENCY": "5"},
        check=True,
        capture_output=True,
        text=True,
    )
    return told.stdout.split("---\n")


def test_airflow_lists_every_option_with_its_description(told_by_airflow: list[str]) -> None:
    told = told_by_airflow[0]
    assert "[geneva]" in told
    for name, option in OPTIONS.items():
        assert f"{name} = " in told
        assert option["description"] in told


def test_airflow_tells_a_single_value(told_by_airflow: list[str]) -> None:
    told = dict(zip(OPTIONS, map(str.strip, told_by_airflow[1:-1]), strict=True))
    assert told == {
        "inline_below_seconds": "0",
        "inline_below_rows": "17",
        "concurrency": "5",
        "version_conflict_max_retries": "10",
        "task_memory_bytes": str(128 << 20),
        "price_per_slot_hour": "0",
        "on_partial": "warn",
        "udf_modules": "airflow_geneva.functions",
        "allowed_places": "",
        "store_patience": "300",
    }
