"""`RefreshTaskGroup`, run by Airflow: what a view shows, what is announced, and what a clear or a retry does."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, task

from airflow_geneva import View, connect
from airflow_geneva.assets import lance_asset
from airflow_geneva.engine.job.outbox import read_outbox
from airflow_geneva.engine.job.status import Job
from airflow_geneva.task_groups import RefreshTaskGroup
from tests.airflow.conftest import Desk
from tests.support.desk import ROWS, texts
from tests.support.driving import Driver, events
from tests.support.processes import as_another_process

pytestmark = pytest.mark.airflow


def make_view(desk: Desk) -> View:
    """A view of the desk's table, named like no other test's."""
    udfs = importlib.import_module("geneva_dag_udfs")
    return (
        desk.table.query()
        .where("text NOT LIKE 'x%'")
        .select({"text": "text", "n": udfs.length})
        .create_materialized_view(desk.database, f"view_of_{desk.table.name}")
    )


def make_dag(of: View, **settings: Any) -> DAG:
    """A DAG with one group over a view, a shard a source fragment, and a task behind it."""
    arguments = {name: settings.pop(name) for name in ("params", "default_args") if name in settings}
    with DAG(f"dag_{of.name}", schedule=None, **arguments) as dag:

        @task
        def after() -> str:
            return "ran"

        given = {"view": of.name, "inline_below_rows": 10**9, "shard_size": 1, **settings}
        RefreshTaskGroup(**given) >> after()
    return dag


def go(view: View, **settings: Any) -> Driver:
    run = Driver.trigger(make_dag(view, **settings)).go()
    assert run.state == "success", run.errors
    return run


def shown(view: View) -> dict[str, int]:
    rows = view.to_arrow()
    found = list(zip(rows["text"].to_pylist(), rows["n"].to_pylist(), strict=True))
    assert len(dict(found)) == len(found), "a row is there twice"
    return dict(found)


def announced(view: View) -> list[dict[str, Any]]:
    return events(f"lance_default/{view.name}")


def test_a_source_in_another_database_is_opened_if_the_job_was_given_it(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who may write the view's folder may change its definition."""
    desk.append("a")
    elsewhere = connect(tmp_path / "elsewhere")
    view = desk.table.query().select(["text"]).create_materialized_view(elsewhere, f"view_of_{desk.table.name}")
    as_another_process()
    # It lies in the database of the task's own connection.
    go(view, database=elsewhere.uri)
    assert view.to_arrow().num_rows == ROWS
    monkeypatch.setenv("AIRFLOW_CONN_DESK", json.dumps({"conn_type": "lance", "host": desk.database.uri}))
    monkeypatch.setenv("AIRFLOW_CONN_SHELF", json.dumps({"conn_type": "lance", "host": elsewhere.uri}))
    told = Driver.trigger(make_dag(view, lance_conn_id="shelf")).go().error("refresh.plan")
    assert "names a source in another database" in told
    assert "RefreshTaskGroup(sources=[...])" in told
    for given in (["desk"], [desk.database.uri], '["desk"]'):
        go(view, lance_conn_id="shelf", sources=given)


@pytest.mark.core
def test_a_first_refresh_shows_the_query_at_once_and_is_announced_once(desk: Desk) -> None:
    desk.append("axbc")
    view = make_view(desk)
    planned_on = view.version
    run = go(view)
    assert run.states()["refresh.shards.commit"] == ["success"] * 3
    assert run.states()["after"] == "success"
    assert shown(view) == dict.fromkeys(texts("abc"), 3)
    assert desk.calls() == texts("abc")
    [event] = announced(view)
    assert event.pop("commit")
    assert event == {
        "producer": "airflow_geneva",
        "table": view.name,
        "column": None,
        "from_version": planned_on,
        "to_version": run.xcom("refresh.finish")["commits"][0],
        "job_id": run.xcom("refresh.plan", "summary")["job_id"],
        "state": "DONE",
        "rows_computed": 3 * ROWS,
        "rows_reused": 0,
        "rows_failed": 0,
        "rows_left": 0,
        "source": desk.table.name,
        "source_version": desk.table.version,
    }
    assert len(run.xcom("refresh.finish")["commits"]) == 1
    summary = run.xcom("refresh.plan", "summary")
    assert (summary["view"], summary["source"]) == (view.name, desk.table.name)
    assert (summary["rows_total"], summary["rows_pending"]) == (4 * ROWS, 3 * ROWS)


@pytest.mark.shows("Run", "run with nothing to do")
def test_nothing_to_do_has_no_shard_and_writes_no_version_and_no_event(desk: Desk) -> None:
    desk.append("ab")
    view = make_view(desk)
    go(view)
    desk.calls()
    version = view.version
    desk.append("x")
    for _ in range(2):
        run = go(view)
        assert run.xcom("refresh.plan") == []
        assert run.states()["refresh.shards.apply"] == "skipped"
        assert run.states()["after"] == "success"
        assert run.xcom("refresh.finish")["event"] is None
    assert (view.version, desk.calls()) == (version, [])
    assert len(announced(view)) == 1
    assert read_outbox(view.location.checkpoints, "view") == []


def test_rows_that_come_and_go_are_one_swap_and_an_event_begins_where_the_last_one_ended(desk: Desk) -> None:
    desk.append("abc")
    view = make_view(desk)
    go(view)
    desk.calls()
    view.lance.create_scalar_index("n", "BTREE")
    desk.append("d")
    desk.table.lance.delete("text LIKE 'b%' OR text = 'c03'")
    run = go(view, indexes="update")
    assert run.xcom("refresh.finish")["unindexed_rows"] == 0
    assert view.lance.stats.index_stats("n_idx")["num_unindexed_rows"] == 0
    assert desk.calls() == texts("d")
    assert shown(view) == dict.fromkeys([text for text in texts("acd") if text != "c03"], 3)
    first, second = announced(view)
    assert second["from_version"] == first["to_version"]
    assert [second["to_version"]] == run.xcom("refresh.finish")["commits"]
    assert second["rows_computed"] == ROWS


def test_rows_that_only_leave_are_swapped_out_without_any_shard(desk: Desk) -> None:
    desk.append("ab")
    view = make_view(desk)
    go(view)
    desk.calls()
    desk.table.lance.delete("text LIKE 'b%'")
    run = go(view)
    assert run.xcom("refresh.plan") == []
    assert shown(view) == dict.fromkeys(texts("a"), 3)
    assert desk.calls() == []
    assert len(announced(view)) == 2


@pytest.mark.core
@pytest.mark.shows("Clear", "the same in a refresh")
def test_a_failed_shard_leaves_the_view_as_it_was_and_is_mended_by_clearing_it(desk: Desk) -> None:
    desk.append("a")
    view = make_view(desk)
    go(view)
    desk.calls()
    desk.append("bcd")
    desk.table.lance.delete("text = 'a00'")
    desk.break_at("c04")
    run = Driver.trigger(make_dag(view, default_args={"retries": 0})).go()
    assert run.state == "failed"
    assert run.states()["refresh.shards.commit"] == ["success", "upstream_failed", "success"]
    assert "1 of 3 shards" in run.error("refresh.finish")
    assert "The view is unchanged" in run.error("refresh.finish")
    assert shown(view) == dict.fromkeys(texts("a"), 3)
    assert len(announced(view)) == 1
    job = desk.database.job(run.xcom("refresh.plan", "summary")["job_id"])
    assert (job.state, job.kind, job.target, job.rows_committed) == ("FAILED", "refresh", view.name, 0)
    assert [shard.step for shard in job.shards] == ["verified", "failed", "verified"]
    assert "c04" in str(job.error)

    desk.mend()
    desk.calls()
    run.clear(("refresh.shards.apply", 1)).go()
    assert run.state == "success", run.errors
    assert desk.calls() == texts("c")[4:]
    assert shown(view) == dict.fromkeys([text for text in texts("abcd") if text != "a00"], 3)
    assert len(announced(view)) == 2


@pytest.mark.parametrize("killed", ["refresh.shards.apply", "refresh.shards.commit", "refresh.finish"])
@pytest.mark.shows("Clear", "clear `apply`, `commit` or `finish` of a refresh after it was killed there")
def test_a_killed_task_is_cleared_and_the_run_goes_on_from_there(desk: Desk, killed: str) -> None:
    desk.append("ab")
    view = make_view(desk)
    run = Driver.trigger(make_dag(view)).go(kill=killed)
    assert run.state == "failed"
    assert (shown(view), announced(view)) == ({}, [])
    if killed != "refresh.shards.apply":
        assert desk.calls() == texts("ab")
    tasks = (killed,) if killed == "refresh.finish" else tuple((killed, index) for index in range(2))
    run.clear(*tasks).go()
    assert run.state == "success", run.errors
    assert desk.calls() == (texts("ab") if killed == "refresh.shards.apply" else [])
    assert shown(view) == dict.fromkeys(texts("ab"), 3)
    assert len(announced(view)) == 1


@pytest.mark.shows("Clear", "the same in a refresh, also after a later one")
def test_a_finish_that_is_cleared_swaps_and_announces_nothing_again(desk: Desk) -> None:
    desk.append("ab")
    view = make_view(desk)
    first = go(view)
    version = view.version
    first.clear("refresh.finish").go()
    assert first.state == "success", first.errors
    assert (view.version, len(announced(view))) == (version, 1)
    assert first.xcom("refresh.finish")["rows_computed"] == 2 * ROWS

    desk.append("c")
    go(view)
    version = view.version
    first.clear("refresh.finish").go()
    assert first.state == "success", first.errors
    assert first.xcom("refresh.finish")["state"] == "DONE"
    assert (view.version, len(announced(view))) == (version, 2)


@pytest.mark.shows("Clear", "clear a whole finished run (`plan` with downstream)")
def test_clearing_the_plan_with_its_downstream_takes_the_newest_source(desk: Desk) -> None:
    desk.append("abc")
    view = make_view(desk)
    run = go(view)
    desk.append("d")
    run.clear("refresh.plan").go()
    assert run.state == "success", run.errors
    assert run.states()["refresh.shards.commit"] == ["success", "removed", "removed"]
    assert shown(view) == dict.fromkeys(texts("abcd"), 3)
    assert desk.calls() == texts("abcd")
    first, second = announced(view)
    assert second["from_version"] == first["to_version"]


@pytest.mark.shows("Run", "let two refreshes of a view meet")
def test_a_refresh_that_lost_to_another_is_green_and_announces_nothing(desk: Desk) -> None:
    desk.append("ab")
    view = make_view(desk)
    run = Driver.trigger(make_dag(view)).go(kill="refresh.finish")
    desk.append("c")
    view.refresh(runner="inline")
    desk.calls()
    run.clear("refresh.finish").go()
    assert run.state == "success", run.errors
    result = run.xcom("refresh.finish")
    assert (result["state"], result["event"]) == ("PARTIAL", None)
    assert "another refresh" in result["notes"][-1]
    assert shown(view) == dict.fromkeys(texts("abc"), 3)
    go(view)
    assert desk.calls() == []


@pytest.mark.shows("Run", 'give `on_partial="fail"`, and rows are left')
def test_a_refresh_that_lost_to_another_can_be_red(desk: Desk) -> None:
    desk.append("a")
    view = make_view(desk)
    run = Driver.trigger(make_dag(view, on_partial="fail")).go(kill="refresh.finish")
    desk.append("b")
    view.refresh(runner="inline")
    run.clear("refresh.finish").go()
    assert run.state == "failed"
    assert "another refresh" in run.error("refresh.finish")
    assert "The view is unchanged" in run.error("refresh.finish")
    assert shown(view) == dict.fromkeys(texts("ab"), 3)
    again = go(view, on_partial="fail")
    assert again.xcom("refresh.finish")["state"] == "DONE"


def test_checkpoints_of_a_refresh_that_was_never_finished_are_used(desk: Desk) -> None:
    desk.append("ab")
    view = make_view(desk)
    Driver.trigger(make_dag(view)).go(kill="refresh.shards.commit")
    desk.calls()
    desk.append("c")
    run = go(view)
    assert desk.calls() == texts("c")
    assert run.xcom("refresh.finish")["rows_reused"] == 2 * ROWS
    assert shown(view) == dict.fromkeys(texts("abc"), 3)


def test_the_record_of_a_refresh_names_its_airflow_run(desk: Desk) -> None:
    desk.append("ab")
    view = make_view(desk)
    run = go(view)
    job = desk.database.job(run.xcom("refresh.plan", "summary")["job_id"])
    assert isinstance(job, Job)
    assert job.airflow is not None
    assert (job.airflow.dag_id, job.airflow.run_id) == (f"dag_{view.name}", run.run_id)
    assert (job.state, job.kind, job.view, job.rows_committed) == ("DONE", "refresh", view.name, 2 * ROWS)
    assert set(job.seconds) == {"plan", "apply", "commit", "finish"}


@pytest.mark.core
def test_a_view_on_a_view_follows_both(desk: Desk) -> None:
    desk.append("ab")
    lower = make_view(desk)
    upper = lower.query().where("n > 2").select({"text": "text", "n": "n"}).create_materialized_view(
        desk.database, f"upper_{desk.table.name}"
    )  # fmt: skip
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        common = {"inline_below_rows": 10**9}
        first = RefreshTaskGroup("first", view=lower.name, source=desk.table.name, **common)
        first >> RefreshTaskGroup("second", view=upper.name, source=lower.name, **common)
    assert dag.get_task("second.finish").inlets == dag.get_task("first.finish").outlets == [lance_asset(lower.name)]
    for letters in ("ab", "abc"):
        run = Driver.trigger(dag).go()
        assert run.state == "success", run.errors
        assert shown(upper) == shown(lower) == dict.fromkeys(texts(letters), 3)
        desk.append("c")
    assert [len(announced(lower)), len(announced(upper))] == [2, 2]
    assert announced(upper)[0]["source"] == lower.name


def test_the_code_of_every_module_travels_with_the_plan(desk: Desk, airflow_db: Path) -> None:
    (airflow_db / "dags" / "geneva_other_udfs.py").write_text(
        "import pyarrow as pa\nfrom airflow_geneva import udf\n\n\n"
        "@udf(data_type=pa.string(), version='1')\ndef shout(text: str) -> str:\n    return text.upper()\n"
    )
    shout = importlib.import_module("geneva_other_udfs").shout
    udfs = importlib.import_module("geneva_dag_udfs")
    desk.append("a")
    columns = {"text": "text", "n": udfs.length, "m": (udfs.longer, ["text"]), "shout": shout}
    view = desk.table.query().select(columns).create_materialized_view(desk.database, f"view_of_{desk.table.name}")
    run = go(view)
    folder = Path(run.xcom("refresh.plan", "summary")["plan_uri"]).parent
    assert len(list(folder.glob("code-*.zip"))) == 2
    spec = json.loads(Path(run.xcom("refresh.plan", "summary")["plan_uri"]).read_text())["spec"]
    assert len(spec["codes"]) == 2
    assert view.to_arrow()["shout"].to_pylist() == [text.upper() for text in texts("a")]


def test_a_swap_that_was_changed_is_not_carried_out(desk: Desk) -> None:
    desk.append("a")
    view = make_view(desk)
    run = Driver.trigger(make_dag(view, default_args={"retries": 2})).go(kill="refresh.finish")
    plan = Path(run.xcom("refresh.plan", "summary")["plan_uri"])
    path = plan.parent / json.loads(plan.read_text())["swap"]["file"]
    path.write_bytes(path.read_bytes() + b" ")
    tries = run.tries("refresh.finish")
    run.clear("refresh.finish").go()
    assert run.tries("refresh.finish") == tries + 1
    assert "Clear the plan task with its downstream tasks" in run.error("refresh.finish")
    assert shown(view) == {}


def test_a_table_is_not_refreshed(desk: Desk) -> None:
    view = make_view(desk)
    run = Driver.trigger(make_dag(view, view=desk.table.name)).go()
    assert "is a table and not a view" in run.error("refresh.plan")


def test_code_that_changed_stops_the_plan_until_it_is_told_what_to_do(
    desk: Desk, airflow_db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.append("a")
    view = make_view(desk)
    go(view)
    udfs = importlib.import_module("geneva_dag_udfs")
    monkeypatch.setattr(udfs, "length", udfs.longer)
    stopped = Driver.trigger(make_dag(view, default_args={"retries": 2})).go()
    assert stopped.tries("refresh.plan") == 1
    assert "Values of the old code: 10 rows of the view" in stopped.error("refresh.plan")
    go(view, on_code_change="recompute")
    assert shown(view) == dict.fromkeys(texts("a"), 6)


def test_a_plan_is_carried_out_with_the_definition_that_was_planned(desk: Desk) -> None:
    desk.append("a")
    view = make_view(desk)
    run = Driver.trigger(make_dag(view)).go(kill="refresh.shards.apply")
    damaged = view.lance.schema.metadata[b"geneva::view::query"].decode().replace(":length", ":nonsense")
    view.lance.update_schema_metadata({"geneva::view::query": damaged})
    run.clear(("refresh.shards.apply", 0)).go()
    assert run.state == "success", run.errors
    assert shown(view) == dict.fromkeys(texts("a"), 3)


def test_a_view_of_lancedb_is_refused_with_what_to_do(desk: Desk) -> None:
    desk.append("a")
    stored = json.dumps({"format": 1, "kind": "query", "query": "SELECT text FROM docs"})
    desk.table.lance.update_schema_metadata({"mv.definition": stored})
    with DAG(f"lancedb_{desk.table.name}", schedule=None) as dag:
        RefreshTaskGroup(view=desk.table.name)
    run = Driver.trigger(dag).go()
    assert run.state == "failed"
    told = f"Table '{desk.table.name}' is a materialized view of LanceDB (SELECT text FROM docs), and only LanceDB"
    assert told in run.error("refresh.plan")
    assert told in run.xcom("refresh.plan", "error")
