"""Parquet files that nobody would write on purpose are loaded right, or refused by name, in bounded memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_geneva import connect
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table

Write = Callable[[Path], object]
EARLY, USUAL, LATE = datetime(1600, 1, 1), datetime(2024, 1, 1, 1, 2, 3, 456789), datetime(9999, 12, 31)


def _plain(place: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "a": ["x", "y"]}), place)


def _changed(change: Callable[[bytes], bytes]) -> Write:
    def write(place: Path) -> None:
        _plain(place)
        place.write_bytes(change(place.read_bytes()))

    return write


def _texts(*values: bytes, **options: Any) -> Write:
    """Write bytes as they are as a column of text."""
    buffers = pa.array(values).buffers()
    texts = pa.StringArray.from_buffers(len(values), buffers[1], buffers[2])
    return lambda place: pq.write_table(pa.table({"id": range(1, len(values) + 1), "a": texts}), place, **options)


def _int96(*values: Any, kind: pa.DataType = pa.timestamp("us")) -> Write:  # noqa: B008
    data = pa.table({"id": range(1, len(values) + 1), "a": pa.array(values, kind)})
    return lambda place: pq.write_table(data, place, use_deprecated_int96_timestamps=True)


# A line: the file, the type of the table's column (None: the column is new), and the two values or the message.
FILES: dict[str, tuple[Write, pa.DataType | None, list[Any] | str]] = {
    "nothing": (lambda place: place.write_bytes(b""), None, "file size is 0 bytes"),
    "only its magic number": (_changed(lambda file: file[:4]), None, "smaller than the minimum file footer"),
    "the first half": (_changed(lambda file: file[: len(file) // 2]), None, "magic bytes not found in footer"),
    "without its end": (_changed(lambda file: file[:-20]), None, "magic bytes not found in footer"),
    "a footer of 2 GB": (
        _changed(lambda file: file[:-8] + struct.pack("<I", (1 << 31) - 1) + b"PAR1"), None, "reported by footer",
    ),
    "a footer that is the whole file": (
        _changed(lambda file: file[:-8] + struct.pack("<I", len(file) - 8) + b"PAR1"), None, "Cannot read",
    ),
    "a page header that is none": (_changed(lambda file: b"PAR1" + b"\xff" * 40 + file[44:]), None, "Cannot read"),
    "pages that moved": (_changed(lambda file: file[:20] + file[60:]), None, "Cannot read"),
    "text that is not UTF-8": (_texts(b"x", b"\xff\xfe"), None, "column 'a' is not valid, first in row 1"),
    "text that is not UTF-8 for a column of text": (_texts(b"\xc3", b"y"), pa.string(), "column 'a' is not valid"),
    "text that is not UTF-8 without a dictionary": (
        _texts(b"x", b"\xed\xa0\x80", use_dictionary=False), pa.large_string(), "column 'a' is not valid",
    ),
    "INT96": (_int96(USUAL, None), pa.timestamp("us"), [USUAL, None]),
    "INT96 for a new column": (_int96(USUAL, None), None, [pa.scalar(USUAL, pa.timestamp("ns")).as_py(), None]),
    "INT96 of before 1677": (_int96(USUAL, EARLY), pa.timestamp("us"), "INT96 before 1677-09-21 or after 2262-04-11"),
    "INT96 of after 2262": (_int96(LATE, USUAL), None, "INT96 before 1677-09-21 or after 2262-04-11"),
    "INT96 within a list": (_int96([USUAL], [LATE], kind=pa.list_(pa.timestamp("us"))), None, "INT96 before 1677"),
    "INT96 within a struct": (
        _int96({"at": EARLY}, {"at": None}, kind=pa.struct({"at": pa.timestamp("us")})), None, "INT96 before 1677",
    ),
    "INT96 with nanoseconds": (
        _int96(1_700_000_000_000_000_001, None, kind=pa.timestamp("ns")), pa.timestamp("us"), "would lose data",
    ),
}  # fmt: skip


def table_of(folder: Path, kind: pa.DataType | None) -> Table:
    old = {} if kind is None else {"a": pa.nulls(2, kind)}
    return connect(folder / "db").create_table("docs", pa.table({"id": pa.array([1, 2], pa.int64()), **old}))


@pytest.mark.parametrize("name", FILES)
def test_files_are_loaded_right_or_refused(tmp_path: Path, name: str) -> None:
    write, kind, expected = FILES[name]
    place = tmp_path / "values.parquet"
    write(place)
    table = table_of(tmp_path, kind)
    if isinstance(expected, list):
        table.load_columns(place, on="id", runner="inline")
        assert table.to_arrow()["a"].to_pylist() == expected
        return
    with pytest.raises((InvalidInput, JobFailed), match=expected):
        table.load_columns(place, on="id", columns=["a"], runner="inline")
    if "a" in table.schema.names:
        assert table.to_arrow()["a"].null_count == 2


def peak(reset: bool = False) -> int:
    """Return the most memory of this process since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:" if reset else "VmHWM:")[1].split()[0]) << 10


@pytest.mark.slow
def test_a_small_file_that_expands_is_read_in_pieces(tmp_path: Path) -> None:
    """One text in a dictionary, for 400,000 rows: 100 KB become 400 MB."""
    kinds = pa.schema([("id", pa.int64()), ("a", pa.dictionary(pa.int32(), pa.string()))])
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(400_000, np.int32)), pa.array(["x" * 1_000]))
    ids = pa.array(np.ones(400_000, np.int64))
    place = tmp_path / "values.parquet"
    pq.write_table(pa.table([ids, texts], schema=kinds), place, store_schema=False, compression="zstd")
    assert place.stat().st_size < 100_000
    table = table_of(tmp_path, pa.string())
    before = peak(reset=True)
    table.load_columns(place, on="id", on_duplicate="first", runner="inline")
    assert peak() - before < 250 << 20
    assert table.to_arrow()["a"].to_pylist() == ["x" * 1_000, None]
