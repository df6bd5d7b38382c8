"""What a process remembers for all its jobs, because no job, table or store is the only one that uses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import TypeVar

from airflow_geneva.engine.runtime import threading

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class ProcessMemo(dict[_Key, _Value]):
    """A dict that lives as long as this process; no other process sees it.

    Args:
        most: number of values; a new one drops the oldest. Without it, values are kept until they are removed.
    """

    def __init__(self, most: float = inf) -> None:
        self._most = most
        self._making = threading.RLock()

    def once(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key; one thread makes it, and others wait for it."""
        with self._making:
            with suppress(KeyError):
                return self[key]
            made = self[key] = make()
            return made

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._most:
            with suppress(KeyError, RuntimeError):  # another thread changes it meanwhile
                del self[next(iter(self))]
