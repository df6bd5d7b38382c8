"""Compute a shard on Spark."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException, AirflowNotFoundException
from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from airflow.sdk import BaseHook, Connection, Context

from airflow_geneva.engine import api
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.runtime import time
from airflow_geneva.errors import InvalidInput
from airflow_geneva.hooks.lance import missing_connection
from airflow_geneva.hooks.openai import openai_connection
from airflow_geneva.links.job import JobLink
from airflow_geneva.operators._airflow_internals import (
    adopt_application,
    has_driver,
    knows_kubernetes,
    own_settings,
    redirect,
    resolved_connection,
    scope_reconnection,
    submit_log,
)
from airflow_geneva.operators._lance_task import (
    SHARD_TITLE,
    Configuration,
    cause_first,
    check_shard,
    failing_at_once,
    is_last_try,
    load_job,
    open_patiently,
    optional_int,
    optional_text,
    required_text,
    stop_task,
    with_retry_policy,
)
from airflow_geneva.operators.application import application_name, identity_arguments, shard_arguments
from airflow_geneva.spark.code import planned_archives, send_archives
from airflow_geneva.spark.connect import check_demands, open_try
from airflow_geneva.spark.installation import java_environment
from airflow_geneva.spark.runner import SparkRunner
from airflow_geneva.spark.submit import (
    APPLICATION,
    CREDENTIALS,
    HOW_TO_CONNECT,
    THREAD_VARIABLES,
    Resources,
    Scratch,
    SparkMaster,
    driver_environment,
    find_spark_submit,
    session_settings,
)

_ERROR_LINE = "airflow_geneva: "


class ApplyOperator(SparkSubmitOperator):
    """Run the UDFs on the missing rows of one shard with spark-submit or Spark Connect, and stage its data files.

    A retry continues from the checkpoints of earlier tries. A shard with nothing left to run does not start Spark.
    The driver does not inherit the worker's environment: it gets an allow-list, the storage options of the Lance
    connection, and `env_vars`.

    Args:
        shard: one entry of the plan task's output.
        lance_conn_id: the Airflow connection of the database.
        database: another URI to use with that connection's storage options.
        spark_conn_id: the Airflow connection of the Spark master, or of type `spark_connect` for a running server; then
            the worker needs neither a JVM nor spark-submit.
        inline_below_rows: a shard with fewer rows to run is computed in the task itself; by default
            `[geneva] inline_below_rows`, which is 0.
        openai_conn_id: the Airflow connection of a model service; the functions get its key and URL.
        retry_policy: Airflow 3.3 and later; None: a wrong request is not retried.
        kwargs: as for `SparkSubmitOperator`; `conf` and its own arguments override the settings from the UDF's
            resources and the plan's `concurrency`. `env_vars` is templated, but not stored with the rendered fields.
    """

    template_fields: Sequence[str] = (
        *(name for name in SparkSubmitOperator.template_fields if name != "env_vars"),
        "shard",
        "lance_conn_id",
        "database",
        "spark_conn_id",
        "inline_below_rows",
        "openai_conn_id",
    )
    operator_extra_links = (JobLink(),)

    def __init__(
        self,
        *,
        shard: Any,
        lance_conn_id: str = "lance_default",
        database: str | None = None,
        spark_conn_id: str = "spark_default",
        inline_below_rows: int | str | None = None,
        openai_conn_id: str | None = None,
        retry_policy: Any = None,
        **kwargs: Any,
    ) -> None:
        given = with_retry_policy(retry_policy, {"name": "", "map_index_template": SHARD_TITLE, **kwargs})
        super().__init__(conn_id=spark_conn_id, **given)
        self.shard = shard
        self.lance_conn_id = lance_conn_id
        self.database = database
        self.spark_conn_id = spark_conn_id
        self.inline_below_rows = inline_below_rows
        self.openai_conn_id = openai_conn_id
        self._scratch: Scratch | None = None
        self._session: Any = None
        self._driver: tuple[str, Mapping[str, str]] | None = None

    def execute(self, context: Context) -> dict[str, Any]:  # type: ignore[override]
        configured = Configuration.read()
        reference = check_shard(self.shard)
        job = load_job(open_patiently(self.lance_conn_id, self.database), reference)
        shard = job.load_shard(reference["shard"])
        job.waits = False
        # While the application waits for the cluster, no driver writes heartbeats.
        how, waiting = None, job.waiting(shard)
        with (
            suppress(api.StillWaiting),
            cause_first(self.log),
            job.at_step("apply", shard.index, is_last_try(context.get("ti")), submits=True),
            openai_connection(optional_text(self.openai_conn_id), job.spec.connections),
        ):
            # Until Spark is started, no other process writes the status.
            with job.documents(shard.index).written_here():
                waiting.look()
                job.begin(shard)
                watch = api.Stopwatch()
                again = job.documents(shard.index).applied is not None
                how = self._compute_here(job, shard, configured, again)
            if how is None:
                how = self._compute_on_spark(job, shard, context, again, watch)
        if waiting.batches:
            # A triggerer has neither the code nor its credentials, so the resumed task polls the service.
            waiting.count_wake()
            moment = TimeDeltaTrigger(timedelta(seconds=waiting.interval))
            self.defer(trigger=moment, method_name="execute_again")
        done = job.documents(shard.index).applied
        if done is None:
            raise AirflowException(
                f"Spark ended well, and wrote no result in {job.folder.storage.root}. If the table is on a local "
                "disk, all of Spark must run on this machine; use an object store otherwise. Then clear the plan task "
                "with its downstream tasks."
            )
        failed, computed, target = done["rows_failed"], done["rows_computed"], job.spec.target
        self.log.info(
            "Shard %s of %s: %s computed %s, %s failed.", shard.index, target, counted(computed, "row"), how, failed
        )
        return done

    def execute_again(self, context: Context, event: Any = None) -> dict[str, Any]:
        """Poll the service of a batch API again, and continue when it has answered."""
        return self.execute(context)

    def _compute_here(
        self, job: api.PlannedJob, shard: api.Shard, configured: Configuration, again: bool
    ) -> str | None:  # fmt: skip
        """Compute the shard in this process and return a description of it; None if Spark is to compute it."""
        if not shard.to_apply or (again and job.is_staged(shard)):
            if not again:
                job.write_applied(shard, (), 0.0)
            return "(all of it was staged, no Spark started)"
        if job.is_at_cap(shard):
            return "(its job is at a cap, no Spark started)"
        given = optional_int("inline_below_rows", self.inline_below_rows)
        below = configured.inline_below_rows if given is None else given
        # Spark gets the planned code. If this process has another code version, compute on Spark.
        if shard.rows_to_run < below and not job.spec.needs_spark and job.apply_if_same_code(shard):
            return "in this task"
        return None

    def _compute_on_spark(
        self, job: api.PlannedJob, shard: api.Shard, context: Context, again: bool, watch: api.Stopwatch
    ) -> str:
        """Compute the shard on Spark, unless an earlier attempt did, and return a description of it."""
        spec = job.spec
        spark_conn_id = required_text("spark_conn_id", self.spark_conn_id)
        if self._connection(spark_conn_id).conn_type == SparkConnectHook.conn_type:
            self._apply_on_server(job, shard, spark_conn_id, context["ti"].try_number, watch)
            return "on Spark Connect"
        # Airflow keeps the id of a submitted application even when the task is cleared. A `durable` task would mistake
        # an old application that succeeded for the current one.
        scope_reconnection(self, _of_this_wake(job, shard, job.saved.fingerprint))
        if again:  # it succeeded, and its staged files were removed
            self.durable = False
        self._scratch = Scratch.make(spec.job_id, shard.index)
        try:
            self._submit(job, shard, self._scratch, context, watch)
        finally:
            self._scratch.remove()
        return "on Spark"

    def _apply_on_server(
        self, job: api.PlannedJob, shard: api.Shard, spark_conn_id: str, try_number: int, watch: api.Stopwatch
    ) -> None:
        check_demands(job.spec)
        url = SparkConnectHook(spark_conn_id).get_connection_url()
        task = _of_this_wake(job, shard, f"{job.spec.job_id}/{job.saved.fingerprint}/{shard.index}")
        with open_try(url, task, try_number) as self._session:
            watch.lap("session")
            send_archives(self._session, _planned_archives(job))
            watch.lap("code")
            job.apply_on(SparkRunner(self._session, watch), shard)

    def _submit(
        self, job: api.PlannedJob, shard: api.Shard, scratch: Scratch, context: Context, watch: api.Stopwatch
    ) -> None:
        spec = job.spec
        self.application = str(APPLICATION)
        self.name = self.name or application_name(context["ti"].dag_id, job, shard.index)
        archives = [scratch.write(name, data) for name, data in _planned_archives(job).items()]
        self.py_files = ",".join([*([self.py_files] if self.py_files else []), *archives])
        watch.lap("code")
        given = self.render_template(self.env_vars, context) or {}
        self._conn_id = required_text("spark_conn_id", self.spark_conn_id)
        connection = self._check_connection()
        named_by = f"Airflow connection {self._conn_id!r}"
        master = SparkMaster.parse(connection["master"], named_by).limited(spec.sizing.concurrency)
        options, more = dict(job.location.options), list[str]()
        if connection["deploy_mode"] == "cluster":
            _check_cluster(master, given)
            more = identity_arguments(self.lance_conn_id, job, "use deploy mode 'client'")
            options = {}
        more += ["--leave-waiting"] if job.waiting(shard).interval else []
        before = ["--submitted", f"{time.time():.3f}", "--code-seconds", f"{watch.seconds['code']:.3f}"]
        self.application_args = shard_arguments(job, shard.index, [*before, *more])
        # The base class would add them to the worker's whole environment, or write them on the command line. Here they
        # are part of the driver's own environment.
        self.env_vars = None
        environment = self._environment(master, options, given, scratch, connection["spark_binary"])
        self.conf = self._settings(spec, master, driver_here=connection["deploy_mode"] != "cluster")
        if connection["deploy_mode"] != "cluster" and "spark.pyspark.python" in self.conf:
            # Otherwise Spark would also start the driver on the executors' Python.
            self.conf.setdefault("spark.pyspark.driver.python", environment["PYSPARK_DRIVER_PYTHON"])
        self._driver = (master.url, environment)
        try:
            super().execute(context)
        except (AirflowException, RuntimeError):
            # The full error is in the log above, or on the cluster, and the driver has recorded it.
            if reason := _reason(submit_log(self._hook)) or job.documents(shard.index).failure:
                target = job.spec.target
                raise AirflowException(f"Computing shard {shard.index} of {target} failed: {reason}") from None
            raise

    def _get_hook(self) -> SparkSubmitHook:
        # The base class calls this after it has added the OpenLineage settings to `conf`.
        hook = super()._get_hook()
        if self._driver is not None:
            redirect(hook, *self._driver)
        return hook

    def poll_until_complete(self, external_id: Any, context: Context) -> None:
        adopt_application(self._hook, external_id)
        super().poll_until_complete(external_id, context)

    def _connection(self, conn_id: str) -> Connection:
        try:
            return BaseHook.get_connection(conn_id)
        except AirflowNotFoundException:
            raise missing_connection(conn_id, HOW_TO_CONNECT) from None

    def _check_connection(self) -> Mapping[str, Any]:
        """Return the resolved Spark connection; reject one that cannot be read, for which Airflow would use `yarn`."""
        found = self._connection(self._conn_id)
        if not found.host and found.conn_type not in ("yarn", "local"):
            raise InvalidInput(f"Airflow connection {self._conn_id!r} has no host. {HOW_TO_CONNECT}")
        if "k8s" in (found.conn_type, (found.host or "").partition(":")[0]) and not knows_kubernetes():
            raise InvalidInput(
                f"Airflow connection {self._conn_id!r} names a Spark master on Kubernetes, which Airflow's Spark "
                "provider takes only with apache-airflow-providers-cncf-kubernetes. Install it on the Airflow workers."
            )
        return resolved_connection(super()._get_hook())

    def _settings(self, spec: api.JobSpec, master: SparkMaster, driver_here: bool) -> dict[str, str]:
        conf, own = self.conf or {}, own_settings(self)
        cores = own["spark.executor.cores"] or conf.get("spark.executor.cores")
        asked = Resources.of(spec, None if cores is None else int(cores))
        if ignored := asked.ignored(master):
            self.log.info("The local Spark master %s ignores %s.", master.url, ", ".join(ignored))
        settings = {**session_settings(driver_here), **asked.settings(master)}
        settings = {name: value for name, value in settings.items() if own.get(name) is None}
        return {**settings, **conf}

    def _environment(
        self,
        master: SparkMaster,
        options: Mapping[str, str],
        given: Mapping[str, str],
        scratch: Scratch,
        binary: str,
    ) -> dict[str, str]:
        threads = {**dict.fromkeys(THREAD_VARIABLES, "1"), **given}
        environment = driver_environment(os.environ, master, options, threads)
        environment = find_spark_submit(binary, scratch.environment(environment))
        if "JAVA_HOME" not in given:
            environment.update(java_environment(scratch.path))
        if options:
            environment[CREDENTIALS] = json.dumps(options)
        return environment

    def on_kill(self) -> None:
        if self._session is not None:
            with suppress(Exception):  # the next attempt ends the work that continues on the server
                self._session.interruptAll()
        if has_driver(self._hook):
            super().on_kill()
            if self._scratch is not None:
                self._scratch.remove()
        # Otherwise the base class would report that spark-submit failed, with all of its command line.
        stop_task()


def _reason(lines: Sequence[str]) -> str:
    """Return what the application said last of why it failed, from the output of spark-submit; empty if nothing."""
    starts = [line for line in lines if line.startswith(_ERROR_LINE)]
    return starts[-1].removeprefix(_ERROR_LINE) if starts else ""


def _of_this_wake(job: api.PlannedJob, shard: api.Shard, name: str) -> str:
    """Return an application name that changes with each deferral, because the application before it has succeeded."""
    wakes = job.waiting(shard).wakes
    return f"{name}_{wakes}" if wakes else name


def _planned_archives(job: api.PlannedJob) -> Mapping[str, bytes]:
    with failing_at_once(InvalidInput):
        return planned_archives(job.spec, job.folder.storage)


def _check_cluster(master: SparkMaster, given: Mapping[str, str]) -> None:
    if master.kind == "spark":
        raise AirflowFailException(
            f"Spark's deploy mode is 'cluster', and on a standalone master ({master.url}) it runs no Python programs "
            "in that mode. Use deploy mode 'client'."
        )
    if given:
        raise AirflowFailException(
            f"env_vars names {sorted(given)}, and Spark's deploy mode is 'cluster', where they could only travel on "
            "the command line. Set them on the cluster, or name them in conf (spark.yarn.appMasterEnv.NAME, "
            "spark.kubernetes.driverEnv.NAME), or use deploy mode 'client'."
        )
