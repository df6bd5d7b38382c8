"""What a process remembers for all its jobs, because no job, table or store is the only one that uses it."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class ProcessMemo(dict[_Key, _Value]):
    """A dict of this process, which another process begins empty.

    Args:
        most: number of values; a new one drops the oldest. Without it, values are kept until they are removed.
    """

    def __init__(self, most: float = inf) -> None:
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        while len(self) > self._most:
            with suppress(KeyError, RuntimeError):  # another thread changes it meanwhile
                del self[next(iter(self))]
