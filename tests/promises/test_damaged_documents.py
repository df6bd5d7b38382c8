"""Documents of a job that change on disk between its tasks: plans are refused, everything else counts as not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lance.file import LanceFileWriter

from airflow_geneva import Table, View
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.shard_results import read_shard_result
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput
from tests.support.counting import Trace
from tests.support.tables import MakeTable
from tests.udfs_for_tests import views as udfs

ROWS = 20
SIZES: dict[str, Any] = {"checkpoint_interval": 0.0, "checkpoint_size": 5, "shard_size": 1}
PLANNED = ("plan-*.json", "part-*.json")
"""What a job's tasks may not do without, each with a SHA-256 that leads to the one in XCom."""


@dataclass
class Tasks:
    """A job whose tasks share nothing but what lies on disk and a fingerprint."""

    target: Table | View
    job_id: str = ""
    fingerprint: str = ""

    @property
    def location(self) -> TableLocation:
        return self.target.location

    @property
    def folder(self) -> JobFolder:
        return JobFolder.of(self.location.checkpoints, self.job_id)

    def plan(self) -> None:
        if isinstance(self.target, View):
            saved = record_plan(self.target.plan_refresh(**SIZES), self.location)
        else:
            saved = record_plan(self.target.plan_backfill("p", **SIZES), self.location, store_code=True)
        self.job_id, self.fingerprint = saved.spec.job_id, saved.fingerprint

    def apply(self) -> None:
        saved = load_plan(self.folder.storage, self.fingerprint)
        for index in range(len(saved.shards)):
            shard = saved.load_shard(self.folder.storage, index)
            PlannedJob(self.location, saved).apply(shard, Udfs.planned(saved.spec))
            assert PlannedJob(self.location, saved).is_staged(shard)

    def commit(self) -> None:
        saved = load_plan(self.folder.storage, self.fingerprint)
        for index in range(len(saved.shards)):
            PlannedJob(self.location, saved).commit(saved.load_shard(self.folder.storage, index))

    def finish(self) -> str:
        saved = load_plan(self.folder.storage, self.fingerprint)
        found = (read_shard_result(self.folder, self.fingerprint, index) for index in range(len(saved.shards)))
        return PlannedJob(self.location, saved).finish([shard for shard in found if shard is not None], {}).state

    def go_on(self) -> None:
        self.apply()
        self.commit()
        self.finish()

    def run(self, on_unknown_values: str = "error") -> Any:
        if isinstance(self.target, View):
            return self.target.refresh(runner="inline", on_unknown_values=on_unknown_values)
        return self.target.backfill("p", runner="inline", on_unknown_values=on_unknown_values)

    def values(self) -> list[tuple[int, int]]:
        table = self.target.to_arrow()
        return sorted(zip(table["x"].to_pylist(), table["p"].to_pylist(), strict=True))


@pytest.fixture(params=["column", "view"])
def tasks(request: pytest.FixtureRequest, make_table: MakeTable) -> Tasks:
    """A job that has something to do on a target with a history: rows that it computed, and one that changed since."""
    table = make_table(ROWS, per_fragment=10)
    target: Table | View = table
    if request.param == "column":
        table.add_columns({"p": (udfs.plus, ["x"])})
    else:
        target = table.query().select({"x": "x", "p": (udfs.plus, ["x"])}).create_materialized_view(name="v")
    tasks = Tasks(target)
    tasks.run()
    table.lance.update({"x": "x + 100"}, where="id = 3")
    table.add([{"id": ROWS + number, "x": ROWS + number} for number in range(8)])
    return tasks


WANTED = sorted((x + 100 * (x == 3), x + 1 + 100 * (x == 3)) for x in range(ROWS + 8))


def damage(tasks: Tasks, chosen: Callable[[Path], bool], other: bytes | None) -> int:
    """Cut files of a target in half, or put another Lance file's or document's content into them."""
    files = [file for file in Path(tasks.target.uri, "_checkpoints").rglob("*") if file.is_file() and chosen(file)]
    for file in files:
        content = file.read_bytes()
        another = b"{}" if file.suffix == ".json" and other else other
        file.write_bytes(content[: len(content) // 2] if another is None else another)
    return len(files)


def is_planned(file: Path) -> bool:
    return any(file.match(pattern) for pattern in PLANNED)


@pytest.fixture
def other_file(tmp_path: Path) -> bytes:
    rows = pa.record_batch({"a": [1, 2, 3]})
    writer = LanceFileWriter(str(tmp_path / "other.lance"), rows.schema)
    writer.write_batch(rows)
    writer.close()
    return (tmp_path / "other.lance").read_bytes()


@pytest.mark.parametrize(
    ("stage", "content"),
    [("plan", "half"), ("apply", "other"), ("commit", "half"), ("commit", "other"), ("finish", "other")],
)
def test_what_is_no_plan_counts_as_not_there_and_costs_work_only(
    tasks: Tasks, trace: Trace, other_file: bytes, stage: str, content: str
) -> None:
    for name in ("plan", "apply", "commit", "finish"):
        ended = getattr(tasks, name)()
        if name == stage:
            assert damage(tasks, lambda file: not is_planned(file), None if content == "half" else other_file) > 3
    # Without checkpoints there is nothing to commit; what a commit did and did not record has to be done again.
    assert ended == {"apply": "PARTIAL", "commit": "FAILED"}.get(stage, "DONE")
    if ended == "DONE":
        assert tasks.values() == WANTED
    trace.clear()
    assert tasks.run("recompute").state == "DONE"
    assert tasks.values() == WANTED
    assert len(trace) <= ROWS + 8
    trace.clear()
    assert tasks.run().rows_computed == 0
    assert len(trace) == 0


@pytest.mark.parametrize(("pattern", "stage"), [(pattern, "plan") for pattern in PLANNED] + [("plan-*.json", "commit")])
def test_a_plan_that_was_changed_is_not_carried_out(tasks: Tasks, pattern: str, stage: str) -> None:
    before = tasks.target.version
    for name in ("plan", "apply", "commit")[: 1 if stage == "plan" else 3]:
        getattr(tasks, name)()
    assert damage(tasks, lambda file: file.match(pattern), None)
    with pytest.raises(InvalidInput, match=r"was changed after planning.*Clear the plan"):
        tasks.go_on()
    if stage == "plan" or isinstance(tasks.target, View):
        assert tasks.target.version == before
    assert tasks.run().state == "DONE"
    assert tasks.values() == WANTED
