"""A function of the page about groups that can be folded."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import udaf


@udaf(data_type=pa.float64(), state=pa.struct([("total", pa.float64()), ("count", pa.int64())]))
class Mean:
    """The mean amount of a customer."""

    def init(self) -> dict[str, Any]:
        return {"total": 0.0, "count": 0}

    def add(self, state: dict[str, Any], amount: pa.Array) -> dict[str, Any]:
        total, count = pc.sum(amount).as_py() or 0.0, pc.count(amount).as_py()
        return {"total": state["total"] + total, "count": state["count"] + count}

    def merge(self, state: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return {"total": state["total"] + other["total"], "count": state["count"] + other["count"]}

    def finish(self, state: dict[str, Any]) -> float | None:
        return state["total"] / state["count"] if state["count"] else None
