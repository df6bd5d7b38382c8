"""The measured UDFs; our side and the baseline call the same functions."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udf

DIMENSIONS = 384
VECTOR = pa.list_(pa.float32(), DIMENSIONS)
SECONDS_A_ROW = 0.001
LOADING_SECONDS = 4.0

_WEIGHTS = np.linspace(-1, 1, DIMENSIONS, dtype=np.float32)


@udf(data_type=pa.int64())
def double(x: pa.Int64Array) -> pa.Int64Array:
    return pc.multiply(x, 2)


@udf(data_type=pa.int64())
def length(text: str) -> int:
    return len(text)


@udf(data_type=pa.binary())
def backwards(x: pa.Array) -> pa.Array:
    return pc.binary_reverse(x)


@udf(data_type=VECTOR)
def embed(x: pa.Int64Array) -> pa.Array:
    flat = (x.to_numpy()[:, None] * _WEIGHTS).astype(np.float32).ravel()
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=VECTOR)


@udf(data_type=VECTOR)
def slow_embed(x: int) -> npt.NDArray[np.float32]:
    time.sleep(SECONDS_A_ROW)
    return np.float32(x) * _WEIGHTS


@udf(data_type=pa.float64())
def waits(cost: float) -> float:
    time.sleep(cost)
    return cost


@udf(data_type=pa.float64(), on_error="skip")
def waits_or_fails(cost: float, id: int) -> float:
    time.sleep(cost)
    if id % 5 == 0:
        raise ValueError(id)
    return cost


@udf(data_type=pa.float64())
class WaitsAfterLoading:
    def __init__(self) -> None:
        time.sleep(LOADING_SECONDS)

    def __call__(self, cost: float) -> float:
        time.sleep(cost)
        return cost


@udf(data_type=pa.float64())
def slope(moment: pa.Int64Array, amount: pa.Int64Array) -> float:
    moments, amounts = moment.to_numpy(), amount.to_numpy()
    return float((amounts[-1] - amounts[0]) / max(moments[-1] - moments[0], 1))
