"""Cut texts into chunks."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions.made import check_choice, make

CHUNKS = pa.list_(
    pa.struct([pa.field("text", pa.string()), pa.field("start", pa.int32()), pa.field("end", pa.int32())])
)

_GAPS = re.compile(r"\s+|[。！？]+[”’」』）]*\s*")  # noqa: RUF001
_ENDS_SENTENCE = re.compile(r"""[.!?…。！？]["'”’)\]」』）]*\Z""")  # noqa: RUF001
_QUOTES = 4


class _Borders:
    """Positions at which a text may be cut: where a piece ends, and where the next one begins."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.starts: list[int] = []

    @staticmethod
    def of(text: str) -> tuple[_Borders, _Borders]:
        """Return the borders of sentences and paragraphs, and the borders of words, which include them."""
        sentences, words = _Borders(), _Borders()
        for found in _GAPS.finditer(text):
            gap = found[0]
            end = found.start() + len(gap.rstrip())
            ends_sentence = _ENDS_SENTENCE.search(text, max(end - _QUOTES, 0), end) or gap.count("\n") > 1
            for borders in (sentences, words) if ends_sentence else (words,):
                borders.ends.append(end)
                borders.starts.append(found.end())
        return sentences, words

    def last(self, after: int, until: int) -> tuple[int, int] | None:
        """Return the last border whose piece ends after the first position, and not after the second."""
        at = bisect_right(self.ends, until) - 1
        return (self.ends[at], self.starts[at]) if at >= 0 and self.ends[at] > after else None

    def first_start(self, begin: int, before: int) -> int | None:
        at = bisect_left(self.starts, begin)
        return self.starts[at] if at < len(self.starts) and self.starts[at] < before else None


class _TextChunks:
    """Cut a text into chunks; each keeps its position."""

    name = "text_chunks"
    revision = 1
    size: int
    overlap: int
    borders: str

    def __call__(self, text: str) -> Iterator[dict[str, Any]]:
        if text is None:
            return
        stop = len(text.rstrip())
        start, done = len(text) - len(text.lstrip()), 0
        sentences, words = _Borders.of(text)
        borders = (sentences, words) if self.borders == "sentence" else (words,)
        while start < stop:
            end = following = start + self.size
            if end >= stop:
                end = following = stop
            elif cut := next((cut for kind in borders if (cut := kind.last(max(start, done), end))), None):
                end, following = cut
            elif text[done:end].isspace():  # the overlap leaves no room for the next word
                start = end
                while text[start].isspace():
                    start += 1
                continue
            yield {"text": text[start:end], "start": start, "end": end}
            done = end
            if end >= stop:
                return
            begin = max(end - self.overlap, start + 1)
            again = (kind.first_start(begin, end) for kind in borders)
            start = following if not self.overlap else next((at for at in again if at is not None), following)


def text_chunks(size: int = 1000, overlap: int = 0, *, borders: str = "sentence", **settings: Any) -> UDF:
    """Make a UDF that cuts a text into chunks, for a view with a row each: `.explode("chunk")`.

    A chunk is a struct of `text`, and its `start` and `end` in the document, in characters: `text` is
    `document[start:end]`, without white space at its ends. All other characters are in a chunk. A text of white space
    and NULL have no chunks.

    Args:
        size: maximum number of characters of a chunk.
        overlap: maximum number of characters repeated from the previous chunk. Whole sentences are repeated, or whole
            words if no sentence fits.
        borders: `"sentence"`: cut after a sentence or paragraph, and after a word in a sentence longer than `size`;
            `"word"`: cut after any word. A word longer than `size` is cut anywhere.
        settings: arguments of the decorator `udf`, such as `name`.
    """
    check_whole("size", size)
    check_whole("overlap", overlap, 0)
    check_choice("borders", borders, ["sentence", "word"])
    if overlap >= size:
        raise InvalidInput(f"overlap={overlap} is not below size={size}. Give a smaller one.")
    return make(_TextChunks, CHUNKS, {"size": size, "overlap": overlap, "borders": borders}, settings)
