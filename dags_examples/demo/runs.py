"""Follow a DAG run: wait for it, show its progress, and compare its reported counts with the actual ones."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from airflow_geneva import Database
from airflow_geneva.engine.display import counted
from dags_examples.demo.rest import ENDED, AirflowApi, TaskState, run_seconds

STEPS = ("define", "plan", "apply", "commit", "finish")
_START_SECONDS = 120
_RUN_SECONDS = 900
_POLL_SECONDS = 1.0
_PROGRESS = re.compile(r"[\d,]+ of [\d,]+ rows? computed \(\d+ %\)|[\d,]+ rows? computed in this task")
_LOG_LINES = 8


@dataclass(frozen=True)
class Target:
    """The table or view that a DAG updates.

    Args:
        dag_id: the DAG.
        group: id of the DAG's task group.
        database: the table's database.
        table: the table or view; it may not exist yet.
        counts: the file in which the UDF counts its rows.
    """

    dag_id: str
    group: str
    database: Database
    table: str
    counts: Path

    @property
    def version(self) -> int:
        """The table's newest version; 0 if it does not exist."""
        return self.database.open_table(self.table).version if self.table in self.database.table_names() else 0

    @property
    def counted(self) -> int:
        """Number of rows that the UDF has counted so far."""
        return sum(map(int, self.counts.read_text().split())) if self.counts.exists() else 0


@dataclass(frozen=True)
class Run:
    """A finished DAG run: what it reported, and what was observed.

    Args:
        name: name for display.
        state: state of the DAG run.
        tasks: its task instances.
        result: return value of the `finish` task; empty if there is none.
        counted: rows that the UDF itself counted.
        versions: the table's version before and after.
        seconds: from the trigger to the end, by Airflow's clock.
    """

    name: str
    state: str
    tasks: tuple[TaskState, ...]
    result: Mapping[str, Any]
    counted: int
    versions: tuple[int, int]
    seconds: float

    def step_seconds(self, step: str) -> float | None:
        """Return the total seconds of a step's tasks; None if none ran."""
        ran = [task.seconds or 0.0 for task in self.tasks if task.step == step and task.ran]
        return sum(ran) if ran else None

    def problems(self, computed: int, skipped: int) -> list[str]:
        """Return the differences between the expected and the actual run.

        Args:
            computed, skipped: expected numbers of computed and skipped rows.
        """
        if self.state != "success":
            return [f"{self.name}: the DAG run ended as {self.state}."]
        found = []
        expected = {"state": "DONE", "rows_computed": computed, "rows_skipped": skipped, "rows_left": 0}
        for name, value in expected.items():
            if self.result.get(name) != value:
                found.append(f"it reports {name} = {self.result.get(name)}, expected {value}")
        if self.counted != self.result.get("rows_computed"):
            found.append(f"the UDF counted {self.counted} rows, reported are {self.result.get('rows_computed')}")
        if computed == 0 and self.step_seconds("apply") is not None:
            found.append("there was nothing to do, and Spark was started")
        if computed == 0 and self.versions[0] != self.versions[1]:
            found.append(
                f"there was nothing to do, and the table went from version {self.versions[0]} to {self.versions[1]}"
            )
        return [f"{self.name}: {problem}." for problem in found]


def wait_for_dag(api: AirflowApi, dag_id: str, seconds: float = 120) -> None:
    """Wait until Airflow has read a DAG, and allow it to run.

    Raises:
        TimeoutError: Airflow did not read it; with Airflow's import errors.
    """
    deadline = time.monotonic() + seconds
    while not api.knows(dag_id):
        if time.monotonic() > deadline:
            raise TimeoutError("\n".join([f"Airflow did not read the DAG {dag_id}.", *api.import_errors()]))
        time.sleep(_POLL_SECONDS)
    api.unpause(dag_id)


class RunFollower:
    """Follows the next run of a DAG. Create it before the run: it records the state before."""

    def __init__(self, api: AirflowApi, target: Target, console: Console) -> None:
        self.api = api
        self.dag_id = target.dag_id
        self.target = target
        self.console = console
        self.runs_before = set(api.runs(target.dag_id))
        self.version_before, self.counted_before = target.version, target.counted
        self.began = time.monotonic()
        self._ended: set[tuple[str, int]] = set()
        self._told: dict[tuple[str, int], int] = {}
        self._on_spark = ""

    def follow(self, name: str) -> Run:
        """Wait for the run and its end, printing what its tasks do.

        Args:
            name: name for display.

        Raises:
            TimeoutError: the run did not start or did not end in time.
        """
        self.began = time.monotonic()
        with self.console.status("triggered") as status:
            run_id = self._wait_for_run()
            while (run := self.api.run(self.dag_id, run_id))["state"] not in ENDED:
                if time.monotonic() - self.began > _RUN_SECONDS:
                    raise TimeoutError(f"The run {run_id} of {self.dag_id} did not end in {_RUN_SECONDS} s.")
                status.update(self._look(run_id))
                time.sleep(_POLL_SECONDS)
            self._look(run_id)
        return Run(
            name=name,
            state=run["state"],
            tasks=tuple(self.api.tasks(self.dag_id, run_id)),
            result=self.api.xcom(self.dag_id, run_id, f"{self.target.group}.finish") or {},
            counted=self.target.counted - self.counted_before,
            versions=(self.version_before, self.target.version),
            seconds=run_seconds(run),
        )

    def _wait_for_run(self) -> str:
        while not (new := [run_id for run_id in self.api.runs(self.dag_id) if run_id not in self.runs_before]):
            if time.monotonic() - self.began > _START_SECONDS:
                raise TimeoutError(f"No run of the DAG {self.dag_id} began in {_START_SECONDS} s.")
            time.sleep(_POLL_SECONDS)
        return new[0]

    def _look(self, run_id: str) -> str:
        """Print what is new; return a status line."""
        tasks = self.api.tasks(self.dag_id, run_id)
        for task in tasks:
            if task.step == "apply" and task.ran:
                self._show_progress(run_id, task)
            key = (task.task_id, task.map_index)
            if task.seconds is not None and task.state not in ("running", "up_for_retry") and key not in self._ended:
                self._ended.add(key)
                self._show_end(run_id, task)
        running = [task.name for task in tasks if task.state == "running"]
        return f"{time.monotonic() - self.began:5.0f} s  {', '.join(running) or 'waiting for the scheduler'}"

    def _show_progress(self, run_id: str, task: TaskState) -> None:
        key = (task.task_id, task.map_index)
        if key in self._ended:
            return
        lines = [found[0] for line in self.api.log(self.dag_id, run_id, task) if (found := _PROGRESS.search(line))]
        if lines and self._on_spark and "in this task" not in lines[0]:
            self._tell(f"computed on Spark: {self._on_spark}", "dim")
        self._on_spark = "" if lines else self._on_spark
        for line in lines[self._told.get(key, 0) :]:
            self._tell(line, "dim")
        self._told[key] = len(lines)

    def _show_end(self, run_id: str, task: TaskState) -> None:
        color = {"success": "green", "failed": "red", "upstream_failed": "red"}.get(task.state or "", "yellow")
        moment = time.monotonic() - self.began
        self.console.print(
            f"{moment:6.1f} s [{color}]{task.state:8}[/] {task.name} ({task.seconds:.1f} s)", highlight=False
        )
        if task.step == "plan" and task.state == "success":
            summary = self.api.xcom(self.dag_id, run_id, task.task_id, "summary") or {}
            for reason, found in summary.get("reasons", {}).items():
                if found["rows"]:
                    where = f" in {counted(found['fragments'], 'fragment')}" if found["fragments"] else ""
                    self._tell(f"{counted(found['rows'], 'row')}{where}: {reason}", "dim")
            if summary.get("shards"):
                # A shard of few rows may be computed in its task nevertheless, which its log says.
                if summary["runner"] == "inline":
                    self._tell(f"computed by this task: {summary['runner_reason']}", "dim")
                else:
                    self._on_spark = summary["runner_reason"]
        if task.state == "failed":
            for line in self.api.log(self.dag_id, run_id, task)[-_LOG_LINES:]:
                self._tell(line, "red")

    def _tell(self, line: str, style: str) -> None:
        self.console.print(Padding(Text(line, style), (0, 0, 0, 9)))
