"""Annotations: the form they give, the types they determine, and what they refuse."""

from __future__ import annotations

import datetime
import decimal
import functools
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar, Union

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from typing_extensions import TypeAliasType

from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_result, array_from_values
from airflow_geneva.engine.udf import udf
from airflow_geneva.engine.udf.annotations import accepts, check_inputs
from airflow_geneva.engine.udf.signature import UNKNOWN, without_aliases
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    from somewhere import NotImportable


def _scalar(x: int, y: str) -> int: ...
def _optional(x: int | None, y: Optional[str]) -> int: ...  # noqa: UP045
def _bare(x, y): ...
def _array(x: pa.Int64Array, y: pa.Array) -> pa.Int64Array: ...
def _optional_array(x: pa.Int64Array | None, y) -> pa.Int64Array: ...
def _batch(batch: pa.RecordBatch) -> pa.Array: ...
def _unresolved(x: int, y: NotImportable) -> int: ...


class _Model:
    def __call__(self, x: pa.StringArray) -> pa.Int64Array: ...


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (_scalar, "scalar"),
        (_optional, "scalar"),
        (_bare, "scalar"),
        (_unresolved, "scalar"),
        (lambda x: x, "scalar"),
        (functools.partial(_scalar, y="b"), "scalar"),
        (_array, "array"),
        (_optional_array, "array"),
        (_Model, "array"),
        (_Model(), "array"),
        (_Model().__call__, "array"),
        (_batch, "record_batch"),
    ],
)
def test_annotations_give_the_form(function: Callable[..., Any], form: str) -> None:
    assert udf(data_type=pa.int64(), name="f")(function).form == form


def _returns(annotation: Any, of: Any) -> Callable[..., Any]:
    def function(x: Any) -> Any: ...

    function.__annotations__ |= {"x": of, "return": annotation}
    return function


@pytest.mark.parametrize("data_type", [pa.int64(), pa.string(), pa.list_(pa.float32(), 2)])
@pytest.mark.parametrize("annotation", [np.ndarray, npt.NDArray[Any], np.ndarray | None, pa.Array | np.ndarray])
def test_a_numpy_array_for_a_whole_batch_holds_values_of_every_type(annotation: Any, data_type: pa.DataType) -> None:
    assert udf(data_type=data_type)(_returns(annotation, pa.Array)).data_type == data_type


@pytest.mark.parametrize(
    ("annotation", "of", "data_type"),
    [
        (npt.NDArray[np.float64], pa.Array, pa.float32()),
        (npt.NDArray[np.float64], pa.Array, pa.list_(pa.float32(), 2)),
        (npt.NDArray[np.float64], str, pa.list_(pa.list_(pa.float32()))),
        (npt.NDArray[np.float32] | None, pa.Array, pa.int64()),
        (npt.NDArray[np.int64], pa.RecordBatch, pa.decimal128(38, 0)),
        (npt.NDArray[np.int64], str, pa.list_(pa.timestamp("us"))),
        (npt.NDArray[np.str_], pa.Array, pa.dictionary(pa.int32(), pa.large_string())),
        (npt.NDArray[np.str_], str, pa.list_(pa.binary())),
        (npt.NDArray[np.datetime64], pa.Array, pa.timestamp("us")),
        (npt.NDArray[np.object_], pa.Array, pa.string()),
        (npt.NDArray[np.floating[Any]], pa.Array, pa.float32()),
        (npt.NDArray[np.int64], pa.Array, pa.map_(pa.int64(), pa.int64())),
        (npt.NDArray[np.int64] | npt.NDArray[np.str_], pa.Array, pa.string()),
        (npt.NDArray[np.int64] | list[str], str, pa.list_(pa.string())),
    ],
)
def test_a_numpy_array_may_hold_what_a_cast_that_loses_nothing_makes_of_it(
    annotation: Any, of: Any, data_type: pa.DataType
) -> None:
    assert udf(data_type=data_type)(_returns(annotation, of)).data_type == data_type


@pytest.mark.parametrize(
    ("annotation", "of", "data_type"),
    [
        (npt.NDArray[np.int64], pa.Array, pa.string()),
        (npt.NDArray[np.int64] | None, pa.RecordBatch, pa.list_(pa.string())),
        (npt.NDArray[np.int64], str, pa.list_(pa.string())),
        (npt.NDArray[np.int64], pa.Array, pa.bool_()),
        (npt.NDArray[np.int64], pa.Array, pa.timestamp("us")),
        (npt.NDArray[np.int64], pa.Array, pa.struct({"n": pa.int64()})),
        (pa.Int64Array | npt.NDArray[np.int64], pa.Array, pa.string()),
    ],
)
def test_the_items_of_a_numpy_array_that_contradict_the_type_are_refused(
    annotation: Any, of: Any, data_type: pa.DataType
) -> None:
    with pytest.raises(InvalidInput, match=r"annotated as .*NDArray\[int64\].* and data_type is .*Make them agree"):
        udf(data_type=data_type)(_returns(annotation, of))


_ONES = {kind: np.ones(2, kind) for kind in (np.int64, np.uint8, np.float32, np.float64)} | {
    np.str_: np.array(["a", "b"]),
    np.bytes_: np.array([b"a", b"b"]),
    np.bool_: np.array([True, True]),
}
_ITEMS = (
    *(pa.int8(), pa.int64(), pa.uint16(), pa.float16(), pa.float64(), pa.bool_(), pa.decimal128(5, 2)),
    *(pa.string(), pa.large_string(), pa.binary(), pa.binary(1), pa.dictionary(pa.int32(), pa.string())),
    *(pa.timestamp("us"), pa.date32(), pa.time64("us"), pa.duration("us"), pa.struct({"a": pa.int64()})),
)


@pytest.mark.parametrize("kind", _ONES)
def test_no_numpy_result_is_refused_that_could_be_stored(kind: type) -> None:
    ones = _ONES[kind]
    refused = 0
    for item in _ITEMS:
        for of, data_type, result in (
            (pa.Array, item, ones),
            (pa.Array, pa.list_(item), np.stack([ones, ones])),
            (str, pa.list_(item), [ones, None]),
            (str, pa.list_(pa.list_(item)), [np.stack([ones, ones]), None]),
        ):
            try:
                udf(data_type=data_type)(_returns(npt.NDArray[kind], of))  # type: ignore[valid-type]
            except InvalidInput:
                refused += 1
                make = array_from_values if of is str else array_from_result
                with pytest.raises(OutputMismatch):
                    make(result, data_type)
    assert refused


def test_a_numpy_array_for_one_row_is_a_list() -> None:
    def function(x: str) -> np.ndarray: ...

    with pytest.raises(InvalidInput, match="annotated as ndarray and data_type is int64"):
        udf(data_type=pa.int64())(function)


def test_the_parameters_of_a_class_or_a_partial_are_those_still_to_be_given() -> None:
    assert udf(_Model).resolve_inputs() == ("x",)
    assert udf(data_type=pa.int64(), name="f")(functools.partial(_scalar, 1)).resolve_inputs() == ("y",)


def test_an_annotation_that_cannot_be_resolved_does_not_take_the_others_with_it() -> None:
    made = udf(_unresolved)
    assert made.data_type == pa.int64()
    assert made.signature.annotations == {"x": int}


def test_annotations_of_a_local_type_are_resolved() -> None:
    class Local: ...

    def function(x: Local) -> int:
        return Local and 1

    assert udf(function).signature.annotations["x"] is Local


def _mixed(x: pa.Array, y: int) -> pa.Int64Array: ...
def _mixed_batch(batch: pa.RecordBatch, y: pa.Array) -> pa.Int64Array: ...
def _table(x: pa.Table) -> pa.Array: ...
def _chunked(x: pa.ChunkedArray) -> pa.Array: ...
def _nothing() -> int: ...
def _keyword(x: int, *, y: int) -> int: ...
async def _async_generator(x: int) -> Any:
    yield x


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_mixed, "mixes forms: 'x' as array, 'y' as scalar"),
        (_mixed_batch, "mixes forms"),
        (_table, "Annotate it as pa.RecordBatch"),
        (_chunked, "Annotate it as pa.Array"),
        (_nothing, "has no parameters"),
        (_keyword, "keyword-only parameter 'y'"),
        (_async_generator, "is an async generator"),
    ],
)
def test_what_cannot_be_called_on_columns_is_refused(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        udf(data_type=pa.int64())(function)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("annotation", "data_type"),
    [
        (int, pa.int64()),
        (float, pa.float64()),
        (str, pa.string()),
        (bool, pa.bool_()),
        (bytes, pa.binary()),
        (datetime.datetime, pa.timestamp("us")),
        (datetime.date, pa.date32()),
        (int | None, pa.int64()),
        (list[str], pa.list_(pa.string())),
        (np.float32, pa.float32()),
        (pa.Int8Array, pa.int8()),
        (pa.StringArray, pa.string()),
    ],
)
def test_the_result_annotation_determines_the_output_type(annotation: Any, data_type: pa.DataType) -> None:
    def function(x: Any) -> Any: ...

    function.__annotations__["return"] = annotation
    assert udf(function).data_type == data_type


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        (decimal.Decimal, "annotated as Decimal"),
        (dict, "annotated as dict"),
        (typing.List, "annotated as"),  # noqa: UP006
        (int | str, "does not determine one"),
        (pa.ListArray, "annotated as ListArray"),
        (pa.Array, "Cannot validate generic pa.Array type"),
    ],
)
def test_a_result_annotation_that_determines_no_type_needs_data_type(annotation: Any, says: str) -> None:
    def function(x: Any) -> Any: ...

    function.__annotations__["return"] = annotation
    with pytest.raises(InvalidInput, match=r"data_type=\.\.\.") as refused:
        udf(function)
    assert says in str(refused.value)


def test_a_result_annotation_that_contradicts_the_type_is_refused() -> None:
    def text(x: int) -> str: ...
    def number(x: int) -> int: ...
    def vector(x: str) -> list[float]: ...

    with pytest.raises(InvalidInput, match="Type mismatch for the output of UDF 'text'"):
        udf(data_type=pa.int64())(text)
    assert udf(data_type=pa.float32())(number).data_type == pa.float32()
    assert udf(data_type=pa.list_(pa.float32(), 3))(vector).data_type == pa.list_(pa.float32(), 3)


@pytest.mark.parametrize(
    ("annotation", "data_type", "answer"),
    [
        (int, pa.int8(), True),
        (int, pa.string(), False),
        (int, pa.float64(), False),
        (float, pa.int32(), True),
        (float, pa.float16(), True),
        (float, pa.decimal128(5, 2), False),
        (str, pa.large_string(), True),
        (str, pa.dictionary(pa.int32(), pa.string()), True),
        (str, pa.binary(), False),
        (bytes, pa.large_binary(), True),
        (bytes, pa.binary(16), True),
        (bool, pa.int8(), False),
        (datetime.datetime, pa.timestamp("ns", "UTC"), True),
        (datetime.datetime, pa.date32(), False),
        (decimal.Decimal, pa.decimal256(50, 2), True),
        (list[int], pa.list_(pa.int8()), True),
        (list[int], pa.list_(pa.string()), False),
        (list[list[float]], pa.list_(pa.list_(pa.float32(), 2)), True),
        (list, pa.int64(), False),
        (Sequence[str], pa.list_(pa.string()), True),
        (Sequence[str], pa.string(), True),
        (np.ndarray, pa.list_(pa.float32(), 3), True),
        (npt.NDArray[np.float32], pa.list_(pa.float32(), 3), True),
        (np.ndarray, pa.string(), False),
        (dict, pa.struct({"a": pa.int64()}), True),
        (dict[str, int], pa.string(), False),
        (int | None, pa.string(), False),
        (Union[int, str], pa.string(), True),  # noqa: UP007
        (pa.Array, pa.string(), True),
        (pa.Int64Array, pa.int64(), True),
        (pa.Int64Array, pa.int32(), False),
        (pa.ListArray, pa.list_(pa.int8()), True),
        (pa.FixedSizeListArray, pa.list_(pa.int8()), False),
        (int, pa.null(), True),
        (Any, pa.string(), None),
        (object, pa.string(), None),
        ("Unknown", pa.string(), None),
    ],
)
def test_annotations_are_checked_against_column_types(annotation: Any, data_type: pa.DataType, answer: Any) -> None:
    assert accepts(without_aliases(annotation), data_type) is answer


T = TypeVar("T")
Float32s = npt.NDArray[np.float32]
Vector = TypeAliasType("Vector", Float32s)
Maybe = TypeAliasType("Maybe", Union[T, None], type_params=(T,))  # noqa: UP007
Rows = TypeAliasType("Rows", Maybe[list[T]], type_params=(T,))
Count = TypeAliasType("Count", Annotated[int, "rows"])
Ids = TypeAliasType("Ids", pa.Int64Array)


@pytest.mark.parametrize(
    ("annotation", "stands_for"),
    [
        (Vector, Float32s),
        (Optional[Vector], Optional[Float32s]),  # noqa: UP045
        (Maybe[Vector], Optional[Float32s]),  # noqa: UP045
        (Vector | str, Union[Float32s, str]),  # noqa: UP007
        (Rows[Rows[Count]], Optional[list[Optional[list[int]]]]),  # noqa: UP045
        (Rows, Optional[list[T]]),  # noqa: UP045
        (Sequence[Count], Sequence[int]),
        (tuple[Count, ...], tuple[int, ...]),
        (Callable[[int], Count], Callable[[int], Count]),
        (Literal["a", 1], Literal["a", 1]),
    ],
)
def test_a_type_alias_is_what_it_stands_for(annotation: Any, stands_for: Any) -> None:
    assert without_aliases(annotation) == without_aliases(stands_for)
    assert without_aliases(Vector).__origin__ is np.ndarray


def _aliased(x: Optional[Ids], y: Ids) -> Ids: ...  # noqa: UP045
def _aliased_vector(x: Vector, y: Maybe[Count]) -> Rows[Count]: ...


def test_aliases_give_the_form_and_the_types_and_are_checked() -> None:
    made = udf(_aliased)
    assert (made.form, made.data_type) == ("array", pa.int64())
    made = udf(_aliased_vector)
    assert (made.form, made.data_type) == ("scalar", pa.list_(pa.int64()))
    schema = pa.schema({"x": pa.list_(pa.float32()), "y": pa.int64(), "z": pa.string()})
    check_inputs(made, schema, ["x", "y"], "docs")
    with pytest.raises(InvalidInput, match=r"column 'z' of table 'docs': it is string, .* takes NDArray"):
        check_inputs(made, schema, ["z", "y"], "docs")
    with pytest.raises(InvalidInput, match=r"column 'z' of table 'docs': it is string, .* takes int"):
        check_inputs(made, schema, ["x", "z"], "docs")
    with pytest.raises(InvalidInput, match=r"annotated as NDArray\[float\] and data_type is string"):
        udf(data_type=pa.string())(_returns(Vector, str))


def _evaluated_late(value: Callable[[], Any]) -> Any:
    """What Python 3.12 makes of `type X = ...`, on every Python."""
    return type("TypeAliasType", (), {"__value__": property(lambda _: value()), "__type_params__": ()})()


def test_an_alias_may_contain_itself_or_what_cannot_be_imported() -> None:
    nested = _evaluated_late(lambda: dict[str, nested] | list[nested] | str)
    missing = _evaluated_late(lambda: list[NotImportable])
    made = udf(data_type=pa.int64())(_returns(missing, nested))
    assert made.signature.result is UNKNOWN
    check_inputs(made, pa.schema({"x": pa.list_(pa.list_(pa.string()))}), None, "docs")
    with pytest.raises(InvalidInput, match="Type mismatch for column 'x'"):
        check_inputs(made, pa.schema({"x": pa.int64()}), None, "docs")


def test_an_annotation_with_more_to_say_counts_as_its_type() -> None:
    def function(x: Annotated[int, "rows"]) -> int: ...

    with pytest.raises(InvalidInput, match="Type mismatch for column 'x'"):
        check_inputs(udf(function), pa.schema({"x": pa.string()}), None, "docs")


SCHEMA = pa.schema({"id": pa.int64(), "text": pa.string(), "meta": pa.struct({"author": pa.string()})})


def test_inputs_that_fit_are_accepted() -> None:
    check_inputs(udf(_scalar), SCHEMA, ["id", "text"], "docs")
    check_inputs(udf(_array), SCHEMA, ["id", "text"], "docs")
    check_inputs(udf(data_type=pa.int64())(_batch), SCHEMA, None, "docs")
    check_inputs(udf(data_type=pa.int64())(_bare), SCHEMA, ["meta", "id"], "docs")


def test_a_missing_input_column_is_named_beside_those_there_are() -> None:
    with pytest.raises(
        InvalidInput, match=r"expects input columns \['x', 'y'\] which are not found in table 'docs'"
    ) as e:
        check_inputs(udf(_scalar), SCHEMA, None, "docs")
    assert "['id', 'text', 'meta']" in str(e.value)
    with pytest.raises(InvalidInput, match=r"expects input columns \['b'\] which are not found"):
        check_inputs(udf(data_type=pa.int64())(_batch), SCHEMA, ["id", "b"], "docs")


def test_a_field_of_a_struct_is_checked_as_a_column_is() -> None:
    authors = pa.schema([*SCHEMA, pa.field("by", pa.struct({"name": pa.string(), "age": pa.int64()}))])
    check_inputs(udf(_scalar), authors, ["by.age", "by.name"], "docs")
    with pytest.raises(InvalidInput, match=r"Type mismatch for column 'by\.name' of table 'docs': it is string"):
        check_inputs(udf(_scalar), authors, ["by.name", "text"], "docs")
    with pytest.raises(InvalidInput, match=r"'by' is struct<.*: give a field of a struct as 'column\.field'"):
        check_inputs(udf(_scalar), authors, ["id", "by.nobody"], "docs")


def test_a_column_of_another_type_is_refused_with_both_types() -> None:
    with pytest.raises(InvalidInput, match="Type mismatch for column 'text' of table 'docs': it is string") as refused:
        check_inputs(udf(_scalar), SCHEMA, ["text", "text"], "docs")
    assert "takes int there" in str(refused.value)
    with pytest.raises(InvalidInput, match=r"Type mismatch for column 'text'.*Int64Array"):
        check_inputs(udf(_array), SCHEMA, ["text", "id"], "docs")
