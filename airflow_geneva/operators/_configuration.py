"""What section `[geneva]` of Airflow's configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow.providers.common.compat.sdk import AirflowFailException, conf

from airflow_geneva.commit.conflicts import max_retries
from airflow_geneva.get_provider_info import get_provider_info

_SECTION = "geneva"
_LEAST = {"inline_below_rows": 0, "concurrency": 1, "version_conflict_max_retries": 0}


@dataclass(frozen=True)
class Configuration:
    """The options of a deployment, which `get_provider_info` describes.

    Args:
        inline_below_rows: a shard with fewer rows to run is computed in its task.
        concurrency: Spark task slots per spark-submit.
        version_conflict_max_retries: how often a commit is tried again.
    """

    inline_below_rows: int
    concurrency: int
    version_conflict_max_retries: int

    @staticmethod
    def read() -> Configuration:
        """Read all options, so that a wrong one is found by the first task of a run and not by its last.

        Raises:
            AirflowFailException: an option is not a number that makes sense.
            InvalidInput: the environment variable that goes before one is not.
        """
        max_retries()
        options = get_provider_info()["config"][_SECTION]["options"]
        return Configuration(**{name: _read(name, option) for name, option in options.items()})


def _read(name: str, option: Mapping[str, Any]) -> int:
    text = str(conf.get(_SECTION, name, fallback=option["default"])).strip()
    if not text.isdecimal() or int(text) < _LEAST[name]:
        raise AirflowFailException(
            f"[geneva] {name} is {text!r}, and not a whole number of {_LEAST[name]} or more. Correct it in "
            f"airflow.cfg on the workers, or in their environment: AIRFLOW__GENEVA__{name.upper()}."
        )
    return int(text)
