"""What all tests share: an Airflow home of their own, one thread per process, Java, and one Spark session."""

from __future__ import annotations

import gc
import json
import os
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.airflow_databases import connection_to, database_named, migrate
from tests.support.java_classes import JAVA_OPTIONS, archive_classes
from tests.support.scratch import SCRATCH

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.counting import Trace
    from tests.support.tables import MakeTable

pytest_plugins = [f"tests.support.{os.environ.get('GENEVA_STORE', 'object_store')}", "tests.support.outage"]

# What collection makes stays, Airflow and thousands of tests: no search for garbage looks through it.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Tests write a module, import it and write it again, in the same second: it must be compiled again.
    sys.dont_write_bytecode = True


DATABASE = database_named("airflow")

# The processes of a test run share what is here, the processes of its tests too.
CLASSES = Path(os.environ.setdefault("GENEVA_TESTS_CLASSES", str(SCRATCH / "spark.jsa")))

# Airflow reads these while it is imported, so they are set before any test can import it. Nothing of the user's own
# Airflow, Spark or Python path reaches a test.
for name in list(os.environ):
    if name.startswith(("AIRFLOW_", "SPARK_", "PYSPARK_")) or name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        del os.environ[name]
os.environ.update(
    {
        "AIRFLOW_HOME": str(SCRATCH / "airflow"),
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "AIRFLOW__CORE__DAGS_FOLDER": str(SCRATCH / "airflow" / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": connection_to(DATABASE),
        # Each stage in a task of its own; the tests of small jobs set the default again.
        "AIRFLOW__GENEVA__INLINE_BELOW_SECONDS": "0",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_SUBMIT_OPTS": f"{JAVA_OPTIONS} -XX:SharedArchiveFile={CLASSES}",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
)

settings.register_profile(
    "quick", max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("soak" if os.environ.get("GENEVA_SOAK") == "1" else "quick")


# What tests took when `make durations` last ran, by node id: those of a few tenths of a second are not in it.
DURATIONS = Path(__file__).with_name("durations.json")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose selected tests take longest: none of them begins when the other workers are done."""
    taken = json.loads(DURATIONS.read_text(encoding="utf-8"))
    seconds: Counter[str] = Counter()
    for item in items:
        seconds[item.nodeid.partition("::")[0]] += taken.get(item.nodeid, 0)
    items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])


@pytest.fixture(autouse=True)
def _java_where_needed(request: pytest.FixtureRequest) -> None:
    if any(request.node.get_closest_marker(name) for name in ("spark", "crash", "airflow")):
        request.getfixturevalue("java_home")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Where the counting UDFs of this test, and of processes it starts, leave what they saw."""
    from tests.support.counting import TRACE, Trace

    path = tmp_path / "trace"
    monkeypatch.setenv(TRACE, str(path))
    return Trace(path)


@pytest.fixture
def make_table(tmp_path: Path) -> MakeTable:
    """Makes table ``docs`` with rows (id, x) where x is id, in fragments of ``per_fragment`` rows."""
    from tests.support.tables import make_docs

    return make_docs(tmp_path)


@pytest.fixture(scope="session")
def java_home(request: pytest.FixtureRequest) -> Iterator[str]:
    """Java for Spark in this process's environment, whatever the machine has."""
    from airflow_geneva.spark.installation import java_environment

    os.environ.update(java_environment(SCRATCH / "java"))
    starts = sum(item.get_closest_marker("spark") is not None for item in request.session.items)
    # Java writes the archive in 15 s, and a start saves 2 s with it.
    pays = "PYTEST_XDIST_WORKER" in os.environ and starts > 8
    with archive_classes(CLASSES) if pays else nullcontext():
        yield os.environ["JAVA_HOME"]


@pytest.fixture(scope="session")
def new_airflow_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of Airflow's that nobody has used, to be copied."""
    base = tmp_path_factory.getbasetemp()
    return migrate(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture(scope="session")
def airflow_db(new_airflow_db: Path) -> Path:
    """The Airflow home of this test run, its database made."""
    home = Path(os.environ["AIRFLOW_HOME"])
    (home / "dags").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(new_airflow_db, DATABASE)
    return home


@pytest.fixture
def store_connection(airflow_db: Path) -> Iterator[Callable[..., None]]:
    """Store connections in Airflow's database, by id and fields, until the test ends."""
    from airflow.models.connection import Connection
    from airflow.utils.session import create_session

    def store(conn_id: str, **fields: str) -> None:
        remove(conn_id)
        with create_session() as session:
            session.add(Connection(conn_id=conn_id, **fields))
        stored.append(conn_id)

    def remove(conn_id: str) -> None:
        with create_session() as session:
            session.query(Connection).filter_by(conn_id=conn_id).delete()

    stored: list[str] = []
    yield store
    for conn_id in stored:
        remove(conn_id)


@pytest.fixture(scope="session")
def spark(java_home: str) -> Iterator[SparkSession]:
    """One local session of two slots for the whole run; a task may fail three times before its job does."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("airflow-geneva-tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", str(SCRATCH / "spark"))
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(SCRATCH / "warehouse"))
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    yield session
    session.stop()
