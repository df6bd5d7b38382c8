"""Documents that are written behind the work."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.write_behind import WriteBehind
from airflow_geneva.errors import StorageError


class Store(Storage):
    """A folder that notes what is written to it, and can be held up or broken."""

    def write_bytes(self, name: str, data: bytes) -> None:
        WRITES.append((name, data))
        if name == "held":
            HELD.wait(30)
        if name == "broken":
            raise StorageError("the store is full")
        super().write_bytes(name, data)


WRITES: list[tuple[str, bytes]] = []
HELD = threading.Event()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    WRITES.clear()
    HELD.clear()
    return Store(str(tmp_path))


def test_of_several_contents_only_the_newest_is_written_after_the_first(store: Store) -> None:
    behind = WriteBehind(store)
    for number in range(50):
        behind.put("a", b"%d" % number)
    behind.put("b", b"other")
    behind.flush()
    assert (store.read_bytes("a"), store.read_bytes("b")) == (b"49", b"other")
    assert len(WRITES) <= 4


def test_a_thread_that_ends_leaves_the_write_of_its_successor(store: Store) -> None:
    class Changed(threading.Condition):
        """Lets another thread queue a document when the first one, with nothing left to write, releases its lock."""

        def __exit__(self, *given: Any) -> None:
            super().__exit__(*given)
            if behind._thread is None and ended and threading.current_thread().name == "geneva-write-behind":
                ended.pop().set()
                put.wait(30)

    behind = WriteBehind(store)
    behind._changed, ended, put = Changed(), [threading.Event()], threading.Event()
    first_ends = ended[0]
    behind.put("a", b"1")
    behind.flush()
    assert first_ends.wait(30)
    behind.put("held", b"old")
    while ("held", b"old") not in WRITES:
        time.sleep(0.01)
    put.set()
    for thread in threading.enumerate():
        if thread.name == "geneva-write-behind" and thread is not behind._thread:
            thread.join(30)
    writing = threading.Thread(target=behind.write, args=("held", b"new"))
    writing.start()
    writing.join(0.2)
    assert [content for name, content in WRITES if name == "held"] == [b"old"], "it waits for the earlier content"
    HELD.set()
    writing.join()
    behind.flush()
    assert store.read_bytes("held") == b"new"


def test_a_flush_waits_for_the_document_that_is_being_written_and_writes_the_others_meanwhile(store: Store) -> None:
    behind = WriteBehind(store)
    behind.put("held", b"old")
    while not WRITES:
        time.sleep(0.01)
    behind.put("held", b"new")
    behind.put("b", b"1")
    flushing = threading.Thread(target=behind.flush)
    flushing.start()
    while ("b", b"1") not in WRITES:
        time.sleep(0.01)
    assert flushing.is_alive()
    HELD.set()
    flushing.join(30)
    assert not flushing.is_alive()
    assert store.read_bytes("held") == b"new"


def test_a_write_that_fails_is_said_once_and_fails_nothing(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    behind = WriteBehind(store)
    for _ in range(2):
        behind.put("broken", b"1")
        behind.flush()
    behind.put("b", b"1")
    behind.flush()
    assert store.read_bytes("b") == b"1"
    assert [record.getMessage() for record in caplog.records if "the store is full" in record.getMessage()] == [
        f"Cannot write {store.path('broken')}; the work goes on: the store is full"
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_thread_is_said_until_a_flush_has_said_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    behind = WriteBehind(store)

    def crash(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(behind, "_write", crash)
        behind.put("a", b"1")
        while behind._crash is None:
            time.sleep(0.01)
    crashed = r"The thread that writes the documents of .* has crashed: MemoryError\(\)"
    for _ in range(2):
        with pytest.raises(StorageError, match=crashed):
            behind.put("a", b"2")
    with pytest.raises(StorageError, match=crashed):
        behind.flush()
    behind.put("a", b"2")
    behind.flush()
    assert store.read_bytes("a") == b"2"
