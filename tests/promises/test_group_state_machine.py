"""Random histories of a source and a view of its groups, checked after every refresh against plain Python."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from airflow_geneva import connect
from airflow_geneva.engine import cleanup
from airflow_geneva.engine.commit import group_table
from airflow_geneva.engine.views import group_keys
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace
from tests.support.histories import run_histories
from tests.udfs_for_tests import folded, group_histories as udfs

SOAK = os.environ.get("GENEVA_SOAK") == "1"
KEYS = [0.0, -0.0, 0.5, 1.0, math.nan, None]
PICK = st.integers(0, 1 << 30)

Row = dict[str, Any]
Key = tuple[Any, ...]
WHERES: dict[str | None, Callable[[Row], bool]] = {
    None: lambda row: True,
    "x % 3 != 0": lambda row: row["x"] is not None and row["x"] % 3 != 0,
    "seen": lambda row: row["seen"],
}
ORDERS: dict[tuple[str, ...], Callable[[Row], Any]] = {
    (): lambda row: row["_rowid"],
    ("at",): lambda row: (row["at"] is None, row["at"], row["_rowid"]),
    ("at desc",): lambda row: (row["at"] is None, -(row["at"] or 0), row["_rowid"]),
}


def key_of(row: Row) -> Key:
    """The key of a row, equal for equal keys."""
    return (None if row["k"] is None else "NaN" if math.isnan(row["k"]) else abs(row["k"]), row["t"])


def mark(key: Key) -> int:
    """What the functions leave in the trace."""
    return udfs.number_of(math.nan if key[0] == "NaN" else key[0], key[1])


@dataclass(frozen=True)
class Asked:
    """A query, for the product and for the judge."""

    where: str | None
    order: tuple[str, ...]
    refusing: bool
    exploded: bool
    folded: str | None

    def make(self, table: Table) -> View:
        query = table.query() if self.where is None else table.query().where(self.where)
        columns: dict[Any, Any] = {"n": "count(*)", "total": "sum(x)", "last": "last(x)"}
        columns |= {"told": (udfs.told, ["k", "t", "id", "x"]), "largest": (udfs.largest, ["x"])}
        if self.refusing:
            columns["e"] = (udfs.refusing, ["id", "x"])
        if self.folded is not None:
            columns["bag"] = (getattr(folded, self.folded), ["id", "x"])
        if self.exploded:
            columns["each"] = (udfs.each, ["id"])
        query = query.group_by("k", "t").agg(columns, order_by=self.order)
        return (query.explode("each") if self.exploded else query).create_materialized_view(name="v")

    def groups(self, rows: list[Row]) -> dict[Key, list[Row]]:
        found: dict[Key, list[Row]] = {}
        for row in filter(WHERES[self.where], rows):
            found.setdefault(key_of(row), []).append(row)
        return {key: sorted(rows, key=ORDERS[self.order]) for key, rows in found.items()}

    def read(self, row: Row) -> tuple[Any, ...]:
        at, seen = row["at"] if self.order else None, row["seen"] if self.where == "seen" else None
        return (row["_rowid"], row["id"], row["x"], at, seen)

    def values(self, key: Key, rows: list[Row], code: int) -> list[tuple[Any, ...]]:
        """What the view shows for a group."""
        xs, ids = [row["x"] for row in rows], [row["id"] for row in rows]
        known = [x for x in xs if x is not None]
        shown = (key, len(rows), sum(known) if known else None, xs[-1], udfs.told_value(code, ids, xs))
        shown += (max(known, default=None),)
        shown += ((None if udfs.is_bad(xs) else len(ids)),) if self.refusing else ()
        shown += (folded.bag_value(ids, sum(known)),) if self.folded else ()
        return [(*shown, id) for id in sorted(ids)] if self.exploded else [shown]


class GroupHistories(RuleBasedStateMachine):
    """Whatever happens, the view equals its query, and functions are called for the touched groups only."""

    RUNNER = "inline"
    table: Table
    view: View

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory(prefix="geneva-groups-")
        self.trace = Trace(Path(self.scratch.name) / "trace")
        self.added = Trace(Path(f"{self.trace.path}{folded.READ}"))
        os.environ[TRACE] = str(self.trace.path)
        self.next_id, self.code, self.target = 0, 1, 0
        self.mixed = self.reused = self.loose = False
        # What each group of the view was computed from; None if it is not known.
        self.seen: dict[Key, list[tuple[Any, ...]]] | None = {}
        self.views: dict[int, dict[Key, list[tuple[Any, ...]]] | None] = {}
        self.marks: list[int] = []
        self.before = group_table._MOST_FRAGMENTS, group_table._INDEXED_ROWS, udfs.told
        group_table._MOST_FRAGMENTS, group_table._INDEXED_ROWS = 3, 12

    def teardown(self) -> None:
        os.environ.pop(TRACE, None)
        group_table._MOST_FRAGMENTS, group_table._INDEXED_ROWS, udfs.told = self.before
        self.scratch.cleanup()

    def new_rows(self, number: int, count: int) -> pa.Table:
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        data = {
            "id": pa.array(ids, pa.int64()),
            "k": pa.array([KEYS[(number + at) % len(KEYS)] for at in ids], pa.float64()),
            "t": pa.array([udfs.TEXTS[(number // 7 + at) % 4] for at in ids], pa.string()),
            "x": pa.array([None if (number + at) % 11 == 0 else (number + 5 * at) % 30 for at in ids], pa.int64()),
            "at": pa.array([None if at % 5 == 4 else (number * 3 + at) % 6 for at in ids], pa.int64()),
            "seen": pa.array([(number + at) % 4 > 0 for at in ids], pa.bool_()),
            "other": pa.array([0] * count, pa.int64()),
        }
        return pa.table(data)

    def pick(self, number: int, most: int = 4) -> list[int]:
        rows = sorted(self.table.lance.to_table(columns=["id"])["id"].to_pylist())
        return sorted({rows[(number + step * 7) % len(rows)] for step in range(1 + number % most)}) if rows else []

    def where(self, number: int) -> str:
        return f"id IN ({', '.join(map(str, self.pick(number) or [-1]))})"

    @initialize(
        number=PICK,
        count=st.integers(0, 24),
        per_fragment=st.sampled_from([4, 30]),
        where=st.sampled_from(list(WHERES)),
        order=st.sampled_from(list(ORDERS)),
        refusing=st.sampled_from([False, False, True]),
        exploded=st.sampled_from([False, False, True]),
        folded=st.sampled_from([None, "bag", "losing_bag"]),
    )
    def make(
        self,
        number: int,
        count: int,
        per_fragment: int,
        where: str | None,
        order: tuple[str, ...],
        refusing: bool,
        exploded: bool,
        folded: str | None,
    ) -> None:
        db = connect(Path(self.scratch.name) / "db")
        self.table = db.create_table("rows", self.new_rows(number, count), max_rows_per_file=per_fragment)
        self.asked = Asked(where, order, refusing, exploded, folded)
        self.view = self.asked.make(self.grouped())
        self.marks.append(self.table.version)
        self.views[self.view.version] = self.seen

    def grouped(self) -> Table:
        return self.table

    def _append(self, number: int) -> None:
        self.table.add(self.new_rows(number, 1 + number % 6))

    def _update(self, number: int) -> None:
        self.table.lance.update({"x": str(number % 30)}, where=self.where(number))

    def _update_a_key(self, number: int) -> None:
        column, value = ("k", "1.0") if number % 2 else ("t", "'b'")
        self.table.lance.update({column: value}, where=self.where(number))

    def _update_the_order(self, number: int) -> None:
        self.table.lance.update({"at": str(number % 6)}, where=self.where(number))

    def _update_the_filter(self, number: int) -> None:
        self.table.lance.update({"seen": "NOT seen"}, where=self.where(number))

    def _touch(self, number: int) -> None:
        self.table.lance.update({"other": str(number)}, where=self.where(number))

    def _upsert(self, number: int) -> None:
        fresh, ids = self.new_rows(number, 2), self.pick(number, 2)
        changed = self.new_rows(number + 1, len(ids))
        self.next_id -= len(ids)
        changed = changed.set_column(0, "id", pa.array(ids, pa.int64()))
        merge = self.table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.concat_tables([fresh, changed]))

    def _delete(self, number: int) -> None:
        self.table.lance.delete(self.where(number))

    def _delete_a_group(self, number: int) -> None:
        rows = self.table.lance.to_table(columns=["id", "k", "t"]).to_pylist()
        keys = sorted({key_of(row) for row in rows}, key=str)
        if keys:
            gone = [row["id"] for row in rows if key_of(row) == keys[number % len(keys)]]
            self.table.lance.delete(f"id IN ({', '.join(map(str, gone))})")

    def _compact(self, number: int) -> None:
        self.table.lance.optimize.compact_files(target_rows_per_fragment=[6, 12, 1_000][number % 3])

    def _restore(self, number: int) -> None:
        self.table.location.open(self.marks[number % len(self.marks)]).restore()

    def _mark(self, number: int) -> None:
        self.marks.append(self.table.version)

    def _compact_the_view(self, number: int) -> None:
        self.view.lance.optimize.compact_files(target_rows_per_fragment=[6, 1_000][number % 2])

    def _restore_the_view(self, number: int) -> None:
        version = sorted(self.views)[number % len(self.views)]
        self.view.location.open(version).restore()
        self.seen = self.views[version]
        self.mixed = self.mixed or self.code > 1
        # Values that the view had are in checkpoints. Groups that were touched since are due, whatever they hold now.
        self.reused = self.loose = True

    def _clean_up(self, number: int) -> None:
        cleanup.clean_up(self.view.location, "1s", dry_run=False)

    SOURCE = (
        "append", "append", "update", "update_a_key", "update_the_order", "update_the_filter", "touch", "upsert",
        "delete", "delete_a_group", "compact", "restore", "mark",
    )  # fmt: skip
    VIEW = ("compact_the_view", "restore_the_view", "clean_up")

    @rule(name=st.sampled_from(SOURCE), number=PICK)
    def something_happens_to_the_source(self, name: str, number: int) -> None:
        getattr(self, f"_{name}")(number)

    @rule(name=st.sampled_from(SOURCE), number=PICK)
    def something_else_happens_to_the_source(self, name: str, number: int) -> None:
        getattr(self, f"_{name}")(number)

    @rule(name=st.sampled_from(VIEW), number=PICK)
    def something_happens_to_the_view(self, name: str, number: int) -> None:
        getattr(self, f"_{name}")(number)
        self.views[self.view.version] = self.seen

    def rows(self, version: int | None) -> list[Row]:
        found: list[Row] = self.table.location.open(version).to_table(with_row_id=True).to_pylist()
        return found

    def check(self, groups: dict[Key, list[Row]]) -> None:
        names = ["n", "total", "last", "told", "largest"]
        names += (
            ["e"] * self.asked.refusing + ["bag"] * (self.asked.folded is not None) + ["each"] * self.asked.exploded
        )
        shown = self.view.to_arrow().to_pylist()
        now = Counter((key_of(row), *(row[name] for name in names)) for row in shown)
        right = Counter(one for key, rows in groups.items() for one in self.asked.values(key, rows, self.code))
        if self.mixed:
            now, right = (Counter((*row[:4], *row[5:]) for row in found.elements()) for found in (now, right))
        now, right = (Counter(map(self.compared, found.elements())) for found in (now, right))
        assert now == right, f"extra {list(now - right)[:4]}, missing {list(right - now)[:4]}"
        assert self.view.lance.count_rows() == sum(right.values())

    def row_ids(self) -> dict[Key, int]:
        """The row ids of the view, by the keys of the groups; a group with several rows gets new ones."""
        if self.asked.exploded:
            return {}
        found = self.view.lance.to_table(columns=["k", "t"], filter="__is_set", with_row_id=True).to_pylist()
        return {key_of(row): row["_rowid"] for row in found}

    def compared(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        return row

    def refresh(self, exact: bool = True, **options: Any) -> Any:
        version = options.get("src_version") or self.table.version
        groups = self.asked.groups(self.rows(version))
        # Of an earlier version, rows that were moved since count as changed.
        exact, restored = exact and version >= self.target and not self.loose, self.loose
        self.target, self.loose = version, False
        reads = {key: [self.asked.read(row) for row in rows] for key, rows in groups.items()}
        touched = {key for key, rows in reads.items() if self.seen is None or self.seen.get(key) != rows}
        lost = self.seen is None or bool(self.seen.keys() - reads.keys())
        failed = {key for key, rows in groups.items() if self.asked.refusing and udfs.is_bad([r["x"] for r in rows])}
        planned = self.view.plan_refresh(**options)
        assert planned.rows_total == len(groups)
        ids, may = self.row_ids(), self.rows_to_add(groups, reads, touched)
        self.trace.clear()
        self.added.clear()
        result = self.view.refresh(runner=self.RUNNER, **options)
        assert result.state == "DONE"
        self.check(groups)
        # A view that was restored may show a group that went and came since, and has another row id by now.
        for key, id in () if restored else self.row_ids().items():
            assert ids[key] == id if key in ids else id not in ids.values(), "row ids stay as long as the key does"
        run = self.trace.counts()
        assert max(run.values(), default=1) == 1, f"called twice: {run}"
        if exact:
            assert set(run) <= {mark(key) for key in touched}, f"touched {touched}"
            # The Python workers of Spark have begun before this history, so they write no trace of it.
            assert self.reused or self.RUNNER == "spark" or len(run) == len(touched), f"touched {touched}"
            assert self.added.counts() <= may, f"{self.added.counts() - may} were added again"
            assert planned.rows_pending - len(failed - touched) <= len(touched) <= planned.rows_pending
            if not failed:
                assert planned.rows_pending == result.rows_computed + result.rows_reused == len(touched)
                functions = sum(column.udf is not None for column in self.view.view_definition.columns)
                assert self.reused or result.rows_run == functions * len(touched)
        if exact and not (touched or lost or failed or self.mixed):
            assert result.commits == ()
        self.seen = reads
        self.views[self.view.version] = self.seen
        return result

    def rows_to_add(
        self, groups: dict[Key, list[Row]], reads: dict[Key, list[tuple[Any, ...]]], touched: set[Key]
    ) -> Counter[int | None]:
        """The most rows that a function may get that can be folded: those that came, if none went; else all."""
        found = Counter[int | None]()
        for key in touched if self.asked.folded else ():
            before, now = set((self.seen or {}).get(key, ())), set(reads[key])
            pairs = zip(groups[key], reads[key], strict=True)
            found.update(row["id"] for row, read in pairs if read not in before or not before <= now)
        return found

    def new_code(self) -> dict[str, str]:
        return {"on_code_change": "new_rows"} if self.code > 1 else {}

    @rule()
    def refresh_and_refresh_again(self) -> None:
        self.refresh(**self.new_code())
        if not self.asked.refusing:
            version = self.view.version
            self.trace.clear()
            result = self.view.refresh(runner="inline", **self.new_code())
            assert (result.state, result.commits, self.view.version) == ("DONE", (), version)
            assert len(self.trace) == 0

    @rule(number=PICK)
    def refresh_to_some_version(self, number: int) -> None:
        versions = [found["version"] for found in self.table.lance.versions()]
        self.refresh(src_version=versions[number % len(versions)], **self.new_code())

    @precondition(lambda self: self.RUNNER == "inline")  # workers of Spark import the module as it is
    @rule(recompute=st.booleans())
    def the_code_changes(self, recompute: bool) -> None:
        self.code += 1
        udfs.told = udfs.told_of(self.code)
        self.mixed = self.mixed or not recompute
        was, self.mixed = self.mixed, self.mixed or not recompute
        self.refresh(exact=False, on_code_change="recompute" if recompute else "new_rows")
        self.mixed = was and not recompute


GroupHistories.TestCase.settings = settings(max_examples=300 if SOAK else 12, stateful_step_count=14)
TestGroupHistories = GroupHistories.TestCase


class GroupHistoriesOfAView(GroupHistories):
    """The rows that are grouped are those of a view, which get other ids when the view computes them again."""

    lower: View

    def grouped(self) -> Table:
        columns = {name: name for name in self.table.schema.names}
        self.lower = self.table.query().select(columns).create_materialized_view(name="lower")
        return self.lower

    def rows(self, version: int | None) -> list[Row]:
        self.lower.refresh(runner="inline")
        # Rows with other ids and equal values keep their group as it is: those that are ordered by their ids, too.
        return [{**row, "_rowid": row["id"]} for row in self.lower.to_arrow().to_pylist()]

    def compared(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        key, n, total, _, *others = row
        return (key, n, total, *(" ".join(sorted(one.split())) if isinstance(one, str) else one for one in others))

    def refresh_to_some_version(self, number: int) -> None:
        """Not here: the versions of the view are not those of its source."""


GroupHistoriesOfAView.TestCase.settings = settings(max_examples=100 if SOAK else 5, stateful_step_count=12)
TestGroupHistoriesOfAView = GroupHistoriesOfAView.TestCase


class GroupHistoriesOfOneHash(GroupHistories):
    """All keys have one hash, so that only the keys themselves tell groups apart."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes = group_keys._mixed
        group_keys._mixed = lambda values: values & 0

    def teardown(self) -> None:
        group_keys._mixed = self.hashes
        super().teardown()

    def refresh(self, exact: bool = True, **options: Any) -> Any:
        return super().refresh(False, **options)


GroupHistoriesOfOneHash.TestCase.settings = settings(max_examples=200 if SOAK else 4, stateful_step_count=10)
TestGroupHistoriesOfOneHash = GroupHistoriesOfOneHash.TestCase


@pytest.mark.slow
class TestManyGroupHistories(GroupHistories.TestCase):
    settings = settings(max_examples=25, stateful_step_count=25)


if __name__ == "__main__":
    sys.exit(run_histories([GroupHistories, GroupHistoriesOfAView, GroupHistoriesOfOneHash]))
