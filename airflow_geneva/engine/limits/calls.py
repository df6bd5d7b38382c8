"""Call a UDF within its limit: wait for a reservation, repeat the call after a 429, and report its usage."""

from __future__ import annotations

import asyncio
import email.utils
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.counts import Usage
from airflow_geneva.engine.limits.limiter import Limiter, Pass, TokenGuess, limiter_of
from airflow_geneva.engine.limits.rate_limit import Meter, RateLimit, RateLimited, count, metered
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.location import TableLocation

logger = logging.getLogger("airflow_geneva.limits")

_CHARS_PER_TOKEN = 4.0
_GIVE_UP_SECONDS = 600.0
_MOST_SECONDS = 3_600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_TOO_MANY_REQUESTS = 429
_NO_MONEY = "insufficient_quota"

_table: ContextVar[TableLocation | None] = ContextVar("geneva_table", default=None)


@contextmanager
def calling(table: TableLocation | None, meter: Meter) -> Iterator[None]:
    """Call functions for a table in this block: apply the limits of its database, and add their usage to a meter."""
    token = _table.set(table)
    try:
        with metered(meter):
            yield
    finally:
        _table.reset(token)


def table_at_hand() -> TableLocation | None:
    """Return the table for which functions are called in the current block."""
    return _table.get()


def limited(
    function: Callable[..., Any],
    limit: RateLimit | None,
    name: str,
    is_async: bool = False,
    mark: Callable[[bool], None] = lambda _: None,
) -> Callable[..., Any]:
    """Return a function that calls `function` within a limit, or `function` itself outside of `calling`.

    Args:
        name: name of the UDF, by which the tokens of its calls are estimated.
        mark: called with True when a call starts, and with False when it waits.
    """
    table = _table.get()
    if limit is None or table is None:
        return function
    limiter = limiter_of(table.limits, limit)
    calls = LimitedCalls(function, limiter, limiter.guesses.setdefault(name, TokenGuess()), mark)
    return calls.call_async if is_async else calls.call


class LimitedCalls:
    """A function within a limit, as a plain function and as a coroutine function."""

    def __init__(
        self, function: Callable[..., Any], limiter: Limiter, guess: TokenGuess, mark: Callable[[bool], None]
    ) -> None:
        self.function = function
        self.limiter = limiter
        self.guess = guess
        self.mark = mark

    def call(self, *arguments: Any) -> Any:
        try:
            return self._call(arguments)
        finally:
            self.limiter.settle()

    async def call_async(self, *arguments: Any) -> Any:
        try:
            answer = await self._call_async(arguments)
        except Exception:
            await asyncio.to_thread(self.limiter.settle)
            raise
        await asyncio.to_thread(self.limiter.settle)
        return answer

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        trial = self._begin(arguments)
        while True:
            self.mark(False)
            trial.begun, trial.passed = False, Pass(self.guess.of(trial.by_text))
            with self._settling(trial):
                while (pause := self.limiter.step(trial.passed)) > 0:
                    time.sleep(pause)
                trial.begun = True
                self.mark(True)
                try:
                    return self.function(*arguments)
                except Exception as error:
                    seconds = trial.pause_after(error)
                    if seconds is None:
                        raise
            self.limiter.pause(seconds)

    async def _call_async(self, arguments: tuple[Any, ...]) -> Any:
        trial = self._begin(arguments)
        while True:
            trial.begun, trial.passed = False, Pass(self.guess.of(trial.by_text))
            with self._settling(trial):
                while (pause := await asyncio.to_thread(self.limiter.step, trial.passed)) > 0:
                    await asyncio.sleep(pause)
                trial.begun = True
                try:
                    return await self.function(*arguments)
                except Exception as error:
                    seconds = trial.pause_after(error)
                    if seconds is None:
                        raise
            await asyncio.to_thread(self.limiter.pause, seconds)

    def _begin(self, arguments: tuple[Any, ...]) -> _Trial:
        counts = self.limiter.limit.tokens_per_minute is not None
        return _Trial(sum(map(_chars_of, arguments)) / _CHARS_PER_TOKEN if counts else 0.0)

    @contextmanager
    def _settling(self, trial: _Trial) -> Iterator[None]:
        meter = Meter()
        try:
            with metered(meter):
                yield
        finally:
            used = meter.usage
            self.limiter.done(trial.passed, used.calls or 1, used.tokens or None)
            if trial.begun:
                count(Usage(used.calls or 1, used.tokens, used.cost))
            if used.tokens:
                self.guess.learn(trial.by_text, used.tokens)


@dataclass
class _Trial:
    """The attempts of one call: its estimated tokens, and when and how often the service answered 429."""

    by_text: float
    passed: Pass = field(default_factory=lambda: Pass(0.0))
    refused_since: float | None = None
    refused: int = 0
    begun: bool = False

    def pause_after(self, error: Exception) -> float | None:
        """Return the seconds that all calls wait before this one is repeated; None if the error is not a 429."""
        found = retry_after(error)
        if found is None:
            return None
        now = time.monotonic()
        self.refused_since = now if self.refused_since is None else self.refused_since
        if now - self.refused_since > _GIVE_UP_SECONDS:
            return None
        self.refused += 1
        seconds = found if found > 0 else min(_FIRST_PAUSE * 2 ** (self.refused - 1), _LONGEST_PAUSE)
        logger.info("The service allows no more requests; calls wait for %.1f s: %s", seconds, error)
        return seconds


def retry_after(error: BaseException) -> float | None:
    """Return the seconds to wait that an exception about too many requests names, 0 if it names none.

    Any other exception returns None, also one about an account without money. Exceptions of httpx, requests, openai,
    aiohttp and urllib are recognized by their status 429 and the headers of their response.
    """
    if isinstance(error, RateLimited):
        return max(error.retry_after or 0.0, 0.0)
    response = getattr(error, "response", None)
    places = [place for place in (error, response) if place is not None]
    statuses = [getattr(place, name, None) for place in places for name in ("status_code", "status", "code")]
    if _TOO_MANY_REQUESTS not in statuses or must_pay(error):
        return None
    headers = (getattr(place, "headers", None) for place in reversed(places))
    return seconds_of(next((found for found in headers if found is not None), {}))


def must_pay(error: object) -> bool:
    """Whether the account has no money left, for which OpenAI's API also answers 429."""
    return _NO_MONEY in (getattr(error, "code", None), getattr(error, "type", None))


def seconds_of(headers: Mapping[str, str]) -> float:
    """Return the seconds to wait that the headers of an answer name; 0 if they name none."""
    named = {str(name).lower(): str(value).strip() for name, value in dict(headers).items()}
    seconds = 0.0
    with suppress(ValueError, TypeError, KeyError):
        if "retry-after-ms" in named:
            seconds = float(named["retry-after-ms"]) / 1_000
        elif named.get("retry-after", "")[-4:].upper().endswith("GMT"):
            # Compare dates of the server only, because this machine's clock may be wrong.
            until, now = (email.utils.parsedate_to_datetime(named[name]) for name in ("retry-after", "date"))
            seconds = (until - now).total_seconds()
        else:
            seconds = float(named["retry-after"])
    return min(seconds, _MOST_SECONDS) if seconds > 0 else 0.0


def _chars_of(argument: Any) -> float:
    """Return the number of characters in the texts of an argument."""
    if isinstance(argument, str):
        return len(argument)
    if isinstance(argument, pa.RecordBatch):
        return sum(map(_chars_of, argument.columns))
    if isinstance(argument, pa.Array) and (
        pa.types.is_string(argument.type) or pa.types.is_large_string(argument.type)
    ):
        return float(pc.sum(pc.utf8_length(argument)).as_py() or 0)
    return 0.0
