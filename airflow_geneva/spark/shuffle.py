"""Spark's shuffle of the source rows of a view of groups: tasks that read pieces of the source, and what they send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_geneva.engine.apply.batch_mapper import StopComputing
from airflow_geneva.engine.apply.shuffled_rows import GroupPlaces, Interval, Sender, ShuffledRows, pieces_of
from airflow_geneva.engine.process_memo import ProcessMemo
from airflow_geneva.engine.run.units import Unit
from airflow_geneva.engine.run.view import ViewTarget
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.spark.signs import DriverSigns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PIECES_A_SLOT, _PARTITIONS_A_SLOT = 8, 4
_KEYS_A_PARTITION = 40
_AT_ONCE = 32
_ROWS_AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"
_SENT = pa.schema([("key", pa.int64()), ("unit", pa.int64()), ("rows", pa.binary())])

Batches = Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class SendTask:
    """What tasks need to send the rows of a stage's groups of units, credentials too.

    Args:
        stage: identifies the stage in a worker process.
        open_target: opens the view.
        read_groups: reads the groups of units.
        progress: where the driver gives its signs.
        keys: for each group, a number that Spark puts into a partition of its own.
    """

    stage: tuple[str, ...]
    open_target: Callable[[], ViewTarget]
    read_groups: Callable[[], list[list[Unit]]]
    progress: Storage
    keys: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]

    def send(self, numbers: Batches) -> Iterator[pa.RecordBatch]:
        """Yield the rows of pieces of the source as messages, each for a unit of a group, until the driver stops it."""
        sender, units = _sender_of_stage.once(self.stage, self._sender)
        with suppress(StopComputing):  # the tasks that get the rows say so
            for interval, rows in sender.send(self._wanted(numbers)):
                group, unit = units[interval]
                yield pa.RecordBatch.from_pylist([{"key": self.keys[group], "unit": unit, "rows": rows}], schema=_SENT)

    def _wanted(self, numbers: Batches) -> Iterator[tuple[int, int, int]]:
        signs = DriverSigns(self.progress)
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                signs.read()
                yield self.pieces[number]

    def _sender(self) -> tuple[Sender, list[tuple[int, int]]]:
        target, groups = self.open_target(), self.read_groups()
        units = [(at, number) for at, group in enumerate(groups) for number, unit in enumerate(group) if unit.run]
        places = GroupPlaces.read(target.source, [interval_of(groups[at][number]) for at, number in units])
        return Sender(target.rows_of_groups, target.shuffle_columns, places, target.spec.sizing.batch_bytes // 2), units


_sender_of_stage: ProcessMemo[tuple[str, ...], tuple[Sender, list[tuple[int, int]]]] = ProcessMemo(1)
"""What the tasks of a worker process send by: the places of all groups."""


def interval_of(unit: Unit) -> Interval:
    """Return the addresses of the groups of a unit, from the first to after the last."""
    first = unit.task.id << 32
    return first + int(unit.run.starts[0]), first + int(unit.run.ends[-1])


def received_rows(target: ViewTarget, units: list[Unit], messages: Iterator[tuple[int, bytes]]) -> ShuffledRows:
    """Take the rows of a group of units, which come unit by unit."""
    rows = ShuffledRows(target.shuffle_columns, target.spec.sizing.batch_bytes)
    for number, of_unit in groupby(messages, itemgetter(0)):
        rows.receive(interval_of(units[number]), (data for _, data in of_unit))
    return rows


def messages_of(batches: Batches) -> Iterator[tuple[int, tuple[int, bytes]]]:
    """Yield the key, the unit and the rows of each message."""
    for batch in batches:
        for key, unit, rows in zip(batch["key"].to_pylist(), batch["unit"].to_pylist(), batch["rows"], strict=True):
            yield key, (unit, rows.as_py())


def answered(found: bytes) -> pa.RecordBatch:
    """Return what a group of units gave, as a row of Spark."""
    return pa.RecordBatch.from_pydict({"found": pa.array([found], pa.binary())})


def partition_keys(session: SparkSession, partitions: int) -> tuple[int, ...]:
    """Find for each partition of a shuffle a number that Spark puts into it."""
    numbers = session.range(0, partitions * _KEYS_A_PARTITION, 1, 1)
    found = numbers.selectExpr("id", f"pmod(hash(id), {partitions}) AS partition").collect()
    of_partition: dict[int, int] = {row["partition"]: row["id"] for row in found}
    return tuple(of_partition[at] for at in range(partitions))


def pieces_to_send(target: ViewTarget, slots: int) -> tuple[tuple[int, int, int], ...]:
    return tuple(pieces_of(target.rows_of_groups, slots * _PIECES_A_SLOT))


def shuffled(
    session: SparkSession, sends: SendTask, slots: int, run: Callable[[Batches], Iterator[pa.RecordBatch]]
) -> DataFrame:
    """Return the frame that reads the source, shuffles its rows to their groups of units, and runs each group."""
    partitions = min(len(sends.pieces), slots * _PARTITIONS_A_SLOT)
    numbers = session.range(0, len(sends.pieces), 1, partitions)
    sent = numbers.mapInArrow(sends.send, "key long, unit long, rows binary")
    gathered = sent.repartition(len(sends.keys), "key").sortWithinPartitions("unit")
    return gathered.mapInArrow(run, "found binary")


@contextmanager
def few_messages_at_once(session: SparkSession) -> Iterator[None]:
    """Let Spark hand few messages to Python at once: their number is all that bounds the bytes in every version."""
    before: Any = session.conf.get(_ROWS_AT_ONCE, None)
    session.conf.set(_ROWS_AT_ONCE, _AT_ONCE)
    try:
        yield
    finally:
        if before is None:
            session.conf.unset(_ROWS_AT_ONCE)
        else:
            session.conf.set(_ROWS_AT_ONCE, before)
