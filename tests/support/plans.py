"""Write a plan without the record of a job."""

from __future__ import annotations

from functools import partial

from airflow_geneva.engine.plan.model import Plan
from airflow_geneva.engine.plan.saved_plan import SavedPlan, plan_documents
from airflow_geneva.engine.storage.files import Storage


def save_plan(plan: Plan, job: Storage, run: str = "") -> SavedPlan:
    """Write a plan into its job's folder."""
    saved, documents = plan_documents(plan, run)
    job.side_by_side(*(partial(job.write_bytes, name, data) for name, data in documents.items()))
    return saved
