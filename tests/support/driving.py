"""Run a DAG's tasks in this process, by Airflow's own scheduling rules, and clear them, as the UI does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow.models.asset import AssetEvent
from airflow.models.dagbundle import DagBundleModel
from airflow.models.dagrun import DagRun
from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.sdk import DAG, timezone
from airflow.sdk.definitions.dag import _run_task
from airflow.sdk.execution_time import supervisor
from airflow.serialization.serialized_objects import LazyDeserializedDAG
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState, TaskInstanceState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from sqlalchemy import select

try:
    from airflow.dag_processing.dagbag import DagBag
    from airflow.serialization.definitions.dag import SerializedDAG
    from airflow.serialization.serialized_objects import DagSerialization
except ImportError:  # before Airflow 3.2
    from airflow.models.dagbag import DagBag
    from airflow.serialization.serialized_objects import SerializedDAG, SerializedDAG as DagSerialization

try:
    from airflow.models.taskmap import TaskMap as TaskExpansion
except ImportError:  # from Airflow 3.4 on, task instances expand themselves
    TaskExpansion = TaskInstance  # type: ignore[assignment,misc]

__all__ = ["DagBag", "DagSerialization", "Driver", "TaskExpansion", "events", "register"]
BUNDLE = "dags-folder"

if not hasattr(supervisor.in_process_api_server, "cache_info"):
    # Before Airflow 3.3 every task creates its own execution API, which takes seconds; and nothing references it while
    # the task runs, so the garbage collector closes it.
    supervisor.in_process_api_server = functools.cache(supervisor.in_process_api_server)


def register(dag: DAG) -> SerializedDAG:
    """Write a DAG to the database, as the DAG processor does."""
    lazy = LazyDeserializedDAG.from_dag(dag)
    with create_session() as session:
        if session.get(DagBundleModel, BUNDLE) is None:
            session.add(DagBundleModel(name=BUNDLE))
            session.flush()
        SerializedDAG.bulk_write_to_db(BUNDLE, None, [lazy], session=session)
        SerializedDagModel.write_dag(lazy, bundle_name=BUNDLE, session=session)
    return DagSerialization.deserialize_dag(DagSerialization.serialize_dag(dag))


@dataclass
class Driver:
    """One run of a DAG, without a logical date, as `airflow dags trigger` makes it."""

    dag: DAG
    scheduled: SerializedDAG
    run_id: str
    errors: dict[tuple[str, int], BaseException] = field(default_factory=dict)

    @classmethod
    def trigger(cls, dag: DAG, conf: Mapping[str, Any] | None = None, run_after: datetime | None = None) -> Driver:
        scheduled = register(dag)
        now = run_after or timezone.utcnow()
        run_id = DagRun.generate_run_id(run_type=DagRunType.MANUAL, logical_date=None, run_after=now)
        with create_session() as session:
            scheduled.create_dagrun(
                run_id=run_id,
                logical_date=None,
                data_interval=None,
                run_after=now,
                conf=dict(conf or {}),
                run_type=DagRunType.MANUAL,
                triggered_by=DagRunTriggeredByType.TEST,
                state=DagRunState.RUNNING,
                start_date=now,
                session=session,
            )
        return cls(dag, scheduled, run_id)

    def go(self, kill: str | None = None) -> Driver:
        """Run until no task can run any more.

        Args:
            kill: a task whose process dies at its start.
        """
        with create_session() as session:
            run = session.scalar(select(DagRun).where(DagRun.run_id == self.run_id, DagRun.dag_id == self.dag.dag_id))
            run.dag = self.scheduled
            run.state = DagRunState.RUNNING
            session.commit()
            idle = 0
            while run.state == DagRunState.RUNNING:
                session.expire_all()
                ready, _ = run.update_state(session=session)
                for ti in ready:
                    # From Airflow 3.4 on, a retry and a cleared task are new task instances, with their try numbers
                    # already set.
                    ti.try_number = max(ti.try_number, 1) if TaskExpansion is TaskInstance else ti.try_number + 1
                    ti.state = TaskInstanceState.SCHEDULED
                session.commit()
                waiting = [ti for ti in run.get_task_instances(session=session) if ti.state == "scheduled"]
                for ti in waiting:
                    self._run(ti, kill)
                    session.commit()
                retries = [ti for ti in run.get_task_instances(session=session) if ti.state == "up_for_retry"]
                for ti in retries:
                    # Do not wait for the delay of a retry.
                    ti.end_date = timezone.datetime(2000, 1, 1)
                    session.merge(ti)
                session.commit()
                # If tasks were only skipped, or failed because of upstream tasks, this round has nothing to run.
                if not (ready or waiting or retries) and "awaiting_input" in self.states().values():
                    break
                idle = 0 if ready or waiting or retries else idle + 1
                assert idle < 5, self.states()
        return self

    def _run(self, ti: TaskInstance, kill: str | None) -> None:
        if ti.task_id == kill:
            ti.set_state(TaskInstanceState.FAILED)
            return
        outcome = _run_task(ti=ti, task=self.dag.task_dict[ti.task_id], run_triggerer=True)
        if outcome is not None and outcome.error is not None:
            self.errors[ti.task_id, ti.map_index] = outcome.error

    def error(self, task_id: str, map_index: int = -1) -> str:
        return str(self.errors[task_id, map_index])

    def title(self, task_id: str, map_index: int) -> str | None:
        """Return the name that the UI shows instead of the map index."""
        with create_session() as session:
            return self._task(session, task_id, map_index).rendered_map_index  # type: ignore[no-any-return]

    def tries(self, task_id: str, map_index: int = -1) -> int:
        with create_session() as session:
            return int(self._task(session, task_id, map_index).try_number)

    def answer(self, task_id: str, option: str) -> Driver:
        """Respond to a task that waits for an approval, as the API does."""
        from airflow.models.hitl import HITLDetail
        from airflow.models.trigger import handle_event_submit
        from airflow.triggers.base import TriggerEvent

        with create_session() as session:
            ti = self._task(session, task_id, -1)
            detail = session.scalar(select(HITLDetail).where(HITLDetail.ti_id == ti.id))
            detail.responded_by, detail.responded_at = {"id": "1", "name": "Ada"}, timezone.utcnow()
            detail.chosen_options, detail.params_input = [option], {}
            handle_event_submit(TriggerEvent(detail.as_resume_event_payload()), task_instance=ti, session=session)
        return self.go()

    def clear(self, *tasks: str | tuple[str, int], downstream: bool = True) -> Driver:
        """Clear tasks, or single shards of them."""
        with create_session() as session:
            wanted: set[str | tuple[str, int]] = set(tasks)
            if downstream:
                for task in tasks:
                    task_id, index = task if isinstance(task, tuple) else (task, None)
                    below = self.scheduled.get_task(task_id).get_flat_relative_ids(upstream=False)
                    mapped = {name for name in below if ".shards." in name}
                    wanted |= {(name, index) for name in mapped} if index is not None else mapped
                    wanted |= below - mapped
            self.scheduled.clear(task_ids=wanted, run_id=self.run_id, session=session)
        return self

    def mark_success(self, task_id: str, map_index: int = -1) -> Driver:
        with create_session() as session:
            ti = self._task(session, task_id, map_index)
            ti.set_state(TaskInstanceState.SUCCESS, session=session)
        return self

    def _task(self, session: Any, task_id: str, map_index: int) -> TaskInstance:
        return session.scalar(
            select(TaskInstance).where(
                TaskInstance.dag_id == self.dag.dag_id,
                TaskInstance.run_id == self.run_id,
                TaskInstance.task_id == task_id,
                TaskInstance.map_index == map_index,
            )
        )

    @property
    def state(self) -> str:
        with create_session() as session:
            return str(
                session.scalar(
                    select(DagRun.state).where(DagRun.run_id == self.run_id, DagRun.dag_id == self.dag.dag_id)
                )
            )

    def states(self) -> dict[str, Any]:
        """Return by task id the state, or the list of states of a mapped task."""
        with create_session() as session:
            tis = session.scalars(
                select(TaskInstance)
                .where(TaskInstance.dag_id == self.dag.dag_id, TaskInstance.run_id == self.run_id)
                .order_by(TaskInstance.map_index)
            ).all()
        found: dict[str, Any] = {}
        for ti in tis:
            state = None if ti.state is None else str(ti.state)
            if ti.map_index < 0:
                found[ti.task_id] = state
            else:
                found.setdefault(ti.task_id, []).append(state)
        return found

    def xcom(self, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        with create_session() as session:
            found = session.scalar(
                select(XComModel).where(
                    XComModel.dag_id == self.dag.dag_id,
                    XComModel.run_id == self.run_id,
                    XComModel.task_id == task_id,
                    XComModel.key == key,
                    XComModel.map_index == map_index,
                )
            )
            return None if found is None else XComModel.deserialize_value(found)

    def rendered(self, task_id: str, map_index: int = -1) -> dict[str, Any]:
        with create_session() as session:
            return RenderedTaskInstanceFields.get_templated_fields(
                self._task(session, task_id, map_index), session=session
            )


def events(asset_name: str) -> list[dict[str, Any]]:
    """Return the events of an asset, oldest first."""
    with create_session() as session:
        found = session.scalars(select(AssetEvent).order_by(AssetEvent.id)).all()
        return [dict(event.extra) for event in found if event.asset.name == asset_name]
