"""Signs of life: written while a stage runs, harmless when they cannot be, and what their absence means."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest

from airflow_geneva.errors import StorageError
from airflow_geneva.job.heartbeat import (
    APPROVAL_TIMEOUT,
    HEARTBEAT,
    RUNNING_TIMEOUT,
    WAITING_TIMEOUT,
    Heartbeat,
    heartbeat_timeout,
    writing_heartbeats,
)
from airflow_geneva.storage.files import Storage


class Refusing(Storage):
    """A store that is full."""

    def write_json(self, name: str, document: object) -> None:
        raise StorageError("no space left on device")


def read(job: Storage) -> Heartbeat:
    found = Heartbeat.from_json(job.read_json(HEARTBEAT))
    assert found is not None
    return found


def test_a_stage_shows_life_at_once_and_says_when_it_is_over(tmp_path: Path) -> None:
    job = Storage.at(str(tmp_path))
    with writing_heartbeats(job, "apply"):
        first = read(job)
    last = read(job)
    assert (first.stage, first.over, first.pid) == ("apply", False, os.getpid())
    assert (last.stage, last.over) == ("apply", True)
    assert last.at >= first.at


def test_it_goes_on_beating_while_the_stage_is_stuck(tmp_path: Path) -> None:
    job = Storage.at(str(tmp_path))
    with writing_heartbeats(job, "apply", every=0.01):
        seen = {read(job).at}
        while len(seen) < 4:
            time.sleep(0.005)
            seen.add(read(job).at)
    assert "geneva-heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_a_stage_that_fails_is_over_and_its_error_is_its_own(tmp_path: Path) -> None:
    job = Storage.at(str(tmp_path))
    with pytest.raises(ZeroDivisionError), writing_heartbeats(job, "commit"):
        raise ZeroDivisionError
    assert read(job).over


def test_a_store_that_takes_no_heartbeat_does_not_disturb_the_job_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = []
    with caplog.at_level(logging.WARNING), writing_heartbeats(Refusing(str(tmp_path)), "apply", every=0.01):
        time.sleep(0.1)
        done.append(True)
    assert done
    assert [record.getMessage() for record in caplog.records] == [
        "Cannot write the heartbeat of this job; the job goes on: no space left on device"
    ]


@pytest.mark.parametrize("document", [None, {}, {"at": "soon", "stage": "apply"}, {"at": None, "stage": "x"}])
def test_what_is_no_heartbeat_is_none(document: dict[str, object] | None) -> None:
    assert Heartbeat.from_json(document) is None


def test_only_a_worker_that_fell_silent_and_that_nobody_tries_again_is_given_up_soon() -> None:
    working = Heartbeat(0.0, "apply")
    assert heartbeat_timeout(working, retried=False) == RUNNING_TIMEOUT
    assert heartbeat_timeout(working, retried=True) == WAITING_TIMEOUT
    assert heartbeat_timeout(Heartbeat(0.0, "plan", over=True), retried=False) == WAITING_TIMEOUT
    assert heartbeat_timeout(None, retried=False) == WAITING_TIMEOUT
    assert heartbeat_timeout(working, retried=True, asked=True) == APPROVAL_TIMEOUT
    assert RUNNING_TIMEOUT < WAITING_TIMEOUT < APPROVAL_TIMEOUT
