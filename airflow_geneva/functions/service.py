"""A service that has OpenAI's API: its key and URL, a client for each event loop, and errors that say what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from airflow_geneva.engine.limits.calls import must_pay, retry_after
from airflow_geneva.engine.limits.rate_limit import RateLimited
from airflow_geneva.engine.masking import service_variables
from airflow_geneva.engine.udf import Retry
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions.answers import (
    MAX_BYTES,
    CutAnswer,
    ForeignAnswer,
    RefusedAnswer,
    TooLarge,
    at_most,
    limited_async,
)
from airflow_geneva.functions.made import library

_OPENAI = "https://api.openai.com/v1"
_PASSING = (ConnectionError, TimeoutError, RateLimited)
RETRIES = {"on_error": [Retry(kind, attempts=4) for kind in _PASSING]}

_CHECK_URL = "Check OPENAI_BASE_URL, in Airflow the host of the connection: most end in /v1."
_SET_KEY = "Set OPENAI_API_KEY, in Airflow the password of the connection, to a key that may use the model."
_PAY = "The account may use no more until it is paid for, or its budget is raised."
_NO_MODEL = f"Check the model's name. {_CHECK_URL}"
_REFUSALS: Mapping[int, tuple[type[Exception], str]] = {
    401: (PermissionError, _SET_KEY),
    403: (PermissionError, _SET_KEY),
    404: (LookupError, _NO_MODEL),
    **dict.fromkeys((400, 413, 422), (ValueError, "")),
}


def settings_now(connection: str | None = None) -> tuple[str, str]:
    """Return the current key and URL, of a connection or the default ones; raise `InvalidInput` if they cannot work."""
    name, place = service_variables(connection)
    key, url = os.environ.get(name, ""), os.environ.get(place, "")
    if not key and connection:
        raise InvalidInput(
            f"There is no {name} where this function runs, which has connection={connection!r}. Tasks of Airflow set "
            f"it by the connection of that name. Elsewhere set it, and {place} for another service than OpenAI."
        )
    if not key:
        raise InvalidInput(
            "There is no OPENAI_API_KEY where this function runs. In Airflow, name a connection: "
            "openai_conn_id='openai_default'. Elsewhere set it, and OPENAI_BASE_URL for another service than "
            "OpenAI; a service without keys takes any text."
        )
    if url and not url.startswith(("https://", "http://")):
        raise InvalidInput(
            f"{place}={url!r} begins with neither https:// nor http://. In Airflow it is the host of the "
            "connection, scheme included."
        )
    return key, url or _OPENAI


def _refusal(kind: type[Exception], message: str, status: int) -> Exception:
    """Return an error with the HTTP status by which error policies and advice classify it."""
    error: Any = kind(message)
    error.status_code = status
    return error  # type: ignore[no-any-return]


@dataclass(eq=False)
class _Client:
    """A client with the settings that it was made with, and the number of calls that use it now."""

    settings: tuple[str, str]
    api: Any
    calls: int = 0


class Service:
    """Base of the UDFs that call the service; has one client per event loop, because connections belong to a loop.

    The client does not retry: `limit` handles a 429, and `on_error` all other errors. Its timeout is that of the
    function.
    """

    model: str
    timeout: float | None = None
    connection: str | None = None
    extra_body: Mapping[str, Any] = MappingProxyType({})
    reports_cost: bool

    def __init__(self) -> None:
        self.openai = library("openai", "airflow-geneva[openai]")
        settings_now(self.connection)
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Client] = WeakKeyDictionary()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """Yield the client for one call; a replaced client is closed when its last call ends.

        If the garbage collector removes a client instead, its sockets close before its connections are removed from the
        event loop. The removal may then hit new connections that have the same file descriptors, and their calls never
        end.
        """
        loop, settings = asyncio.get_running_loop(), settings_now(self.connection)
        before = self._clients.get(loop)
        if before is None or before.settings != settings:  # a user may have corrected them
            key, url = settings
            bounded = limited_async(self.openai)
            api = self.openai.AsyncOpenAI(api_key=key, base_url=url, max_retries=0, timeout=self.timeout, **bounded)
            self._clients[loop] = _Client(settings, api)
        used = self._clients[loop]
        used.calls += 1
        try:
            if before is not None and before is not used and not before.calls:
                await before.api.close()
            yield used.api
        finally:
            used.calls -= 1
            if not used.calls and used is not self._clients[loop]:
                await used.api.close()

    @asynccontextmanager
    async def asking(self, size: int = MAX_BYTES) -> AsyncIterator[Any]:
        """Yield the client, and raise errors that policies can match; each names the service and the request.

        `ConnectionError` is transient, `RateLimited` is a 429, `ValueError` concerns the input, others concern the
        settings.

        Args:
            size: maximum bytes of an answer.
        """
        async with self.client() as client:
            with self.explained(client), at_most(size):
                yield client

    @contextmanager
    def explained(self, client: Any) -> Iterator[None]:
        asked = f"The model {self.model!r} at {client.base_url}"
        try:
            with _own_errors(self.openai):
                yield
        except RefusedAnswer as error:
            raise RefusedAnswer(f"{asked} {error}.", error.tokens) from None
        except TooLarge as error:
            raise ValueError(f"{asked} gave {error}.") from None
        except CutAnswer as error:
            raise ConnectionError(f"{asked} gave no whole answer: {error.__cause__ or error!r}") from error
        except self.openai.RateLimitError as error:
            if must_pay(error):
                raise _refusal(PermissionError, f"{asked} refused: {error.message:.1000} {_PAY}", 402) from None
            raise RateLimited(str(error), retry_after=retry_after(error)) from error
        except (self.openai.APIConnectionError, self.openai.InternalServerError) as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise ConnectionError(f"{asked} gave no answer: {error}{cause}") from error
        except self.openai.APIStatusError as error:
            if error.status_code not in _REFUSALS:
                raise
            kind, remedy = _REFUSALS[error.status_code]
            refused = f"{asked} refused: {error.message:.1000} {remedy}".rstrip()
            raise _refusal(kind, refused, error.status_code) from None
        except (AttributeError, ForeignAnswer) as error:
            raise LookupError(f"{asked} gave an answer that is not of OpenAI's API: {error}. {_CHECK_URL}") from error


@contextmanager
def _own_errors(openai: Any) -> Iterator[None]:
    """Raise errors about an answer as they are, where some versions of the library make connection errors of them."""
    try:
        yield
    except openai.APIConnectionError as error:
        if isinstance(error.__cause__, (CutAnswer, ForeignAnswer, TooLarge)):
            raise error.__cause__ from None
        raise
