"""What a spark-submit is started with."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from airflow_geneva.engine.storage.location import read_storage_options
from airflow_geneva.engine.storage.secrets import is_secret, secret_values
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark.code import package_zip
from airflow_geneva.spark.submit import (
    APPLICATION,
    AWAY_FROM_FAILED_DEVICES,
    Resources,
    Scratch,
    SparkMaster,
    driver_environment,
    find_spark_submit,
)

LOCAL = SparkMaster.parse("local[2]", "c")
STANDALONE = SparkMaster.parse("spark://one:7077,two:7077", "c")
YARN = SparkMaster.parse("yarn", "c")
KUBERNETES = SparkMaster.parse("k8s://https://cluster:6443", "c")
CLUSTERS = [STANDALONE, YARN, KUBERNETES]


def test_the_application_lies_alone_in_its_folder() -> None:
    """Whatever lies beside it becomes a top-level module of the driver."""
    assert APPLICATION.is_file()
    assert [path.name for path in APPLICATION.parent.iterdir() if path.name != "__pycache__"] == ["main.py"]


@pytest.mark.parametrize(
    ("url", "limited"),
    [
        ("local", "local[1,4]"),
        ("local[2]", "local[2,4]"),
        ("local[8]", "local[3,4]"),
        ("local[2,7]", "local[2,7]"),
        ("local[*]", f"local[{min(3, os.cpu_count() or 1)},4]"),
        ("spark://master:7077", "spark://master:7077"),
        ("yarn", "yarn"),
        ("k8s://https://cluster:6443", "k8s://https://cluster:6443"),
    ],
)
def test_a_local_master_has_the_slots_asked_for_and_lets_tasks_fail_more_than_once(url: str, limited: str) -> None:
    assert SparkMaster.parse(url, "c").limited(3).url == limited


@pytest.mark.parametrize("url", ["spark://", "local[two]", "http://master", "", "yarns"])
def test_a_master_that_spark_does_not_know_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidInput, match="my_spark names the Spark master"):
        SparkMaster.parse(url, "my_spark")


def test_concurrency_becomes_cores_on_a_standalone_cluster() -> None:
    assert Resources(8).settings(STANDALONE) == {"spark.task.cpus": "1", "spark.cores.max": "8"}
    assert Resources(8, num_cpus=1.5).settings(STANDALONE) == {"spark.task.cpus": "2", "spark.cores.max": "16"}


@pytest.mark.parametrize("master", [YARN, KUBERNETES])
def test_concurrency_becomes_executors_where_each_has_its_own_container(master: SparkMaster) -> None:
    assert Resources(8, num_cpus=2).settings(master) == {
        "spark.task.cpus": "2",
        "spark.executor.cores": "2",
        "spark.executor.instances": "8",
    }


@pytest.mark.parametrize("master", CLUSTERS)
def test_a_whole_gpu_belongs_to_one_call(master: SparkMaster) -> None:
    settings = Resources(4, num_gpus=1).settings(master)
    assert settings["spark.task.resource.gpu.amount"] == "1"
    assert settings["spark.executor.resource.gpu.amount"] == "1"
    assert settings["spark.executor.cores"] == "1"


@pytest.mark.parametrize("master", CLUSTERS)
def test_a_share_of_a_gpu_puts_several_calls_on_one_executor(master: SparkMaster) -> None:
    settings = Resources(8, num_cpus=2, num_gpus=0.25, memory=2**30).settings(master)
    assert settings["spark.task.resource.gpu.amount"] == "0.25"
    assert settings["spark.executor.resource.gpu.amount"] == "1"
    assert settings["spark.executor.cores"] == "8"
    memory = settings.get("spark.executor.memory") or settings["spark.executor.memoryOverhead"]
    assert memory == "4096m"
    if master.kind != "spark":
        assert settings["spark.executor.instances"] == "2"


def test_the_authors_size_of_an_executor_is_filled_with_calls() -> None:
    assert Resources(8, num_cpus=2, num_gpus=0.5, memory=2**30, executor_cores=8).settings(YARN) == {
        "spark.task.cpus": "2",
        "spark.executor.cores": "8",
        "spark.executor.instances": "2",
        "spark.task.resource.gpu.amount": "0.5",
        "spark.executor.resource.gpu.amount": "2",
        "spark.executor.memoryOverhead": "4096m",
        **AWAY_FROM_FAILED_DEVICES,
    }


def test_an_executor_whose_device_failed_is_left_alone_if_there_is_another() -> None:
    assert Resources(2, num_gpus=0.5).settings(YARN).keys().isdisjoint(AWAY_FROM_FAILED_DEVICES)
    assert Resources(3, num_gpus=0.5).settings(YARN).keys() > AWAY_FROM_FAILED_DEVICES.keys()
    assert Resources(3).settings(YARN).keys().isdisjoint(AWAY_FROM_FAILED_DEVICES)


def test_a_share_that_spark_cannot_halve_takes_the_whole_gpu() -> None:
    settings = Resources(1, num_gpus=0.7).settings(YARN)
    assert settings["spark.task.resource.gpu.amount"] == "1"


def test_memory_is_the_executors_on_a_standalone_cluster_and_pythons_in_a_container() -> None:
    assert Resources(2, memory=3 * 2**30).settings(STANDALONE)["spark.executor.memory"] == "3072m"
    assert Resources(2, memory=3 * 2**30).settings(STANDALONE)["spark.executor.cores"] == "1"
    assert Resources(2, memory=3 * 2**30).settings(KUBERNETES)["spark.executor.memoryOverhead"] == "3072m"


def test_a_local_master_says_what_it_ignores() -> None:
    asked = Resources(8, num_cpus=2, num_gpus=0.5, memory=1024)
    assert asked.settings(LOCAL) == {}
    assert asked.ignored(LOCAL) == ["num_cpus=2", "num_gpus=0.5", "memory=1024", "concurrency=8 beyond 2"]
    assert Resources(2).ignored(LOCAL) == []
    assert asked.ignored(YARN) == []


WORKER = {
    "PATH": "/bin",
    "HOME": "/home/worker",
    "LC_ALL": "C.UTF-8",
    "JAVA_HOME": "/java",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://secret",
    "AIRFLOW_CONN_LANCE_DEFAULT": "{}",
    "AIRFLOW__API_AUTH__JWT_SECRET": "secret",
    "FERNET_KEY": "secret",
    "DATABASE_PASSWORD": "secret",
    "AWS_ACCESS_KEY_ID": "identity",
    "OPENAI_API_KEY": "model",
    "OPENAI_API_KEY_VOYAGE": "other",
    "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
}


def test_the_driver_gets_an_allow_list_and_what_the_author_gives() -> None:
    found = driver_environment(WORKER, STANDALONE, {"aws_secret_access_key": "key"}, {"MODEL": "small"})
    assert found == {
        "PATH": "/bin",
        "HOME": "/home/worker",
        "LC_ALL": "C.UTF-8",
        "JAVA_HOME": "/java",
        "OPENAI_API_KEY": "model",
        "OPENAI_API_KEY_VOYAGE": "other",
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1",
        "MODEL": "small",
    }


def test_the_machines_own_identity_is_passed_on_only_where_the_connection_has_none() -> None:
    found = driver_environment(WORKER, STANDALONE, {"aws_region": "eu-west-1"}, {})
    assert found["AWS_ACCESS_KEY_ID"] == "identity"
    assert found["GOOGLE_APPLICATION_CREDENTIALS"] == "/key.json"
    assert not any(name.startswith("AIRFLOW") for name in found)


def test_a_kubeconfig_is_passed_on_to_kubernetes_only() -> None:
    worker = {**WORKER, "KUBECONFIG": "/kubeconfig"}
    found = {master.kind: driver_environment(worker, master, {}, {}).get("KUBECONFIG") for master in (LOCAL, *CLUSTERS)}
    assert found == {"local": None, "spark": None, "yarn": None, "k8s": "/kubeconfig"}


def test_a_local_master_runs_its_workers_on_the_python_of_the_task() -> None:
    assert driver_environment(WORKER, LOCAL, {}, {})["PYSPARK_PYTHON"] == sys.executable
    assert driver_environment(WORKER, LOCAL, {}, {})["SPARK_LOCAL_IP"] == "127.0.0.1"
    assert "PYSPARK_PYTHON" not in driver_environment(WORKER, YARN, {}, {})
    assert driver_environment({**WORKER, "SPARK_SUBMIT_OPTS": "-Da=b"}, YARN, {}, {})["SPARK_SUBMIT_OPTS"] == "-Da=b"
    chosen = driver_environment({**WORKER, "PYSPARK_PYTHON": "/other"}, LOCAL, {}, {})
    assert chosen["PYSPARK_DRIVER_PYTHON"] == "/other"


def test_spark_submit_is_found_on_the_path_or_beside_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "spark-submit"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    assert find_spark_submit("spark-submit", {"PATH": str(tmp_path)}) == {"PATH": str(tmp_path)}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_spark_submit("spark-submit", {"PATH": "/nowhere"})["PATH"].startswith(str(tmp_path))
    with pytest.raises(InvalidInput, match=r"no program 'spark3-submit' on the PATH.*pip install pyspark"):
        find_spark_submit("spark3-submit", {"PATH": "/nowhere"})


def test_scratch_is_private_and_goes_with_everything_in_it() -> None:
    scratch = Scratch.make("job", 3)
    environment = scratch.environment({"SPARK_SUBMIT_OPTS": "-Dx=y"})
    assert stat.S_IMODE(scratch.path.stat().st_mode) == 0o700
    assert environment["TMPDIR"] == environment["SPARK_LOCAL_DIRS"] == str(scratch.path)
    assert environment["SPARK_SUBMIT_OPTS"] == f"-Dx=y -Djava.io.tmpdir={scratch.path}"
    scratch.write("code.zip", b"zip")
    scratch.remove()
    assert not scratch.path.exists()


def test_the_next_try_removes_what_a_killed_one_left_of_the_same_shard() -> None:
    left, other = Scratch.make("job", 3), Scratch.make("job", 4)
    again = Scratch.make("job", 3)
    assert not left.path.exists()
    assert other.path.exists()
    other.remove()
    again.remove()


@pytest.mark.parametrize("given", ['{"aws_region": "x", "allow_http": true}', {"aws_region": "x", "allow_http": True}])
def test_storage_options_come_as_an_object_or_as_its_text(given: object) -> None:
    assert read_storage_options(given) == {"aws_region": "x", "allow_http": "true"}


@pytest.mark.parametrize("given", ["secret", "[1]", 7, {"aws_secret_access_key": ["secret"]}])
def test_storage_options_of_another_form_are_refused_without_repeating_them(given: object) -> None:
    with pytest.raises(InvalidInput, match="Give a JSON object of strings") as told:
        read_storage_options(given)
    assert "secret" not in str(told.value).replace("aws_secret_access_key", "")


def test_every_option_is_a_secret_but_those_known_to_be_harmless() -> None:
    assert is_secret("aws_secret_access_key", "x")
    assert is_secret("azure_storage_sas_key", "x")
    assert is_secret("something_new", "x")
    assert is_secret("aws_endpoint", "https://user:password@host")
    assert is_secret("azure_storage_endpoint", "https://host?sig=abc")
    assert not is_secret("azure_storage_endpoint", "https://host")
    assert not is_secret("AWS_REGION", "eu-west-1")
    assert secret_values({"aws_endpoint": "http://x", "aws_session_token": "t"}) == ["t"]
    assert secret_values({"aws_endpoint": "http://me:pass@x"}) == ["http://me:pass@x", "pass"]


def test_a_temporary_folder_with_a_space_does_not_break_the_launcher(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "a folder")
    made = scratch.environment({"SPARK_SUBMIT_OPTS": "-Da=b"})
    assert made["SPARK_SUBMIT_OPTS"] == "-Da=b", "Spark's launcher would take the second half for a class name"
    assert made["TMPDIR"] == made["SPARK_LOCAL_DIRS"] == str(tmp_path / "a folder")
    whole = Scratch(tmp_path).environment({})
    assert whole["SPARK_SUBMIT_OPTS"] == f"-Djava.io.tmpdir={tmp_path}"


@pytest.mark.slow
def test_what_travels_to_workers_is_the_package_and_nothing_else() -> None:
    names = zipfile.ZipFile(io.BytesIO(package_zip())).namelist()
    assert {"airflow_geneva/spark/tasks.py", "airflow_geneva/spark/tasks.pyc"} <= set(names)
    assert [name for name in names if not name.endswith((".py", ".pyc"))] == []


@pytest.mark.parametrize("same_python", [True, False])
def test_workers_import_compiled_modules_and_read_the_source_under_another_python(
    tmp_path: Path, same_python: bool
) -> None:
    data = package_zip()
    if not same_python:
        with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(tmp_path / "code.zip", "w") as other:
            for name in given.namelist():
                other.writestr(name, (b"????" if name.endswith("c") else b"") + given.read(name))
    else:
        (tmp_path / "code.zip").write_bytes(data)
    script = "import airflow_geneva.errors as a; print(a.__file__, a.InvalidInput.__name__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'code.zip')!r}); {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    file, name = done.stdout.split()
    assert name == "InvalidInput"
    assert file == str(tmp_path / "code.zip/airflow_geneva" / ("errors.pyc" if same_python else "errors.py"))
