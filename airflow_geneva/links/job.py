"""Link from a task of a backfill or refresh to the page of its job."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from airflow.providers.common.compat.sdk import conf
from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

PAGES = "/geneva"
"""URL path of the pages on Airflow's API server."""


def pages_root() -> str:
    """Return the path of the pages on the server of `[api] base_url`."""
    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/") + PAGES


class JobLink(BaseOperatorLink):
    """The page of the job that a task plans, computes, commits or finishes."""

    name = "Geneva job"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the URL of a task's job; the same for all tries."""
        task = {
            "dag_id": ti_key.dag_id,
            "run_id": ti_key.run_id,
            "task_id": ti_key.task_id,
            "map_index": ti_key.map_index,
        }
        return f"{pages_root()}/task?{urlencode(task)}"
