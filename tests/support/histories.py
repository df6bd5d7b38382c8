"""Run many random histories of state machines, and say how many of them differ from what is right.

python -m tests.promises.test_group_state_machine --count 1000 --seed 1 --runner spark
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

AT_ONCE, STEPS = 20, 20


def run_histories(machines: Sequence[type[RuleBasedStateMachine]]) -> int:
    """Run histories of machines in turn, as the command line says; return how many times one differed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100, help="at least so many histories")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", choices=["inline", "spark"], default="inline")
    asked = parser.parse_args()
    ran, differ, turn, began = list[str](), 0, 0, time.monotonic()
    with _session(asked.runner == "spark"):
        while len(ran) < asked.count:
            machine = machines[turn % len(machines)]
            test = _counting(machine, ran, asked.runner)
            test._hypothesis_internal_use_seed = asked.seed * 1_000_003 + turn
            try:
                run_state_machine_as_test(test, settings=_FEW)
            except Exception:  # it is told, and the others run
                differ += 1
                traceback.print_exc()
            turn += 1
            told = ", ".join(f"{ran.count(one.__name__)} of {one.__name__}" for one in machines)
            print(f"{len(ran)} ran ({told}), {differ} differ, {time.monotonic() - began:.0f} s", flush=True)
    return differ


_FEW = settings(
    max_examples=AT_ONCE, stateful_step_count=STEPS, phases=[Phase.generate], database=None, deadline=None,
    suppress_health_check=list(HealthCheck), print_blob=True,
)  # fmt: skip


def _counting(machine: type[RuleBasedStateMachine], ran: list[str], runner: str) -> Any:
    def teardown(self: Any) -> None:
        ran.append(machine.__name__)
        machine.teardown(self)

    return type(machine.__name__, (machine,), {"teardown": teardown, "RUNNER": runner})


@contextmanager
def _session(needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    from pyspark.sql import SparkSession

    from airflow_geneva.spark.installation import java_environment

    os.environ.update(java_environment(Path(tempfile.gettempdir()) / "java"), PYSPARK_PYTHON=sys.executable)
    made = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    try:
        yield
    finally:
        made.stop()
