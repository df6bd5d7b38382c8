"""pylance's errors, and mistakes in a program, which say nothing about a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader, LanceFileWriter

from airflow_geneva.engine.storage.engine_errors import (
    EngineError,
    describe_store_error,
    engine_errors,
    is_engine_error,
    is_failure,
)
from airflow_geneva.errors import InvalidInput, StorageError


@pytest.fixture
def table(tmp_path: Path) -> lance.LanceDataset:
    rows = pa.table({"x": pa.array(range(100), pa.int64())})
    return lance.write_dataset(rows, str(tmp_path / "t"), enable_stable_row_ids=True)


def damaged(folder: Path, content: Callable[[bytes], bytes]) -> None:
    file = folder / "file.lance"
    batch = pa.record_batch({"x": pa.array(range(100), pa.int64())})
    with LanceFileWriter(str(file), batch.schema) as writer:
        writer.write_batch(batch)
    file.write_bytes(content(file.read_bytes()))
    LanceFileReader(str(file)).read_all().to_table()


def write_sliced(folder: Path) -> None:
    """What makes pylance 14 panic, with an exception that is no `Exception`."""
    kind = pa.struct([("s", pa.struct([("b", pa.bool_())]))])
    rows = pa.array([{"s": {"b": True}}, {"s": None}, {"s": {"b": False}}] * 30, kind)
    writer = LanceFileWriter(str(folder / "sliced.lance"), pa.schema([("a", kind)]))
    writer.write_batch(pa.record_batch({"a": rows.slice(3, 40)}))
    writer.close()


def conflict(dataset: lance.LanceDataset) -> None:
    lance.dataset(dataset.uri).update({"x": "1"})
    update = lance.LanceOperation.Update(
        removed_fragment_ids=[0], updated_fragments=[], new_fragments=[], fields_modified=[]
    )
    lance.LanceDataset.commit(dataset.uri, update, read_version=1)


REFUSED = {
    "aws_access_key_id": "a",
    "aws_secret_access_key": "b",
    "aws_region": "us-east-1",
    "endpoint": "http://127.0.0.1:9",
    "allow_http": "true",
    "client_max_retries": "0",
}

RAISING: dict[str, Callable[[lance.LanceDataset, Path], object]] = {
    "no such file": lambda dataset, folder: LanceFileReader(str(folder / "none.lance")),
    "an empty file": lambda dataset, folder: damaged(folder, lambda content: b""),
    "half a file": lambda dataset, folder: damaged(folder, lambda content: content[: len(content) // 2]),
    "another file": lambda dataset, folder: damaged(folder, lambda content: b"x" * len(content)),
    "no such table": lambda dataset, folder: lance.dataset(str(folder / "none")),
    "no such version": lambda dataset, folder: dataset.checkout_version(9),
    "no such transaction": lambda dataset, folder: dataset.read_transaction(9),
    "no such column": lambda dataset, folder: dataset.scanner(columns=["none"]).to_table(),
    "no such SQL": lambda dataset, folder: dataset.scanner(filter="x >").to_table(),
    "a division by zero": lambda dataset, folder: dataset.scanner(columns={"y": "x / 0"}).to_table(),
    "a refused connection": lambda dataset, folder: LanceFileReader("s3://b/t", storage_options=REFUSED),
    "a conflict": lambda dataset, folder: conflict(dataset),
    "a panic": lambda dataset, folder: write_sliced(folder),
}


@pytest.mark.parametrize("what", RAISING)
def test_what_pylance_raises_is_known(table: lance.LanceDataset, tmp_path: Path, what: str) -> None:
    with pytest.raises(EngineError) as caught, engine_errors():
        RAISING[what](table, tmp_path)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "error",
    [AttributeError(), TypeError(), NameError(), KeyError(), ImportError(), AssertionError(), RecursionError(),
     MemoryError(), InvalidInput(), StorageError(), KeyboardInterrupt(), SystemExit()],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_everything_else_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, engine_errors():
        raise error
    assert caught.value is error
    assert is_failure(error) == isinstance(error, Exception)
    assert not is_engine_error(error)


def test_a_data_file_that_is_gone_is_named_with_what_to_do(tmp_path: Path) -> None:
    dataset = lance.write_dataset(pa.table({"x": [1, 2]}), tmp_path / "docs.lance")
    file = next((tmp_path / "docs.lance" / "data").iterdir())
    file.unlink()
    with pytest.raises(EngineError, match="which does not exist") as found, engine_errors():
        dataset.to_table()
    assert str(file) in str(found.value)
    assert "Restore a version that can be read, or drop the column" in str(found.value)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            "LanceError(IO): Generic N/A error: LanceError(IO): Failed to get AWS credentials: CredentialsNotLoaded("
            'CredentialsNotLoaded { source: Some("no providers in chain") }), /w/rust/aws.rs:630:30',
            "Cannot list it: Failed to get AWS credentials. There are no credentials. Give them as storage options, ",
        ),
        (
            "LanceError(IO): Generic S3 error: Error performing GET http://127.0.0.1:9/b in 7µs - HTTP error: builder "
            "error, /w/rust/object_store.rs:1563:12",
            "Cannot list it: Error performing GET http://127.0.0.1:9/b in 7µs - HTTP error: builder error. Plain HTTP "
            'needs the storage option "allow_http": "true".',
        ),
        (
            "Server returned 403 Forbidden: InvalidAccessKeyId",
            "InvalidAccessKeyId. Correct the credentials, or what they permit. ",
        ),
        ("Server returned 404 Not Found: NoSuchBucket", "NoSuchBucket. Check the name of the bucket, or create it"),
        ("LanceError(IO): Generic S3 error: Failed to resolve region for bucket 'b'", "'b'. Check the name of the "),
        ("[Errno 13] Permission denied: '/db'", "Cannot list it: [Errno 13] Permission denied: '/db'."),
    ],
)
def test_a_store_that_refuses_is_told_in_words_with_what_to_do(raised: str, told: str) -> None:
    message = str(StorageError(f"Cannot list it: {describe_store_error(OSError(raised))}"))
    assert told in message
    assert not re.search(r"LanceError|Generic|Some\(|\.rs:", message)
    assert message.endswith(".")
