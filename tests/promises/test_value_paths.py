"""Any Arrow value through any path comes out as pylance alone gives it back: generated types times every path."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from airflow_geneva import connect, udf
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.plan.request import BackfillRequest
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.arrow_values import FAMILIES, families_of, make_array, make_type
from tests.support.broken_off import dies_at
from tests.udfs_for_tests.values import BREAKS, breaks

ROWS, PER_FILE = 14, 8
SMALL = {"checkpoint_size": 3, "batch_size": 2}
_TRIES = 6
EXAMPLES = int(os.environ.get("GENEVA_VALUE_EXAMPLES", "20000"))

Cells = Counter[tuple[str, str]]
SEEN: Cells = Counter()
EXCLUDED: dict[str, str] = {}
"""Families that pylance cannot store in any form that was tried, with its own words."""


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="values-"))
    yield folder
    shutil.rmtree(folder)


# Columns: a UDF gives back its input, in parts that are slices.


def make_table(place: Path, values: pa.Array) -> Table:
    rows = pa.table({"id": pa.array(range(len(values)), pa.int64()), "c": values})
    return connect(place / "db").create_table("t", rows, max_rows_per_file=PER_FILE, data_storage_version="2.2")


def giving_back(kind: pa.DataType, on_error: str = "fail") -> UDF:
    @udf(data_type=kind, version="1", on_error=on_error, input_columns=["id", "c"], name="same")
    def same(rows: pa.RecordBatch) -> pa.Array:
        values = rows.column("c")
        path = os.environ.get(BREAKS)
        if path and os.path.exists(path) and 5 in rows.column("id").to_pylist():
            raise ValueError("broken")
        return pa.concat_arrays([values.slice(len(values) // 2), values]).slice(len(values) - len(values) // 2)

    return same


def streamed(table: Table, same: UDF, place: Path) -> None:
    table.backfill("y", udf=same, runner="inline", batch_size=3)


def resumed(table: Table, same: UDF, place: Path) -> None:
    (place / "broken").touch()
    with pytest.raises(JobFailed, match="broken"):
        table.backfill("y", udf=same, runner="inline", **SMALL)
    (place / "broken").unlink()
    table.backfill("y", udf=same, runner="inline", **SMALL)


def where_halves(table: Table, same: UDF, place: Path) -> None:
    table.backfill("y", udf=same, where="id % 2 = 0", runner="inline", **SMALL)
    table.backfill("y", udf=same, where="id % 2 = 1", runner="inline", **SMALL)


def assembled(table: Table, same: UDF, place: Path) -> None:
    table.backfill("y", udf=same, where="id % 3 = 0", runner="inline")
    table.lance.delete("id IN (1, 9)")
    table.backfill("y", udf=same, runner="inline")


def staged_and_compacted(table: Table, same: UDF, place: Path) -> None:
    plan, _ = table._plan(BackfillRequest("y"), same)
    fingerprint = record_plan(plan, table.location).fingerprint
    storage = JobFolder.of(table.location.checkpoints, plan.spec.job_id).storage
    saved = load_plan(storage, fingerprint)
    for index in range(len(saved.shards)):
        apply_inline(table.location, saved.spec, saved.load_shard(storage, index), Udfs({saved.spec.column: same}))
    table.lance.optimize.compact_files()
    result = table.backfill("y", udf=same, runner="inline")
    assert result.rows_computed < ROWS


def in_a_child(table: Table, same: UDF, place: Path) -> None:
    table.backfill("y", udf=same, runner="inline", batch_size=5)


def row_by_row(table: Table, same: UDF, place: Path) -> None:
    """A scalar UDF is given Python values."""
    scalar = udf(data_type=same.data_type, version="2", input_columns=["id", "c"], name="same")(lambda id, c: c)
    table.backfill("y", udf=scalar, where="id % 2 = 0", runner="inline")
    table.backfill("y", udf=scalar, runner="inline")


COLUMN_PATHS = {
    path.__name__: path
    for path in (
        streamed,
        resumed,
        where_halves,
        assembled,
        staged_and_compacted,
        in_a_child,
        row_by_row,
    )
}


def go_through_a_column(place: Path, path: str, values: pa.Array) -> None:
    table = make_table(place, values)
    same = giving_back(values.type, "skip" if path == "in_a_child" else "fail")
    table.add_columns({"y": same})
    os.environ[BREAKS] = str(place / "broken")
    try:
        COLUMN_PATHS[path](table, same, place)
    finally:
        del os.environ[BREAKS]
    found = table.lance.to_table(columns=["id", "y"]).sort_by("id")
    assert_same(found["y"], plainly(values).take(found["id"]), f"{path} of {values.type}")


# Views: columns of the source, read and written in another order.


def view_of(place: Path, columns: list[pa.Array], make: Callable[[Table], View]) -> View:
    named = {f"c{at}": values for at, values in enumerate(columns)}
    rows = pa.table({"id": pa.array(range(ROWS), pa.int64()), **named})
    return make(connect(place / "db").create_table("t", rows, max_rows_per_file=PER_FILE, data_storage_version="2.2"))


def plain_view(place: Path, columns: list[pa.Array]) -> View:
    view = view_of(place, columns, lambda table: table.query().create_materialized_view(name="v"))
    view.refresh(runner="inline", batch_size=3)
    return view


def shuffled(place: Path, columns: list[pa.Array]) -> View:
    view = view_of(place, columns, lambda table: table.query().shuffle(seed=3).create_materialized_view(name="v"))
    view.refresh(runner="inline")
    return view


def cut(place: Path, columns: list[pa.Array]) -> View:
    view = view_of(place, columns, lambda table: table.query().create_materialized_view(name="v"))
    view.refresh(runner="inline", max_rows_per_fragment=5)
    return view


def view_of_a_view(place: Path, columns: list[pa.Array]) -> View:
    first = plain_view(place, columns)
    second = first.query().create_materialized_view(name="second")
    second.refresh(runner="inline")
    return second


def resumed_view(place: Path, columns: list[pa.Array]) -> View:
    def make(table: Table) -> View:
        return table.query().add_columns({"again": breaks}).create_materialized_view(name="v")

    view = view_of(place, columns, make)
    (place / "broken").touch()
    with pytest.raises(JobFailed, match="broken"):
        view.refresh(runner="inline", **SMALL)
    (place / "broken").unlink()
    view.refresh(runner="inline", **SMALL)
    return view


def exploded(place: Path, columns: list[pa.Array]) -> View:
    """Every row becomes two, each with all columns, and the column exploded holds them all."""
    view = made_exploded(place, columns)
    view.refresh(runner="inline")
    return view


def resumed_exploded(place: Path, columns: list[pa.Array]) -> View:
    """As before, from the files of a run that was killed before its source was compacted."""
    view = made_exploded(place, columns)
    with dies_at("swap.before"):
        view.refresh(runner="inline")
    view.source().lance.optimize.compact_files()
    view.refresh(runner="inline")
    return view


def made_exploded(place: Path, columns: list[pa.Array]) -> View:
    def make(table: Table) -> View:
        return table.query().explode(f"c{len(columns)}").create_materialized_view(name="v")

    return view_of(place, [*columns, two_a_row(columns)], make)


def two_a_row(columns: list[pa.Array]) -> pa.Array:
    """Lists of two structs that hold all columns."""
    return pa.ListArray.from_arrays(pa.array(range(0, 2 * ROWS + 2, 2), pa.int32()), twice(columns))


def twice(columns: list[pa.Array]) -> pa.Array:
    return pa.concat_arrays([packed(columns), packed(columns)])


def packed(columns: list[pa.Array]) -> pa.StructArray:
    return pa.StructArray.from_arrays(columns, [f"c{at}" for at in range(len(columns))])


VIEW_PATHS = {
    path.__name__: path
    for path in (plain_view, shuffled, cut, view_of_a_view, resumed_view, exploded, resumed_exploded)
}


def go_through_a_view(place: Path, path: str, columns: list[pa.Array]) -> None:
    os.environ[BREAKS] = str(place / "broken")
    try:
        view = VIEW_PATHS[path](place, columns)
    finally:
        del os.environ[BREAKS]
    found = view.lance.to_table().sort_by("id")
    assert found["id"].to_pylist() == sorted([*range(ROWS)] * (2 if path.endswith("exploded") else 1))
    for at, values in enumerate(columns):
        assert_same(found[f"c{at}"], plainly(values).take(found["id"]), f"{path} of {values.type}")
    if path.endswith("exploded"):
        assert_same(found[f"c{len(columns)}"], plainly(twice(columns)), f"{path} of all")


# The judge: pylance alone.


def plainly(values: pa.Array) -> pa.ChunkedArray:
    """The values as pylance gives them back, stored in one piece."""
    rows = pa.table({"row": pa.array(range(len(values))), "v": pa.concat_arrays([values])})
    return lance.write_dataset(rows, "memory://", data_storage_version="2.2").to_table()["v"]


def assert_same(found: pa.ChunkedArray, expected: pa.ChunkedArray, what: str) -> None:
    assert found.type == expected.type, what
    assert found.equals(expected) or found.to_pylist() == expected.to_pylist(), what


def storable(values: pa.Array) -> str | None:
    """What pylance says against values, NULL rows included, or None."""
    try:
        back = plainly(pa.concat_arrays([values, pa.nulls(1, values.type)]))
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return str(error).split(", /")[0]
    return None if len(back) == len(values) + 1 else "rows are missing"


def choose(dice: Random, families: list[str], depth: int) -> list[pa.Array]:
    """One column for each family that pylance can store; what it cannot is refused when a column is defined."""
    chosen = []
    for family in families:
        for _ in range(_TRIES):
            kind = make_type(dice, family, depth)
            try:
                values = make_array(dice, kind, ROWS)
            except pa.ArrowNotImplementedError as error:
                # Before version 25, pyarrow makes no dictionary of large texts from a list.
                EXCLUDED.setdefault(f"{family}: {kind}"[:70], str(error)[:130])
                continue
            reason = storable(values)
            if reason is None:
                chosen.append(values)
                break
            EXCLUDED.setdefault(f"{family}: {kind}"[:70], reason[:130])
            assert_refused(kind)
    return chosen


def assert_refused(kind: pa.DataType) -> None:
    from airflow_geneva.engine.lance_io.arrays import check_storable

    with pytest.raises(InvalidInput, match="pylance cannot store it"):
        check_storable([pa.field("y", kind)], "2.2", "table 't'")


def note(path: str, columns: list[pa.Array]) -> None:
    for family in set().union(*(families_of(values.type) for values in columns)):
        SEEN[(family, path)] += 1


def one_example(place: Path, seed: int, path: str, families: list[str], depth: int) -> None:
    dice = Random(seed)
    columns = choose(dice, families, depth)
    if not columns:
        return
    if path in VIEW_PATHS:
        # Lists of what pylance stores may be more than it stores.
        if path.endswith("exploded") and storable(two_a_row(columns)) is not None:
            return
        go_through_a_view(place, path, columns)
        note(path, columns)
        return
    kind = columns[0]
    if len(columns) > 1:
        together = packed(columns)
        if storable(together) is None:
            kind = together
    go_through_a_column(place, path, kind)
    note(path, [kind])


PATHS = [*COLUMN_PATHS, *VIEW_PATHS]
EVERY = list(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_every_family_goes_through_every_path(place: Path, path: str) -> None:
    """All families at once, side by side in a view, and as the fields of one struct in a column."""
    for seed in (1, 2):
        folder = place / str(seed)
        folder.mkdir()
        one_example(folder, seed, path, EVERY, depth=2)


@pytest.mark.parametrize("path", COLUMN_PATHS)
@pytest.mark.parametrize("family", ["json", "bfloat16", "dictionary", "map"])
def test_a_column_of_its_own_goes_through_every_path(place: Path, path: str, family: str) -> None:
    if path == "in_a_child" and family not in ("json", "bfloat16"):
        pytest.skip("a process for each costs half a second")
    one_example(place, 7, path, [family], depth=1)


@pytest.mark.soak
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False)
@given(
    seed=st.integers(0, 1 << 40),
    path=st.sampled_from([path for path in PATHS for _ in range(1 if path == "in_a_child" else 8)]),
    families=st.lists(st.sampled_from(EVERY), min_size=1, max_size=4),
)
def test_any_value_goes_through_any_path(seed: int, path: str, families: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="values-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        one_example(folder, seed, path, families, depth=3)
    finally:
        shutil.rmtree(folder)


@pytest.mark.spark
def test_every_family_goes_through_spark(spark: object, place: Path) -> None:
    columns = choose(Random(1), EVERY, depth=2)
    table = make_table(place, packed(columns))
    view = table.query().create_materialized_view(name="v")
    view.refresh(runner="spark", task_size=5)
    found = view.lance.to_table().sort_by("id")
    for at, values in enumerate(columns):
        expected = plainly(values)
        assert_same(pa.chunked_array([found["c"].combine_chunks().field(at)]), expected, f"Spark of {values.type}")
    note("spark", columns)


def test_each_cell_was_exercised(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the matrix; families without a cell are those that pylance stores in no form."""
    if not {path for _, path in SEEN} >= set(PATHS):
        pytest.skip("only with the other tests of this file")
    paths = [*PATHS, *({"spark"} & {path for _, path in SEEN})]
    unstorable = {name for name in EVERY if all((name, path) not in SEEN for path in paths)}
    with capsys.disabled():
        print("\n" + " " * 22 + " ".join(f"{path[:10]:>10}" for path in paths))
        for family in EVERY:
            print(f"{family:22}" + " ".join(f"{SEEN[(family, path)]:>10}" for path in paths))
        for what, reason in sorted(EXCLUDED.items()):
            print(f"left out: {what}: {reason}")
    assert unstorable == {"interval", "list view"}
    assert [(f, p) for f in EVERY for p in paths if f not in unstorable and not SEEN[(f, p)]] == []
