"""Indexes over computed columns: what a search finds after a backfill, whatever happened to the rows before."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.dataset import DatasetOptimizer

from airflow_geneva import connect, udf
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.tables import MakeTable

WIDTH, NEAREST = 8, 5
WORDS = ("red", "green", "blue")
VECTORS = pa.list_(pa.float32(), WIDTH)


def vectors_of(xs: pa.Array, version: int) -> np.ndarray[Any, Any]:
    return np.stack([np.random.default_rng((version, x)).standard_normal(WIDTH) for x in xs.to_pylist()])


def functions(version: int) -> dict[str, UDF]:
    """A vector, a number and a text of each row, of some version of the code."""

    def vector(x: pa.Int64Array) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(vectors_of(x, version).astype("f4").ravel(), WIDTH)

    def number(x: pa.Int64Array) -> pa.Array:
        return pa.array([(x + version) % 7 for x in x.to_pylist()])

    def text(x: pa.Int64Array) -> pa.Array:
        return pa.array([f"{WORDS[(x + version) % 3]} thing" for x in x.to_pylist()])

    made = {"v": (vector, VECTORS), "n": (number, pa.int64()), "s": (text, pa.string())}
    return {name: udf(data_type=kind, version=str(version))(function) for name, (function, kind) in made.items()}


def fill(table: Table, version: int = 0, **options: Any) -> None:
    for column, function in functions(version).items():
        result = table.backfill(column, udf=function, runner="inline", on_code_change="recompute", **options)
        assert (result.state, result.unindexed_rows) == ("DONE", 0)


def fill_and_die(uri: str, name: str, version: int, fault: str) -> None:
    """Called in a forked process."""
    table = connect(uri).open_table(name)
    Fault(fault).arm()
    fill(table, version, indexes="update")


def make_indexes(table: Table, of_numbers: str) -> None:
    table.lance.create_index("v", "IVF_FLAT", num_partitions=3)
    table.lance.create_scalar_index("n", of_numbers)
    table.lance.create_scalar_index("s", "INVERTED")


def assert_found_as_stored(table: Table) -> None:
    """Whatever is searched for: an index finds the rows that a scan finds, and no row by a former value."""
    dataset = table.lance
    rows = dataset.to_table(columns=["id", "v", "n", "s"]).to_pylist()
    stored = np.array([row["v"] for row in rows])
    for at in range(0, len(rows), max(len(rows) // 5, 1)):
        near = {"column": "v", "q": stored[at].astype("f4"), "k": NEAREST, "nprobes": 3}
        found = dataset.to_table(columns=["id", "_distance"], nearest=near)
        far = {row["id"]: one for row, one in zip(rows, ((stored - stored[at]) ** 2).sum(axis=1), strict=True)}
        assert np.allclose(found["_distance"].to_numpy(), sorted(far.values())[:NEAREST], atol=1e-4)
        assert np.allclose(found["_distance"].to_numpy(), [far[row] for row in found["id"].to_pylist()], atol=1e-4)
    numbers = Counter(row["n"] for row in rows)
    assert {n: dataset.count_rows(f"n = {n}") for n in range(7)} == {n: numbers[n] for n in range(7)}
    texts = Counter(row["s"].split()[0] for row in rows)
    for word in WORDS:
        found = dataset.to_table(columns=["s", "_score"], full_text_query=word)["s"].to_pylist()
        assert found == [f"{word} thing"] * texts[word]


def append(table: Table, dice: random.Random) -> None:
    first = 1 + max(table.lance.to_table(columns=["id"])["id"].to_pylist(), default=0)
    table.add([{"id": first + i, "x": dice.randrange(1_000)} for i in range(dice.randint(1, 30))])


def some(table: Table, dice: random.Random) -> list[int]:
    ids = table.lance.to_table(columns=["id"])["id"].to_pylist()
    return dice.sample(ids, min(len(ids), 10))


def update(table: Table, dice: random.Random) -> None:
    """Rows move to another fragment; with stable row ids they keep their ids."""
    table.lance.update({"x": str(dice.randrange(1_000))}, where=f"id IN ({', '.join(map(str, some(table, dice)))})")


def upsert_in_place(table: Table, dice: random.Random) -> None:
    rows = [{"id": row, "x": dice.randrange(1_000)} for row in some(table, dice)]
    table.lance.merge_insert("id").when_matched_update_all().execute(pa.Table.from_pylist(rows))


def delete(table: Table, dice: random.Random) -> None:
    table.lance.delete(f"id IN ({', '.join(map(str, some(table, dice)))})")


def compact(table: Table, dice: random.Random) -> None:
    table.lance.optimize.compact_files(target_rows_per_fragment=dice.choice([60, 1_000]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_numbers", "stable", "seed"),
    [("BTREE", True, 1), ("BITMAP", True, 2), ("BTREE", False, 3)],
)
def test_a_search_after_a_backfill_finds_its_values_and_no_former_ones(
    make_table: MakeTable, of_numbers: str, stable: bool, seed: int
) -> None:
    table, dice = make_table(120, per_fragment=40, stable=stable), random.Random(seed)
    table.add_columns(functions(0))
    fill(table)
    make_indexes(table, of_numbers)
    version = 0
    for changes in ([append], [update, append], [upsert_in_place, compact], [compact, delete, update]):
        for change in changes:
            change(table, dice)
        version += changes == [upsert_in_place, compact]
        where = {"uri": table.location.database_uri, "name": table.name, "version": version}
        fault = f"index.{dice.choice(['before', 'after'])}:{dice.randint(1, 3)}"
        killed = forge().run("tests.run.test_indexes:fill_and_die", {**where, "fault": fault}, {})
        assert killed == -signal.SIGKILL
        fill(table, version, indexes="update")
        assert_found_as_stored(table)
    before = table.version
    fill(table, version, indexes="update")
    assert table.version == before


def broken(*errors: Exception) -> Callable[..., None]:
    """Updates that raise these errors first."""
    left, update = list(errors), DatasetOptimizer.optimize_indices

    def optimize(self: Any, **options: Any) -> None:
        if left:
            raise left.pop(0)
        update(self, **options)

    return optimize


def test_values_are_visible_before_an_update_of_the_index_that_fails_is_made_up_for_by_the_next_run(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(60)
    table.add_columns({"n": functions(0)["n"]})
    table.backfill("n", runner="inline")
    table.lance.create_scalar_index("n", "BTREE")
    table.add([{"id": 100, "x": 6}])
    conflict = OSError("Retryable commit conflict for version 5: This CreateIndex transaction was preempted")
    monkeypatch.setattr(DatasetOptimizer, "optimize_indices", broken(conflict, RuntimeError("no space left")))
    failed = table.backfill("n", runner="inline", indexes="update")
    assert (failed.state, failed.notes) == ("DONE", ("the indexes are not up to date: no space left",))
    assert table.count_rows("n = 6") == 9
    again = table.backfill("n", runner="inline")
    assert (again.commits, again.unindexed_rows) == ((), 0)  # not asked to look at indexes
    conflicts = broken(conflict, conflict)
    monkeypatch.setattr(DatasetOptimizer, "optimize_indices", conflicts)
    made_up = table.backfill("n", runner="inline", indexes="update")
    assert (made_up.rows_computed, made_up.unindexed_rows, made_up.notes) == (0, 0, ())
    assert table.lance.stats.index_stats("n_idx")["num_unindexed_rows"] == 0
    table.add([{"id": 101, "x": 6}, {"id": 102, "x": 7}])
    left = table.backfill("n", runner="inline")
    assert left.unindexed_rows == 2
    assert "not in an index yet: 2 rows" in str(left)
    assert "not in an index yet: 2 rows" in str(connect(table.location.database_uri).job(left.job_id))
    with pytest.raises(InvalidInput, match="indexes="):
        table.backfill("n", runner="inline", indexes="rebuild")


def test_the_indexes_of_a_view_cover_its_rows_after_a_swap(make_table: MakeTable) -> None:
    source = make_table(200, per_fragment=50)
    view = source.query().select(["id", "x"]).add_columns(functions(0)).create_materialized_view(
        connect(source.location.database_uri), "things"
    )  # fmt: skip
    view.refresh(runner="inline")
    make_indexes(view, "BTREE")
    dice = random.Random(1)
    for changes in ([append], [update, delete]):
        for change in changes:
            change(source, dice)
        result = view.refresh(runner="inline", indexes="update")
        assert (result.state, result.unindexed_rows) == ("DONE", 0)
        assert_found_as_stored(view)
    before = view.version
    assert view.refresh(runner="inline", indexes="update").commits == ()
    assert view.version == before
    assert lance.dataset(view.uri).count_rows() == source.count_rows()
