"""Inputs for starting Spark: master, resources, settings, environment, scratch folder, and a zip of this package."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_geneva.engine.masking import is_service_variable
from airflow_geneva.engine.storage.secrets import secret_values
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    from airflow_geneva.engine.plan.model import JobSpec

APPLICATION = Path(__file__).parent / "application" / "main.py"
"""The program that spark-submit starts."""

CREDENTIALS = "AIRFLOW_GENEVA_STORAGE_OPTIONS"
"""The environment variable that passes the storage options to the driver, as JSON."""

AWAY_FROM_FAILED_DEVICES = {
    "spark.excludeOnFailure.enabled": "true",
    "spark.excludeOnFailure.task.maxTaskAttemptsPerExecutor": "2",
    "spark.excludeOnFailure.task.maxTaskAttemptsPerNode": "4",
}
"""An executor whose device failed is free again at once, and would take a task in all of its four tries."""

THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",  # of tokenizers and other libraries in Rust
)
"""How many threads a library starts: one for each task, because the tasks share the cores."""

_LOCAL = re.compile(r"local(?:\[(?P<slots>\*|\d+)(?:,\s*(?P<failures>\d+))?\])?")
_CLUSTER = re.compile(r"(?P<kind>spark|k8s)://.+|(?P<yarn>yarn)|local-cluster\[.+\]")
_TASK_FAILURES = 4

# Variables of the worker's environment that the driver needs. Airflow's variables are excluded: they include its
# metadata database, its signing key and all of its connections.
_KEPT_NAMES = """
PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH DYLD_LIBRARY_PATH
JAVA_HOME SPARK_HOME SPARK_CONF_DIR SPARK_LOCAL_IP SPARK_LOCAL_HOSTNAME SPARK_PUBLIC_DNS SPARK_SUBMIT_OPTS
SPARK_DIST_CLASSPATH HADOOP_HOME HADOOP_CONF_DIR HADOOP_USER_NAME YARN_CONF_DIR KRB5CCNAME KRB5_CONFIG
PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON PYTHONPATH VIRTUAL_ENV SSL_CERT_FILE SSL_CERT_DIR
CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES KUBERNETES_SERVICE_HOST KUBERNETES_SERVICE_PORT
"""
_KEPT = frozenset(_KEPT_NAMES.split())
_KEPT_PREFIXES = ("LC_",)
# Rows are read, computed and written by Python, so the JVM's second compiler costs more than it saves: 1.4 s of a
# driver of 16 s, and 4 s of CPU.
_JVM_OPTIONS = "-XX:TieredStopAtLevel=1"
# The machine's own identity at an object store, used only if the connection holds no credentials.
_IDENTITY_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


@dataclass(frozen=True)
class SparkMaster:
    """Where Spark runs: the kind is ``local``, ``spark`` (standalone), ``yarn``, ``k8s`` or ``local-cluster``.

    A local master has slots, and a number of failures that it allows per task.
    """

    url: str
    kind: str
    slots: int | None = None
    failures: int | None = None

    @staticmethod
    def parse(url: str, named_by: str) -> SparkMaster:
        """Parse a master URL; `InvalidInput` if Spark knows no such master."""
        if local := _LOCAL.fullmatch(url):
            slots = local["slots"] or "1"
            count = os.cpu_count() or 1 if slots == "*" else int(slots)
            return SparkMaster(url, "local", count, int(local["failures"] or _TASK_FAILURES))
        if cluster := _CLUSTER.fullmatch(url):
            return SparkMaster(url, cluster["kind"] or cluster["yarn"] or "local-cluster")
        raise InvalidInput(f"{named_by} names the Spark master {url!r}, which Spark does not know. {HOW_TO_CONNECT}")

    def limited(self, concurrency: int) -> SparkMaster:
        """Return a local master with at most ``concurrency`` slots, and the failures that a cluster allows per task."""
        if self.slots is None:
            return self
        slots = min(self.slots, concurrency)
        return SparkMaster(f"local[{slots},{self.failures}]", "local", slots, self.failures)


HOW_TO_CONNECT = (
    'Define it with the master as its host: {"conn_type": "spark", "host": "local[2]"}, '
    '"spark://master:7077", "k8s://https://cluster:6443" or "yarn". As a URI, brackets are written '
    "spark://local%5B2%5D."
)


@dataclass(frozen=True)
class Resources:
    """Task slots that a backfill requests, what one call of the UDF needs, and cores per executor if the user set them.

    Several calls share a GPU if `num_gpus` is below 1.
    """

    concurrency: int
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    executor_cores: int | None = None

    @staticmethod
    def of(spec: JobSpec, executor_cores: int | None = None) -> Resources:
        """Return the resources of a job."""
        return Resources(spec.sizing.concurrency, spec.num_cpus, spec.num_gpus, spec.memory, executor_cores)

    @property
    def task_cpus(self) -> int:
        return max(1, math.ceil(self.num_cpus or 1))

    @property
    def calls_per_gpu(self) -> int:
        """Number of calls that share one GPU; Spark supports 1/n of a GPU, or whole GPUs."""
        return max(1, math.floor(1 / self.num_gpus)) if self.num_gpus else 1

    def settings(self, master: SparkMaster) -> dict[str, str]:
        """Return the Spark settings; none for a local master, which runs everything in one process."""
        if master.kind == "local":
            return {}
        contained = master.kind in ("yarn", "k8s")
        calls = self.calls_per_gpu if self.executor_cores is None else max(1, self.executor_cores // self.task_cpus)
        settings = {"spark.task.cpus": str(self.task_cpus)}
        if contained or self.memory or self.num_gpus:
            settings["spark.executor.cores"] = str(calls * self.task_cpus)
        if contained:
            settings["spark.executor.instances"] = str(math.ceil(self.concurrency / calls))
        else:
            settings["spark.cores.max"] = str(self.concurrency * self.task_cpus)
        if self.num_gpus:
            whole = math.ceil(self.num_gpus)
            settings["spark.task.resource.gpu.amount"] = f"{whole / self.calls_per_gpu:.6g}"
            settings["spark.executor.resource.gpu.amount"] = str(math.ceil(calls * whole / self.calls_per_gpu))
            if self.concurrency > calls:
                settings |= AWAY_FROM_FAILED_DEVICES
        if self.memory:
            # A UDF's memory is Python's, not the JVM's: in a container it is added to the heap. There,
            # spark.executor.pyspark.memory would limit the worker's address space, which CUDA and memory-mapped
            # models exceed without using that much memory.
            setting = "spark.executor.memoryOverhead" if contained else "spark.executor.memory"
            settings[setting] = f"{math.ceil(calls * self.memory / 2**20)}m"
        return settings

    def ignored(self, master: SparkMaster) -> list[str]:
        """Return the requests that a local master ignores, for the log."""
        if master.slots is None:
            return []
        wishes = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "memory": self.memory}
        ignored = [f"{name}={value:g}" for name, value in wishes.items() if value]
        if self.concurrency > master.slots:
            ignored.append(f"concurrency={self.concurrency} beyond {master.slots}")
        return ignored


def driver_environment(
    environ: Mapping[str, str], master: SparkMaster, options: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of spark-submit and its driver: what an allow-list keeps of the worker's, and `given`."""
    prefixes = _KEPT_PREFIXES if secret_values(options) else _KEPT_PREFIXES + _IDENTITY_PREFIXES
    kept = {name: value for name, value in environ.items() if _is_kept(name, prefixes)}
    if master.kind == "k8s" and "KUBECONFIG" in environ:  # spark-submit asks the cluster with it
        kept["KUBECONFIG"] = environ["KUBECONFIG"]
    kept.setdefault("PATH", os.defpath)
    kept.setdefault("SPARK_SUBMIT_OPTS", _JVM_OPTIONS)
    # The worker's Python has the packages for the driver. Executors have it at the same path on a local master only.
    kept.setdefault("PYSPARK_DRIVER_PYTHON", kept.get("PYSPARK_PYTHON", sys.executable))
    if master.kind == "local":
        kept.setdefault("PYSPARK_PYTHON", sys.executable)
        kept.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return {**kept, **given}


def _is_kept(name: str, prefixes: tuple[str, ...]) -> bool:
    return name in _KEPT or name.startswith(prefixes) or is_service_variable(name)


def find_spark_submit(binary: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with spark-submit on its PATH; the folder of this Python is added in front if needed."""
    if shutil.which(binary, path=environment["PATH"]):
        return dict(environment)
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, environment["PATH"]])
    if shutil.which(binary, path=path):
        return {**environment, "PATH": path}
    raise InvalidInput(
        f"There is no program {binary!r} on the PATH of this Airflow worker ({environment['PATH']}), nor in {beside}. "
        "Install Spark there (pip install pyspark), or put its bin folder on the worker's PATH."
    )


@dataclass(frozen=True)
class Scratch:
    """A folder, readable by its owner only, for all files that one try of one shard writes on this machine."""

    path: Path

    @staticmethod
    def make(job_id: str, shard: int) -> Scratch:
        """Create the folder, and remove the folders of earlier tries that were killed."""
        prefix = f"airflow-geneva-{job_id}-{shard:04}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if not left.is_symlink() and left.stat().st_uid == os.getuid():
                shutil.rmtree(left, ignore_errors=True)
        return Scratch(Path(tempfile.mkdtemp(prefix=prefix)))

    def write(self, name: str, data: bytes) -> str:
        target = self.path / name
        target.write_bytes(data)
        return str(target)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with all temporary files of Python, the JVM and Spark's driver in this folder."""
        here = str(self.path)
        changed = {**environment, "TMPDIR": here, "SPARK_LOCAL_DIRS": here}
        if " " not in here:
            # Spark's launcher splits these options at every space and does not support quotes.
            changed["SPARK_SUBMIT_OPTS"] = f"{environment.get('SPARK_SUBMIT_OPTS', '')} -Djava.io.tmpdir={here}".strip()
        return changed

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def session_settings(driver_here: bool = False) -> dict[str, str]:
    """Spark settings of a session: quiet, one thread of a library per task, and a UI that stops nothing.

    Args:
        driver_here: the driver runs on this machine, maybe beside many, so its UI takes any free port.
    """
    settings = {"spark.log.level": "WARN", "spark.ui.showConsoleProgress": "false", "spark.ui.killEnabled": "false"}
    if driver_here:
        settings["spark.ui.port"] = "0"
    for name in THREAD_VARIABLES:
        settings[f"spark.executorEnv.{name}"] = "1"
    return settings
