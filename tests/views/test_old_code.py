"""A view follows new rows with its old code while a change of the code is not decided."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva.engine.job.folder import JobFolder, new_job_id
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.plan.model import CodeArchive
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.run.old_code import _stored_code
from airflow_geneva.engine.run.pipeline import PlannedJob, Stopwatch, run
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.run.view import plan
from airflow_geneva.engine.storage.documents import LARGEST_BYTES
from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.engine.udf.code_archive import archive_name
from airflow_geneva.errors import CodeChanged, InvalidInput
from airflow_geneva.view import View
from tests.support.tables import MakeTable

MODULE = """
import pyarrow as pa
from airflow_geneva import udf

@udf(data_type=pa.int64())
def grow(x: int) -> int:
    return x + {by}
"""


@pytest.fixture
def deploy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Deploys a module whose function adds a number, in place of the one before."""
    monkeypatch.syspath_prepend(tmp_path / "dags")
    # The bytecode of a file of the same size, written in the same second, would be taken for that of the new one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "dags" / "growing_udfs.py"
    file.parent.mkdir()

    def put(by: int) -> Any:
        file.write_text(MODULE.format(by=by))
        sys.modules.pop("growing_udfs", None)
        importlib.invalidate_caches()
        return importlib.import_module("growing_udfs").grow

    yield put
    sys.modules.pop("growing_udfs", None)


def refresh_as_airflow_does(view: View) -> None:
    """Refresh as the tasks of Airflow do, which store the code."""
    planned = plan(view.location, view.view_definition, view.source().location, RefreshRequest(new_job_id()))
    saved = record_plan(planned, view.location, store_code=True)
    job = PlannedJob(view.location, saved, planned.swap)
    run(job, planned.shards, Udfs.planned(planned.work), Stopwatch())


def values(view: View) -> list[int]:
    return sorted(view.to_arrow()["n"].to_pylist())


@pytest.mark.spark
def test_stored_code_computes_new_rows_until_it_is_decided(
    spark: object, make_table: MakeTable, deploy: Callable[[int], Any]
) -> None:
    table, grow = make_table(3), deploy(10)
    view = table.query().select(["id"]).add_columns({"n": (grow, ["x"])}).create_materialized_view(name="grown")
    refresh_as_airflow_does(view)
    old, new = grow.code_version, deploy(20).code_version
    with pytest.raises(CodeChanged, match=r'on_code_change="old_code" goes on with the old code'):
        view.refresh()
    for x in (3, 4):  # the second time the code comes from the job before
        table.add([{"id": x, "x": x}])
        if x == 3:
            with pytest.raises(InvalidInput, match=r'Use runner="spark"'):
                view.refresh(on_code_change="old_code", runner="inline")
        result = view.refresh(on_code_change="old_code")
        assert (result.state, result.rows_computed) == ("DONE", 1)
        assert values(view) == [*range(10, 11 + x)]
        (note,) = result.notes
        assert f"column 'n' with version {old}, not {new}. Decide with" in note
    idle = view.refresh(on_code_change="old_code")
    assert (idle.rows_computed, idle.commits, len(idle.notes)) == (0, (), 1)
    assert sorted(view.compare("n").to_arrow()["n.new"].to_pylist()) == [20, 21, 22, 23, 24]
    table.add([{"id": 5, "x": 5}])
    view.refresh(on_code_change="new_rows", runner="inline")
    assert values(view) == [10, 11, 12, 13, 14, 25]
    # The last code is this, and no job stored it.
    deploy(30)
    with pytest.raises(CodeChanged, match=f"it is not there: version {new} of column 'n'"):
        view.refresh(on_code_change="old_code")
    table.add_columns({"m": grow})
    with pytest.raises(InvalidInput, match="on_code_change='old_code' is unknown"):
        table.plan_backfill("m", udf=grow, on_code_change="old_code")


def test_code_that_gives_another_type_is_refused_before_it_is_called(
    make_table: MakeTable, tmp_path: Path, deploy: Callable[[int], Any]
) -> None:
    table, grow = make_table(3), deploy(10)
    view = table.query().select(["id"]).add_columns({"n": (grow, ["x"])}).create_materialized_view(name="grown")
    view.refresh(runner="inline")
    file = tmp_path / "dags" / "growing_udfs.py"
    file.write_text(MODULE.format(by="0.5").replace("int64", "float64").replace("-> int", "-> float"))
    sys.modules.pop("growing_udfs", None)
    importlib.invalidate_caches()
    for decided in ("error", "recompute", "new_rows"):
        with pytest.raises(InvalidInput, match=r"column 'n' of view 'grown': it is int64, .* gives double.*'grown_2'"):
            view.plan_refresh(on_code_change=decided)
    deploy(10)
    assert view.refresh(runner="inline").rows_computed == 0


@pytest.mark.spark
def test_stored_code_is_found_after_a_promotion(
    spark: object, make_table: MakeTable, deploy: Callable[[int], Any]
) -> None:
    table, grow = make_table(3), deploy(10)
    columns = {"id": "id", "n": "x", "n_v2": (grow, ["x"])}
    view = table.query().select(columns).create_materialized_view(name="grown")
    refresh_as_airflow_does(view)
    view.promote_column("n_v2", to="n", keep_as="n_v1")
    new = deploy(20).code_version
    for x in (3, 4):  # the second time the code comes from the job before, which was stored after the promotion
        table.add([{"id": x, "x": x}])
        result = view.refresh(on_code_change="old_code")
        assert (result.state, result.rows_computed) == ("DONE", 1)
        assert values(view) == [*range(10, 11 + x)]
        assert f"column 'n' with version {grow.code_version}, not {new}. Decide with" in result.notes[0]


@pytest.mark.parametrize(
    "archive", [b"x" * (LARGEST_BYTES + 1), None, b"another archive"], ids=["larger than a document", "gone", "changed"]
)
def test_stored_code_of_any_size_is_what_was_planned(
    make_table: MakeTable, deploy: Callable[[int], Any], archive: bytes | None
) -> None:
    """A document beside a table is smaller than an archive of code may be."""
    table, grow = make_table(3), deploy(10)
    view = table.query().select(["id"]).add_columns({"n": (grow, ["x"])}).create_materialized_view(name="grown")
    refresh_as_airflow_does(view)
    checkpoints, versions = view.location.checkpoints, (("n", grow.code_version),)
    (job,), ((work, stored),) = job_ids(checkpoints), _stored_code(checkpoints, versions)
    (name,) = stored
    folder = JobFolder.of(checkpoints, job).storage
    large = b"x" * (LARGEST_BYTES + 1)
    folder.write_bytes(archive_name("code", large), large)
    planned = CodeArchive(archive_name("code", large), sha256(large))
    assert planned.read(folder) == large
    if archive is None:
        folder.delete(name)
    else:
        folder.write_bytes(name, archive)
    assert list(_stored_code(checkpoints, versions)) == []
    assert work.codes[0].read(folder) is None
