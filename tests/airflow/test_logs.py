"""What tasks say in their logs at INFO: a summary each, nothing twice, and no more for a shard than a screen holds."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.airflow.conftest import Desk, Logs
from tests.support.desk import make_dag, texts
from tests.support.driving import Driver, events

pytestmark = pytest.mark.airflow

ROWS = 10


def test_every_task_sums_up_what_it_did_in_one_message(desk: Desk, logs: Logs) -> None:
    desk.append("ab", ROWS)
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "success", run.errors
    target = f"{desk.table.name}.n"
    [planned] = logs.of("plan")
    assert planned.startswith(f"Backfill of {target} with length (version 1), table version ")
    assert logs.of("shards.apply[1]") == [f"Shard 1 of {target}: 10 rows computed in this task, 0 failed."]
    assert logs.of("shards.commit[1]") == [
        f"Shard 1 of {target}: 1 fragment visible, 10 rows computed, 0 from checkpoints, 0 failed, 0 left."
    ]
    [finished] = logs.of("finish")
    assert finished.startswith(f"{target}: DONE: 20 rows computed, 0 taken from checkpoints, ")


def test_a_plan_of_many_fragments_is_no_longer_than_a_screen(desk: Desk, logs: Logs) -> None:
    desk.append("abcdefghijklmnopqrst", 1)
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk, shard_size=None)).go()
    assert run.state == "success", run.errors
    [planned] = logs.of("plan")
    assert len(planned.splitlines()) < 20
    assert {task: len(logs.by_task[task]) for task in logs.by_task if task.startswith("backfill.")} == {
        "backfill.plan": 1, "backfill.shards.apply[0]": 1, "backfill.shards.commit[0]": 1, "backfill.finish": 1,
    }  # fmt: skip


@pytest.mark.spark
@pytest.mark.shows("Retries", "give tasks `retries`")
def test_a_shard_that_failed_on_spark_says_why_and_its_retry_runs_only_the_rest_in_few_lines(
    desk: Desk, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"aws_secret_access_key": "planted-key"}
    connection = {"conn_type": "lance", "host": desk.database.uri, "extra": {"storage_options": options}}
    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", json.dumps(connection))
    desk.append("ab", ROWS)
    desk.define(n="length")
    desk.break_at("b07", once=True)
    # One slot: beside a failure another task may lose what it has not checkpointed yet.
    given = {"default_args": {"retries": 1}, "concurrency": 1}
    run = Driver.trigger(make_dag(desk, inline_below_rows=0, shard_size=None, **given)).go()
    assert run.state == "success", run.errors
    assert run.tries("backfill.shards.apply", 0) == 2
    said = run.error("backfill.shards.apply", 0)
    assert said.startswith(f"Computing shard 0 of {desk.table.name}.n failed: UdfError: ")
    assert said.endswith("cannot measure b07 yet")
    assert desk.calls() == sorted([*texts("ab"), "b07"])
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    assert len(events(desk.asset)) == 1
    assert list(Path(tempfile.gettempdir()).glob("airflow-geneva-2*")) == []

    failed, told = (unhurried(logs.of(task)) for task in ("shards.apply[0]", "shards.apply[0] again"))
    print(*failed, *told, sep="\n")
    said_so = [line for line in failed if "@udf(on_error=[Skip(ValueError)])" in line]
    assert len(said_so) == 1, "what to do, once"
    assert told[-1] == f"Shard 0 of {desk.table.name}.n: 3 rows computed on Spark, 0 failed."
    assert len(told) <= 15, told
    assert len(failed) <= 20, "and the traceback of the function"
    for lines in (failed, told):
        assert len(set(lines)) == len(lines)
        assert not [line for line in lines if "pandas" in line]
    assert "planted-key" not in json.dumps(logs.by_task)


def unhurried(lines: list[str]) -> list[str]:
    """Lines without those that come every few seconds: the more of them, the slower the machine."""
    return [line for line in lines if " rows computed (" not in line]
