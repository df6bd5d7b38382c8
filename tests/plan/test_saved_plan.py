"""Plans as documents: read back as they were, refused when they were changed, small in XCom."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.checkpoint.provenance import Provenance
from airflow_geneva.engine.checkpoint.reuse import Ancestor
from airflow_geneva.engine.checkpoint.view_snapshot import Origin, Snapshot, SourceFragment
from airflow_geneva.engine.job.folder import plan_name
from airflow_geneva.engine.lance_io.fragments import FragmentFiles
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.table_versions import PlannedTable
from airflow_geneva.engine.plan.model import BackfillSpec, Plan
from airflow_geneva.engine.plan.saved_plan import load_plan, shard_summaries
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks, Shard, cut_shards
from airflow_geneva.engine.plan.sizing import Sizing
from airflow_geneva.engine.plan.swap_plan import SwapPlan
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.udf.code_archive import CodeArchive
from airflow_geneva.engine.udf.settings import UdfDefinition
from airflow_geneva.errors import InvalidInput
from tests.support.counting import triple
from tests.support.invariants import assert_closed
from tests.support.plans import save_plan

WORK = BackfillSpec(
    job_id="20310101T000000-abc",
    table="/data/docs.lance",
    table_name="docs",
    column="n",
    field_id=4,
    udf=UdfDefinition("f", "1a", "my.module:f", ("body",), "int64", "scalar").to_json(),
    codes=(CodeArchive("code.zip", "0" * 64),),
    inputs=("body",),
    where="id > 3",
    version=9,
    tables=(PlannedTable("/db/docs.lance", "docs", 7, 1, "5f"),),
    read_version=8,
    udf_version="1a",
    sizing=Sizing(concurrency=3, batch_size=7, checkpoint_interval=1.5),
)


def fragment(at: int, gaps: int = 2) -> FragmentTask:
    files = FragmentFiles(at, 1_000, "4-5-6", 3, ((1, -1, f"in-{at}.lance"),), ((0, -1, "w"),), ((4, 2, "o"),), 99)
    missing = Ranges.from_pairs((3 * n, 3 * n + 1) for n in range(gaps))
    older = (Ancestor(("a" * 32, 5), Ranges.of(0, 4)),)
    return FragmentTask(
        files, "never computed", Ranges.of(0, 900), missing, 900, True, older, ((Provenance("old"), missing),)
    )


def plan_of(fragments: int, shard_size: int | None = None, gaps: int = 2) -> Plan:
    shards = cut_shards(FragmentTasks(fragment(at, gaps) for at in range(fragments)), shard_size)
    return Plan(WORK, shards, rows_total=1_000 * fragments, reason_counts=(), notes=("a note",))


@pytest.fixture
def job(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "job"))


def test_a_plan_is_read_back_as_it_was_written(job: Storage) -> None:
    plan = plan_of(5, shard_size=2)
    saved = load_plan(job, save_plan(plan, job).fingerprint)
    assert saved.spec == plan.spec
    assert saved.notes == plan.notes
    assert (saved.rows_total, saved.rows_skipped) == (plan.rows_total, plan.rows_skipped)
    assert tuple(saved.load_shard(job, index) for index in range(3)) == plan.shards


def test_a_shard_survives_its_own_form() -> None:
    shard = Shard(
        3, FragmentTasks((fragment(1), replace(fragment(2), missing=Ranges.of(0, 900), staged=False, ancestors=())))
    )
    assert Shard.load(shard.dump()) == shard


def test_the_fingerprint_covers_every_shard_and_tells_runs_apart(job: Storage) -> None:
    fingerprint = save_plan(plan_of(3), job).fingerprint
    assert save_plan(plan_of(3), job).fingerprint == fingerprint
    assert save_plan(plan_of(3), job, run="again").fingerprint != fingerprint
    assert save_plan(plan_of(3, gaps=1), job).fingerprint != fingerprint


def test_a_plan_that_was_changed_is_refused(job: Storage, tmp_path: Path) -> None:
    saved = save_plan(plan_of(3), job)
    header = tmp_path / "job" / plan_name(saved.fingerprint)
    header.write_bytes(header.read_bytes().replace(b"my.module:f", b"evil.module"))
    with pytest.raises(InvalidInput, match="SHA-256 differs"):
        load_plan(job, saved.fingerprint)


def test_a_shard_that_was_changed_is_refused(job: Storage, tmp_path: Path) -> None:
    saved = save_plan(plan_of(3), job)
    shard = tmp_path / "job" / saved.shards[0]["file"]
    shard.write_bytes(shard.read_bytes().replace(b"in-1.lance", b"in-2.lance"))
    with pytest.raises(InvalidInput, match="SHA-256 differs"):
        saved.load_shard(job, 0)


def test_a_swap_is_read_back_as_it_was_written_and_refused_once_it_was_changed(job: Storage) -> None:
    unusual = (
        (Origin(failed=(("n", 2),)), Ranges.of(5, 6)),
        (Origin(made=(("n", "0f"),), failed=(("m", 1),)), Ranges.of(3, 4)),
    )
    fragments = (
        SourceFragment("one", "gone", Ranges.of(0, 9), Ranges.of(20, 29), unusual),
        SourceFragment("two", "", Ranges.of(0, 5), Ranges.of(40, 45)),
    )
    snapshot = Snapshot(3, (("n", "1a"),), fragments, Ranges.of(0, 7))
    swap = SwapPlan("before", Ranges.of(20, 22), snapshot, True, 5, 7)
    saved = save_plan(replace(plan_of(1), swap=swap), job)
    found = saved.load_swap(job)
    assert found.dump() == swap.dump()
    assert (found.gone, found.snapshot.fragments[1].ids) == (swap.gone, Ranges.of(40, 45))
    assert found.snapshot.to_batch().equals(snapshot.to_batch(), check_metadata=True)
    assert saved.swap is not None
    job.write_bytes(saved.swap["file"], replace(swap, advances=False).dump())
    with pytest.raises(InvalidInput, match=r"was changed after planning .*Clear the plan task"):
        saved.load_swap(job)


def test_a_plan_that_is_gone_says_what_to_do(job: Storage) -> None:
    with pytest.raises(InvalidInput, match=r"is gone\. Clear the plan task with its downstream tasks"):
        load_plan(job, "f" * 64)


@pytest.mark.slow
@pytest.mark.parametrize(("fragments", "shard_size", "gaps"), [(3, 1, 2), (4_000, None, 40), (20_000, 20, 3)])
def test_what_goes_to_xcom_stays_small(job: Storage, fragments: int, shard_size: int | None, gaps: int) -> None:
    plan = plan_of(fragments, shard_size, gaps)
    saved = save_plan(plan, job)
    summaries = shard_summaries(plan, saved, job)
    sizes = [len(json.dumps(summary)) for summary in summaries]
    assert max(sizes) < 16_384
    assert sum(sizes) < 1_000_000
    assert [summary["fragment_count"] for summary in summaries] == [len(shard.fragments) for shard in plan.shards]
    assert all(summary["fingerprint"] == saved.fingerprint for summary in summaries)


def test_a_small_plan_is_whole_in_xcom(job: Storage) -> None:
    plan = plan_of(3)
    (summary,) = shard_summaries(plan, save_plan(plan, job), job)
    first = plan.fragments[0]
    assert summary["fragments"][0] == {"id": 0, "srcfiles": first.files.srcfiles, "missing": first.missing.pairs()}
    assert len(summary["fragments"]) == 3
    assert summary["checkpoint_prefix"] == WORK.prefix
    assert summary["title"] == f"fragments 0-2, {plan.shards[0].rows:,} rows"
    gaps = Shard(0, plan.shards[0].fragments.with_ids([0, 2]))
    assert gaps.title == f"2 of fragments 0-2, {gaps.rows:,} rows"


def test_no_credential_is_in_a_plan(tmp_path: Path) -> None:
    secrets = {"aws_secret_access_key": "s3cr3t-value", "aws_session_token": "t0k3n-value"}
    table = connect(tmp_path, storage_options=secrets).create_table("docs", pa.table({"x": [1, 2]}))
    table.add_columns({"n": triple})
    plan = table.plan_backfill("n")
    saved = save_plan(plan, table.location.checkpoints)
    shown = [repr(plan), str(plan), repr(saved), repr(table), json.dumps(plan.spec.to_json())]
    assert not any(secret in text for text in shown for secret in secrets.values())
    assert_closed(tmp_path, list(secrets.values()))
