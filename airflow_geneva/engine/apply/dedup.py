"""Call a deterministic UDF once for equal inputs in a batch, in a task, and in other tasks and jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import BatchMapper, BegunBatch
from airflow_geneva.engine.apply.stages import prepare_some
from airflow_geneva.engine.apply.udf_call import MappedBatch, Mapper
from airflow_geneva.engine.checkpoint.value_cache import ValueCache
from airflow_geneva.engine.failures import RowFailure
from airflow_geneva.engine.job.speed import SavedCalls
from airflow_geneva.engine.lance_io.arrays import rows_at
from airflow_geneva.engine.lance_io.row_keys import row_keys
from airflow_geneva.engine.runtime import threading, time
from airflow_geneva.errors import UdfError

_LOOK_SECONDS = 2.0
_FLUSH_SECONDS = 5.0
_FLUSH_BYTES = 8 << 20


class Place(NamedTuple):
    """A value: an array, and the position in it; `cached` if another task or job computed it."""

    values: pa.Array
    at: int
    cached: bool = False


class KnownValues:
    """Values of one UDF in this process's memory, by the keys of their inputs; shared by the threads of a task.

    Args:
        cache: the values of other tasks and jobs; None: use only the values of this process.
        max_bytes: the maximum bytes of values to keep; the oldest are evicted first.
    """

    def __init__(self, cache: ValueCache | None, max_bytes: int) -> None:
        self.cache = cache
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self.begun: set[bytes] = set()
        self._places: dict[bytes, Place] = {}
        self._blocks: OrderedDict[int, tuple[pa.Array, Sequence[bytes]]] = OrderedDict()
        self._unwritten: list[tuple[Sequence[bytes], pa.Array]] = []
        self._saved = SavedCalls()
        self._looked, self._flushed = 0.0, time.monotonic()

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Return the values of those keys whose values are known."""
        with self.lock:
            now = time.monotonic()
            if self.cache is not None and now - self._looked > _LOOK_SECONDS:
                self.cache.look()
                self._looked = time.monotonic()
            found = {key: self._places[key] for key in keys if key in self._places}
            others = [key for key in keys if key not in found]
            if self.cache is not None and others:
                cached = zip(others, self.cache.find(others), strict=True)
                found |= {key: Place(*place, cached=True) for key, place in cached if place is not None}
            return found

    def add(self, keys: Sequence[bytes], values: pa.Array) -> None:
        """Keep computed values, and write them to the cache every few seconds or megabytes."""
        with self.lock:
            raced = sum(key in self._places for key in keys)
            self._saved += SavedCalls(raced=raced)
            if keys:
                self._blocks[id(values)] = (values, keys)
                self._places |= {key: Place(values, at) for at, key in enumerate(keys)}
                self._unwritten.append((keys, values))
            while len(self._blocks) > 1 and sum(block.nbytes for block, _ in self._blocks.values()) > self.max_bytes:
                gone, its_keys = self._blocks.popitem(last=False)[1]
                for key in its_keys:
                    if key in self._places and self._places[key].values is gone:
                        del self._places[key]
            size = sum(part.nbytes for _, part in self._unwritten)
            if size >= _FLUSH_BYTES or time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self.flush()

    def count(self, saved: SavedCalls) -> None:
        with self.lock:
            self._saved += saved

    def take_saved(self) -> SavedCalls:
        """Return the calls that were saved since the last call of this method."""
        with self.lock:
            saved, self._saved = self._saved, SavedCalls()
            return saved

    def flush(self) -> None:
        """Write the values to the cache that are not written yet."""
        with self.lock:
            unwritten, self._unwritten, self._flushed = self._unwritten, [], time.monotonic()
            if self.cache is not None and unwritten:
                keys = [key for part, _ in unwritten for key in part]
                first = {key: at for at, key in reversed(list(enumerate(keys)))}
                values = rows_at(pa.concat_arrays([part for _, part in unwritten]), pa.array(sorted(first.values())))
                raced = self.cache.write([keys[at] for at in sorted(first.values())], values)
                self._saved += SavedCalls(raced=raced)


class DedupMapper(BatchMapper):
    """Calls a UDF on the rows whose inputs are new; a failed call is not remembered."""

    def __init__(self, inner: BatchMapper, known: KnownValues, mapper: Mapper) -> None:
        self.inner = inner
        self.inputs = mapper.inputs
        self.kind = mapper.udf.data_type
        self.known = known
        self.calls_at_a_time, self.calls_rows = inner.calls_at_a_time, inner.calls_rows
        self.prepares_at_a_time, self.prepares_rows = inner.prepares_at_a_time, inner.prepares_rows

    def prepare(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Preprocess the first row of each input whose value is neither known nor being computed."""
        keys = row_keys(self.inputs(batch))
        with self.known.lock:
            done = self.known.find(list(dict.fromkeys(keys))).keys() | self.known.begun
        firsts = {key: row for row, key in reversed(list(enumerate(keys))) if key not in done}
        return prepare_some(self.inner, batch, np.array(sorted(firsts.values()), np.int64))

    def close(self) -> None:
        self.inner.close()

    def begin(self, batch: pa.RecordBatch) -> BegunBatch:
        if not batch.num_rows:
            return self.inner.begin(batch)
        # Make keys from the parameters: `(a, b, a)` and `(a, b, b)` read the same columns of a batch.
        keys = row_keys(self.inputs(batch))
        with self.known.lock:
            found = self.known.find(list(dict.fromkeys(keys)))
            firsts: dict[bytes, int] = {}
            for row, key in enumerate(keys):
                if key not in found and key not in self.known.begun:
                    firsts.setdefault(key, row)
            self.known.begun |= firsts.keys()
        calls = None
        if firsts:
            rows = list(firsts.values())
            part = batch if len(rows) == batch.num_rows else rows_at(batch, pa.array(rows))
            calls = self.inner.begin(part)
        return _BegunDedup(self, batch, keys, found, firsts, set(keys) - found.keys() - firsts.keys(), calls)


@dataclass(eq=False)
class _BegunDedup(BegunBatch):
    """A batch in which the UDF is called on the first row of each new input.

    Args:
        found: values that were already known.
        firsts: the called row, by the key of its inputs.
        waited: keys of inputs whose value another batch is computing.
    """

    mapper: DedupMapper
    batch: pa.RecordBatch
    keys: list[bytes]
    found: dict[bytes, Place]
    firsts: dict[bytes, int]
    waited: set[bytes]
    calls: BegunBatch | None

    @property
    def unfinished(self) -> int:
        return self.calls.unfinished if self.calls else 0

    def go_on(self) -> bool:
        """Also wait for batches that compute the same inputs; `unfinished` does not count their calls."""
        if self.calls is not None and not self.calls.go_on():
            return False
        return self.waited.isdisjoint(self.mapper.known.begun)

    def cancel(self) -> tuple[list[int], pa.Array | None]:
        self.mapper.known.begun.difference_update(self.firsts)
        if self.calls is None:
            return [], None
        rows, values = self.calls.cancel()
        firsts = list(self.firsts.values())
        if values is not None:
            self.mapper.known.add([self.keys[firsts[row]] for row in rows], values)
        return [firsts[row] for row in rows], values

    def result(self) -> MappedBatch:
        known, stop = self.mapper.known, len(self.keys)
        places: dict[int, Place | None] = {}
        failures: list[RowFailure] = []
        failed: UdfError | None = None
        called = 0
        if self.calls is not None:
            try:
                stop, failed = self._take(self.calls.result, list(self.firsts.values()), places, failures)
            finally:
                known.begun.difference_update(self.firsts)
            called += len(self.firsts)
        done = {self.keys[row]: place for row, place in places.items() if place is not None}
        # The values that another batch was computing are known now, unless its calls failed.
        done |= self.found
        waited = [key for key in dict.fromkeys(self.keys[:stop]) if key not in done and key not in self.firsts]
        done |= known.find(waited) if waited else {}
        again = [row for row, key in enumerate(self.keys[:stop]) if row not in places and key not in done]
        if again:
            part = rows_at(self.batch, pa.array(again))
            end, error = self._take(lambda: self.mapper.inner(part), again, places, failures)
            stop, failed = (end, error) if error is not None else (stop, failed)
            called += len(again)
        rows = [places[row] if row in places else done[key] for row, key in enumerate(self.keys[:stop])]
        values = self._values(rows)
        failures = sorted((one for one in failures if one.index < stop), key=lambda one: one.index)
        if failed is not None:
            failed.row_index, failed.computed, failed.failures = stop, values, tuple(failures)
            raise failed
        taken = [place for row, place in enumerate(rows) if row not in places]
        cached = sum(place is not None and place.cached for place in taken)
        known.count(SavedCalls(deduplicated=len(taken) - cached, cached=cached))
        return MappedBatch(values, tuple(failures), called)

    def _take(
        self,
        call: Callable[[], MappedBatch],
        rows: Sequence[int],
        places: dict[int, Place | None],
        failures: list[RowFailure],
    ) -> tuple[int, UdfError | None]:
        """Store the results of a call on some rows; return the failing row and its error, or the batch's rows."""
        error: UdfError | None = None
        stop = len(self.keys)
        try:
            mapped = call()
            values, its_failures = mapped.values, mapped.failures
        except UdfError as failed:
            if failed.row_index is None:
                raise
            error, stop = failed, rows[failed.row_index]
            if failed.computed is None:
                failed.row_index = stop
                raise
            values, its_failures = failed.computed, failed.failures
        bad = {failure.index for failure in its_failures}
        good = [at for at in range(len(values)) if at not in bad]
        kept = values if len(good) == len(values) else rows_at(values, pa.array(good, pa.int64()))
        self.mapper.known.add([self.keys[rows[at]] for at in good], kept)
        places |= {rows[at]: Place(kept, position) for position, at in enumerate(good)}
        places |= dict.fromkeys((rows[at] for at in bad), None)
        failures += [replace(failure, index=rows[failure.index]) for failure in its_failures]
        return stop, error

    def _values(self, rows: Sequence[Place | None]) -> pa.Array:
        """Combine values in row order: take the wanted ones from each array, then reorder them."""
        wanted: dict[int, tuple[pa.Array, list[int], list[int]]] = {}
        empty: list[int] = []
        for row, place in enumerate(rows):
            if place is None:
                empty.append(row)
            else:
                _, positions, of_rows = wanted.setdefault(id(place.values), (place.values, [], []))
                positions.append(place.at)
                of_rows.append(row)
        kind = self.mapper.kind
        parts = [rows_at(array, pa.array(positions)) for array, positions, _ in wanted.values()]
        order = [row for _, _, of_rows in wanted.values() for row in of_rows] + empty
        joined = pa.concat_arrays([*parts, pa.nulls(len(empty), kind)]) if parts else pa.nulls(len(empty), kind)
        return rows_at(joined, pa.array(np.argsort(np.array(order, np.int64)), pa.int64()))
