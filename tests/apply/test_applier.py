"""The mapper: what goes in, what comes out, and what is said when it does not fit."""

from __future__ import annotations

import datetime
import decimal
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies as st

from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.udf_call import Mapper, describe_failure
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.to_arrow import array_from_values
from airflow_geneva.engine.udf import UDF, udf
from airflow_geneva.errors import InvalidInput, UdfError

UTC = datetime.timezone.utc
VECTOR = pa.list_(pa.float32(), 3)
PAIR = pa.struct({"n": pa.int64(), "v": VECTOR, "inner": pa.struct({"s": pa.string()})})


def _batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def _returning(values: list[Any], data_type: pa.DataType) -> pa.Array:
    """What a scalar UDF that returns these values gives."""
    return Mapper(udf(data_type=data_type, name="f")(lambda i: values[i]))(_batch(i=list(range(len(values)))))


def _array_udf(function: Callable[..., Any], data_type: pa.DataType) -> UDF:
    def f(x: pa.Array) -> Any:
        return function(x)

    return udf(data_type=data_type)(f)


def test_a_scalar_udf_gets_python_values_and_none_for_null() -> None:
    seen: list[Any] = []

    @udf(data_type=pa.int64())
    def f(a, b):
        seen.append((a, b))
        return a

    batch = _batch(unused=[0, 0], y=pa.array(["p", None]), x=pa.array([1, None]))
    output = Mapper(f, ["x", "y"])(batch)
    assert output == pa.array([1, None])
    assert seen == [(1, "p"), (None, None)]


def test_an_array_udf_gets_arrays_of_the_columns_in_order_once() -> None:
    calls: list[Any] = []

    @udf
    def f(a: pa.Int64Array, b: pa.Int64Array) -> pa.Int64Array:
        calls.append((type(a), type(b)))
        return pc.subtract(a, b)

    assert Mapper(f, ["y", "x"])(_batch(x=[1, 2], y=[10, 20])) == pa.array([9, 18])
    assert calls == [(pa.Int64Array, pa.Int64Array)]


@pytest.mark.parametrize("columns", [["y", "x"], None])
def test_a_record_batch_udf_gets_its_columns_in_order_under_the_tables_names(columns: list[str] | None) -> None:
    seen: list[pa.RecordBatch] = []

    @udf(data_type=pa.int64())
    def f(batch: pa.RecordBatch) -> pa.Array:
        seen.append(batch)
        return batch.column("x")

    batch = _batch(x=[1, 2], y=["a", "b"], z=[0.5, 1.5])
    assert Mapper(f, columns)(batch) == pa.array([1, 2])
    assert seen[0].schema.names == (columns or ["x", "y", "z"])


def test_an_input_column_that_the_batch_lacks_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"expects input columns \['missing'\]"):
        Mapper(udf(data_type=pa.int64(), name="f")(lambda x: x), ["missing"])(_batch(x=[1]))


def test_an_empty_batch_does_not_call_the_udf() -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError

    def batch_fail(batch: pa.RecordBatch) -> Any:
        raise AssertionError

    empty = pa.record_batch({"x": pa.array([], pa.int64())})
    for made in (
        udf(data_type=PAIR, input_columns=["x"])(fail),
        udf(data_type=PAIR)(batch_fail),
        _array_udf(fail, PAIR),
    ):
        output = Mapper(made)(empty)
        assert (output.type, len(output)) == (PAIR, 0)


@pytest.mark.parametrize(
    ("values", "data_type", "expected"),
    [
        ([1, None, np.int64(3)], pa.int64(), [1, None, 3]),
        ([1, np.uint8(2)], pa.int8(), [1, 2]),
        ([1, 2.5, np.float32(0.5)], pa.float32(), [1, 2.5, 0.5]),
        ([True, np.bool_(False), None], pa.bool_(), [True, False, None]),
        (["a", None, np.str_("ü")], pa.large_string(), ["a", None, "ü"]),
        ([b"a", bytearray(b"b")], pa.binary(), [b"a", b"b"]),
        ([b"ab"], pa.binary(2), [b"ab"]),
        ([[1, None], None, []], pa.list_(pa.int32()), [[1, None], None, []]),
        ([np.array([1, 2]), [3]], pa.list_(pa.int32()), [[1, 2], [3]]),
        ([np.array([1, 2]), None, np.array([], int)], pa.list_(pa.int32()), [[1, 2], None, []]),
        ([np.array([1, 2]), np.array([3.0])], pa.large_list(pa.float64()), [[1, 2], [3]]),
        ([np.array([1.0, 2, 3]), None], VECTOR, [[1, 2, 3], None]),
        ([None, np.array([1, 2, 3])], VECTOR, [None, [1, 2, 3]]),
        ([(1, 2, 3), np.array([1.0, 2, 3])], VECTOR, [[1, 2, 3], [1, 2, 3]]),
        ([np.ones((2, 2))], pa.list_(pa.list_(pa.float32(), 2)), [[[1, 1], [1, 1]]]),
        ([[np.array([1.0]), np.array([2.0, 3.0])]], pa.list_(pa.list_(pa.float32())), [[[1], [2, 3]]]),
        ([{"n": 1, "v": np.ones(3)}, None], PAIR, [{"n": 1, "v": [1, 1, 1], "inner": None}, None]),
        (
            [{}, {"inner": {"s": "a"}}],
            PAIR,
            [dict.fromkeys(["n", "v", "inner"]), {"n": None, "v": None, "inner": {"s": "a"}}],
        ),
        ([[{"n": 1}]], pa.list_(PAIR), [[{"n": 1, "v": None, "inner": None}]]),
        ([decimal.Decimal("1.10"), None], pa.decimal128(5, 2), [decimal.Decimal("1.10"), None]),
        (
            [datetime.datetime(2024, 1, 1), np.datetime64("2024-01-02")],
            pa.timestamp("us"),
            [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)],
        ),
        (
            [datetime.datetime(2024, 1, 1, tzinfo=UTC)],
            pa.timestamp("ms", "UTC"),
            [datetime.datetime(2024, 1, 1, tzinfo=UTC)],
        ),
        ([datetime.date(2024, 1, 1)], pa.date32(), [datetime.date(2024, 1, 1)]),
        (["a", "b", "a"], pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"]),
        ([{"k": 1}, [("j", 2)]], pa.map_(pa.string(), pa.int64()), [[("k", 1)], [("j", 2)]]),
        ([None, None], pa.int64(), [None, None]),
        ([float("nan"), None], pa.float64(), ["nan", None]),
    ],
)
def test_scalar_results_become_exactly_the_declared_type(
    values: list[Any], data_type: pa.DataType, expected: list[Any]
) -> None:
    output = _returning(values, data_type)
    assert output.type == data_type
    assert [("nan" if value != value else value) for value in output.to_pylist()] == expected
    output.validate(full=True)


@pytest.mark.parametrize(
    ("values", "data_type", "row"),
    [
        ([1, "2"], pa.int64(), 1),
        ([1, 2, 1.5], pa.int64(), 2),
        ([1, np.float32(2)], pa.int64(), 1),
        ([1, np.array(1.5)], pa.int64(), 1),
        ([1, 1.5], pa.date32(), 1),
        ([1, 300], pa.int8(), 1),
        ([1, True], pa.int64(), 1),
        (["a", 1], pa.string(), 1),
        ([[1], [1.5]], pa.list_(pa.int64()), 1),
        ([np.array([1]), np.array([1.5])], pa.list_(pa.int64()), 1),
        ([np.array([1.0]), np.array([1.5])], pa.list_(pa.int64()), 1),
        ([np.ones(3), np.ones(2)], VECTOR, 1),
        ([[1, 2, 3], [1, 2]], VECTOR, 1),
        ([[1, 2, 3], np.ones((3, 1))], VECTOR, 1),
        ([{"n": 1}, {"m": 1}], PAIR, 1),
        ([{"n": 1}, {"n": 1.5}], PAIR, 1),
        ([{"n": 1}, {"inner": {"t": "a"}}], PAIR, 1),
        ([[{"n": 1}], [{"m": 1}]], pa.list_(PAIR), 1),
        ([decimal.Decimal("1.1"), decimal.Decimal("1.123")], pa.decimal128(5, 2), 1),
        ([b"ok", object()], pa.binary(), 1),
        ([{"n": 1}, 7], PAIR, 1),
    ],
)
def test_a_scalar_result_that_does_not_fit_names_its_row_and_keeps_those_before(
    values: list[Any], data_type: pa.DataType, row: int
) -> None:
    with pytest.raises(UdfError, match="UDF 'f' failed with type error") as failed:
        _returning(values, data_type)
    assert failed.value.row_index == row
    assert f"row {row} of the batch" in str(failed.value)
    assert f"UDF output type: {data_type}" in str(failed.value)
    assert f"Got: {type(values[row]).__name__}" in str(failed.value)
    assert failed.value.computed is not None
    assert (failed.value.computed.type, len(failed.value.computed)) == (data_type, row)


def test_a_type_error_says_what_went_in_and_what_was_expected() -> None:
    with pytest.raises(UdfError) as failed:
        Mapper(udf(data_type=pa.float32(), name="f")(lambda a: "text"), ["x"])(_batch(x=[1], y=[2]))
    message = str(failed.value)
    assert "Input batch schema: x: int64." in message
    assert "UDF expects input_columns: ['x']." in message
    assert "UDF output type: float." in message
    assert "Got: str 'text'." in message


def test_a_fixed_size_list_of_another_length_is_named_with_both_lengths() -> None:
    with pytest.raises(UdfError, match=r"row 2 of the batch: expected a list of 3 values, got an array of 4"):
        _returning([np.ones(3), None, np.ones(4)], VECTOR)


def test_an_exception_of_a_scalar_udf_carries_its_row_its_traceback_and_the_rows_before() -> None:
    def check(x: int) -> int:
        if x == 7:
            raise KeyError("no seven")
        return x * 10

    with pytest.raises(UdfError, match="UDF 'check' raised KeyError on row 2 of a batch of 4") as failed:
        Mapper(udf(check))(_batch(x=[5, 6, 7, 8]))
    assert failed.value.row_index == 2
    assert failed.value.computed == pa.array([50, 60])
    assert isinstance(failed.value.__cause__, KeyError)
    assert 'raise KeyError("no seven")' in str(failed.value)
    assert "apply/mapper.py" not in str(failed.value)


def _recursive(depth: int, message: str) -> None:
    if depth:
        _recursive(depth - 1, message)
    raise KeyError(message)


def _effect(depth: int, message: str) -> None:
    try:
        _recursive(depth, message)
    except KeyError as cause:
        raise ValueError("effect") from cause


@pytest.mark.parametrize("fail", [_recursive, _effect])
@pytest.mark.parametrize("depth", [0, 9])
def test_the_traceback_of_a_failure_is_pythons_whether_or_not_its_lines_are_known(
    fail: Callable[[int, str], None], depth: int
) -> None:
    for message in ("first", "second", "second"):
        with pytest.raises((KeyError, ValueError)) as raised:
            fail(depth, message)
        said = describe_failure(raised.value, (), raised.value.__traceback__).traceback
        assert said == "".join(traceback.format_exception(raised.value))
        assert message in said


def test_an_exception_of_an_array_udf_carries_no_row() -> None:
    with pytest.raises(UdfError, match=r"UDF 'f' raised ValueError on a batch of 2 rows: bad\n") as failed:
        Mapper(_array_udf(lambda x: (_ for _ in ()).throw(ValueError("bad")), pa.int64()))(_batch(x=[1, 2]))
    assert failed.value.row_index is None


def test_a_class_that_cannot_be_set_up_is_a_udf_error() -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no model")

        def __call__(self, x: int) -> int:
            return x

    with pytest.raises(UdfError, match="UDF 'Broken' could not be set up: OSError"):
        Mapper(udf(Broken))(_batch(x=[1]))


@pytest.mark.parametrize("settings", [{}, {"on_error": "skip"}])
def test_a_missing_package_of_a_class_says_where_it_is_missing_and_how_to_install_it(settings: dict[str, Any]) -> None:
    class Model:
        def __init__(self) -> None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

        def __call__(self, x: int) -> int:
            return x

    python = re.escape(sys.executable)
    says = f"'scikit-learn' is not installed for {python}, the Python of this process.*-m pip install scikit-learn"
    with (
        open_batch_mapper(udf(version="1", **settings)(Model)) as mapper,
        pytest.raises(UdfError, match=says) as failed,
    ):
        mapper(_batch(x=[1]))
    assert "Traceback" not in str(failed.value)


def test_a_class_is_set_up_once_for_all_mappers_of_a_process() -> None:
    made: list[int] = []

    class Model:
        def __init__(self) -> None:
            made.append(1)

        def __call__(self, x: pa.Int64Array) -> pa.Int64Array:
            return pc.add(x, 1)

    model = udf(Model)
    for _ in range(3):
        assert Mapper(model)(_batch(x=[1])) == pa.array([2])
    assert made == [1]


def test_a_mapper_travels_as_a_pickle() -> None:
    mapper = cloudpickle.loads(cloudpickle.dumps(Mapper(_plus_one(), ["n"])))
    assert mapper(_batch(n=[1, 2])) == pa.array([2, 3])


def _plus_one() -> UDF:
    return udf(data_type=pa.int64(), name="plus_one")(lambda x: x + 1)


@pytest.mark.parametrize(
    ("result", "data_type", "expected"),
    [
        (pa.array([1, 2]), pa.int64(), [1, 2]),
        (pa.array([1, 2], pa.int32()), pa.int64(), [1, 2]),
        (pa.chunked_array([[1], [2]]), pa.int64(), [1, 2]),
        (pa.chunked_array([[1, 2]]), pa.int64(), [1, 2]),
        (pa.array([1.0, 2.0]), pa.int64(), [1, 2]),
        (pa.nulls(2), pa.string(), [None, None]),
        (pa.array(["a", "b"]), pa.large_string(), ["a", "b"]),
        (pa.array(["a", "a"]).dictionary_encode(), pa.string(), ["a", "a"]),
        (pa.array([[1.0, 2, 3]] * 2), VECTOR, [[1, 2, 3]] * 2),
        (np.array([1, 2]), pa.int64(), [1, 2]),
        (np.array([1, 2], "i1"), pa.float64(), [1, 2]),
        (np.ones((2, 3)), VECTOR, [[1, 1, 1]] * 2),
        (np.array(["a", None], object), pa.string(), ["a", None]),
        (pa.record_batch({"n": [1, 2]}), pa.struct({"n": pa.int64()}), [{"n": 1}, {"n": 2}]),
        (pa.array([{"n": 1}, None]), PAIR, [{"n": 1, "v": None, "inner": None}, None]),
    ],
)
def test_array_results_become_exactly_the_declared_type(result: Any, data_type: pa.DataType, expected: Any) -> None:
    output = Mapper(_array_udf(lambda x: result, data_type))(_batch(x=[0, 0]))
    assert isinstance(output, pa.Array)
    assert output.type == data_type
    assert output.to_pylist() == expected


@pytest.mark.parametrize(
    ("result", "data_type"),
    [
        (pa.array([1.5, 2.0]), pa.int64()),
        (pa.array([1, 300]), pa.int8()),
        (pa.array(["1", "2"]), pa.int64()),
        (pa.array([1, 2]), pa.string()),
        (pa.array([[1.0, 2], [3, 4]]), VECTOR),
        (np.ones((2, 4)), VECTOR),
        (np.array(["1", "2"]), pa.int64()),
        (np.array(1), pa.int64()),
        (pa.array([{"m": 1}, {"m": 2}]), PAIR),
        (pa.array([0, 0], pa.timestamp("us", "UTC")), pa.timestamp("us")),
        ([1, 2], pa.int64()),
        (None, pa.int64()),
        (3, pa.int64()),
    ],
)
def test_an_array_result_that_does_not_fit_is_refused(result: Any, data_type: pa.DataType) -> None:
    with pytest.raises(UdfError, match=r"(?s)UDF 'f' failed with type error: .*UDF output type: .*Got: "):
        Mapper(_array_udf(lambda x: result, data_type))(_batch(x=[0, 0]))


@pytest.mark.parametrize("result", [pa.array([1]), pa.array([1, 2, 3]), np.array([1]), pa.array([], pa.int64())])
def test_an_array_result_of_another_length_is_refused_with_both_lengths(result: Any) -> None:
    with pytest.raises(UdfError, match=rf"UDF 'f' returned {counted(len(result), 'value')} for a batch of 2 rows"):
        Mapper(_array_udf(lambda x: result, pa.int64()))(_batch(x=[0, 0]))


def test_a_parameter_annotated_as_numpy_array_gets_one_vector_a_row() -> None:
    @udf
    def norm(v: npt.NDArray[np.float32]) -> float | None:
        assert v is None or (isinstance(v, np.ndarray) and v.dtype == np.float32)
        return None if v is None else float((v * v).sum())

    column = pa.array([[9, 9, 9], [1, 2, 3], None, [0, 0, 1]], VECTOR).slice(1)
    assert Mapper(norm)(pa.record_batch({"v": column})).to_pylist() == [14.0, None, 1.0]


def test_a_slice_of_a_batch_is_mapped_as_that_slice() -> None:
    batch = _batch(x=list(range(10))).slice(4, 3)
    assert Mapper(_plus_one())(batch) == pa.array([5, 6, 7])
    assert Mapper(_array_udf(lambda x: pc.add(x, 1), pa.int64()))(batch) == pa.array([5, 6, 7])


_finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
TYPED_VALUES = st.one_of(
    st.tuples(st.just(pa.int64()), st.lists(st.none() | st.integers(-(2**63), 2**63 - 1))),
    st.tuples(st.just(pa.float64()), st.lists(st.none() | st.floats(allow_nan=False))),
    st.tuples(st.just(pa.string()), st.lists(st.none() | st.text())),
    st.tuples(st.just(pa.binary()), st.lists(st.none() | st.binary())),
    st.tuples(st.just(pa.bool_()), st.lists(st.none() | st.booleans())),
    st.tuples(st.just(pa.list_(pa.string())), st.lists(st.none() | st.lists(st.none() | st.text(max_size=3)))),
    st.tuples(st.just(pa.list_(pa.float32(), 2)), st.lists(st.none() | st.lists(_finite, min_size=2, max_size=2))),
    st.tuples(
        st.just(pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())})),
        st.lists(
            st.none()
            | st.fixed_dictionaries(
                {"a": st.none() | st.integers(0, 9), "b": st.none() | st.lists(st.text(max_size=2))}
            )
        ),
    ),
    st.tuples(st.just(pa.timestamp("us")), st.lists(st.none() | st.datetimes())),
    st.tuples(st.just(pa.decimal128(12, 3)), st.lists(st.none() | st.decimals(-1000, 1000, places=3))),
)


@settings(max_examples=150, deadline=None)
@given(TYPED_VALUES, st.integers(0, 3))
def test_mapping_equals_a_plain_loop_for_every_type(typed: tuple[pa.DataType, list[Any]], offset: int) -> None:
    data_type, values = typed
    batch = pa.record_batch({"x": pa.array(values, data_type)}).slice(offset)
    seen: list[Any] = []

    def remember(x: Any) -> Any:
        seen.append(x)
        return x

    output = Mapper(udf(data_type=data_type)(remember), ["x"])(batch)
    assert output.type == data_type
    assert seen == values[offset:]
    assert output.to_pylist() == [remember(value) for value in values[offset:]]
    assert output.equals(batch.column(0))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.none() | st.lists(_finite, min_size=2, max_size=2), max_size=6),
    st.sampled_from([pa.list_(pa.float32(), 2), pa.list_(pa.float32()), pa.large_list(pa.float64())]),
    st.sampled_from(["f4", "f8"]),
)
def test_numpy_vectors_give_what_lists_give(rows: list[Any], data_type: pa.DataType, dtype: str) -> None:
    vectors = [None if row is None else np.array(row, dtype) for row in rows]
    assert _returning(vectors, data_type).equals(_returning(rows, data_type))


def test_times_keep_their_zone_where_pyspark_pandas_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYARROW_IGNORE_TIMEZONE", "1")
    kind = pa.timestamp("s", tz="Asia/Tokyo")
    given = pa.array([0, None, 86_400], kind)
    assert array_from_values(given.to_pylist(), kind) == given
    assert os.environ["PYARROW_IGNORE_TIMEZONE"] == "1"
