"""Documents that others may have written: what is damaged, too large or expands without end is refused cheaply.

Each list is a corpus: add what was seen as a line.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileSession, LanceFileWriter

from airflow_geneva.engine.checkpoint.submissions import Submissions
from airflow_geneva.engine.job.error_records import _SCHEMA, ErrorRecord, count_errors, read_errors, write_errors
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.lance_io.data_file import LanceFile
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.storage import arrow_documents
from airflow_geneva.engine.storage.arrow_documents import from_bytes, read_schema, to_bytes
from airflow_geneva.engine.storage.documents import LARGEST_BYTES, MOST_VALUES, expand, parse
from airflow_geneva.engine.storage.engine_errors import EngineError
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import sha256
from airflow_geneva.engine.udf.code_archive import CodeArchive, archive_name
from airflow_geneva.errors import InvalidInput
from tests.support.object_store import Bucket

MOST_KB, MOST_SECONDS = 200 * 1024, 20.0


@pytest.fixture
def cheap() -> Iterator[None]:
    """Fail a test that takes much more memory, or CPU time, than it has."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KB
    assert time.process_time() - began < MOST_SECONDS


def packed_zeros(size: int) -> bytes:
    """Return what zlib makes of a multiple of 1 MB of zeros, which it takes seconds to read."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    part = packer.compress(bytes(1_000_000)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x78\x9c" + part * (size // 1_000_000) + packer.flush() + struct.pack(">2H", size % 65_521, 1)


JSON: list[bytes | str] = [
    b"", b"{", b"[1,", b"nul", b"NaN", b'{"a": Infinity}', b"1e400", b"1e19", b"9" * 30, b"9" * 100_000, b"\xff\xfe",
    b'"\\ud800"', '["\\udfff"]', '{"\\ud800": 1}', b"[" * 65 + b"]" * 65, b"[" * 1_000 + b"]" * 1_000,
    b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"1" * (LARGEST_BYTES + 1),
    b"[" + b"[]," * (5 << 20) + b"[]]", b"[" + b'{"":0},' * (2 << 20) + b"{}]", b"[" + b"1.5," * (3 << 20) + b"1]",
    b"[" + b"0," * MOST_VALUES + b"0]",
]  # fmt: skip


@pytest.mark.parametrize("text", JSON, ids=lambda text: f"{text[:12]!r}-{len(text)}")
@pytest.mark.usefixtures("cheap")
def test_json_is_bounded(text: bytes | str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse(text)


def test_zeros_are_packed_as_zlib_packs_them() -> None:
    assert zlib.decompress(packed_zeros(3_000_000)) == bytes(3_000_000)


def test_json_of_this_package_is_read() -> None:
    deepest = json.dumps(value := [*range(10), {"a": ["ä", 1.5, None, True, 2**63, [[[]]]]}])
    assert parse(deepest) == value
    assert parse(b"[" * 60 + b"]" * 60)


PACKED: list[bytes] = [
    b"", b"x", zlib.compress(b"a" * 2_000), zlib.compress(b"abc")[:-1], zlib.compress(b"abc") + b"x",
    zlib.compress(b"abc") * 2, packed_zeros(300_000_000), zlib.compress(b"abc")[:-4] + b"\0\0\0\0",
]  # fmt: skip


@pytest.mark.parametrize("packed", PACKED, ids=lambda packed: f"{len(packed)}")
@pytest.mark.usefixtures("cheap")
def test_expansion_stops_at_the_limit(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is damaged|it expands to more than 1,000 bytes"):
        expand(packed, 1_000)
    assert expand(zlib.compress(b"a" * 1_000), 1_000) == b"a" * 1_000


def _bits(first: int, packed: bytes) -> bytes:
    return b"b" + struct.pack("<q", first) + packed


SETS: list[bytes] = [
    b"", b"b", b"x" * 20, b"s" + packed_zeros(400_000_000), b"s" + zlib.compress(b"1234567"),
    b"s" + zlib.compress(struct.pack("<3q", 1, 2, 3)), b"s" + zlib.compress(struct.pack("<4q", 1, 5, -4, 2)),
    b"s" + zlib.compress(struct.pack("<2q", 1, -5)), b"s" + zlib.compress(struct.pack("<2q", 1 << 62, 1 << 62)),
    _bits(0, packed_zeros(400_000_000)), _bits(0, zlib.compress(b"\xaa" * (4 << 20))),
    _bits((1 << 63) - 5, zlib.compress(b"\xff" * 4)),
]  # fmt: skip


@pytest.mark.parametrize("packed", SETS, ids=lambda packed: f"{packed[:4]!r}-{len(packed)}")
@pytest.mark.usefixtures("cheap")
def test_sets_of_rows_are_bounded_and_in_order(packed: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Ranges.from_json(base64.b64encode(packed).decode())


@pytest.mark.parametrize("document", [None, 7, [[1]], [["a", 2]], [[1, 10**30]], [[1, None]], "no base64 \x00", "=="])
def test_what_is_no_set_of_rows_is_refused(document: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Ranges.from_json(document)


@pytest.mark.parametrize("step", [2, 3, 1_000])
@pytest.mark.parametrize("count", [257, 100_000, 2_000_000])
def test_sets_of_rows_are_read_as_they_were_written(step: int, count: int) -> None:
    rows = Ranges.from_pairs([(at, at + 1) for at in range(7, 7 + step * min(count, 20_000), step)])
    if count > 20_000:
        starts = np.arange(5, 5 + step * count, step)
        rows = Ranges(starts, starts + 1)
    assert Ranges.from_json(rows.to_json()) == rows


def test_a_set_that_could_not_be_read_is_not_written() -> None:
    starts = np.arange(0, 1_000 * (1 << 21) + 1_000, 1_000)
    with pytest.raises(InvalidInput, match="2,097,153 ranges that lie apart, and a document holds 2,097,152"):
        Ranges(starts, starts + 1).to_json()
    assert len(pickle.loads(pickle.dumps(Ranges(starts, starts + 1)))) == len(starts)


def batch(rows: int = 3) -> pa.RecordBatch:
    return pa.record_batch({"a": [f"text {row}" for row in range(rows)], "b": [[row] for row in range(rows)]})


def _blown_up(data: bytes, size: int) -> bytes:
    """Change the expanded size of the first compressed buffer, which is the offsets of column `a`."""
    at = data.index(struct.pack("<q", 4 * 1_001))
    return data[:at] + struct.pack("<q", size) + data[at + 8 :]


def _with_offsets(*offsets: int) -> bytes:
    return to_bytes(batch()).replace(struct.pack("<4i", 0, 6, 12, 18), struct.pack("<4i", *offsets))


def _stream(batches: list[pa.RecordBatch], compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for one in batches:
            writer.write_batch(one)
    return sink.getvalue().to_pybytes()


def _wide(fields: int) -> bytes:
    names = [f"c{number}" for number in range(fields)]
    return to_bytes(pa.record_batch([pa.array([1], pa.int8())] * fields, names=names))


def _nested(depth: int) -> bytes:
    kind = pa.int8()
    for _ in range(depth):
        kind = pa.list_(kind)
    return pa.schema([("a", kind)]).serialize().to_pybytes()


ARROW: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no Arrow": lambda: b"ARROW1\0\0 and more of it",
    "half": lambda: to_bytes(batch())[:200],
    "zeros": lambda: _stream([pa.record_batch({"a": pa.nulls(60_000_000, pa.int32())})], "zstd"),
    "compressed zeros": lambda: to_bytes(pa.record_batch({"b": pa.array([bytes(200_000_000)])}), "zstd"),
    "a long buffer": lambda: _blown_up(to_bytes(batch(1_000), "zstd"), 1 << 40),
    "a negative buffer": lambda: _blown_up(to_bytes(batch(1_000), "zstd"), -7),
    "rows of nothing": lambda: to_bytes(pa.record_batch([pa.nulls(1 << 30)], names=["a"])),
    "batches": lambda: _stream([batch(1)] * 20_000),
    "columns": lambda: _wide(5_000),
    "depth": lambda: _nested(80),
    "metadata": lambda: to_bytes(batch().replace_schema_metadata({"a": "x" * (17 << 20)})),
    "views": lambda: to_bytes(pa.record_batch({"a": pa.array(["a" * 20], pa.string_view())})),
    "text that is none": lambda: to_bytes(pa.record_batch([pa.array([b"\xff"]).view(pa.string())], names=["a"])),
    "offsets that lead outside": lambda: _with_offsets(0, 6, 12, 1 << 30),
    "offsets that go back": lambda: _with_offsets(0, 12, 6, 18),
    "indices out of range": lambda: to_bytes(
        pa.record_batch([pa.DictionaryArray.from_arrays(pa.array([7], pa.int8()), ["a"], safe=False)], names=["a"])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARROW)
def test_arrow_data_is_bounded_and_valid(name: str, request: pytest.FixtureRequest) -> None:
    data = ARROW[name]()
    request.getfixturevalue("cheap")
    with pytest.raises(ValueError):  # noqa: PT011
        from_bytes(data)


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("count", [1, 3])
def test_arrow_data_of_this_package_is_read(count: int, compression: str | None) -> None:
    data = _stream([batch(50)] * count, compression)
    expected = pa.Table.from_batches([batch(50)] * count)
    assert pa.Table.from_batches([from_bytes(data)]).equals(expected)
    assert from_bytes(data, ["b"]).schema.names == ["b"]
    assert from_bytes(to_bytes(batch(0), compression)).num_rows == 0
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch().schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch())
    assert from_bytes(sink.getvalue().to_pybytes()) == batch()
    with pytest.raises(ValueError, match="no column 'c'"):
        from_bytes(data, ["c"])


def test_schemas_are_bounded() -> None:
    schema = pa.schema([("a", pa.int8())])
    assert read_schema(schema.serialize().to_pybytes()) == schema
    for data in (b"", b"x" * 100, pa.schema([(f"c{n}", pa.int8()) for n in range(5_000)]).serialize().to_pybytes()):
        with pytest.raises(ValueError):  # noqa: PT011
            read_schema(data)


@pytest.mark.usefixtures("cheap")
def test_parts_of_a_schema_that_are_used_again_are_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_documents, "_MOST_TEXT", 100)
    with pytest.raises(ValueError, match="too much metadata"):
        read_schema(pa.schema([("a", pa.int8())], {"b": "x" * 101}).serialize().to_pybytes())


def _lance(path: Path, column: pa.Array, times: int) -> bytes:
    schema = pa.schema([pa.field("column", column.type, metadata={"lance-encoding:compression": "zstd"})])
    writer = LanceFileWriter(str(path), schema, version="2.1")
    for _ in range(times):
        writer.write_batch(pa.record_batch([column], schema=schema))
    writer.close()
    return path.read_bytes()


def _footer(data: bytes, columns: int) -> bytes:
    return data[:-12] + struct.pack("<I", columns) + data[-8:]


LANCE: dict[str, Callable[[Path], bytes]] = {
    "numbers": lambda path: _lance(path, pa.repeat(pa.scalar(0, pa.int64()), 5_000_000), 20),
    "texts": lambda path: _lance(path, pa.array(["x" * 1_000] * 20_000), 10),
    "nothing": lambda path: b"",
    "no file of Lance": lambda path: bytes(1_000) + b"LANC",
    "columns without end": lambda path: _footer(_lance(path, pa.array([1]), 1), columns=0xFFFF0001),
    # pylance ends the process if it reads rows of such a file.
    "a name with a NUL byte": lambda path: _lance(path, pa.array([1]), 1).replace(b"column", b"col\0mn"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LANCE)
def test_files_of_lance_that_are_held_in_memory_are_bounded(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "a.lance").write_bytes(LANCE[name](tmp_path / "made.lance"))
    request.getfixturevalue("cheap")
    with pytest.raises(EngineError):
        LanceFile(Storage.at(str(tmp_path)), "a.lance").read()
    with pytest.raises(EngineError):
        LanceFile(Storage.at(str(tmp_path)), "a.lance").read(["column"])


def _records(rows: int, text: str) -> bytes:
    """Return error records that compress well; `text` is the message of each."""
    texts = {field.name: text if field.name == "message" else "" for field in _SCHEMA if field.type == pa.string()}
    values = {field.name: pa.repeat(pa.scalar(texts.get(field.name, 1), field.type), rows) for field in _SCHEMA}
    return to_bytes(pa.record_batch(values, schema=_SCHEMA), "zstd")


@pytest.mark.parametrize(("rows", "text"), [(100_000, ""), (400_000, ""), (8, "x" * 20_000_000)])
def test_error_records_that_expand_without_end_are_left_out(
    rows: int, text: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = JobFolder.of(Storage.at(str(tmp_path)), "20260101T000000000000-0123456789")
    data = _records(rows, text)
    assert len(data) < 600_000
    folder.storage.write_bytes("errors/a.arrow", data)
    folder.storage.write_bytes("errors/b.arrow", _records(7, "text"))
    request.getfixturevalue("cheap")
    assert {record.message for record in read_errors(Storage.at(str(tmp_path)))} == {"text"}
    assert count_errors(folder.storage) == 1


@pytest.mark.parametrize("name", _SCHEMA.names)
def test_error_records_without_a_value_are_left_out(tmp_path: Path, name: str) -> None:
    folder = JobFolder.of(Storage.at(str(tmp_path)), "job")
    good = ErrorRecord("job", "n", "f", "1", 0, 0, "builtins.ValueError", "no", "", 1, 1, 1.0)
    write_errors(folder.storage, "good", [good])
    rows = pa.RecordBatch.from_pylist([{**good.to_json(), name: None}], schema=_SCHEMA)
    folder.storage.write_bytes("errors/bad.arrow", to_bytes(rows))
    assert read_errors(Storage.at(str(tmp_path))) == [good]
    assert count_errors(folder.storage) == 1


@pytest.mark.slow
def test_many_error_records_of_a_range_are_files_that_can_be_read(tmp_path: Path) -> None:
    folder = JobFolder.of(Storage.at(str(tmp_path)), "20260101T000000000000-0123456789")
    record = ErrorRecord("j", "c", "f", "1", 0, 0, "E", "m" * 100, "t" * 2_000, 1, 1, 1.0)
    records = [replace(record, row_id=number, row_address=number) for number in range(20_000)]
    for _ in range(2):
        write_errors(folder.storage, "range", records)
    assert len(folder.storage.list_files("errors")) > 1
    assert count_errors(folder.storage) == len(records)
    assert sorted(read_errors(Storage.at(str(tmp_path))), key=lambda one: one.row_id) == records


def stored_batch(folder: Storage, keys: pa.Array) -> Submissions:
    """Write what a submission to a batch API records, as anyone can who may write the table's folder."""
    found = Submissions(folder, "job", "embed", "1", "v", only_own=False)
    about = {"job": "job", "begun": "1.0", "process": "host:1"}
    found.store[f"{1:013}-{0:032x}-0-ff"] = pa.record_batch([keys], names=["row"]).replace_schema_metadata(about)
    return found


@pytest.mark.parametrize("keys", [[b"k" * 15], [b"k" * 17], [b"k" * 16, None], ["k" * 16]])
def test_keys_of_another_kind_are_no_rows_of_a_batch(tmp_path: Path, keys: list[bytes | str | None]) -> None:
    found = stored_batch(Storage.at(str(tmp_path)), pa.array(keys))
    assert found.find([b"k" * 16], pa.array([0])) == [[]]


@pytest.mark.slow
def test_no_more_of_a_file_is_read_from_a_store_than_it_may_have(
    bucket: Bucket, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, download, finished = Storage.at(f"{bucket.uri}/db", options), LanceFileSession.download_file, list[str]()
    bucket.put("db/large.json", b" " * 10_000_000)
    bucket.put("db/empty.json", b"")

    def downloaded(session: LanceFileSession, name: str, path: Path | str) -> None:
        download(session, name, path)
        finished.append(name)

    monkeypatch.setattr(LanceFileSession, "download_file", downloaded)
    with pytest.raises(ValueError, match=r"large\.json has more than 1,000 bytes"):
        storage.read_bytes("large.json", 1_000)
    with (
        pytest.raises(ValueError, match=r"large\.json has more than 1,000 bytes"),
        storage.open_whole("large.json", 1_000),
    ):
        pass
    assert not finished
    with pytest.raises(ValueError, match=r"large\.json has more than 9,999,999 bytes"):
        storage.read_bytes("large.json", 9_999_999)
    assert len(storage.read_bytes("large.json", 10_000_000)) == 10_000_000
    assert storage.read_bytes("empty.json") == b""
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("missing.json")


def test_stored_code_of_any_size_is_what_was_planned(tmp_path: Path) -> None:
    """A document beside a table is smaller than an archive of code may be."""
    storage, data = Storage.at(str(tmp_path)), b"x" * (LARGEST_BYTES + 1)
    planned = CodeArchive(archive_name("code", data), sha256(data))
    assert planned.read(storage) is None
    storage.write_bytes(planned.zip, data)
    assert planned.read(storage) == data
    storage.write_bytes(planned.zip, b"another archive")
    assert planned.read(storage) is None


def test_a_document_is_a_file_of_bounded_size(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    (tmp_path / "large.json").write_bytes(b" " * 1_001)
    assert len(storage.read_bytes("large.json", 1_001)) == 1_001
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        storage.read_bytes("large.json", 1_000)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="is not a file"):
        storage.read_bytes("pipe.json")
    assert storage.read_document("pipe.json") is None
