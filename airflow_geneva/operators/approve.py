"""Ask a person before a costly plan is computed, with Airflow's own human-in-the-loop operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator, HITLOperator
from airflow.sdk import Context

from airflow_geneva.engine import api
from airflow_geneva.links.job import JobLink
from airflow_geneva.operators._lance_task import answered_by
from airflow_geneva.operators.plan import REJECTED, SUMMARY


class ApproveOperator(ApprovalOperator):
    """Return the plan's shards: immediately if the plan is not above `approve_above`, otherwise after an approval.

    It shows the plan and its estimate under *Required Actions*. After a rejection it returns no shards, so none is
    computed, and `FinishOperator` records the rejection.

    Args:
        plan_task_id: id of the plan task, including its groups.
        subject: shown while the plan is not known.
        kwargs: as for Airflow's `ApprovalOperator`, for example `assigned_users` and `response_timeout`.
    """

    operator_extra_links = (JobLink(),)
    inherits_from_skipmixin = False
    template_fields: Sequence[str] = ("subject", "plan_task_id")

    def __init__(
        self, *, plan_task_id: str, subject: str = "Compute what is planned?", **kwargs: Any
    ) -> None:  # fmt: skip
        super().__init__(subject=subject, **kwargs)
        self.plan_task_id = plan_task_id

    def execute(self, context: Context) -> list[dict[str, Any]]:
        asked = self._summary(context).get(api.APPROVAL)
        if not asked:
            return self._shards(context)
        self.subject = asked["subject"]
        self.body = asked["body"]
        super().execute(context)  # defers the task, which continues below
        return []

    def execute_complete(self, context: Context, event: dict[str, Any]) -> list[dict[str, Any]]:
        answer = HITLOperator.execute_complete(self, context, event)
        name = answered_by(answer)
        if answer["chosen_options"] == [self.APPROVE]:
            self.log.info("Approved by %s.", name)
            return self._shards(context)
        self.log.warning("Not approved, by %s: nothing is computed.", name)
        context["ti"].xcom_push(REJECTED, name)
        return []

    def _summary(self, context: Context) -> Mapping[str, Any]:
        return context["ti"].xcom_pull(task_ids=self.plan_task_id, key=SUMMARY) or {}

    def _shards(self, context: Context) -> list[dict[str, Any]]:
        return context["ti"].xcom_pull(task_ids=self.plan_task_id) or []
