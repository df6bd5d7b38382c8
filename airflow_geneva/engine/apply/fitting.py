"""The largest batches of a UDF that fit into its device's memory, learned from calls and from earlier jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF

_Key = tuple[str, str]
_learned: dict[_Key, float] = {}
"""The largest call that fits, in the unit of the UDF's batches, by UDF and version, as this process found out."""
_inherited: dict[_Key, float] = {}
"""The same, as earlier jobs found out; set by the newest job of this process."""


def most_fitting(udf: UDF) -> float:
    """Return the largest batch that fits in the device's memory, in rows or weight; infinity if all batches fitted."""
    return min(_learned.get(_key(udf), inf), _inherited.get(_key(udf), inf))


def learn(udf: UDF, most: float) -> None:
    _learned[_key(udf)] = most


def inherit(udfs: Iterable[UDF], known: Mapping[str, float]) -> None:
    """Adopt the limits that earlier jobs of these UDF versions learned."""
    for udf in udfs:
        _inherited[_key(udf)] = known.get(_name(udf), inf)


def learned_by(udfs: Iterable[UDF]) -> dict[str, float]:
    """Return the limits that this process learned, for later jobs."""
    return {_name(udf): most for udf in udfs if (most := _learned.get(_key(udf)))}


def _key(udf: UDF) -> _Key:
    return _name(udf), udf.code_version


def _name(udf: UDF) -> str:
    return f"{udf.name} by {udf.batch_unit}"
