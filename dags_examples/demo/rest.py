"""A client of Airflow's REST API: trigger a run, watch its tasks, read their logs and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx

ENDED = ("success", "failed")


@dataclass(frozen=True)
class TaskState:
    """The state of a task instance.

    Args:
        task_id: its full id, with its groups.
        map_index: -1 for a task that is not mapped.
        state: Airflow's state; None before it is scheduled.
        try_number: 1-based try number.
        seconds: how long it ran, or None.
    """

    task_id: str
    map_index: int
    state: str | None
    try_number: int
    seconds: float | None

    @property
    def step(self) -> str:
        """The last part of its id, such as `plan` or `apply`."""
        return self.task_id.rpartition(".")[2]

    @property
    def name(self) -> str:
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"

    @property
    def ran(self) -> bool:
        """Whether it was started at all."""
        return self.state not in (None, "skipped", "removed", "upstream_failed")


def run_seconds(run: Mapping[str, Any]) -> float:
    """Return the seconds from the trigger of an ended run to its end."""
    began, ended = (datetime.fromisoformat(run[name].replace("Z", "+00:00")) for name in ("queued_at", "end_date"))
    return (ended - began).total_seconds()


class AirflowApi:
    """A client of Airflow's REST API.

    Args:
        url: URL of the API server.
        check: called before each request; raises if Airflow has stopped.
    """

    def __init__(self, url: str, check: Callable[[], None]) -> None:
        # A proxy from the environment cannot reach this machine's ports.
        self._http = httpx.Client(base_url=f"{url}/api/v2", trust_env=False, timeout=60)
        self._check = check

    def __enter__(self) -> AirflowApi:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def knows(self, dag_id: str) -> bool:
        """Whether the DAG processor has read the DAG."""
        return self._request("GET", f"/dags/{dag_id}").status_code == httpx.codes.OK

    def import_errors(self) -> list[str]:
        found = self._json("GET", "/importErrors")["import_errors"]
        return [f"{error['filename']}: {error['stack_trace']}" for error in found]

    def unpause(self, dag_id: str) -> None:
        self._json("PATCH", f"/dags/{dag_id}", {"is_paused": False})

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Start a run; returns its id."""
        run = self._json("POST", f"/dags/{dag_id}/dagRuns", {"logical_date": None, "conf": dict(conf or {})})
        return str(run["dag_run_id"])

    def runs(self, dag_id: str) -> list[str]:
        """Return the ids of a DAG's runs, oldest first."""
        found = self._json("GET", f"/dags/{dag_id}/dagRuns?order_by=run_after")["dag_runs"]
        return [str(run["dag_run_id"]) for run in found]

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """Return what Airflow says of a run, such as its `state`."""
        return dict(self._json("GET", f"/dags/{dag_id}/dagRuns/{run_id}"))

    def tasks(self, dag_id: str, run_id: str) -> list[TaskState]:
        """Return the run's task instances in the order of their start."""
        found = self._json("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]
        found.sort(key=lambda item: (item["start_date"] or "9", item["map_index"]))
        return [
            TaskState(item["task_id"], item["map_index"], item["state"], item["try_number"], item["duration"])
            for item in found
        ]

    def log(self, dag_id: str, run_id: str, task: TaskState) -> list[str]:
        """Return the log lines of a task's current try, also while it runs, with error messages."""
        place = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task.task_id}/logs/{max(task.try_number, 1)}"
        answer = self._request(
            "GET",
            place,
            params={"map_index": task.map_index, "full_content": True},
            headers={"accept": "application/json"},
        )
        if answer.status_code != httpx.codes.OK:
            return []
        lines: list[str] = []
        for line in answer.json()["content"]:
            lines.append(str(line["event"]))
            lines.extend(f"{error['exc_type']}: {error['exc_value']}" for error in line.get("error_detail") or ())
        return [line for line in lines if not line.startswith("::")]

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """Return the XCom of an unmapped task; None if there is none."""
        place = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        answer = self._request("GET", place)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer.raise_for_status().json()["value"]

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._request(method, path, json=body).raise_for_status().json()

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        self._check()
        return self._http.request(method, path, **options)
