"""DAGs, triggers and XComs that Airflow kept since an earlier release, with the classes of this code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.written_before import written
from tests.written_before.written import TRACE, place

pytestmark = pytest.mark.airflow

if not written.RECORD.exists():
    pytest.skip("no release has stored its database yet", allow_module_level=True)
KEPT = written.record()["airflow"]


@pytest.fixture(autouse=True)
def _placed(airflow_db: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from tests.written_before.in_airflow import CONNECTION

    monkeypatch.setenv("AIRFLOW_CONN_LANCE_DEFAULT", CONNECTION)
    monkeypatch.setenv("WRITTEN_BEFORE_TRACE", str(TRACE))
    with place():
        written.unpack("complete", "long_view", "planned", "source", "planned_view")
        yield


def find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def class_paths(kept: Any) -> set[str]:
    """All texts that name something of the package, as far down as there are any."""
    if isinstance(kept, dict):
        task = {f"{kept['_task_module']}.{kept['task_type']}"} if "_task_module" in kept else set()
        return task.union(*(class_paths(part) for part in [*kept, *kept.values()]))
    if isinstance(kept, list):
        return set().union(*map(class_paths, kept))
    return {kept} if isinstance(kept, str) and kept.startswith("airflow_geneva.") else set()


def test_every_class_that_airflow_kept_the_name_of_is_found_by_it() -> None:
    paths = class_paths([KEPT["dag"], KEPT["triggers"], KEPT["deferred"]]) - set(MODULES)
    assert len(paths) == 10, sorted(paths)
    for path in sorted(paths):
        found = find(path)
        assert isinstance(found, type), path


MODULES = sorted(
    {f"airflow_geneva.operators.{name}" for name in ("apply", "cleanup", "columns", "commit", "finish", "plan")}
    | {"airflow_geneva.operators.plan_refresh", "airflow_geneva.operators.views"}
    | {"airflow_geneva.sensors.new_fragments", "airflow_geneva.triggers.new_fragments"}
)


def test_a_kept_dag_is_the_dag_that_is_read_now() -> None:
    import airflow
    from packaging.version import Version

    from tests.support.driving import DagSerialization
    from tests.written_before.in_airflow import every_kind_of_task

    if Version(airflow.__version__) < Version(KEPT["version"]):
        pytest.skip("Airflow reads what earlier versions kept, and not what later ones will")
    kept = DagSerialization.from_dict(KEPT["dag"])
    now = DagSerialization.from_dict(DagSerialization.to_dict(every_kind_of_task()))
    assert set(kept.task_dict) == set(now.task_dict)
    for name, task in kept.task_dict.items():
        other = now.task_dict[name]
        assert task.task_type == other.task_type
        assert set(task.template_fields) <= set(other.template_fields)
        assert task.downstream_task_ids == other.downstream_task_ids
    then, asset = kept.timetable.asset_condition, now.timetable.asset_condition
    # Its group is "lance" by now, which says where Airflow 3.4 shows the tab of a table.
    assert (then.name, then.uri, then.extra) == (asset.name, asset.uri, asset.extra)


@pytest.mark.parametrize("kept", KEPT["triggers"], ids=lambda kept: kept[1].get("asset", "plain"))
def test_a_kept_trigger_is_the_same_trigger(kept: Any) -> None:
    path, arguments = kept
    assert json.loads(json.dumps(find(path)(**arguments).serialize())) == kept


def test_the_triggers_are_kept_as_they_were() -> None:
    from tests.written_before.in_airflow import deferred, triggers

    assert json.loads(json.dumps(triggers())) == KEPT["triggers"]
    assert json.loads(json.dumps(deferred())) == KEPT["deferred"]


def test_a_sensor_that_was_deferred_goes_on() -> None:
    from airflow_geneva.sensors import NewFragmentsSensor

    kept = KEPT["deferred"]
    assert json.loads(json.dumps(find(kept["classpath"])(**kept["kwargs"]).serialize()[1])) == kept["kwargs"]
    sensor = NewFragmentsSensor(task_id="wait", table="complete", since=1)
    said = {"table": "complete", "version": 3}
    assert getattr(sensor, kept["method"])({}, said) == said


@pytest.mark.parametrize(("group", "table"), [("backfill", "planned"), ("refresh", "planned_view")])
def test_a_run_that_was_planned_goes_on_or_says_which_task_to_clear(group: str, table: str) -> None:
    from tests.written_before.in_airflow import go_on

    found = go_on(KEPT[group], table)
    if found["run"] == "success":
        assert found == KEPT["rest"][group]
    else:
        assert found["calls"] == []
        assert found["errors"]
        assert all("Clear the plan task" in error for error in found["errors"])


def test_the_pages_show_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.browsing import browsing, of_job, text_of
    from tests.support.rights import Rights
    from tests.written_before.in_airflow import CONNECTION

    monkeypatch.setenv("AIRFLOW_CONN_SHELF", CONNECTION)
    written.unpack("killed", "skipped")
    for get in browsing(monkeypatch):
        Rights.give("reader", connections=["shelf"])
        (killed,) = written.database().jobs(table="killed")
        page = text_of(get(of_job("killed", killed.id)))
        assert all(text in page for text in ("RUNNING", "dead", "steady", killed.udf_version))
        (skipped,) = written.database().jobs(table="skipped")
        assert "cannot do 38" in text_of(get(of_job("skipped", skipped.id)))
