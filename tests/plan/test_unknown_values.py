"""Values that no job of a table computed: of a copy, a clone, a backup, or another writer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.fragment import write_fragments

from airflow_geneva import UDF, Database, connect, udf
from airflow_geneva.engine.lance_io import table_versions
from airflow_geneva.errors import CodeChanged, InvalidInput, UnknownValues
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import assert_exact, assert_nothing_to_do_is_free


def double(version: str = "v1") -> UDF:
    @udf(data_type=pa.int64(), name="double", version=version)
    def function(x: int) -> int:
        leave_trace([x])
        return 2 * x

    return function


@pytest.fixture
def db(tmp_path: Path) -> Database:
    return connect(tmp_path / "db")


def computed(db: Database) -> Table:
    """A table of 100 rows with all of their values."""
    table = db.create_table("t", pa.table({"x": range(100)}), max_rows_per_file=50)
    table.add_columns({"y": double()})
    table.backfill("y", udf=double(), runner="inline")
    return table


def by_clone(db: Database) -> Table:
    """A clone of a table whose state is lost."""
    table = computed(db)
    shutil.rmtree(Path(table.uri, "_checkpoints"))
    table.lance.shallow_clone(f"{db.uri}/t2.lance", table.version)
    return _opened(db)


def by_restored_backup(db: Database) -> Table:
    table = computed(db)
    shutil.copytree(table.uri, f"{db.uri}/t2.lance", ignore=shutil.ignore_patterns("_checkpoints"))
    return _opened(db)


def by_rows(db: Database) -> Table:
    return db.create_table("t2", computed(db).to_arrow(), max_rows_per_file=50)


def by_user(db: Database) -> Table:
    """A column that a user filled before a function was added to it."""
    rows = pa.table({"x": range(100), "y": pa.array([2 * x for x in range(100)], pa.int64())})
    table = db.create_table("t2", rows, max_rows_per_file=50)
    table.alter_columns({"y": double()})
    return table


def _opened(db: Database) -> Table:
    found = db.open_table("t2")
    assert isinstance(found, Table)
    return found


WAYS: list[Callable[[Database], Table]] = [by_clone, by_restored_backup, by_rows, by_user]
ways = pytest.mark.parametrize("way", WAYS)


def run(table: Table, function: UDF | None = None, **options: Any) -> Any:
    return table.backfill("y", udf=function or double(), runner="inline", **options)


@ways
def test_filled_values_of_unknown_origin_stop_a_plan(db: Database, trace: Trace, way: Callable[..., Table]) -> None:
    table = way(db)
    trace.clear()
    with pytest.raises(UnknownValues, match=r"100 rows.*on_unknown_values"):
        run(table)
    assert trace.rows() == []


@ways
def test_the_message_says_whether_the_code_is_that_of_the_definition(db: Database, way: Callable[..., Table]) -> None:
    table = way(db)
    with pytest.raises(UnknownValues, match="'double' is version v1, as in its definition"):
        table.plan_backfill("y", udf=double())
    with pytest.raises(UnknownValues, match="version v1 by its definition, and version v2 by the code of today"):
        table.plan_backfill("y", udf=double("v2"))


@ways
def test_adopted_values_are_facts(db: Database, trace: Trace, way: Callable[..., Table]) -> None:
    table = way(db)
    trace.clear()
    result = run(table, on_unknown_values="adopt")
    assert (result.state, result.rows_computed, result.rows_skipped) == ("DONE", 0, 100)
    assert result.notes == ("adopted: 100 rows, with values that no job of this table computed, count as version v1.",)
    assert db.jobs(table="t2")[0].reasons == {"adopted": 100}
    assert_nothing_to_do_is_free(table, "y", trace, udf=double())
    table.lance.optimize.compact_files()
    table.lance.update({"x": "1000"}, where="x = 7")
    table.add([{"x": 2000}])
    trace.clear()
    run(table)
    assert sorted(filter(None, trace.rows())) == [1000, 2000]
    assert_nothing_to_do_is_free(table, "y", trace, udf=double())
    with pytest.raises(CodeChanged, match="101 rows of version v1"):
        run(table, double("v2"))
    run(table, on_code_change="recompute")
    assert len(trace) == 2
    run(table, recompute_mixed=True)
    assert len(trace) == 2 + 99


@ways
def test_unknown_values_are_computed_again_if_asked(db: Database, trace: Trace, way: Callable[..., Table]) -> None:
    table = way(db)
    trace.clear()
    assert run(table, on_unknown_values="recompute").rows_computed == 100
    assert_exact(trace, range(100))
    assert_nothing_to_do_is_free(table, "y", trace, udf=double())


@pytest.fixture
def half_filled(db: Database) -> Table:
    """Two fragments of a column of which a user filled the even rows, and wrote NULL into the others."""
    values = pa.array([-x if x % 2 == 0 else None for x in range(100)], pa.int64())
    table = db.create_table("t", pa.table({"x": range(100), "y": values}), max_rows_per_file=50)
    table.alter_columns({"y": double()})
    return table


def values(table: Table) -> dict[int, int | None]:
    found = table.to_arrow()
    return dict(zip(found.column("x").to_pylist(), found.column("y").to_pylist(), strict=True))


@pytest.mark.parametrize("deleted", [False, True])
def test_filling_computes_the_rows_that_are_null(half_filled: Table, trace: Trace, deleted: bool) -> None:
    if deleted:
        half_filled.lance.delete("x < 10")
    first = 10 if deleted else 0
    with pytest.raises(UnknownValues, match=f": {50 - first // 2} rows"):
        run(half_filled)
    run(half_filled, on_unknown_values="fill")
    assert_exact(trace, range(first + 1, 100, 2))
    assert values(half_filled) == {x: 2 * x if x % 2 else -x for x in range(first, 100)}
    assert_nothing_to_do_is_free(half_filled, "y", trace, udf=double())
    run(half_filled, recompute_mixed=True)
    assert values(half_filled) == {x: 2 * x for x in range(first, 100)}


def test_adopting_takes_the_column_as_it_is(half_filled: Table, trace: Trace) -> None:
    run(half_filled, on_unknown_values="adopt")
    assert trace.rows() == []
    assert_nothing_to_do_is_free(half_filled, "y", trace, udf=double())


def test_a_filter_is_asked_about_its_own_rows(half_filled: Table, trace: Trace) -> None:
    run(half_filled, where="x % 2 = 1 AND x < 50")
    assert_exact(trace, range(1, 50, 2))
    with pytest.raises(UnknownValues, match=": 3 rows"):
        run(half_filled, where="x < 5")
    run(half_filled, where="x < 5", on_unknown_values="adopt")
    with pytest.raises(UnknownValues, match=": 47 rows"):
        run(half_filled)
    run(half_filled, on_unknown_values="fill")
    assert_exact(trace, range(1, 100, 2))
    assert_nothing_to_do_is_free(half_filled, "y", trace, udf=double())


def test_rows_that_a_writer_adds_are_computed_unless_it_brings_their_values(db: Database, trace: Trace) -> None:
    table = computed(db)
    table.add([{"x": 100}])
    table.add(pa.table({"x": [101], "y": pa.array([None], pa.int64())}))
    trace.clear()
    run(table)
    assert_exact(trace, [100, 101])
    table.add(pa.table({"x": [102, 103], "y": pa.array([7, None], pa.int64())}))
    with pytest.raises(UnknownValues, match=": 1 row"):
        run(table)
    table.lance.optimize.compact_files()
    run(table, on_unknown_values="fill")
    assert_exact(trace, [100, 101, 103])
    assert values(table)[102] == 7
    assert_nothing_to_do_is_free(table, "y", trace, udf=double())


def test_rows_whose_inputs_changed_are_computed_without_a_question(db: Database, trace: Trace) -> None:
    table = db.create_table("t", pa.table({"x": range(100)}), max_rows_per_file=50)
    table.add_columns({"y": double()})
    run(table, where="x >= 50")  # at the version of this job, no job has computed the others
    run(table)
    trace.clear()
    table.lance.update({"x": "x + 1000"}, where="x < 5")
    table.lance.update({"y": "-1"}, where="x = 50")
    run(table)
    assert_exact(trace, [1000, 1001, 1002, 1003, 1004, 50])


def test_rows_whose_inputs_changed_are_known_after_a_cleanup_that_kept_only_a_version_without_their_values(
    db: Database, trace: Trace
) -> None:
    table = db.create_table("t", pa.table({"x": range(20)}), max_rows_per_file=10)
    table.add_columns({"y": double()})
    run(table, where="x < 10")
    table.lance.tags.create("old", table.version)  # at this version, no job has computed the others
    run(table)
    table.lance.update({"x": "x + 1000"}, where="x = 12")
    run(table, where="x < 10")  # finds and records the changed row, and leaves it
    table.add([{"x": 40}])
    table.lance.cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)
    trace.clear()
    run(table)
    assert_exact(trace, [1012, 40])


@pytest.mark.parametrize("times", [1, 2])
def test_a_clone_knows_what_the_table_recorded_that_it_was_made_from(db: Database, trace: Trace, times: int) -> None:
    table = computed(db)
    table.add([{"x": 100}])
    for number in range(times):
        table.lance.shallow_clone(f"{db.uri}/t{number + 2}.lance", table.version)
        clone = db.open_table(f"t{number + 2}")
        assert isinstance(clone, Table)
        table = clone
        trace.clear()
        table.lance.update({"x": "x + 1000"}, where=f"x = {number}")
        run(table)
        assert_exact(trace, [1000, 100] if number == 0 else [1001])
        assert_nothing_to_do_is_free(table, "y", trace, udf=double())
    shutil.rmtree(f"{db.uri}/t.lance/_checkpoints")
    table.lance.optimize.compact_files()
    assert_nothing_to_do_is_free(table, "y", trace, udf=double())


def test_a_choice_that_is_unknown_is_refused(db: Database) -> None:
    with pytest.raises(InvalidInput, match="on_unknown_values='keep' is unknown"):
        computed(db).plan_backfill("y", on_unknown_values="keep")


def test_a_row_whose_input_changed_is_remembered_by_jobs_that_do_not_select_it(db: Database, trace: Trace) -> None:
    table = computed(db)
    table.lance.update({"x": "1000"}, where="x = 3")
    for x in range(100, 106):
        table.add([{"x": x}])
        run(table, where=f"x = {x}")
    trace.clear()
    run(table, on_unknown_values="adopt")
    assert_exact(trace, [1000])


def test_a_value_that_a_user_wrote_over_the_null_of_a_failed_row_is_asked_about(db: Database) -> None:
    @udf(data_type=pa.int64(), on_error="skip")
    def fails(x: int) -> int:
        return 2 * x if x != 3 else x // 0

    table = db.create_table("t", pa.table({"x": range(10)}))
    table.add_columns({"y": fails})
    run(table, fails)
    table.lance.update({"y": "999"}, where="x = 3")
    with pytest.raises(UnknownValues, match=": 1 row"):
        run(table, fails)
    assert values(table)[3] == 999


MOVES: dict[str, Callable[[Any], object]] = {
    "compacted": lambda table: table.optimize.compact_files(),
    "updated": lambda table: table.update({"z": "1"}),
}
moves = pytest.mark.parametrize("change", [*MOVES.values()], ids=[*MOVES])


@pytest.mark.parametrize("job_first", [False, True])
@moves
def test_a_clone_compares_with_the_version_that_it_was_made_from(
    db: Database, trace: Trace, change: Callable[[Any], object], job_first: bool
) -> None:
    table = db.create_table("t", pa.table({"x": range(100), "z": [0] * 100}), max_rows_per_file=50)
    table.add_columns({"y": double()})
    run(table)
    table.lance.shallow_clone(f"{db.uri}/t2.lance", table.version)
    clone = _opened(db)
    if job_first:
        run(clone)
    change(clone.lance)
    trace.clear()
    run(clone)
    assert_exact(trace, [])


@pytest.mark.parametrize("storage", ["2.0", "2.1"])
def test_null_blobs_hold_no_value(db: Database, storage: str) -> None:
    @udf(data_type=pa.large_binary())
    def blob(x: int) -> bytes:
        return b"blob"

    field = pa.field("y", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([("x", pa.int64()), field])
    rows = pa.table([pa.array(range(4)), pa.array([None, b"", b"own", None], pa.large_binary())], schema=schema)
    table = db.create_table("t", rows, data_storage_version=storage)
    table.alter_columns({"y": blob})
    with pytest.raises(UnknownValues, match=": 2 rows"):
        run(table, blob)
    assert run(table, blob, on_unknown_values="fill").rows_computed == 2


def test_adopting_computes_null_rows_of_a_column_in_which_jobs_computed_values(db: Database, trace: Trace) -> None:
    table = db.create_table("t", pa.table({"x": range(10)}))
    table.add_columns({"y": double()})
    run(table, where="x < 5")
    table.add(pa.table({"x": [50], "y": [500]}))
    table.lance.optimize.compact_files()
    trace.clear()
    run(table, on_unknown_values="adopt")
    assert_exact(trace, range(5, 10))
    assert values(table) == {x: 2 * x for x in range(10)} | {50: 500}
    assert_nothing_to_do_is_free(table, "y", trace, udf=double())


def _fill_and_define(table: Table) -> None:
    table.lance.add_columns({"y": "x * 2"})
    table.alter_columns({"y": double()})


def _define_and_fill(table: Table) -> None:
    table.add_columns({"y": double()})
    table.lance.update({"y": "x * 2"})


@pytest.mark.parametrize("stable", ["true", "false"])
@pytest.mark.parametrize("way", [_fill_and_define, _define_and_fill])
def test_facts_about_a_dropped_column_do_not_count_for_another_one_with_its_field_id(
    db: Database, trace: Trace, way: Callable[[Table], None], stable: str
) -> None:
    form: Any = {"max_rows_per_file": 10, "storage_options": {"new_table_enable_stable_row_ids": stable}}
    table = db.create_table("t", pa.table({"x": range(20)}), **form)
    table.add_columns({"dropped": double()})
    table.backfill("dropped", udf=double(), runner="inline")
    before, field = table.version, table.lance.lance_schema.field("dropped").id()
    table.drop_columns(["dropped"])
    way(table)
    assert table.lance.lance_schema.field("y").id() == field
    trace.clear()
    with pytest.raises(UnknownValues, match=": 20 rows"):
        run(table)
    run(table, on_unknown_values="adopt")
    assert_exact(trace, [])
    assert_nothing_to_do_is_free(table, "y", trace, udf=double())
    table.location.open(before).restore()
    assert_nothing_to_do_is_free(table, "dropped", trace, udf=double())


def test_a_dropped_column_that_a_restore_returned_is_computed_where_its_inputs_changed(
    db: Database, trace: Trace
) -> None:
    table = db.create_table("t", pa.table({"x": range(20)}))
    table.add_columns({"y": double()})
    table.backfill("y", udf=double(), runner="inline")
    before = table.version
    table.drop_columns(["y"])
    table.add_columns({"y": double()})
    table.location.open(before).restore()
    table.lance.update({"x": "x + 1000"}, where="x < 5")
    trace.clear()
    run(table)
    assert_exact(trace, range(1000, 1005))
    assert sorted(table.to_arrow()["y"].to_pylist()) == sorted(2 * x for x in table.to_arrow()["x"].to_pylist())


def test_a_new_column_of_a_clone_has_no_facts_of_a_dropped_one(db: Database) -> None:
    table = db.create_table("t", pa.table({"x": range(20)}))
    table.add_columns({"dropped": double()})
    table.backfill("dropped", udf=double(), runner="inline")
    table.lance.shallow_clone(f"{db.uri}/t2.lance", table.version)
    clone = db.open_table("t2")
    field = clone.lance.lance_schema.field("dropped").id()
    clone.drop_columns(["dropped"])
    clone.add_columns({"y": double()})
    assert clone.lance.lance_schema.field("y").id() == field
    clone.lance.update({"y": "7"})
    with pytest.raises(UnknownValues, match=": 20 rows"):
        run(clone)


@moves
def test_a_clone_knows_what_is_found_in_the_history_of_the_table_that_it_was_made_from(
    db: Database, trace: Trace, change: Callable[[Any], object]
) -> None:
    table = db.create_table("t", pa.table({"x": range(100), "z": [0] * 100}), max_rows_per_file=50)
    table.add_columns({"y": double()})
    run(table)
    table.lance.update({"x": "1000"}, where="x = 3")
    change(table.lance)
    table.lance.shallow_clone(f"{db.uri}/t2.lance", table.version)
    clone = _opened(db)
    trace.clear()
    run(clone)
    assert_exact(trace, [1000])
    assert_nothing_to_do_is_free(clone, "y", trace, udf=double())


def test_a_clone_does_not_know_what_jobs_of_the_table_recorded_later(db: Database, trace: Trace) -> None:
    table = by_user(db)
    table.lance.shallow_clone(f"{db.uri}/t3.lance", table.version)
    table.lance.optimize.compact_files()
    run(table, where="x < 50", on_unknown_values="recompute")
    clone = db.open_table("t3")
    assert isinstance(clone, Table)
    with pytest.raises(UnknownValues, match=": 100 rows"):
        run(clone)


def test_values_that_a_restore_brought_back_are_asked_about_again(half_filled: Table, trace: Trace) -> None:
    table, before = half_filled, half_filled.version
    run(table, where="x < 50", on_unknown_values="recompute")
    run(table, where="x < 60", on_unknown_values="recompute")
    table.location.open(before).restore()
    with pytest.raises(UnknownValues, match=": 49 rows"):  # that of row 0 is what the job computed
        run(table)
    run(table, on_unknown_values="fill")
    table.lance.update({"x": "x + 1000"}, where="x < 2")
    table.lance.optimize.compact_files()
    trace.clear()
    run(table)
    assert_exact(trace, [1000, 1001])


def test_a_row_whose_input_changed_is_known_after_a_job_of_other_rows_and_a_cleanup(db: Database, trace: Trace) -> None:
    table = computed(db)
    table.lance.update({"x": "x + 1000"}, where="x < 2")
    run(table, where="x = 1000")
    table.lance.cleanup_old_versions(timedelta(0))
    trace.clear()
    run(table)
    assert_exact(trace, [1001])


def test_an_input_that_others_replace_in_place_between_two_commits_of_a_job_is_no_unknown_value(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a simulated world; the rows are computed again."""
    table = db.create_table("t", pa.table({"x": range(9)}), max_rows_per_file=3)
    table.add_columns({"y": double()})
    passed: list[str] = []

    def replace_first(name: str) -> None:
        if name == "commit.before":
            passed.append(name)
            if len(passed) == 2:
                dataset = table.lance
                (made,) = write_fragments(pa.table({"x": [900, 901, 902]}), dataset, mode="append")
                group = lance.LanceOperation.DataReplacementGroup(0, made.files[0])
                replaced = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
                lance.LanceDataset.commit(dataset.uri, replaced)

    monkeypatch.setattr(table_versions, "fault_point", replace_first)
    sizes: dict[str, Any] = {"checkpoint_interval": 0.0, "commit_granularity": 1, "runner": "inline"}
    table.backfill("y", udf=double(), **sizes)
    assert len(passed) == 3
    assert table.backfill("y", udf=double(), **sizes).state == "DONE"
    assert table.to_arrow()["y"].to_pylist() == [2 * x for x in table.to_arrow()["x"].to_pylist()]
    assert table.to_arrow()["x"].to_pylist()[:3] == [900, 901, 902]
