"""Load values by key on a cluster: a shuffle joins the table's keys with the source, and tasks stage the fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.load.delivery import ADDRESS, FOUND, ROW_ID, Delivery, key_schema, read_keys
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.plan.shard import FragmentWork
from airflow_geneva.engine.run.column import ColumnTarget
from airflow_geneva.engine.run.load import FragmentLoader, load_fragments
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark import local
from airflow_geneva.spark.code import send_code

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PARTS_A_SLOT = 4
_KEY_TASKS = 256
_STAGED = pa.schema([("fragment", pa.int64()), ("rows", pa.int64())])


@dataclass(frozen=True)
class _Task:
    """What tasks need, credentials too; sent to executors inside the serialized task."""

    location: TableLocation
    work: LoadSpec
    delivery: Delivery
    plan: str
    shard: int
    left: tuple[int, ...]
    """The fragments to stage, by id."""

    def target(self) -> ColumnTarget:
        return ColumnTarget.at(self.location, self.work)

    def read_source(self, parts: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = _as_spark(self.delivery.schema())
        for part in _numbers(parts):
            yield from (_converted(batch, schema) for batch in self.delivery.batches(part))

    def read_keys(self, groups: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the keys of groups of fragments; a group is every `_KEY_TASKS`-th fragment from its number on."""
        source = self.target().source
        schema = _as_spark(self.key_schema())
        for group in _numbers(groups):
            for batch in read_keys(source, self.work.on, self.left[group::_KEY_TASKS], self.work.where):
                yield _converted(batch, schema)

    def stage(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage the fragments of a partition, whose rows come in the order of their addresses."""
        target, works = self.target(), {work.id: work for work in self.works()}
        for fragment, count in load_fragments(target, works, rows):
            yield pa.RecordBatch.from_pylist([{"fragment": fragment, "rows": count}], schema=_STAGED)

    def key_schema(self) -> pa.Schema:
        return key_schema([kind for _, kind in self.delivery.keys.values()])

    def works(self) -> Sequence[FragmentWork]:
        job = JobFolder.of(self.location.checkpoints, self.work.job_id).storage
        return list(load_plan(job, self.plan).load_shard(job, self.shard).fragments)


def load_on_spark(
    session: SparkSession | None,
    location: TableLocation,
    work: LoadSpec,
    delivery: Delivery,
    todo: Sequence[FragmentWork],
    plan: str,
    shard: int,
) -> Iterator[int]:
    """Join and stage fragments of a shard; yield the number of rows of each.

    Raises:
        InvalidInput: Spark has no type for a column.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    session = session or local.open_session(work.sizing.concurrency)
    send_code(session, ())
    wanted = {one.id: one for one in todo}
    task = _Task(location, work, delivery, plan, shard, tuple(wanted))
    source = _frame(session, delivery.source.parts(), task.read_source, delivery.schema())
    keys = _frame(session, min(len(todo), _KEY_TASKS), task.read_keys, task.key_schema())
    names = [f"k{at}" for at in range(len(work.on))]
    if work.on_duplicate != "error":
        number = f.col("number").asc() if work.on_duplicate == "first" else f.col("number").desc()
        place = f.row_number().over(Window.partitionBy(*names).orderBy(number))
        source = source.withColumn("place", place).where("place = 1").drop("place")
    values = [f"v{at}" for at in range(len(work.columns))]
    renamed = source.withColumnsRenamed({name: f"s{name}" for name in names})
    same = [f.col(name) == f.col(f"s{name}") for name in names]
    # Without the hint Spark broadcasts a source that is small while compressed, and holds it in each process.
    joined = keys.join(renamed.hint("merge"), same, "left").select(
        ADDRESS, ROW_ID, f.col("number").isNotNull().alias(FOUND), *values
    )  # fmt: skip
    partitions = max(1, min(len(todo), work.sizing.concurrency * _PARTS_A_SLOT))
    staged = (
        joined.repartition(partitions, f.shiftright(ADDRESS, 32))
        .sortWithinPartitions(ADDRESS)
        .mapInArrow(task.stage, "fragment long, rows long")
    )
    for fragment, rows in staged.collect():
        wanted.pop(fragment)
        yield int(rows)
    target = task.target() if wanted else None
    for one in wanted.values():  # the filter selects no row of these
        assert target is not None
        yield FragmentLoader(target, one).finish()


def _frame(
    session: SparkSession,
    tasks: int,
    read: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        kinds = from_arrow_schema(_as_spark(schema))
    except PySparkTypeError as error:
        raise InvalidInput(f'Spark has no type for a column of the source: {error}. Use runner="inline".') from error
    return session.range(0, max(tasks, 1), 1, max(tasks, 1)).mapInArrow(read, kinds)


def _numbers(batches: Iterable[pa.RecordBatch]) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _as_spark(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, _spark_type(field.type)) for field in schema])


def _spark_type(kind: pa.DataType) -> pa.DataType:
    """Return a type of Spark that holds the values of a type; times become numbers, so that no zone shifts them."""
    if pt.is_fixed_size_list(kind) or pt.is_list(kind) or pt.is_large_list(kind):
        return pa.list_(_spark_type(kind.value_type))
    if pt.is_struct(kind):
        return pa.struct([pa.field(field.name, _spark_type(field.type)) for field in kind])
    if pt.is_map(kind):
        return pa.map_(_spark_type(kind.key_type), _spark_type(kind.item_type))
    if pt.is_large_string(kind) or pt.is_string_view(kind):
        return pa.string()
    if pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind) or pt.is_binary_view(kind):
        return pa.binary()
    if pt.is_date32(kind) or pt.is_time32(kind):
        return pa.int32()
    if pt.is_temporal(kind):
        return pa.int64()
    wider = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20)}
    return wider.get(kind, kind)


def _converted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns: list[Any] = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
