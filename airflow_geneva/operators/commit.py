"""Commit a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import Context

from airflow_geneva.engine.display import counted
from airflow_geneva.errors import ExpectationFailed
from airflow_geneva.links.job import JobLink
from airflow_geneva.operators._lance_task import (
    SHARD_TITLE,
    Configuration,
    LanceOperator,
    check_shard,
    failing_at_once,
    is_last_try,
    load_job,
)

_REASONS_TOLD = 5


class CommitOperator(LanceOperator):
    """Commit one shard of a plan: verify its staged data files, and make them visible.

    It works from the checkpoints, not from the output of `apply`. So it can be run again, also after a user marked
    `apply` as success; rows that are not computed are left for the next run.

    A shard of a view does not become visible: it is verified and recorded, and `finish` swaps the view when all shards
    are verified.

    Args:
        shard: one entry of the plan task's output.
        needs_result: fail if no application has written a result of this shard; for an `apply` task that does not check
            this itself.
    """

    template_fields: Sequence[str] = (*LanceOperator.template_fields, "shard")
    operator_extra_links = (JobLink(),)

    def __init__(self, *, shard: Any, needs_result: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"map_index_template": SHARD_TITLE, **kwargs})
        self.shard = shard
        self.needs_result = needs_result

    def execute(self, context: Context) -> dict[str, Any]:
        configured = Configuration.read()
        shard = check_shard(self.shard)
        job = load_job(self.open_database(), shard)
        index = shard["shard"]
        if self.needs_result and not job.documents(index).applied:
            raise AirflowFailException(
                f"The apply task of shard {index} ended well, and no application wrote a result of it in "
                f"{job.folder.storage.root}. Its operator must wait for the application, which must reach that "
                "folder: a table on a local disk needs all of Spark on that machine. Then clear the apply task with "
                "its downstream tasks."
            )
        step = job.at_step("commit", index, is_last_try(context.get("ti")))
        with failing_at_once(ExpectationFailed), step, configured.retrying_commits():
            result = job.commit(job.load_shard(index))
        state = "visible" if result.visible else "verified"
        self.log.info(
            "Shard %s of %s: %s %s, %s computed, %s from checkpoints, %s failed, %s left.",
            result.shard, job.spec.target, counted(result.fragments, "fragment"), state,
            counted(result.rows_computed, "row"), result.rows_reused, result.rows_failed, result.rows_left,
        )  # fmt: skip
        shown = result.left_reasons[:_REASONS_TOLD]
        return {
            **result.to_json(),
            "versions": list(result.versions),
            "left_reasons": [f"fragment {fragment}: {why}" for fragment, why in shown],
            "fragments_left": len(result.left_reasons),
        }
