"""All uses of private names of Airflow and its Spark provider, and of names that some supported versions lack.

Names are imported when they are used, so a removed name breaks only the feature that needs it.
`tests/airflow/test_airflow_internals.py` tests the required behavior of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from airflow_geneva.errors import CodeChanged, CommitConflict, GenevaError, InvalidInput, UnknownValues

if TYPE_CHECKING:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
    from airflow.sdk import Asset
    from airflow.sdk.definitions.asset import BaseAsset

_PROCESS = "_AIRFLOW_PROCESS_CONTEXT"
_SOON = timedelta(seconds=30)
_DRIVER_STARTED = ("_submit_sp", "_yarn_application_id", "_kubernetes_driver_pod")


@contextmanager
def _needed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        import airflow

        raise GenevaError(
            f"Airflow {airflow.__version__} does not have what this package uses of Airflow 3.1 to 3.4: {error}. "
            "Install one of these versions, or a newer airflow-geneva."
        ) from error


@contextmanager
def as_command() -> Iterator[None]:
    """Look up connections in Airflow's database too, as `airflow connections get` does.

    A process that is neither a task nor one of Airflow's own searches only the environment and the secrets backend.
    """
    before = os.environ.get(_PROCESS)
    os.environ[_PROCESS] = "server"
    try:
        yield
    finally:
        os.environ.pop(_PROCESS)
        if before is not None:
            os.environ[_PROCESS] = before


def dags_folder() -> str:
    """Return the folder that Airflow's own processes have on `sys.path`."""
    from airflow.configuration import conf

    return str(conf.get_mandatory_value("core", "dags_folder"))


# Schedules


def batching_schedule(assets: BaseAsset | Collection[BaseAsset]) -> Any:
    """Return a DAG's schedule on assets with one run for all events that arrived; Airflow before 3.4 has no other."""
    try:
        from airflow.sdk import AssetAll, AssetTriggeredTimetable  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return assets
    condition = AssetAll(*assets) if isinstance(assets, Collection) else assets
    return AssetTriggeredTimetable(condition, batch_asset_events=True)


# Tasks and triggers


def default_retry_policy() -> Any:
    """Retry soon after a commit conflict, and fail immediately if a retry cannot help; None before Airflow 3.3."""
    try:
        from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule
    except ImportError:
        return None
    return ExceptionRetryPolicy(
        rules=[
            RetryRule(CommitConflict, RetryAction.RETRY, _SOON, reason="other writers kept changing the table"),
            RetryRule(
                [InvalidInput, CodeChanged, UnknownValues], RetryAction.FAIL, reason="it would fail in the same way"
            ),
        ]
    )


def asset_events(asset: Asset, most: int | None, since: datetime | None = None) -> list[Any]:
    """Return events of an asset, newest first; only inside a running task.

    A task's own context has the events of its inlets only.
    """
    with _needed():
        from airflow.sdk.execution_time.context import InletEventsAccessors
    events = InletEventsAccessors([asset])[asset]
    if isinstance(events, list):  # Airflow before 3.2 cannot query for the newest events
        return events[::-1][:most]
    newest_first = events.ascending(False)
    if since is not None:
        newest_first = newest_first.after(since.isoformat())
    return list(newest_first if most is None else newest_first.limit(most))


def state_store(trigger: Any) -> Any:
    """Return the store for the state of a trigger's asset; None before Airflow 3.3, and for a trigger of a task."""
    return getattr(trigger, "asset_state_store", None)


def rendered_in_task(value: Any, compute: Callable[[Any, Any], Any], description: str) -> Any:
    """Return a value that a task computes from another value and its context when it renders its fields.

    The other value may be a task's output. In the serialized DAG the description represents the result.
    """
    with _needed():
        from airflow.sdk.definitions._internal.mixins import ResolveMixin

    class RenderedInTask(ResolveMixin):
        def iter_references(self) -> Any:
            return value.iter_references() if isinstance(value, ResolveMixin) else ()

        def resolve(self, context: Any) -> Any:
            return compute(value.resolve(context) if isinstance(value, ResolveMixin) else value, context)

        def __repr__(self) -> str:
            return description

    return RenderedInTask()


# spark-submit


def scope_reconnection(operator: SparkSubmitOperator, name: str) -> None:
    """Let a `durable` task reconnect only to an application that was submitted under the same name."""
    operator.external_id_key = f"{type(operator).external_id_key}_{name}"
    operator._K8S_DRIVER_STATUS_KEY = f"k8s_driver_status_{name}"


def resolved_connection(hook: SparkSubmitHook) -> Mapping[str, Any]:
    """Return the Spark connection as the hook reads it: `master`, `deploy_mode`, `spark_binary`."""
    return hook._connection


def knows_kubernetes() -> bool:
    """Whether the Spark provider found the Kubernetes provider; else its hook fails on a master of Kubernetes."""
    from airflow.providers.apache.spark.hooks import spark_submit

    return getattr(spark_submit, "kube_client", None) is not None


def redirect(hook: SparkSubmitHook, master: str, environment: Mapping[str, str]) -> None:
    """Submit to another master, from a process with exactly this environment."""
    hook._connection["master"] = master
    setattr(hook, "submit", partial(hook.submit, env=environment))  # noqa: B010


def adopt_application(hook: SparkSubmitHook | None, external_id: Any) -> None:
    """Let a kill also end a YARN application of an earlier attempt: the hook ends only those that it submitted."""
    if hook is not None and hook._is_yarn_cluster_mode:
        hook._yarn_application_id = external_id


def has_driver(hook: SparkSubmitHook | None) -> bool:
    """Whether this process has a running driver that a kill must end; after a reconnect it has none."""
    return any(getattr(hook, name, None) for name in _DRIVER_STARTED)


def submit_log(hook: SparkSubmitHook | None) -> Sequence[str]:
    """Return the last lines that spark-submit printed."""
    return list(getattr(hook, "_last_submit_log_lines", ()))


def own_settings(operator: SparkSubmitOperator) -> dict[str, Any]:
    """Return the Spark settings for which an operator has arguments; None for arguments that are not set."""
    return {
        "spark.cores.max": operator._total_executor_cores,
        "spark.executor.cores": operator._executor_cores,
        "spark.executor.memory": operator._executor_memory,
        "spark.executor.instances": operator._num_executors,
    }


# The API server


def has_asset_pages() -> bool:
    """Whether plugins can add tabs to the pages of assets, and limit tabs with `applies_to`; from Airflow 3.4 on."""
    try:
        from airflow._shared.plugins_manager.plugins_manager import BaseDestinationLiteral  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return False
    return "asset" in get_args(BaseDestinationLiteral)


def redact() -> Callable[[str], Any]:
    """Return a function that masks in a text all secrets known to Airflow, of the server and of hooks."""
    with _needed():
        from airflow._shared.secrets_masker import redact as redact_of_server
        from airflow.sdk._shared.secrets_masker import redact as redact_of_hooks
    return lambda text: redact_of_server(redact_of_hooks(text))


def user_dependency() -> Callable[..., Any]:
    """Return FastAPI's dependency on the user of a request: 401 without a login, 403 with an invalid token."""
    with _needed():
        from airflow.api_fastapi.core_api.security import get_user
    return get_user


async def user_of_token(token: str) -> Any:
    """Return the user whom a bearer token names; FastAPI's 401 or 403 if it is not valid, whatever a cookie says."""
    with _needed():
        from airflow.api_fastapi.core_api.security import resolve_user_from_token
    return await resolve_user_from_token(token)


def may_read_dag(user: Any, dag_id: str) -> bool:
    """Whether a user may read a DAG's task instances."""
    return _may(user, dag_id, "GET", "TASK_INSTANCE")


def may_read_xcoms(user: Any, dag_id: str) -> bool:
    """Whether a user may read the XComs of a DAG's runs."""
    return _may(user, dag_id, "GET", "XCOM")


def may_trigger_dag(user: Any, dag_id: str) -> bool:
    """Whether a user may start a run of a DAG."""
    return _may(user, dag_id, "POST", "RUN")


def _may(user: Any, dag_id: str, method: Literal["GET", "POST"], entity: str) -> bool:
    with _needed():
        from airflow.api_fastapi.app import get_auth_manager
        from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
        from airflow.models.dag import DagModel
    details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    return get_auth_manager().is_authorized_dag(
        method=method, access_entity=DagAccessEntity[entity], details=details, user=user
    )  # fmt: skip


def start_run(dag_id: str, run_id: str, conf: Mapping[str, Any], user: Any) -> None:
    """Start a run of a DAG on behalf of a user, who must have the right to.

    Raises:
        InvalidInput: there is no such DAG, or it does not accept the configuration.
    """
    with _needed():
        from airflow.api.common.trigger_dag import trigger_dag
        from airflow.exceptions import DagNotFound, ParamValidationError
        from airflow.utils.types import DagRunTriggeredByType
    name = user.get_name()
    try:
        trigger_dag(
            dag_id, triggered_by=DagRunTriggeredByType.REST_API, triggering_user_name=name, run_id=run_id, conf={**conf}
        )  # fmt: skip
    except (DagNotFound, ParamValidationError, ValueError) as error:
        raise InvalidInput(f"DAG {dag_id!r} cannot be run: {error}") from error


def state_of_run(dag_id: str, run_id: str) -> str | None:
    """Return the state of a DAG run: queued, running, success or failed; None if there is no such run."""
    with _needed():
        from airflow.models.dagrun import DagRun
        from airflow.utils.session import create_session
        from sqlalchemy import select
    with create_session() as session:
        found = session.scalar(select(DagRun.state).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
    return None if found is None else str(found)


def may_read_connection(user: Any, conn_id: str) -> bool:
    """Whether a user may read a connection."""
    with _needed():
        from airflow.api_fastapi.app import get_auth_manager
        from airflow.api_fastapi.auth.managers.models.resource_details import ConnectionDetails
        from airflow.models.connection import Connection
    details = ConnectionDetails(conn_id=conn_id, team_name=Connection.get_team_name(conn_id))
    return get_auth_manager().is_authorized_connection(method="GET", details=details, user=user)


def stored_connections(conn_type: str) -> set[str]:
    """Return the ids of the connections of a type in Airflow's database."""
    with _needed():
        from airflow.models.connection import Connection
        from airflow.utils.session import create_session
        from sqlalchemy import select
    with create_session() as session:
        return set(session.scalars(select(Connection.conn_id).where(Connection.conn_type == conn_type)))


def dags_of_assets(scheme: str) -> Iterator[tuple[str, str]]:
    """Return pairs of asset URI and DAG: DAGs that write, read or wait for the asset, or that sent an event for it."""
    with _needed():
        from airflow.models.asset import (
            AssetEvent,
            AssetModel,
            DagScheduleAssetReference,
            TaskInletAssetReference,
            TaskOutletAssetReference,
        )
        from airflow.utils.session import create_session
        from sqlalchemy import select
    references = [
        (TaskOutletAssetReference.asset_id, TaskOutletAssetReference.dag_id),
        (TaskInletAssetReference.asset_id, TaskInletAssetReference.dag_id),
        (DagScheduleAssetReference.asset_id, DagScheduleAssetReference.dag_id),
        # A table whose name is a template is known only by its events.
        (AssetEvent.asset_id, AssetEvent.source_dag_id),
    ]
    with create_session() as session:
        for asset_id, dag_id in references:
            query = select(AssetModel.uri, dag_id).join(AssetModel, AssetModel.id == asset_id)
            named = query.where(AssetModel.uri.startswith(scheme), dag_id.is_not(None)).distinct()
            yield from ((uri, str(dag)) for uri, dag in session.execute(named))


def dags_that_write(beginning: str) -> Sequence[tuple[str, str, bool]]:
    """Return the assets whose URIs begin with `beginning`, with the DAGs that write them and whether each is paused.

    A DAG writes an asset if it sent an event for it or has it as an outlet.
    """
    with _needed():
        from airflow.models.asset import AssetEvent, AssetModel, TaskOutletAssetReference
        from airflow.models.dag import DagModel
        from airflow.utils.session import create_session
        from sqlalchemy import select
    found = set()
    with create_session() as session:
        for of, dag_id in (
            (AssetEvent.asset_id, AssetEvent.source_dag_id),
            (TaskOutletAssetReference.asset_id, TaskOutletAssetReference.dag_id),
        ):
            query = select(AssetModel.uri, DagModel.dag_id, DagModel.is_paused).distinct()
            query = query.join_from(AssetModel, of.class_, AssetModel.id == of).join(
                DagModel, DagModel.dag_id == dag_id
            )
            query = query.where(AssetModel.uri.startswith(beginning, autoescape=True), ~DagModel.is_stale)
            found |= {(uri, name, bool(paused)) for uri, name, paused in session.execute(query)}
    return sorted(found)


def xcoms(dag_id: str, key: str, run_id: str | None = None, most: int | None = None) -> Sequence[Any]:
    """Return run, task, map index and value of all XComs with a key, of one DAG run or of a DAG's newest runs."""
    with _needed():
        from airflow.models.xcom import XComModel
        from airflow.utils.session import create_session
        from sqlalchemy import select
    query = select(XComModel.run_id, XComModel.task_id, XComModel.map_index, XComModel.value).where(
        XComModel.dag_id == dag_id, XComModel.key == key
    )
    if run_id is not None:
        query = query.where(XComModel.run_id == run_id)
    order = (XComModel.dag_run_id.desc(), XComModel.task_id, XComModel.map_index)
    with create_session() as session:
        return session.execute(query.order_by(*order).limit(most)).all()
