"""A device that fails fails no row, and a row that breaks its device fails alone; models are loaded once."""

from __future__ import annotations

import gc
import os
import socket
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import TaskContext

from airflow_geneva import Table
from airflow_geneva.engine.apply.isolation.process import POOL
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.udf import UDF, load_udf, udf
from airflow_geneva.engine.udf.decorator import release_instances
from airflow_geneva.engine.udf.shipping import UdfReference
from airflow_geneva.errors import DeviceFailed, InvalidInput, JobFailed, UdfError
from airflow_geneva.spark import tasks
from tests.udfs_for_tests import devices
from tests.udfs_for_tests.devices import ASSERTS, ECC, HANGS, broken, loads

MakeTable = Callable[..., Table]
HERE = f"The device of host {socket.gethostname()}, CUDA_VISIBLE_DEVICES=all, failed."


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "_failed", False)
    release_instances("tests")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    for child in list(POOL.idle):
        child.close()


def run(function: UDF, values: Sequence[int], folder: Path | None = None) -> MappedBatch:
    columns = {"x": pa.array(values, pa.int64())} | ({"folder": [str(folder)] * len(values)} if folder else {})
    with open_batch_mapper(function) as mapper:
        return mapper(pa.record_batch(columns))


@pytest.mark.slow
@pytest.mark.parametrize("function", [devices.array, devices.scalar], ids=["array", "scalar"])
def test_a_row_that_breaks_its_device_fails_alone(function: UDF, tmp_path: Path) -> None:
    mapped = run(function, [1, 2, ASSERTS, 3, 4], tmp_path)
    assert mapped.values.to_pylist() == [10, 20, None, 30, 40]
    assert [(failure.index, failure.exception) for failure in mapped.failures] == [
        (2, "airflow_geneva.errors.UdfCrashed")
    ]
    assert "ended because its device failed (RuntimeError: CUDA error: device-side assert" in mapped.failures[0].message


@pytest.mark.slow
@pytest.mark.parametrize("function", [devices.array, devices.scalar], ids=["array", "scalar"])
def test_a_device_that_fails_on_all_rows_fails_none_of_them(function: UDF, tmp_path: Path) -> None:
    broken(str(tmp_path)).touch()
    with pytest.raises(DeviceFailed, match=f"{HERE}.*{ECC}"):
        run(function, [1, 2, 3], tmp_path)


@pytest.mark.slow
def test_a_call_that_hangs_is_a_row_that_fails_unless_calls_on_other_rows_hang_too(tmp_path: Path) -> None:
    mapped = run(devices.in_time, [1, HANGS, 2], tmp_path)
    assert mapped.values.to_pylist() == [10, None, 20]
    assert [failure.exception for failure in mapped.failures] == ["builtins.TimeoutError"]
    (tmp_path / "hangs").touch()
    with pytest.raises(DeviceFailed, match=HERE):
        run(devices.in_time, [1, 2], tmp_path)


@pytest.mark.parametrize("function", [devices.plain_array, devices.plain_scalar], ids=["array", "scalar"])
def test_a_job_in_this_process_fails_with_its_device_and_keeps_what_is_computed(
    function: UDF, make_table: MakeTable, tmp_path: Path
) -> None:
    table = make_table(30, per_fragment=10, folder=[str(tmp_path)] * 30)
    table.lance.update({"x": str(ASSERTS)}, where="id = 25")
    table.add_columns({"y": function})
    with pytest.raises(JobFailed, match=HERE):
        table.backfill("y", runner="inline", batch_size=1)
    assert len(table.get_errors()) == 0, "no row is to blame"
    table.lance.update({"x": "25"}, where="id = 25")
    devices._failed = False  # as in another process
    assert table.backfill("y", runner="inline").rows_run == 1
    values = table.to_arrow()
    assert values.column("y").to_pylist() == [10 * x for x in values.column("x").to_pylist()]


@pytest.mark.spark
def test_what_a_broken_device_leaves_is_computed_in_another_process(
    spark: object, make_table: MakeTable, tmp_path: Path
) -> None:
    table = make_table(400, per_fragment=100, folder=[str(tmp_path)] * 400)
    table.add_columns({"y": devices.breaks_the_first_process})
    result = table.backfill("y", runner="spark", batch_size=20)
    assert (result.state, result.rows_computed, result.rows_failed) == ("DONE", 400, 0)
    assert [HERE in note for note in result.notes] == [True]
    assert table.to_arrow().column("y").to_pylist() == [10 * x for x in range(400)]


@pytest.mark.spark
def test_a_device_that_is_broken_in_every_try_fails_the_job(
    spark: object, make_table: MakeTable, tmp_path: Path
) -> None:
    broken(str(tmp_path)).touch()
    table = make_table(40, per_fragment=40, folder=[str(tmp_path)] * 40)
    table.add_columns({"y": devices.array})
    with pytest.raises(JobFailed, match=f"In every try of a task its device failed. {HERE}"):
        table.backfill("y", runner="spark")
    assert len(table.get_errors()) == 0


# Loading


@pytest.mark.slow
def test_loading_has_a_time_of_its_own() -> None:
    with pytest.raises(UdfError, match="had not loaded it after 1 seconds, its setup_timeout, and was ended") as failed:
        run(devices.NeverLoaded, [1])
    assert failed.value.row_index is None
    assert run(devices.LoadedLate, [1, 2]).values.to_pylist() == [1, 2]


def test_a_process_that_is_not_ended_has_no_time_to_load() -> None:
    async def function(x: int) -> int:
        return x

    with pytest.raises(InvalidInput, match="is async and runs in the process of its task"):
        udf(data_type=pa.int64(), setup_timeout=5)(function)


@pytest.mark.slow
@pytest.mark.parametrize("function", [devices.in_process, devices.apart], ids=["in process", "apart"])
def test_a_model_is_loaded_once_for_all_shards_and_jobs_of_a_process(
    function: UDF, make_table: MakeTable, tmp_path: Path
) -> None:
    table = make_table(60, per_fragment=10, folder=[str(tmp_path)] * 60)
    table.add_columns({"y": function})
    table.backfill("y", runner="inline", shard_size=2)
    table.add(pa.table({"id": [60], "x": [60], "folder": [str(tmp_path)]}))
    table.backfill("y", runner="inline")
    assert len(loads(tmp_path)) == 1


@pytest.mark.slow
def test_no_model_stays_on_a_gpu_that_the_next_task_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SimpleNamespace(addresses=["0"])
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(resources=lambda: {"gpu": given}))
    for addresses, children in [(["0"], 0), (["0"], 1), (["1"], 0)]:
        given.addresses = addresses
        tasks._limit_visible_gpus()
        assert (os.environ["CUDA_VISIBLE_DEVICES"], len(POOL.idle)) == (addresses[0], children)
        assert run(devices.apart, [1], tmp_path).values.to_pylist() == [10]
    assert len(set(loads(tmp_path))) == len(loads(tmp_path)) == 2


@pytest.mark.spark
@pytest.mark.parametrize("function", [devices.in_process, devices.apart], ids=["in process", "apart"])
@pytest.mark.parametrize("sent", ["imported", "pickled"])
def test_a_model_is_loaded_once_in_each_of_sparks_processes(
    spark: object, function: UDF, sent: str, make_table: MakeTable, tmp_path: Path
) -> None:
    if sent == "pickled":

        class Model(devices.Loads):
            """A class of a notebook."""

        function = udf(data_type=pa.int64(), version="1", batch_size=10, on_error=function.on_error)(Model)
    table = make_table(600, per_fragment=100, folder=[str(tmp_path)] * 600)
    table.add_columns({"y": function})
    table.backfill("y", udf=function, runner="spark", task_size=50, shard_size=3)
    assert table.to_arrow().column("y").to_pylist() == [10 * x for x in range(600)]
    assert set(Counter(loads(tmp_path)).values()) == {1}
    assert str(os.getpid()) not in loads(tmp_path)
    assert len(loads(tmp_path)) <= 2, "as many as slots"


def test_a_process_keeps_one_model_when_the_code_of_its_class_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import pyarrow as pa\nfrom airflow_geneva import udf\n@udf(data_type=pa.int64())\nclass Model:\n"
    code += "    def __call__(self, x: pa.Int64Array) -> pa.Array:\n        return pa.array([2] * len(x))\n"
    (tmp_path / "changing_models.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = weakref.ref(load_udf("changing_models:Model").function)
    assert before() is not None
    with pytest.raises(InvalidInput, match="was planned"):
        UdfReference("changing_models:Model", "of other code").open()
    gc.collect()
    assert before() is None
    del sys.modules["changing_models"]
