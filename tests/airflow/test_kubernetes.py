"""`apply` on Kubernetes: Spark's own client, driver and executors, on an API server that runs pods as processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow import __version__ as airflow_version
from airflow.providers.apache.spark.hooks import spark_submit
from packaging.version import Version

from airflow_geneva.errors import GenevaError
from airflow_geneva.operators import ApplyOperator
from tests.airflow.conftest import Desk
from tests.support.bare_python import make_bare_python
from tests.support.desk import connect_spark, make_dag, texts
from tests.support.driver_played import compute_as_driver
from tests.support.driving import Driver
from tests.support.kubernetes_api import SPARK, Cluster, run_cluster

pytest.importorskip("airflow.providers.cncf.kubernetes")
pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow]

TRACKED = {"deploy_mode": "cluster", "track_driver_via_k8s_api": True}
WATCHED = {"deploy_mode": "cluster"}


@pytest.fixture
def cluster(java_home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose image has a Python without this package; the worker knows it by a kubeconfig."""
    image = {
        "PATH": os.environ["PATH"],
        "JAVA_HOME": java_home,
        "SPARK_HOME": str(SPARK),
        "PYSPARK_PYTHON": make_bare_python(tmp_path / "python"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
    }
    with run_cluster(tmp_path / "pods", image) as cluster:
        named = {
            "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
            "users": [{"name": "u", "user": {"token": "of-the-worker"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "spark"}}],
        }
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "x", **named}))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setenv("AIRFLOW__KUBERNETES_EXECUTOR__IN_CLUSTER", "False")
        monkeypatch.setenv("AIRFLOW__KUBERNETES_EXECUTOR__CONFIG_FILE", str(kubeconfig))
        connect_spark(monkeypatch, host=f"k8s://{cluster.url}", extra={"namespace": "spark"})
        # The provider asks the API every 20 seconds.
        soon = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100), monotonic=time.monotonic)
        monkeypatch.setattr(spark_submit, "time", soon)
        yield cluster


def begin(desk: Desk, how: dict[str, Any], **settings: Any) -> Driver:
    uploads = Path(desk.database.uri).parent / "uploads"
    uploads.mkdir()
    conf = {
        "spark.kubernetes.container.image": "image",
        "spark.kubernetes.file.upload.path": f"file://{uploads}",
        "spark.executor.memory": "512m",
        **how.get("conf", {}),
    }
    desk.append("a")
    desk.define(n="length")
    given = {"inline_below_rows": 0, "concurrency": 1, "spark_submit": {**how, "conf": conf}, **settings}
    return Driver.trigger(make_dag(desk, **given)).go()


def play_driver(cluster: Cluster) -> None:
    """Let the driver's pod compute in this process, without Spark."""

    def entrypoint(arguments: list[str], environment: Any) -> list[str]:
        try:
            compute_as_driver(arguments)
        except GenevaError:
            return ["false"]
        return ["true"]

    cluster.entrypoint = entrypoint


def test_in_cluster_mode_the_driver_and_the_executors_are_pods(desk: Desk, cluster: Cluster) -> None:
    run = begin(desk, WATCHED)
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("a"), 3)
    [driver], [executor] = cluster.pods("driver"), cluster.pods("executor")
    assert any("spark-upload" in argument for argument in driver["spec"]["containers"][0]["args"])
    assert cluster.identities[0] == "Bearer of-the-worker"
    assert driver["status"]["phase"] == "Succeeded"
    [container] = executor["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "1"
    # What the driver made, it removes, and its own pod is left for its log.
    assert [kind for kind, _ in cluster.resources if kind == "pods"] == ["pods"]


def test_in_client_mode_the_executors_are_pods(desk: Desk, cluster: Cluster) -> None:
    here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    run = begin(desk, {"conf": here})
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("a"), 3)
    assert (len(cluster.pods("driver")), len(cluster.pods("executor"))) == (0, 1)


@pytest.mark.parametrize("how", [TRACKED, WATCHED], ids=["asks the API", "waits for spark-submit"])
def test_a_failed_driver_is_told_by_the_reason_that_it_recorded(
    desk: Desk, cluster: Cluster, how: dict[str, Any]
) -> None:
    desk.break_at("a03")
    play_driver(cluster)
    told = begin(desk, how).error("backfill.shards.apply", 0)
    assert told.startswith(f"Computing shard 0 of {desk.table.name}.n failed: ")
    assert "cannot measure a03" in told
    assert "--conf" not in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("how", [TRACKED, WATCHED], ids=["asks the API", "waits for spark-submit"])
def test_a_stopped_task_deletes_the_drivers_pod(
    desk: Desk, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    running: list[ApplyOperator] = []
    execute = ApplyOperator.execute
    monkeypatch.setattr(ApplyOperator, "execute", lambda self, context: running.append(self) or execute(self, context))

    def entrypoint(arguments: list[str], environment: Any) -> list[str]:
        def stop() -> None:
            while not running[0]._hook._kubernetes_driver_pod:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop, daemon=True).start()
        return ["sleep", "3600"]

    cluster.entrypoint = entrypoint
    before = signal.signal(signal.SIGTERM, lambda number, frame: running[0].on_kill())
    try:
        run = begin(desk, how)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert run.state == "failed"
    [driver] = cluster.pods("driver")
    name = driver["metadata"]["name"]
    assert ("DELETE", f"/api/v1/namespaces/spark/pods/{name}") in cluster.requests
    assert cluster.processes[name].wait(60) == -signal.SIGTERM


@pytest.mark.skipif(Version(airflow_version) < Version("3.3"), reason="needs the task state store")
def test_a_retry_goes_back_to_the_pod_that_runs(desk: Desk, cluster: Cluster) -> None:
    lost = threading.Event()

    def entrypoint(arguments: list[str], environment: Any) -> list[str]:
        cluster.unavailable = 3  # after so many the task fails
        while cluster.unavailable:
            time.sleep(0.05)
        compute_as_driver(arguments)
        lost.set()
        return ["true"]

    cluster.entrypoint = entrypoint
    run = begin(desk, TRACKED, default_args={"retries": 1})
    assert run.state == "success", run.errors
    assert lost.is_set()
    assert run.tries("backfill.shards.apply", 0) == 2
    assert len(cluster.pods("driver")) == 1
    assert desk.values() == dict.fromkeys(texts("a"), 3)
