"""Two models of one column; each value says which model made it, and each call leaves a line in a file."""

from __future__ import annotations

import os

import pyarrow as pa

from airflow_geneva import udf

TRACE = "GENEVA_MODEL_CALLS"
VECTOR = pa.list_(pa.float32(), 2)


def _note(model: int, x: int) -> list[float]:
    with open(os.environ[TRACE], "a") as trace:
        trace.write(f"{model} {x}\n")
    return [float(model), float(x)]


@udf(data_type=VECTOR, version="1")
def first_model(x: int) -> list[float]:
    return _note(1, x)


@udf(data_type=VECTOR, version="2")
def second_model(x: int) -> list[float]:
    return _note(2, x)
