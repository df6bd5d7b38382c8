"""What another process would know: nothing of what this one remembers."""

from __future__ import annotations

import sys

from airflow_geneva.engine.process_memo import ProcessMemo


def as_another_process() -> None:
    """Go on as if what follows ran in another process."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "airflow_geneva":
            for value in list(vars(module).values()):
                if isinstance(value, ProcessMemo):
                    value.clear()
                elif hasattr(type(value), "cache_clear"):
                    value.cache_clear()
