"""Random histories of a column whose code changes and fails, and of another one fed by it, against a simple model."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from airflow_geneva import connect
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.errors import CodeChanged
from airflow_geneva.table import Table
from tests.support.counting import TRACE, Trace
from tests.support.invariants import assert_honest
from tests.udfs_for_tests.histories import RATED, rated_1, rated_value, reported, reported_value

SOAK = os.environ.get("GENEVA_SOAK") == "1"

# The processes that run UDFs outlive an example, and they leave their traces where they were told when they began.
SCRATCH = tempfile.TemporaryDirectory(prefix="geneva-code-histories-")
TRACES = Trace(Path(SCRATCH.name) / "trace"), Trace(Path(SCRATCH.name) / "trace.reported")

MOST_RUNS = 3
PICK = st.integers(0, 1 << 30)
VERSIONS = st.sampled_from(sorted(RATED))
WHERES = [None, None, "id % 2 = 0", "x >= 10"]


@dataclass
class Row:
    """What is known of one row.

    Args:
        x: its input.
        maker: the version whose code made its value; None when it has none, or a foreign one.
        counts_as: versions that take the value for theirs.
        failed: the version that failed on the input last, and in how many runs.
        fed: what the other column was computed from.
    """

    x: int
    maker: str | None = None
    counts_as: frozenset[str] = frozenset()
    failed: tuple[str, int] = ("", 0)
    fed: Any = "nothing"

    def copy(self) -> Row:
        return Row(self.x, self.maker, self.counts_as, self.failed, self.fed)

    def forget(self) -> None:
        self.maker, self.counts_as, self.failed = None, frozenset(), ("", 0)

    def runs(self, version: str) -> int:
        return self.failed[1] if self.failed[0] == version else 0


@dataclass
class Asked:
    """A backfill as it is asked for."""

    version: str
    mode: str = "error"
    continue_from: tuple[str, ...] = ()
    errors_only: bool = False

    def is_done(self, row: Row) -> bool:
        if self.mode == "recompute":
            return row.maker == self.version
        return self.version in row.counts_as

    def is_left_alone(self, row: Row) -> bool:
        """Holds another version's value, which stays."""
        other = row.maker is not None and not self.is_done(row)
        return other and (self.errors_only or self.mode == "new_rows" or row.maker in self.continue_from)

    def is_due(self, row: Row) -> bool:
        if self.errors_only:
            return row.failed[1] > 0
        if self.is_done(row) or self.is_left_alone(row):
            return False
        return row.runs(self.version) < MOST_RUNS


class CodeHistories(RuleBasedStateMachine):
    """Whatever code does, no row runs that need not, none in more than three runs, and no value goes unasked."""

    table: Table

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory(prefix="geneva-history-")
        os.environ[TRACE] = str(TRACES[0].path)
        self.rows: dict[int, Row] = {}
        self.saved: dict[int, dict[int, Row]] = {}
        self.used: dict[str, bool] = {}
        self.next_id = self.next_x = 0
        self.restored = False

    def teardown(self) -> None:
        os.environ.pop(TRACE, None)
        self.scratch.cleanup()

    def new_rows(self, count: int) -> pa.Table:
        numbers, xs = range(self.next_id, self.next_id + count), [self.new_x() for _ in range(count)]
        self.next_id += count
        self.rows.update({number: Row(x) for number, x in zip(numbers, xs, strict=True)})
        return pa.table({"id": pa.array(numbers, pa.int64()), "x": pa.array(xs, pa.int64())})

    def new_x(self) -> int:
        """An input that never was: one that comes back may find its old value right."""
        self.next_x += 1
        return self.next_x

    def pick(self, number: int, most: int = 4) -> list[int]:
        rows = sorted(self.rows)
        return sorted({rows[(number + 5 * step) % len(rows)] for step in range(1 + number % most)}) if rows else []

    def remember(self) -> None:
        self.saved[self.table.version] = {number: row.copy() for number, row in self.rows.items()}

    @initialize(count=st.integers(6, 20), per_fragment=st.sampled_from([4, 30]))
    def make(self, count: int, per_fragment: int) -> None:
        db = connect(Path(self.scratch.name) / "db")
        self.table = db.create_table("docs", self.new_rows(count), max_rows_per_file=per_fragment)
        self.table.add_columns({"y": rated_1})
        self.table.add_columns({"z": (reported, ["id", "y"])})
        self.remember()

    @rule(count=st.integers(1, 5))
    def append(self, count: int) -> None:
        self.table.add(self.new_rows(count))
        self.remember()

    @rule(number=PICK)
    def update(self, number: int) -> None:
        if rows := self.pick(number):
            x = self.new_x()
            self.table.lance.update({"x": str(x)}, where=listed(rows))
            self.change(rows, x)

    @rule(number=PICK)
    def upsert_in_place(self, number: int) -> None:
        if rows := self.pick(number):
            x = self.new_x()
            data = pa.table({"id": pa.array(rows, pa.int64()), "x": pa.array([x] * len(rows), pa.int64())})
            self.table.lance.merge_insert("id").when_matched_update_all().execute(data)
            self.change(rows, x)

    def change(self, rows: list[int], x: int) -> None:
        for row in (self.rows[number] for number in rows):
            row.forget()
            row.x = x
        self.remember()

    @rule(number=PICK)
    def touch(self, number: int) -> None:
        if rows := self.pick(number):
            self.table.lance.update({"id": "id"}, where=listed(rows))
            self.remember()

    @rule(number=PICK)
    def write_the_column(self, number: int) -> None:
        if rows := self.pick(number):
            self.table.lance.update({"y": "-7"}, where=listed(rows))
            for number in rows:
                self.rows[number].forget()
            self.remember()

    @rule(number=PICK)
    def delete(self, number: int) -> None:
        if rows := self.pick(number):
            self.table.lance.delete(listed(rows))
            for number in rows:
                del self.rows[number]
            self.remember()

    @rule(size=st.sampled_from([8, 1_000]))
    def compact(self, size: int) -> None:
        self.table.lance.optimize.compact_files(target_rows_per_fragment=size)
        self.remember()

    @rule()
    def collect_garbage(self) -> None:
        now = time.time() + timedelta(days=365).total_seconds()
        collect(self.table.location, find_garbage(self.table.location, "1s", now=now))
        # Jobs that are forgotten cannot be continued.
        self.used.clear()

    @rule(number=PICK)
    def restore(self, number: int) -> None:
        versions = sorted(self.saved)
        version = versions[number % len(versions)]
        self.table.location.open(version).restore()
        self.rows = {number: row.copy() for number, row in self.saved[version].items()}
        self.restored = True
        self.remember()

    @rule(version=VERSIONS, where=st.sampled_from(WHERES))
    def recompute(self, version: str, where: str | None) -> None:
        self.run(Asked(version, "recompute"), where)

    # What was accepted after a version was written is known of its files for ever, the model only knows the rows.
    @precondition(lambda self: not self.restored)
    @rule(version=VERSIONS, where=st.sampled_from(WHERES), mode=st.sampled_from(["error", "error", "new_rows"]))
    def backfill(self, version: str, where: str | None, mode: str) -> None:
        self.run(Asked(version, mode), where)

    @precondition(lambda self: not self.restored and self.used)
    @rule(version=VERSIONS, number=PICK)
    def go_on_from_other_code(self, version: str, number: int) -> None:
        others = sorted(name for name, whole in self.used.items() if whole and name != version)
        if others:
            self.run(Asked(version, continue_from=(others[number % len(others)],)), None)

    @precondition(lambda self: not self.restored)
    @rule(version=VERSIONS)
    def only_errors(self, version: str) -> None:
        self.run(Asked(version, errors_only=True), None)

    def run(self, asked: Asked, where: str | None) -> None:
        before = self.values()
        selected = set(self.table.lance.to_table(columns=["id"], filter=where)["id"].to_pylist())
        due = {number for number in selected if asked.is_due(self.rows[number])}
        at_stake = {
            number for number in due if self.rows[number].maker not in (None, asked.version) and not asked.errors_only
        }
        version = self.table.version
        TRACES[0].clear()
        options: dict[str, Any] = {"on_code_change": asked.mode, "errors_only": asked.errors_only}
        options["on_unknown_values"] = "recompute"
        if asked.continue_from:
            options["continue_from"] = list(asked.continue_from)
        try:
            result = self.table.backfill(
                "y", udf=RATED[asked.version], where=where, runner="inline", commit_granularity=2, **options
            )
        except CodeChanged:
            assert asked.mode == "error"
            assert at_stake
            assert (self.table.version, TRACES[0].rows()) == (version, [])
            return
        assert asked.mode != "error" or not at_stake, f"{asked} recomputed {at_stake} unasked"
        assert result.state == "DONE"
        assert_honest(result, self.table)
        run = TRACES[0].counts()
        bad = {number for number in selected if rated_value("1", number, self.rows[number].x) is None}
        if self.restored:
            # In how many runs an input failed is not undone by a restore.
            due = (due - bad) | (set(run) & bad)
        assert set(run) <= due, f"need not have run: {sorted(set(run) - due)}"
        assert not run or max(run.values()) == 1
        assert bad & due <= set(run), f"not tried again: {sorted(bad & due - set(run))}"
        assert result.rows_failed == len(bad & due)
        now = self.values()
        for number, (x, y) in now.items():
            row = self.rows[number]
            if number not in due:
                assert y == before[number][1], f"row {number} was not due and changed"
            else:
                allowed = {rated_value(version, number, x) for version in (asked.version, *asked.continue_from)}
                assert y in allowed, f"row {number} holds {y}"
                self.take_in(row, asked.version, y)
            # Who repairs failed rows with other code leaves all other rows as they are, for the next runs too.
            if where is None and (due or not asked.errors_only) and asked.is_left_alone(row):
                row.counts_as |= {asked.version}
        if not due:
            assert self.table.version == version or asked.mode == "new_rows" or asked.continue_from
        # Values that another filter chose cannot be mixed with those of a run without one.
        self.used[asked.version] = self.used.get(asked.version, True) and where is None
        self.remember()

    def take_in(self, row: Row, version: str, y: int | None) -> None:
        if y is None:
            runs = row.runs(version) + 1
            row.forget()
            row.failed = (version, runs)
            return
        row.forget()
        row.maker = str(y // 1_000_000_000)
        row.counts_as = frozenset({row.maker, version})

    def values(self) -> dict[int, tuple[int, int | None]]:
        rows = self.table.lance.to_table(columns=["id", "x", "y"]).to_pylist()
        found = {row["id"]: (row["x"], row["y"]) for row in rows}
        assert {number: x for number, (x, _) in found.items()} == {n: row.x for n, row in self.rows.items()}
        return found

    @rule()
    def fill_the_column_fed_by_it(self) -> None:
        values = self.values()
        due = {number for number, row in self.rows.items() if row.fed != values[number][1]}
        TRACES[1].clear()
        version = self.table.version
        result = self.table.backfill("z", runner="inline", commit_granularity=2)
        assert result.state == "DONE"
        assert_honest(result, self.table)
        run = TRACES[1].counts()
        assert set(run) <= due, f"need not have run: {sorted(set(run) - due)}"
        assert not run or max(run.values()) == 1
        rows = self.table.lance.to_table(columns=["id", "y", "z"]).to_pylist()
        wrong = [row for row in rows if row["z"] != reported_value(row["y"])]
        assert not wrong, f"wrong: {wrong[:3]}"
        assert due or self.table.version == version
        for number, row in self.rows.items():
            row.fed = values[number][1]
        self.remember()


def listed(rows: list[int]) -> str:
    return f"id IN ({', '.join(map(str, rows))})"


TestCodeHistories: Callable[..., Any] = CodeHistories.TestCase
CodeHistories.TestCase.settings = settings(
    max_examples=500 if SOAK else 12, stateful_step_count=50 if SOAK else 20, deadline=None
)
pytestmark = pytest.mark.slow
