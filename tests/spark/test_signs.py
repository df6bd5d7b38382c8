"""The signs of life of a driver, as its tasks read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.spark import signs
from airflow_geneva.spark.signs import DriverLost, DriverSigns


def test_a_driver_that_could_not_write_in_an_outage_is_not_lost_before_it_had_time_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(signs.time, "monotonic", lambda: now)
    driver, task = DriverSigns(Storage.at(str(tmp_path))), DriverSigns(Storage.at(str(tmp_path)))
    driver.write()
    task.read()
    now += 200
    task.read()
    driver.write()
    now += 31
    task.read()
    now += 121
    task.read()
    now += 31
    with pytest.raises(DriverLost, match="no sign of life"):
        task.read()
