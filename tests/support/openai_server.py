"""A server on loopback with OpenAI's API for embeddings, chat, files and batches: it enforces limits, fails on request,
and counts requests and payments. It runs in a separate process, with the standard library only.

    with OpenAIServer(requests_per_minute=600) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0)
        ...
        server.change(fail_rate={"500": 0.1})
        assert server.counts().most_paid == 1
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import math
import random
import struct
import subprocess
import sys
import time
import urllib.request
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

WRONG: Mapping[str, Callable[[list[dict[str, Any]], int], list[dict[str, Any]]]] = {
    "fewer": lambda data, at: _numbered([*data[:at], *data[at + 1 :]]),
    "hole": lambda data, at: [*data[:at], *data[at + 1 :]],
    "more": lambda data, at: _numbered([data[at], *data]),
    "twice": lambda data, at: [*data, data[at]],
    "same": lambda data, at: [{**one, "index": max(one["index"] - 1, 0)} for one in data],
    "unnumbered": lambda data, at: [{**one, "index": 0} for one in data],
    "from one": lambda data, at: [{**one, "index": one["index"] + 1} for one in data],
    "negative": lambda data, at: [{**one, "index": one["index"] - len(data)} for one in data],
    "nameless": lambda data, at: [*data[:at], {"embedding": data[at]["embedding"]}, *data[at + 1 :]],
    "quoted": lambda data, at: [{**one, "index": str(one["index"])} for one in data],
}
"""Ways of an answer that is complete, but whose vectors cannot be assigned: they get the vectors and the position of
the text that `fail_inputs` names."""

FAILURES = ("400", "429", "500", "quota", "hang", "cut", "short", *WRONG)
"""How a request fails: with a status, with no answer until the client goes, with half of a paid answer, with one vector
too short, that of the text that `fail_inputs` names or the first one, or in a way of `WRONG`."""


@dataclass(frozen=True)
class Settings:
    """How the server behaves; limits hold for each API key, and in every window of `window_seconds`.

    Args:
        requests_per_minute, tokens_per_minute, concurrent: limits; None: no limit.
        max_inputs, max_tokens: most inputs and tokens of a request; one with more gets 400.
        window_seconds: length of the windows in which limits are enforced, each with its fraction of a minute's limit.
        latency: seconds that an answer takes.
        chars_per_token, completion_tokens: how tokens are counted, of texts and of a chat's answer.
        dimensions: length of an embedding, unless the request names one.
        fail_rate: how often requests fail in each way, as fractions by name of `FAILURES`.
        fail_inputs: for a text inside an input, the way in which its requests fail, or how often at most:
            ``{"poison": "500", "once": ["429", 1]}``.
        retry_after: seconds that a 429 at will names; None: no header.
        chat_answers: for a text inside a chat's last message, the answer; else it is made by `answer_to`.
        batch_seconds: seconds until a batch is completed.
        batch_answers: how the lines of a batch's answers are wrong: "fewer", "twice", "unknown", or "renumbered".
        raw_answer: body of every answer to a model request, and how often it is repeated.
        raw_headers, raw_status: headers and status of such an answer.
        gzip: whether all answers are compressed, as some proxies do, whatever a request accepts.
        api_keys: accepted keys; none: any.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None
    max_inputs: int | None = None
    max_tokens: int | None = None
    window_seconds: float = 60.0
    latency: float = 0.0
    chars_per_token: float = 4.0
    completion_tokens: int = 16
    dimensions: int = 8
    fail_rate: Mapping[str, float] = field(default_factory=dict)
    fail_inputs: Mapping[str, Any] = field(default_factory=dict)
    retry_after: float | None = 1.0
    chat_answers: Mapping[str, str] = field(default_factory=dict)
    batch_seconds: float = 0.2
    batch_answers: str = ""
    raw_answer: tuple[str, int] | None = None
    raw_headers: Mapping[str, str] = field(default_factory=dict)
    raw_status: int = 200
    gzip: bool = False
    api_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Counts:
    """The server's counts since its start or `reset`.

    Args:
        requests: all requests to the API; `refused` of them got 429 because of a limit.
        failed: requests that failed at will, by the way.
        rows: inputs that were paid, also in cut answers, and in those whose client was gone.
        tokens: tokens that were paid.
        most_concurrent: most requests of one key at a time.
        admitted, admitted_tokens: paid requests, and their tokens, by the second since the start.
        batches: batches that were submitted.
        paid: how often each input was paid.
        last_request: the body of the last request to a model.
    """

    requests: int
    refused: int
    failed: dict[str, int]
    rows: int
    tokens: int
    most_concurrent: int
    admitted: dict[str, int]
    admitted_tokens: dict[str, int]
    batches: int
    paid: dict[str, int]
    last_request: dict[str, Any]

    @property
    def most_paid(self) -> int:
        return max(self.paid.values(), default=0)

    @property
    def paid_again(self) -> int:
        """Number of payments after the first one of each input."""
        return self.rows - len(self.paid)


def embedding_of(text: str, dimensions: int = 8) -> list[float]:
    """Return the embedding that the server gives for a text: numbers from -1 to 1 that float32 holds exactly."""
    digest = hashlib.shake_128(text.encode()).digest(2 * dimensions)
    return [number / 32_768 for number in struct.unpack(f"<{dimensions}h", digest)]


def packed_embedding(text: str, dimensions: int) -> str:
    """Return the embedding in base64, as the API gives it on a little-endian machine: a float in four bytes."""
    numbers = array("h", hashlib.shake_128(text.encode()).digest(2 * dimensions))
    floats = array("f", map((1 / 32_768).__mul__, numbers))
    return base64.b64encode(floats).decode()


def answer_to(text: str, schema: Mapping[str, Any] | None = None) -> str:
    """Return the chat's answer to a text: an echo, or JSON of a schema with the text in its strings."""
    return f"echo: {text}" if schema is None else json.dumps(_value_of(schema, text))


def _value_of(schema: Mapping[str, Any], text: str) -> Any:
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    match kind:
        case "object":
            return {name: _value_of(inner, text) for name, inner in schema.get("properties", {}).items()}
        case "array":
            return [_value_of(schema.get("items", {}), text)]
        case "integer" | "number":
            return len(text)
        case "boolean":
            return bool(text)
    return schema["enum"][0] if schema.get("enum") else text


class OpenAIServer:
    """The server as a context manager, in a process that ends with this one."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)

    def __enter__(self) -> OpenAIServer:
        command = [sys.executable, __file__, json.dumps(asdict(self.settings))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def begin(self, **settings: Any) -> None:
        """Be as a server that was just started with these settings."""
        self.settings = Settings()
        self.change(**settings)
        self.reset()

    def change(self, **settings: Any) -> None:
        """Change some settings while it runs; what was counted stays."""
        self.settings = replace(self.settings, **settings)
        self._ask("/_settings", asdict(self.settings))

    def reset(self) -> None:
        """Reset the counts and the windows of the limits."""
        self._ask("/_reset", {})

    def counts(self, paid: bool = True) -> Counts:
        """Return what was counted; how often each input was paid only when asked."""
        return Counts(**self._ask("/_counts", {"paid": paid}))

    def _ask(self, path: str, body: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            return json.load(answer)


@dataclass
class _Window:
    """What one key was granted in the last window: requests with their times and tokens."""

    granted: deque[tuple[float, int]] = field(default_factory=deque)
    tokens: int = 0
    running: int = 0

    def forget(self, before: float) -> None:
        while self.granted and self.granted[0][0] <= before:
            self.tokens -= self.granted.popleft()[1]

    def add(self, now: float, tokens: int) -> None:
        self.granted.append((now, tokens))
        self.tokens += tokens


class _Answer(Exception):
    """A status, headers, and a document, raw bytes, or half of one; raised, it ends a request."""

    def __init__(self, status: int, document: Any, headers: Mapping[str, str] | None = None, cut: bool = False) -> None:
        self.status, self.document, self.headers, self.cut = status, document, dict(headers or {}), cut


def _error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> _Answer:
    return _Answer(status, {"error": {"message": message, "type": kind, "code": kind, "param": None}}, headers)


class _Server:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        self.windows: dict[str, _Window] = {}
        self.last: dict[str, Any] = {}
        self.numbers: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.failed_inputs: Counter[str] = Counter()
        self.admitted: Counter[str] = Counter()
        self.admitted_tokens: Counter[str] = Counter()
        self.paid: Counter[str] = Counter()
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.most_concurrent = 0
        self.began = time.monotonic()

    def counts(self, paid: bool) -> dict[str, Any]:
        numbers = self.numbers
        found = Counts(
            numbers["requests"], numbers["refused"], dict(self.failed), numbers["rows"], numbers["tokens"],
            self.most_concurrent, dict(self.admitted), dict(self.admitted_tokens), numbers["batches"],
            dict(self.paid) if paid else {}, self.last,
        )  # fmt: skip
        return asdict(found)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                lines = (line.partition(":") for line in head[1:] if line)
                headers = {name.lower(): value.strip() for name, _, value in lines}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                try:
                    found = await self.route(method, target.partition("?")[0], headers, body, reader)
                    answer = found if isinstance(found, _Answer) else _Answer(200, found)
                except _Answer as early:
                    answer = early
                if not self.write(writer, answer, self.settings.gzip and target.startswith("/v1/")):
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def write(self, writer: asyncio.StreamWriter, answer: _Answer, compressed: bool) -> bool:
        """Write an answer; return whether the connection goes on."""
        raw = isinstance(answer.document, bytes)
        body = answer.document if raw else json.dumps(answer.document).encode()
        headers = {"content-type": "application/octet-stream" if raw else "application/json"}
        if compressed:
            body, headers = gzip.compress(body), {**headers, "content-encoding": "gzip"}
        headers |= {"content-length": str(len(body)), **answer.headers}
        head = f"HTTP/1.1 {answer.status} -\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(head.encode() + b"\r\n" + (body[: len(body) // 2] if answer.cut else body))
        return not answer.cut

    async def route(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, reader: asyncio.StreamReader
    ) -> Any:
        if path == "/_counts":
            return self.counts(json.loads(body)["paid"])
        if path == "/_settings":
            self.settings = Settings(**json.loads(body))
            return {}
        if path == "/_reset":
            self.reset()
            return {}
        key = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not key or (self.settings.api_keys and key not in self.settings.api_keys):
            raise _error(401, "invalid_api_key", "Incorrect API key provided.")
        self.numbers["requests"] += 1
        match [method, *path.removeprefix("/v1/").split("/")]:
            case ["POST", "embeddings"] | ["POST", "chat", "completions"]:
                return await self.model(key, path, self.parse(body), reader)
            case ["POST", "files"]:
                return self.file(self.put(_uploaded(headers, body)))
            case ["GET", "files", name] if name in self.files:
                return self.file(name)
            case ["GET", "files", name, "content"] if name in self.files:
                return self.files[name]
            case ["POST", "batches"]:
                return self.submit(self.parse(body))
            case ["GET", "batches"]:
                found = [self.look(name) for name in reversed(self.batches)]
                return {"object": "list", "data": found, "has_more": False}
            case ["GET", "batches", name] if name in self.batches:
                return self.look(name)
            case ["POST", "batches", name, "cancel"] if name in self.batches:
                self.batches[name]["status"] = "cancelled"
                return self.look(name)
        raise _error(404, "not_found", f"{method} {path} is not there.")

    def parse(self, body: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(body))
        except ValueError:
            raise _error(400, "invalid_request_error", "The body is not a JSON object.") from None

    async def model(self, key: str, path: str, request: dict[str, Any], reader: asyncio.StreamReader) -> Any:
        self.last = request
        inputs = _inputs_of(request)
        if self.settings.raw_answer is not None:
            body, times = self.settings.raw_answer
            return _Answer(self.settings.raw_status, body.encode() * times, self.settings.raw_headers)
        tokens = self.tokens_of(inputs, path)
        window = self.windows.setdefault(key, _Window())
        failure = self.failure_of(inputs)
        if failure in ("400", "429", "500", "quota"):
            self.failed[failure] += 1
            if failure == "400":
                raise _error(400, "context_length_exceeded", "This model takes at most 8192 tokens.")
            if failure == "500":
                raise _error(500, "server_error", "The server had an error.")
            if failure == "quota":
                raise _error(429, "insufficient_quota", "You exceeded your current quota.")
            raise _error(429, "rate_limit_exceeded", "Slow down.", _retry_after(self.settings.retry_after))
        for what, size, most in (
            ("inputs", len(inputs), self.settings.max_inputs),
            ("tokens", tokens, self.settings.max_tokens),
        ):
            if most is not None and size > most:
                self.failed["400"] += 1
                raise _error(400, "invalid_request_error", f"A request has at most {most} {what}.")
        limits = self.admit(window, tokens)
        window.running += 1
        self.most_concurrent = max(self.most_concurrent, window.running)
        try:
            if failure == "hang":
                self.failed[failure] += 1
                await reader.read()
                raise ConnectionResetError
            self.pay(inputs, tokens)
            if self.settings.latency:
                await asyncio.sleep(self.settings.latency)
        finally:
            window.running -= 1
        answer = self.answer(path, request, inputs)
        if failure in ("cut", "short", *WRONG):
            self.failed[failure] += 1
        parts = self.settings.fail_inputs
        at = next((at for at, text in enumerate(inputs) if any(part in text for part in parts)), 0)
        if failure in WRONG:
            answer["data"] = WRONG[failure](answer["data"], at)
        if failure == "short":
            vector = answer["data"][at]["embedding"]
            # Eight characters of base64 are six bytes: a number and a half.
            answer["data"][at]["embedding"] = vector[:16] if isinstance(vector, str) else vector[:3]
        return _Answer(200, answer, limits, cut=failure == "cut")

    def tokens_of(self, inputs: list[str], path: str) -> int:
        of_inputs = sum(max(1, math.ceil(len(text) / self.settings.chars_per_token)) for text in inputs)
        return of_inputs + (self.settings.completion_tokens if path.endswith("completions") else 0)

    def failure_of(self, inputs: list[str]) -> str | None:
        for part, how in self.settings.fail_inputs.items():
            kind, times = (how, math.inf) if isinstance(how, str) else how
            if any(part in text for text in inputs) and self.failed_inputs[part] < times:
                self.failed_inputs[part] += 1
                return str(kind)
        drawn = random.random()
        for kind, rate in self.settings.fail_rate.items():
            if (drawn := drawn - rate) < 0:
                return kind
        return None

    def admit(self, window: _Window, tokens: int) -> dict[str, str]:
        """Grant a request, and return the headers of its limits; end it with 429 if a limit does not allow it."""
        settings, now = self.settings, time.monotonic()
        part = settings.window_seconds / 60
        window.forget(now - settings.window_seconds)
        headers: dict[str, str] = {}
        wait = 0.0
        for what, limit, used, more in (
            ("requests", settings.requests_per_minute, len(window.granted), 1),
            ("tokens", settings.tokens_per_minute, window.tokens, tokens),
        ):
            if limit is None:
                continue
            over = used + more - limit * part
            if over > 0:
                freed = _freed(window, over, tokens=what == "tokens")
                wait = max(wait, freed + settings.window_seconds - now)
            first = window.granted[0][0] + settings.window_seconds - now if window.granted else 0.0
            headers |= {
                f"x-ratelimit-limit-{what}": f"{limit:g}",
                f"x-ratelimit-remaining-{what}": f"{max(limit * part - used - more, 0):.0f}",
                f"x-ratelimit-reset-{what}": f"{first:.3f}s",
            }
        if wait > 0:
            self.numbers["refused"] += 1
            raise _error(429, "rate_limit_exceeded", "Rate limit reached.", {**headers, **_retry_after(wait)})
        if settings.concurrent is not None and window.running >= settings.concurrent:
            self.numbers["refused"] += 1
            raise _error(429, "rate_limit_exceeded", "Too many requests at a time.", headers)
        window.add(now, tokens)
        second = str(int(now - self.began))
        self.admitted[second] += 1
        self.admitted_tokens[second] += tokens
        return headers

    def pay(self, inputs: list[str], tokens: int) -> None:
        self.numbers["rows"] += len(inputs)
        self.numbers["tokens"] += tokens
        self.paid.update(inputs)

    def answer(self, path: str, request: dict[str, Any], inputs: list[str]) -> dict[str, Any]:
        tokens = self.tokens_of(inputs, path)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        model = request.get("model", "test")
        if path.endswith("embeddings"):
            dimensions = int(request.get("dimensions") or self.settings.dimensions)
            in_base64 = request.get("encoding_format") == "base64"
            vectors = [(packed_embedding if in_base64 else embedding_of)(text, dimensions) for text in inputs]
            data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
            return {"object": "list", "data": data, "model": model, "usage": usage}
        completion = self.settings.completion_tokens
        usage |= {"prompt_tokens": tokens - completion, "completion_tokens": completion}
        text = _last_text(request)
        format_ = request.get("response_format") or {}
        schema = (format_.get("json_schema") or {}).get("schema")
        if schema is None and format_.get("type") == "json_object":
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        chosen = next((answer for part, answer in self.settings.chat_answers.items() if part in text), None)
        message = {"role": "assistant", "content": answer_to(text, schema) if chosen is None else chosen}
        return {
            "id": f"chatcmpl-{self.numbers['requests']}", "object": "chat.completion", "created": int(time.time()),
            "model": model, "usage": usage, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }  # fmt: skip

    def put(self, content: bytes) -> str:
        name = f"file-{len(self.files) + 1}"
        self.files[name] = content
        return name

    def file(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        made = {"object": "file", "purpose": "batch", "filename": "batch.jsonl", "created_at": int(time.time())}
        return {"id": name, "bytes": size, "status": "processed", **made}

    def submit(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("input_file_id") not in self.files:
            raise _error(400, "invalid_request_error", "There is no such input file.")
        self.numbers["batches"] += 1
        name = f"batch-{len(self.batches) + 1}"
        self.batches[name] = {
            "id": name, "object": "batch", "status": "in_progress", "endpoint": request.get("endpoint"),
            "input_file_id": request["input_file_id"], "metadata": request.get("metadata"), "errors": None,
            "completion_window": request.get("completion_window", "24h"), "created_at": int(time.time()),
            "output_file_id": None, "error_file_id": None, "ready": time.monotonic() + self.settings.batch_seconds,
        }  # fmt: skip
        return self.look(name)

    def look(self, name: str) -> dict[str, Any]:
        """Return a batch as the API shows it; its answers are made once its time has come."""
        batch = self.batches[name]
        lines = self.files[batch["input_file_id"]].splitlines()
        if batch["status"] == "in_progress" and time.monotonic() >= batch["ready"]:
            outcomes = [self.batch_line(json.loads(line)) for line in lines if line.strip()]
            outcomes = _wrong_lines(outcomes, self.settings.batch_answers)
            for field_name, wanted in (("output_file_id", True), ("error_file_id", False)):
                kept = [json.dumps(outcome) for outcome, fine in outcomes if fine is wanted]
                if kept:
                    batch[field_name] = self.put("\n".join(kept).encode())
            batch["status"] = "completed"
            good = sum(fine for _, fine in outcomes)
            batch["request_counts"] = {"total": len(outcomes), "completed": good, "failed": len(outcomes) - good}
        return {key: value for key, value in batch.items() if key != "ready"}

    def batch_line(self, line: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        request, path = line["body"], line["url"]
        inputs = _inputs_of(request)
        fine = self.failure_of(inputs) is None
        if fine:
            self.pay(inputs, self.tokens_of(inputs, path))
        body = self.answer(path, request, inputs) if fine else {"error": {"message": "The server had an error."}}
        response = {"status_code": 200 if fine else 500, "request_id": "r", "body": body}
        return {"id": "r", "custom_id": line["custom_id"], "response": response, "error": None}, fine


def _numbered(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "index": at} for at, one in enumerate(data)]


def _wrong_lines(outcomes: list[tuple[dict[str, Any], bool]], how: str) -> list[tuple[dict[str, Any], bool]]:
    (first, fine), *rest = outcomes
    match how:
        case "fewer":
            return rest
        case "renumbered":
            ids = [line["custom_id"] for line, _ in outcomes]
            return [({**line, "custom_id": name}, fine) for name, (line, fine) in zip(ids, rest, strict=False)]
        case "twice":
            return [*outcomes, (first, fine)]
        case "unknown":
            return [({**first, "custom_id": "1000"}, fine), *rest]
    return outcomes


def _freed(window: _Window, over: float, tokens: bool) -> float:
    """Return the time of the newest grant that has to expire to make room for this amount."""
    for at, size in window.granted:
        over -= size if tokens else 1
        if over <= 0:
            return at
    return time.monotonic()  # no window is large enough


def _retry_after(seconds: float | None) -> dict[str, str]:
    if seconds is None:
        return {}
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": f"{seconds * 1000:.0f}"}


def _inputs_of(request: Mapping[str, Any]) -> list[str]:
    if "messages" in request:
        return [_last_text(request)]
    given = request.get("input", "")
    return [given] if isinstance(given, str) else [str(one) for one in given]


def _last_text(request: Mapping[str, Any]) -> str:
    content = (request.get("messages") or [{}])[-1].get("content", "")
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _uploaded(headers: Mapping[str, str], body: bytes) -> bytes:
    """Return the file of a form, or the body itself."""
    if "boundary=" not in headers.get("content-type", ""):
        return body
    boundary = headers["content-type"].partition("boundary=")[2].strip('"').encode()
    parts: Iterator[bytes] = (part for part in body.split(b"--" + boundary) if b"filename=" in part)
    return next(parts, b"").partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")


async def _main(settings: Settings) -> None:
    server = await asyncio.start_server(_Server(settings).serve, "127.0.0.1", 0, limit=2**24, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    # The parent's end closes standard input.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(Settings(**json.loads(sys.argv[1]))))
