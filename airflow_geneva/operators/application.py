"""Compute a shard with any operator: as a Spark application, or on an existing session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_geneva.engine import api
from airflow_geneva.engine.storage.secrets import secret_values
from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.errors import InvalidInput
from airflow_geneva.operators._airflow_internals import rendered_in_task
from airflow_geneva.operators._lance_task import check_shard, failing_at_once, load_job, open_patiently
from airflow_geneva.spark.code import planned_archives, send_archives
from airflow_geneva.spark.connect import check_demands, is_connect
from airflow_geneva.spark.runner import SparkRunner
from airflow_geneva.spark.submit import APPLICATION, Resources, SparkMaster, session_settings


@dataclass(frozen=True)
class SparkApplication:
    """The Spark application that computes a shard. Each part is for a templated field of an operator.

    A part is resolved when the task renders its fields. It may be an item of a list or a dict, but not part of a text.

    Args:
        application: URI of the Python program.
        arguments: the program's arguments, a list.
        archives: URIs of zips with this package and the code of the UDFs, a list; the driver and the workers need them.
        py_files: the archives as one text, with commas.
        conf: Spark settings, a dict.
        submit_parameters: archives and settings as one text, as on the command line of spark-submit.
        arguments_with_archives: arguments that make the program add the archives itself, where an operator has no field
            for them.
    """

    application: Any
    arguments: Any
    archives: Any
    py_files: Any
    conf: Any
    submit_parameters: Any
    arguments_with_archives: Any


def spark_application(
    shard: Any,
    *,
    master: str,
    lance_conn_id: str = "lance_default",
    database: str | None = None,
    spark_uri: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkApplication:
    """Return the Spark application that computes a shard, for the operator that `apply` of a task group returns.

    Its program and archives are stored beside the plan, by the task that uses them. The application accesses the table
    with its own identity: a Lance connection that contains credentials is refused. The operator must wait for the end
    of the application, which writes the result that `commit` reads.

    Args:
        shard: the argument of the function that is given as `apply`.
        master: the Spark master as in a Spark connection, `local[2]`, `spark://host:7077`, `yarn` or
            `k8s://https://host`; it determines the Spark settings for the resources of the UDFs. For a managed service
            that starts its own containers, use `yarn`.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        spark_uri: the URI of the database for Spark's own file systems, if it differs, such as `s3a://lake/db`.
        conf: more Spark settings, which take precedence.

    Returns:
        SparkApplication: its parts.

    Raises:
        InvalidInput: Spark does not recognize the master URL.
    """
    parts = _Parts(
        SparkMaster.parse(master, "spark_application"), lance_conn_id, database, spark_uri, conf or {}
    )  # fmt: skip
    names = (field.name for field in fields(SparkApplication))
    return SparkApplication(
        **{name: rendered_in_task(shard, partial(parts.make, name), f"<{name} of the shard>") for name in names}
    )


@dataclass(frozen=True)
class _Parts:
    """Creates the parts of an application in the task that submits it; the method of a part has the part's name."""

    master: SparkMaster
    lance_conn_id: str
    database: str | None
    spark_uri: str | None
    more_conf: Mapping[str, str]

    def make(self, name: str, shard: Any, context: Any) -> Any:
        """Return one part of the application, for the shard of a running task."""
        reference = check_shard(shard)
        with failing_at_once(InvalidInput):
            job = load_job(open_patiently(self.lance_conn_id, self.database), reference)
            return getattr(self, name)(job, reference["shard"], context["ti"].dag_id)

    def application(self, job: api.PlannedJob, index: int, dag_id: str) -> str:
        program = Path(APPLICATION).read_bytes()
        [uri] = self._store(job, {f"apply-{sha256(program)[:16]}.py": program})
        return uri

    def arguments(self, job: api.PlannedJob, index: int, dag_id: str) -> list[str]:
        instead = "use ApplyOperator in deploy mode 'client', or compute_shard in a @task.pyspark"
        identity = identity_arguments(self.lance_conn_id, job, instead)
        return shard_arguments(job, index, ["--name", application_name(dag_id, job, index), *identity])

    def archives(self, job: api.PlannedJob, index: int, dag_id: str) -> list[str]:
        return self._store(job, planned_archives(job.spec, job.folder.storage))

    def py_files(self, job: api.PlannedJob, index: int, dag_id: str) -> str:
        return ",".join(self.archives(job, index, dag_id))

    def conf(self, job: api.PlannedJob, index: int, dag_id: str) -> dict[str, str]:
        resources = Resources.of(job.spec).settings(self.master)
        return {**session_settings(driver_here=self.master.kind == "local"), **resources, **self.more_conf}

    def submit_parameters(self, job: api.PlannedJob, index: int, dag_id: str) -> str:
        pairs = (f"--conf {name}={value}" for name, value in self.conf(job, index, dag_id).items())
        return " ".join([f"--py-files {self.py_files(job, index, dag_id)}", *pairs])

    def arguments_with_archives(self, job: api.PlannedJob, index: int, dag_id: str) -> list[str]:
        added = [part for uri in self.archives(job, index, dag_id) for part in ("--archive", uri)]
        return [*self.arguments(job, index, dag_id), *added]

    def _store(self, job: api.PlannedJob, files: Mapping[str, bytes]) -> list[str]:
        folder, place = job.folder.storage, job.location.uri.rpartition("/")[0]
        for name, data in files.items():
            if not folder.exists(name):  # the name contains the hash of the content
                folder.write_bytes(name, data)
        return [(self.spark_uri or place).rstrip("/") + folder.path(name).removeprefix(place) for name in files]


def compute_shard(
    session: Any, shard: Any, *, lance_conn_id: str = "lance_default", database: str | None = None
) -> dict[str, Any]:
    """Compute a shard on an existing Spark session, classic or Connect, such as that of `@task.pyspark`.

    The session sends this package, the planned code of the UDFs and the storage options of the Lance connection.

    Args:
        session: the SparkSession.
        shard: one entry of the plan task's output.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.

    Returns:
        dict: number of computed rows, and their speed.

    Raises:
        InvalidInput: a UDF requests a GPU or memory, and the session is a Spark Connect session.
    """
    reference = check_shard(shard)
    job = load_job(open_patiently(lance_conn_id, database), reference)
    index = reference["shard"]
    if is_connect(session):
        check_demands(job.spec)
    with job.at_step("apply", index), failing_at_once(InvalidInput):
        watch = api.Stopwatch()
        send_archives(session, planned_archives(job.spec, job.folder.storage))
        watch.lap("code")
        return job.apply_on(SparkRunner(session, watch), job.load_shard(index))


def application_name(dag_id: str, job: api.PlannedJob, index: int) -> str:
    """Return the name under which Spark and its cluster list the application of a shard."""
    return f"{dag_id}: {job.spec.target}, shard {index}"


def shard_arguments(job: api.PlannedJob, index: int, more: list[str]) -> list[str]:
    """Return the application's arguments."""
    place = ["--job", job.folder.storage.root, "--fingerprint", job.saved.fingerprint, "--shard", str(index)]
    return [*place, *more]


def identity_arguments(lance_conn_id: str, job: api.PlannedJob, instead: str) -> list[str]:
    """Return the storage options as arguments for an application that has its own identity.

    Raises:
        AirflowFailException: one of them is a secret, which the command line would reveal.
    """
    options = dict(job.location.options)
    if secret_values(options):
        raise AirflowFailException(
            f"Airflow connection {lance_conn_id!r} holds credentials, which could only travel on the command line of "
            "this Spark application. Leave them out and give the cluster an identity of its own (an IAM role, a "
            f"workload identity), or {instead}."
        )
    return [part for name, value in sorted(options.items()) for part in ("--storage-option", f"{name}={value}")]
