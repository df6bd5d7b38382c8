"""Compare views with their query in plain Python; changes of a source and its view."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva import connect
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.run import view as run
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.views.rows import shuffle_hashes
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace
from tests.udfs_for_tests import views as udfs


@dataclass(frozen=True)
class Asked:
    """A query, for this package and for the reference in plain Python."""

    where: str | None = None
    seed: int | None = None
    limit: int | None = None
    offset: int = 0

    def make(self, table: Table, name: str = "v") -> View:
        query = table.query()
        if self.where:
            query = query.where(self.where)
        query = query.select({"id": "id", "twice": "x * 2"}).add_columns({"p": (udfs.plus, ["x"])})
        if self.seed is not None:
            query = query.shuffle(self.seed)
        if self.limit is not None:
            query = query.limit(self.limit)
        if self.offset:
            query = query.offset(self.offset)
        return query.create_materialized_view(connect(table.location.database_uri), name)

    def rows(self, table: Table, version: int | None = None) -> list[tuple[int, int, int]]:
        """Return the result of the query, computed in plain Python."""
        dataset = table.lance if version is None else table.location.open(version)
        rows = dataset.to_table(columns=["id", "x"], with_row_id=True).to_pylist()
        if self.where:
            rows = [row for row in rows if row["x"] % 3 != 0]
        ids = [row["_rowid"] for row in rows]
        keys = ids if self.seed is None else shuffle_hashes(self.seed, np.array(ids, np.int64)).tolist()
        rows = [rows[at] for at in np.lexsort((ids, keys))][self.offset :][: self.limit]
        return [(row["id"], 2 * row["x"], row["x"] + 1) for row in rows]


NOT_THIRD = "x % 3 != 0"


def shown(view: View) -> list[tuple[int, int, int]]:
    return [(row["id"], row["twice"], row["p"]) for row in view.to_arrow().to_pylist()]


def assert_equals_query(view: View, table: Table, asked: Asked, version: int | None = None) -> None:
    assert sorted(shown(view)) == sorted(asked.rows(table, version))


def assert_nothing_to_refresh(view: View, trace: Trace) -> None:
    before, seen = view.lance.version, len(trace)
    result = view.refresh(runner="inline")
    assert (result.state, result.commits, view.lance.version, len(trace)) == ("DONE", (), before, seen)


def act(dice: random.Random, table: Table, view: View, newest: int) -> int:
    which = dice.randrange(7)
    if which == 0:
        count = dice.randint(1, 15)
        table.add([{"id": newest + at, "x": newest + at} for at in range(count)])
        return newest + count
    if which == 1:
        table.lance.update({"x": "x + 1"}, where=f"id % {dice.randint(2, 9)} = 0")
    elif which == 2:
        table.lance.delete(f"id % {dice.randint(5, 19)} = 1")
    elif which == 3:
        table.lance.optimize.compact_files(target_rows_per_fragment=dice.choice([30, 1_000]))
    elif which == 4:
        view.lance.optimize.compact_files()
    elif which == 5:
        table.lance.checkout_version(dice.randint(1, table.version)).restore()
    else:
        ids = list({dice.randrange(newest) for _ in range(3)})
        rows = pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array([7 * i for i in ids], pa.int64())})
        table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)
    return newest


@dataclass
class Refresh:
    """A refresh in single steps, so that other writers can act between them."""

    view: View

    def plan(self) -> Refresh:
        request = RefreshRequest()
        self.made = run.plan(self.view.location, self.view.view_definition, self.view.source().location, request)
        self.saved = record_plan(self.made, self.view.location)
        return self

    def apply(self) -> Refresh:
        definition = self.view.view_definition
        for shard in self.made.shards:
            functions = run.load_udfs(definition)
            apply_inline(self.view.location, self.made.spec, shard, Udfs(functions))
        return self

    def finish(self) -> Any:
        job = PlannedJob(self.view.location, self.saved)
        return job.finish([job.commit(shard) for shard in self.made.shards])


# The fault points of a refresh, with the number of a passage.
POINTS = {
    "plan.recorded": 1, "snapshot.written": 1, "plan.saved": 1, "apply.step": 4, "checkpoint.write": 2,
    "checkpoint.written": 2, "staged.write": 2, "staged.written": 1, "finish.begin": 1, "swap.before": 1,
    "swap.after": 1, "mirror.write": 1, "mirror.written": 1, "finish.end": 1,
}  # fmt: skip

WORD = 1 << 64


def splitmix64(state: int) -> Iterator[int]:
    """The random generator as its authors published it, in plain integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % WORD
        mixed = state
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % WORD
        yield mixed ^ (mixed >> 31)
