"""Read section `[geneva]` of Airflow's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, conf

from airflow_geneva.get_provider_info import get_provider_info
from airflow_geneva.lance_io.conflicts import max_retries
from airflow_geneva.lance_io.task_memory import LEAST_TASK_MEMORY

_SECTION = "geneva"


def _option(least: int) -> Any:
    return field(metadata={"least": least})


@dataclass(frozen=True)
class Configuration:
    """The options in section `[geneva]`; `get_provider_info` describes each with its default.

    Args:
        inline_below_rows: a shard with fewer rows to run is computed in its task.
        concurrency: Spark task slots per spark-submit.
        version_conflict_max_retries: how often a commit is retried.
        task_memory_bytes: bytes of rows that a task slot holds at a time.
    """

    inline_below_rows: int = _option(least=0)
    concurrency: int = _option(least=1)
    version_conflict_max_retries: int = _option(least=0)
    task_memory_bytes: int = _option(least=LEAST_TASK_MEMORY)

    @staticmethod
    def read() -> Configuration:
        """Read all options, so that the first task of a run finds a wrong one, not the last.

        Raises:
            AirflowFailException: an option is not a valid number.
            InvalidInput: an environment variable that overrides an option is not a valid number.
        """
        max_retries()
        options = get_provider_info()["config"][_SECTION]["options"]
        own = fields(Configuration)
        return Configuration(**{f.name: _read(f.name, options[f.name]["default"], f.metadata["least"]) for f in own})


def _read(name: str, default: str, least: int) -> int:
    text = str(conf.get(_SECTION, name, fallback=default)).strip()
    if not text.isdecimal() or int(text) < least:
        raise AirflowFailException(
            f"[geneva] {name} is {text!r}, and not a whole number of {least} or more. Correct it in "
            f"airflow.cfg on the workers, or in their environment: AIRFLOW__GENEVA__{name.upper()}."
        )
    return int(text)
