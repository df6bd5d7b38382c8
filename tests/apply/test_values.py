"""What goes into a function and what comes out: the rows with an odd value fail, and all others have their values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva.engine.apply.isolation.process import POOL
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.udf import UDF, Skip, udf
from airflow_geneva.errors import UdfError
from tests.support.marks import slow_after
from tests.udfs_for_tests import odd

EVERY_FORM = ("scalar", "async", "array", "record_batch")
NUMBERS = [0, 2, 5, 4, 6, 7]
ODD = [2, 5]


@pytest.fixture(autouse=True, scope="module")
def _dismissed() -> Iterator[None]:
    yield
    POOL.dismiss()


def run(function: UDF, values: Any = NUMBERS) -> MappedBatch:
    column = values if isinstance(values, pa.Array) else pa.array(values, pa.int64())
    with open_batch_mapper(function) as mapper:
        return mapper(pa.record_batch({"x": column}))


def failed(mapped: MappedBatch) -> Mapping[int, str]:
    return {failure.index: failure.exception.rpartition(".")[2] for failure in mapped.failures}


# Inputs

_TEXT = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
# A line for each: a column, the rows that Python cannot hold, and what the error says about the first of them.
UNREADABLE: list[tuple[pa.Array, list[int], str]] = [
    (pa.array([1, 10**7, None], pa.date32()), [1], "10000000 as date32"),
    (pa.array([-(10**7), 1], pa.date32()), [0], "-10000000 as date32"),
    (pa.array([1, 10**12], pa.timestamp("s")), [1], "1000000000000 as timestamp"),
    (pa.array([10**17, 1], pa.duration("s")), [0], "100000000000000000 as duration"),
    (pa.array([1, 2], pa.timestamp("us", "Mars/Base")), [0, 1], "1 as timestamp.*Mars/Base"),
    (pa.array([1, 1_000, None], pa.time64("ns")), [0], "1 as time64.*nanoseconds"),
    (pa.array([[1_000], [1_000, 1]], pa.list_(pa.time64("ns"))), [1], "00:00:00.000000001.*nanoseconds"),
    (pa.array([{"a": 1_000}, {"a": 1}], pa.struct({"a": pa.time64("ns")})), [1], "00:00:00.000000001.*nanoseconds"),
    (pa.array([[(1, 1)], [(1_000, 1)]], pa.map_(pa.time64("ns"), pa.int64())), [0], "00:00:00.000000001"),
    (pa.array([86_400_000, 1], pa.int64()).view(pa.date64()), [1], "1 as date64.*a time of day"),
    (_TEXT, [1], r"the bytes b'\\xff'"),
    (pa.ListArray.from_arrays([0, 2, 3], _TEXT), [0], "UnicodeDecodeError"),
    (pa.array([[1], [10**7]], pa.list_(pa.date32())), [1], "OverflowError"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("column", "rows", "says"), UNREADABLE, ids=lambda value: str(getattr(value, "type", "")))
@pytest.mark.parametrize("form", ["scalar", "async"])
def test_an_input_that_python_cannot_hold_is_a_failed_row_with_its_column_and_value(
    form: str, column: pa.Array, rows: list[int], says: str
) -> None:
    mapped = run(odd.shows(form, on_error="skip"), column)
    assert failed(mapped) == dict.fromkeys(rows, "UdfError")
    assert [at for at, value in enumerate(mapped.values) if value.is_valid] == [
        at for at in range(len(column)) if at not in rows
    ]
    with pytest.raises(UdfError, match=rf"(?s)cannot be called on row {rows[0]} .* input 'x' is .*{says}") as stopped:
        run(odd.shows(form), column)
    assert stopped.value.row_index == rows[0]
    assert stopped.value.computed is not None
    assert len(stopped.value.computed) == rows[0]


def test_an_input_that_python_cannot_hold_ends_no_worker() -> None:
    function = udf(data_type=pa.int64(), name="f", on_error="skip")(lambda x: os.getpid())
    mapped = run(function, pa.array([1, 10**7, 2, 10**7, 3], pa.date32()))
    assert list(failed(mapped)) == [1, 3]
    assert len(set(mapped.values.drop_null().to_pylist())) == 1


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()], ids=str)
def test_a_large_integer_beside_null_is_not_rounded_in_an_array_of_numpy(kind: pa.DataType) -> None:
    @udf(data_type=pa.float64(), on_error="skip")
    def first(x: np.ndarray) -> float:
        return float(x[0])

    large = 2**53 + 1
    column = pa.array([[1, None], [large, None], [2, 1], [large - 1, None]], pa.list_(kind))
    mapped = run(first, column)
    assert failed(mapped) == {1: "UdfError"}
    assert "NumPy has only floating numbers beside NULL" in mapped.failures[0].message
    assert mapped.values.to_pylist() == [1, None, 2, large - 1]


def test_whole_columns_have_what_python_cannot_hold() -> None:
    @udf(data_type=pa.date32(), on_error="skip")
    def same(x: pa.Array) -> pa.Array:
        return x

    column = pa.array([1, 10**7, None], pa.date32())
    assert run(same, column).values.equals(column)


# Results and exits


@pytest.mark.parametrize("how", slow_after(1, odd.ODD_RESULTS))
@pytest.mark.parametrize("form", EVERY_FORM)
def test_an_exception_while_a_result_is_converted_is_the_rows_failure_with_its_own_type(form: str, how: str) -> None:
    kind = "FunctionExited" if how == "SystemExit" else how
    mapped = run(odd.numbers(form, how, on_error="skip"))
    assert failed(mapped) == dict.fromkeys(ODD, kind)
    assert mapped.values.to_pylist() == [[0], [2], None, [4], [6], None]
    assert "no item" in mapped.failures[0].message or how == "SystemExit"
    with pytest.raises(UdfError, match=rf"(?s)raised {kind} on row 2 of a batch of 6: .*__iter__") as stopped:
        run(odd.numbers(form, how))
    assert stopped.value.row_index == 2
    assert stopped.value.computed is not None
    assert stopped.value.computed.to_pylist() == [[0], [2]]


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_rule_matches_the_exception_of_a_result(form: str) -> None:
    assert failed(run(odd.numbers(form, "KeyError", on_error=[Skip(KeyError)]))) == dict.fromkeys(ODD, "KeyError")
    with pytest.raises(UdfError, match="raised ValueError on row 2"):
        run(odd.numbers(form, "ValueError", on_error=[Skip(KeyError)]))


@pytest.mark.parametrize("how", slow_after(1, odd.EXITS))
@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_function_that_would_end_the_process_fails_its_row(form: str, how: str) -> None:
    kind = "RuntimeError" if form == "async" and how != "panics" else "FunctionExited"
    mapped = run(odd.numbers(form, how, on_error="skip"))
    assert failed(mapped) == dict.fromkeys(ODD, kind)
    assert mapped.values.to_pylist() == [[0], [2], None, [4], [6], None]
    with pytest.raises(UdfError, match=f"raised {kind} on row 2 of a batch of 6: ") as stopped:
        run(odd.numbers(form, how))
    assert stopped.value.row_index == 2


def test_a_class_that_exits_when_it_is_set_up_is_an_error() -> None:
    class Leaves:
        def __init__(self) -> None:
            sys.exit(0)

        def __call__(self, x: int) -> int:
            return x

    for settings in ({}, {"on_error": "skip"}):
        with pytest.raises(UdfError, match=r"could not be set up: .*called sys.exit\(0\)"):
            run(udf(version="1", **settings)(Leaves))  # type: ignore[call-overload]


def test_a_function_that_exits_fails_the_script(tmp_path: Any) -> None:
    script = """
import sys
import pyarrow as pa
from airflow_geneva import connect, udf

@udf(data_type=pa.int64(), version="1")
def leave(x: int) -> int:
    sys.exit(0)

table = connect(sys.argv[1]).create_table("t", pa.table({"x": [1, 2]}))
table.add_columns({"y": leave})
table.backfill("y", runner="inline")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "It called sys.exit(0), which would end the process. Raise an exception instead." in done.stderr


REQUIRED = pa.field("a", pa.int64(), nullable=False)
# A line for each: a type with a field that is not nullable, a value, and one without the field.
REQUIRING: list[tuple[pa.DataType, Any, Any]] = [
    (pa.struct([REQUIRED]), {"a": 1}, {"a": None}),
    (pa.struct([REQUIRED]), {"a": 1}, {}),
    (pa.list_(REQUIRED), [1], [1, None]),
    (pa.list_(pa.struct([REQUIRED])), [{"a": 1}], [{"a": None}]),
    (pa.map_(pa.string(), REQUIRED), [("x", 1)], [("x", None)]),
]


@pytest.mark.parametrize("form", ["scalar", "array"])
@pytest.mark.parametrize(("kind", "good", "bad"), slow_after(2, REQUIRING), ids=lambda value: str(value)[:40])
def test_null_in_a_field_that_is_not_nullable_fails_its_row(form: str, kind: pa.DataType, good: Any, bad: Any) -> None:
    @udf(data_type=kind, on_error="skip")
    def one(x: int) -> Any:
        return {0: None, 2: bad}.get(x, good)

    @udf(data_type=kind, on_error="skip")
    def many(x: pa.Array) -> pa.Array:
        return pa.array([{0: None, 2: bad}.get(value, good) for value in x.to_pylist()], kind)

    mapped = run(one if form == "scalar" else many, [0, 1, 2, 3])
    assert failed(mapped) == {2: "UdfError"}
    assert "is NULL, and the type says that it is not nullable" in mapped.failures[0].message
    assert mapped.values.to_pylist() == [None, good, None, good]


@pytest.mark.parametrize(
    ("form", "kind"),
    slow_after(
        2,
        [
            ("array", "text"),
            ("record_batch", "list"),
            *(("array", kind) for kind in odd.SPOILED[1:]),
            ("record_batch", "text"),
        ],
    ),
)
def test_a_row_of_an_array_that_is_not_valid_fails_and_no_other(form: str, kind: str) -> None:
    mapped = run(odd.spoiling(form, kind, on_error="skip"))
    assert failed(mapped) == dict.fromkeys(ODD, "UdfError")
    mapped.values.validate(full=True)
    assert [value.is_valid for value in mapped.values] == [True, True, False, True, True, False]
    with pytest.raises(UdfError, match="the array is not valid: ") as stopped:
        run(odd.spoiling(form, kind))
    assert stopped.value.row_index == 2
    assert stopped.value.computed is not None
    stopped.value.computed.validate(full=True)
    assert len(stopped.value.computed) == 2
