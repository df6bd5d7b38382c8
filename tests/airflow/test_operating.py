"""What operators of a running Airflow do to it, and what happens: dates, pauses, pools, marks, limits, kills, keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_geneva.spark.submit import CREDENTIALS
from tests.support.object_store import SECRET
from tests.support.operating_site import APPLY, COMMIT, DAYS, KEPT, ROOT, ROWS, Site, open_site
from tests.support.stack import RUN_SECONDS, START_SECONDS, Stack, wait_for

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.slow, pytest.mark.crash]


@pytest.fixture(scope="module")
def site(
    java_home: str, new_airflow_db: Path, endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("operating"), new_airflow_db, endpoint) as site:
        yield site


MARKED = {
    "plan_success": "backfill.plan",
    "commit_success": COMMIT,
    "commit_failed": COMMIT,
    "finish_failed": "backfill.finish",
    "finish_success": "backfill.finish",
}


@pytest.fixture(scope="module", autouse=True)
def begun(site: Site) -> dict[str, str]:
    """What is begun before all else, as Airflow takes its time for it; by DAG the run."""
    # SQLite takes one writer at a time, so there is no scheduler yet.
    site.stack.wait()
    site.connect_remote()
    for dag_id, days, at_once in (("dates", 3, 3), ("days", len(DAYS), 1)):
        site.stack.unpause(dag_id)
        dates = {"from_date": f"{DAYS[0]}T00:00:00Z", "to_date": f"{DAYS[0] + timedelta(days - 1)}T00:00:00Z"}
        site.stack.call("POST", "/backfills", {"dag_id": dag_id, **dates, "max_active_runs": at_once})
    for dag_id, task_id in MARKED.items():
        site.hold(dag_id, task_id)
    waiting = ("lost", "timeout", "apply_failed", "twice", "paused")
    for table in waiting:
        site.shut(table)
    runs = {dag_id: site.stack.trigger(dag_id) for dag_id in (*waiting, *MARKED, "twice")}
    site.start_scheduler()
    site.stack.wait()
    site.reach("lost")
    kill(worker_of(site, "lost"))
    site.open("lost")
    site.lose("lost", runs["lost"], APPLY)
    return runs


def worker_of(site: Site, table: str) -> psutil.Process:
    """The process of the executor that runs the task at a gate."""
    worker = psutil.Process(site.at_the_gate(table)[0]).parent()
    assert worker is not None
    return worker


def kill(process: psutil.Process) -> None:
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            member.kill()


@pytest.mark.shows("Mark", "mark `plan` as success while it runs")
def test_a_plan_that_is_marked_as_success_fails_the_run_until_it_is_cleared(site: Site, begun: dict[str, str]) -> None:
    run = begun["plan_success"]
    site.mark("plan_success", run, "backfill.plan", "success")
    site.fails("plan_success", run)
    assert "There is no plan: task 'backfill.plan' is success" in site.log("plan_success")
    assert site.visible("plan_success") == 0
    site.clear("plan_success", run, "backfill.plan")
    site.succeeds("plan_success", run)
    assert site.visible("plan_success") == ROWS
    assert len(site.announced("plan_success")) == 1


@pytest.mark.parametrize("state", ["success", "failed"])
@pytest.mark.shows("Clear", "clear a task, or a whole run, in the UI while the scheduler runs")
@pytest.mark.shows("Mark", "mark `commit` as success or as failed before it has committed")
def test_a_commit_that_is_marked_makes_nothing_visible_until_it_is_cleared(
    site: Site, begun: dict[str, str], state: str
) -> None:
    dag_id = f"commit_{state}"
    site.mark(dag_id, begun[dag_id], COMMIT, state)
    site.fails(dag_id, begun[dag_id])
    assert "1 of 1 shard not committed: [0]" in site.log(dag_id)
    assert site.visible(dag_id) == 0
    assert site.told(dag_id) == []
    site.clear(dag_id, begun[dag_id], COMMIT)
    site.succeeds(dag_id, begun[dag_id])
    assert site.visible(dag_id) == ROWS
    assert site.calls(dag_id) == Counter(range(ROWS))
    assert len(site.announced(dag_id)) == 1


@pytest.mark.shows("Mark", "mark `finish` as failed")
def test_a_finish_that_is_marked_as_failed_announces_when_it_is_cleared(site: Site, begun: dict[str, str]) -> None:
    run = begun["finish_failed"]
    site.mark("finish_failed", run, "backfill.finish", "failed")
    site.fails("finish_failed", run)
    assert site.visible("finish_failed") == ROWS
    assert site.told("finish_failed") == []
    site.clear("finish_failed", run, "backfill.finish")
    site.succeeds("finish_failed", run)
    assert len(site.announced("finish_failed")) == 1
    assert site.calls("finish_failed") == Counter(range(ROWS))


@pytest.mark.shows("Clear", "clear a task, or a whole run, in the UI while the scheduler runs")
@pytest.mark.shows("Mark", "mark `finish` as success")
def test_a_finish_that_is_marked_as_success_leaves_the_event_to_a_later_end(site: Site, begun: dict[str, str]) -> None:
    run = begun["finish_success"]
    site.mark("finish_success", run, "backfill.finish", "success")
    site.succeeds("finish_success", run)
    assert site.visible("finish_success") == ROWS
    assert site.told("finish_success") == []
    # The whole run is cleared: what came since is computed, and what nobody announced is.
    site.append("finish_success", range(ROWS, ROWS + 10))
    site.clear_run("finish_success", run)
    site.succeeds("finish_success", run)
    assert site.visible("finish_success") == ROWS + 10
    assert site.calls("finish_success") == Counter(range(ROWS + 10))
    assert len(site.announced("finish_success")) == 1


@pytest.mark.shows("Run", "let two runs of one DAG meet")
def test_two_runs_at_once_are_both_right_and_each_change_is_told_once(site: Site) -> None:
    site.reach("twice", 2)
    site.open("twice")
    for run in site.runs("twice"):
        site.succeeds("twice", run["dag_run_id"])
    assert site.visible("twice") == ROWS
    assert max(site.calls("twice").values()) <= 2
    site.announced("twice")


@pytest.mark.shows("Run", "put `apply` into a pool with one slot, with a `priority_weight`")
def test_a_pool_of_one_slot_has_one_apply_at_a_time_and_takes_the_most_urgent_first(site: Site) -> None:
    site.stack.call("POST", "/pools", {"name": "one", "slots": 1})
    site.shut("first")
    first = site.stack.trigger("first")
    site.reach("first")
    pooled = site.stack.trigger("pooled")
    for group in ("low", "high"):
        site.wait_for_state("pooled", pooled, f"{group}.shards.apply", "scheduled")
    site.open("first")
    site.succeeds("first", first)
    site.succeeds("pooled", pooled)
    applies = [
        site.task("first", first, APPLY),
        *(site.task("pooled", pooled, f"{group}.shards.apply") for group in ("high", "low")),
    ]
    times = [task[moment] for task in applies for moment in ("start_date", "end_date")]
    assert times == sorted(times)
    assert [site.visible(table) for table in ("first", "high", "low")] == [ROWS] * 3


@pytest.mark.shows("Stop, kill, restart", "pause the DAG in the middle of a run")
def test_a_paused_run_ends_the_task_it_is_at_and_goes_on_when_unpaused(site: Site, begun: dict[str, str]) -> None:
    run = begun["paused"]
    site.reach("paused")
    site.stack.pause("paused")
    site.open("paused")
    site.wait_for_state("paused", run, APPLY, "success")
    # The scheduler goes on with others meanwhile.
    site.succeeds("other", site.stack.trigger("other"))
    assert site.task("paused", run, COMMIT)["state"] is None
    assert site.visible("paused") == 0
    site.stack.unpause("paused")
    site.succeeds("paused", run)
    assert site.visible("paused") == ROWS
    assert site.calls("paused") == Counter(range(ROWS))
    assert len(site.announced("paused")) == 1


@pytest.mark.shows("Stop, kill, restart", "let `apply` exceed its `execution_timeout`")
@pytest.mark.shows("Stop, kill, restart", 'give `spark_submit={"durable": True}`, in client mode')
def test_an_apply_that_exceeds_its_time_ends_spark_and_goes_on_from_its_checkpoints_when_cleared(
    site: Site, begun: dict[str, str]
) -> None:
    run = begun["timeout"]
    site.reach("timeout")
    [spark] = drivers(site, "timeout")
    family = [spark, *spark.children(recursive=True)]
    assert scratch(site, "timeout")
    task = spark.parent()
    assert task is not None
    # The hour is over: the timer that Airflow sets for `execution_timeout` sends this signal.
    os.kill(task.pid, signal.SIGALRM)
    _, alive = psutil.wait_procs(family, timeout=START_SECONDS)
    assert not alive
    site.fails("timeout", run)
    assert "AirflowTaskTimeout" in site.log("timeout")
    assert scratch(site, "timeout") == []
    assert site.visible("timeout") == 0

    site.open("timeout")
    site.clear("timeout", run, APPLY)
    site.succeeds("timeout", run)
    assert site.visible("timeout") == ROWS
    assert [row for row, times in site.calls("timeout").items() if times > 1 and row < KEPT] == []
    assert scratch(site, "timeout") == []


@pytest.mark.shows("Mark", "mark `apply` as failed while it runs")
def test_an_apply_that_is_marked_as_failed_ends_spark_and_goes_on_from_its_checkpoints_when_cleared(
    site: Site, begun: dict[str, str]
) -> None:
    run = begun["apply_failed"]
    site.reach("apply_failed")
    [spark] = drivers(site, "apply_failed")
    family = [spark, *spark.children(recursive=True)]
    assert scratch(site, "apply_failed")
    path = f"/dags/apply_failed/dagRuns/{run}/taskInstances/{APPLY}/0"
    site.stack.call("PATCH", path, {"new_state": "failed"})
    _, alive = psutil.wait_procs(family, timeout=START_SECONDS)
    assert not alive
    wait_for(lambda: not scratch(site, "apply_failed"), START_SECONDS, "an empty scratch folder")
    site.fails("apply_failed", run)
    assert site.visible("apply_failed") == 0

    site.open("apply_failed")
    site.clear("apply_failed", run, APPLY)
    site.succeeds("apply_failed", run)
    assert_it_went_on(site, "apply_failed")


@pytest.mark.shows("Mark", "mark `plan` as failed while it runs")
def test_a_plan_that_is_marked_as_failed_ends_at_once(site: Site) -> None:
    run = site.stack.trigger("plan_failed")
    wait_for(lambda: any(site.folder.glob("importing.*")), RUN_SECONDS, "the plan task")
    [reached] = site.folder.glob("importing.*")
    path = f"/dags/plan_failed/dagRuns/{run}/taskInstances/backfill.plan"
    site.stack.call("PATCH", path, {"new_state": "failed"})
    site.fails("plan_failed", run)
    task = int(reached.suffix[1:])
    wait_for(lambda: not psutil.pid_exists(task), START_SECONDS, "the end of the plan task")
    assert site.database.jobs(table="plan_failed") == []


@pytest.mark.shows(
    "Stop, kill, restart", "kill the process of a task (SIGKILL, or the kernel does for its memory), any of the four"
)
def test_every_task_is_killed_once_and_the_run_ends_as_if_none_had_been(site: Site) -> None:
    site.die_at("killed", plan="plan.saved", commit="commit.after", finish="finish.end")
    site.shut("killed")
    run = site.stack.trigger("killed")
    site.reach("killed")
    [driver] = drivers(site, "killed")
    task = driver.parent()
    assert task is not None
    task.kill()
    # The driver outlives its task, and goes on beside the retry.
    site.reach("killed", 2)
    assert driver.is_running()
    site.open("killed")
    site.succeeds("killed", run)
    tries = {task["task_id"].rsplit(".", 1)[-1]: task["try_number"] for task in site.stack.tasks("killed", run)}
    assert tries == {"plan": 2, "apply": 2, "commit": 2, "finish": 2}
    assert psutil.wait_procs([driver], timeout=START_SECONDS)[1] == []
    (job,) = site.database.jobs(table="killed")
    assert (job.state, job.rows_left, job.rows_computed + job.rows_reused) == ("DONE", 0, ROWS)
    assert len(job.commits) == 2
    # The retry took over what was kept; what stood at the gate, and what came after it, both may have run.
    assert set(site.calls("killed")) == set(range(ROWS))
    assert_it_went_on(site, "killed")
    [told] = site.told("killed")
    assert (told["to_version"], told["rows_left"]) == (max(job.commits), 0)


@pytest.mark.shows("Dates", "`airflow backfill create` with several runs at once")
def test_dates_at_once_are_right_and_announced_without_a_gap(site: Site) -> None:
    runs = site.runs("dates")
    assert [run["run_type"] for run in runs] == ["backfill"] * 3
    for run in runs:
        site.succeeds("dates", run["dag_run_id"])
    assert site.visible("dates") == ROWS
    assert sorted(site.calls("dates")) == list(range(ROWS))
    assert max(site.calls("dates").values()) <= len(runs)
    site.announced("dates")


@pytest.mark.shows(
    "Dates", "the same with `--max-active-runs 1` and a `where` by the run's interval, and a view behind it"
)
def test_dates_one_after_the_other_compute_the_rows_of_their_interval(site: Site) -> None:
    runs = site.runs("days")
    assert len(runs) == len(DAYS)
    for run in runs:
        site.succeeds("days", run["dag_run_id"])
    assert site.calls("days") == Counter(range(ROWS))
    assert [event["rows_computed"] for event in site.announced("days")] == [ROWS // len(DAYS)] * len(DAYS)
    assert site.visible("days") == site.visible("days_view") == ROWS
    assert len(site.announced("days_view")) == len(DAYS)


@pytest.mark.shows("Stop, kill, restart", "kill a worker of the executor with the task that it runs")
def test_a_task_whose_worker_died_is_tried_again(site: Site, begun: dict[str, str]) -> None:
    site.succeeds("lost", begun["lost"])
    assert site.task("lost", begun["lost"], APPLY)["try_number"] == 2
    assert_it_went_on(site, "lost")


@pytest.fixture(scope="module")
def restarted(site: Site) -> dict[str, str]:
    """Kill the scheduler while it runs three applies, one with its worker, and start another; by DAG the run."""
    tables = ("ended", "running", "host")
    for table in tables:
        site.shut(table)
    runs = {table: site.stack.trigger(table) for table in tables}
    for table in tables:
        site.reach(table)
    site.kill_scheduler()
    kill(worker_of(site, "host"))
    for table in ("ended", "host"):
        site.open(table)
    site.wait_for_state("ended", runs["ended"], APPLY, "success")
    site.start_scheduler()
    return runs


@pytest.mark.shows("Stop, kill, restart", "kill the scheduler, and start it later (`LocalExecutor`)")
def test_a_task_that_ends_without_a_scheduler_has_ended(site: Site, restarted: dict[str, str]) -> None:
    site.succeeds("ended", restarted["ended"])
    assert {task["try_number"] for task in site.stack.tasks("ended", restarted["ended"])} == {1}
    assert site.calls("ended") == Counter(range(ROWS))
    assert_it_went_on(site, "ended")


@pytest.mark.shows("Stop, kill, restart", "the same, and the task is still at work")
def test_a_task_that_a_new_scheduler_finds_running_is_begun_again(site: Site, restarted: dict[str, str]) -> None:
    site.reach("running", 2)
    tries = site.at_the_gate("running")
    wait_for(lambda: sum(map(psutil.pid_exists, tries)) == 1, RUN_SECONDS, "the end of the first try")
    site.open("running")
    site.succeeds("running", restarted["running"])
    assert_it_went_on(site, "running")


@pytest.mark.shows("Stop, kill, restart", "kill the whole host, and start it again")
def test_a_task_that_was_killed_with_its_host_is_begun_again(site: Site, restarted: dict[str, str]) -> None:
    site.succeeds("host", restarted["host"])
    assert site.task("host", restarted["host"], APPLY)["try_number"] == 2
    assert_it_went_on(site, "host")


def assert_it_went_on(site: Site, table: str) -> None:
    """The result is right, is told once, and what lay in checkpoints did not run again."""
    assert site.visible(table) == ROWS
    assert len(site.announced(table)) == 1
    assert [row for row, times in site.calls(table).items() if times > 1 and row < KEPT] == []


@dataclass
class Watch:
    """Looks at every process below Airflow, again and again."""

    stack: Stack
    command_lines: set[str] = field(default_factory=set)
    drivers: dict[int, dict[str, str]] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)

    def look(self) -> None:
        for process in self.stack.below():
            line = command_line(process)
            try:
                environment = process.environ()
            except (psutil.Error, OSError):
                continue
            self.command_lines.add(line)
            if CREDENTIALS in environment:
                self.drivers[process.pid] = environment
            self.leaks += [
                f"{name} of {line}"
                for name, value in environment.items()
                if SECRET in value and name not in (CREDENTIALS, "SERVICE_KEY")
            ]


AWAY = {
    "plan_away": "backfill.plan",
    "apply_away": APPLY,
    "commit_away": COMMIT,
    "finish_away": "backfill.finish",
}


@pytest.mark.shows("Stop, kill, restart", "kill the API server while tasks run, and start it again within minutes")
def test_tasks_wait_for_an_api_server_that_is_away_and_use_up_no_try(site: Site) -> None:
    for dag_id, task_id in AWAY.items():
        site.hold(dag_id, task_id)
    runs = {dag_id: site.stack.trigger(dag_id) for dag_id in AWAY}
    for dag_id, task_id in AWAY.items():
        site.held(dag_id, task_id)
    site.stack.kill("api-server")
    for dag_id, task_id in AWAY.items():
        site.release(dag_id, task_id)
    # What needs the table only is done meanwhile.
    wait_for(lambda: bool(site.database.jobs(table="plan_away")), RUN_SECONDS, "the plan")
    wait_for(lambda: site.calls("apply_away") == Counter(range(ROWS)), RUN_SECONDS, "the values")
    wait_for(lambda: site.visible("commit_away") == ROWS, RUN_SECONDS, "the commit")
    assert site.database.jobs(table="finish_away")[0].open
    site.stack.start("api-server")
    site.stack.wait()
    for dag_id, run in runs.items():
        site.succeeds(dag_id, run)
        assert {task["try_number"] for task in site.stack.tasks(dag_id, run)} == {1}
        assert site.visible(dag_id) == ROWS
        assert site.calls(dag_id) == Counter(range(ROWS))
        assert len(site.announced(dag_id)) == 1


def test_a_secret_stays_in_the_drivers_environment(site: Site) -> None:
    watch = Watch(site.stack)
    run = site.stack.trigger("remote", {"where": "text LIKE 'r%'"})
    assert site.stack.finish("remote", run, watch.look) == "success", site.stack.logs()
    assert site.remote.open_table("remote").count_rows("n IS NOT NULL") == ROWS

    assert any("spark-submit" in line or "SparkSubmit" in line for line in watch.command_lines)
    assert not [line for line in watch.command_lines if SECRET in line]
    assert watch.leaks == []
    assert watch.drivers, "the driver was never seen"
    for environment in watch.drivers.values():
        assert [name for name in environment if "AIRFLOW" in name] == [CREDENTIALS]
        assert site.stack.environment["AIRFLOW__API_AUTH__JWT_SECRET"] not in environment.values()

    assert APPLY in site.stack.logs()
    assert SECRET not in site.stack.logs()
    told: list[Any] = []
    for task in site.stack.tasks("remote", run):
        where = f"/dags/remote/dagRuns/{run}/taskInstances/{task['task_id']}"
        # Airflow 3.1 leaves the rendered fields out of the list of all tasks.
        told.append(site.stack.call("GET", f"{where}/{task['map_index']}"))
        entries = site.stack.call("GET", f"{where}/xcomEntries?map_index_filter={task['map_index']}")
        for entry in entries["xcom_entries"]:
            index = task["map_index"]
            told.append(site.stack.call("GET", f"{where}/xcomEntries/{entry['key']}?map_index={index}"))
    told.append(site.stack.call("GET", "/assets/events"))
    told.append(site.stack.call("GET", "/dagSources/remote"))
    assert "plan_uri" in json.dumps(told)
    assert '"shard":' in json.dumps([answer.get("rendered_fields") for answer in told])
    assert SECRET not in json.dumps(told[:-1])

    objects = site.bucket.objects()
    assert any("/plan-" in name for name in objects)
    assert [name for name, content in objects.items() if SECRET.encode() in content] == []
    # The newest commits lie beside the database.
    database = site.stack.database
    stored = b"".join(path.read_bytes() for path in database.parent.glob(f"{database.name}*"))
    assert b"lance_remote" in stored
    # The DAG's own source and the spelled-out env_vars of this test are the author's; the key is nowhere.
    assert SECRET.encode() not in stored.replace(f"{SECRET}-token".encode(), b"")


def test_a_program_that_knows_lance_only_has_a_column_and_a_view_computed(site: Site, tmp_path: Path) -> None:
    for dag_id in ("geneva_backfill", "geneva_create_view", "geneva_refresh"):
        site.stack.unpause(dag_id)
    environment = {
        "PATH": os.environ["PATH"],
        "AIRFLOW_TOKEN": site.stack.token,
        "GENEVA_NAMESPACE": f"{site.stack.url}/geneva/namespace/lance_local",
    }

    def run(snippet: str) -> list[str]:
        program = (
            (ROOT / "docs/snippets" / snippet).read_text().replace("my_project.udfs:measure", "operating_udfs:gated")
        )
        (tmp_path / "program.py").write_text(program.replace('"docs', '"asked'))
        command = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS
        )
        assert done.returncode == 0, done.stderr + site.stack.logs()
        return done.stdout.splitlines()

    assert run("create_a_table.py") == []
    site.define("asked")
    backfill, created, refresh, *read = run("ask_for_a_backfill.py")
    for done, computed in ((backfill, ROWS), (created, ROWS), (refresh, 0)):
        assert "'status': 'Succeeded'" in done
        assert f"'rows_computed': '{computed}'" in done
    assert read == [f"asked {ROWS} 0", f"asked_view {ROWS} 0"]
    assert site.visible("asked") == ROWS
    assert site.database.open_view("asked_view").to_arrow()["n"].to_pylist() == list(range(ROWS))


def drivers(site: Site, table: str) -> list[psutil.Process]:
    """The spark-submits for a table below Airflow that have not lost their task."""
    lines = {process: command_line(process) for process in site.stack.below()}
    return [process for process, line in lines.items() if "SparkSubmit" in line and f"/{table}.lance/" in line]


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def scratch(site: Site, table: str) -> list[Path]:
    (job,) = site.database.jobs(table=table)
    return list((site.stack.home / "tmp").glob(f"airflow-geneva-{job.id}-*"))
