"""Embeddings, chat and extraction with a service that has OpenAI's API."""

from __future__ import annotations

import io
import json
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from string import Formatter
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.limits.rate_limit import check_limit, report
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import BatchFailed, InvalidInput
from airflow_geneva.functions import answers
from airflow_geneva.functions.answers import ForeignAnswer, RefusedAnswer, TooLarge, at_most, decode
from airflow_geneva.functions.made import check_price, check_prices, filled, make
from airflow_geneva.functions.schema import check_answer, json_schema, misfit
from airflow_geneva.functions.service import RETRIES, Service, settings_now

logger = logging.getLogger("airflow_geneva.functions")

_PER = 1e6
_MOST_KEPT = 4_096
_MOST_LISTED = 10_000
_BYTES_PER_TOKEN = 3.0
"""UTF-8 bytes per token, at the low end: English has four or five, few languages and no code have fewer."""


class _Embeddings(Service):
    """Embed texts, many per request. Vectors of a partial answer are kept; only missing ones are requested again."""

    name = "embeddings"
    revision = 1
    dimensions: int
    shorten: bool
    max_inputs: int
    max_tokens: float
    price: float = 0.0

    @classmethod
    def rows_of_requests(cls, text: pa.Array) -> Iterator[tuple[int, int]]:
        """Yield the rows of each request for a batch, within the limits on texts and tokens of a request."""
        start, inputs, tokens = 0, 0, 0.0
        for row, one in enumerate(text.to_pylist()):
            more = len((one or "").encode()) / _BYTES_PER_TOKEN
            if one and (inputs == cls.max_inputs or (inputs and tokens + more > cls.max_tokens)):
                yield start, row
                start, inputs, tokens = row, 0, 0.0
            inputs, tokens = inputs + bool(one), tokens + more
        yield start, len(text)

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[str, np.ndarray] = {}

    async def __call__(self, text: pa.Array) -> pa.Array:
        texts = text.to_pylist()
        at = [row for row, one in enumerate(texts) if one]
        vectors = await self.vectors(list(dict.fromkeys(texts[row] for row in at)))
        return filled([vectors[texts[row]] for row in at], at, len(texts), self.dimensions)

    async def vectors(self, texts: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Return the vectors of texts. If some stay missing, the next call with these texts reuses the others."""
        found = {text: self._kept.pop(text) for text in texts if text in self._kept}
        missing = [text for text in texts if text not in found]
        again = False
        try:
            while missing:
                lengths = await self.ask(missing, found)
                left = [text for text in missing if text not in found]
                if left and (again or len(left) == len(missing)):
                    raise self.incomplete(len(left), len(missing), lengths)
                missing, again = left, True
        except BaseException:
            self._kept |= found
            for text in list(self._kept)[:-_MOST_KEPT]:
                del self._kept[text]
            raise
        return found

    async def ask(self, texts: Sequence[str], found: dict[str, np.ndarray]) -> frozenset[int]:
        """Request vectors and add them to `found`; return their lengths.

        If the service does not return one vector for each text, none of them is used: which text each belongs to is not
        known. Each half of the texts is requested again, down to single texts.

        Raises:
            RefusedAnswer: some texts have no vector, even alone.
        """
        try:
            return await self.request(texts, found)
        except RefusedAnswer as error:
            if len(texts) == 1:
                raise
            logger.warning("%s None is used, and each half of the texts is requested again.", error)
        lengths, refused = frozenset[int](), None
        middle = len(texts) // 2
        for half in (texts[:middle], texts[middle:]):
            try:
                lengths |= await self.ask(half, found)
            except RefusedAnswer as error:
                refused = error
        if refused is not None:
            raise refused
        return lengths

    async def request(self, texts: Sequence[str], found: dict[str, np.ndarray]) -> frozenset[int]:
        """Make a request; add the vectors of its answer, even if it is cut. Return the lengths of these vectors."""
        more = {"dimensions": self.dimensions} if self.shorten else {}
        request = {"model": self.model, "input": texts, "encoding_format": "base64", **more}
        request["extra_body"] = dict(self.extra_body)
        body = bytearray()
        async with self.asking(answers.bytes_of_vectors(len(texts), self.dimensions)) as client:
            try:
                async with client.embeddings.with_streaming_response.create(**request) as answer:
                    await answers.read_into(body, answer)
                vectors = answers.read_vectors(body, len(texts), self.dimensions)
            except RefusedAnswer as error:
                self.report(error.tokens)
                raise
            except (ForeignAnswer, TooLarge):
                raise
            except BaseException:
                cut = answers.read_cut_vectors(body, len(texts), self.dimensions)
                found |= {texts[at]: vector for at, vector in cut.taken.items()}
                raise
        found |= {texts[at]: vector for at, vector in vectors.taken.items()}
        self.report(vectors.tokens)
        return vectors.lengths

    def report(self, tokens: float) -> None:
        report(tokens=tokens, cost=tokens * self.price / _PER)

    def incomplete(self, left: int, asked: int, lengths: frozenset[int]) -> ValueError:
        if other := sorted(lengths - {self.dimensions}):
            numbers = " and ".join(map(str, other))
            return ValueError(f"The model returned vectors of {numbers} numbers, and dimensions={self.dimensions}.")
        return ValueError(
            f"The model {self.model!r} returned {asked - left} vectors of finite numbers for {asked} texts."
        )


class _Chat(Service):
    """Ask a model about a text."""

    name = "chat"
    revision = 1
    instructions: str
    options: Mapping[str, Any]
    template: str | None = None
    prices: tuple[float, float] = (0.0, 0.0)

    async def __call__(self, *values: Any) -> Any:
        text = fill(self.template, values)
        return await self.answer(text) if text else None

    async def answer(self, text: str) -> Any:
        return await self.ask(text)

    async def ask(self, text: str, **more: Any) -> str:
        if self.extra_body:
            more["extra_body"] = dict(self.extra_body)
        body = bytearray()
        request = {"model": self.model, "messages": messages(self.instructions, text), **more, **self.options}
        async with self.asking() as client:
            async with client.chat.completions.with_streaming_response.create(**request) as answer:
                await answers.read_into(body, answer)
            said = decode(body)
            used = answers.tokens_of(said)
            cost = sum(tokens * price / _PER for tokens, price in zip(used, self.prices, strict=True))
            report(tokens=sum(used), cost=cost)
            return answers.read_completion(said, self.options.get("n", 1)).text(self.model)


class _Extraction(_Chat):
    """Ask a model to extract a struct from a text."""

    name = "extraction"
    revision = 1
    schema: Mapping[str, Any]
    kind: pa.DataType

    async def answer(self, text: str) -> dict[str, Any]:
        wanted = {"name": "row", "strict": True, "schema": self.schema}
        said = await self.ask(text, response_format={"type": "json_schema", "json_schema": wanted})
        try:
            found = decode(said)
        except ForeignAnswer as error:
            raise ValueError(f"The answer of the model {self.model!r} is no JSON: {said:.500}") from error
        checked: dict[str, Any] = check_answer(found, self.schema, said)
        try:
            pa.array([checked], self.kind)
        except (pa.ArrowException, OverflowError) as error:
            raise misfit(str(error), said) from error
        return checked


class _Batches(Service):
    """Requests that a service answers within a day at a lower price; a batch is a file of many requests.

    A handle also contains the number of rows of the batch, because rows without a text have no request.
    """

    url: str
    prices: tuple[float, float] = (0.0, 0.0)

    @contextmanager
    def calling(self) -> Iterator[Any]:
        key, url = settings_now(self.connection)
        client = self.openai.OpenAI(api_key=key, base_url=url, max_retries=0, **answers.limited(self.openai))
        with client, self.explained(client):
            yield client

    def submit(self, batch: pa.RecordBatch, key: str) -> dict[str, Any]:
        rows = enumerate(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        bodies = {row: body for row, values in rows if (body := self.body(values)) is not None}
        if not bodies:
            return {"batch": None, "rows": batch.num_rows}
        lines = (
            json.dumps({"custom_id": str(row), "method": "POST", "url": self.url, "body": {**body, **self.extra_body}})
            for row, body in bodies.items()
        )
        with self.calling() as client:
            data = io.BytesIO("\n".join(lines).encode())
            file = client.files.create(file=("rows.jsonl", data), purpose="batch")
            made = client.batches.create(
                input_file_id=file.id,
                endpoint=self.url,
                completion_window="24h",
                metadata={"key": key, "rows": str(batch.num_rows)},
                extra_headers={"Idempotency-Key": key},
            )
        return {"batch": made.id, "rows": batch.num_rows}

    def find(self, key: str) -> dict[str, Any] | None:
        with self.calling() as client:
            for one in islice(client.batches.list(limit=100), _MOST_LISTED):
                match one.metadata:
                    case {"key": found, "rows": str(rows)} if found == key and rows.isdecimal():
                        return {"batch": one.id, "rows": int(rows)}
        return None

    def poll(self, handle: Mapping[str, Any]) -> bool:
        if handle["batch"] is None:
            return True
        with self.calling() as client:
            found = client.batches.retrieve(handle["batch"])
        if found.status in ("failed", "cancelled"):
            raise BatchFailed(f"Batch {found.id} is {found.status}: {found.errors}")
        return found.status in ("completed", "expired")

    def fetch(self, handle: Mapping[str, Any]) -> list[Any]:
        """Return the values and the errors of the rows of a batch.

        A completed batch that does not answer each of its requests once is refused as a whole.
        """
        if handle["batch"] is None:
            return [None] * handle["rows"]
        rows, used = handle["rows"], [0.0, 0.0]

        def outcome(line: Mapping[str, Any]) -> Any:
            response = line.get("response")
            response = response if isinstance(response, dict) else {}
            for at, tokens in enumerate(answers.tokens_of(response.get("body"))):
                used[at] += tokens
            return self.outcome(response, line.get("error"))

        left, outcomes = "The batch ended before this row", dict[str, Any]()
        with self.calling() as client:
            found = client.batches.retrieve(handle["batch"])
            ids = map(str, range(rows))
            sent = answers.match_lines(self.lines(client, rows, found.input_file_id), ids, bool, complete=False)
            answered = self.lines(client, rows, found.output_file_id, found.error_file_id)
            try:
                outcomes = answers.match_lines(answered, sent, outcome, complete=found.status == "completed")
            except (RefusedAnswer, TooLarge) as error:
                left = f"The service's answer to batch {found.id} is not used: {error}."
        report(tokens=sum(used), cost=(used[0] * self.prices[0] + used[1] * self.prices[1]) / _PER)
        return [outcomes.get(row, BatchFailed(left)) if row in sent else None for row in map(str, range(rows))]

    def lines(self, client: Any, rows: int, *names: str | None) -> Iterator[Any]:
        """Yield the lines of files of a batch, parsed."""
        for name in names:
            if name:
                with (
                    at_most(answers.bytes_of_batch(rows)),
                    client.files.with_streaming_response.content(name) as answer,
                ):
                    yield from answers.lines_of(answers.parts_of(answer), rows)

    def outcome(self, response: Mapping[str, Any], error: Any) -> Any:
        """Return the value of a row, or an exception that error policies can match."""
        status, body = response.get("status_code", 0), response.get("body")
        if status == 200:
            try:
                return self.value(body)
            except RefusedAnswer as refused:
                return RefusedAnswer(f"The model {self.model!r} {refused}.")
            except ForeignAnswer as foreign:
                return LookupError(f"The model {self.model!r} gave an answer that is not of OpenAI's API: {foreign}.")
            except ValueError as wrong:
                return wrong
        kind = ValueError if isinstance(status, int) and 400 <= status < 500 else ConnectionError
        return kind(f"The model {self.model!r} gave no answer: {status!r:.100} {body or error!r:.1000}")

    @abstractmethod
    def body(self, values: Sequence[Any]) -> dict[str, Any] | None:
        """Return the body of a row's request; None if the row has no text."""

    @abstractmethod
    def value(self, body: Any) -> Any:
        """Return a row's value from the body of its answer."""


class _BatchEmbeddings(_Batches):
    """Embed texts with a batch API."""

    name = "embeddings"
    revision = 1
    url = "/v1/embeddings"
    dimensions: int
    shorten: bool

    def body(self, values: Sequence[Any]) -> dict[str, Any] | None:
        more = {"dimensions": self.dimensions} if self.shorten else {}
        return {"model": self.model, "input": values[0], **more} if values[0] else None

    def value(self, body: Any) -> np.ndarray:
        return answers.read_vector(body, self.dimensions)


class _BatchChat(_Batches):
    """Ask a model about texts with a batch API."""

    name = "chat"
    revision = 1
    url = "/v1/chat/completions"
    instructions: str
    options: Mapping[str, Any]
    template: str | None = None

    def body(self, values: Sequence[Any]) -> dict[str, Any] | None:
        text = fill(self.template, values)
        return {"model": self.model, "messages": messages(self.instructions, text), **self.options} if text else None

    def value(self, body: Any) -> str:
        return answers.read_completion(body, self.options.get("n", 1)).text(self.model)


def messages(instructions: str, text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": instructions}, {"role": "user", "content": text}]


def inputs_of(template: str | None) -> list[str]:
    """Return the distinct columns that a template names; without a template, the text column."""
    if template is None:
        return ["text"]
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidInput(f"template={template!r}: {error}. Name columns as in '{{title}}: {{text}}'.") from error
    names = list(dict.fromkeys(name for _, name, _, _ in parts if name is not None))
    if not names or not all(names) or any(spec or conversion for _, _, spec, conversion in parts):
        raise InvalidInput(f"template={template!r}: name at least one column, each as in '{{title}}: {{text}}'.")
    return names


def fill(template: str | None, values: Sequence[Any]) -> str:
    """Replace the column names in a template by values; return "" if all values are NULL or empty."""
    names = inputs_of(template)
    if len(values) != len(names):
        raise InvalidInput(f"The template {template!r} takes the columns {names}, and got {len(values)} values.")
    texts = ["" if value is None else str(value) for value in values]
    if template is None or not any(texts):
        return "".join(texts)
    of = dict(zip(names, texts, strict=True))
    parts = Formatter().parse(template)
    return "".join(text + ("" if name is None else of[name]) for text, name, _, _ in parts)


def embeddings(
    model: str,
    dimensions: int,
    *,
    shorten: bool = False,
    input_type: str | None = None,
    extra_body: Mapping[str, Any] | None = None,
    connection: str | None = None,
    price_per_million_tokens: float = 0.0,
    max_inputs: int = 2_048,
    max_tokens: int = 300_000,
    batch_size: int = 256,
    **settings: Any,
) -> UDF:
    """Make a UDF that embeds texts with OpenAI's API. It needs `airflow-geneva[openai]` where it runs.

    The key and the URL come from `OPENAI_API_KEY` and `OPENAI_BASE_URL` where it runs; in Airflow, from the connection
    `openai_conn_id`. NULL and empty texts have no embedding. Equal texts are requested once, also across jobs, unless
    you set `dedup=False`.

    Args:
        model: the model's name.
        dimensions: length of the model's vectors.
        shorten: request vectors of that length from a model that can shorten them.
        input_type: kind of the texts, for a model that distinguishes documents from queries: for most services
            `"document"` or `"query"`. Make one function for each.
        extra_body: more fields of the request, for parameters that OpenAI's API does not have.
        connection: name of the key and URL to use instead of `OPENAI_API_KEY` and `OPENAI_BASE_URL`, for several
            services in one job: in Airflow the connection of this name, elsewhere the variables that end with the name,
            such as `OPENAI_API_KEY_VOYAGE`. It is not part of the version.
        price_per_million_tokens: reported for the tokens of each request, for `max_cost`.
        max_inputs, max_tokens: maximum number of texts, and of their tokens, per request. The defaults are OpenAI's.
            Three bytes count as one token. A `limit` of fewer tokens per minute applies too.
        batch_size: rows per batch; a batch that exceeds the limits of a request is split into several requests.
        settings: arguments of the decorator `udf`: `limit`, `max_in_flight`, `timeout`, `on_error`. By default
            `timeout` is 60 seconds, and `on_error` retries after a `ConnectionError`, `TimeoutError` or `RateLimited`.
    """
    check_whole("dimensions", dimensions)
    check_whole("max_inputs", max_inputs)
    check_whole("max_tokens", max_tokens)
    price = check_price(price_per_million_tokens)
    given = {"model": model, "dimensions": dimensions, "shorten": bool(shorten), **_extra(extra_body, input_type)}
    chosen = {"batch_size": batch_size, **RETRIES, "timeout": 60.0, "deterministic": True, **settings}
    chosen.setdefault("dedup", chosen["deterministic"])
    limit = check_limit(settings.get("limit"))
    request = {
        "max_inputs": max_inputs,
        "max_tokens": min(max_tokens, (limit and limit.tokens_per_minute) or max_tokens),
        "timeout": chosen["timeout"],
        "reports_cost": price > 0,
        "connection": connection,
    }
    kind = pa.list_(pa.float32(), dimensions)
    return make(_Embeddings, kind, given, chosen, price=price, **request)


def chat(
    model: str,
    instructions: str,
    *,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    connection: str | None = None,
    prices_per_million_tokens: tuple[float, float] = (0.0, 0.0),
    **settings: Any,
) -> UDF:
    """Make a UDF that sends a text to a chat model and returns its answer. It needs `airflow-geneva[openai]`.

    Key and URL are found as in :func:`embeddings`. The value of NULL and empty texts is NULL. A refused or truncated
    answer fails the row with a `ValueError`.

    Args:
        model: the model's name.
        instructions: the system message; the text of the row is the user's.
        template: the user's message with column names, as `"{title}: {text}"`; NULL is an empty text there. The columns
            are the inputs, in this order. The template is part of the version.
        options: more arguments of the request, such as `{"temperature": 0, "max_completion_tokens": 200}`.
        extra_body, connection: as in :func:`embeddings`.
        prices_per_million_tokens: prices of prompt and answer, reported for each request, for `max_cost`.
        settings: arguments of the decorator `udf`, as in :func:`embeddings`; `timeout` is 300 seconds by default.
    """
    given = {"model": model, "instructions": instructions, "options": dict(options or {}), **_extra(extra_body)}
    return _make_chat(_Chat, pa.string(), template, given, settings, prices_per_million_tokens, connection=connection)


def extraction(
    model: str,
    instructions: str,
    schema: pa.StructType,
    *,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    connection: str | None = None,
    prices_per_million_tokens: tuple[float, float] = (0.0, 0.0),
    **settings: Any,
) -> UDF:
    """Make a UDF that asks a chat model to extract typed fields from a text, as a struct.

    The request contains the schema as a JSON schema. An answer that does not match it fails the row with a `ValueError`
    that names the mismatch. Key, URL and other settings are as in :func:`chat`.

    Args:
        model: the model's name; it must support `response_format`.
        instructions: the system message; the text of the row is the user's.
        schema: a `pa.struct` of texts, numbers, booleans, lists and structs. The answer must contain every field that
            is not nullable. The metadata `description` of a field is sent to the model.
        template, extra_body, connection: as in :func:`chat`.
        options: more arguments of the request.
        prices_per_million_tokens: price of the prompt and price of the answer. settings: arguments of the decorator
            `udf`, as in :func:`chat`.
    """
    if not isinstance(schema, pa.StructType):
        raise InvalidInput(f"schema={schema!r:.200}: give a pa.struct with a field for each thing to extract.")
    given = {
        "model": model,
        "instructions": instructions,
        "options": dict(options or {}),
        "schema": json_schema(schema),
        **_extra(extra_body),
    }
    more = {"kind": schema, "connection": connection}
    return _make_chat(_Extraction, schema, template, given, settings, prices_per_million_tokens, **more)


def batch_embeddings(
    model: str,
    dimensions: int,
    *,
    shorten: bool = False,
    input_type: str | None = None,
    extra_body: Mapping[str, Any] | None = None,
    connection: str | None = None,
    price_per_million_tokens: float = 0.0,
    batch_size: int = 40_000,
    **settings: Any,
) -> UDF:
    """Make a UDF that embeds texts with OpenAI's batch API, which answers within a day at half the price.

    With the same parameters it has the version of :func:`embeddings`: after it has computed a table, `alter_columns`
    can set :func:`embeddings` for later rows; nothing is recomputed.

    Args:
        price_per_million_tokens: batch API price, reported when a batch is fetched; `max_cost` also needs `cost=`.
        batch_size: maximum number of texts per batch; OpenAI accepts 50,000 in a file of up to 200 MB.
        settings: arguments of the decorator `udf`: `poll_interval`, by default 300 seconds, `cost`, `on_error`.
    """
    check_whole("dimensions", dimensions)
    price = check_price(price_per_million_tokens)
    given = {"model": model, "dimensions": dimensions, "shorten": bool(shorten), **_extra(extra_body, input_type)}
    chosen = {"input_columns": ["text"], "batch_size": batch_size, "poll_interval": 300.0, **RETRIES, **settings}
    kind = pa.list_(pa.float32(), dimensions)
    return make(_BatchEmbeddings, kind, given, chosen, prices=(price, 0.0), connection=connection)


def batch_chat(
    model: str,
    instructions: str,
    *,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    connection: str | None = None,
    prices_per_million_tokens: tuple[float, float] = (0.0, 0.0),
    batch_size: int = 40_000,
    **settings: Any,
) -> UDF:
    """Make a UDF that asks a chat model with OpenAI's batch API, which answers within a day at half the price.

    It has the arguments of :func:`chat` and :func:`batch_embeddings`, and the same version as :func:`chat`.
    """
    given = {"model": model, "instructions": instructions, "options": dict(options or {}), **_extra(extra_body)}
    given |= {} if template is None else {"template": template}
    named = {"input_columns": inputs_of(template), "batch_size": batch_size, "poll_interval": 300.0}
    prices = check_prices(prices_per_million_tokens)
    return make(_BatchChat, pa.string(), given, {**named, **RETRIES, **settings}, prices=prices, connection=connection)


def _extra(extra_body: object, input_type: str | None = None) -> dict[str, Any]:
    """Return the request's fields beyond OpenAI's API as a parameter; none if empty, to leave the version unchanged."""
    if extra_body is not None and not isinstance(extra_body, Mapping):
        raise InvalidInput(f'extra_body={extra_body!r:.200}: give a dict, such as {{"truncate": "END"}}.')
    body = {**(extra_body or {}), **({} if input_type is None else {"input_type": input_type})}
    return {"extra_body": body} if body else {}


def _make_chat(
    base: type,
    data_type: pa.DataType,
    template: str | None,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    prices: object,
    **more: Any,
) -> UDF:
    chosen = {**RETRIES, "timeout": 300.0, "input_columns": inputs_of(template), **settings}
    given = given if template is None else {**given, "template": template}
    more |= {"prices": (paid := check_prices(prices)), "timeout": chosen["timeout"], "reports_cost": any(paid)}
    return make(base, data_type, given, chosen, **more)
