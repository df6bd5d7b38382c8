"""How large the calls of a UDF may be for its device's memory, as calls and earlier jobs found out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_geneva.engine.udf import UDF

_Key = tuple[str, str]
_learned: dict[_Key, float] = {}
"""The largest call that fits, in the unit of the UDF's batches, by UDF and version: what this process found out."""
_inherited: dict[_Key, float] = {}
"""The same, as the newest job of this process was told."""


def most_fitting(udf: UDF) -> float:
    """Return the largest call for which the device's memory is known to suffice: rows, or weight if it has weights."""
    return min(_learned.get(_key(udf), inf), _inherited.get(_key(udf), inf))


def learn(udf: UDF, most: float) -> None:
    _learned[_key(udf)] = most


def inherit(udfs: Iterable[UDF], known: Mapping[str, float]) -> None:
    """Take over what earlier jobs of these UDF versions found out."""
    for udf in udfs:
        _inherited[_key(udf)] = known.get(_name(udf), inf)


def learned_by(udfs: Iterable[UDF]) -> dict[str, float]:
    """Return what this process found out, for the next jobs."""
    return {_name(udf): most for udf in udfs if (most := _learned.get(_key(udf)))}


def _key(udf: UDF) -> _Key:
    return _name(udf), udf.code_version


def _name(udf: UDF) -> str:
    return f"{udf.name} by {udf.batch_unit}"
