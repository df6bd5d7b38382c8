"""Random histories of a source: after every refresh, a deduplicated view equals its query in plain Python."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from airflow_geneva import connect
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace
from tests.support.duplicates import Clean, text_of, vector_of
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.histories import run_histories
from tests.udfs_for_tests import views as udfs

SOAK = os.environ.get("GENEVA_SOAK") == "1"
PICK = st.integers(0, 1 << 30)
CLEAN = [
    Clean(),
    Clean(keep="max(score)", where="x % 3 != 0"),
    Clean(threshold=0.5, keep="min(score)"),
    Clean(("text",), None, "min(score)"),
    Clean(("text", "score"), None),
    Clean(("vector",), 0.95),
    Clean(("vector",), 0.9, "min(score)", "x % 3 != 0"),
]
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("x", pa.int64()),
        ("score", pa.int64()),
        ("other", pa.int64()),
        ("vector", pa.list_(pa.float32(), 8)),
    ]
)


def new_rows(numbers: list[int], first: int) -> pa.Table:
    rows = [
        {"id": first + at, "text": text_of(number), "x": number, "score": number % 5 or None, "other": 0}
        | {"vector": vector_of(number)}
        for at, number in enumerate(numbers)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def make_view(table: Table, clean: Clean) -> View:
    query = table.query().select(["id", "x"]).add_columns({"p": (udfs.plus, ["x"])})
    return clean.of(query).create_materialized_view(name="v")


def wanted(table: Table, clean: Clean, version: int | None = None) -> list[tuple[int, int, int]]:
    dataset = table.lance if version is None else table.location.open(version)
    rows = {row["_rowid"]: row for row in dataset.to_table(with_row_id=True).to_pylist()}
    passes = (lambda row: row["x"] % 3 != 0) if clean.where else (lambda row: True)
    return sorted((rows[one]["id"], rows[one]["x"], rows[one]["x"] + 1) for one in clean.kept(rows, passes))


def shown(view: View) -> list[tuple[int, int, int]]:
    return sorted((row["id"], row["x"], row["p"]) for row in view.to_arrow().to_pylist())


class DuplicateHistories(RuleBasedStateMachine):
    """Whatever happens, the view keeps one row of each cluster, and functions run on rows that enter it only."""

    RUNNER = "inline"
    table: Table
    view: View

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory(prefix="geneva-duplicates-")
        self.trace = Trace(Path(self.scratch.name) / "trace")
        os.environ[TRACE] = str(self.trace.path)
        self.next_id = 0

    def teardown(self) -> None:
        os.environ.pop(TRACE, None)
        self.scratch.cleanup()

    def new_rows(self, numbers: list[int]) -> pa.Table:
        self.next_id += len(numbers)
        return new_rows(numbers, self.next_id - len(numbers))

    @initialize(
        numbers=st.lists(st.integers(0, 300), max_size=24),
        per_fragment=st.sampled_from([4, 30]),
        clean=st.sampled_from(CLEAN),
    )
    def make(self, numbers: list[int], per_fragment: int, clean: Clean) -> None:
        db = connect(Path(self.scratch.name) / "db")
        self.clean = clean
        self.table = db.create_table("docs", self.new_rows(numbers), max_rows_per_file=per_fragment)
        self.view = make_view(self.table, clean)

    def pick(self, number: int) -> str:
        ids = sorted(self.table.lance.to_table(columns=["id"])["id"].to_pylist()) or [-1]
        return ", ".join(str(ids[(number + 7 * step) % len(ids)]) for step in range(1 + number % 4))

    def _append(self, number: int) -> None:
        self.table.add(self.new_rows([(number + 13 * step) % 300 for step in range(1 + number % 6)]))

    def _update_the_text(self, number: int) -> None:
        text = text_of(number % 300)
        value = "NULL" if text is None else "'" + text.replace("'", "''") + "'"
        vector = vector_of(number % 300)
        same = "NULL" if vector is None or math.isnan(vector[0]) else str(vector)
        self.table.lance.update({"text": value, "vector": same}, where=f"id IN ({self.pick(number)})")

    def _update_the_filter(self, number: int) -> None:
        self.table.lance.update({"x": str(number % 300)}, where=f"id IN ({self.pick(number)})")

    def _update_what_decides(self, number: int) -> None:
        self.table.lance.update({"score": str(number % 7)}, where=f"id IN ({self.pick(number)})")

    def _touch(self, number: int) -> None:
        self.table.lance.update({"other": str(number)}, where=f"id IN ({self.pick(number)})")

    def _delete(self, number: int) -> None:
        self.table.lance.delete(f"id IN ({self.pick(number)})")

    def _upsert(self, number: int) -> None:
        fresh = self.new_rows([number % 300])
        ids = sorted({int(one) for one in self.pick(number).split(",")} - {-1})
        changed = pa.concat_tables([new_rows([(number + one) % 300], one) for one in ids] or [SCHEMA.empty_table()])
        merge = self.table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.concat_tables([fresh, changed]))

    def _compact(self, number: int) -> None:
        self.table.lance.optimize.compact_files(target_rows_per_fragment=[6, 1_000][number % 2])

    def _restore(self, number: int) -> None:
        versions = [found["version"] for found in self.table.lance.versions()]
        self.table.location.open(versions[number % len(versions)]).restore()

    def _clean_the_source_up(self, number: int) -> None:
        self.table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)

    def _make_the_source_again(self, number: int) -> None:
        db = connect(self.table.location.database_uri)
        db.drop_table("docs")
        self.table = db.create_table("docs", self.new_rows([(number + 31 * at) % 300 for at in range(number % 15)]))

    def _compact_the_view(self, number: int) -> None:
        self.view.lance.optimize.compact_files()

    def _restore_the_view(self, number: int) -> None:
        versions = [found["version"] for found in self.view.lance.versions()]
        self.view.location.open(versions[number % len(versions)]).restore()

    def _write_into_the_view(self, number: int) -> None:
        self.view.lance.delete("id % 2 = 0")

    def _collect_garbage(self, number: int) -> None:
        collect(self.view.location, find_garbage(self.view.location, "1s"))

    def _lose_what_is_kept_beside_the_view(self, number: int) -> None:
        kept = Path(self.view.uri) / "_duplicates"
        shutil.rmtree([kept, kept / "hashes.lance", kept / "hashes.lance" / "_checkpoints"][number % 3], True)

    ACTIONS = (
        "append", "append", "update_the_text", "update_the_text", "update_the_filter", "update_what_decides", "touch",
        "delete", "delete", "upsert", "compact", "restore", "clean_the_source_up", "make_the_source_again",
        "compact_the_view", "restore_the_view", "write_into_the_view", "collect_garbage",
        "lose_what_is_kept_beside_the_view",
    )  # fmt: skip

    @rule(name=st.sampled_from(ACTIONS), number=PICK)
    def something_happens(self, name: str, number: int) -> None:
        getattr(self, f"_{name}")(number)

    def check_duplicates(self) -> None:
        if not (rows := shown(self.view)):  # a refresh records nothing of a view that is empty, and stays so
            return
        found = self.view.duplicates(["id"])
        kept = [row["id"] for row in found.to_pylist() if row["duplicate_of"] is None]
        selected = self.table.lance.count_rows("x % 3 != 0" if self.clean.where else None)
        assert found.num_rows - len(kept) == selected - len(rows)
        assert {*kept} <= {row[0] for row in rows}

    @rule()
    def refresh(self) -> None:
        self.trace.clear()
        result = self.view.refresh(runner=self.RUNNER)
        assert result.state == "DONE"
        assert shown(self.view) == wanted(self.table, self.clean)
        self.check_duplicates()
        assert result.rows_computed <= len(shown(self.view))
        # The Python workers of Spark have begun before this history, so they write no trace of it.
        assert self.RUNNER == "spark" or len(self.trace) == result.rows_computed
        assert self.view.refresh(runner=self.RUNNER).commits == ()

    @rule(number=PICK)
    def refresh_to_some_version(self, number: int) -> None:
        versions = [found["version"] for found in self.table.lance.versions()]
        version = versions[number % len(versions)]
        self.view.refresh(runner=self.RUNNER, src_version=version)
        assert shown(self.view) == wanted(self.table, self.clean, version)


class SparkDuplicateHistories(DuplicateHistories):
    """The columns of kept rows are computed on Spark."""

    RUNNER = "spark"


class LongDuplicateHistories(DuplicateHistories):
    """More of them, and longer ones."""


TestDuplicateHistories: Callable[..., Any] = DuplicateHistories.TestCase
DuplicateHistories.TestCase.settings = settings(max_examples=8, stateful_step_count=14, deadline=None)
TestSparkDuplicateHistories: Callable[..., Any] = pytest.mark.usefixtures("spark")(
    pytest.mark.spark(pytest.mark.slow(SparkDuplicateHistories.TestCase))
)
SparkDuplicateHistories.TestCase.settings = settings(
    max_examples=100 if SOAK else 5, stateful_step_count=10, deadline=None
)
TestLongDuplicateHistories: Callable[..., Any] = pytest.mark.slow(LongDuplicateHistories.TestCase)
LongDuplicateHistories.TestCase.settings = settings(
    max_examples=500 if SOAK else 25, stateful_step_count=40 if SOAK else 20, deadline=None
)


def refresh_and_die(database: str, fault: str) -> None:
    """Refresh a view in this process, which may not live to see the end; called in a forked one."""
    view = connect(database).open_table("v")
    Fault(fault).arm()
    view.refresh(runner="inline", checkpoint_interval=0)


def die_at(view: View, fault: str) -> bool:
    arguments = {"database": view.location.database_uri, "fault": fault}
    trace = Path(view.location.database_uri).parent / "trace"
    code = forge().run("tests.promises.test_duplicate_histories:refresh_and_die", arguments, {TRACE: str(trace)})
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(40 if SOAK else 4))
def test_a_refresh_that_dies_anywhere_is_done_by_the_next(tmp_path: Path, seed: int) -> None:
    """It dies while the rows are hashed, after the clusters are written, and while the view itself is refreshed."""
    dice = random.Random(seed)
    clean = [*CLEAN[:3], *CLEAN[-2:]][seed % 5]
    numbers = [dice.randrange(300) for _ in range(40)]
    table = connect(tmp_path / "db").create_table("docs", new_rows(numbers, 0), max_rows_per_file=10)
    view = make_view(table, clean)
    died = 0
    for first in range(100, 700, 100):
        before = shown(view)
        died += die_at(view, dice.choice(["duplicates.clustered:1", f"any:{dice.randrange(1, 40)}"]))
        assert shown(view) in (before, wanted(table, clean))
        table.add(new_rows([dice.randrange(300) for _ in range(8)], first))
        table.lance.delete(f"id % 7 = {dice.randrange(7)}")
        if dice.random() < 0.5:
            view.refresh(runner="inline")
            assert shown(view) == wanted(table, clean)
    assert died
    view.refresh(runner="inline")
    assert shown(view) == wanted(table, clean)


if __name__ == "__main__":
    sys.exit(run_histories([DuplicateHistories]))
