"""Open files of CSV and JSON: their bytes are checked in linear time before a parser reads them.

Files are read in blocks, also compressed ones, so no file is in memory as a whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from airflow_geneva.errors import InvalidInput

TEXT_BLOCK = 16 << 20
"""Bytes of CSV or JSON to parse at once; also the limit of a row."""
MAX_DEPTH = 64
"""Levels of objects and arrays in a row of JSON, the row's own object included."""
_SCANNED = 1 << 20
_MAGIC = {
    b"\x1f\x8b": ("compressed by gzip", "End its name with .gz, as in values.{format}.gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "End its name with .zst, and name the format: format={format!r}"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "End its name with .lz4, and name the format: format={format!r}"),
    b"BZh": ("compressed by bzip2", "End its name with .bz2, and name the format: format={format!r}"),
    b"\xfd7zXZ\x00": ("compressed by xz", "Decompress it"),
    b"PK\x03\x04": ("a zip archive, as a workbook is", "Unpack it, or save the workbook as {format}"),
    b"\xd0\xcf\x11\xe0": ("a workbook or another document of Office", "Save it as {format}"),
    b"PAR1": ("Parquet", 'Load it with format="parquet"'),
    b"ARROW1": ("a file of Arrow", "Read it with pyarrow, and load the table"),
    b"\xff\xfe": ("UTF-16", "Convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "Convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\x00\x00\xfe\xff": ("UTF-32", "Convert it to UTF-8: iconv -f UTF-32 -t UTF-8"),
}  # fmt: skip
_QUOTE = ord('"')
_BOUNDARY = np.isin(np.arange(256), [ord(","), ord("\n"), ord("\r")])
_KINDS = bytes({ord("{"): 1, ord("["): 1, ord("}"): 255, ord("]"): 255, _QUOTE: 2}.get(at, 0) for at in range(256))
"""Of each byte of JSON, the change of depth; 2 of a quote."""

Positions = npt.NDArray[np.int64]


class _Check(Protocol):
    def feed(self, piece: bytes) -> None:
        """Check the next bytes of a file; raise `InvalidInput` if they are not valid."""

    def end(self) -> None:
        """Check the end of the file."""


class CheckedText:
    """The bytes of a file of CSV or JSON without a byte order mark; a file object for Arrow's readers.

    Args:
        stream: the file, decompressed while it is read.
        path: names the file in errors.
        format: ``csv`` or ``json``.
    """

    closed = False

    def __init__(self, stream: pa.NativeFile, path: str, format: str) -> None:
        self.path = path
        self.structure = JsonStructure(path) if format == "json" else CsvQuotes(path)
        self._pieces = _checked(stream, path, format, self.structure)
        self._left = b""

    def read(self, size: int = TEXT_BLOCK) -> bytes:
        """Return the next bytes, fewer than `size` only at the end of the file.

        Raises:
            InvalidInput: the file is of another format, its text is not UTF-8, or its structure is not valid.
        """
        while len(self._left) < size and (piece := next(self._pieces, b"")):
            self._left = self._left + piece if self._left else piece
        found, self._left = self._left[:size], self._left[size:]
        return found

    def rows(self) -> Iterator[bytes]:
        """Yield the text of JSON in blocks of whole rows.

        Raises:
            InvalidInput: as `read` does; or a row has more than `TEXT_BLOCK` bytes.
        """
        assert isinstance(self.structure, JsonStructure)
        left = b""
        for piece in self._pieces:
            block = left + piece if left else piece
            end = max(0, len(block) - self.structure.after_last_row)
            left = block[end:]
            if len(left) > TEXT_BLOCK:
                raise row_too_large(self.path)
            if end:
                yield block[:end]
        if left.strip():
            yield left


def row_too_large(path: str) -> InvalidInput:
    return InvalidInput(
        f"A row of {path!r} has more than {TEXT_BLOCK >> 20} MB, which is the limit of a row of CSV or JSON. Load such "
        "rows from Parquet."
    )


def _checked(stream: pa.NativeFile, path: str, format: str, structure: _Check) -> Iterator[bytes]:
    checks: tuple[_Check, ...] = (_Utf8(path), structure)
    first = True
    while piece := stream.read(TEXT_BLOCK):
        if first:
            _check_format(piece, path, format)
            piece, first = piece.removeprefix(codecs.BOM_UTF8), False
        for at in range(0, len(piece), _SCANNED):
            for check in checks:
                check.feed(piece[at : at + _SCANNED])
        if piece:
            yield piece
    for check in checks:
        check.end()


def _check_format(piece: bytes, path: str, format: str) -> None:
    for magic, (found, remedy) in _MAGIC.items():
        if piece.startswith(magic):
            raise InvalidInput(
                f"{path!r} cannot be loaded as {format}: its first bytes are those of a file that is {found}. "
                f"{remedy.format(format=format)}."
            )


class _Utf8:
    def __init__(self, path: str) -> None:
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._lines = 1

    def feed(self, piece: bytes) -> None:
        self._decode(piece)
        self._lines += piece.count(b"\n")

    def end(self) -> None:
        self._decode(b"", final=True)

    def _decode(self, piece: bytes, final: bool = False) -> None:
        try:
            self._decoder.decode(piece, final)
        except UnicodeDecodeError as error:
            line = self._lines + error.object.count(b"\n", 0, error.start)
            raise InvalidInput(
                f"{self._path!r} is not UTF-8: line {line} has the byte 0x{error.object[error.start]:02X}. Convert the "
                "file, for example from Latin-1: iconv -f LATIN1 -t UTF-8."
            ) from None


class CsvQuotes:
    """Finds quotes that Arrow would drop, and a quote that is never closed, with which Arrow drops rows.

    A quote opens a field if it is the first byte of the field; elsewhere in an unquoted field it is text.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._inside = False
        self._opened = self._lines = 1
        self._before = b"\n"
        self._held = b""

    def feed(self, piece: bytes) -> None:
        text = self._held + piece
        # The byte after a quote says what the quote means.
        known = text.rstrip(b'"')
        self._held = text[len(known) :]
        if len(self._held) > TEXT_BLOCK:
            raise row_too_large(self._path)
        self._scan(known)

    def end(self) -> None:
        self._scan(self._held)
        if self._inside:
            raise InvalidInput(
                f'{self._path!r} has a quote (") in line {self._opened} that no other one closes. Close it; within a '
                "quoted field, a quote is written twice."
            )

    def _scan(self, text: bytes) -> None:
        if b'"' in text:
            around = np.frombuffer(self._before + text + b"\n", np.uint8)
            at = np.flatnonzero(around[1:-1] == _QUOTE)
            begins, ends = _BOUNDARY[around[at]], _BOUNDARY[around[at + 2]]
            doubled = np.diff(at) == 1
            opening = (np.arange(len(at)) + self._inside) % 2 == 0
            if np.where(opening, begins | np.append(False, doubled), ends | np.append(doubled, False)).all():
                self._inside = bool(opening[-1])
                if len(opened := at[opening & begins]):
                    self._opened = self._line(text, int(opened[-1]))
            else:
                self._walk(text, at.tolist(), begins.tolist(), ends.tolist())
        self._lines += text.count(b"\n")
        self._before = text[-1:] or self._before

    def _walk(self, text: bytes, at: list[int], begins: list[bool], ends: list[bool]) -> None:
        """Follow the quotes one by one, because some of them are text of unquoted fields."""
        skipped, opened = False, None
        for number, place in enumerate(at):
            if skipped:
                skipped = False
            elif not self._inside:
                if begins[number]:
                    self._inside, opened = True, place
            elif at[number + 1 : number + 2] == [place + 1]:
                skipped = True
            elif ends[number]:
                self._inside = False
            else:
                raise InvalidInput(
                    f'{self._path!r} has text after the quote (") that closes a field, in line '
                    f"{self._line(text, place)}. Within a quoted field, write a quote twice."
                )
        if opened is not None:
            self._opened = self._line(text, opened)

    def _line(self, text: bytes, place: int) -> int:
        return self._lines + text.count(b"\n", 0, place)


class JsonStructure:
    """Follows the nesting of JSON without parsing it, and finds where rows end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inside = self._escaped = False
        self._depth = 0
        self.after_last_row = 0
        """The number of bytes since the end of the last row."""

    def feed(self, piece: bytes) -> None:
        length = len(piece)
        if self._escaped:
            piece = b"_" + piece[1:]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = piece.endswith(b"\\")
        kinds = np.frombuffer(piece.translate(_KINDS), np.int8)
        at = np.flatnonzero(kinds)
        kinds = kinds[at]
        quotes = kinds == 2
        strings = (np.cumsum(quotes) + self._inside) % 2 == 1
        steps = np.where(quotes | strings, 0, kinds)
        depths = np.cumsum(steps) + self._depth
        if len(at):
            self._check(piece, at, steps, depths)
            self._inside, self._depth = bool(strings[-1]), int(depths[-1])
        ends = at[(steps == -1) & (depths == 0)]
        self.after_last_row = length - int(ends[-1]) - 1 if len(ends) else self.after_last_row + length

    def end(self) -> None:
        """Leave a row that is cut off to the parser."""

    def _check(self, piece: bytes, at: Positions, steps: Positions, depths: Positions) -> None:
        if depths.max() > MAX_DEPTH:
            raise InvalidInput(
                f"A row of {self._path!r} has more than {MAX_DEPTH} levels of objects and arrays. Flatten it, or write "
                "the inner levels as text."
            )
        tops = at[(steps == 1) & (depths == 1)]
        if len(tops) and ord("[") in np.frombuffer(piece, np.uint8)[tops]:
            raise InvalidInput(f"{self._path!r} holds an array, where rows are objects. Write JSON lines: jq -c '.[]'.")
