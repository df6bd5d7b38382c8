"""Random histories in which a table changes inside of runs: rows that others only move become visible all the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.counting import TRACE, Trace
from tests.support.within import Inline, OnSpark, Way, check

pytestmark = pytest.mark.crash

HISTORIES = int(os.environ.get("GENEVA_WITHIN_HISTORIES", "4"))
SOAK_SECONDS = float(os.environ.get("GENEVA_SOAK_SECONDS", "1800"))


@pytest.fixture(scope="module")
def on_spark(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnSpark]:
    environment, trace = spark.sparkContext.environment, Trace(tmp_path_factory.mktemp("spark") / "trace")
    environment[TRACE] = str(trace.path)
    yield OnSpark(trace)
    del environment[TRACE]


@pytest.fixture(scope="module")
def in_airflow(airflow_db: Path) -> Way:
    from tests.support.within_airflow import InAirflow

    return InAirflow()


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_rows_that_move_within_a_run_become_visible_in_it(tmp_path: Path, seed: int) -> None:
    check(seed, tmp_path / "world", Inline())


@pytest.mark.airflow
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_move_within_a_run_of_a_dag_become_visible_in_it(tmp_path: Path, in_airflow: Way, seed: int) -> None:
    check(seed, tmp_path / "world", in_airflow)


@pytest.mark.spark
@pytest.mark.parametrize("seed", range(2))
def test_rows_that_move_within_a_run_on_spark_become_visible_in_it(
    tmp_path: Path, on_spark: OnSpark, seed: int
) -> None:
    check(seed, tmp_path / "world", on_spark)


def live_through(way: Way, folder: Path, most: int) -> str:
    """Live through histories until there are enough of them, or until they took long enough."""
    until, count, kills = time.monotonic() + SOAK_SECONDS, 0, 0
    while time.monotonic() < until and count < most:
        kills += check(10_000 + count, folder / str(count), way)
        count += 1
    return f"{count:,} histories, {kills:,} kills"


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    return say


@pytest.mark.soak
def test_seven_hundred_histories_with_changes_within_runs(tmp_path: Path, say: Callable[[str], None]) -> None:
    say(live_through(Inline(), tmp_path, 700))


@pytest.mark.soak
@pytest.mark.airflow
def test_two_hundred_histories_of_dags_with_changes_within_runs(
    tmp_path: Path, in_airflow: Way, say: Callable[[str], None]
) -> None:
    say(live_through(in_airflow, tmp_path, 200))


@pytest.mark.soak
@pytest.mark.spark
def test_a_hundred_histories_on_spark_with_changes_within_runs(
    tmp_path: Path, on_spark: OnSpark, say: Callable[[str], None]
) -> None:
    say(live_through(on_spark, tmp_path, 100))
