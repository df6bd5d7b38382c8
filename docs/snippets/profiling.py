"""A function of the page about groups."""

from __future__ import annotations

import pyarrow as pa

from airflow_geneva import udf


@udf(data_type=pa.string())
def profile_of(kind: list[str], amount: list[float]) -> str:
    """Describe a customer by all of their events, in the order of time."""
    bought = sum(one for what, one in zip(kind, amount, strict=True) if what == "buy")
    return f"{' '.join(kind)}: {bought:g}"
