"""`BackfillTaskGroup`, run by Airflow: what becomes visible, what is announced, and what a clear or a retry does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from airflow.sdk import DAG, Param, task

from airflow_geneva import udf
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.operators import ApplyOperator, CommitOperator, FinishOperator, PlanBackfillOperator
from airflow_geneva.task_groups import BackfillTaskGroup
from tests.airflow.conftest import Desk
from tests.support.desk import ROWS, make_dag, texts
from tests.support.driving import Driver, TaskExpansion, events
from tests.support.operating_files import where_by_date

pytestmark = pytest.mark.airflow


@pytest.mark.core
@pytest.mark.parametrize("letters", ["a", "abc"])
def test_every_shard_is_computed_and_committed_and_the_run_is_announced_once(desk: Desk, letters: str) -> None:
    desk.append(letters)
    desk.define(n="length")
    planned_on = desk.table.version
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "success", run.errors
    assert run.states()["backfill.shards.commit"] == ["success"] * len(letters)
    for stage in ("apply", "commit"):
        assert [run.title(f"backfill.shards.{stage}", number) for number in range(len(letters))] == [
            f"fragment {number}, {ROWS} rows" for number in range(len(letters))
        ]
    assert run.states()["after"] == "success"
    assert desk.values() == dict.fromkeys(texts(letters), 3)
    assert desk.calls() == texts(letters)
    [event] = events(desk.asset)
    assert (event["from_version"], event["to_version"]) == (planned_on, desk.table.version)
    assert (event["rows_computed"], event["state"]) == (len(letters) * ROWS, "DONE")
    assert run.xcom("backfill.finish")["rows_computed"] == len(letters) * ROWS
    assert desk.database.open_table(desk.table.name).version == planned_on + len(letters)


@pytest.mark.parametrize("stage", [ApplyOperator, CommitOperator])
def test_rows_that_a_compaction_moves_between_two_tasks_become_visible_in_this_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, stage: type
) -> None:
    desk.append("abcd")
    desk.define(n="length")
    execute, shards = stage.execute, list[int]()

    def compact_before_the_second(self: Any, context: Any) -> Any:
        shards.append(1)
        if len(shards) == 2:
            desk.table.lance.optimize.compact_files()
        return execute(self, context)

    monkeypatch.setattr(stage, "execute", compact_before_the_second)
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("abcd"), 3)
    assert desk.calls() == texts("abcd")
    [event] = events(desk.asset)
    assert (event["rows_computed"], event["rows_left"], event["state"]) == (4 * ROWS, 0, "DONE")
    assert run.xcom("backfill.finish")["rows_computed"] == 4 * ROWS


@pytest.mark.parametrize("arguments", [{}, {"approve_above": {"rows": 100}}])
@pytest.mark.shows("Run", "run with nothing to do")
def test_nothing_to_do_writes_no_version_and_no_event_and_what_is_downstream_still_runs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    desk.append("ab")
    desk.define(n="length")
    dag = make_dag(desk, **arguments)
    Driver.trigger(dag).go()
    desk.calls()
    version = desk.table.version
    expand, expanded = TaskExpansion.expand_mapped_task, list[str]()

    def watched(task: Any, *given: Any, **named: Any) -> Any:
        found = expand(task, *given, **named)  # raises NotMapped for the others
        expanded.append(task.task_id)
        return found

    monkeypatch.setattr(TaskExpansion, "expand_mapped_task", watched)
    run = Driver.trigger(dag).go()
    assert expanded == [], "the plan task skips what needs a shard; the scheduler takes a second for each such task"
    assert run.state == "success", run.errors
    assert run.xcom("backfill.plan") == []
    assert run.states()["backfill.finish"] == "success"
    assert run.states()["after"] == "success"
    assert run.states()["backfill.shards.apply"] == "skipped"
    assert desk.calls() == []
    assert desk.table.version == version
    assert len(events(desk.asset)) == 1
    assert run.xcom("backfill.finish")["event"] is None
    assert run.xcom("backfill.finish")["rows_skipped"] == 2 * ROWS

    run.clear("backfill.shards.commit").go()
    assert (run.state, run.states()["backfill.shards.apply"]) == ("success", "skipped")
    desk.append("c")
    run.clear("backfill.plan").go()
    assert (run.state, run.states()["backfill.shards.commit"]) == ("success", ["success"])
    assert desk.calls() == texts("c")


def test_an_event_begins_where_the_last_one_ended_and_an_index_update_is_none(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    Driver.trigger(make_dag(desk)).go()
    desk.table.lance.create_scalar_index("n", "BTREE")
    desk.append("b")
    run = Driver.trigger(make_dag(desk)).go()
    first, second = events(desk.asset)
    assert second["from_version"] == first["to_version"]
    assert second["to_version"] == desk.table.version
    assert second["rows_computed"] == ROWS
    assert run.xcom("backfill.finish")["unindexed_rows"] == ROWS
    updating = make_dag(desk, indexes="{{ params.indexes or '' }}", params={"indexes": "update"})
    run = Driver.trigger(updating).go()
    assert run.state == "success", run.errors
    assert (run.xcom("backfill.finish")["unindexed_rows"], len(events(desk.asset))) == (0, 2)
    assert desk.table.lance.stats.index_stats("n_idx")["num_unindexed_rows"] == 0


def test_a_run_stops_at_its_cap_and_the_next_one_goes_on(desk: Desk) -> None:
    desk.append("abc")
    desk.define(n="length")
    calls = list[str]()
    for cap in ({"max_rows": "{{ 15 }}"}, {"max_seconds": 0.0001}):
        run = Driver.trigger(make_dag(desk, **cap)).go()
        assert run.state == "success", run.errors
        result = run.xcom("backfill.finish")
        assert result["state"] == "PARTIAL"
        assert "stopped at its cap of" in result["notes"][-1]
        calls += desk.calls()
        assert len([n for n in desk.values().values() if n]) == len(calls) == 3 * ROWS - result["rows_left"]
        assert 15 <= len(calls) <= 16
    Driver.trigger(make_dag(desk)).go()
    assert desk.values() == dict.fromkeys(texts("abc"), 3)
    assert sorted(calls + desk.calls()) == texts("abc")


@pytest.mark.shows("Run", 'give `on_partial="fail"`, and rows are left')
def test_a_partial_run_can_be_red_and_the_next_finish_announces_what_it_committed(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")
    planned_on = desk.table.version
    run = Driver.trigger(make_dag(desk, max_rows=15, on_partial="{{ 'fail' }}")).go()
    assert (run.state, run.states()["backfill.finish"], run.tries("backfill.finish")) == ("failed", "failed", 1)
    told = run.error("backfill.finish")
    left = list(desk.values().values()).count(None)
    assert left >= 4
    assert f"Left for the next run: {left} rows" in told
    assert "stopped at its cap of" in told
    assert 'on_partial="fail"' in told
    assert "Clear 'backfill.plan'" in told
    [record] = read_jobs(desk.table.location.checkpoints, job_ids(desk.table.location.checkpoints))
    assert (record.state, record.rows_left) == ("PARTIAL", left)
    assert events(desk.asset) == []

    again = Driver.trigger(make_dag(desk, on_partial="fail")).go()
    assert again.state == "success", again.errors
    [event] = events(desk.asset)
    assert (event["from_version"], event["to_version"]) == (planned_on, desk.table.version)


def test_an_empty_table_is_nothing_to_do(desk: Desk) -> None:
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "success", run.errors
    assert events(desk.asset) == []


def test_a_column_keeps_its_inputs_when_its_function_has_another_name(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    udfs = importlib.import_module("geneva_dag_udfs")
    desk.append("a")
    desk.table.add_columns({"n": (udfs.length, ["text"])})
    renamed = udf(data_type=pa.int64(), version="1", name="renamed")(lambda words: len(words))
    monkeypatch.setattr(udfs, "length", renamed)
    operator = PlanBackfillOperator(task_id="plan", table=desk.table.name, column="n")
    plan, _ = operator._plan(desk.table, desk.table.lance, {"dag_run": None}, {})  # type: ignore[typeddict-item]
    assert plan.spec.definition.input_columns == ("text",)


@pytest.mark.shows("Run", "put two groups into a DAG")
def test_two_groups_of_one_dag_do_not_mix(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length", shout="upper")
    common = {"table": desk.table.name, "inline_below_rows": 10**9, "shard_size": 1}
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        BackfillTaskGroup("lengths", column="n", **common)
        BackfillTaskGroup("shouts", column="shout", **common)
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert desk.values("n") == dict.fromkeys(texts("ab"), 3)
    assert desk.values("shout") == {text: text.upper() for text in texts("ab")}
    assert sorted(event["column"] for event in events(desk.asset)) == ["n", "shout"]
    jobs = {run.xcom(f"{group}.plan", "summary")["job_id"] for group in ("lengths", "shouts")}
    assert len(jobs) == 2


@pytest.mark.core
@pytest.mark.shows("Clear", "clear `shards.apply` of a shard that failed, with downstream")
def test_a_failed_shard_keeps_no_other_from_being_committed_and_is_mended_by_clearing_it(desk: Desk) -> None:
    desk.append("abc")
    desk.define(n="length")
    desk.break_at("b04")
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "failed"
    assert run.states()["backfill.shards.commit"] == ["success", "upstream_failed", "success"]
    assert run.states()["backfill.finish"] == "failed"
    assert "1 of 3 shards" in run.error("backfill.finish")
    assert "b04" in run.error("backfill.shards.apply", 1)
    assert [text for text, n in desk.values().items() if n is None] == texts("b")
    assert events(desk.asset) == []
    [record] = read_jobs(desk.table.location.checkpoints, job_ids(desk.table.location.checkpoints))
    assert record.state == "FAILED"
    assert (record.rows_failed, record.rows_left) == (1, ROWS - 1)

    desk.mend()
    desk.calls()
    run.clear(("backfill.shards.apply", 1)).go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("abc"), 3)
    assert desk.calls() == texts("b")[4:]
    [event] = events(desk.asset)
    assert event["to_version"] == desk.table.version
    assert event["rows_computed"] == 3 * ROWS


@pytest.mark.parametrize("retries", [0, 1])
def test_the_failure_of_a_shard_says_whether_another_try_follows(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    last = list[bool]()
    recorded = JobFolder.recording_failure

    def recording_failure(self: JobFolder, fingerprint: str, shard: int, is_last: bool = False) -> Any:
        last.append(is_last)
        return recorded(self, fingerprint, shard, is_last)

    monkeypatch.setattr(JobFolder, "recording_failure", recording_failure)
    desk.append("a")
    desk.define(n="length")
    desk.break_at("a00")
    Driver.trigger(make_dag(desk, default_args={"retries": retries})).go()
    assert last == [False] * retries + [True]


@pytest.mark.shows("Retries", "give tasks `retries`")
def test_a_retry_goes_on_where_the_try_before_it_ended(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    desk.break_at("a07", once=True)
    run = Driver.trigger(make_dag(desk, default_args={"retries": 1})).go()
    assert run.state == "success", run.errors
    assert desk.calls() == sorted([*texts("a"), "a07"])
    assert desk.values() == dict.fromkeys(texts("a"), 3)


@pytest.mark.core
@pytest.mark.shows("Clear", "clear a whole finished run (`plan` with downstream)")
def test_clearing_the_plan_with_its_downstream_grows_with_the_table(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go()
    desk.append("bcd")
    run.clear("backfill.plan").go()
    assert run.state == "success", run.errors
    assert run.states()["backfill.shards.commit"] == ["success"] * 3
    assert desk.values() == dict.fromkeys(texts("abcd"), 3)
    assert desk.calls() == texts("abcd")
    first, second = events(desk.asset)
    assert second["from_version"] == first["to_version"]


@pytest.mark.shows("Clear", "clear a whole failed run")
def test_clearing_the_plan_with_its_downstream_shrinks_with_what_is_left(desk: Desk) -> None:
    desk.append("abcd")
    desk.define(n="length")
    desk.break_at("c00")
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "failed"
    desk.mend()
    desk.calls()
    run.clear("backfill.plan").go()
    assert run.state == "success", run.errors
    assert run.states()["backfill.shards.commit"] == ["success", "removed", "removed", "removed"]
    assert desk.values() == dict.fromkeys(texts("abcd"), 3)
    assert desk.calls() == texts("c")
    [event] = events(desk.asset)
    assert event["to_version"] == desk.table.version


@pytest.mark.shows("Clear", "clear `plan` alone, then single tasks")
def test_clearing_the_plan_alone_does_not_let_an_incomplete_run_go_green(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go()
    desk.append("bc")
    run.clear("backfill.plan", downstream=False).go()
    run.clear("backfill.finish").go()
    assert run.state == "failed"
    assert "2 of 2 shards" in run.error("backfill.finish")
    assert len(events(desk.asset)) == 1

    run.clear("backfill.plan").go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("abc"), 3)
    assert len(events(desk.asset)) == 2


@pytest.mark.parametrize("killed", [False, True])
def test_a_cleared_plan_that_did_not_run_lets_no_run_go_green(desk: Desk, killed: bool) -> None:
    """The summary of the plan before outlives the clear."""
    desk.append("a")
    desk.define(n="length")
    refuses: list[str] = []
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:

        @task
        def before() -> None:
            if refuses:
                raise ValueError(refuses[0])

        before() >> BackfillTaskGroup(table=desk.table.name, column="n", inline_below_rows=10**9)
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    desk.append("b")
    if killed:
        run.clear("backfill.plan").go(kill="backfill.plan")
    else:
        refuses.append("no rows today")
        run.clear("before").go()
    assert run.states()["backfill.plan"] == ("failed" if killed else "upstream_failed")
    assert run.state == "failed"
    assert "Clear it with its downstream tasks" in run.error("backfill.finish")
    refuses.clear()
    run.clear("backfill.plan" if killed else "before").go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("ab"), 3)


@pytest.mark.shows("Clear", "clear `plan` alone, then single tasks")
def test_clearing_the_plan_alone_and_then_one_shard_is_incomplete_too(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go()
    desk.append("cd")
    run.clear("backfill.plan", downstream=False).go()
    run.clear(("backfill.shards.apply", 0)).go()
    assert run.state == "failed"
    assert "1 of 2 shards" in run.error("backfill.finish")
    assert [text for text, n in desk.values().items() if n is None] == texts("d")


@pytest.mark.shows("Clear", "clear `shards.apply` of a shard that was complete")
def test_an_apply_that_was_complete_needs_nobody_to_have_said_so(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go(kill="backfill.shards.commit")
    assert run.state == "failed"
    desk.calls()
    run.clear(("backfill.shards.apply", 0)).go()
    assert run.state == "success", run.errors
    assert desk.calls() == []
    assert desk.values() == dict.fromkeys(texts("a"), 3)


@pytest.mark.core
@pytest.mark.shows("Clear", "clear `finish` of a finished run")
def test_a_finish_that_died_is_cleared_and_announces(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go(kill="backfill.finish")
    assert run.state == "failed"
    assert events(desk.asset) == []
    run.clear("backfill.finish").go()
    assert run.state == "success", run.errors
    [event] = events(desk.asset)
    assert event["to_version"] == desk.table.version

    run.clear("backfill.finish").go()
    assert run.state == "success", run.errors
    assert len(events(desk.asset)) == 1


@pytest.mark.shows("Stop, kill, restart", "kill a run after its commits, before `finish`")
def test_commits_that_nobody_announced_are_announced_by_a_later_run_that_has_nothing_to_do(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    planned_on = desk.table.version
    dag = make_dag(desk)
    Driver.trigger(dag).go(kill="backfill.finish")
    committed = desk.table.version
    later = Driver.trigger(dag).go()
    assert later.state == "success", later.errors
    assert later.xcom("backfill.plan") == []
    [event] = events(desk.asset)
    assert (event["from_version"], event["to_version"]) == (planned_on, committed)
    Driver.trigger(dag).go()
    Driver.trigger(dag).go()
    assert len(events(desk.asset)) == 1


@pytest.mark.shows(
    "Stop, kill, restart", "lose all tries of `apply` and of `finish`, as in a long outage of the API server"
)
def test_a_run_whose_apply_and_finish_are_lost_is_made_whole_by_the_next_one(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")
    planned_on, dag = desk.table.version, make_dag(desk, checkpoint_size=1)
    desk.break_at("b05")
    assert Driver.trigger(dag).go(kill="backfill.finish").state == "failed"
    assert events(desk.asset) == []
    desk.mend()
    desk.calls()
    later = Driver.trigger(dag).go()
    assert later.state == "success", later.errors
    assert desk.calls() == texts("b")[5:]
    assert desk.values() == dict.fromkeys(texts("ab"), 3)
    [event] = events(desk.asset)
    assert (event["from_version"], event["to_version"]) == (planned_on, desk.table.version)


def test_a_backfill_outside_of_airflow_is_not_announced_by_a_run_that_changed_nothing(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    desk.table.backfill("n", runner="inline")
    run = Driver.trigger(make_dag(desk)).go()
    assert run.state == "success", run.errors
    assert events(desk.asset) == []


@pytest.mark.shows("Dates", "trigger such a DAG by hand")
def test_a_filter_by_date_is_none_in_a_run_without_a_date(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk, where=where_by_date())).go()
    assert run.state == "success", run.errors
    assert run.xcom("backfill.plan", "summary")["where"] is None
    assert desk.calls() == texts("a")


@pytest.mark.shows("Run", """trigger with `--conf '{"where": "..."}'`""")
def test_where_comes_from_the_conf_of_the_run_and_an_empty_one_is_none(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")

    def trigger(conf: dict[str, Any]) -> Driver:
        # Made anew for each run: in one process the params of the last run would stay in it.
        params = {"where": Param(None, type=["null", "string"])}
        dag = make_dag(desk, where="{{ params.where or '' }}", params=params)
        return Driver.trigger(dag, conf).go()

    run = trigger({"where": "text LIKE 'b%'"})
    assert run.state == "success", run.errors
    assert desk.calls() == texts("b")
    assert run.xcom("backfill.plan", "summary")["where"] == "text LIKE 'b%'"
    run = trigger({})
    assert run.state == "success", run.errors
    assert desk.calls() == texts("a")
    assert desk.values() == dict.fromkeys(texts("ab"), 3)


def test_the_conf_of_a_run_names_no_function_database_or_connection_that_the_author_did_not_template(
    desk: Desk, tmp_path: Path
) -> None:
    desk.append("a")
    desk.define(n="length")
    given = {"udf": "this:s", "database": str(tmp_path), "lance_conn_id": "other", "spark_conn_id": "other"}
    params = {name: Param("", type="string") for name in ("where", *given)}
    dag = make_dag(desk, params=params, where="{{ params.where }}")
    run = Driver.trigger(dag, {**given, "where": "text = 'a01'"}).go()
    assert run.state == "success", run.errors
    assert desk.calls() == ["a01"]
    for task_id in ("backfill.plan", "backfill.finish"):
        assert not [name for name, value in run.rendered(task_id).items() if value in given.values()]


def test_a_finish_that_names_no_task_of_its_dag_says_so(desk: Desk) -> None:
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:
        FinishOperator(task_id="finish", plan_task_id="plan", table=desk.table.name)
    run = Driver.trigger(dag).go()
    assert "There is no task 'plan' in the DAG. Give plan_task_id= the task_id" in run.error("finish")


@pytest.mark.core
@pytest.mark.shows("Run", "change the function's code")
def test_code_that_changed_stops_the_plan_until_it_is_told_what_to_do(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    Driver.trigger(make_dag(desk)).go()
    udf = "geneva_dag_udfs:longer"
    stopped = Driver.trigger(make_dag(desk, udf=udf, default_args={"retries": 2})).go()
    assert stopped.tries("backfill.plan") == 1
    assert "10 rows of version 1" in stopped.error("backfill.plan")
    assert desk.values() == dict.fromkeys(texts("a"), 3)
    run = Driver.trigger(make_dag(desk, udf=udf, on_code_change="recompute")).go()
    assert run.state == "success", run.errors
    assert desk.values() == dict.fromkeys(texts("a"), 6)


@pytest.mark.shows("Run", "skip `plan` (a branch, a short circuit)")
def test_a_skipped_plan_skips_the_whole_group(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    with DAG(f"dag_{desk.table.name}", schedule=None) as dag:

        @task.short_circuit
        def not_today() -> bool:
            return False

        group = BackfillTaskGroup(table=desk.table.name, column="n")
        not_today() >> group
    run = Driver.trigger(dag).go()
    assert run.state == "success", run.errors
    assert run.states()["backfill.finish"] == "skipped"


def test_a_udf_is_named_by_its_import_path(desk: Desk) -> None:
    import geneva_dag_udfs

    with pytest.raises(ValueError, match="give its import path, udf='geneva_dag_udfs:length'"):
        make_dag(desk, udf=geneva_dag_udfs.length)


@pytest.mark.shows("Clear", "clear a task whose plan was cleaned up")
def test_finish_fails_once_and_for_all_when_the_plan_is_gone(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk, default_args={"retries": 2})).go()
    Path(run.xcom("backfill.plan", "summary")["plan_uri"]).unlink()
    tries = run.tries("backfill.finish")
    run.clear("backfill.finish").go()
    assert run.tries("backfill.finish") == tries + 1
    assert "is gone. Clear the plan task" in run.error("backfill.finish")


def test_a_plan_that_was_changed_is_not_carried_out(desk: Desk) -> None:
    desk.append("a")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk)).go(kill="backfill.shards.apply")
    [shard] = run.xcom("backfill.plan")
    with open(shard["plan_uri"], "a") as plan:
        plan.write(" ")
    run.clear(("backfill.shards.apply", 0)).go()
    assert "was changed after planning" in run.error("backfill.shards.apply", 0)
    assert desk.calls() == []
