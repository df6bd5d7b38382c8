"""The checkpoint store: whole values or none, whatever happened to the file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva.engine.checkpoint.keys import FragmentKey, WorkIdentity
from airflow_geneva.engine.checkpoint.packs import Packs
from airflow_geneva.engine.checkpoint.store import CheckpointStore, DelayedCheckpoints
from airflow_geneva.engine.lance_io.data_file import FileWriter
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.uri import md5
from airflow_geneva.errors import InvalidInput, StorageError

BATCH = pa.record_batch({"value": [1, 2, None], "_offset": pa.array([0, 1, 2], pa.uint32())})
PREFIX = WorkIdentity("f", "1", "y", None, "/t").prefix


def key(fragment: int, start: int) -> str:
    return FragmentKey(PREFIX, md5("files"), fragment).range(start, start + 1)


def values(at: int) -> pa.RecordBatch:
    return pa.record_batch({"value": [at]}, schema=pa.schema([("value", pa.int64())], metadata={"of": str(at)}))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path))


def test_what_was_stored_is_read_back(store: CheckpointStore) -> None:
    labelled = BATCH.replace_schema_metadata({"job_id": "j"})
    store[key(0, 0)] = labelled
    assert key(0, 0) in store
    assert store[key(0, 0)] == labelled
    assert (store[key(0, 0)].schema.metadata or {})[b"job_id"] == b"j"
    assert store.read(key(0, 0), ["_offset"]).schema.names == ["_offset"]


def test_a_batch_without_rows_is_a_value_too(store: CheckpointStore) -> None:
    store["empty"] = BATCH.slice(0, 0)
    assert store["empty"].num_rows == 0
    assert store["empty"].schema.names == BATCH.schema.names


def test_a_key_that_was_never_stored_is_a_key_error(store: CheckpointStore) -> None:
    assert "nothing" not in store
    with pytest.raises(KeyError):
        store["nothing"]


def test_the_last_value_of_a_key_wins(store: CheckpointStore) -> None:
    store["k"] = BATCH
    store["k"] = BATCH.slice(1)
    assert store["k"].num_rows == 2


def test_a_value_that_another_job_replaces_at_once_is_whole(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, longer = FileWriter._publish, pa.record_batch({"value": [*range(1_000)]})

    def publish_and_replace(writer: FileWriter) -> None:
        monkeypatch.setattr(FileWriter, "_publish", publish)
        publish(writer)
        CheckpointStore(str(tmp_path))[key(0, 0)] = longer

    monkeypatch.setattr(FileWriter, "_publish", publish_and_replace)
    store[key(0, 0)] = BATCH
    assert store[key(0, 0)].equals(longer)


def test_keys_are_listed_by_prefix(store: CheckpointStore) -> None:
    for fragment in (1, 2, 10):
        for start in (0, 5):
            store[key(fragment, start)] = BATCH
    everything = [key(f, s) for f in (1, 2, 10) for s in (0, 5)]
    assert store.list_keys() == sorted(everything)
    assert store.list_keys(f"{PREFIX}_srcfiles-{md5('files')}_frag-1_") == [key(1, 0), key(1, 5)]
    assert store.list_keys(f"{PREFIX}_srcfiles-") == sorted(everything)
    assert store.list_keys("udf-other") == []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half written": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one byte": lambda path: path.write_bytes(b"L"),
    "another format": lambda path: path.write_bytes(b"PAR1" * 100),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_counts_as_absent(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(str(tmp_path))
    store[key(0, 0)] = BATCH
    (path,) = tmp_path.rglob("range-*.lance")
    DAMAGES[damage](path)
    assert key(0, 0) not in store
    with pytest.raises(KeyError):
        store[key(0, 0)]
    with pytest.raises(KeyError):
        store.read(key(0, 0), ["value"])


def test_an_unfinished_write_is_not_listed(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    store[key(0, 0)] = BATCH
    (path,) = tmp_path.rglob("range-*.lance")
    for name in (".tmpAb12", "range-5-6.lance#1", "range-5-6.lance.tmp"):
        (path.parent / name).write_bytes(b"half")
    assert store.list_keys() == [key(0, 0)]


WRITER = """
import sys
import time
import pyarrow as pa
from airflow_geneva.engine.checkpoint.packs import Packs
from airflow_geneva.engine.checkpoint.store import CheckpointStore, DelayedCheckpoints
store = CheckpointStore(sys.argv[1])
batch = pa.record_batch({"value": list(range(1000))})
store["before"] = batch
store["killed"] = batch
"""


@pytest.mark.parametrize(("point", "there"), [("checkpoint.write:2", False), ("checkpoint.written:2", True)])
def test_a_writer_that_is_killed_leaves_the_value_whole_or_not_at_all(tmp_path: Path, point: str, there: bool) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)], env={**os.environ, "AIRFLOW_GENEVA_FAULT": point}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    store = CheckpointStore(str(tmp_path))
    assert store["before"].num_rows == 1000
    assert ("killed" in store) is there


@pytest.mark.parametrize("name", ["", "../up", "/etc/passwd", "a/b", "..\\up", ".hidden"])
def test_a_key_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    with pytest.raises(InvalidInput, match="leave its folder"):
        store[name] = BATCH


def test_a_store_that_cannot_be_written_says_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    store = CheckpointStore(str(tmp_path / "blocked"))
    with pytest.raises((StorageError, OSError), match="blocked"):
        store["k"] = BATCH


PLAIN: dict[str, pa.DataType] = {
    "integers": pa.uint32(),
    "floats": pa.float64(),
    "booleans": pa.bool_(),
    "texts": pa.string(),
    "bytes": pa.large_binary(),
    "lists": pa.list_(pa.int64()),
    "lists of structs": pa.list_(pa.struct([("a", pa.int32()), ("b", pa.string())])),
    "structs": pa.struct([("a", pa.float32()), ("b", pa.list_(pa.bool_()))]),
    "times": pa.timestamp("us", "UTC"),
}


def some_value(kind: pa.DataType, row: int) -> Any:
    if pa.types.is_struct(kind):
        return {field.name: some_value(field.type, row + 1) for field in kind}
    if pa.types.is_list(kind):
        return [some_value(kind.value_type, row + at) for at in range(row % 3)]
    if pa.types.is_string(kind):
        return "x" * (row % 5)
    return b"x" * (row % 5) if pa.types.is_large_binary(kind) else row % 2 == 0 if pa.types.is_boolean(kind) else row


@pytest.mark.parametrize("kind", PLAIN)
def test_values_are_what_was_stored_wherever_they_lay_and_whatever_is_missing(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(str(tmp_path))
    values = pa.array([None if row % 4 == 3 else some_value(PLAIN[kind], row) for row in range(40)], PLAIN[kind])
    for part in (values, values.slice(5, 20), values.slice(3, 1), values.slice(0, 0), values.drop_null()):
        stored = pa.record_batch({"value": pa.concat_arrays([part])})
        store[key(1, 0)] = stored
        assert store[key(1, 0)] == stored


def test_a_flipped_bit_is_no_other_value(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    rows = {
        "value": [f"text {row}" for row in range(50)],
        "_offset": range(50),
        "spans": [[row, 7] for row in range(50)],
    }
    stored = pa.RecordBatch.from_pydict(rows).replace_schema_metadata({"looked_at": "[[0, 50]]"})
    store[key(1, 0)] = stored
    (file,) = tmp_path.rglob("*.lance")
    whole = file.read_bytes()
    dice = random.Random(5)
    lost = 0
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        file.write_bytes(flipped)
        try:
            found = store[key(1, 0)]
        except KeyError:
            lost += 1
            continue
        assert found == stored
        assert found.schema.metadata[b"looked_at"] == b"[[0, 50]]"
    assert lost


def test_a_file_that_is_merely_out_of_reach_is_not_absent(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    store[key(1, 0)] = BATCH
    program = f"""
import resource
from airflow_geneva.engine.checkpoint.packs import Packs
from airflow_geneva.engine.checkpoint.store import CheckpointStore, DelayedCheckpoints
from airflow_geneva.errors import StorageError
store = CheckpointStore({str(tmp_path)!r})
store[{key(1, 0)!r}]  # threads are there
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
for read in (lambda: store[{key(1, 0)!r}], lambda: {key(1, 0)!r} in store):
    try:
        read()
    except StorageError as error:
        assert "Too many open files" in str(error)
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    options = {
        "aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_region": "us-east-1", "allow_http": "true",
        "endpoint": "http://127.0.0.1:9", "client_max_retries": "0",
    }  # fmt: skip
    with pytest.raises(StorageError, match="run again"):
        CheckpointStore(Storage.at("s3://bucket/table.lance/_checkpoints", options))[key(1, 0)]


def test_a_pack_that_is_merely_out_of_reach_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(str(tmp_path))
    store["swap.job.0"] = values(1)
    store.pack(["swap.job.0"])
    assert store["swap.job.0"] == values(1)

    def refused(*arguments: object, **more: object) -> Any:
        raise OSError("Too many open files (os error 24)")

    monkeypatch.setattr("lance.file.LanceFileSession.open_reader", refused)
    with pytest.raises(StorageError, match="run again"):
        store["swap.job.0"]


@pytest.mark.parametrize("full", [1, 1_000, 1 << 30])
def test_what_is_packed_is_read_listed_and_replaced_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    for module in ("packs", "store"):
        monkeypatch.setattr(f"airflow_geneva.engine.checkpoint.{module}.FULL_BYTES", full)
    reader = CheckpointStore(str(tmp_path))
    prefix = f"{PREFIX}_srcfiles-"
    keys = [str(FragmentKey(PREFIX, md5("files"), at)) for at in range(20)]
    assert reader.list_keys(prefix) == []
    for at, name in enumerate(keys):
        CheckpointStore(str(tmp_path))[name] = values(at)
        # Another process packs, with the reader's own idea of what there is.
        CheckpointStore(str(tmp_path)).pack([name])
        assert reader[name] == values(at)
    CheckpointStore(str(tmp_path))[keys[3]] = values(99)
    CheckpointStore(str(tmp_path)).pack([keys[3]])
    fresh = CheckpointStore(str(tmp_path))
    assert fresh.list_keys(prefix) == sorted(keys)
    assert [fresh[name] for name in keys] == [values(99 if at == 3 else at) for at in range(20)]
    assert fresh.read(keys[5], ["value"]).column(0).to_pylist() == [5]
    assert keys[5] in fresh
    assert f"{keys[5]}0" not in fresh
    del fresh[keys[5]]
    keys.remove(keys[5])
    assert CheckpointStore(str(tmp_path)).list_keys(prefix) == fresh.list_keys(prefix) == sorted(keys)
    names = [path.name for path in tmp_path.rglob("*.lance")]
    assert len(names) <= (10 if full > 1_000 else 21)
    with pytest.raises(KeyError):
        fresh[key(77, 0)]


def test_documents_stay_when_their_pack_cannot_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(str(tmp_path))
    store["swap.job.0"] = values(1)
    with monkeypatch.context() as patched:
        patched.setattr("airflow_geneva.engine.checkpoint.packs.keys_of_pack", lambda storage, path: [])
        store.pack(["swap.job.0"])
    for pack in (tmp_path / "packed").iterdir():
        pack.unlink()
    assert CheckpointStore(str(tmp_path))["swap.job.0"] == values(1)


def test_a_damaged_pack_costs_what_is_in_it_only(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    keys = [f"swap.job{at}.0" for at in range(3)]
    for name in keys:
        store[name] = values(1)
        store.pack([name])
    first, *_ = sorted((tmp_path / "packed").iterdir())
    first.write_bytes(b"half")
    fresh = CheckpointStore(str(tmp_path))
    fresh.pack(keys)
    with pytest.raises(KeyError):
        fresh[keys[0]]
    assert fresh[keys[1]] == fresh[keys[2]] == values(1)
    packs = Packs(fresh.storage)
    packs.drop(packs.keys() - {keys[2]})
    assert keys[2] in CheckpointStore(str(tmp_path))
    with pytest.raises(KeyError):
        fresh[keys[1]]


def test_delayed_checkpoints_become_one_file_once_they_are_due(tmp_path: Path) -> None:
    def there() -> int:
        return len([path for path in tmp_path.rglob("*.lance") if path.is_file()])

    store = CheckpointStore(str(tmp_path))
    delayed, now = DelayedCheckpoints(store, 60.0), time.monotonic()
    keys = [str(FragmentKey(PREFIX, md5("files"), at)) for at in range(4)]
    delayed.write()
    delayed.add(keys[0], values(0), 10, now)
    delayed.add(keys[1], values(1), 10, now)
    delayed.write_if_due()
    delayed.write_if_due(most=30)
    assert there() == 0
    delayed.write_if_due(most=29)
    assert there() == 1
    assert [store[name] for name in keys[:2]] == [values(0), values(1)]
    # The time counts since the first row of the first of them.
    delayed.add(keys[2], values(2), 10, now - 61)
    delayed.add(keys[3], values(3), 10, now)
    delayed.write_if_due()
    assert there() == 2
    assert CheckpointStore(str(tmp_path)).list_keys(f"{PREFIX}_srcfiles-") == sorted(keys)


def test_delayed_checkpoints_are_written_one_by_one_if_their_pack_cannot_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_geneva.engine.checkpoint.packs.keys_of_pack", lambda storage, path: [])
    delayed = DelayedCheckpoints(CheckpointStore(str(tmp_path)), 60.0)
    for at in range(2):
        delayed.add(f"swap.job{at}.0", values(at), 1, time.monotonic())
    delayed.write()
    for pack in (tmp_path / "packed").iterdir():
        pack.unlink()
    assert CheckpointStore(str(tmp_path))["swap.job1.0"] == values(1)
