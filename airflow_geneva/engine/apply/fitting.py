"""The largest batches of a UDF that fit into its device's memory: those that this process learned from its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from airflow_geneva.engine.process_memo import ProcessMemo

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF

_Key = tuple[str, str]
_learned: ProcessMemo[_Key, float] = ProcessMemo(1024)
"""The largest call that fits, in the unit of the UDF's batches, by UDF and version. It is the process's: its calls
share a device's memory, and a worker of Spark learns once for all shards and jobs."""


def most_fitting(udf: UDF, known: float = inf) -> float:
    """Return the largest batch that fits in the device's memory, in rows or weight; infinity if all batches fitted.

    `known` is the largest batch that fitted in earlier jobs.
    """
    return min(_learned.get(_key(udf), inf), known)


def learn(udf: UDF, most: float) -> None:
    _learned[_key(udf)] = most


def known_to_fit(udf: UDF, known: Mapping[str, float]) -> float:
    """Return the largest batch of a UDF among the limits that `learned_by` returned in earlier jobs."""
    return known.get(_name(udf), inf)


def learned_by(udfs: Iterable[UDF]) -> dict[str, float]:
    """Return the limits that this process learned, for later jobs."""
    return {_name(udf): most for udf in udfs if (most := _learned.get(_key(udf)))}


def _key(udf: UDF) -> _Key:
    return _name(udf), udf.code_version


def _name(udf: UDF) -> str:
    return f"{udf.name} by {udf.batch_unit}"
