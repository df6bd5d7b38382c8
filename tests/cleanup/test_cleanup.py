"""Garbage goes, and nothing that anybody may come back to."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.fragment import DataFile

from airflow_geneva import connect, udf
from airflow_geneva.database import Database
from airflow_geneva.engine.checkpoint.facts import fields_with_state, load_state, prune_state
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.cleanup.garbage import FileKind, Garbage
from airflow_geneva.engine.cleanup.in_use import ExistingVersions
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.outbox import OutboxEntry, read_outbox, write_outbox
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.plan.saved_plan import SavedPlan, load_plan
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import InvalidInput, JobFailed, StorageError
from airflow_geneva.table import Table
from tests.support.broken_off import DAY, age, brittle, sturdy
from tests.support.counting import Trace, double, doubled, triple, tripled
from tests.support.invariants import assert_exact, assert_honest, assert_nothing_to_do_is_free, assert_right
from tests.support.object_store import Bucket

MakeTable = Callable[..., Table]

SOAK = os.environ.get("GENEVA_SOAK") == "1"

DIES = """
import sys
from airflow_geneva import connect
connect(sys.argv[1]).open_table("docs").backfill("y", runner="inline", checkpoint_size=5)
"""

CLEANS = """
import sys
from airflow_geneva import connect
from airflow_geneva.engine.cleanup import collect, find_garbage
location = connect(sys.argv[1]).location("docs")
collect(location, find_garbage(location, "1s"))
"""


def clean(table: Table, ttl: str = "7d") -> Garbage:
    found = find_garbage(table.location, ttl)
    removed = collect(table.location, found)
    assert [file_group.names for file_group in removed.file_groups] == [
        file_group.names for file_group in found.file_groups
    ]
    return removed


def files_of(table: Table, folder: str) -> set[str]:
    return {str(path.relative_to(table.uri)) for path in Path(table.uri, folder).rglob("*") if path.is_file()}


def run_and_die(table: Table, fault: str, program: str = DIES) -> int:
    return subprocess.run(
        [sys.executable, "-c", program, str(Path(table.uri).parent)],
        env={**os.environ, "AIRFLOW_GENEVA_FAULT": fault},
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode


@pytest.fixture
def table(make_table: MakeTable, trace: Trace) -> Table:
    """100 rows in four fragments, with a column that is not computed yet."""
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": triple, "z": double})
    return table


@pytest.fixture
def failed(make_table: MakeTable, trace: Trace) -> Table:
    """A table whose only job failed in its third fragment, with checkpoints and staged files left."""
    table = make_table(100, per_fragment=25)
    table.add_columns({"y": sturdy, "z": double})
    with pytest.raises(JobFailed, match="told to"):
        table.backfill("y", udf=brittle, runner="inline", checkpoint_size=5)
    gc.collect()  # a writer that was given up removes its temporary file when it is collected
    assert len(trace) > 50
    return table


def start(table: Table, column: str = "y", **arguments: Any) -> SavedPlan:
    """A job that is planned, and nothing more."""
    return record_plan(table.plan_backfill(column, **arguments), table.location)


def test_a_finished_job_leaves_nothing_once_it_is_old(table: Table, trace: Trace) -> None:
    table.backfill("y", runner="inline", checkpoint_size=10)
    age(table)
    data = files_of(table, "data")
    removed = clean(table)
    assert removed.file_group(FileKind.JOBS).count > 0
    assert removed.file_group(FileKind.CHECKPOINTS).count >= 4
    assert removed.file_group(FileKind.STAGED).count == 0
    left = files_of(table, "_checkpoints")
    assert left
    assert all(name.startswith("_checkpoints/state/") for name in left)
    assert sorted(path.name for path in Path(table.uri, "_checkpoints").iterdir()) == ["jobs", "state"]
    assert files_of(table, "data") == data
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


def test_nothing_goes_before_its_time(table: Table) -> None:
    table.backfill("y", runner="inline")
    age(table, days=6)
    assert find_garbage(table.location, "7d").count == 0
    assert find_garbage(table.location, "7d", now=time.time() + 2 * DAY).count > 0


def test_a_dry_run_tells_and_removes_nothing(failed: Table) -> None:
    age(failed)
    before = files_of(failed, ".")
    garbage = find_garbage(failed.location, "7d")
    assert garbage.file_group(FileKind.CHECKPOINTS).size_bytes > 0
    assert "staged data files" in str(garbage)
    assert files_of(failed, ".") == before
    assert set(clean(failed).file_group(FileKind.CHECKPOINTS).names) == {name for name in before if "/udf-" in name}


def test_what_a_failed_job_computed_is_kept_for_the_time_to_live_and_then_goes(failed: Table, trace: Trace) -> None:
    age(failed, days=6)
    assert clean(failed).count == 0
    age(failed, days=8)
    removed = clean(failed)
    assert removed.file_group(FileKind.STAGED).count == 2
    assert not [name for name in files_of(failed, "_checkpoints") if "udf-" in name]
    trace.clear()
    result = failed.backfill("y", udf=sturdy, runner="inline")
    assert_exact(trace, range(100))
    assert_honest(result, failed, rows_run=100)
    assert_right(failed, "y", tripled)


def test_a_job_that_was_killed_is_not_cleaned_up_while_it_may_come_back(table: Table, trace: Trace) -> None:
    assert run_and_die(table, "commit.before:1") == -signal.SIGKILL
    age(table)
    assert clean(table).count == 0
    result = table.backfill("y", runner="inline")
    assert (result.rows_computed, result.rows_reused) == (0, 100)
    assert_exact(trace, range(100))


def test_a_job_that_was_found_dead_is_cleaned_up(table: Table, trace: Trace) -> None:
    assert run_and_die(table, "commit.before:1") == -signal.SIGKILL
    for document in Path(table.uri, "_checkpoints", "jobs").rglob("*.json"):
        document.write_text(re.sub(r'"(started|at)": ?[\d.]+', rf'"\1":{time.time() - 30 * DAY}', document.read_text()))
    age(table)
    removed = clean(table)
    assert removed.file_group(FileKind.STAGED).count == 4
    assert removed.file_group(FileKind.CHECKPOINTS).count > 0
    assert removed.file_group(FileKind.JOBS).count > 0
    result = table.backfill("y", runner="inline")
    assert (result.state, result.rows_computed) == ("DONE", 100)
    assert_right(table, "y", tripled)


def test_a_queued_job_keeps_what_other_versions_and_jobs_computed_for_its_column_only(
    failed: Table, trace: Trace
) -> None:
    failed.backfill("z", runner="inline")
    saved = start(failed, "y", udf=sturdy)
    trace.clear()
    age(failed)
    removed = clean(failed)
    assert removed.file_group(FileKind.CHECKPOINTS).count > 0
    assert all("_col-z/" in name for name in removed.file_group(FileKind.CHECKPOINTS).names)
    assert not any(saved.spec.job_id in name for name in removed.file_group(FileKind.JOBS).names)
    job = JobFolder.of(failed.location.checkpoints, saved.spec.job_id).storage
    shard = saved.load_shard(job, 0)
    apply_inline(failed.location, saved.spec, shard, Udfs({saved.spec.column: sturdy}))
    result = PlannedJob(failed.location, saved).finish([PlannedJob(failed.location, saved).commit(shard)])
    assert result.state == "DONE"
    assert result.rows_computed + result.rows_reused == 100
    assert result.rows_computed == len(trace) < 50
    assert_right(failed, "y", tripled)


def test_a_shard_of_a_finished_run_can_be_cleared_until_its_plan_is_gone(failed: Table, trace: Trace) -> None:
    with pytest.raises(JobFailed):
        failed.backfill("y", udf=brittle, runner="inline", checkpoint_size=5)
    saved = start(failed, "y", udf=sturdy)
    folder = JobFolder.of(failed.location.checkpoints, saved.spec.job_id)
    folder.write_result("FAILED", PlannedJob(failed.location, saved).finish([]).to_json(), "told to")
    then = time.time() - 8 * DAY
    for path in Path(failed.uri).rglob("*.lance"):
        os.utime(path, (then, then))
    trace.clear()
    removed = clean(failed)
    assert removed.file_group(FileKind.CHECKPOINTS).count == removed.file_group(FileKind.STAGED).count == 0
    shard = load_plan(folder.storage, saved.fingerprint).load_shard(folder.storage, 0)
    apply_inline(failed.location, saved.spec, shard, Udfs({saved.spec.column: sturdy}))
    assert PlannedJob(failed.location, saved).commit(shard).rows_reused > 50
    assert_right(failed, "y", tripled)
    folder.write_result("DONE", PlannedJob(failed.location, saved).finish([]).to_json())
    age(failed)
    clean(failed)
    with pytest.raises(InvalidInput, match=r"is gone\. Clear the plan task with its downstream tasks"):
        load_plan(folder.storage, saved.fingerprint)


def test_checkpoints_that_a_recent_job_only_used_are_kept_and_unused_ones_are_not(failed: Table, trace: Trace) -> None:
    """A column that is backfilled every day would else never lose a checkpoint."""
    failed.backfill("y", udf=sturdy, runner="inline")
    age(failed, days=30)
    failed.add([{"id": 1_000, "x": 1_000}])
    failed.backfill("y", udf=sturdy, runner="inline")
    removed = clean(failed)
    assert removed.file_group(FileKind.CHECKPOINTS).count > 10
    (left,) = [name for name in files_of(failed, "_checkpoints") if "udf-" in name]
    assert "frag-4" in left


@pytest.mark.parametrize("packed", [False, True])
def test_old_checkpoints_that_the_plan_of_a_recent_job_names_stay(failed: Table, trace: Trace, packed: bool) -> None:
    if packed:
        store = CheckpointStore(failed.location.checkpoints)
        store.pack(key for key in store.list_keys() if key.startswith("udf-"))
    age(failed)
    with pytest.raises(JobFailed, match="told to"):
        failed.backfill("y", udf=brittle, runner="inline", checkpoint_size=5)
    removed = clean(failed)
    assert (removed.file_group(FileKind.CHECKPOINTS).count, removed.file_group(FileKind.STAGED).count) == (0, 0)
    trace.clear()
    failed.backfill("y", udf=sturdy, runner="inline")
    assert_exact(trace, range(60, 100))


def stage(table: Table, name: str) -> str:
    """A data file that lies where staged files lie."""
    path = Path(table.uri, "data", name)
    path.write_bytes(b"x" * 10)
    return f"data/{name}"


def test_files_that_only_old_versions_tags_or_branches_reference_stay(table: Table, trace: Trace) -> None:
    table.backfill("y", runner="inline")
    first = table.version
    table.lance.tags.create("first", first)
    table.lance.create_branch("aside")
    table.lance.update({"x": "x + 1"})
    table.backfill("y", runner="inline")
    second = table.version
    table.lance.update({"x": "x - 1"})
    table.lance.optimize.compact_files()
    table.backfill("y", runner="inline")
    age(table)
    assert clean(table).file_group(FileKind.STAGED).count == 0
    table.lance.cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )
    age(table)
    assert clean(table).file_group(FileKind.STAGED).count == 0
    assert second not in {ref["version"] for ref in table.lance.version_refs()}
    assert sorted(table.location.open(first).to_table()["y"].to_pylist()) == sorted(map(tripled, range(100)))
    branch = table.lance.checkout_version(("aside", None))
    assert sorted(branch.to_table()["y"].to_pylist()) == sorted(map(tripled, range(100)))


def test_data_files_of_ours_that_nothing_names_go_and_those_of_others_stay(table: Table) -> None:
    ours, others = stage(table, f"{'0a' * 16}.lance"), stage(table, "somebody-elses.lance")
    assert find_garbage(table.location, "1s").count == 0, "it may be a stranger's who is about to commit"
    age(table)
    assert clean(table).file_group(FileKind.STAGED).names == [ours]
    assert others in files_of(table, "data")


def test_data_files_that_nothing_names_stay_while_a_job_is_open(table: Table) -> None:
    stage(table, f"{'0a' * 16}.lance")
    start(table)
    age(table)
    assert clean(table).count == 0


def test_a_version_that_cannot_be_read_keeps_every_data_file(failed: Table) -> None:
    failed.add([{"id": 1, "x": 1}])
    versions = sorted(Path(failed.uri, "_versions").glob("*.manifest"))
    versions[-1].write_bytes(b"damaged")
    age(failed)
    removed = clean(failed)
    assert removed.file_group(FileKind.STAGED).count == 0
    assert "cannot be read, so data files are kept" in str(removed)


def test_blobs_of_a_staged_file_go_with_it(make_table: MakeTable) -> None:
    field = lance.blob_field("b")

    @udf(data_type=field.type, version="1")
    def paint(x: int) -> bytes:
        return bytes(200_000)

    table = make_table(20, per_fragment=10)
    table.add_columns({"b": paint})
    saved = start(table, "b", udf=paint)
    shard = saved.load_shard(JobFolder.of(table.location.checkpoints, saved.spec.job_id).storage, 0)
    before = files_of(table, "data")
    apply_inline(table.location, saved.spec, shard, Udfs({saved.spec.column: paint}))
    staged = files_of(table, "data") - before
    assert len(staged) > 2
    PlannedJob(table.location, saved).finish([])
    age(table)
    assert set(clean(table).file_group(FileKind.STAGED).names) == staged
    assert files_of(table, "data") == before


def test_a_record_that_is_damaged_keeps_everything_until_its_folder_is_old(failed: Table) -> None:
    age(failed)
    folder = Path(failed.uri, "_checkpoints", "jobs", "20200101T000000-damaged")
    folder.mkdir()
    (folder / "job.json").write_text('{"id": ')
    kept = clean(failed)
    assert kept.file_group(FileKind.CHECKPOINTS).count == kept.file_group(FileKind.STAGED).count == 0
    assert "'20200101T000000-damaged' is damaged" in str(kept)
    age(failed)
    assert clean(failed).file_group(FileKind.CHECKPOINTS).count > 0
    assert not folder.exists()


def test_half_written_files_go_when_nobody_can_be_writing_them(table: Table) -> None:
    halves = [Path(table.uri, "_checkpoints", "jobs", ".tmpabc"), Path(table.uri, "data", ".tmpxyz")]
    halves[0].parent.mkdir(parents=True)
    for half in halves:
        half.write_bytes(b"half")
    assert find_garbage(table.location, "1s").count == 0
    age(table)
    saved = start(table)
    os.utime(halves[0])
    for document in Path(table.uri, "_checkpoints", "jobs", saved.spec.job_id).iterdir():
        os.utime(document, (time.time() - 60 * DAY,) * 2)
    assert clean(table).file_group(FileKind.TEMPORARY).count == 0, "an open job may be writing it"
    PlannedJob(table.location, saved).finish([])
    age(table)
    assert clean(table).file_group(FileKind.TEMPORARY).count == 2
    assert not any(half.exists() for half in halves)


def test_links_are_not_followed(table: Table, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    precious = outside / f"{'0a' * 16}.lance"
    precious.write_bytes(b"x")
    Path(table.uri, "_checkpoints", "jobs", "20200101T000000-linked").mkdir(parents=True)
    Path(table.uri, "_checkpoints", "jobs", "20200101T000000-linked", "progress").symlink_to(outside)
    Path(table.uri, "data", "linked").symlink_to(outside)
    Path(table.uri, "data", f"{'0b' * 16}.lance").symlink_to(precious)
    os.utime(precious, (0, 0))
    age(table)
    assert clean(table).count == 0
    assert precious.exists()


@pytest.mark.parametrize("linked", ["jobs/{job}", "jobs"])
def test_upkeep_does_not_follow_a_link_to_the_jobs_of_another_table(table: Table, linked: str) -> None:
    """`finish` reduces old jobs to their records and folds ledgers, and a cleanup removes old jobs."""
    other = connect(Path(table.uri).parent).create_table("other", pa.table({"x": [1, 2]}))
    other.add_columns({"y": udf(data_type=pa.int64())(doubled)})
    job = other.backfill("y", runner="inline").job_id
    before = files_of(other, "_checkpoints")
    jobs = Path(table.uri, "_checkpoints", "jobs")
    if linked == "jobs":
        jobs.parent.mkdir(parents=True)
        jobs.symlink_to(Path(other.uri, "_checkpoints", "jobs"))
    else:
        jobs.mkdir(parents=True)
        (jobs / job).symlink_to(Path(other.uri, "_checkpoints", "jobs", job))
    folder = JobFolder.of(table.location.checkpoints, job)
    assert job_ids(table.location.checkpoints) == []
    assert folder.read("job.json") is None
    assert folder.storage.list_files() == []
    with pytest.raises(StorageError, match="symbolic link"):
        folder.storage.delete("job.json")
    with pytest.raises(StorageError, match="symbolic link"):
        folder.write_record({})
    with pytest.raises(StorageError, match="symbolic link"):
        CheckpointStore(folder.storage)["key"] = pa.record_batch({"x": [1]})
    age(table)
    clean(table)
    assert files_of(other, "_checkpoints") == before


def test_marks_of_jobs_that_are_gone_go_unless_their_commits_are_still_there(table: Table) -> None:
    checkpoints = table.location.checkpoints
    result = table.backfill("y", runner="inline")
    field = f"field-{table.lance.lance_schema.field('y').id()}"
    for job in (result.job_id, "20200101T000000-nothing"):
        write_outbox(checkpoints, field, OutboxEntry(job, 1))
    age(table)
    removed = clean(table)
    assert [name.rsplit("/", 1)[-1] for name in removed.file_group(FileKind.MARKS).names] == [
        "20200101T000000-nothing.json"
    ]
    assert not JobFolder.of(checkpoints, result.job_id).storage.exists("job.json")
    age(table)
    assert clean(table).count == 0
    assert read_outbox(checkpoints, field) == [OutboxEntry(result.job_id, 1)]
    table.add([{"id": 1, "x": 1}])
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    age(table)
    assert clean(table).file_group(FileKind.MARKS).count == 1


def test_a_mark_of_an_open_job_stays(table: Table) -> None:
    saved = start(table)
    write_outbox(table.location.checkpoints, saved.spec.outbox, OutboxEntry(saved.spec.job_id, saved.spec.version))
    age(table)
    assert clean(table).count == 0


def test_ledgers_go_once_a_fold_that_covers_them_is_old_itself(table: Table, trace: Trace) -> None:
    for x in range(20):
        table.backfill("y", runner="inline", where=f"id = {x}")
    field = table.lance.lance_schema.field("y").id()
    folder = Path(table.uri, "_checkpoints", "state", f"field-{field}")
    folds = list(folder.glob("ledger._compacted-*"))
    age(table)
    for fold in folds:
        os.utime(fold)
    assert find_garbage(table.location, "7d").file_group(FileKind.LEDGERS).count == 0, (
        "somebody may be reading what it covers"
    )
    age(table)
    before = load_state(table.location.checkpoints, field)
    removed = clean(table)
    assert removed.file_group(FileKind.LEDGERS).count >= 15
    after = load_state(table.location.checkpoints, field)
    assert set(after.facts) <= set(before.facts)
    trace.clear()
    table.backfill("y", runner="inline")
    assert_exact(trace, range(20, 100))
    assert_right(table, "y", tripled)


@pytest.mark.slow
def test_ledgers_of_a_fold_that_cannot_be_read_stay(table: Table) -> None:
    for x in range(20):
        table.backfill("y", runner="inline", where=f"id = {x}")
    for fold in Path(table.uri, "_checkpoints", "state").rglob("ledger._compacted-*"):
        fold.write_bytes(fold.read_bytes()[:100])
    age(table)
    assert find_garbage(table.location, "7d").file_group(FileKind.LEDGERS).count == 0


def count_facts(table: Table, column: str = "y") -> int:
    field = table.lance.lance_schema.field(column).id()
    state = load_state(table.location.checkpoints, field)
    return sum(len(group) for group in state.facts.values())


def test_facts_about_fragments_that_no_version_has_any_more_are_dropped(table: Table, trace: Trace) -> None:
    for _ in range(6):
        table.lance.update({"x": "x + 1"})
        table.backfill("y", runner="inline")
    many = count_facts(table)
    clean(table)
    assert count_facts(table) == many, "versions that exist may be restored"
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    clean(table)
    assert count_facts(table) < many / 2
    assert_nothing_to_do_is_free(table, "y", trace)
    assert_right(table, "y", tripled)


def test_facts_about_the_fragments_that_the_oldest_version_compacted_stay(table: Table, trace: Trace) -> None:
    """The transaction of a version names the fragments that it replaced, also where no version has them any more."""
    for _ in range(4):
        table.lance.update({"x": "x + 1"}, "id < 50")
        table.backfill("y", runner="inline")
    table.lance.optimize.compact_files()
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    assert len(table.lance.version_refs()) == 1
    many = count_facts(table)
    clean(table)
    assert count_facts(table) < many
    assert_nothing_to_do_is_free(table, "y", trace)
    assert_right(table, "y", tripled)


def test_facts_that_a_job_writes_while_a_cleanup_drops_others_stay(table: Table, trace: Trace) -> None:
    """The cleanup has read the versions before the job committed, and reads the facts after it."""
    table.lance.update({"x": "x + 1"})
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    read = ExistingVersions.of(table.lance)
    for _ in range(2):
        table.lance.update({"x": "x + 1"})
        table.backfill("y", runner="inline")
    (field_id,) = fields_with_state(table.location.checkpoints)
    prune_state(table.location.checkpoints, field_id, read.numbers, partial(read.signatures, field_id))
    assert_nothing_to_do_is_free(table, "y", trace)
    assert_right(table, "y", tripled)


def test_a_restore_after_facts_were_dropped_costs_nothing(table: Table, trace: Trace) -> None:
    """A fact may be older than every version, and its fragment be gone from the newest and yet in one in between."""
    for _ in range(4):
        table.lance.update({"x": "x + 1"})
        table.backfill("y", runner="inline")
    for at in range(3):
        table.lance.update_config({"k": str(at)})
    computed = table.version
    table.lance.optimize.compact_files()
    table.lance.update({"x": "x + 1"})
    table.backfill("y", runner="inline")
    table.lance.cleanup_old_versions(retain_versions=5, older_than=None, delete_unverified=True)
    assert min(ref["version"] for ref in table.lance.version_refs()) <= computed
    many = count_facts(table)
    age(table)
    clean(table)
    assert count_facts(table) < many
    table.location.open(computed).restore()
    assert_nothing_to_do_is_free(table, "y", trace)
    table.lance.optimize.compact_files()
    assert_nothing_to_do_is_free(table, "y", trace)
    assert_right(table, "y", tripled)


def test_a_job_that_starts_while_garbage_is_collected_keeps_what_it_found(failed: Table, trace: Trace) -> None:
    age(failed)
    garbage = find_garbage(failed.location, "7d")
    saved = start(failed, "y", udf=sturdy)
    removed = collect(failed.location, garbage)
    assert removed.file_group(FileKind.CHECKPOINTS).count == removed.file_group(FileKind.STAGED).count == 0
    trace.clear()
    job = JobFolder.of(failed.location.checkpoints, saved.spec.job_id).storage
    shard = saved.load_shard(job, 0)
    apply_inline(failed.location, saved.spec, shard, Udfs({saved.spec.column: sturdy}))
    assert PlannedJob(failed.location, saved).commit(shard).rows_reused > 50
    assert_right(failed, "y", tripled)


def test_a_file_that_was_committed_while_garbage_is_collected_stays(failed: Table) -> None:
    age(failed)
    garbage = find_garbage(failed.location, "7d")
    assert garbage.file_group(FileKind.STAGED).count == 2
    failed.backfill("y", udf=sturdy, runner="inline")
    assert collect(failed.location, garbage).file_group(FileKind.STAGED).count == 0
    assert_right(failed, "y", tripled)


def test_a_file_that_another_writer_commits_while_garbage_is_collected_stays(failed: Table) -> None:
    age(failed)
    garbage = find_garbage(failed.location, "7d")
    name = garbage.file_group(FileKind.STAGED).names[0]
    dataset = failed.lance
    data_file = DataFile.create(dataset, name.removeprefix("data/"))
    group = lance.LanceOperation.DataReplacementGroup(0, data_file)
    transaction = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
    lance.LanceDataset.commit(dataset.uri, transaction)
    assert name not in collect(failed.location, garbage).file_group(FileKind.STAGED).names
    assert failed.lance.to_table()["y"].null_count == 75


def test_checkpoints_that_vanish_from_a_planned_job_leave_rows_for_the_next_run(failed: Table, trace: Trace) -> None:
    saved = start(failed, "y", udf=sturdy)
    for checkpoint in Path(failed.uri, "_checkpoints").glob("udf-*/**/*.lance"):
        checkpoint.unlink()
    shard = saved.load_shard(JobFolder.of(failed.location.checkpoints, saved.spec.job_id).storage, 0)
    result = PlannedJob(failed.location, saved).commit(shard)
    assert result.rows_left == 100
    failed.backfill("y", udf=sturdy, runner="inline")
    assert_right(failed, "y", tripled)


@pytest.mark.slow
def test_collecting_all_the_time_while_a_job_runs_loses_nothing(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(300, per_fragment=50)
    table.add_columns({"y": sturdy})
    over = threading.Event()
    broken: list[BaseException] = []

    def collect_on() -> None:
        while not over.is_set():
            try:
                collect(table.location, find_garbage(table.location, timedelta(microseconds=1)))
            except BaseException as error:
                broken.append(error)
                return

    thread = threading.Thread(target=collect_on)
    thread.start()
    try:
        for at in range(5):
            result = table.backfill("y", udf=sturdy, runner="inline", checkpoint_size=3, checkpoint_interval=0.0)
            assert (result.state, result.rows_left) == ("DONE", 0)
            table.add([{"id": 1_000 + at, "x": 1_000 + at}])
            table.lance.update({"x": "x + 1"}, f"id < {10 * at}")
    finally:
        over.set()
        thread.join(60)
    assert not broken
    run = trace.counts()
    table.backfill("y", udf=sturdy, runner="inline")
    assert_right(table, "y", tripled)
    assert max(run[x] for x in range(50, 300)) == 1


@pytest.mark.crash
@pytest.mark.parametrize("passage", [1, 2, 7, 13, 20, 10_000])
def test_collecting_is_killed_anywhere_and_run_again(failed: Table, trace: Trace, passage: int) -> None:
    failed.backfill("z", runner="inline")
    stage(failed, f"{'0a' * 16}.lance")
    age(failed)
    wanted = find_garbage(failed.location, "1s")
    code = run_and_die(failed, f"cleanup.removed:{passage}", CLEANS)
    assert code == (-signal.SIGKILL if passage <= wanted.count else 0)
    assert_right(failed, "z", doubled)
    age(failed)
    clean(failed)
    left = files_of(failed, "_checkpoints")
    assert all(name.startswith("_checkpoints/state/") for name in left)
    assert not set(wanted.file_group(FileKind.STAGED).names) & files_of(failed, "data")
    trace.clear()
    assert failed.backfill("y", udf=sturdy, runner="inline").state == "DONE"
    assert_exact(trace, range(100))
    assert_right(failed, "y", tripled)
    assert_nothing_to_do_is_free(failed, "z", trace)


class Twins:
    """Two tables with the same history; garbage is collected beside one of them."""

    def __init__(self, folder: Path, trace: Trace, dice: random.Random) -> None:
        self.trace = trace
        self.dice = dice
        self.tables = []
        for name in ("plain", "cleaned"):
            data = pa.table({"id": pa.array(range(40), pa.int64()), "x": pa.array(range(40), pa.int64())})
            table = connect(folder / name).create_table("docs", data, max_rows_per_file=10)
            table.add_columns({"y": triple})
            self.tables.append(table)
        self.next = 40

    def act(self) -> None:
        dice, versions = self.dice, sorted(ref["version"] for ref in self.tables[0].lance.version_refs())
        where, x, size = f"id % 7 = {dice.randrange(7)}", dice.randrange(100), dice.choice([15, 1_000])
        version, rows = dice.choice(versions[-12:]), dice.randint(1, 8)
        new = pa.table({"id": pa.array(range(self.next, self.next + rows)), "x": pa.array([x] * rows)})
        actions: list[Callable[[Table], Any]] = [
            lambda t: t.add(new),
            lambda t: t.lance.update({"x": str(x)}, where),
            lambda t: t.lance.update({"id": "id"}, where),
            lambda t: t.lance.delete(where + " AND id % 2 = 0"),
            lambda t: t.lance.optimize.compact_files(target_rows_per_fragment=size),
            lambda t: t.location.open(version).restore() if version > 2 else None,
            lambda t: t.lance.cleanup_old_versions(retain_versions=dice_kept, delete_unverified=True),
            lambda t: t.lance.add_columns({f"c{t.version}": "id"}),
        ]
        dice_kept = dice.randint(1, 8)
        weights = [3, 3, 2, 2, 3, 2, 2, 1]
        (action,) = dice.choices(actions, weights)
        for table in self.tables:
            action(table)
        self.next += rows

    def backfill(self, where: str | None) -> None:
        plain, cleaned = (self.run(table, where) for table in self.tables)
        assert cleaned == plain

    def run(self, table: Table, where: str | None) -> tuple[Any, ...]:
        self.trace.clear()
        result = table.backfill("y", runner="inline", where=where)
        assert_honest(result, table, rows_run=len(self.trace))
        # Rows that a restore made due again may lie in checkpoints that are collected on one side only.
        due = result.rows_computed + result.rows_reused
        rows = table.lance.to_table(columns=["id", "x", "y"]).sort_by("id").to_pylist()
        return result.state, due, result.rows_skipped, rows

    def collect(self) -> None:
        age(self.tables[1])
        clean(self.tables[1], "1s")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500 if SOAK else 1))
def test_collecting_at_any_moment_changes_neither_what_runs_nor_any_value(
    tmp_path: Path, trace: Trace, seed: int
) -> None:
    dice = random.Random(seed)
    twins = Twins(tmp_path, trace, dice)
    for _ in range(25):
        for _ in range(dice.randint(0, 3)):
            twins.act()
        if dice.random() < 0.5:
            twins.collect()
        twins.backfill(dice.choice([None, None, "id % 3 = 0", "x >= 50"]))
        if dice.random() < 0.3:
            twins.collect()


def test_the_users_own_cleanup_works_with_its_default_arguments(table: Table, trace: Trace) -> None:
    table.backfill("y", runner="inline")
    table.lance.cleanup_old_versions()
    table.lance.cleanup_old_versions(older_than=timedelta(0))
    assert table.lance.tags.list() == {}
    assert_nothing_to_do_is_free(table, "y", trace)
    assert_right(table, "y", tripled)


@pytest.mark.parametrize("delete_unverified", [False, True])
def test_the_users_own_cleanup_in_the_middle_of_a_job_loses_nothing(
    table: Table, trace: Trace, delete_unverified: bool
) -> None:
    saved = start(table)
    shard = saved.load_shard(JobFolder.of(table.location.checkpoints, saved.spec.job_id).storage, 0)
    apply_inline(table.location, saved.spec, shard, Udfs({saved.spec.column: triple}))
    staged = files_of(table, "data")
    table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=delete_unverified)
    removed = staged - files_of(table, "data")
    assert len(removed) == (4 if delete_unverified else 0)
    committed = PlannedJob(table.location, saved).commit(shard)
    result = PlannedJob(table.location, saved).finish([committed])
    if not delete_unverified:
        assert (result.state, result.rows_left) == ("DONE", 0)
        assert_exact(trace, range(100))
    else:
        assert (result.state, result.rows_left) == ("PARTIAL", 100)
        assert "its staged data file is gone" in str(result)
        assert table.count_rows("y IS NOT NULL") == 0
        trace.clear()
        assert table.backfill("y", runner="inline").state == "DONE"
        assert_exact(trace, range(100))
    assert_right(table, "y", tripled)
    assert_nothing_to_do_is_free(table, "y", trace)


@pytest.mark.slow
def test_garbage_on_an_object_store_is_like_any_other(
    db: Database,
    bucket: Bucket,
    trace: Trace,
) -> None:
    data = {"id": pa.array(range(60), pa.int64()), "x": pa.array([*range(20), *range(40, 80)], pa.int64())}
    table = db.create_table("docs", pa.table(data), max_rows_per_file=20)
    table.add_columns({"y": sturdy})
    with pytest.raises(JobFailed):
        table.backfill("y", udf=brittle, runner="inline", checkpoint_size=5)
    assert find_garbage(table.location, "7d").count == 0
    later = time.time() + 30 * DAY
    bucket.put("some/db/docs.lance/data/somebody-elses.lance", b"x")
    before = bucket.objects("docs.lance/")
    garbage = find_garbage(table.location, "7d", now=later)
    sizes = {
        f"some/db/docs.lance/{file.name}": file.size_bytes
        for file_group in garbage.file_groups
        for file in file_group.files
    }
    assert sizes == {name: len(before[name]) for name in sizes}
    assert garbage.file_group(FileKind.STAGED).count == 2
    assert collect(table.location, garbage).count == garbage.count
    assert set(before) - set(bucket.objects("docs.lance/")) == set(sizes)
    assert not bucket.objects("/_checkpoints/udf-")
    trace.clear()
    assert table.backfill("y", udf=sturdy, runner="inline").rows_computed == 60
    assert_right(table, "y", tripled)
    assert find_garbage(table.location, "7d", now=later).file_group(FileKind.STAGED).count == 0
