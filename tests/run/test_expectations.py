"""Expectations on values: what they stop, what they cost, and what is known afterwards."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import connect, expect, udf
from airflow_geneva.engine.job.status import Job
from airflow_geneva.engine.run.column import ColumnPublisher
from airflow_geneva.engine.run.expectations import ValueChecks
from airflow_geneva.engine.run.view import ViewPublisher
from airflow_geneva.engine.udf import UDF
from airflow_geneva.engine.udf.expect import Expectation, check_expectations
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table
from tests.support.counting import Trace, leave_trace
from tests.support.invariants import values_of

MakeTable = Callable[..., Table]
TENS = [10 * x for x in range(40)]


def tens(*expected: Expectation, nulls: int = 0, failing: int = 0, **more: Any) -> UDF:
    """Ten times the input, with NULL for the first rows, failing in the last."""

    def ten(x: int) -> int | None:
        leave_trace([x])
        if x >= 40 - failing:
            raise ValueError("too much")
        return None if x < nulls else 10 * x

    return udf(data_type=pa.int64(), version="1", name="tens", expect=expected, on_error="skip", **more)(ten)


def newest_job(table: Table) -> Job:
    database = connect(table.location.database_uri)
    return database.job(database.jobs(1)[0].id)


def below(most: int) -> Callable[[pa.Table], Any]:
    return lambda table: [value < most for value in table.column("y").to_pylist()]


WRONG = [
    (expect.not_null(), 1, 3, "row 0: None"),
    (expect.between(0, 389), 0, 1, "row 39: 390"),
    (expect.between(-1.5, 380), 0, 1, "row 39: 390"),
    (expect.in_set(TENS[:38]), 0, 2, "row 38: 380"),
    (expect.max_null_fraction(0.05), 3, 3, "row 0: None"),
    (expect.satisfies(below(370)), 0, 3, "row 37: 370"),
    (expect.satisfies(lambda table: table.num_rows == 40, whole=True), 0, 40, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("expected", "nulls", "wrong", "shown"), WRONG, ids=[str(one[0]) for one in WRONG])
def test_wrong_values_stay_invisible_and_a_repaired_expectation_computes_nothing(
    make_table: MakeTable, trace: Trace, expected: Expectation, nulls: int, wrong: int, shown: str
) -> None:
    table = make_table(40, per_fragment=40)
    if expected.whole and expected.needs_function:
        table.add([{"id": 40, "x": 39}])
    nulls = 3 if expected.kind == "not_null" else nulls
    table.add_columns({"y": tens(expected, nulls=nulls)})
    version, rows = table.version, table.lance.count_rows()
    with pytest.raises(JobFailed, match=r"invisible; computed rows are kept") as stopped:
        table.backfill("y", runner="inline")
    assert str(expected) in str(stopped.value)
    assert shown in str(stopped.value)
    assert table.version == version
    wrong = rows if not shown else wrong
    job = newest_job(table)
    (checked,) = job.checked
    assert (job.state, job.rows_committed, checked.passed, checked.wrong) == ("FAILED", 0, False, wrong)
    assert str(expected) in str(job)
    assert str(expected) in str(job.error)

    trace.clear()
    result = table.backfill("y", udf=tens(nulls=nulls), runner="inline")
    assert (result.state, result.rows_reused, trace.rows()) == ("DONE", rows, [])


@pytest.mark.slow
def test_a_pandera_schema_is_a_function_and_names_the_rows(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It imports pyspark.pandas, which otherwise sets this for the whole process: pyarrow then ignores time zones.
    monkeypatch.setenv("PYARROW_IGNORE_TIMEZONE", "1")
    pandera = pytest.importorskip("pandera.pandas", reason="make install")
    checked = pandera.Column(checks=pandera.Check.le(380), nullable=True, coerce=True)
    validate = pandera.DataFrameSchema({"y": checked}).validate
    table = make_table(40, per_fragment=40)
    table.add_columns({"y": tens(expect.satisfies(validate), expect.satisfies(partial(validate, lazy=True)))})
    with pytest.raises(JobFailed, match=r"invisible; computed rows are kept") as stopped:
        table.backfill("y", runner="inline")
    assert str(stopped.value).count("not met: 1 of 40 rows, for example row 39: 390; Schema") == 2


def test_functions_of_one_name_are_told_apart(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    table.add_columns({"y": tens(*(expect.satisfies(below(most), level="warn") for most in (370, 380, 400)))})
    found = table.backfill("y", runner="inline").checked
    assert [(one.expectation[-10:], one.rows, one.wrong) for one in found] == [
        (".<lambda>)", 40, 3),
        ("ambda> #2)", 40, 2),
        ("ambda> #3)", 40, 0),
    ]


@pytest.mark.slow
def test_a_warning_stops_nothing_and_is_kept(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    rules = (expect.between(0, 380, level="warn"), expect.max_null_fraction(0.5), expect.not_null())
    table.add_columns({"y": tens(*rules)})
    result = table.backfill("y", runner="inline")
    assert dict(values_of(table, "y")) == dict(enumerate(TENS))
    assert (result.state, len(result.commits)) == ("DONE", 1)
    assert [(one.passed, one.level, one.rows, one.wrong) for one in result.checked] == [
        (False, "warn", 40, 1),
        (True, "fail", 40, 0),
        (True, "fail", 40, 0),
    ]
    job = newest_job(table)
    assert job.checked == result.checked
    assert (job.rows_committed, {shard.step for shard in job.shards}) == (40, {"committed"})


@pytest.mark.slow
def test_rows_that_failed_are_not_checked(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    table.add_columns({"y": tens(expect.not_null(), expect.max_null_fraction(0), failing=5)})
    result = table.backfill("y", runner="inline")
    assert (result.state, result.rows_failed, [one.rows for one in result.checked]) == ("DONE", 5, [35, 35])


@pytest.mark.slow
def test_a_rule_about_rows_stops_the_commit_group_and_one_about_the_column_stops_all(
    make_table: MakeTable, trace: Trace
) -> None:
    table = make_table(40, per_fragment=10)
    table.add_columns({"y": tens(expect.between(0, 250))})
    with pytest.raises(JobFailed) as stopped:
        table.backfill("y", runner="inline", commit_granularity=1, shard_size=3)
    result = stopped.value.result
    assert result is not None
    assert (result.rows_computed, result.rows_left, len(result.commits)) == (20, 20, 2)
    assert {"plan", "apply", "commit"} == set(result.seconds)
    assert newest_job(table).rows_committed == 20

    table.alter_columns({"y": tens(expect.between(0, 250), expect.max_null_fraction(0.5))})
    version = table.version
    with pytest.raises(JobFailed):
        table.backfill("y", runner="inline", commit_granularity=1, shard_size=1)
    assert table.version == version
    table.alter_columns({"y": tens(expect.between(0, 400), expect.max_null_fraction(0.5))})
    result = table.backfill("y", runner="inline", commit_granularity=1, shard_size=1)
    assert (result.state, len(result.commits), result.rows_left) == ("DONE", 1, 0)
    assert dict(values_of(table, "y")) == dict(enumerate(TENS))
    assert len(trace.rows()) == 40


def change_once(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[], Any], owner: type, name: str, before: bool
) -> None:
    """Change something right before or after the first call of a method."""
    call, changes = getattr(owner, name), [change]

    def around(*given: Any) -> Any:
        if before and changes:
            changes.pop()()
        found = call(*given)
        if changes:
            changes.pop()()
        return found

    monkeypatch.setattr(owner, name, around)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [(ColumnPublisher, "finish", True), (ValueChecks, "check", False)])
@pytest.mark.parametrize("per_fragment", [10, 20])
def test_a_rule_about_the_column_judges_the_rows_that_the_commit_makes_visible(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, moment: Any, per_fragment: int
) -> None:
    """Ten of twenty rows are NULL, and the others are updated or deleted before the commit."""
    table = make_table(20, per_fragment=per_fragment)
    table.add_columns({"y": tens(expect.max_null_fraction(0.6), nulls=10)})

    def change() -> None:
        if per_fragment == 10:
            table.lance.update({"x": "x + 100"}, where="id >= 10")
        else:
            table.lance.delete("id >= 10")

    change_once(monkeypatch, change, *moment)
    with pytest.raises(JobFailed, match=r"max_null_fraction\(0.6\) of column 'y' \(fail\) not met: 10 of 10 rows"):
        table.backfill("y", runner="inline", shard_size=1)
    assert newest_job(table).rows_committed == 0


def test_rows_that_the_commit_leaves_out_are_not_judged(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(20, per_fragment=10)
    table.add_columns({"y": tens(expect.max_null_fraction(0.4), expect.not_null(level="warn"), nulls=10)})
    update = partial(table.lance.update, {"x": "x + 100"}, where="id < 10")
    change_once(monkeypatch, update, ColumnPublisher, "finish", before=True)
    result = table.backfill("y", runner="inline", shard_size=1)
    assert (result.state, result.rows_computed, result.rows_left) == ("PARTIAL", 10, 10)
    assert [(one.rows, one.wrong) for one in result.checked] == [(10, 0), (10, 0)]


def test_a_swap_that_is_lost_judges_nothing(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values become visible nowhere, so they are no reason to fail."""
    table = make_table(20)
    query = table.query().select({"id": "id", "y": tens(nulls=10)})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    view.expect({"y": expect.max_null_fraction(0.4)})

    def other() -> None:
        view.expect({"y": expect.max_null_fraction(0.6)})
        view.refresh(runner="inline")

    change_once(monkeypatch, other, ViewPublisher, "finish", before=True)
    result = view.refresh(runner="inline")
    assert (result.state, result.checked, "another refresh" in result.notes[-1]) == ("PARTIAL", (), True)


def test_a_view_is_not_swapped(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    database = connect(table.location.database_uri)
    query = table.query().select({"id": "id", "y": tens(expect.between(0, 380))})
    view = query.create_materialized_view(database, "v")
    version = view.version
    with pytest.raises(JobFailed, match="row 39: 390"):
        view.refresh(runner="inline")
    assert view.version == version
    assert not newest_job(view).checked[0].passed
    assert len(trace.rows()) == 40


def test_a_view_says_what_it_expects_of_columns_of_sql(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(40)
    query = table.query().select({"id": "id", "half": "nullif(x / 2, 3)", "y": tens()})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    view.expect({"half": [expect.between(0, 18), expect.max_null_fraction(0.1)], "y": expect.not_null()})
    version = view.version
    with pytest.raises(JobFailed, match=r"between\(0, 18\) of column 'half' \(fail\) not met: 2 of 40 rows"):
        view.refresh(runner="inline")
    assert view.version == version
    view.expect({"half": [expect.between(0, 18, level="warn"), expect.max_null_fraction(0.1)]})
    assert view.view_definition.differences(query.definition()) == []
    result = view.refresh(runner="inline")
    assert [(one.expectation, one.wrong, one.passed) for one in result.checked] == [
        ("between(0, 18)", 2, False),
        ("max_null_fraction(0.1)", 2, True),
    ]
    assert newest_job(view).checked == result.checked
    assert len(trace.rows()) == 40
    version = view.version
    view.expect({"half": [expect.between(0, 18, level="warn"), expect.max_null_fraction(0.1)]})
    assert view.version == version
    for columns, why in (
        ({"z": expect.not_null()}, "View 'v' has no column 'z', only id, half, y"),
        ({"half": expect.satisfies(below(1))}, "a view stores no code"),
        ({"half": expect.between("a", "b")}, "cannot be checked on values of type"),
        ({"half": [None]}, "None is no expectation"),
    ):
        with pytest.raises(InvalidInput, match=why):
            view.expect(columns)


@pytest.mark.slow
@pytest.mark.parametrize("refreshed", ["before", "before and after", "never"])
def test_a_refresh_says_which_expectations_a_restore_took_back(
    make_table: MakeTable, trace: Trace, refreshed: str
) -> None:
    table = make_table(20)
    query = table.query().select({"id": "id", "half": "9 * (x / 20)", "y": tens()})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    view.expect({"id": expect.not_null()})
    if refreshed != "never":
        view.refresh(runner="inline")
    version = view.version
    view.expect({"id": expect.not_null(), "half": expect.in_set([0, 9]), "y": expect.between(0, 400, level="warn")})
    if refreshed == "before and after":
        table.add([{"id": 20, "x": 18}])
        view.refresh(runner="inline")
    view.lance.checkout_version(version).restore()
    table.add([{"id": 30, "x": 1}])
    told = (
        f"a restore to version {version} took back what view.expect had said: in_set([0, 9]) of "
        "column 'half' (fail), between(0, 400) of column 'y' (warn). Call view.expect(...) again to check them."
    )
    assert told in view.plan_refresh().notes
    assert told in str(view.plan_refresh())
    result = view.refresh(runner="inline")
    assert (result.notes[-1], [one.expectation for one in result.checked]) == (told, ["not_null()"])
    assert view.refresh(runner="inline").notes == ()


def test_a_restore_during_a_refresh_is_told_by_this_refresh(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(20)
    view = table.query().select({"id": "id"}).create_materialized_view(connect(table.location.database_uri), "v")
    version = view.version
    view.expect({"id": expect.not_null()})
    change_once(monkeypatch, lambda: view.lance.checkout_version(version).restore(), ViewPublisher, "finish", True)
    result = view.refresh(runner="inline")
    assert (result.state, [one.expectation for one in result.checked]) == ("DONE", ["not_null()"])
    assert f"a restore to version {version} took back" in result.notes[-1]
    assert "not_null() of column 'id' (fail)" in result.notes[-1]


def test_nothing_is_taken_back_where_the_expectations_were_given_again(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(20)
    query = table.query().select({"id": "id", "y": tens()})
    view = query.create_materialized_view(connect(table.location.database_uri), "v")
    version = view.version
    view.expect({"y": expect.not_null()})
    view.lance.checkout_version(version).restore()
    view.expect({"y": expect.not_null()})
    assert view.plan_refresh().notes == ()
    view.expect({"y": expect.in_set([1])})
    again = view.version
    view.lance.checkout_version(version).restore()
    view.lance.checkout_version(again).restore()
    assert not [note for note in view.plan_refresh().notes if "in_set" in note]


@pytest.mark.slow
def test_of_blobs_is_known_which_have_no_value(make_table: MakeTable, trace: Trace) -> None:
    def drawn(*expected: Expectation) -> UDF:
        def draw(x: int) -> bytes | None:
            leave_trace([x])
            if x == 30:
                raise ValueError("too much")
            return None if x in (3, 17) else b"a" * x

        made = udf(data_type=lance.blob_field("b").type, version="1", expect=expected, on_error="skip", name="draw")
        return made(draw)

    table = make_table(40)
    table.add_columns({"b": drawn(expect.not_null())})
    table.lance.delete("id = 5")
    with pytest.raises(
        JobFailed, match=r"not_null\(\) of column 'b' \(fail\) not met: 2 of 38 rows, for example row 3"
    ):
        table.backfill("b", runner="inline")
    result = table.backfill("b", udf=drawn(expect.max_null_fraction(0.1)), runner="inline")
    assert [(one.rows, one.wrong) for one in result.checked] == [(38, 2)]
    # The fragment of the failing row again: blobs cannot be read back from a staged file.
    assert len(trace.rows()) == 39 + 15

    database = connect(table.location.database_uri)
    for name, query in (("v", table.query()), ("shuffled", table.query().shuffle(1))):
        columns = {"id": "id", "b": drawn(expect.not_null(level="warn")), "copy": "b"}
        view = query.select(columns).create_materialized_view(database, name)
        view.expect({"copy": expect.max_null_fraction(0.1)})
        found = view.refresh(runner="inline").checked
        assert [(one.rows, one.wrong, one.passed) for one in found] == [(38, 2, False), (38, 2, True)]


@pytest.mark.parametrize("whole", [False, True])
def test_a_staged_file_that_turns_out_to_be_damaged_is_computed_again(make_table: MakeTable, whole: bool) -> None:
    """Its footer is whole, so that only reading its values shows it."""

    @udf(data_type=pa.list_(pa.string()), version="1", name="texts")
    def texts(x: int) -> list[str]:
        return [f"value {x} {'y' * (x % 50)}" for _ in range(x % 5)]

    def expecting(one: Expectation) -> UDF:
        return replace(texts, expect=(one,))

    table = make_table(2000, per_fragment=500)
    table.add_columns({"y": expecting(expect.satisfies(lambda values: [False] * len(values)))})
    committed = set(Path(table.uri, "data").iterdir())
    with pytest.raises(JobFailed, match="invisible"):
        table.backfill("y", runner="inline")
    staged = sorted(set(Path(table.uri, "data").iterdir()) - committed)
    content = staged[0].read_bytes()
    staged[0].write_bytes(b"\xff" * (len(content) // 2) + content[len(content) // 2 :])

    good = expecting(expect.satisfies(lambda values: [True] * len(values), whole=whole))
    runs = [table.backfill("y", udf=good, runner="inline") for _ in range(1 + whole)]
    # All values of a column are judged when the tasks that compute rows have ended.
    assert [run.state for run in runs] == ["PARTIAL", "DONE"][-len(runs) :]
    assert (runs[0].rows_reused, runs[0].rows_left, runs[-1].rows_computed) == (1500, 500 * whole, 500)
    assert table.to_arrow().column("y").null_count == 0


def test_a_rule_must_fit_the_type_and_is_no_part_of_the_version() -> None:
    with pytest.raises(InvalidInput, match="cannot be checked on values of type"):
        tens(expect.between("a", "b"))
    with pytest.raises(InvalidInput, match=r"cannot be checked on blobs, only not_null\(\) and max_null_fraction"):
        udf(data_type=lance.blob_field("b").type, expect=expect.in_set(["a"]))(lambda x: b"")
    with pytest.raises(InvalidInput, match="level"):
        expect.not_null(level="stop")

    @udf
    def plain(x: int) -> int:
        return x

    checked = udf(name="plain", expect=[expect.not_null()])(plain.func)
    assert checked.code_version == plain.code_version
    assert checked.definition().expectations == (expect.not_null(),)


async def nothing() -> bool:
    return True


ANSWERS: list[tuple[Any, list[int] | str]] = [
    (True, []),
    (None, []),
    (False, [0, 1, 2]),
    (pa.scalar(True), []),
    (pa.scalar(False), [0, 1, 2]),
    (pc.all(pa.array([True, False, True])), [0, 1, 2]),
    (pa.scalar(None, pa.bool_()), [0, 1, 2]),
    (np.True_, []),
    (np.array(False), [0, 1, 2]),
    (pd.Series([True, True]).all(), []),
    ([True, np.False_, None], [1, 2]),
    ((True, False, True), [1]),
    (np.array([True, False, True]), [1]),
    (pa.array([True, False, None]), [1, 2]),
    (pa.chunked_array([[True], [False, True]]), [1]),
    (pd.Series([True, False, True]), [1]),
    (pd.Series([True, False, None], dtype="boolean"), [1, 2]),
    (pd.Series([True, False, None], dtype=object), [1, 2]),
    (0, "int"),
    (1, "int"),
    ("ok", "str"),
    (np.int64(0), "numpy.int64"),
    (pa.scalar(1), "pyarrow.lib.Int64Scalar"),
    (pd.NA, "NAType"),
    ({"ok": True}, "dict"),
    (np.ones((3, 1), np.bool_), "numpy.ndarray"),
    (pd.DataFrame({"y": [True] * 3}), "DataFrame"),
    (pa.table({"y": [True] * 3}), "pyarrow.lib.Table"),
    ([1, 0, 1], "3 values of type int64 for 3 rows"),
    ([True], "1 value of type bool for 3 rows"),
    ([True, "no", {}], "list"),
    (pd.Series([1.0, 0.0, 1.0]), "3 values of type double for 3 rows"),
]


@pytest.mark.parametrize(("answer", "found"), ANSWERS, ids=[type(answer).__name__ for answer, _ in ANSWERS])
def test_what_a_function_returns_is_a_truth_value_or_one_a_row(answer: Any, found: list[int] | str) -> None:
    verdict = expect.satisfies(lambda _: answer).judge(pa.table({"y": [1, 2, 3]}))
    if isinstance(found, str):
        assert list(verdict.wrong) == [0, 1, 2]
        assert found in verdict.why
    else:
        assert list(verdict.wrong) == found


def test_a_coroutine_is_no_answer() -> None:
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        verdict = expect.satisfies(lambda _: nothing()).judge(pa.table({"y": [1, 2, 3]}))
        gc.collect()
    assert list(verdict.wrong) == [0, 1, 2]
    assert "coroutine" in verdict.why
    assert not [warning for warning in noted if issubclass(warning.category, RuntimeWarning)], "never awaited"


BIG = 2**53 + 1
BEYOND: list[tuple[pa.DataType, list[Any], Any, Any, list[int]]] = [
    (pa.int64(), [-1, 0, 2**63 - 1], 0, 2**70, [0]),
    (pa.int64(), [-1, 0], 2**70, 2**71, [0, 1]),
    (pa.int64(), [BIG - 1, BIG, BIG + 1], float(BIG - 1), float(BIG + 1), []),
    (pa.int64(), [BIG - 1, BIG, BIG + 1], BIG, 1e30, [0]),
    (pa.int64(), [0, 1, 2], 0.5, 1.5, [0, 2]),
    (pa.int64(), [0, 1], float("-inf"), float("inf"), []),
    (pa.int64(), [0, 1], float("nan"), 1, [0, 1]),
    (pa.int64(), [0, 1, 2], Decimal("0.5"), "2", [0]),
    (pa.int8(), [-128, 127], -1000, 126, [1]),
    (pa.uint64(), [0, 2**64 - 1], -1, 2**64 - 2, [1]),
    (pa.uint64(), [0, 2**64 - 1], -5, -1, [0, 1]),
    (pa.float64(), [1.0, 2.0**60, 2.0**61], 0, 2**60 + 1, [2]),
    (pa.float64(), [2.0**60, 2.0**61], 2**60 + 1, 2**62, [0]),
    (pa.float64(), [float("inf"), 1.0, float("nan")], -(10**400), 10**400, [0, 2]),
    (pa.float64(), [0.1], 0, Decimal("0.1"), []),
    (pa.float32(), [0.5, 1e30], 0, 2**99, [1]),
    (pa.float16(), [np.float16(0.5), np.float16(2)], 0, 1, [1]),
    (pa.decimal128(5, 2), [Decimal("1.00"), Decimal("999.99")], 1, 10**40, []),
    (pa.decimal128(5, 2), [Decimal("0.10"), Decimal("0.11")], 0.1, 0.105, [1]),
    (pa.decimal256(76, 2), [Decimal("1e70")], 0, 10**70, []),
]


@pytest.mark.parametrize(("kind", "values", "low", "high", "wrong"), BEYOND, ids=range(len(BEYOND)))
def test_numbers_are_compared_exactly_whatever_their_size(
    kind: pa.DataType, values: list[Any], low: Any, high: Any, wrong: list[int]
) -> None:
    (one,) = check_expectations(expect.between(low, high), kind)
    one = Expectation.from_json(json.loads(json.dumps(one.to_json())))
    assert list(one.judge(pa.table({"y": pa.array([*values, None], kind)})).wrong) == wrong
