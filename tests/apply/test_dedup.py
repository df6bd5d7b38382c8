"""`dedup=True`: equal inputs are called once, values and failures are those of the plain function."""

from __future__ import annotations

import asyncio
import importlib
import linecache
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from airflow_geneva import RateLimit, connect
from airflow_geneva.engine.apply.dedup import KnownValues
from airflow_geneva.engine.apply.isolation.runner import open_batch_mapper
from airflow_geneva.engine.apply.udf_call import MappedBatch
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.checkpoint.value_cache import ValueCache
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.cleanup.garbage import FileKind
from airflow_geneva.engine.lance_io.row_keys import row_keys
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.udf import UDF, Skip, udf
from airflow_geneva.engine.udf.shipping import UdfReference
from airflow_geneva.errors import InvalidInput, UdfError
from tests.support.broken_off import DAY
from tests.support.counting import Trace, leave_trace
from tests.support.processes import as_another_process
from tests.support.tables import MakeTable

FLOATS = [None, float("nan"), 0.0, -0.0, 1.0, float("inf")]
NESTED = pa.list_(pa.struct({"a": pa.float64(), "b": pa.list_(pa.string())}))


def test_equal_inputs_have_equal_keys_and_others_do_not() -> None:
    columns: dict[str, Callable[[], pa.Array]] = {
        "floats": lambda: pa.array(FLOATS),
        "text": lambda: pa.array([None, "", "a", "a\0", "b", "ab"]),
        "bytes": lambda: pa.array([None, b"", b"a", b"a\0", b"b", b"ab"]),
        "fixed": lambda: pa.array([None, b"ab", b"ba", b"bb", b"aa", b"cc"], pa.binary(2)),
        "flags": lambda: pa.array([None, True, False]),
        "lists": lambda: pa.array([None, [], [None], [0.0], [-0.0], [0.0, None]], pa.list_(pa.float32())),
        "vectors": lambda: pa.array([None, [0, 1], [1, 0], [None, 1]], pa.list_(pa.float32(), 2)),
        "structs": lambda: pa.array([None, {"a": None}, {"a": 0.0}, {"a": -0.0}], pa.struct({"a": pa.float64()})),
        "nested": lambda: pa.array(
            [None, [], [None], [{"a": 1, "b": None}], [{"a": 1, "b": []}], [{"a": 1}] * 2], NESTED
        ),
        "dictionary": lambda: pa.array([None, "a", "b"]).dictionary_encode(),
        "map": lambda: pa.array([None, [], [("a", 1)], [("a", 2)]], pa.map_(pa.string(), pa.int64())),
        "times": lambda: pa.array([None, 0, 1], pa.timestamp("us")),
        "decimals": lambda: pa.array([None, 1, 2], pa.decimal128(5, 2)),
    }
    for name, make in columns.items():
        values = make()
        count = len(values)
        keys = row_keys(pa.record_batch({name: pa.concat_arrays([values, make()])}))
        assert keys[:count] == keys[count:], name
        assert len(set(keys)) == count, name
        assert row_keys(pa.record_batch({name: values}).slice(1)) == keys[1:count], name
    pairs = pa.record_batch({"a": ["a", "ab"], "b": ["bc", "c"]})
    assert len(set(row_keys(pairs))) == 2


def results(function: UDF, batches: list[pa.RecordBatch], known: KnownValues | None) -> list[Any]:
    """Values, failures or the error of each batch."""
    found = list[Any]()
    with open_batch_mapper(function, None, known) as mapper:
        for batch in batches:
            try:
                mapped: MappedBatch = mapper(batch)
                found.append((mapped.values.to_pylist(), [(one.index, one.message) for one in mapped.failures]))
            except UdfError as error:
                computed = None if error.computed is None else error.computed.to_pylist()
                found.append((error.row_index, computed, [one.index for one in error.failures]))
    return found


XS = st.lists(st.lists(st.tuples(st.sampled_from(FLOATS), st.integers(0, 3)), max_size=12), min_size=1, max_size=4)


def _value(x: float | None, n: int) -> str:
    if n == 3:
        raise ValueError(f"not {x} {n}")
    if n == 2 and x == 1.0:
        raise KeyError(f"never {x}")
    return f"{x} {n}"


@pytest.mark.parametrize("form", ["scalar", "array", "async"])
@settings(max_examples=20, deadline=None)
@given(given_rows=XS, skips=st.booleans())
def test_values_and_failures_are_those_of_the_plain_function(form: str, given_rows: list[Any], skips: bool) -> None:
    policy = [Skip(ValueError)] if skips else "fail"
    calls = list[Any]()

    def scalar(x: float, n: int) -> str:
        calls.append((repr(x), n))
        return _value(x, n)

    async def later(x: float, n: int) -> str:
        await asyncio.sleep(0)
        return scalar(x, n)

    def array(x: pa.DoubleArray, n: pa.Int64Array) -> pa.StringArray:
        return pa.array([_value(*pair) for pair in zip(x.to_pylist(), n.to_pylist(), strict=True)], pa.string())

    if skips and form != "async":
        return  # in a process of its own: far slower, and the same to the rows
    made = udf(version="1", on_error=policy, data_type=pa.string())(
        {"scalar": scalar, "array": array, "async": later}[form]
    )
    batches = [
        pa.record_batch(
            {"x": pa.array([x for x, _ in rows], pa.float64()), "n": pa.array([n for _, n in rows], pa.int64())}
        )
        for rows in given_rows
    ]
    plain = results(made, batches, None)
    calls.clear()
    assert str(results(made, batches, KnownValues(None, 1 << 20))) == str(plain)
    good = [call for call in calls if call[1] != 3 and not (call[1] == 2 and call[0] == "1.0")]
    assert len(good) == len(set(good))


@udf(data_type=pa.int64(), version="1", deterministic=True, dedup=True)
def square(x: int) -> int:
    leave_trace([x])
    return x * x


def test_forty_percent_duplicates_over_fragments_and_shards_are_sixty_percent_of_the_calls(
    make_table: MakeTable, trace: Trace
) -> None:
    xs = [x % 60 for x in range(100)]
    np.random.default_rng(1).shuffle(xs)
    table = make_table(xs, per_fragment=10)
    table.add_columns({"y": square})
    result = table.backfill("y", runner="inline", shard_size=3)
    assert sorted(trace.rows()) == list(range(60))
    assert (result.rows_computed, result.rows_run) == (100, 60)
    assert (result.rows_deduplicated + result.rows_cached, result.rows_raced) == (40, 0)
    assert table.to_arrow().column("y").to_pylist() == [x * x for x in xs]
    assert "40 rows needed no call" in str(result)


def test_a_later_job_and_another_column_take_values_from_the_cache(make_table: MakeTable, trace: Trace) -> None:
    table = make_table(20, per_fragment=10)
    table.add_columns({"y": square})
    table.backfill("y", runner="inline")
    table.add([{"id": 100, "x": 3}, {"id": 101, "x": 77}])
    again = table.backfill("y", runner="inline")
    assert (len(trace), again.rows_computed, again.rows_cached) == (21, 2, 1)
    table.add_columns({"z": square})
    assert table.backfill("z", runner="inline").rows_cached == 22
    assert len(trace) == 21
    assert table.to_arrow().column("z").to_pylist() == table.to_arrow().column("y").to_pylist()
    ignoring = table.backfill("z", runner="inline", ignore_checkpoints=True, where="x = 3")
    assert ignoring.rows_cached == 0


MODULE = """
import pyarrow as pa
from airflow_geneva import udf

@udf(data_type=pa.int64(), version="1", deterministic=True, dedup=True)
def embed(x: int) -> int:
    return {factor} * x
"""


def test_functions_of_one_name_and_version_in_two_modules_have_values_of_their_own(
    make_table: MakeTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    table = make_table(5)
    for factor in (2, 3):
        (tmp_path / f"times_{factor}.py").write_text(MODULE.format(factor=factor))
        importlib.invalidate_caches()
        table.add_columns({f"y{factor}": importlib.import_module(f"times_{factor}").embed})
        assert table.backfill(f"y{factor}", runner="inline").rows_cached == 0
        assert table.to_arrow().column(f"y{factor}").to_pylist() == [factor * x for x in range(5)]


@pytest.mark.parametrize("source", ["lines", "none"])
def test_functions_of_one_name_and_version_in_a_notebook_have_values_of_their_own(
    make_table: MakeTable, source: str
) -> None:
    """One that was typed at Python's prompt has no source."""
    table = make_table(5)
    for factor in (2, 3):
        as_another_process()
        text, file = MODULE.format(factor=factor), f"<cell {factor}>"
        if source == "lines":
            linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        cell: dict[str, Any] = {"__name__": "__main__", "CLIENT": object()}
        exec(compile(text, file, "exec"), cell)
        function = cell["embed"]
        table.add_columns({f"y{factor}": (function, ["x"])})
        assert table.backfill(f"y{factor}", udf=function, runner="inline").rows_cached == 0
        assert table.to_arrow().column(f"y{factor}").to_pylist() == [factor * x for x in range(5)]
        table.add_columns({f"z{factor}": (function, ["x"])})
        assert table.backfill(f"z{factor}", udf=function, runner="inline").rows_cached == 5


def test_the_key_of_a_notebooks_function_travels_with_it() -> None:
    made = udf(data_type=pa.int64(), version="1", deterministic=True, dedup=True)(lambda x: x)
    assert UdfReference.of(made).open().value_identity == made.value_identity != ""


@udf(data_type=pa.string(), version="1", deterministic=True, dedup=True)
def triple(a: int, b: int, c: int) -> str:
    return f"{a} {b} {c}"


def test_columns_that_map_the_same_inputs_otherwise_have_values_of_their_own(make_table: MakeTable) -> None:
    table = make_table([10, 11, 12, 13])
    for name, inputs in {"first": ["id", "x", "id"], "second": ["id", "x", "x"]}.items():
        table.add_columns({name: (triple, inputs)})
        table.backfill(name, runner="inline")
    for row in table.to_arrow().to_pylist():
        assert row["first"] == f"{row['id']} {row['x']} {row['id']}"
        assert row["second"] == f"{row['id']} {row['x']} {row['x']}"


def test_a_view_and_damaged_files_of_the_cache(make_table: MakeTable, trace: Trace) -> None:
    table = make_table([1, 2, 1, 2, 3], per_fragment=2)
    view = (
        table.query()
        .select({"x": "x", "y": square})
        .create_materialized_view(connect(table.location.database_uri), "v")
    )
    view.refresh(runner="inline")
    assert sorted(trace.rows()) == [1, 2, 3]
    for file in Path(view.location.uri, "_checkpoints", "values").rglob("*.lance"):
        file.write_bytes(b"damaged")
    table.add([{"id": 9, "x": 3}])
    view.refresh(runner="inline")
    assert sorted(trace.rows()) == [1, 2, 3, 3]
    assert sorted(view.to_arrow().column("y").to_pylist()) == [1, 1, 4, 4, 9, 9]


def test_old_values_are_not_used_and_go_with_the_cleanup(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table(4)
    table.add_columns({"y": square, "z": square})
    table.backfill("y", runner="inline")
    now = time.time()
    assert not find_garbage(table.location, "1s", now + 29 * DAY).file_group(FileKind.VALUES).files
    monkeypatch.setattr(
        "airflow_geneva.engine.checkpoint.value_cache.time", SimpleNamespace(time=lambda: now + 31 * DAY)
    )
    assert table.backfill("z", runner="inline").rows_cached == 0
    removed = collect(table.location, find_garbage(table.location, "1s", now + 31 * DAY))
    assert removed.file_group(FileKind.VALUES).count >= 1


def test_the_cache_keeps_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_geneva.engine.checkpoint.value_cache.MOST_BYTES", 2_000)
    writer, reader = (ValueCache(Storage.at(str(tmp_path)), "f", "1", pa.int64(), "m:f") for _ in range(2))
    for start in range(0, 1_000, 100):
        keys = [f"{number:016}".encode() for number in range(start, start + 100)]
        assert writer.write(keys, pa.array(range(start, start + 100))) == 0
    assert writer.write(keys, pa.array(range(900, 1_000))) == 100
    reader.look()
    (newest,) = reader.find([keys[7]])
    assert newest is not None
    assert newest[0][newest[1]].as_py() == 907
    assert reader.find([f"{7:016}".encode()]) == [None]
    assert sum(reader._files.values()) <= 2_000


def test_a_file_of_the_cache_is_read_once_for_all_of_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ValueCache(Storage.at(str(tmp_path)), "f", "1", pa.int64(), "m:f")
    every = [f"{number:016}".encode() for number in range(100)]
    for start in range(0, 100, 10):
        cache.write(every[start : start + 10], pa.array(range(start, start + 10)))
    reads: list[str] = []
    read = CheckpointStore.read
    monkeypatch.setattr(CheckpointStore, "read", lambda self, key, *rest: reads.append(key) or read(self, key, *rest))
    mixed = [every[7 * place % 100] for place in range(100)]
    found = cache.find([*mixed, b"another one here"])
    assert [None if one is None else one[0][one[1]].as_py() for one in found] == [*map(int, mixed), None]
    assert len(reads) == 10
    assert sum(one[0].nbytes for one in {id(one[0]): one for one in found if one}.values()) == 100 * 8
    gone = cache.store.list_keys()[3]
    cache.store.remove([gone])
    assert sum(one is None for one in cache.find(every)) == 10
    assert cache.write(every, pa.array(range(100))) == 90, "what is gone is stored again"


def test_dedup_is_on_for_a_deterministic_function_that_calls_a_service() -> None:
    limit = RateLimit("service", concurrent=1)
    how: list[dict[str, Any]] = [{}, {"dedup": False}, {"limit": None}, {"deterministic": False}]
    made = [udf(data_type=pa.int64(), **{"limit": limit, "deterministic": True, **one})(lambda x: x) for one in how]
    assert [one.dedup for one in made] == [True, False, False, False]


def test_dedup_needs_a_deterministic_function() -> None:
    with pytest.raises(InvalidInput, match="deterministic=True"):
        udf(data_type=pa.int64(), dedup=True)(lambda x: x)
    with pytest.raises(InvalidInput, match="True or False"):
        udf(data_type=pa.int64(), deterministic=1)(lambda x: x)  # type: ignore[call-overload]
    assert '"dedup":true' in square.definition().to_json()
