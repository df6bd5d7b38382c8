"""Histories with changes during runs, task by task as in Airflow, without a scheduler."""

from __future__ import annotations

import json
import random
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from airflow.sdk import DAG

from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.task_groups import BackfillTaskGroup
from tests.support.driving import Driver
from tests.support.forge import forge
from tests.support.harness import Job, World
from tests.support.invariants import assert_honest
from tests.support.within import Outcome, changes_of, changing, die, open_in_child, some_acts


class InAirflow:
    """Run task by task, as Airflow's scheduler does; tasks are killed and retried, and cleared."""

    as_tasks = (True,)
    slots = 1
    kills_tasks = True

    def environment(self, world: World) -> dict[str, str]:
        connection = {"conn_type": "lance", "host": str(world.folder / "db")}
        return {f"AIRFLOW_CONN_{connection_of(world).upper()}": json.dumps(connection)}

    def carry_out(self, world: World, job: Job, run: str | None, dice: random.Random, moves: bool) -> Outcome:
        driver = Driver.trigger(make_dag(world, job))
        kills, todo = list[int](), [dice.randint(1, 7) for _ in range(dice.choice([0, 1, 1, 2]))]
        run_task = driver._run

        def run_or_die(ti: Any, kill: str | None) -> None:
            todo[:] = [number - 1 for number in todo]
            if 0 in todo:
                todo.remove(0)
                world.next_id += 10_000
                arguments = {
                    "folder": str(world.folder), "kind": job.kind, "seed": f"{dice.random()}", "moves": moves,
                    "next_id": world.next_id, "task": about(driver, ti),
                }  # fmt: skip
                code = forge().run("tests.support.within_airflow:run_task_and_die", arguments, world.environment)
                world.next_id += 10_000
                assert code in (0, -signal.SIGKILL), f"{ti.task_id} ended with {code}"
                if code:
                    kills.append(1)
                    ti.set_state("up_for_retry")
                    return
            run_task(ti, kill)

        with patch.object(driver, "_run", run_or_die), changing(some_acts(world, dice, changes_of(job, moves), 3)):
            driver.go()
            assert driver.state == "success", driver.errors
            cleared = False
            if dice.random() < 0.5:
                states = driver.states()
                shards = [index for index, state in enumerate(states["backfill.shards.apply"]) if state == "success"]
                wanted = dice.choice(["plan", "apply", "commit", "finish"])
                cleared = wanted == "plan" or not shards
                task: Any = f"backfill.{wanted}"
                if wanted in ("apply", "commit"):
                    task = (f"backfill.shards.{wanted}", dice.choice(shards)) if shards else "backfill.plan"
                driver.clear(task).go()
                assert driver.state == "success", driver.errors
        told = driver.xcom("backfill.finish")
        result = BackfillResult.from_json({name: told[name] for name in told if name != "event"})
        if not cleared:
            assert_honest(result, world.table)
        return Outcome(result, len(kills), cleared)


def make_dag(world: World, job: Job) -> Any:
    name = connection_of(world)
    with DAG(f"dag_{name}_{job.kind}", schedule=None, default_args={"retries": 5}) as dag:
        BackfillTaskGroup(table="docs", column="y", lance_conn_id=name, inline_below_rows=10**9, **job.options)
    return dag


def connection_of(world: World) -> str:
    """Every history has a separate asset."""
    return f"lance_{world.folder.parent.name}_{world.folder.name}".lower().replace("-", "_")


def about(driver: Any, ti: Any) -> dict[str, Any]:
    """The values that a task reads from other tasks."""
    shards, summary = driver.xcom("backfill.plan"), driver.xcom("backfill.plan", "summary")
    return {
        "task_id": ti.task_id, "dag_id": ti.dag_id, "run_id": ti.run_id, "map_index": ti.map_index,
        "try_number": ti.try_number, "summary": summary,
        "shard": shards[ti.map_index] if ti.map_index >= 0 else None,
    }  # fmt: skip


def run_task_and_die(folder: str, kind: str, seed: str, moves: bool, next_id: int, task: dict[str, Any]) -> None:
    """Run a task in this process while the table changes, and die before its end; called in a forked process."""
    dice, world, job = random.Random(seed), open_in_child(folder, next_id), Job(kind, True)
    # Airflow stores the events, and skips tasks.
    with patch("airflow_geneva.operators.finish.FinishOperator._announce", lambda *_: None):
        operator = make_dag(world, job).get_task(task["task_id"])
        if task["shard"] is not None:
            operator.shard = task["shard"]
        else:
            operator.shard_tasks = ()
        names = ("task_id", "dag_id", "run_id", "map_index", "try_number")
        ti = SimpleNamespace(
            **{name: task[name] for name in names},
            xcom_push=lambda *_, **__: None,
            xcom_pull=lambda **asked: task["summary"] if asked["key"] == "summary" else None,
            get_task_states=lambda **_: {task["run_id"]: {"backfill.plan": "success"}},
        )
        # A task passes few fault points.
        acts = [(dice.randint(1, 3), act) for _, act in some_acts(world, dice, changes_of(job, moves), 1)]
        with changing([*dice.choice([acts, []]), (dice.randint(1, 5), die)]):
            operator.execute({"ti": ti, "dag_run": None})
