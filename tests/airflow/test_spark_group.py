"""`BackfillTaskGroup` with a real spark-submit."""

from __future__ import annotations

import glob
import os
import tempfile

import pytest

from tests.airflow.conftest import Desk
from tests.airflow.driving import Driver, events
from tests.airflow.test_backfill_group import make_dag

pytestmark = [pytest.mark.airflow, pytest.mark.spark]


def test_a_shard_is_computed_by_spark_with_the_code_that_was_planned(desk: Desk) -> None:
    desk.append("ab")
    desk.define(n="length")
    run = Driver.trigger(make_dag(desk, inline_below_rows=0, shard_size=None)).go()
    assert run.state == "success", run.states()
    assert len(desk.calls()) == 20
    assert set(desk.values().values()) == {3}
    assert len(events(desk.asset)) == 1
    assert glob.glob(os.path.join(tempfile.gettempdir(), "airflow-geneva-2*")) == []
