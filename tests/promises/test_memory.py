"""Memory follows the budget of a task slot, whatever the fragments' and the values' sizes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lance.file import LanceFileReader
from lance.fragment import LanceFragment

from airflow_geneva import Table, connect, udf
from airflow_geneva.engine.apply import applier as compute
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.lance_io.blobs import as_blobs
from airflow_geneva.engine.lance_io.data_file import DataFileWriter, LanceFile
from airflow_geneva.engine.lance_io.task_memory import batch_bytes, checkpoint_bytes
from airflow_geneva.errors import JobFailed

# Below some millions of rows the buffers of checkpoints and reads are not full yet.
SMALL, LARGE = 4_000_000, 12_000_000
MARGIN_MB = 160

# A writer of its own, so that the measured process starts with nothing but an open table.
MAKE = """
import sys
import numpy as np
import pyarrow as pa
from airflow_geneva import connect
rows = int(sys.argv[2])
step = 1_000_000
def batches():
    for at in range(0, rows, step):
        x = np.arange(at, at + step)
        yield pa.record_batch({"id": x, "x": x})
schema = pa.schema({"id": pa.int64(), "x": pa.int64()})
import lance
reader = pa.RecordBatchReader.from_batches(schema, batches())
lance.write_dataset(reader, sys.argv[1] + "/docs.lance", enable_stable_row_ids=True, max_rows_per_file=1 << 30,
                    max_rows_per_group=1 << 20)
assert len(lance.dataset(sys.argv[1] + "/docs.lance").get_fragments()) == 1
if sys.argv[3] == "deleted":
    lance.dataset(sys.argv[1] + "/docs.lance").delete("id % 1000 = 3")
"""

MEASURE = """
import json
import resource
import sys
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from airflow_geneva import connect, udf

@udf(data_type=pa.list_(pa.float32(), 8), version="1")
def widen(x: pa.Int64Array) -> pa.Array:
    flat = np.repeat(x.to_numpy().astype(np.float32), 8)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), 8)

table = connect(sys.argv[1]).open_table("docs")
table.add_columns({"y": widen})
where = json.loads(sys.argv[2])
result = table.backfill("y", udf=widen, runner="inline", where=where, checkpoint_interval=0.5)
assert result.rows_left == 0
print(result.rows_computed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def run(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "deleted rows and a filter"])
def test_peak_memory_does_not_grow_with_the_fragment(tmp_path: Path, filtered: bool) -> None:
    where = "id % 1000 < 900" if filtered else None
    peaks = []
    for rows in (SMALL, LARGE):
        folder = tmp_path / str(rows)
        folder.mkdir()
        run(MAKE, str(folder), str(rows), "deleted" if filtered else "none")
        computed, peak = run(MEASURE, str(folder), json.dumps(where)).split()
        assert int(computed) == rows * (899 if filtered else 1_000) // 1_000
        peaks.append(int(peak))
    assert peaks[1] - peaks[0] < MARGIN_MB, f"{peaks[0]} MB for {SMALL:,} rows, {peaks[1]} MB for {LARGE:,}"


GROUP = """
import resource
import sys
from collections.abc import Iterator
import numpy as np
import pyarrow as pa
from airflow_geneva import connect, udf

@udf(data_type=pa.int64(), version="1")
def ordered(batches: Iterator[pa.RecordBatch]) -> int:
    last, count = -1, 0
    for batch in batches:
        x = batch["x"].to_numpy()
        assert x[0] >= last and (x[1:] >= x[:-1]).all()
        last, count = x[-1], count + len(x)
    return count

rows = int(sys.argv[2])
draw = np.random.default_rng(1)
def some():
    return pa.table({"k": np.zeros(500_000), "x": draw.integers(0, 1 << 40, 500_000)})
table = connect(sys.argv[1]).create_table("docs", some())
for _ in range(rows // 500_000 - 1):
    table.add(some())
view = table.query().group_by("k").agg({"n": ordered}, order_by=["x"]).create_materialized_view(name="view")
view.refresh(runner="inline")
print(view.to_arrow()["n"][0].as_py(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_a_group_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    peaks = []
    for rows in (500_000, 5_000_000):
        counted, peak = run(GROUP, str(tmp_path / str(rows)), str(rows)).split()
        assert int(counted) == rows
        peaks.append(int(peak))
    assert peaks[1] - peaks[0] < 128, f"{peaks} MB"


BUDGET = 1 << 20
ROWS, WIDTH = 600, 10_000


@udf(data_type=pa.string(), version="1")
def upper(text: str) -> str:
    return text.upper()


@udf(data_type=pa.binary(), version="1")
def picture(id: pa.Int64Array) -> pa.Array:
    return pa.array([bytes([number % 251]) * WIDTH for number in id.to_pylist()], pa.binary())


@pytest.fixture
def texts(tmp_path: Path) -> Table:
    """Two fragments of repetitive texts, whose files are a hundredth of what they hold."""
    text = [(f"row {number} again and " * WIDTH)[:WIDTH] for number in range(ROWS)]
    data = pa.table({"id": pa.array(range(ROWS)), "text": text})
    return connect(tmp_path).create_table("docs", data, max_rows_per_file=ROWS // 2)


@dataclass
class Sizes:
    """Bytes of what was held at a time."""

    read: list[int] = field(default_factory=list)
    put: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def clear(self) -> None:
        for found in (self.read, self.put, self.kept):
            found.clear()

    def assert_within(self, budget: int) -> None:
        slack = 20 * ROWS  # row ids, offsets and validity
        assert max(self.read) <= batch_bytes(budget) + slack
        assert max(self.put) <= batch_bytes(budget) + slack
        assert max(self.kept, default=0) <= checkpoint_bytes(budget) + slack


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Notes what is read, what goes into data files, and what goes into checkpoints."""
    seen = Sizes()

    def noting(found: list[int], owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            found.append(arguments[position].nbytes)
            return original(*arguments)

        monkeypatch.setattr(owner, name, noted)

    noting(seen.read, compute.Applier, "_begin_steps", 2)
    noting(seen.put, DataFileWriter, "write", 1)
    noting(seen.kept, CheckpointStore, "__setitem__", 2)
    monkeypatch.setattr(compute.RowBatch, "nbytes", property(lambda rows: rows.columns.nbytes), raising=False)
    return seen


def test_a_backfill_holds_no_more_than_its_budget(texts: Table, sizes: Sizes) -> None:
    texts.add_columns({"y": upper, "z": picture})
    assert texts.backfill("y", udf=upper, runner="inline", task_memory_bytes=BUDGET).rows_computed == ROWS
    assert texts.backfill("z", udf=picture, runner="inline", task_memory_bytes=BUDGET).rows_computed == ROWS
    sizes.assert_within(BUDGET)
    assert len([size for size in sizes.kept if size > WIDTH]) >= 2 * ROWS * WIDTH // BUDGET
    rows = texts.to_arrow()
    assert rows["y"].to_pylist() == [text.upper() for text in rows["text"].to_pylist()]
    assert rows["z"].to_pylist() == [bytes([number % 251]) * WIDTH for number in range(ROWS)]


@pytest.mark.parametrize("first", ["id % 2 = 0", "id < 250"], ids=["every other row", "a part of them"])
def test_a_fragment_is_put_together_within_the_budget(texts: Table, sizes: Sizes, first: str) -> None:
    texts.add_columns({"y": upper})
    for where in (first, None):
        result = texts.backfill("y", udf=upper, where=where, runner="inline", task_memory_bytes=BUDGET)
        assert result.rows_left == 0
    sizes.assert_within(BUDGET)
    rows = texts.to_arrow()
    assert rows["y"].to_pylist() == [text.upper() for text in rows["text"].to_pylist()]


def test_a_resumed_backfill_is_put_together_within_the_budget(texts: Table, sizes: Sizes) -> None:
    texts.add_columns({"y": upper})

    @udf(data_type=pa.string(), version="1", name="upper")
    def breaks(text: str) -> str:
        if text.startswith("row 290 "):
            raise ValueError("no")
        return text.upper()

    with pytest.raises(JobFailed):
        texts.backfill("y", udf=breaks, runner="inline", task_memory_bytes=BUDGET)
    assert texts.backfill("y", udf=upper, runner="inline", task_memory_bytes=BUDGET).rows_computed == ROWS - 290
    sizes.assert_within(BUDGET)
    rows = texts.to_arrow()
    assert rows["y"].to_pylist() == [text.upper() for text in rows["text"].to_pylist()]


@pytest.mark.parametrize("cut", ["as it is", "shuffled", "cut"])
def test_a_view_is_written_within_the_budget(texts: Table, sizes: Sizes, cut: str) -> None:
    query = texts.query().select(["id", "text"])
    view = (query.shuffle(seed=1) if cut == "shuffled" else query).create_materialized_view(name="v")
    sizes.put.clear()
    most = 170 if cut == "cut" else None
    assert view.refresh(runner="inline", task_memory_bytes=BUDGET, max_rows_per_fragment=most).rows_computed == ROWS
    sizes.assert_within(BUDGET)
    assert sorted(view.to_arrow().to_pylist(), key=itemgetter("id")) == texts.to_arrow().to_pylist()


def test_one_row_may_be_larger_than_the_budget(tmp_path: Path) -> None:
    data = [{"id": number, "text": "x" * (3 * BUDGET if number % 4 == 1 else 5)} for number in range(20)]
    table = connect(tmp_path).create_table("docs", pa.Table.from_pylist(data))
    table.add_columns({"y": upper})
    for where in ("id % 3 = 0", None):
        table.backfill("y", udf=upper, where=where, runner="inline", task_memory_bytes=BUDGET)
    rows = table.to_arrow()
    assert rows["y"].to_pylist() == [text.upper() for text in rows["text"].to_pylist()]
    view = table.query().select(["id", "y"]).shuffle(seed=1).create_materialized_view(name="v")
    assert view.refresh(runner="inline", task_memory_bytes=BUDGET).rows_computed == 20
    assert sorted(view.to_arrow()["id"].to_pylist()) == list(range(20))


def test_blobs_are_written_while_they_come(tmp_path: Path) -> None:
    data = pa.table({"p": as_blobs(pa.array([b"x"])), "id": [1]})
    table = connect(tmp_path).create_table("docs", data)
    writer = DataFileWriter(table.lance, pa.schema([table.lance.schema.field("p")]))
    before, held = pa.total_allocated_bytes(), []
    for number in range(40):
        writer.write(pa.record_batch([as_blobs(pa.array([bytes([number]) * BUDGET]))], schema=writer.schema))
        held.append(pa.total_allocated_bytes() - before)
    assert max(held) < 10 * BUDGET
    name = writer.finish()
    assert LanceFile.of_table(table.lance, name).count_rows() == 40


def test_a_data_file_of_blobs_that_is_given_up_ends_its_thread(tmp_path: Path) -> None:
    data = pa.table({"p": as_blobs(pa.array([b"x"])), "id": [1]})
    table = connect(tmp_path).create_table("docs", data)
    writer = DataFileWriter(table.lance, pa.schema([table.lance.schema.field("p")]))
    writer.write(pa.record_batch([as_blobs(pa.array([b"half"]))], schema=writer.schema))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "geneva-blobs"]
    del writer
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


VECTOR = pa.list_(pa.float32(), 1_536)


@udf(data_type=VECTOR, version="1")
def vector(id: pa.Int64Array) -> pa.Array:
    return pa.array([[float(number)] * 1_536 for number in id.to_pylist()], VECTOR)


def test_rows_without_a_value_are_written_within_the_budget_too(tmp_path: Path, sizes: Sizes) -> None:
    table = connect(tmp_path).create_table("docs", pa.table({"id": pa.array(range(2_000))}))
    table.add_columns({"y": vector})
    result = table.backfill("y", udf=vector, where="id in (700, 1990)", runner="inline", task_memory_bytes=BUDGET)
    assert result.rows_computed == 2
    sizes.assert_within(BUDGET)
    assert [row["id"] for row in table.to_arrow().to_pylist() if row["y"]] == [700, 1_990]


SHORT, LONG, LONG_WIDTH = 1_000, 60, 100_000


@udf(data_type=pa.string(), version="1", name="same")
def same(text: pa.StringArray) -> pa.Array:
    return text


@pytest.fixture
def jump(tmp_path: Path) -> Table:
    """One fragment of rows without a text, and then of long ones, which are as short in its file."""
    text = [None] * SHORT + [f"{number:08}" * (LONG_WIDTH // 8) for number in range(LONG)]
    return connect(tmp_path).create_table("docs", pa.table({"id": pa.array(range(SHORT + LONG)), "text": text}))


@pytest.mark.parametrize("way", ["streamed", "resumed", "every other row", "the second half", "view", "shuffled"])
def test_rows_that_are_suddenly_wide_are_held_within_the_budget(jump: Table, sizes: Sizes, way: str) -> None:
    settings: Any = {"runner": "inline", "task_memory_bytes": BUDGET}
    if way in ("view", "shuffled"):
        query = jump.query().select(["id", "text"])
        view = (query.shuffle(seed=1) if way == "shuffled" else query).create_materialized_view(name="v")
        sizes.clear()
        view.refresh(**settings)
        rows = view.to_arrow().sort_by("id")
    else:
        jump.add_columns({"text2": (same, ["text"])})
        sizes.clear()
        if way == "resumed":

            @udf(data_type=pa.string(), version="1", name="same")
            def breaks(text: pa.StringArray) -> pa.Array:
                if f"{LONG // 2:08}" * (LONG_WIDTH // 8) in text.to_pylist():
                    raise ValueError("no")
                return text

            with pytest.raises(JobFailed):
                jump.backfill("text2", udf=breaks, **settings)
        if way in ("every other row", "the second half"):
            where = "id % 2 = 0" if way == "every other row" else f"id >= {SHORT}"
            jump.backfill("text2", udf=same, where=where, **settings)
        jump.backfill("text2", udf=same, **settings)
        rows = jump.to_arrow()
        assert rows["text2"] == rows["text"]
    assert rows["text"].to_pylist() == jump.to_arrow()["text"].to_pylist()
    row = LONG_WIDTH + 20 * SHORT
    assert max(sizes.read) <= batch_bytes(BUDGET) + row
    assert max(sizes.put) <= 2 * batch_bytes(BUDGET) + row
    assert max(sizes.kept, default=0) <= checkpoint_bytes(BUDGET) + row


@pytest.mark.slow
def test_rows_that_pylance_cannot_decode_at_once_are_read_in_smaller_parts(
    texts: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []

    def refuses(owner: Any, name: str, count: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def refusing(*arguments: Any, **more: Any) -> Any:
            if count(*arguments, **more) > 3:
                failed.append(name)
                raise OSError("Invalid argument error: Offset overflow error: 2147490000")
            return original(*arguments, **more)

        monkeypatch.setattr(owner, name, refusing)

    texts.add_columns({"y": upper})
    refuses(LanceFragment, "scanner", lambda fragment, batch_size=0, **more: batch_size)
    refuses(LanceFileReader, "read_range", lambda reader, start, count, **more: count)
    for where in ("id % 2 = 0", "id < 200", None):
        texts.backfill("y", udf=upper, where=where, runner="inline")
    assert set(failed) == {"scanner", "read_range"}
    rows = texts.to_arrow()
    assert rows["y"].to_pylist() == [text.upper() for text in rows["text"].to_pylist()]
