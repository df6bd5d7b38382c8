"""Signs of life: written while a step runs, harmless when they cannot be, and what their absence means."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest

from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.heartbeat import (
    APPROVAL_TIMEOUT,
    RUNNING_TIMEOUT,
    WAITING_TIMEOUT,
    Heartbeat,
    heartbeat_timeout,
    writing_heartbeats,
)
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.errors import StorageError

PRINT = "f" * 64


class Refusing(Storage):
    """A store that is full."""

    def write_json(self, name: str, document: object) -> None:
        raise StorageError("no space left on device")


def read(job: JobFolder, by: str = "status") -> Heartbeat:
    found = Heartbeat.from_json(json.loads(Path(job.storage.path(f"{by}-{PRINT[:16]}-0000.json")).read_text())["alive"])
    assert found is not None
    return found


def test_a_stage_shows_life_at_once_and_says_when_it_is_over(tmp_path: Path) -> None:
    job = JobFolder(Storage.at(str(tmp_path)), "j")
    with writing_heartbeats(job, "apply", PRINT):
        first = read(job)
    last = read(job)
    assert (first.step, first.over) == ("apply", False)
    assert (last.step, last.over) == ("apply", True)
    assert last.at >= first.at


def test_it_goes_on_beating_while_the_stage_is_stuck(tmp_path: Path) -> None:
    job = JobFolder(Storage.at(str(tmp_path)), "j")
    with writing_heartbeats(job, "apply", PRINT, every=0.01):
        seen = {read(job).at}
        while len(seen) < 4:
            time.sleep(0.005)
            seen.add(read(job).at)
    assert "geneva-heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_a_stage_that_fails_is_over_and_its_error_is_its_own(tmp_path: Path) -> None:
    job = JobFolder(Storage.at(str(tmp_path)), "j")
    with pytest.raises(ZeroDivisionError), writing_heartbeats(job, "commit", PRINT):
        raise ZeroDivisionError
    assert read(job, "commit").over


def test_a_store_that_takes_no_heartbeat_does_not_disturb_the_job_and_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = []
    with (
        caplog.at_level(logging.WARNING),
        writing_heartbeats(JobFolder(Refusing(str(tmp_path)), "j"), "apply", PRINT, every=0.01),
    ):
        time.sleep(0.1)
        done.append(True)
    assert done
    assert [record.getMessage() for record in caplog.records] == [
        "Cannot write the heartbeat of this job; the job goes on: no space left on device"
    ]


@pytest.mark.parametrize("document", [None, {}, {"at": "soon", "step": "apply"}, {"at": None, "step": "x"}])
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


def test_a_heartbeat_keeps_what_this_process_and_that_of_an_earlier_try_say_of_a_shard(tmp_path: Path) -> None:
    job = JobFolder(Storage.at(str(tmp_path)), "j")
    job.update_shard(PRINT, 0, spent={"rows": 1})
    name, earlier = f"status-{PRINT[:16]}-0000.json", {"spent": {"rows": 1}, "applied": {"seconds": 2.0}}
    with writing_heartbeats(job, "apply", PRINT, every=60.0):
        job.update_shard(PRINT, 0, applying={"rows": 5}, started={"at": 1.0}, committing={"rows": 3})
        job.storage.write_json(name, earlier)
    found = job.read_shard(PRINT, 0)
    assert found.pop("alive")["over"]
    assert found == {**earlier, "applying": {"rows": 5}}
    assert job.read_shard(PRINT, 0, "submit") == {"started": {"at": 1.0}}
    assert job.read_shard(PRINT, 0, "commit") == {"committing": {"rows": 3}}
