"""Data files with blobs, which only `write_fragments` can write, and which it writes while batches come."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

if TYPE_CHECKING:
    import lance

_Batches: TypeAlias = "SimpleQueue[pa.RecordBatch | Exception | None]"


class BlobFileWriter:
    """A data file that a thread writes; it holds the batch that is being written and one more.

    Args:
        dataset: the table; the file will lie in its ``data/``.
        schema: its columns in the file.
    """

    def __init__(self, dataset: lance.LanceDataset, schema: pa.Schema) -> None:
        self._batches: _Batches = SimpleQueue()
        self._room = threading.Semaphore()
        self._file: Future[str] = Future()
        # The thread does not hold this writer: once nothing does, what was begun is given up.
        weakref.finalize(self, self._batches.put, RuntimeError("the file was given up"))
        arguments = (dataset, schema, self._batches, self._room, self._file)
        threading.Thread(target=_write, args=arguments, name="geneva-blobs", daemon=True).start()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows, as soon as the rows before them are being written; raises what pylance raised."""
        self._room.acquire()
        if self._file.done():
            self._room.release()
            self._file.result()
        self._batches.put(batch)

    def close(self) -> str:
        """Publish the file and return its name below ``data/``; raises what pylance raised."""
        self._batches.put(None)
        return self._file.result()


def _write(
    dataset: lance.LanceDataset,
    schema: pa.Schema,
    batches: _Batches,
    room: threading.Semaphore,
    file: Future[str],
) -> None:
    from lance.fragment import write_fragments

    def arriving() -> Iterator[pa.RecordBatch]:
        while (batch := batches.get()) is not None:
            if isinstance(batch, Exception):
                raise batch
            room.release()
            yield batch

    try:
        reader = pa.RecordBatchReader.from_batches(schema, arriving())
        (meta,) = write_fragments(
            reader, dataset, mode="append", max_rows_per_file=1 << 31, max_bytes_per_file=1 << 60
        )  # fmt: skip
        file.set_result(str(meta.files[0].path))
    except BaseException as error:
        file.set_exception(error)
    finally:
        room.release()
