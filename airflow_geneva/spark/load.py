"""Load values by key on a cluster: a shuffle joins the table's keys with the source, and tasks stage the fragments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.choices import OnDuplicate, undecided
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.lance_io.arrays import map_leaves
from airflow_geneva.engine.load.checks import SHOWN, Examples
from airflow_geneva.engine.load.delivery import ADDRESS, FOUND, ROW_ID, SourceMapping, TableKeys, key_schema
from airflow_geneva.engine.load.source import LoadSource
from airflow_geneva.engine.plan.load_spec import LoadSpec
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.run.load import FragmentLoader, LoadTarget, load_fragments
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import InvalidInput
from airflow_geneva.spark import local
from airflow_geneva.spark.code import package_archive, send_archives
from airflow_geneva.spark.connect import explaining_ended_session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_PARTS_A_SLOT = 4
_KEY_TASKS = 256
_STAGED = pa.schema([("fragment", pa.int64()), ("rows", pa.int64())])


class SparkSearch:
    """Finds keys that do not fit on a session of Spark; without one, the first search starts it."""

    def __init__(self, concurrency: int, session: SparkSession | None = None) -> None:
        self._concurrency = concurrency
        self._session = session

    @property
    def session(self) -> SparkSession:
        if self._session is None:
            self._session = local.open_session(self._concurrency)
        return self._session

    def open_source(self, source: LoadSource) -> LoadSource:
        """Return a source that only Spark has with its DataFrame and columns; another one as it is.

        Raises:
            InvalidInput: Spark has no table of that name, or Arrow has no type for a column.
        """
        if not source.on_spark:
            return source
        if source.frame is not None:
            self._session = source.frame.sparkSession
        with _explaining(f"Spark cannot read {source.name}"):
            frame = self.session.table(source.paths[0]) if source.frame is None else source.frame
            columns = frame.limit(0).toArrow().schema
        in_utc = [(column.name, map_leaves(column.type, _in_utc)) for column in columns]
        return replace(source, frame=frame, columns=pa.schema(in_utc))

    def stage(
        self,
        location: TableLocation,
        spec: LoadSpec,
        delivery: SourceMapping,
        todo: Sequence[FragmentTask],
        plan: str,
        shard: int,
    ) -> Iterator[int]:
        return load_on_spark(self.session, location, spec, delivery, todo, plan, shard)

    def find_duplicates(self, delivery: SourceMapping) -> Examples:
        from pyspark.sql import functions as f

        if delivery.source.on_spark:
            _source_frame(self.session, delivery)  # Spark may not know which column of two a name means
        rows = _source_frame(self.session, delivery, with_values=False)
        for name in _keys(delivery):
            rows = rows.where(f.col(name).isNotNull())
        return _examples(rows.groupBy(*_keys(delivery)).agg(f.count("*").alias("n")).where("n > 1"), delivery)

    def find_missing(self, delivery: SourceMapping, table: TableKeys) -> Examples:
        keys = _table_frame(self.session, delivery, table)
        source, same = _renamed(_source_frame(self.session, delivery, with_values=False), delivery)
        return _examples(keys.join(source.hint("merge"), same, "left_anti").select(*_keys(delivery)), delivery)


def _examples(found: DataFrame, delivery: SourceMapping) -> Examples:
    from pyspark.sql import functions as f

    with _explaining(f"The keys of {delivery.source.name} cannot be checked on Spark"):
        shown = found.orderBy(*(f.col(name).asc_nulls_last() for name in _keys(delivery))).limit(SHOWN).toArrow()
        return Examples.of(found.count() if shown.num_rows == SHOWN else shown.num_rows, shown, delivery)


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    """Translate errors about names and types; show an invalid input that a task found without Spark's traceback."""
    from pyspark.errors import AnalysisException, PySparkException, PySparkTypeError

    try:
        with explaining_ended_session():
            yield
    except PySparkException as error:
        own = re.findall(rf"{InvalidInput.__module__}\.{InvalidInput.__name__}: (.*)", str(error))
        if own or isinstance(error, (AnalysisException, PySparkTypeError)):
            raise InvalidInput(own[-1] if own else f"{what}: {error}") from error
        raise


@dataclass(frozen=True)
class _SourceTask:
    """What tasks need to read a source, credentials too; sent to executors inside the serialized task."""

    delivery: SourceMapping
    with_values: bool

    @property
    def schema(self) -> pa.Schema:
        return self.delivery.schema(self.with_values)

    def read(self, parts: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = _as_spark(self.schema)
        for part in _numbers(parts):
            yield from (_converted(batch, schema) for batch in self.delivery.batches(part, self.with_values))

    def carry(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Convert rows of a DataFrame. They get no numbers, because their order is not known."""
        schema = _as_spark(self.schema)
        yield from (_converted(self.delivery.carry(batch, 0, self.with_values), schema) for batch in rows)


@dataclass(frozen=True)
class _KeyTask:
    """What tasks need to read the keys of a table; a group is every `_KEY_TASKS`-th fragment from its number on."""

    table: TableKeys
    schema: pa.Schema

    def read(self, groups: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = _as_spark(self.schema)
        for group in _numbers(groups):
            yield from (_converted(batch, schema) for batch in self.table.read(slice(group, None, _KEY_TASKS)))


@dataclass(frozen=True)
class _StageTask:
    """What tasks need to stage the fragments of a shard, credentials too."""

    location: TableLocation
    spec: LoadSpec
    plan: str
    shard: int

    def target(self) -> LoadTarget:
        return LoadTarget.at(self.location, self.spec)

    def stage(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage the fragments of a partition, whose rows come in the order of their addresses."""
        target, works = self.target(), {task.id: task for task in self.works()}
        for fragment, count in load_fragments(target, works, rows):
            yield pa.RecordBatch.from_pylist([{"fragment": fragment, "rows": count}], schema=_STAGED)

    def works(self) -> Sequence[FragmentTask]:
        job = JobFolder.of(self.location.checkpoints, self.spec.job_id).storage
        return list(load_plan(job, self.plan).load_shard(job, self.shard).fragments)


def load_on_spark(
    session: SparkSession,
    location: TableLocation,
    spec: LoadSpec,
    delivery: SourceMapping,
    todo: Sequence[FragmentTask],
    plan: str,
    shard: int,
) -> Iterator[int]:
    """Join and stage fragments of a shard; yield the number of rows of each.

    Raises:
        InvalidInput: Spark has no type for a column, or values of the source cannot be converted.
    """
    from pyspark.sql import Window, functions as f

    wanted = {one.id: one for one in todo}
    task = _StageTask(location, spec, plan, shard)
    source = _source_frame(session, delivery)
    keys = _table_frame(session, delivery, TableKeys(location, spec.version, spec.on, tuple(wanted), spec.where))
    order = None
    match OnDuplicate(spec.on_duplicate):
        case OnDuplicate.FIRST:
            order = f.col("number").asc()
        case OnDuplicate.LAST:
            order = f.col("number").desc()
        case OnDuplicate.ERROR:  # no key has several rows, else the plan had stopped
            pass
        case other:
            undecided(other)
    if order is not None:
        place = f.row_number().over(Window.partitionBy(*_keys(delivery)).orderBy(order))
        source = source.withColumn("place", place).where("place = 1").drop("place")
    values = [f"v{at}" for at in range(len(spec.columns))]
    renamed, same = _renamed(source, delivery)
    # Without the hint Spark broadcasts a source that is small while compressed, and holds it in each process.
    joined = keys.join(renamed.hint("merge"), same, "left").select(
        ADDRESS, ROW_ID, f.col("number").isNotNull().alias(FOUND), *values
    )  # fmt: skip
    partitions = max(1, min(len(todo), spec.sizing.concurrency * _PARTS_A_SLOT))
    staged = (
        joined.repartition(partitions, f.shiftright(ADDRESS, 32))
        .sortWithinPartitions(ADDRESS)
        .mapInArrow(task.stage, "fragment long, rows long")
    )
    with _explaining("The source and the table cannot be joined on Spark"):
        done = staged.collect()
    for fragment, rows in done:
        wanted.pop(fragment)
        yield int(rows)
    target = task.target() if wanted else None
    for one in wanted.values():  # the filter selects no row of these
        assert target is not None
        yield FragmentLoader(target, one).finish()


def _keys(delivery: SourceMapping) -> list[str]:
    return [f"k{at}" for at in range(len(delivery.keys))]


def _renamed(source: DataFrame, delivery: SourceMapping) -> tuple[DataFrame, list[Column]]:
    """Rename the keys of a source, and return also the conditions of its join with the keys of a table."""
    from pyspark.sql import functions as f

    names = _keys(delivery)
    same = [f.col(name) == f.col(f"s{name}") for name in names]
    return source.withColumnsRenamed({name: f"s{name}" for name in names}), same


def _source_frame(session: SparkSession, delivery: SourceMapping, with_values: bool = True) -> DataFrame:
    """Return the rows of a source: keys ``k0``..., values ``v0``... and the number of each."""
    frame = delivery.source.frame
    task = _SourceTask(replace(delivery, source=replace(delivery.source, frame=None)), with_values)
    if frame is None:
        return _frame(session, delivery.source.parts(), task.read, task.schema)
    send_archives(session, package_archive())
    names = [*delivery.keys, *(delivery.values if with_values else ())]
    with _explaining(f"Spark cannot read {delivery.source.name}"):
        chosen: DataFrame = frame.select(*("`" + name.replace("`", "``") + "`" for name in names))
        return chosen.mapInArrow(task.carry, _spark_schema(task.schema))


def _table_frame(session: SparkSession, delivery: SourceMapping, table: TableKeys) -> DataFrame:
    task = _KeyTask(table, key_schema([kind for _, kind in delivery.keys.values()]))
    return _frame(session, min(len(table.fragments), _KEY_TASKS), task.read, task.schema)


def _frame(
    session: SparkSession,
    tasks: int,
    read: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    send_archives(session, package_archive())
    return session.range(0, max(tasks, 1), 1, max(tasks, 1)).mapInArrow(read, _spark_schema(schema))


def _spark_schema(schema: pa.Schema) -> StructType:
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        return from_arrow_schema(_as_spark(schema))
    except PySparkTypeError as error:
        raise InvalidInput(f'Spark has no type for a column of the source: {error}. Use runner="inline".') from error


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


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """Return a type without the zone of a session, in which Spark shows times."""
    return pa.timestamp(kind.unit, "UTC") if pt.is_timestamp(kind) and kind.tz is not None else kind


def _converted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns: list[Any] = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
