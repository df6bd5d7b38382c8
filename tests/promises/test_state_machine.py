"""Random histories of a table, checked after every backfill against a model that shares no code with the planner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from lance.fragment import write_fragments

from airflow_geneva import connect, udf
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import JobFailed, UnknownValues
from airflow_geneva.table import Table
from tests.support.counting import TRACE, Trace, leave_trace
from tests.support.invariants import assert_honest, assert_nothing_to_do_is_free

FAILS_AT = "GENEVA_TEST_FAILS_AT"
SOAK = os.environ.get("GENEVA_SOAK") == "1"

WHERES = [None, None, None, "id % 3 = 0", "x >= 50", "x IS NULL", "y IS NULL"]
XS = st.none() | st.integers(0, 99)
PICK = st.integers(0, 1 << 30)


def value_of(number: int, x: int | None) -> int:
    """What the UDF computes."""
    return -1 - number if x is None else 1_000 * x + number


@udf(data_type=pa.struct({"id": pa.int64(), "x": pa.int64()}), version="1")
def read(id: int, x: int | None) -> dict[str, int | None]:
    return {"id": id, "x": x}


def traced_value(id: int, x: int | None) -> int:
    leave_trace([id])
    if str(id) == os.environ.get(FAILS_AT):
        raise RuntimeError("told to")
    return value_of(id, x)


def function(kind: str) -> UDF:
    """One UDF version, plain, with a stage or async, which fails at one row when told to."""

    def plain(id, x):  # type: ignore[no-untyped-def]
        return traced_value(id, x)

    def staged(read):  # type: ignore[no-untyped-def]
        return traced_value(read["id"], read["x"])

    async def in_flight(id, x):  # type: ignore[no-untyped-def]
        return traced_value(id, x)

    # A process finds functions that have no module by name and version.
    settings: dict[str, Any] = {"data_type": pa.int64(), "version": "1", "name": kind}
    if kind == "staged":
        return udf(preprocess=read, **settings)(staged)
    return udf(max_in_flight=4, **settings)(in_flight) if kind == "async" else udf(**settings)(plain)


@dataclass
class Model:
    """What the table holds, and which rows a backfill may run.

    Args:
        x: input by row.
        right: rows that hold the UDF's value for their input, because a backfill put it there.
        loose: right rows that may run again all the same, because the history is gone.
        saved: rows whose value lies in a checkpoint, by the filter it was computed under; they must not run again.
        written: rows that hold a value of another writer; a backfill that selects one of them may ask.
    """

    x: dict[int, int | None] = field(default_factory=dict)
    right: set[int] = field(default_factory=set)
    loose: set[int] = field(default_factory=set)
    saved: dict[str | None, set[int]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def copy(self) -> Model:
        return Model(dict(self.x), set(self.right), set(self.loose), written=set(self.written))

    def forget(self, rows: set[int]) -> None:
        """Checkpoints no longer serve these rows."""
        for saved in self.saved.values():
            saved -= rows

    def forget_filters_on_the_column(self) -> None:
        """What a filter on the column's old files selected is not what it selects now."""
        for where in list(self.saved):
            if where is not None and "y" in where:
                del self.saved[where]

    def may_run(self, selected: set[int], where: str | None) -> set[int]:
        return ((selected - self.right) | (selected & self.loose)) - self.saved.get(where, set())


class Histories(RuleBasedStateMachine):
    """Whatever happens to the table, a backfill makes the selected rows right and runs no row it need not."""

    table: Table

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory(prefix="geneva-history-")
        self.trace = Trace(Path(self.scratch.name) / "trace")
        os.environ[TRACE] = str(self.trace.path)
        self.model = Model()
        self.next_id = 0
        self.versions: dict[int, Model] = {}

    def teardown(self) -> None:
        for name in (TRACE, FAILS_AT):
            os.environ.pop(name, None)
        self.scratch.cleanup()

    def new_rows(self, xs: list[int | None]) -> pa.Table:
        numbers = list(range(self.next_id, self.next_id + len(xs)))
        self.next_id += len(xs)
        self.model.x.update(zip(numbers, xs, strict=True))
        return pa.table({"id": pa.array(numbers, pa.int64()), "x": pa.array(xs, pa.int64())})

    def pick(self, number: int, most: int = 3) -> list[int]:
        """A few rows that exist."""
        rows = sorted(self.model.x)
        return sorted({rows[(number + step * 7) % len(rows)] for step in range(1 + number % most)}) if rows else []

    def remember(self) -> None:
        self.versions[self.table.version] = self.model.copy()

    @initialize(
        xs=st.lists(XS, min_size=8, max_size=24),
        per_fragment=st.sampled_from([4, 7, 30]),
        kind=st.sampled_from(["plain", "staged", "async"]),
    )
    def make(self, xs: list[int | None], per_fragment: int, kind: str) -> None:
        self.function = partial(function, kind)
        db = connect(Path(self.scratch.name) / "db")
        self.table = db.create_table("docs", self.new_rows(xs), max_rows_per_file=per_fragment)
        self.table.add_columns({"y": self.function()})
        self.remember()

    @rule(xs=st.lists(XS, min_size=1, max_size=6))
    def append(self, xs: list[int | None]) -> None:
        self.table.add(self.new_rows(xs))
        self.remember()

    @rule(xs=st.lists(XS, min_size=1, max_size=3), value=st.none() | st.integers(-9, -5))
    def append_with_a_value(self, xs: list[int | None], value: int | None) -> None:
        if value is not None:
            self.model.written |= set(range(self.next_id, self.next_id + len(xs)))
        self.table.add(self.new_rows(xs).append_column("y", pa.array([value] * len(xs), pa.int64())))
        self.remember()

    @rule()
    def promote_another_column_and_go_back(self) -> None:
        loosely = {"require_complete": False, "require_index": False}
        self.table.add_columns({"other": self.function()})
        self.table.promote_column("other", to="y", keep_as="kept", **loosely)
        self.table.promote_column("kept", to="y", keep_as="other", **loosely)
        self.table.drop_columns(["other"])
        self.remember()

    @rule(number=PICK, x=st.integers(0, 99))
    def update_an_input(self, number: int, x: int) -> None:
        rows = self.pick(number)
        if rows:
            self.table.lance.update({"x": str(x)}, where=f"id IN ({', '.join(map(str, rows))})")
            same = {row for row in rows if self.model.x[row] == x}
            self.model.right -= set(rows) - same
            self.model.forget(set(rows))
            self.model.x.update(dict.fromkeys(rows, x))
            self.remember()

    @rule(number=PICK)
    def update_something_else(self, number: int) -> None:
        rows = set(self.pick(number))
        if rows:
            self.table.lance.update({"id": "id"}, where=f"id IN ({', '.join(map(str, sorted(rows)))})")
            self.model.forget(rows)
            self.remember()

    @rule(number=PICK, xs=st.lists(XS, min_size=1, max_size=3))
    def upsert(self, number: int, xs: list[int | None]) -> None:
        rows = self.pick(number, most=2)
        fresh = self.new_rows(xs)
        changed = pa.table({"id": pa.array(rows, pa.int64()), "x": pa.array([77] * len(rows), pa.int64())})
        data = pa.concat_tables([fresh, changed])
        for name in self.table.schema.names[2:]:
            data = data.append_column(name, pa.nulls(len(data), self.table.schema.field(name).type))
        merge = self.table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(data.select(self.table.schema.names))
        self.model.x.update(dict.fromkeys(rows, 77))
        self.model.right -= set(rows)
        self.model.written -= set(rows)
        self.model.forget(set(rows))
        self.remember()

    @rule(number=PICK)
    def delete(self, number: int) -> None:
        rows = self.pick(number)
        if rows:
            self.table.lance.delete(f"id IN ({', '.join(map(str, rows))})")
            for row in rows:
                del self.model.x[row]
            self.model.right -= set(rows)
            self.model.loose -= set(rows)
            self.model.forget(set(rows))
            self.remember()

    @rule(size=st.sampled_from([6, 12, 1_000]))
    def compact(self, size: int) -> None:
        self.table.lance.optimize.compact_files(target_rows_per_fragment=size)
        self.remember()

    @rule()
    def add_another_column(self) -> None:
        self.table.lance.add_columns({f"other_{self.table.version}": "id + 1"})
        self.remember()

    @rule(number=PICK)
    def overwrite_values_by_an_update(self, number: int) -> None:
        rows = set(self.pick(number))
        if rows:
            self.table.lance.update({"y": "-7"}, where=f"id IN ({', '.join(map(str, sorted(rows)))})")
            self.model.right -= rows
            self.model.written |= rows
            self.model.forget(rows)
            self.remember()

    @rule(number=PICK)
    def overwrite_values_in_place(self, number: int) -> None:
        fragments = self.table.lance.get_fragments()
        if fragments:
            dataset = self.table.lance
            fragment = fragments[number % len(fragments)]
            rows = set(fragment.to_table(columns=["id"])["id"].to_pylist())
            column = pa.array([-8] * fragment.physical_rows, pa.int64())
            data = pa.table([column], schema=pa.schema([dataset.schema.field("y")]))
            (meta,) = write_fragments(data, dataset, mode="append")
            group = lance.LanceOperation.DataReplacementGroup(fragment.fragment_id, meta.files[0])
            transaction = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
            lance.LanceDataset.commit(dataset.uri, transaction)
            self.model.right -= rows
            self.model.written |= rows
            self.model.forget_filters_on_the_column()
            self.remember()

    @rule(number=PICK)
    def restore(self, number: int) -> None:
        versions = sorted(self.versions)
        version = versions[number % len(versions)]
        self.table.location.open(version).restore()
        self.model = self.versions[version].copy()
        self.remember()

    @rule()
    def clean_history_up(self) -> None:
        self.table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
        self.model.loose |= self.model.right
        self.model.saved.clear()
        self.versions.clear()
        self.remember()

    @rule()
    def drop_the_column_and_add_it_again(self) -> None:
        self.table.lance.drop_columns(["y"])
        self.table.add_columns({"y": self.function()})
        self.model.right.clear()
        self.model.loose.clear()
        self.model.written.clear()
        self.model.forget_filters_on_the_column()
        self.versions.clear()
        self.remember()

    def rows_now(self) -> dict[int, tuple[Any, Any]]:
        rows = self.table.lance.to_table(columns=["id", "x", "y"]).to_pylist()
        return {row["id"]: (row["x"], row["y"]) for row in rows}

    def selected_by(self, where: str | None) -> set[int]:
        return set(self.table.lance.to_table(columns=["id"], filter=where)["id"].to_pylist())

    def assert_run(self, selected: set[int], where: str | None) -> set[int]:
        """No row ran twice, and none that need not have."""
        run = self.trace.rows()
        assert len(run) == len(set(run)), f"run twice: {sorted(run)}"
        more = set(run) - self.model.may_run(selected, where)
        assert not more, f"need not have run: {sorted(more)}"
        return set(run)

    @rule(where=st.sampled_from(WHERES), batch=st.sampled_from([None, 3]))
    def backfill(self, where: str | None, batch: int | None) -> None:
        self.run_backfill(where, batch, None)

    @rule(where=st.sampled_from(WHERES), number=PICK)
    def backfill_that_fails_at_a_row_unless_a_checkpoint_has_it(self, where: str | None, number: int) -> None:
        candidates = sorted(self.model.may_run(self.selected_by(where), where))
        if candidates:
            self.run_backfill(where, 3, candidates[number % len(candidates)])

    def run_backfill(self, where: str | None, batch: int | None, fails_at: int | None) -> None:
        before, selected, version = self.rows_now(), self.selected_by(where), self.table.version
        assert {row: x for row, (x, _) in before.items()} == self.model.x
        self.trace.clear()
        os.environ[FAILS_AT] = str(fails_at)
        sizes = {"checkpoint_size": batch, "commit_granularity": 2}
        run_now = partial(self.table.backfill, "y", udf=self.function(), where=where, runner="inline", **sizes)
        try:
            try:
                result = run_now()
            except UnknownValues:
                if not selected & self.model.written:
                    raise  # nobody else wrote a value
                result = run_now(on_unknown_values="recompute")
        except JobFailed:
            assert fails_at is not None
            run = self.assert_run(selected, where)
            assert (self.table.version, self.rows_now()) == (version, before)
            self.model.saved.setdefault(where, set()).update(run - {fails_at})
            self.remember()
            return
        run = self.assert_run(selected, where)
        assert result.state == "DONE"
        assert_honest(result, self.table, rows_run=len(run))
        now = self.rows_now()
        wrong = {row: now[row] for row in selected if now[row][1] != value_of(row, now[row][0])}
        assert not wrong, f"wrong after a backfill where {where}: {wrong}"
        touched = {row: (before[row], now[row]) for row in set(before) - selected if now[row] != before[row]}
        assert not touched, f"not selected by {where} and changed: {touched}"
        if not self.model.may_run(selected, where) and not selected - self.model.right:
            assert self.table.version == version
        self.model.right |= selected
        self.model.written -= selected
        self.model.loose -= selected
        self.model.saved.clear()
        self.remember()

    @precondition(lambda self: self.model.right >= set(self.model.x) and not self.model.loose)
    @rule(size=st.sampled_from([6, 1_000]))
    def changes_that_do_not_concern_the_column_are_free(self, size: int) -> None:
        for change in (
            lambda: self.table.lance.optimize.compact_files(target_rows_per_fragment=size),
            lambda: self.table.lance.add_columns({f"free_{self.table.version}": "id"}),
            lambda: self.table.lance.update_config({"k": str(self.table.version)}),
        ):
            change()
            assert_nothing_to_do_is_free(self.table, "y", self.trace, udf=self.function())
        self.remember()


class LongHistories(Histories):
    """More of them, and longer ones."""


TestHistories: Callable[..., Any] = Histories.TestCase
Histories.TestCase.settings = settings(max_examples=10, stateful_step_count=15, deadline=None)
TestLongHistories: Callable[..., Any] = pytest.mark.slow(LongHistories.TestCase)
LongHistories.TestCase.settings = settings(
    max_examples=1_000 if SOAK else 25, stateful_step_count=60 if SOAK else 25, deadline=None
)
