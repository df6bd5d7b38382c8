"""Functions of a view's columns, each with a trace of its own and in any code version."""

from __future__ import annotations

from typing import Any

import lance
import pyarrow as pa

from airflow_geneva.engine.udf import UDF, udf
from tests.support.counting import leave_trace

IN_FLIGHT = 2


def value(name: str, code: int, *inputs: int | None) -> int:
    """Return the value that a function computes from its inputs."""
    return 1_000_000 * code + 100 * len(name) + sum(-1 if one is None else one for one in inputs)


def is_bad(first: int | None) -> bool:
    return first is not None and first % 10 == 7


def deploy(name: str, code: int, inputs: str = "x", fails: bool = False, **settings: Any) -> UDF:
    """Put a version of a scalar function, which records its first input, where its import path finds it.

    A function that `fails` skips some rows. It is async, because other functions with an error policy are imported by
    another process, which does not have the version.
    """

    def compute(*given: int | None) -> int:
        leave_trace(given[:1], f".{name}")
        if fails and is_bad(given[0]):
            raise ValueError(f"not {given[0]}")
        return value(name, code, *given)

    made: dict[str, Any] = {"compute": compute}
    word = "async def" if fails else "def"
    exec(f"{word} {name}({inputs}):\n    return compute({inputs})", made)  # the inputs are named like the parameters
    made[name].__module__ = __name__
    settings = {
        "data_type": pa.int64(),
        **({"on_error": "skip", "max_in_flight": IN_FLIGHT} if fails else {}),
        **settings,
    }
    found = udf(version=str(code), name=name, **settings)(made[name])
    globals()[name] = found
    return found


@udf(version="1")
def parts(x: int) -> list[str]:
    """As many values as the last digit says, none for 0."""
    leave_trace([x], ".parts")
    return [f"{x}-{at}" for at in range(x % 10)]


@udf(data_type=pa.struct([("low", pa.int64()), ("high", pa.string())]), version="1")
def ends(x: int) -> dict[str, Any]:
    """Fills two columns."""
    leave_trace([x], ".ends")
    return {"low": x, "high": f"high {x}" if x % 3 else None}


@udf(data_type=lance.blob_field("").type, version="1")
def picture(x: int) -> bytes | None:
    leave_trace([x], ".picture")
    return bytes(x) if x % 3 else None
