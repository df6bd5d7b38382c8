"""The UDFs of the archived database, a module of its own as a user would have it.

The archive holds the hashes of this code: a change of anything but comments, docstrings, annotations and decorators of
a UDF without `version` is a change of its version.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from airflow_geneva import GenevaError, Skip, UdfCrashed, udf

TRACE = "WRITTEN_BEFORE_TRACE"
FACTOR = 3
OFFSETS = {"even": 10, "odd": 20}
EXPECTED = (GenevaError, UdfCrashed, ValueError)
POLICIES = {"skip": Skip}


def note(name: str, values: Iterable[Any]) -> None:
    """Leave the first input of every row that a UDF sees in a file."""
    path = os.environ.get(TRACE)
    if path is None:
        return
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, "".join(f"{name} {value}\n" for value in values).encode())
    finally:
        os.close(handle)


def offset(x: int) -> int:
    return OFFSETS["odd" if x % 2 else "even"]


@udf(data_type=pa.int64(), version="7")
def base(x: int) -> int:
    return 1000 + x


@udf(data_type=pa.int64())
def weight(x: int) -> int:
    """Refers to a UDF that has a version of its own."""
    return FACTOR * base(x)


def score_of(x: int) -> int:
    return weight(x) + offset(x)


@udf(data_type=pa.int64())
def score(x: pa.Int64Array) -> pa.Int64Array:
    """Refers to a UDF, helper functions and constants."""
    note("score", x.to_pylist())
    return pa.array([score_of(value) for value in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), deps=["model-1", offset])
class Doubled:
    """A class, with dependencies."""

    def __init__(self) -> None:
        self.factor = 2

    def __call__(self, x: int) -> int:
        note("doubled", [x])
        try:
            return self.factor * x
        except EXPECTED:
            return -1


class Stepper:
    """A class whose instance is the UDF."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, x: int) -> int:
        return x + self.step


add_five = udf(data_type=pa.int64(), name="add_five")(Stepper(5))


@udf(data_type=pa.int64())
def polite(x: int) -> int:
    """Refers to classes of the package, by way of a container and by the name they were imported under."""
    return len(POLICIES) + (0 if issubclass(UdfCrashed, GenevaError) else x)


@udf(data_type=pa.int64(), on_error="skip")
def picky(x: int) -> int:
    """Fails on a fifth of the rows."""
    note("picky", [x])
    if x % 5 == 3:
        raise ValueError(f"cannot do {x}")
    return -x


@udf(data_type=pa.int64(), batch_size=5)
def steady(x: pa.Int64Array) -> pa.Int64Array:
    note("steady", x.to_pylist())
    return pa.array([7 * value for value in x.to_pylist()], pa.int64())


@udf(data_type=pa.int64(), name="graded", version="1")
def graded_1(x: int) -> int:
    note("graded_1", [x])
    return 100 + x


@udf(data_type=pa.int64(), name="graded", version="2")
def graded_2(x: int) -> int:
    note("graded_2", [x])
    return 200 + x


@udf
def digits(x: int) -> Iterator[int]:
    """As many values as the last digit says, none for 0."""
    note("digits", [x])
    yield from (100 * x + at for at in range(x % 4))
