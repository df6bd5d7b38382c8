"""A run of the DAG: trigger it, show it while it works, and hold what it says against what happened."""

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

from airflow_geneva import Table
from dags_examples.demo.rest import ENDED, AirflowApi, TaskState

DAG_ID = "backfill_embeddings"
STAGES = ("plan", "apply", "commit", "finish")
_RUN_SECONDS = 900
_POLL_SECONDS = 1.0
_PROGRESS = re.compile(r"[\d,]+ of [\d,]+ rows computed .*")
_LOG_LINES = 8


@dataclass(frozen=True)
class Run:
    """A finished run, as a user of Airflow sees it, and what really happened.

    Args:
        name: what to call it.
        state: the DAG run's.
        tasks: its task instances.
        result: what the `finish` task returned; empty when it returned nothing.
        counted: rows that the UDF counted itself.
        versions: the table's version before and after.
        seconds: from the trigger to the end.
    """

    name: str
    state: str
    tasks: tuple[TaskState, ...]
    result: Mapping[str, Any]
    counted: int
    versions: tuple[int, int]
    seconds: float

    def stage_seconds(self, stage: str) -> float | None:
        """How long the tasks of a stage ran together, or None if none did."""
        ran = [task.seconds or 0.0 for task in self.tasks if task.stage == stage and task.ran]
        return sum(ran) if ran else None

    def problems(self, computed: int, skipped: int) -> list[str]:
        """What is not as it should be.

        Args:
            computed, skipped: rows that the run had to compute, and to leave alone.
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
        if computed == 0 and self.stage_seconds("apply") is not None:
            found.append("there was nothing to do, and Spark was started")
        if computed == 0 and self.versions[0] != self.versions[1]:
            found.append(
                f"there was nothing to do, and the table went from version {self.versions[0]} to {self.versions[1]}"
            )
        return [f"{self.name}: {problem}." for problem in found]


def run_dag(api: AirflowApi, name: str, table: Table, counts: Path, console: Console) -> Run:
    """Trigger the DAG and wait for its end, printing what its tasks do.

    Args:
        counts: the file in which the UDF notes its rows.

    Raises:
        TimeoutError: it did not end.
    """
    version, counted, began = table.version, read_count(counts), time.monotonic()
    run_id = api.trigger(DAG_ID)
    view = _View(api, run_id, console, began)
    with console.status("triggered") as status:
        while (state := api.run_state(DAG_ID, run_id)) not in ENDED:
            if time.monotonic() - began > _RUN_SECONDS:
                raise TimeoutError(f"The DAG run {run_id} did not end in {_RUN_SECONDS} s.")
            status.update(view.look())
            time.sleep(_POLL_SECONDS)
        view.look()
    return Run(
        name=name,
        state=state,
        tasks=tuple(api.tasks(DAG_ID, run_id)),
        result=api.xcom(DAG_ID, run_id, "backfill.finish") or {},
        counted=read_count(counts) - counted,
        versions=(version, table.version),
        seconds=time.monotonic() - began,
    )


def wait_for_dag(api: AirflowApi, seconds: float = 120) -> None:
    """Wait until Airflow has read the DAG, and allow it to run.

    Raises:
        TimeoutError: it did not, with the reason if Airflow knows one.
    """
    deadline = time.monotonic() + seconds
    while not api.knows(DAG_ID):
        if time.monotonic() > deadline:
            raise TimeoutError("\n".join([f"Airflow did not read the DAG {DAG_ID}.", *api.import_errors()]))
        time.sleep(_POLL_SECONDS)
    api.unpause(DAG_ID)


def read_count(counts: Path) -> int:
    """Rows that the UDF has counted so far."""
    return sum(map(int, counts.read_text().split())) if counts.exists() else 0


class _View:
    """Prints each task when it ends, and each new line of progress."""

    def __init__(self, api: AirflowApi, run_id: str, console: Console, began: float) -> None:
        self.api = api
        self.run_id = run_id
        self.console = console
        self.began = began
        self._ended: set[tuple[str, int]] = set()
        self._told: dict[tuple[str, int], int] = {}

    def look(self) -> str:
        """Print what is new; returns what is going on, in a line."""
        tasks = self.api.tasks(DAG_ID, self.run_id)
        for task in tasks:
            if task.stage == "apply" and task.ran:
                self._show_progress(task)
            key = (task.task_id, task.map_index)
            if task.seconds is not None and task.state not in ("running", "up_for_retry") and key not in self._ended:
                self._ended.add(key)
                self._show_end(task)
        running = [task.name for task in tasks if task.state == "running"]
        return f"{time.monotonic() - self.began:5.0f} s  {', '.join(running) or 'waiting for the scheduler'}"

    def _show_progress(self, task: TaskState) -> None:
        key = (task.task_id, task.map_index)
        if key in self._ended:
            return
        lines = [found[0] for line in self.api.log(DAG_ID, self.run_id, task) if (found := _PROGRESS.search(line))]
        for line in lines[self._told.get(key, 0) :]:
            self._tell(line, "dim")
        self._told[key] = len(lines)

    def _show_end(self, task: TaskState) -> None:
        color = {"success": "green", "failed": "red", "upstream_failed": "red"}.get(task.state or "", "yellow")
        moment = time.monotonic() - self.began
        self.console.print(
            f"{moment:6.1f} s [{color}]{task.state:8}[/] {task.name} ({task.seconds:.1f} s)", highlight=False
        )
        if task.stage == "plan" and task.state == "success":
            summary = self.api.xcom(DAG_ID, self.run_id, task.task_id, "summary") or {}
            for reason, found in summary.get("reasons", {}).items():
                self._tell(f"{found['rows']:,} rows in {found['fragments']} fragments: {reason}", "dim")
        if task.state == "failed":
            for line in self.api.log(DAG_ID, self.run_id, task)[-_LOG_LINES:]:
                self._tell(line, "red")

    def _tell(self, line: str, style: str) -> None:
        self.console.print(Padding(Text(line, style), (0, 0, 0, 9)))
