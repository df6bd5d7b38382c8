"""Named points at which tests kill the process; they cost nothing when off."""

from __future__ import annotations

import os
import signal

_ARMED = os.environ.get("AIRFLOW_GENEVA_FAULT", "")
_hits = 0


def fault_point(name: str) -> None:
    """Kill this process with SIGKILL if ``AIRFLOW_GENEVA_FAULT`` is ``name``, or at the n-th call for ``name:n``.

    ``any:n`` counts the calls for all points.
    """
    if not _ARMED:
        return
    global _hits
    wanted, _, count = _ARMED.partition(":")
    if wanted in (name, "any"):
        _hits += 1
        if _hits >= int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
