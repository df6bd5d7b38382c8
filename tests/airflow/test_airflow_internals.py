"""What is private in Airflow and its Spark provider: what it must be able to do, and what happens without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.models.connection import Connection
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Asset
from airflow.sdk.log import mask_secret
from airflow.triggers.base import BaseEventTrigger
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from airflow_geneva.errors import GenevaError
from airflow_geneva.operators import _airflow_internals as internals
from airflow_geneva.triggers import NewFragmentsTrigger
from tests.airflow.conftest import Desk
from tests.support.browsing import Get
from tests.support.desk import make_dag
from tests.support.driving import Driver
from tests.support.rights import Rights

pytestmark = pytest.mark.airflow

USER = SimpleNamespace(username="reader")
NEEDED: dict[str, tuple[Callable[[], Any], str]] = {
    "asset_events": (lambda: internals.asset_events(Asset("docs"), 1), "airflow.sdk.execution_time.context"),
    "rendered_in_task": (
        lambda: internals.rendered_in_task(None, repr, "it"),
        "airflow.sdk.definitions._internal.mixins",
    ),
    "redact": (internals.redact, "airflow.sdk._shared.secrets_masker"),
    "redact_of_the_server": (internals.redact, "airflow._shared.secrets_masker"),
    "user_dependency": (internals.user_dependency, "airflow.api_fastapi.core_api.security"),
    "may_read_dag": (lambda: internals.may_read_dag(USER, "docs"), "airflow.api_fastapi.app"),
    "may_read_connection": (lambda: internals.may_read_connection(USER, "shelf"), "airflow.api_fastapi.app"),
    "stored_connections": (lambda: internals.stored_connections("lance"), "airflow.models.connection"),
    "may_trigger_dag": (lambda: internals.may_trigger_dag(USER, "docs"), "airflow.api_fastapi.app"),
    "dags_that_write": (lambda: internals.dags_that_write("lance://docs"), "airflow.models.asset"),
    "dags_of_assets": (lambda: list(internals.dags_of_assets("lance://")), "airflow.models.asset"),
    "xcoms": (lambda: internals.xcoms("docs", "summary", "one"), "airflow.models.xcom"),
}


@pytest.mark.parametrize("use", NEEDED)
def test_what_a_version_of_airflow_lacks_is_named(monkeypatch: pytest.MonkeyPatch, airflow_db: Path, use: str) -> None:
    call, module = NEEDED[use]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(GenevaError, match=rf"Airflow 3.*{module}.*Install"):
        call()


def test_without_retry_policies_airflow_counts_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the policy does is in test_retries.py."""
    monkeypatch.setitem(sys.modules, "airflow.sdk", SimpleNamespace())
    assert internals.default_retry_policy() is None


def test_a_schedule_that_batches_is_what_it_was_given_before_airflow_3_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a burst of events starts is in test_refresh_examples.py."""
    first, second = Asset("first"), Asset("second")
    for given in (first, [first], first | second, first & second, [first, second]):
        with DAG("batching", schedule=internals.batching_schedule(given)) as dag:
            conditions = [one.timetable.asset_condition for one in (dag, DAG("given", schedule=given))]  # type: ignore[attr-defined]
            assert repr(conditions[0]) == repr(conditions[1])
    monkeypatch.setitem(sys.modules, "airflow.sdk", SimpleNamespace())
    assert internals.batching_schedule(first) is first


def test_events_of_an_asset_that_is_no_inlet_are_read_newest_first(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of a task; see also test_announcing.py."""
    from airflow.sdk.execution_time import context

    class Listing:  # no dict: an asset of Airflow 3.1 has no hash
        def __init__(self, assets: list[Asset]) -> None:
            pass

        def __getitem__(self, asset: Asset) -> list[str]:
            return ["old", "new"]

    listed = SimpleNamespace(InletEventsAccessors=Listing)
    with monkeypatch.context() as before_3_2:
        before_3_2.setitem(sys.modules, context.__name__, listed)
        assert internals.asset_events(Asset("docs"), None) == ["new", "old"]
        assert internals.asset_events(Asset("docs"), 1) == ["new"]
    desk.append("a")
    desk.define(n="length")
    assert Driver.trigger(make_dag(desk)).go().state == "success"
    read: list[Any] = []
    monkeypatch.setattr(
        "airflow_geneva.operators.commit.Configuration.read",
        lambda: read.extend(internals.asset_events(Asset(desk.asset, f"lance://{desk.asset}"), 5)) or 1 / 0,
    )
    desk.append("b")
    Driver.trigger(make_dag(desk)).go()
    assert [event.extra["to_version"] for event in read] == [desk.table.version - 1]


def test_the_state_of_an_asset_is_stored_where_airflow_does(airflow_db: Path) -> None:
    """What is stored there is in test_new_fragments_trigger.py."""
    trigger = NewFragmentsTrigger("docs")
    assert internals.state_store(SimpleNamespace()) is None
    if hasattr(BaseEventTrigger, "asset_state_store"):
        trigger.asset_state_store = "a store"
        assert internals.state_store(trigger) == "a store"


def test_both_maskers_know_what_a_hook_masks() -> None:
    mask_secret("planted-in-a-hook")
    assert "planted" not in str(internals.redact()("it is planted-in-a-hook"))
    from airflow._shared.secrets_masker import mask_secret as mask_secret_of_the_server

    mask_secret_of_the_server("planted-in-the-server")
    assert "planted" not in str(internals.redact()("it is planted-in-the-server"))


def test_a_user_is_asked_of_airflow(browse: Get) -> None:
    app = FastAPI()
    app.get("/")(lambda: "seen")
    app.get("/closed", dependencies=[Depends(internals.user_dependency())])(lambda: "seen")
    assert TestClient(app).get("/").status_code == 200
    assert TestClient(app).get("/closed").status_code == 401
    Rights.give("reader", dags=["docs"], connections=["shelf"])
    assert internals.may_read_dag(USER, "docs")
    assert not internals.may_read_dag(USER, "books")
    assert internals.may_read_connection(USER, "shelf")
    assert not internals.may_read_connection(USER, "other")


def test_airflows_database_is_asked_for_connections_assets_and_xcoms(desk: Desk) -> None:
    with create_session() as session:
        session.add(Connection(conn_id="stored_lance", conn_type="lance"))
        session.add(Connection(conn_id="stored_other", conn_type="fs"))
    try:
        stored = internals.stored_connections("lance")
    finally:
        with create_session() as session:
            for one in session.query(Connection).where(Connection.conn_id.startswith("stored_")):
                session.delete(one)
    assert "stored_lance" in stored
    assert "stored_other" not in stored
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go()
    found = set(internals.dags_of_assets("lance://"))
    assert (f"lance://{desk.asset}", f"dag_{desk.table.name}") in found
    [(_, task_id, map_index, summary)] = internals.xcoms(f"dag_{desk.table.name}", "summary", run.run_id)
    assert (task_id, map_index, summary["table"]) == ("backfill.plan", -1, desk.table.name)
    desk.append("b")
    run.clear("backfill.plan").go()
    [(_, _, _, newest)] = internals.xcoms(f"dag_{desk.table.name}", "summary", run.run_id)
    assert newest["plan_uri"] != summary["plan_uri"], "only what the newest try of a task pushed counts"


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> SparkSubmitOperator:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[2]"}')
    return SparkSubmitOperator(task_id="apply", application="x.py", num_executors=3, total_executor_cores=6)


def test_the_hook_submits_where_and_with_what_it_is_redirected_to(
    operator: SparkSubmitOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = operator._get_hook()
    assert {"master", "deploy_mode", "spark_binary"} <= internals.resolved_connection(hook).keys()
    assert internals.resolved_connection(hook)["master"] == "local[2]"
    assert not internals.has_driver(None)
    assert not internals.has_driver(hook)
    started: list[Any] = []

    class Submitted:
        stdout = iter(["airflow_geneva: it broke"])

        def __init__(self, command: list[str], **given: Any) -> None:
            started.append((command, given["env"]))

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Submitted)
    internals.redirect(hook, "local[1]", {"ONLY": "this"})
    hook.submit("x.py")
    [(command, environment)] = started
    assert command[command.index("--master") + 1] == "local[1]"
    assert environment == {"ONLY": "this"}
    assert internals.has_driver(hook)
    assert list(internals.submit_log(hook)) == ["airflow_geneva: it broke"]
    assert list(internals.submit_log(None)) == []


def test_the_hook_ends_an_application_of_yarn_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = SparkSubmitHook.__new__(SparkSubmitHook)
    monkeypatch.setattr(hook, "_is_yarn_cluster_mode", False, raising=False)
    internals.adopt_application(None, "application_1_1")
    internals.adopt_application(hook, "application_1_1")
    assert not internals.has_driver(hook)
    monkeypatch.setattr(hook, "_is_yarn_cluster_mode", True)
    internals.adopt_application(hook, "application_1_1")
    assert internals.has_driver(hook)


def test_an_operators_own_arguments_are_spark_settings(operator: SparkSubmitOperator) -> None:
    assert internals.own_settings(operator) == {
        "spark.cores.max": 6,
        "spark.executor.cores": None,
        "spark.executor.memory": None,
        "spark.executor.instances": 3,
    }


def test_a_durable_operator_looks_for_its_application_under_its_own_name(operator: SparkSubmitOperator) -> None:
    """What comes of it is in test_durable.py."""
    internals.scope_reconnection(operator, "plan")
    assert operator.external_id_key == f"{SparkSubmitOperator.external_id_key}_plan"
    assert f"{SparkSubmitOperator._K8S_DRIVER_STATUS_KEY}_plan" == operator._K8S_DRIVER_STATUS_KEY
