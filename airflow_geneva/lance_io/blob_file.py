"""Write data files with blob columns; only pylance's `write_fragments` can do it, and it reads from a stream."""

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
    """Writes a data file in a background thread; holds at most two batches in memory.

    Args:
        dataset: the table; the file goes into its ``data/`` folder.
        schema: the columns of the file.
    """

    def __init__(self, dataset: lance.LanceDataset, schema: pa.Schema) -> None:
        self._batches: _Batches = SimpleQueue()
        self._room = threading.Semaphore()
        self._file: Future[str] = Future()
        # The thread has no reference to this writer. When the writer is garbage collected, the thread stops.
        weakref.finalize(self, self._batches.put, RuntimeError("the writer was dropped before it was closed"))
        arguments = (dataset, schema, self._batches, self._room, self._file)
        threading.Thread(target=_write, args=arguments, name="geneva-blobs", daemon=True).start()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows once the thread has taken the rows before them; raises what pylance raised."""
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
