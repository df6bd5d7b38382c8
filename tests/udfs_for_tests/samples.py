"""UDFs of every form, decorated as a user would."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.udf import udf

NOT_A_UDF = 3


@udf(data_type=pa.int64())
def length(text: str) -> int:
    """Count the characters."""
    return len(text)


@udf
def double(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 2)


@udf(data_type=pa.string(), input_columns=["a", "b"])
def describe(batch: pa.RecordBatch) -> pa.Array:
    return pa.array([str(row) for row in batch.to_pylist()])


@udf
class Counter:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def __call__(self, x: int) -> int:
        return x + 1


class Adder:
    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, x: int) -> int:
        return x + self.step


add_five = udf(data_type=pa.int64(), name="add_five")(Adder(5))


def undecorated(x: int) -> int:
    return x


wrapped_later = udf(undecorated)


@udf(data_type=pa.int64())
def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)
