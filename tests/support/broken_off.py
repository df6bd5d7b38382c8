"""Interrupted jobs, and files that are made to look old."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pytest

from airflow_geneva import udf
from airflow_geneva.engine import faults
from airflow_geneva.table import Table
from tests.support.counting import leave_trace, tripled

DAY = 86_400.0


def age(table: Table, days: float = 30) -> None:
    """Make every file of this package look as if it was written long ago; times inside of documents are unchanged."""
    then = time.time() - days * DAY
    for folder in ("_checkpoints", "data"):
        for base, _, files in os.walk(Path(table.uri, folder)):
            for name in files:
                os.utime(Path(base, name), (then, then), follow_symlinks=False)


@udf(data_type=pa.int64(), version="1", name="triple")
def brittle(x: int) -> int:
    leave_trace([x])
    if x == 60:
        raise RuntimeError("told to")
    return tripled(x)


@udf(data_type=pa.int64(), version="1", name="triple")
def sturdy(x: int) -> int:
    leave_trace([x])
    return tripled(x)


class Died(BaseException):
    """Stands for the end of a process that was killed."""


@contextmanager
def dies_at(point: str, surely: bool = True) -> Iterator[None]:
    """Stop what runs in this block at a fault point, and at each later passage of it, as if it were killed there.

    Args:
        surely: whether the block has to reach the point.
    """

    def die(*_: object) -> None:
        raise Died(point)

    kills = SimpleNamespace(kill=die, getpid=os.getpid)
    death = pytest.raises(Died) if surely else suppress(Died)
    with patch.multiple(faults, _ARMED=point, _hits=0, os=kills), death:
        yield
