"""A database that an earlier release wrote, opened by this code: nothing recomputes, and what was killed goes on.

`write.py` wrote it, noted its own commit, and did everything in `ACTS` with it; whatever this code does must come to
the same. Everything in it is a month old by its own account, so no clock moves what is tested here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_geneva import View
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.udf import load_udf
from airflow_geneva.errors import CodeChanged
from tests.support.invariants import assert_right
from tests.written_before import written
from tests.written_before.written import ACTS, ROOT, SIZES, TRACE, database, outcome, place, run, unpack

import written_before_udfs as udfs  # isort: skip  # found by way of `written`

if not written.RECORD.exists():
    pytest.skip("no release has stored its database yet", allow_module_level=True)
RECORD = written.record()
NOTHING = {"rows_computed": 0, "rows_reused": 0, "rows_failed": 0, "rows_left": 0, "commits": 0, "versions": 0}


@pytest.fixture(autouse=True)
def _placed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(udfs.TRACE, str(TRACE))
    with place():
        yield


def assert_free(found: dict[str, Any]) -> None:
    """Nothing ran, and no version was written."""
    assert found["calls"] == []
    assert {name: found[name] for name in NOTHING} == NOTHING
    assert found["state"] == "DONE"


@pytest.mark.parametrize("act", ACTS)
def test_it_comes_to_the_same_as_with_the_code_that_wrote_it(act: str) -> None:
    assert outcome(act) == RECORD["acts"][act]


@pytest.mark.parametrize("name", RECORD["code_versions"])
def test_code_has_the_version_it_had(name: str) -> None:
    assert load_udf(f"written_before_udfs:{name}").code_version == RECORD["code_versions"][name]


@pytest.mark.parametrize(
    ("table", "column", "where"),
    [
        ("complete", "score", None),
        ("complete", "doubled", None),
        ("complete", "some", "x < 30"),
        ("unstable", "score", None),
        ("long_view", None, None),
        ("shuffled_view", None, None),
        ("exploded_view", None, None),
    ],
)
def test_what_was_complete_is_complete(table: str, column: str | None, where: str | None) -> None:
    unpack(table, *(["complete"] if table.endswith("_view") else []))
    assert_free(run(table, column, **({"where": where} if where else {})))


@pytest.mark.parametrize("target", RECORD["ran_before_kill"])
def test_what_was_killed_runs_the_rest_and_no_checkpoint_twice(target: str) -> None:
    column = "picky" if target == "killed_picky" else "steady"
    source = "half" if target == "half_view" else "begun" if target == "begun_view" else target
    unpack(source, target)
    table = database().open_table(source)
    where = "x % 3 != 0 AND x >= 60" if source != target else None
    due = [f"{column} {x}" for x in table.lance.to_table(filter=where)["x"].to_pylist()]
    ran, found = RECORD["ran_before_kill"][target], run(target, column, **SIZES)
    assert found["state"] == "DONE"
    assert {*ran, *found["calls"]} == set(due)
    assert len(found["calls"]) == len(set(found["calls"]))
    # Failed rows are tried again.
    again = [row for row in found["calls"] if row in ran and not (column == "picky" and int(row.split()[1]) % 5 == 3)]
    assert len(again) <= SIZES["batch_size"]
    if target != "killed_picky":  # failed rows are tried again
        assert_free(run(target, column))


def test_values_are_right() -> None:
    unpack("complete", "killed")
    assert_right(database().open_table("complete"), "score", lambda x: udfs.score_of(x))
    run("killed", "steady")
    assert_right(database().open_table("killed"), "steady", lambda x: 7 * x)


@pytest.mark.parametrize("view", ["long_view", "half_view", "begun_view"])
def test_a_view_equals_its_query_once_it_is_refreshed(view: str) -> None:
    unpack(view, view.removesuffix("_view"), "complete")
    found = database().open_table(view)
    assert isinstance(found, View)
    run(view)
    rows = found.source().lance.to_table(filter="x % 3 != 0").to_pylist()
    wanted = [{"id": row["id"], "twice": 2 * row["x"], "steady": 7 * row["x"]} for row in rows]
    assert sorted(found.to_arrow().to_pylist(), key=str) == sorted(wanted, key=str)


def test_code_that_changed_stops_the_plan() -> None:
    unpack("complete")
    database().open_table("complete").alter_columns({"score": udfs.steady})
    with pytest.raises(CodeChanged, match=RECORD["code_versions"]["score"]):
        run("complete", "score")
    assert_free(run("complete", "score", on_code_change="new_rows"))
    assert run("complete", "score", on_code_change="recompute")["rows_computed"] == 60


def test_a_killed_job_is_dead_and_one_that_shows_signs_of_life_is_not() -> None:
    unpack("killed")
    job = database().jobs(table="killed")[0]
    assert (job.state, job.dead, job.open) == ("RUNNING", True, False)
    assert "found dead" in str(job)
    (status,) = (ROOT / "db" / "killed.lance" / "_checkpoints" / "jobs" / job.id).glob("status-*.json")
    said = json.loads(status.read_text())
    for ago, dead in ((0, False), (50 * 60, False), (70 * 60, True)):
        status.write_text(json.dumps({**said, "alive": {**said["alive"], "at": time.time() - ago}}))
        assert database().job(job.id).dead == dead
        assert database().job(job.id).open != dead


def test_a_cleanup_takes_what_dead_jobs_left_and_leaves_what_was_committed() -> None:
    unpack("complete", "long_view", "killed", "committed")
    for name in database().table_names():
        location = database().location(name)
        assert collect(location, find_garbage(location, "7d")).version
    assert_free(run("complete", "score"))
    assert_free(run("long_view"))
    assert len(run("killed", "steady")["calls"]) == 80
    assert_right(database().open_table("committed"), "steady", lambda x: 7 * x, where="steady IS NOT NULL")
