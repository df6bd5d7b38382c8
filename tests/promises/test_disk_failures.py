"""Full disks, folders that may not be written, damaged documents: said clearly, nothing half-written, mended later."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect, udf
from airflow_geneva.engine.job.status import job_ids, read_jobs
from airflow_geneva.errors import InvalidInput, JobFailed, StorageError
from airflow_geneva.table import Table
from tests.support.counting import TRACE, Trace
from tests.support.forge import forge
from tests.support.harness import Fault, Job, States, run_call, run_tasks
from tests.support.invariants import assert_exact, assert_honest, assert_nothing_to_do_is_free, assert_right
from tests.udfs_for_tests.histories import picky, value_of, valued

pytestmark = pytest.mark.crash

ROWS, PER_FRAGMENT = 100, 25
SOAK = os.environ.get("GENEVA_SOAK") == "1"
HERE = "tests.promises.test_disk_failures"
JOB = Job("plain", as_tasks=True)


@pytest.fixture
def table(make_table: Callable[..., Table], trace: Trace) -> Table:
    made = make_table(ROWS, per_fragment=PER_FRAGMENT)
    made.add_columns({"y": valued})
    return made


def in_a_process(function: str, table: Table, trace: Trace, out: Path, **arguments: Any) -> dict[str, Any]:
    """What a function of this module says about a backfill in a process of its own."""
    given = {"database": str(Path(table.uri).parent), "out": str(out), **arguments}
    assert forge().run(f"{HERE}:{function}", given, {TRACE: str(trace.path)}) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    return told


def backfill(database: str) -> dict[str, Any]:
    """Backfill, and tell how it ended."""
    try:
        result = connect(database).open_table("docs").backfill("y", runner="inline", **JOB.options)
    except (JobFailed, StorageError, InvalidInput) as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "", "message": str(result)}


def backfill_with_small_files(database: str, out: str, most: int) -> None:
    """No file may grow beyond some bytes: what a full disk looks like to whoever writes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # Python keeps the part of a .pyc that it could write
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, unlimited[1]))
    told = backfill(database)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    Path(out).write_text(json.dumps(told))


def drop_privileges() -> None:
    """Root keeps its id, and loses what lets it pass over permissions."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0


def backfill_without_privileges(database: str, out: str) -> None:
    """As a user to whom permissions apply."""
    drop_privileges()
    Path(out).write_text(json.dumps(backfill(database)))


def fail_where_nothing_can_be_recorded(database: str, out: str) -> None:
    """The UDF fails, and so does every document that would say so."""
    table = connect(database).open_table("docs")

    @udf(data_type=pa.int64(), name="valued", version="1")
    def failing(x: int) -> int:
        for folder in Path(table.uri).glob("_checkpoints/jobs/*"):
            folder.chmod(0o555)
        raise RuntimeError("told to")

    drop_privileges()
    told = {}
    try:
        table.backfill("y", udf=failing, runner="inline", **JOB.options)
    except JobFailed as error:
        told = {"message": str(error), "left": error.result.rows_left if error.result else None}
    Path(out).write_text(json.dumps(told))


@contextmanager
def read_only(*folders: Path) -> Iterator[None]:
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in folders}
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)


def assert_nothing_half_written(table: Table, version: int) -> None:
    assert table.version == version
    assert table.count_rows("y IS NOT NULL") == 0
    assert all(
        job.state in ("FAILED", "PENDING", "RUNNING")
        for job in read_jobs(table.location.checkpoints, job_ids(table.location.checkpoints))
    )


def assert_mended(table: Table, trace: Trace) -> None:
    """The next run completes it, and runs only what could not be kept."""
    result = table.backfill("y", runner="inline", **JOB.options)
    assert result.state == "DONE"
    assert_honest(result, table)
    assert_right(table, "y", value_of)
    assert_nothing_to_do_is_free(table, "y", trace)


@pytest.mark.parametrize("most", [0, 300, 1_200, 1_500, 3_000])
def test_a_full_disk_is_said_and_what_was_computed_before_is_kept(
    table: Table, trace: Trace, tmp_path: Path, most: int
) -> None:
    version = table.version
    told = in_a_process("backfill_with_small_files", table, trace, tmp_path / "out", most=most)
    assert told["error"] in ("StorageError", "JobFailed"), told
    assert "Cannot write" in told["message"] or "Cannot commit" in told["message"]
    assert table.uri in told["message"]
    assert "File too large" in told["message"] or "the disk is full" in told["message"]
    assert_nothing_half_written(table, version)
    assert_mended(table, trace)


FOLDERS: dict[str, tuple[str, ...]] = {
    "the table": (".", "data", "_versions", "_transactions", "_checkpoints"),
    "checkpoints": ("_checkpoints",),
    "data files": ("data",),
    "versions": ("_versions", "_transactions"),
}


@pytest.mark.parametrize("where", FOLDERS)
def test_a_folder_that_may_not_be_written_is_named(table: Table, trace: Trace, tmp_path: Path, where: str) -> None:
    version = table.version
    folders = [Path(table.uri, name) for name in FOLDERS[where]]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    with read_only(*folders):
        told = in_a_process("backfill_without_privileges", table, trace, tmp_path / "out")
    assert told["error"] in ("StorageError", "JobFailed"), told
    assert "Permission denied" in told["message"]
    assert table.uri.lstrip("/") in told["message"]
    assert "Check space and permissions" in told["message"] or "is writable" in told["message"]
    assert_nothing_half_written(table, version)
    trace.clear()
    assert_mended(table, trace)
    if where == "versions":
        # Its first shard only waited to be committed.
        assert_exact(trace, range(50, 100))


def test_a_failure_that_cannot_be_recorded_is_told_all_the_same(table: Table, trace: Trace, tmp_path: Path) -> None:
    told = in_a_process("fail_where_nothing_can_be_recorded", table, trace, tmp_path / "out")
    for folder in Path(table.uri).glob("_checkpoints/jobs/*"):
        folder.chmod(0o755)
    assert "told to" in told["message"]
    assert told["left"] == ROWS
    assert_mended(table, trace)


def test_a_plan_whose_version_was_cleaned_up_says_what_to_do(table: Table, trace: Trace, tmp_path: Path) -> None:
    kill_at(table, trace, tmp_path, "staged.written:3")
    table.add([{"id": ROWS, "x": ROWS}])
    table.lance.cleanup_old_versions(older_than=timedelta(0))
    with pytest.raises(InvalidInput, match=r"was cleaned up. .*Clear the plan task with its downstream tasks"):
        run_tasks(table, JOB, tmp_path, "tasks")
    assert_mended(table, trace)


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "something else": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "a folder": lambda path: (path.unlink(), path.mkdir(), (path / "inside").touch()),
}
KINDS = {
    "range checkpoints": "_checkpoints/udf-*/**/range-*.lance",
    "fragment checkpoints": "_checkpoints/udf-*/**/frag-*.lance",
    "staged files": "data/*.lance",
    "ledgers": "_checkpoints/state/**/*.lance",
    "job documents": "_checkpoints/jobs/*/[!ps]*.json",
}
STATIONS = {"apply": "staged.written:3", "commit": "commit.before:2", "finish": "finish.begin"}


def remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def documents(table: Table, pattern: str, before: set[Path]) -> list[Path]:
    return sorted(path for path in Path(table.uri).glob(pattern) if path.is_file() and path not in before)


def cases() -> list[tuple[str, str, str]]:
    """Every kind with every damage, each at one of the stations."""
    found = list(itertools.product(KINDS, DAMAGES, STATIONS))
    return found if SOAK else found[::4]


@pytest.mark.parametrize(("kind", "damage", "station"), cases())
def test_documents_that_break_while_nobody_looks_cost_work_and_never_a_value(
    table: Table, trace: Trace, tmp_path: Path, kind: str, damage: str, station: str
) -> None:
    before = set(Path(table.uri).rglob("*"))
    kill_at(table, trace, tmp_path, STATIONS[station])
    committed = {file.path for fragment in table.lance.get_fragments() for file in fragment.metadata.files}
    broken = [path for path in documents(table, KINDS[kind], before) if path.name not in committed]
    for path in broken:
        DAMAGES[damage](path)
    try:
        result = run_tasks(table, JOB, tmp_path, "tasks")
    except (StorageError, JobFailed) as error:
        # What stands where a file must go is named; with everything else the run copes.
        if damage != "a folder" or not any(str(path) in str(error) for path in broken):
            raise
        remove(broken)
        result = run_tasks(table, JOB, tmp_path, "tasks")
    assert_honest(result, table)
    assert result.state in ("DONE", "PARTIAL")
    assert_right(table, "y", value_of, where="y IS NOT NULL")
    remove(broken if damage == "a folder" else [])
    assert_mended(table, trace)


@pytest.mark.parametrize(
    ("document", "damage"), list(itertools.product(["plan-*.json", "part-*.json"], DAMAGES))[:: 1 if SOAK else 2]
)
def test_a_plan_that_breaks_is_not_carried_out_and_planned_again(
    table: Table, trace: Trace, tmp_path: Path, document: str, damage: str
) -> None:
    kill_at(table, trace, tmp_path, "staged.written:3")
    for path in documents(table, f"_checkpoints/jobs/*/{document}", set()):
        DAMAGES[damage](path)
    with pytest.raises((InvalidInput, StorageError), match=r"Clear the plan task|Cannot read"):
        run_tasks(table, JOB, tmp_path, "tasks")
    for path in Path(table.uri).glob(f"_checkpoints/jobs/*/{document}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    States(tmp_path / "tasks.json").path.unlink()
    trace.clear()
    result = run_tasks(table, JOB, tmp_path, "tasks")
    assert (result.state, result.rows_skipped + result.rows_computed + result.rows_reused) == ("DONE", ROWS)
    assert len(trace) <= 50
    assert_right(table, "y", value_of)


def kill_at(table: Table, trace: Trace, folder: Path, fault: str) -> None:
    """Run the job as tasks in this folder, up to a point."""
    arguments = {"database": str(Path(table.uri).parent), "folder": str(folder), "fault": fault}
    assert forge().run(f"{HERE}:run_and_die", arguments, {TRACE: str(trace.path)}) == -signal.SIGKILL


def run_and_die(database: str, folder: str, fault: str) -> None:
    Fault(fault).arm()
    run_tasks(connect(database).open_table("docs"), JOB, Path(folder), "tasks")


@pytest.mark.parametrize("damage", DAMAGES)
def test_error_records_that_break_are_left_out(make_table: Callable[..., Table], trace: Trace, damage: str) -> None:
    table = make_table(50)
    table.add_columns({"y": picky})
    result = run_call(table, Job("skip"))
    assert result.rows_failed == len(table.get_errors()) == 4
    first, *_ = sorted(Path(table.uri).glob("_checkpoints/jobs/*/errors/*.arrow"))
    DAMAGES[damage](first)
    assert 0 < len(table.get_errors()) < 4
    assert table.get_failed_row_addresses(column_name="y") == [5, 18, 1 << 32 | 6, 1 << 32 | 19]
    assert run_call(table, Job("skip")).rows_failed == 4
