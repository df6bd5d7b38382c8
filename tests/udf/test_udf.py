"""The UDF value: what the decorator reads, refuses, stores, and finds again."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest

from airflow_geneva.engine.udf import Fail, Retry, Skip, UdfDefinition, load_udf, udf
from airflow_geneva.errors import GenevaError, InvalidInput
from tests.udfs_for_tests import samples


def test_a_udf_is_called_like_the_function_it_was_made_of() -> None:
    assert samples.length("abc") == 3
    assert samples.double(pa.array([1, 2])) == pa.array([2, 4])
    assert samples.factorial(4) == 24
    assert samples.add_five(1) == 6
    assert samples.length.__doc__ == "Count the characters."


def test_a_class_is_instantiated_once_per_process_on_the_first_call() -> None:
    made = samples.Counter.func.made
    assert [samples.Counter(i) for i in range(3)] == [1, 2, 3]
    again = cloudpickle.loads(cloudpickle.dumps(samples.Counter))
    assert again(1) == 2
    assert samples.Counter.func.made == max(made, 1)


def test_a_udf_is_a_value_that_does_not_change_and_survives_a_pickle() -> None:
    with pytest.raises(AttributeError):
        samples.length.name = "other"  # type: ignore[misc]
    again = cloudpickle.loads(cloudpickle.dumps(samples.length))
    assert (again.name, again.data_type, again("four")) == ("length", pa.int64(), 4)
    assert again.code_version == samples.length.code_version


def test_the_decorator_works_bare_and_with_arguments() -> None:
    @udf
    def bare(x: int) -> int:
        return x

    @udf(name="named", num_gpus=0.5, memory="1.5g", batch_size=10, timeout=2.5)
    def full(x: int, y: float) -> str:
        return str(x)

    assert (bare.name, bare.data_type, bare.form, bare.resolve_inputs()) == ("bare", pa.int64(), "scalar", ("x",))
    assert (full.name, full.data_type, full.resolve_inputs()) == ("named", pa.string(), ("x", "y"))
    assert (full.num_gpus, full.memory, full.batch_size, full.timeout) == (0.5, 3 << 29, 10, 2.5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"checkpoint_size": -1}, "checkpoint_size=-1"),
        (
            {"min_checkpoint_size": 10, "max_checkpoint_size": 5},
            "min_checkpoint_size=10 is above max_checkpoint_size=5",
        ),
        ({"checkpoint_size": 10, "max_checkpoint_size": 5}, "checkpoint_size=10 is above max_checkpoint_size=5"),
        ({"min_checkpoint_size": 10, "checkpoint_size": 5}, "min_checkpoint_size=10 is above checkpoint_size=5"),
        ({"num_cpus": 0}, "num_cpus=0"),
        ({"num_gpus": -1}, "num_gpus=-1"),
        ({"num_cpus": float("nan")}, "num_cpus=nan"),
        ({"memory": "lots"}, "memory='lots'"),
        ({"memory": 0}, "memory=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"name": "../up"}, "name='../up'"),
        ({"name": ""}, "name=''"),
        ({"version": "a/b"}, "version='a/b'"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"on_error": []}, "on_error=[]"),
        ({"on_error": [ValueError]}, "on_error="),
        ({"input_columns": "x"}, "input_columns='x'"),
        ({"input_columns": []}, "input_columns=[]"),
        ({"input_columns": ["a", "b"]}, "2 input columns"),
        ({"deps": "model"}, "deps='model'"),
        ({"data_type": int}, "not an Arrow type"),
    ],
)
def test_nonsense_is_refused_with_its_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        udf(**{"data_type": pa.int64(), **settings})(lambda x: x)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retry("ConnectionError"),  # type: ignore[arg-type]
        lambda: Retry(ConnectionError, attempts=1),
        lambda: Retry(ConnectionError, backoff=-1),
        lambda: Skip(KeyboardInterrupt),  # type: ignore[arg-type]
        lambda: Skip(ValueError, max_count=0),
        lambda: Skip(ValueError, max_fraction=1.5),
    ],
)
def test_error_policies_that_cannot_be_kept_are_refused(make: Any) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_an_error_policy_is_kept_in_order_and_stored_by_dotted_names() -> None:
    policy = [Retry((ConnectionError, TimeoutError), attempts=5), Skip(json.JSONDecodeError, max_fraction=0.1), Fail()]
    made = udf(data_type=pa.int64(), on_error=policy, version="1")(lambda x: x)
    assert made.on_error == tuple(policy)
    assert made.definition().on_error == [
        {"do": "retry", "exc": ["builtins.ConnectionError", "builtins.TimeoutError"], "attempts": 5, "backoff": 1.0},
        {"do": "skip", "exc": ["json.decoder.JSONDecodeError"], "max_count": None, "max_fraction": 0.1},
        {"do": "fail"},
    ]


def test_input_columns_are_the_parameters_without_a_default_unless_named() -> None:
    def function(a: str, b: str, k: int = 3) -> str:
        return a + b * k

    assert udf(function).resolve_inputs() == ("a", "b")
    assert udf(input_columns=["x", "y", "z"])(function).resolve_inputs() == ("x", "y", "z")
    assert udf(function).resolve_inputs(["x", "y"]) == ("x", "y")
    with pytest.raises(InvalidInput, match=r"1 input columns are mapped.*\['x'\]"):
        udf(function).resolve_inputs(["x"])
    with pytest.raises(InvalidInput, match="takes any number of columns"):
        udf(data_type=pa.string())(lambda *parts: "").resolve_inputs()


def test_a_record_batch_udf_takes_the_columns_it_names_or_all() -> None:
    assert samples.describe.resolve_inputs() == ("a", "b")

    @udf(data_type=pa.string())
    def everything(batch: pa.RecordBatch) -> pa.Array:
        return batch.column(0)

    assert everything.resolve_inputs() is None
    assert everything.resolve_inputs(["c"]) == ("c",)


def test_the_import_path_is_where_this_very_object_is_found() -> None:
    module = "tests.udfs_for_tests.samples"
    assert samples.length.import_path == f"{module}:length"
    assert samples.Counter.import_path == f"{module}:Counter"
    assert samples.add_five.import_path == f"{module}:add_five"
    assert samples.wrapped_later.import_path == f"{module}:wrapped_later"
    assert udf(data_type=pa.int64())(samples.length.func).import_path is None


def test_local_functions_and_those_of_main_and_of_dag_files_have_no_import_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @udf
    def local(x: int) -> int:
        return x

    assert local.import_path is None
    for name in ("__main__", "unusual_prefix_0123_my_dag"):
        monkeypatch.setitem(sys.modules, name, sys.modules[__name__])
        made = dataclasses.replace(local, module=name)
        monkeypatch.setattr(local.func, "__module__", name)
        monkeypatch.setattr(sys.modules[__name__], "found_here", made, raising=False)
        assert made.import_path is None


def test_a_udf_is_loaded_by_its_import_path() -> None:
    assert load_udf("tests.udfs_for_tests.samples:add_five") is samples.add_five


@pytest.mark.parametrize("path", ["", "samples", "a.b.c", ":f", "a:", "a:b:c", "a..b:c", "../a:b", "a b:c", "a:1"])
def test_a_malformed_import_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match="malformed"):
        load_udf(path)


def test_a_module_that_does_not_import_is_reported_with_this_process_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_udfs.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for path in ("broken_udfs:f", "not_there_either:f"):
        with pytest.raises(InvalidInput) as refused:
            load_udf(path)
        assert "No module named" in str(refused.value)
        assert str(tmp_path) in str(refused.value)
        assert sys.version.split()[0] in str(refused.value)
        assert isinstance(refused.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("name", ["missing", "NOT_A_UDF", "undecorated", "Adder", "pa"])
def test_an_import_path_that_leads_to_no_udf_is_refused_with_the_udfs_there_are(name: str) -> None:
    with pytest.raises(GenevaError, match=r"only if it leads to a @udf object.*'add_five'.*'length'"):
        load_udf(f"tests.udfs_for_tests.samples:{name}")


def test_a_definition_is_small_json_that_reads_back_equal() -> None:
    for made in (samples.length, samples.double, samples.describe, samples.Counter, samples.add_five):
        definition = made.definition()
        text = definition.to_json()
        assert UdfDefinition.from_json(text) == definition
        assert json.loads(text)["format"] == 1
        assert list(json.loads(text)) == sorted(json.loads(text))
        assert len(text) < 400
    definition = samples.length.definition(["body"])
    assert definition.input_columns == ("body",)
    assert definition.import_path == "tests.udfs_for_tests.samples:length"
    assert definition.version == samples.length.code_version
    assert (definition.data_type, definition.form) == ("int64", "scalar")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', "null"])
def test_what_is_not_a_definition_of_this_format_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        UdfDefinition.from_json(text)


@pytest.mark.parametrize("thing", [3, "length", samples.length, int])
def test_what_is_not_a_function_cannot_be_made_a_udf(thing: Any) -> None:
    with pytest.raises(InvalidInput, match="give a function"):
        udf(data_type=pa.int64())(thing)


def test_a_version_that_was_given_stands_in_for_the_hash() -> None:
    assert udf(data_type=pa.int64(), version="2024-05")(lambda x: object()).code_version == "2024-05"


def test_declaring_resources_or_a_type_does_not_change_the_version() -> None:
    function = samples.length.func
    made = udf(data_type=pa.int32(), num_cpus=2, batch_size=3, on_error="skip")(function)
    assert made.code_version == samples.length.code_version


def test_importing_udf_loads_neither_airflow_nor_pyspark_nor_lance() -> None:
    code = "import sys, airflow_geneva.engine.udf.shipping, airflow_geneva.engine.apply.udf_call; print(*sys.modules)"
    root = Path(__file__).parents[2]
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"airflow", "pyspark", "lance", "pandas"} & set(loaded)
