"""The plan of a whole database is what a run of it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_geneva import Database, connect, udf
from airflow_geneva.database_plan import DatabasePlan
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.view import View
from tests.support.marks import slow_after
from tests.support.tables import MakeTable

COST = 0.25


def adder(name: str, more: int = 1, version: str = "1", columns: list[str] | None = None) -> UDF:
    def add(values: pa.RecordBatch) -> pa.Array:
        whole = pa.array([more] * values.num_rows, pa.int64())
        for column in values.columns:
            whole = pc.add(whole, pc.fill_null(column, 0))
        return whole

    made = udf(data_type=pa.int64(), version=version, name=name, input_columns=columns, cost=COST)
    return made(add)


def rows(data: range) -> pa.Table:
    return pa.table({"id": pa.array(data, pa.int64()), "x": pa.array([value * 7 % 31 for value in data], pa.int64())})


def chain(make_table: MakeTable) -> Database:
    """A table with two columns, one of the other, a view that reads both, and a view of that view."""
    table = make_table(40, per_fragment=10)
    table.add_columns({"a": adder("a", columns=["x"])})
    table.add_columns({"b": adder("b", columns=["a"])})
    db = connect(Path(table.location.uri).parent)
    query = table.query().select(["id", "a", "b"]).where("b >= 0")
    view = query.add_columns({"c": adder("c", columns=["b"])}).create_materialized_view(db, "v")
    view.query().select(["c"]).add_columns({"d": adder("d", columns=["c"])}).create_materialized_view(db, "w")
    return db


def ran(result: BackfillResult) -> int:
    return result.rows_computed + result.rows_failed


def bounds(plan: DatabasePlan) -> dict[str, tuple[int, int, int | None]]:
    return {one.name: (one.rows, one.least, one.most) for one in plan.targets}


def test_a_plan_says_what_runs_now_and_what_becomes_due(make_table: MakeTable) -> None:
    db = chain(make_table)
    before = {name: db.open_table(name).version for name in db.table_names()}
    plan = db.plan()
    assert [one.name for one in plan.targets] == ["docs.a", "docs.b", "v", "w"]
    assert plan["v"].above == (("docs", "a"), ("docs", "b"))
    assert plan["w"].above == (("v",),)
    # Rows are due in both columns, so they run once in each. The filter reads a column that is not there yet.
    assert bounds(plan) == {"docs.a": (40, 40, 40), "docs.b": (40, 40, 40), "v": (0, 0, 40), "w": (0, 0, 40)}
    assert str(plan["v"]) == "v: 0 rows now, at most 40 after docs.a, docs.b, cost 0 to 10"
    assert {name: db.open_table(name).version for name in db.table_names()} == before
    assert db.jobs() == []
    results = plan.run(runner="inline")
    assert {name: ran(result) for name, result in results.items()} == dict.fromkeys(("docs.a", "docs.b", "v", "w"), 40)
    assert bounds(db.plan()) == dict.fromkeys(results, (0, 0, 0))
    assert db.plan().run(runner="inline") == {}


def test_a_plan_says_what_other_code_would_do_and_cannot_be_run(make_table: MakeTable) -> None:
    db = chain(make_table)
    db.plan().run(runner="inline")
    plan = db.plan(what_if={"docs.a": adder("a", 2, "2")})
    assert bounds(plan) == {"docs.a": (40, 40, 40), "docs.b": (0, 0, 40), "v": (0, 0, 40), "w": (0, 0, 40)}
    assert plan["docs.a"].cost == (10.0, 10.0)
    assert "  if docs.a had the given code" in str(plan)
    with pytest.raises(InvalidInput, match=r"if docs\.a had other code"):
        plan.run()
    assert bounds(db.plan(what_if={"v.c": adder("c", 2, "2")})) == {
        "docs.a": (0, 0, 0), "docs.b": (0, 0, 0), "v": (40, 40, 40), "w": (0, 0, 40),
    }  # fmt: skip
    assert bounds(db.plan())["v"] == (0, 0, 0)
    for wrong, said in ({"docs.x": adder("a")}, "is no computed column"), ({"docs.a": 3}, "is not a UDF"):
        with pytest.raises(InvalidInput, match=said):
            db.plan(what_if=wrong)  # type: ignore[arg-type]


def test_what_is_blocked_says_why_and_holds_up_nothing_else(make_table: MakeTable) -> None:
    db = chain(make_table)
    db.plan().run(runner="inline")
    table = db.open_table("docs")
    table.alter_columns({"a": adder("a", 2, "2", ["x"])})
    table.add(rows(range(40, 45)))
    table.add_columns({"other": adder("other", columns=["x"])})
    plan = db.plan()
    assert "on_code_change" in plan["docs.a"].blocked
    # What it would compute from is not there, and paying for NULL helps nobody.
    assert plan["docs.b"].blocked == "docs.a, from which it is computed, is blocked"
    assert plan["w"].blocked == "v, from which it is computed, is blocked"
    assert bounds(plan)["docs.other"] == (45, 45, 45)
    assert "4 blocked" in str(plan)
    assert list(plan.run(runner="inline")) == ["docs.other"]


def test_a_failed_job_holds_up_what_is_computed_from_it_alone(make_table: MakeTable) -> None:
    table = make_table(20, per_fragment=10)

    def breaks(x: int) -> int:
        raise ValueError("no")

    table.add_columns({"a": udf(data_type=pa.int64(), version="1", name="breaks")(breaks)})
    table.add_columns({"b": adder("b", columns=["a"]), "c": adder("c", columns=["x"])})
    db = connect(Path(table.location.uri).parent)
    with pytest.raises(JobFailed, match="2 of 3 targets failed") as failed:
        db.plan().run(runner="inline")
    assert "docs.b: not run, because docs.a failed" in str(failed.value)
    assert bounds(db.plan())["docs.c"] == (0, 0, 0)


def test_functions_that_are_called_once_for_equal_inputs_may_run_on_fewer_rows(make_table: MakeTable) -> None:
    table = make_table(10)
    once = udf(data_type=pa.int64(), version="1", name="once", dedup=True, deterministic=True)(lambda x: x)
    table.add_columns({"y": once})
    plan = connect(Path(table.location.uri).parent).plan()
    assert bounds(plan) == {"docs.y": (10, 0, 10)}
    assert "at least 0 and at most 10 because equal inputs are called once" in str(plan)


def test_a_view_may_be_named_as_a_column(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"y": adder("y", columns=["x"])})
    table.add_columns({"z": adder("z", columns=["y"])})
    db = connect(Path(table.location.uri).parent)
    table.query().select(["x"]).create_materialized_view(db, "docs.y")
    plan = db.plan()
    assert [one.name for one in plan.targets] == ["docs.y", "view docs.y", "docs.z"]
    assert set(plan.run(runner="inline")) == {"docs.y", "view docs.y", "docs.z"}
    assert table.to_arrow()["z"].to_pylist() == [x + 2 for x in range(10)]


def test_a_table_that_cannot_be_read_is_blocked_alone(make_table: MakeTable) -> None:
    table = make_table(10)
    table.add_columns({"y": adder("y", columns=["x"])})
    db = connect(Path(table.location.uri).parent)
    damaged = db.create_table("damaged", rows(range(3)))
    for manifest in Path(damaged.uri, "_versions").iterdir():
        manifest.write_bytes(b"?" * 64)
    foreign = db.create_table("foreign", rows(range(3)))
    foreign.lance.update_field_metadata({"x": {"geneva::udf": "another system's"}})
    table.query().select(["x"]).create_materialized_view(db, "v")
    db.open_table("v").lance.update_schema_metadata({"geneva::view::query": "another system's"})
    plan = db.plan()
    assert {one.name for one in plan.targets if one.blocked} == {"damaged", "foreign.x", "v"}
    assert bounds(plan)["docs.y"] == (10, 10, 10)
    db.create_table("gone", rows(range(3))).add_columns({"y": adder("y", columns=["x"])})
    plan = db.plan()
    db.drop_table("gone")
    with pytest.raises(JobFailed, match=r"1 of 5 targets failed:\n  gone.y: There is no table"):
        plan.run(runner="inline")
    assert table.count_rows("y is not null") == 10


class World:
    """A random database: tables with columns, views, and views of views, and changes of it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.db = connect(folder / str(seed))
        self.made = 0
        self.next_id = 0
        self.code: dict[str, UDF] = {}
        for number in range(self.random.randint(1, 2)):
            self.db.create_table(f"t{number}", self._rows(self.random.randint(20, 60)), max_rows_per_file=10)
        for _ in range(self.random.randint(3, 12)):
            self.random.choice([self._add_column, self._add_column, self._add_view])()

    def _rows(self, count: int) -> pa.Table:
        self.next_id += count
        return rows(range(self.next_id - count, self.next_id))

    def _name(self, kind: str) -> str:
        self.made += 1
        return f"{kind}{self.made}"

    def _tables(self) -> list[str]:
        return [name for name in self.db.table_names() if not isinstance(self.db.open_table(name), View)]

    def _add_column(self) -> None:
        table, name = self.db.open_table(self.random.choice(self._tables())), self._name("c")
        inputs = self.random.sample(table.schema.names, self.random.randint(1, 2))
        function = self.code[f"{table.name}.{name}"] = adder(name, columns=inputs)
        table.add_columns({name: function})

    def _add_view(self) -> None:
        source = self.db.open_table(self.random.choice(self.db.table_names()))
        columns = [name for name in source.schema.names if not name.startswith("__")]
        query = source.query().select(self.random.sample(columns, min(len(columns), 3)))
        if self.random.random() < 0.6:
            query = query.where(f"coalesce({self.random.choice(columns)}, 0) % 3 <> 1")
        if self.random.random() < 0.7:
            name = self._name("c")
            query = query.add_columns({name: adder(name, columns=[self.random.choice(columns)])})
        if self.random.random() < 0.15:
            query = query.limit(15)
        query.create_materialized_view(self.db, self._name("v"))

    def change(self) -> None:
        table = self.db.open_table(self.random.choice(self._tables()))
        low = self.random.randint(0, max(self.next_id - 1, 0))
        changes: list[Callable[[], object]] = [
            lambda: table.add(self._rows(self.random.randint(1, 15))),
            lambda: table.lance.update({"x": "x + 100"}, where=f"id between {low} and {low + 9}"),
            lambda: table.lance.delete(f"id between {low} and {low + 4}"),
            lambda: table.lance.optimize.compact_files(target_rows_per_fragment=20),
            lambda: self._change_code(table.name),
            lambda: self._add_column(),
        ]
        self.random.choice(changes)()

    def _change_code(self, table: str) -> None:
        mine = [name for name in self.code if name.startswith(f"{table}.")]
        if mine:
            column = self.random.choice(mine).partition(".")[2]
            was = self.code[f"{table}.{column}"]
            new = adder(column, self.random.randint(2, 90), str(self.random.random()), list(was.input_columns or ()))
            self.code[f"{table}.{column}"] = new
            self.db.open_table(table).alter_columns({column: new})


@pytest.mark.parametrize("seed", slow_after(4, range(50)))
def test_a_run_of_everything_stays_within_its_plan(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    for at in range(3):
        if at:
            for _ in range(world.random.randint(1, 3)):
                world.change()
        plan = world.db.plan()
        results = plan.run(runner="inline")
        for one in plan.targets:
            done = results.get(one.name)
            assert one.blocked == "" or "on_code_change" in one.blocked or one.blocked.endswith("is blocked")
            if one.blocked:
                assert done is None
                continue
            count = 0 if done is None else ran(done)
            assert one.least <= count, f"{one}: {count} rows ran, at least {one.least}"
            assert one.most is None or count <= one.most, f"{one}: {count} rows ran"
            if done is not None and one.cost is not None:
                paid = COST * done.rows_run
                assert one.cost.low - 1e-9 <= paid <= one.cost.high + 1e-9, f"{one}: {paid} was paid"
