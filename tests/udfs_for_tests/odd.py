"""UDFs whose inputs, results and exits are odd in some rows: those whose number is odd."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.udf import UDF, udf

_Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


class Raises:
    """A list that raises an exception when its items are read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Any:
        raise self.error


def leave(code: Any) -> Any:
    sys.exit(code)


def panic() -> Any:
    raise _Panic("index out of bounds")


# What a function does on odd rows, by name; None lets it raise nothing, and return `ODD_RESULTS` instead.
EXITS = {"exits": lambda: leave(0), "exits with a text": lambda: leave("no"), "panics": panic}
ODD_RESULTS = {
    "KeyError": Raises(KeyError("no item")),
    "ValueError": Raises(ValueError("no item")),
    "SystemExit": Raises(SystemExit(0)),
}


def act(how: str, x: int) -> Any:
    if x % 2:
        return EXITS[how]() if how in EXITS else ODD_RESULTS[how]
    return [x]


def numbers(form: str, how: str, **settings: Any) -> UDF:
    """Make a UDF that returns `[x]`, and on odd rows does what `how` says."""

    def scalar(x: int) -> Any:
        return act(how, x)

    async def awaited(x: int) -> Any:
        return act(how, x)

    def array(x: pa.Array) -> pa.Array:
        return _objects([act(how, one) for one in x.to_pylist()])

    def record_batch(batch: pa.RecordBatch) -> pa.Array:
        return _objects([act(how, one) for one in batch.column("x").to_pylist()])

    function: Any = {"scalar": scalar, "async": awaited, "array": array, "record_batch": record_batch}[form]
    return udf(data_type=pa.list_(pa.int64()), name="f", version=f"{form}-{how}".replace(" ", "_"), **settings)(
        function
    )


def _objects(values: list[Any]) -> Any:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def spoiled(kind: str, numbers: list[int]) -> pa.Array:
    """Make an array that is not valid in the rows of odd numbers."""
    rows = len(numbers)
    texts = pa.array([b"\xff" if x % 2 else b"%d" % x for x in numbers], pa.binary())
    text = pa.Array.from_buffers(pa.string(), rows, texts.buffers())
    codes = pa.DictionaryArray.from_arrays(pa.array([x % 2 * 9 for x in numbers], pa.int8()), ["a"], safe=False)
    cuts = pa.array(range(rows + 1), pa.int32())
    if kind == "text":
        return text
    if kind == "dictionary":
        return codes
    if kind == "list":
        return pa.ListArray.from_arrays(cuts, text)
    if kind == "map":
        return pa.MapArray.from_arrays(cuts, pa.array(["k"] * rows, pa.string()), text)
    if kind == "struct":
        return pa.StructArray.from_arrays([text, codes], ["a", "b"])
    assert kind == "dictionary of text"
    return pa.DictionaryArray.from_arrays(pa.array(range(rows), pa.int32()), text)


SPOILED = ("text", "dictionary", "list", "map", "struct", "dictionary of text")


def spoiling(form: str, kind: str, **settings: Any) -> UDF:
    def array(x: pa.Array) -> pa.Array:
        return spoiled(kind, x.to_pylist())

    def record_batch(batch: pa.RecordBatch) -> pa.Array:
        return spoiled(kind, batch.column("x").to_pylist())

    function: Any = {"array": array, "record_batch": record_batch}[form]
    return udf(data_type=spoiled(kind, []).type, name="f", version=f"{form}-{kind}".replace(" ", "_"), **settings)(
        function
    )


def shows(form: str, **settings: Any) -> UDF:
    """Make a UDF that shows its input."""

    def scalar(x: Any) -> str:
        return repr(x)

    async def awaited(x: Any) -> str:
        return repr(x)

    function: Any = {"scalar": scalar, "async": awaited}[form]
    return udf(name="f", version=form, **settings)(function)
