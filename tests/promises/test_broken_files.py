"""Files that can be opened and not be read: their rows are computed again, of a column as of a view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lance.file import LanceFileReader

from airflow_geneva import connect
from airflow_geneva.engine.apply.reader import ReadSize, read_rows
from airflow_geneva.engine.lance_io.fragments import Columns
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.limits.rate_limit import Meter
from airflow_geneva.engine.plan.request import RefreshRequest
from airflow_geneva.engine.plan.shard import FragmentTask
from airflow_geneva.engine.run import view as refreshing
from airflow_geneva.engine.run.column import ColumnTarget
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs, prepare
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.run.units import Unit
from airflow_geneva.engine.run.view import ViewTarget
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import JobFailed, StorageError
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace, label, labelled
from tests.support.invariants import assert_exact
from tests.support.tables import MakeTable

SIZES: dict[str, Any] = {"checkpoint_size": 10, "batch_size": 5}


@dataclass
class Column:
    """Column ``y`` of a table, and a backfill of it taken apart."""

    table: Table

    @staticmethod
    def of(table: Table, **more: Any) -> Column:
        table.add_columns({"y": label})
        return Column(table)

    @property
    def location(self) -> TableLocation:
        return self.table.location

    def plan(self) -> Column:
        self.made = self.table.plan_backfill("y", **SIZES)
        self.saved = record_plan(self.made, self.location)
        return self

    def apply(self) -> None:
        for shard in self.made.shards:
            apply_inline(self.location, self.made.spec, shard, Udfs({self.made.spec.column: label}))

    def checkpoint(self) -> None:
        """Compute all rows, and stage none: what a task leaves that is killed at its end."""
        with prepare(self.location, self.made.spec, Udfs({self.made.spec.column: label}), {}, Meter()) as prepared:
            prepared.run([Unit(task, task.due, False) for task in self.fragments()])

    def fragments(self) -> Iterator[FragmentTask]:
        return (fragment for shard in self.made.shards for fragment in shard.fragments)

    def finish(self) -> Any:
        results = [PlannedJob(self.location, self.saved).commit(shard) for shard in self.made.shards]
        return PlannedJob(self.location, self.saved).finish(results)

    def run(self) -> Any:
        return self.table.backfill("y", runner="inline", **SIZES)

    def values(self) -> dict[int, str]:
        rows = self.table.lance.to_table(columns=["x", "y"]).to_pylist()
        return {row["x"]: row["y"] for row in rows}


@dataclass
class Refreshed:
    """A view of a table, and a refresh of it taken apart."""

    table: Table
    view: View

    @staticmethod
    def of(table: Table, **more: Any) -> Refreshed:
        query = table.query().select({"x": "x"}).add_columns({"y": (label, ["x"])})
        query = query.shuffle(7) if more.get("shuffled") else query
        return Refreshed(table, query.create_materialized_view(connect(table.location.database_uri), "v"))

    @property
    def location(self) -> TableLocation:
        return self.view.location

    def plan(self) -> Refreshed:
        request = RefreshRequest(sizing=SIZES)
        self.made = refreshing.plan(self.location, self.view.view_definition, self.view.source().location, request)
        self.saved = record_plan(self.made, self.location)
        return self

    def apply(self) -> None:
        definition = self.view.view_definition
        for shard in self.made.shards:
            apply_inline(self.location, self.made.spec, shard, Udfs(refreshing.load_udfs(definition)))

    def checkpoint(self) -> None:
        spec = self.made.spec
        definition = self.view.view_definition
        with prepare(self.location, spec, Udfs(refreshing.load_udfs(definition)), {}, Meter()) as task:
            task.run([Unit(fragment, fragment.due, False) for fragment in self.fragments()])

    def fragments(self) -> Iterator[FragmentTask]:
        return (fragment for shard in self.made.shards for fragment in shard.fragments)

    def finish(self) -> Any:
        results = [PlannedJob(self.location, self.saved).commit(shard) for shard in self.made.shards]
        return PlannedJob(self.location, self.saved).finish(results)

    def run(self) -> Any:
        return self.view.refresh(runner="inline", **SIZES)

    def values(self) -> dict[int, str]:
        return {row["x"]: row["y"] for row in self.view.to_arrow().to_pylist()}


Target = Column | Refreshed
TARGETS = {"column": Column.of, "view": Refreshed.of}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, make_table: MakeTable, trace: Trace) -> Target:
    made = TARGETS[request.param](make_table(100))
    return made.plan()


def break_values(file: Path, columns: list[str], read: Callable[[LanceFileReader], object]) -> None:
    """Overwrite a part of a file so that it opens, the named columns can be read, and the values cannot."""
    whole = file.read_bytes()
    for at in range(0, len(whole), 8):
        file.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
        try:
            with engine_errors():
                if columns:
                    LanceFileReader(str(file), columns=columns).read_all().to_table()
                reader = LanceFileReader(str(file))
                reader.num_rows()
        except EngineError:
            continue
        try:
            with engine_errors():
                read(reader)
        except EngineError:
            return
    raise AssertionError(f"{file} withstands")


def break_range(target: Target) -> None:
    (first, *_) = sorted(Path(target.location.checkpoints.root).rglob("range-10-20.lance"))
    break_values(first, ["_offset", "_rowid"], lambda reader: reader.read_all().to_table())


def staged_files(target: Target) -> list[Path]:
    data = Path(target.location.uri, "data")
    bench = (ColumnTarget if isinstance(target, Column) else ViewTarget).at(target.location, target.made.spec)
    staged = [bench.index(fragment).staged_at(fragment.place) for fragment in target.fragments()]
    return [data / found.file for found in staged if found is not None]


def break_staged(target: Target) -> None:
    break_values(staged_files(target)[0], [], lambda reader: reader.take_rows(list(range(20))).to_table())


def assert_complete(target: Target) -> None:
    inputs = target.table.lance.to_table(columns=["x"])["x"].to_pylist()
    assert target.values() == {x: labelled(x) for x in inputs}


def test_rows_of_a_checkpoint_that_cannot_be_read_run_again(target: Target, trace: Trace) -> None:
    target.checkpoint()
    break_range(target)
    trace.clear()
    result = target.run()
    assert (result.state, result.rows_computed, result.rows_reused) == ("DONE", 10, 90)
    assert len(trace) == 10
    assert_complete(target)


def test_a_commit_leaves_the_rows_of_a_checkpoint_that_cannot_be_read(target: Target, trace: Trace) -> None:
    target.checkpoint()
    break_range(target)
    result = target.finish()
    assert result.state == "PARTIAL"
    assert result.rows_left == (25 if isinstance(target, Column) else 100)
    trace.clear()
    assert target.run().state == "DONE"
    assert len(trace) == 10
    assert_complete(target)


def test_rows_of_a_staged_file_that_cannot_be_read_run_again(target: Target, trace: Trace) -> None:
    target.apply()
    if isinstance(target, Column):
        target.table.lance.optimize.compact_files()
    else:
        target.table.lance.delete("id = 3")
    break_staged(target)
    trace.clear()
    assert target.run().state == "DONE"
    assert len(trace) == 5  # the others are in checkpoints of 10 rows
    assert_complete(target)


def test_a_swap_in_another_order_puts_together_again_what_cannot_be_read(make_table: MakeTable, trace: Trace) -> None:
    target = Refreshed.of(make_table(100), shuffled=True).plan()
    target.checkpoint()
    target.apply()
    break_staged(target)
    assert target.finish().state == "DONE"
    assert len(trace) == 100
    assert_complete(target)


def test_a_swap_in_another_order_leaves_what_cannot_be_read_and_the_next_one_has_it(
    make_table: MakeTable, trace: Trace
) -> None:
    target = Refreshed.of(make_table(100), shuffled=True).plan()
    target.apply()
    break_staged(target)
    result = target.finish()
    assert (result.state, result.rows_left) == ("PARTIAL", 100)
    assert target.run().state == "DONE"
    assert len(trace) == 105
    assert_complete(target)


def test_a_fragment_that_cannot_be_read_is_named_and_the_others_are_computed(target: Target, trace: Trace) -> None:
    """One damaged file of a table left all other rows without a value in every run, and was not named."""
    source = target.table.lance
    fragment = source.get_fragments()[1]
    file = Path(source.uri, "data", fragment.metadata.files[0].path)
    whole = file.read_bytes()
    break_values(file, ["id"], lambda reader: reader.read_all().to_table())
    others = [x for x in range(100) if x // 25 != 1]
    for calls in (others, list[int]()):
        trace.clear()
        with pytest.raises(JobFailed, match=r"Fragment 1 of table 'docs' cannot be read: column 'x' of ") as failed:
            target.run()
        assert str(file) in str(failed.value)
        assert_exact(trace, calls)
        job = connect(target.table.location.database_uri).jobs()[0]
        assert (job.state, "Fragment 1 of table 'docs' cannot be read" in str(job.error)) == ("FAILED", True)
        if isinstance(target, Column):
            now = target.table.lance
            there = [one for one in now.get_fragments() if one.fragment_id != 1]
            rows = now.scanner(columns=["x", "y"], fragments=there).to_table().to_pylist()
            assert {row["x"]: row["y"] for row in rows} == {x: labelled(x) for x in others}
    if isinstance(target, Column):
        with pytest.raises(JobFailed, match=r"Fragment 1 of table 'docs' cannot be read: column 'x' of "):
            target.table.backfill("y", where="x % 2 = 0", runner="inline")
    file.write_bytes(whole)
    trace.clear()
    assert target.run().state == "DONE"
    assert_exact(trace, range(25, 50))
    assert_complete(target)


def test_a_fragment_with_fewer_rows_than_its_metadata_says_is_an_error_and_no_endless_loop(
    make_table: MakeTable,
) -> None:
    dataset = make_table(10, per_fragment=10).lance
    files = read_manifest(dataset, Columns((), (), (-1,)))[0]
    reading = read_rows(dataset, files, Ranges.of(0, 20), (0, 20), ["x"], None, ReadSize.of(dataset, ["x"], 1 << 20))
    with pytest.raises(StorageError, match="holds 10 live rows at offsets 0 to 20, but its metadata says 20"):
        list(reading)
