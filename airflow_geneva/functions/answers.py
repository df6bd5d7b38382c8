"""Read the answers of model services: bounded in size, and refused if they do not match what was asked."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from airflow_geneva.engine.storage.documents import Expansion

MAX_BYTES = 8 << 20
"""Maximum size of an answer, and of a line of a batch's answers."""
MAX_ERROR_BYTES = 1 << 20
"""Maximum size of an answer with an error."""
_BYTES_PER_NUMBER = 32
"""Maximum size of a number of a vector: `-1.2345678901234567e-308` and a separator."""
_BYTES_PER_VECTOR = 1_000
"""Maximum size of what an answer says about a vector beside its numbers."""
_BYTES_PER_ROW = 256 << 10
"""Maximum size of a line of a batch's answers, on average."""
_MORE = 100_000
"""Brackets and commas that an answer may have beside those of the vectors that were asked for."""
_MAX_TOKENS = 1e12
_OK, _OF_SERVER = 200, 500

_T = TypeVar("_T")
_most: ContextVar[int] = ContextVar("answer_bytes", default=MAX_BYTES)


class ForeignAnswer(Exception):
    """An answer is not of OpenAI's API."""


class CutAnswer(Exception):
    """An answer is not complete."""


class RefusedAnswer(ValueError):
    """An answer cannot be matched to what was asked; `tokens` are the tokens that were paid."""

    def __init__(self, message: str, tokens: float = 0.0) -> None:
        super().__init__(message)
        self.tokens = tokens


class TooLarge(ValueError):
    """An answer has more bytes than what was asked for can have."""


def bytes_of_vectors(texts: int, dimensions: int) -> int:
    """Return the maximum size of an answer with the vectors of texts."""
    return MAX_BYTES + texts * (dimensions * _BYTES_PER_NUMBER + _BYTES_PER_VECTOR)


def bytes_of_batch(rows: int) -> int:
    """Return the maximum size of a file of a batch."""
    return MAX_BYTES + rows * _BYTES_PER_ROW


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Limit answers in this block to `size` bytes."""
    token = _most.set(size)
    try:
        yield
    finally:
        _most.reset(token)


def limited(openai: Any) -> dict[str, Any]:
    """Return the arguments of OpenAI's client that limit all answers, compressed ones after they are expanded."""
    return {"http_client": openai.DefaultHttpxClient(event_hooks={"response": [_limit]}), **_PLAIN}


def limited_async(openai: Any) -> dict[str, Any]:
    """Return the arguments of OpenAI's client of coroutines that limit all answers, as `limited` does."""
    return {"http_client": openai.DefaultAsyncHttpxClient(event_hooks={"response": [_limit_async]}), **_PLAIN}


_PLAIN = {"default_headers": {"Accept-Encoding": "identity"}}


def _limit(response: Any) -> None:
    """Let the body of a response raise beyond the limit of the current block."""
    body, parts = _Body(response), response.iter_raw

    def read(*given: Any, **named: Any) -> Iterator[bytes]:
        try:
            for part in parts(*given, **named):
                yield from body.pieces(part)
        except (ForeignAnswer, CutAnswer, TooLarge):
            response.close()
            raise
        body.end()

    response.iter_raw = read


async def _limit_async(response: Any) -> None:
    """Let the body of a response raise beyond the limit of the current block."""
    body, parts = _Body(response), response.aiter_raw

    async def read(*given: Any, **named: Any) -> AsyncIterator[bytes]:
        try:
            async for part in parts(*given, **named):
                for piece in body.pieces(part):
                    yield piece
        except (ForeignAnswer, CutAnswer, TooLarge):
            await response.aclose()
            raise
        body.end()

    response.aiter_raw = read


class _Body:
    """Expands the body of a response, and counts its bytes before and after.

    No request asks for compression, but a proxy between may compress nevertheless.
    """

    def __init__(self, response: Any) -> None:
        self._response = response
        self._most = _most.get() if response.status_code == _OK else MAX_ERROR_BYTES
        self._read = self._expanded = 0
        encoding = response.headers.pop("content-encoding", "").strip().lower()
        self._expansion = Expansion() if encoding in ("gzip", "x-gzip", "deflate") else None
        if self._expansion is None and encoding not in ("", "identity"):
            raise ForeignAnswer(f"it is compressed ({encoding!r:.50}), which was not asked for")

    def pieces(self, part: bytes) -> Iterator[bytes]:
        self._read = self._add(self._read, part)
        if self._expansion is None:
            yield part
            return
        try:
            for piece in self._expansion.pieces(part):
                self._expanded = self._add(self._expanded, piece)
                yield piece
        except ValueError as error:
            if isinstance(error, TooLarge):
                raise
            raise ForeignAnswer(f"it says to be compressed, and {error}") from None

    def end(self) -> None:
        if self._expansion is not None and self._read and not self._expansion.ended:
            raise CutAnswer("its compressed bytes end too early")

    def _add(self, size: int, part: bytes) -> int:
        if size + len(part) > self._most:
            raise _too_large(self._response, self._most)
        return size + len(part)


def _too_large(response: Any, most: int) -> Exception:
    said = f"an answer of more than {most:,} bytes"
    return CutAnswer(said) if response.status_code >= _OF_SERVER else TooLarge(said)


def parts_of(answer: Any) -> Iterator[bytes]:
    """Yield the parts of a response's body; `CutAnswer` if it ends early."""
    try:
        yield from answer.iter_bytes()
    except (CutAnswer, ForeignAnswer, TooLarge):
        raise
    except Exception as error:
        raise CutAnswer from error


async def read_into(body: bytearray, answer: Any) -> None:
    """Append a response's body to `body`; `CutAnswer` if it ends early."""
    try:
        async for part in answer.iter_bytes():
            body += part
    except (CutAnswer, ForeignAnswer, TooLarge):
        raise
    except Exception as error:
        raise CutAnswer from error


def decode(body: bytes | bytearray | str) -> Any:
    """Parse JSON; `ForeignAnswer` if the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ForeignAnswer("it is nested too deeply") from None
    except ValueError as error:
        shown = body[:100] if isinstance(body, str) else bytes(body[:100])
        raise ForeignAnswer(f"{shown!r} is no JSON") from error


@dataclass(frozen=True)
class Vectors:
    """The vectors of an answer.

    Args:
        taken: by position of their texts, those that have the right number of finite numbers.
        lengths: of all vectors of the answer.
        tokens: tokens that were paid.
    """

    taken: Mapping[int, np.ndarray]
    lengths: frozenset[int]
    tokens: float = 0.0


def read_vectors(body: bytearray, texts: int, dimensions: int) -> Vectors:
    """Read a complete answer with the vectors of texts.

    Raises:
        CutAnswer: the answer is not complete; `read_cut_vectors` returns the vectors in it.
        ForeignAnswer: it is not of OpenAI's API.
        RefusedAnswer: there is not one vector for each text, or the vectors are not numbered as the texts are.
    """
    if body.count(b"[") + body.count(b"{") > 8 * texts + _MORE or body.count(b",") > texts * (dimensions + 8) + _MORE:
        raise ForeignAnswer(f"it has more values than the vectors of {texts:,} texts")
    try:
        answer = decode(body)
    except ForeignAnswer:
        if _begin_of_vectors(body) is None or body.rstrip().endswith(b"}"):
            raise
        raise CutAnswer from None
    match answer:
        case {"data": [*items]}:
            tokens = _tokens(answer.get("usage"), "prompt_tokens")
        case _:
            raise ForeignAnswer(f"{bytes(body[:100])!r} has no data")
    if all(isinstance(item, dict) and item.get("index") is None for item in items):
        items = [{**item, "index": at} for at, item in enumerate(items)]  # they are in the order of the texts
    numbered = {index: item for item in items if (index := _index_of(item)) is not None}
    if len(items) != texts or numbered.keys() != set(range(texts)):
        same = ", or not numbered as the texts are" if len(items) == texts else ""
        raise RefusedAnswer(f"returned {len(items):,} vectors for {texts:,} texts{same}", tokens)
    return _vectors(numbered, dimensions, tokens)


def read_cut_vectors(body: bytearray, texts: int, dimensions: int) -> Vectors:
    """Read the complete items of an answer that is cut; none if they are not numbered as the texts are."""
    begin = _begin_of_vectors(body)
    if begin is None:
        return Vectors({}, frozenset())
    text, at, decoder, found = body[begin:].decode(errors="replace"), 0, json.JSONDecoder(), list[Any]()
    while len(found) <= texts and (following := _NEXT_ITEM.match(text, at)):
        try:
            item, at = decoder.raw_decode(text, following.end())
        except (ValueError, RecursionError):
            break
        found.append(item)
    numbered = {index: item for item in found if (index := _index_of(item)) is not None}
    if len(numbered) != len(found) or not numbered.keys() <= set(range(texts)):
        return Vectors({}, frozenset())
    return _vectors(numbered, dimensions, 0.0)


_NEXT_ITEM = re.compile(r"[\s,]*(?=\{)")
_DATA = re.compile(rb'"data"\s*:\s*\[')


def _begin_of_vectors(body: bytearray) -> int | None:
    found = _DATA.search(body)
    return found and found.end()


def _index_of(item: Any) -> int | None:
    index = item.get("index") if isinstance(item, dict) else None
    return index if type(index) is int else None


def _vectors(numbered: Mapping[int, Any], dimensions: int, tokens: float) -> Vectors:
    found = {at: vector for at, item in numbered.items() if (vector := vector_of(item.get("embedding"))) is not None}
    lengths = frozenset(len(vector) for vector in found.values())
    return Vectors({at: vector for at, vector in found.items() if len(vector) == dimensions}, lengths, tokens)


def read_vector(answer: Any, dimensions: int) -> np.ndarray:
    """Return the vector of one text from a parsed answer.

    Raises:
        ForeignAnswer: it is not of OpenAI's API.
        RefusedAnswer: there is not exactly one vector, or it is not one of finite numbers.
        ValueError: the vector has another length.
    """
    match answer:
        case {"data": [*items]}:
            pass
        case _:
            raise ForeignAnswer("it has no data")
    if len(items) != 1 or not isinstance(items[0], dict) or items[0].get("index") not in (0, None):
        raise RefusedAnswer(f"returned {len(items):,} vectors for one text, or not numbered as the text is")
    vector = vector_of(items[0].get("embedding"))
    if vector is None:
        raise RefusedAnswer("returned no vector of finite numbers")
    if len(vector) != dimensions:
        raise ValueError(f"The model returned a vector of {len(vector)} numbers, and dimensions={dimensions}.")
    return vector


def vector_of(value: Any) -> np.ndarray | None:
    """Return a vector from a list of numbers or their bytes in base64; None for other values or non-finite numbers."""
    try:
        match value:
            case str():
                vector = np.frombuffer(base64.b64decode(value, validate=True), "<f4")
            case [*numbers] if set(map(type, numbers)) <= {int, float}:
                with np.errstate(over="ignore"):
                    vector = np.asarray(numbers, np.float64).astype(np.float32)
            case _:
                return None
    except (ValueError, OverflowError):
        return None
    return vector if np.isfinite(vector).all() else None


def _tokens(usage: Any, name: str) -> float:
    """Return a number of tokens; 0 if the answer has no valid number."""
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if isinstance(found, (int, float)) and 0 <= found <= _MAX_TOKENS else 0


@dataclass(frozen=True)
class Completion:
    """The first choice of a chat's answer."""

    content: str | None
    refusal: str | None
    finish_reason: str | None

    def text(self, model: str) -> str:
        """Return the text of the answer; `ValueError` if the model refused, or the text was cut off."""
        if self.refusal:
            raise ValueError(f"The model {model!r} refused: {self.refusal:.500}")
        if self.finish_reason in ("length", "content_filter"):
            said = f"({self.finish_reason}): {self.content or '':.500}"
            raise ValueError(f"The answer of the model {model!r} is not whole {said}")
        return self.content or ""


def tokens_of(answer: Any) -> tuple[float, float]:
    """Return the tokens of the prompt and of the answer that were paid."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return _tokens(usage, "prompt_tokens"), _tokens(usage, "completion_tokens")


def read_completion(answer: Any, choices: int = 1) -> Completion:
    """Return the first choice of a parsed answer.

    Raises:
        ForeignAnswer: it is not of OpenAI's API.
        RefusedAnswer: it does not have as many choices as were asked for.
    """
    match answer:
        case {"choices": [*found]}:
            pass
        case _:
            raise ForeignAnswer("it has no choices")
    at = [one.get("index", 0) if isinstance(one, dict) else None for one in found]
    if len(found) != choices or 0 not in at:
        raise RefusedAnswer(f"answered with {len(found) or 'no'} choice{'s' if len(found) > 1 else ''}")
    choice = found[at.index(0)]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise ForeignAnswer("its choice has no message")
    texts = message.get("content"), message.get("refusal"), choice.get("finish_reason")
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ForeignAnswer("the message of its choice is no text")
    return Completion(*texts)


def lines_of(parts: Iterable[bytes], most: int) -> Iterator[Any]:
    """Yield the parsed lines of a file that is read in parts.

    Raises:
        RefusedAnswer: there are more than `most` lines.
        TooLarge: a line is longer than `MAX_BYTES`.
    """
    rest, lines = bytearray(), 0
    for part in parts:
        *whole, tail = part.split(b"\n")
        for piece in whole:
            rest += piece
            if rest.strip():
                lines += 1
                yield _line(rest, lines, most)
            rest = bytearray()
        rest += tail
        _check_line(rest)
    if rest.strip():
        yield _line(rest, lines + 1, most)


def _line(line: bytearray, count: int, most: int) -> Any:
    _check_line(line)
    if count > most:
        raise RefusedAnswer(f"it has more than {most:,} answers")
    return decode(line)


def _check_line(line: bytearray) -> None:
    if len(line) > MAX_BYTES:
        raise TooLarge(f"it has a line of more than {MAX_BYTES:,} bytes")


def match_lines(
    lines: Iterable[Any], asked: Iterable[str], read: Callable[[Mapping[str, Any]], _T], complete: bool
) -> dict[str, _T]:
    """Return what `read` makes of the answers of a batch, by the ids that were asked.

    Raises:
        RefusedAnswer: an id is unknown, or comes twice; or one is missing, and the batch is complete.
    """
    left, found = set(asked), dict[str, _T]()
    for line in lines:
        name = line.get("custom_id") if isinstance(line, dict) else None
        if not isinstance(name, str) or name not in left:
            kind = "twice" if isinstance(name, str) and name in found else "without being asked"
            raise RefusedAnswer(f"it answered {name!r:.100} {kind}")
        left.discard(name)
        found[name] = read(line)
    if left and complete:
        raise RefusedAnswer(f"it answered {len(found):,} of {len(left) + len(found):,} requests")
    return found
