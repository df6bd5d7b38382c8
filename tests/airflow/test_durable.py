"""`durable`: an `apply` in cluster mode goes back to the application that it started. YARN is played by this file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from airflow import __version__ as airflow_version
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from packaging.version import Version

from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.errors import GenevaError
from tests.airflow.conftest import Desk
from tests.support.desk import connect_spark, make_dag, texts
from tests.support.driver_played import compute_as_driver
from tests.support.driving import Driver

pytestmark = pytest.mark.airflow
remembers = pytest.mark.skipif(Version(airflow_version) < Version("3.3"), reason="needs the task state store")

SPARK_SUBMIT = """#!{python} -I
import json, sys
with open({record!r}, "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")
print("INFO Client: Submitted application application_1_" + str(len(open({record!r}).readlines())))
"""
RUNNING, LOST, DONE = ("RUNNING", "UNDEFINED"), ("RUNNING", "of no known kind"), ("FINISHED", "SUCCEEDED")
BROKEN = ("FINISHED", "FAILED")


@dataclass
class Yarn:
    """A resource manager, and what was submitted to it.

    Args:
        record: where spark-submit notes what it was started with.
        answers: what is said of the state of an application, one for each question; the last one for ever.
        killed: applications that somebody ended.
    """

    record: Path
    answers: list[tuple[str, str]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    def submitted(self) -> list[list[str]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []

    def state(self) -> tuple[str, str]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer in (DONE, BROKEN):
            with nullcontext() if answer == DONE else pytest.raises(GenevaError):
                compute_as_driver(self.submitted()[-1])
        return answer


@pytest.fixture
def yarn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yarn]:
    cluster = Yarn(tmp_path / "submitted")
    program = tmp_path / "bin" / "spark-submit"
    program.parent.mkdir()
    program.write_text(SPARK_SUBMIT.format(python=sys.executable, record=str(cluster.record)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state, final = cluster.state()
            self._answer({"app": {"state": state, "finalStatus": final}})

        def do_PUT(self) -> None:
            cluster.killed.append(self.path.split("/")[-2])
            self._answer({})

        def _answer(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    extra = {"deploy-mode": "cluster", "yarn_resourcemanager_webapp_address": f"127.0.0.1:{server.server_port}"}
    connect_spark(monkeypatch, host="yarn", extra=extra)
    yield cluster
    server.shutdown()


def begin(desk: Desk, kill: str | None = None, function: str = "length", **settings: Any) -> Driver:
    desk.append("a")
    desk.define(n=function)
    given = {"spark_submit": {"yarn_track_via_rm_api": True}, "inline_below_rows": 0, **settings}
    return Driver.trigger(make_dag(desk, **given)).go(kill)


@remembers
@pytest.mark.shows(
    "Stop, kill, restart", "the same in cluster mode (Airflow 3.3, where it is the default), and the task is killed"
)
def test_a_retry_goes_back_to_the_application_that_runs(desk: Desk, yarn: Yarn) -> None:
    yarn.answers = [LOST, RUNNING, DONE]
    run = begin(desk, default_args={"retries": 1})
    assert run.state == "success", run.errors
    assert run.tries("backfill.shards.apply", 0) == 2
    assert len(yarn.submitted()) == 1
    assert desk.values() == dict.fromkeys(texts("a"), 3)


@remembers
def test_a_failed_application_is_told_by_the_reason_that_it_recorded(desk: Desk, yarn: Yarn) -> None:
    """Its output is on the cluster."""
    desk.break_at("a03")
    yarn.answers = [BROKEN]
    told = begin(desk).error("backfill.shards.apply", 0)
    assert told.startswith(f"Computing shard 0 of {desk.table.name}.n failed: ")
    assert "cannot measure a03" in told


@remembers
@pytest.mark.shows(
    "Stop, kill, restart",
    "clear `plan` with downstream, or `apply` after its checkpoints were removed, in cluster mode",
)
def test_a_new_plan_gets_an_application_of_its_own(desk: Desk, yarn: Yarn) -> None:
    yarn.answers = [DONE]
    run = begin(desk)
    assert run.state == "success", run.errors
    desk.append("b")
    run.clear("backfill.plan").go()
    assert run.state == "success", run.errors
    assert len(yarn.submitted()) == 2
    assert desk.values() == dict.fromkeys(texts("ab"), 3)


@remembers
@pytest.mark.parametrize("has_code", [True, False], ids=["the worker asks", "spark asks"])
def test_what_is_started_when_a_batch_api_has_answered_is_an_application_of_its_own(
    desk: Desk, yarn: Yarn, monkeypatch: pytest.MonkeyPatch, has_code: bool
) -> None:
    if not has_code:
        monkeypatch.setattr(Udfs, "have_planned_version", lambda udfs: False)
    yarn.answers = [DONE]
    run = begin(desk, function="Later")
    assert (run.state, run.tries("backfill.shards.apply", 0)) == ("success", 1), run.errors
    # One submits, and one fetches. If the worker has no code, two look in between, and find nothing.
    assert len(yarn.submitted()) == (2 if has_code else 4)
    assert desk.values() == dict.fromkeys(texts("a"), 3)
    assert desk.calls() == texts("a")


@remembers
@pytest.mark.shows("Stop, kill, restart", "stop a task that went back to its application")
def test_a_task_that_is_stopped_ends_the_application_that_it_went_back_to(
    desk: Desk, yarn: Yarn, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = SparkSubmitOperator.poll_until_complete
    tries: list[str] = []

    def stop_the_second(self: SparkSubmitOperator, external_id: Any, context: Any) -> None:
        tries.append(external_id)
        if len(tries) == 2:
            self.on_kill()
        poll(self, external_id, context)

    monkeypatch.setattr(SparkSubmitOperator, "poll_until_complete", stop_the_second)
    yarn.answers = [LOST, RUNNING, LOST]
    run = begin(desk, default_args={"retries": 1})
    assert run.state == "failed"
    assert tries == ["application_1_1"] * 2
    assert yarn.killed == ["application_1_1"]


@remembers
@pytest.mark.shows(
    "Stop, kill, restart",
    "clear `plan` with downstream, or `apply` after its checkpoints were removed, in cluster mode",
)
def test_an_application_is_submitted_again_when_what_it_computed_is_gone(desk: Desk, yarn: Yarn) -> None:
    yarn.answers = [DONE]
    run = begin(desk, kill="backfill.shards.commit")
    assert run.state == "failed"
    for checkpoints in Path(desk.table.uri).glob("_checkpoints/udf-*"):
        shutil.rmtree(checkpoints)
    run.clear("backfill.shards.apply").go()
    assert run.state == "success", run.errors
    assert len(yarn.submitted()) == 2
    assert desk.values() == dict.fromkeys(texts("a"), 3)


@remembers
def test_yarn_is_asked_by_its_rest_interface_or_the_task_is_not_durable(desk: Desk, yarn: Yarn) -> None:
    run = begin(desk, spark_submit={})
    assert "requires yarn_track_via_rm_api=True" in run.error("backfill.shards.apply", 0)
    assert yarn.submitted() == []
    again = Driver.trigger(make_dag(desk, inline_below_rows=0, spark_submit={"durable": False})).go()
    assert len(yarn.submitted()) == 1
    assert "wrote no result" in again.error("backfill.shards.apply", 0)
