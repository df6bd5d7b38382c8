"""Threads, queues, waiting, time, chance and ids: the standard library's, which a simulation of the engine replaces.

The engine takes them from here only, so that `tests/simulation` can decide which thread goes on, what time it is and
which ids are given out. Event loops come from `asyncio.new_event_loop`, which it replaces too.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, TimeoutError as FutureTimeout, wait
from datetime import datetime, timezone
from queue import SimpleQueue

__all__ = [
    "CancelledError",
    "Future",
    "FutureTimeout",
    "SimpleQueue",
    "ThreadPoolExecutor",
    "random",
    "threading",
    "time",
    "utc_now",
    "uuid",
    "wait",
]


def utc_now() -> datetime:
    return datetime.fromtimestamp(time.time(), timezone.utc)
