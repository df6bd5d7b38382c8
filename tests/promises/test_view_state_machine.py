"""Random histories of a source and its views, checked after every refresh against the query in plain Python."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from lance.fragment import write_fragments

from airflow_geneva import connect
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.plan.swap_plan import ALL_ROW_IDS
from airflow_geneva.engine.storage.engine_errors import is_engine_error
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace
from tests.support.queries import Refresh, splitmix64
from tests.udfs_for_tests import view_histories as udfs

SOAK = os.environ.get("GENEVA_SOAK") == "1"
A_YEAR = timedelta(days=365).total_seconds()

Row = dict[str, Any]
WHERES: dict[str | None, Callable[[Row], bool]] = {
    None: lambda row: True,
    "x % 3 != 0": lambda row: row["x"] is not None and row["x"] % 3 != 0,
    "g > 1 AND x IS NOT NULL": lambda row: row["g"] > 1 and row["x"] is not None,
    "y IS NULL OR y < 3": lambda row: row["y"] is None or row["y"] < 3,
}
XS = st.none() | st.integers(0, 99)
PICK = st.integers(0, 1 << 30)


@dataclass(frozen=True)
class Asked:
    """A query, for the product and for the judge."""

    where: str | None
    seed: int | None
    limit: int | None
    offset: int
    with_y: bool
    refusing: bool

    def make(self, table: Table) -> View:
        query = table.query() if self.where is None else table.query().where(self.where)
        query = query.select({"id": "id", "twice": "x * 2", **({"y": "y"} if self.with_y else {})})
        query = query.add_columns({"p": (udfs.first, ["id", "x"]), "q": (udfs.second, ["p"])})
        query = query.add_columns({"c": (udfs.other, ["x"])})
        if self.refusing:
            query = query.add_columns({"e": (udfs.refusing, ["x"])})
        query = query if self.seed is None else query.shuffle(self.seed)
        query = query if self.limit is None else query.limit(self.limit)
        return query.offset(self.offset).create_materialized_view(name="v")

    @property
    def has_limit(self) -> bool:
        return self.limit is not None or self.offset > 0

    def reads(self, row: Row) -> tuple[Any, ...]:
        """What a row's place and values in the view depend on."""
        reads_y = self.with_y or "y" in (self.where or "")
        return (row["id"], row["x"], row["g"] if "g" in (self.where or "") else None, row["y"] if reads_y else None)

    def chosen(self, dataset: lance.LanceDataset) -> dict[int, Row]:
        """The query's rows by row id, in its order, by plain Python."""
        rows = {row["_rowid"]: row for row in dataset.to_table(with_row_id=True).to_pylist()}
        ids = sorted(row_id for row_id, row in rows.items() if WHERES[self.where](row))
        if self.seed is not None:
            numbers = splitmix64(next(splitmix64(self.seed)))
            hashes = [next(numbers) for _ in range(max(ids, default=-1) + 1)]
            ids.sort(key=lambda row_id: hashes[row_id])
        ids = ids[self.offset :] if self.limit is None else ids[self.offset : self.offset + self.limit]
        return {row_id: rows[row_id] for row_id in ids}

    def values(self, row: Row, code: int) -> Row:
        """What the view shows for a row of its source."""
        p = udfs.first_value(code, row["id"], row["x"])
        bad, x = udfs.is_bad(row["x"]), row["x"]
        return {
            "id": row["id"],
            "twice": None if x is None else 2 * x,
            **({"y": row["y"]} if self.with_y else {}),
            "p": p,
            "q": udfs.second_value(p),
            "c": udfs.other_value(row["x"]),
            **({"e": None if bad else x or 0} if self.refusing else {}),
        }


class ViewHistories(RuleBasedStateMachine):
    """Whatever happens, a view equals its query at the version it was refreshed to, for the price of what changed."""

    table: Table
    view: View

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory(prefix="geneva-views-")
        self.trace = Trace(Path(self.scratch.name) / "trace")
        os.environ[TRACE] = str(self.trace.path)
        self.next_id, self.code = 0, 1
        # What the view shows by source row id, None when others changed it; the same for its versions.
        self.shown: dict[int, tuple[Any, ...]] | None = {}
        self.views: dict[int, dict[int, tuple[Any, ...]] | None] = {}
        self.marks: list[int] = []
        self.spare = self.loose = self.mixed = self.torn = self.reused = False
        self.target = 0
        # The names of promoted columns, by the names of their creation.
        self.named: dict[str, str] = {}

    def teardown(self) -> None:
        os.environ.pop(TRACE, None)
        udfs.first = FIRST
        self.scratch.cleanup()

    # The source.

    def new_rows(self, xs: list[int | None]) -> pa.Table:
        ids = list(range(self.next_id, self.next_id + len(xs)))
        self.next_id += len(xs)
        data = {"id": ids, "x": xs, "g": [number % 4 for number in ids], "other": [0] * len(ids)}
        return pa.table({name: pa.array(values, pa.int64()) for name, values in data.items()})

    def pick(self, number: int, most: int = 4) -> str:
        rows = sorted(self.table.lance.to_table(columns=["id"])["id"].to_pylist()) or [-1]
        return ", ".join(str(rows[(number + step * 7) % len(rows)]) for step in range(1 + number % most))

    @initialize(
        xs=st.lists(XS, max_size=24),
        per_fragment=st.sampled_from([4, 7, 30]),
        where=st.sampled_from(list(WHERES)),
        seed=st.sampled_from([None, None, 5]),
        cut=st.sampled_from([(None, 0), (None, 0), (8, 0), (5, 3), (None, 4)]),
        with_y=st.booleans(),
        refusing=st.sampled_from([False, False, True]),
    )
    def make(
        self,
        xs: list[int | None],
        per_fragment: int,
        where: str | None,
        seed: int | None,
        cut: tuple[int | None, int],
        with_y: bool,
        refusing: bool,
    ) -> None:
        db = connect(Path(self.scratch.name) / "db")
        self.table = db.create_table("docs", self.new_rows(xs), max_rows_per_file=per_fragment)
        self.table.add_columns({"y": (udfs.filled, ["x"])})
        self.asked = Asked(where, seed, *cut, with_y, refusing)
        self.view = self.asked.make(self.table)
        upper = self.view.query().where("twice > 20").select({"id": "id", "four": "twice * 2", "q": "q"})
        self.upper = upper.create_materialized_view(name="upper")
        self.spare = self.view.lance.count_rows() > 0
        self.marks.append(self.table.version)
        self.views[self.view.version] = self.shown

    def act(self, name: str, number: int) -> None:
        """Do something to the source or the view, by name."""
        getattr(self, f"_{name}")(number)
        self.views[self.view.version] = self.shown

    def _append(self, number: int) -> None:
        self.table.add(self.new_rows([(number + 13 * step) % 100 for step in range(1 + number % 6)]))

    def _update(self, number: int) -> None:
        self.table.lance.update({"x": str(number % 100)}, where=f"id IN ({self.pick(number)})")

    def _update_the_filter(self, number: int) -> None:
        self.table.lance.update({"g": str(number % 4)}, where=f"id IN ({self.pick(number)})")

    def _touch(self, number: int) -> None:
        self.table.lance.update({"other": str(number)}, where=f"id IN ({self.pick(number)})")

    def _upsert(self, number: int) -> None:
        fresh = self.new_rows([number % 100])
        rows = sorted({int(row) for row in self.pick(number, 2).split(",")} - {-1})
        changed = pa.table(
            {"id": rows, "x": [77] * len(rows), "g": [2] * len(rows), "other": [0] * len(rows)}, fresh.schema
        )
        data = pa.concat_tables([fresh, changed])
        for name in self.table.schema.names[len(data.schema.names) :]:
            data = data.append_column(name, pa.nulls(len(data), self.table.schema.field(name).type))
        merge = self.table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(data.select(self.table.schema.names))

    def _upsert_in_place(self, number: int) -> None:
        rows = sorted({int(row) for row in self.pick(number, 3).split(",")})
        data = pa.table(
            {"id": pa.array(rows, pa.int64()), "x": pa.array([number % 90 + r % 9 for r in rows], pa.int64())}
        )
        self.table.lance.merge_insert("id").when_matched_update_all().execute(data)

    def _overwrite_in_place(self, number: int) -> None:
        dataset = self.table.lance
        fragments = dataset.get_fragments()
        if fragments:
            fragment = fragments[number % len(fragments)]
            values = [(number + at) % 100 for at in range(fragment.physical_rows)]
            data = pa.table([pa.array(values, pa.int64())], schema=pa.schema([dataset.schema.field("x")]))
            if not any(len(file.fields) == 1 and file.fields[0] == 1 for file in fragment.metadata.files):
                return self._upsert_in_place(number)  # Lance replaces whole files only.
            (meta,) = write_fragments(data, dataset, mode="append")
            group = lance.LanceOperation.DataReplacementGroup(fragment.fragment_id, meta.files[0])
            transaction = lance.Transaction(dataset.version, lance.LanceOperation.DataReplacement([group]))
            lance.LanceDataset.commit(dataset.uri, transaction)
        return None

    def _delete(self, number: int) -> None:
        self.table.lance.delete(f"id IN ({self.pick(number)})")

    def _compact(self, number: int) -> None:
        self.table.lance.optimize.compact_files(target_rows_per_fragment=[6, 12, 1_000][number % 3])

    def _add_a_column(self, number: int) -> None:
        self.table.lance.add_columns({f"more_{self.table.version}": "id + 1"})

    def _drop_a_column(self, number: int) -> None:
        more = [name for name in self.table.schema.names if name.startswith("more_")]
        if more:
            self.table.lance.drop_columns(more[:1])

    def _backfill(self, number: int) -> None:
        self.table.backfill("y", runner="inline")

    def _restore(self, number: int) -> None:
        self.table.location.open(self.marks[number % len(self.marks)]).restore()
        # Rows come back whose checkpoints are there.
        self.reused = True

    def _mark(self, number: int) -> None:
        self.marks.append(self.table.version)

    def _clean_the_source_up(self, number: int) -> None:
        self.table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
        self.marks = [self.table.version]
        self.loose = self.torn = True

    # The view.

    def _compact_the_view(self, number: int) -> None:
        self.view.lance.optimize.compact_files(target_rows_per_fragment=[6, 1_000][number % 2])

    def _restore_the_view(self, number: int) -> None:
        version = sorted(self.views)[number % len(self.views)]
        self.view.location.open(version).restore()
        self.shown = self.views[version]
        self.reused = self.mixed = True
        # What was reflected may be older than what is left of the source's history.
        self.loose = True

    def _add_placeholders(self, number: int) -> None:
        rows = [pa.array([number % 30, -5], pa.int64()), pa.array([False, None])]
        self.view.lance.insert(pa.table(rows, names=["__source_row_id", "__is_set"]), mode="append")
        self.spare = True

    def _write_into_the_view(self, number: int) -> None:
        dataset = self.view.lance
        if number % 3 == 0:
            rows = [pa.array([number % 30, 1 << 40, None], pa.int64()), pa.array([True] * 3)]
            dataset.insert(pa.table(rows, names=["__source_row_id", "__is_set"]), mode="append")
        elif not dataset.count_rows("id % 2 = 0"):
            return
        elif number % 3 == 1:
            dataset.delete("id % 2 = 0")
        else:
            dataset.update({"p": "-1"}, where="id % 2 = 0")
        self.shown = None

    def _add_a_column_to_the_view(self, number: int) -> None:
        self.view.lance.add_columns({f"theirs_{self.view.version}": "id"})

    def _clean_the_view_up(self, number: int) -> None:
        if self.shown is None:
            return  # Nobody can know any more that others wrote into it.
        self.view.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
        self.views = {self.view.version: self.shown}
        self.torn = True

    def _collect_garbage(self, number: int) -> None:
        later = time.time() + A_YEAR if number % 2 else None
        collect(self.view.location, find_garbage(self.view.location, "1s", now=later))
        self.torn = True

    SOURCE = (
        "append", "update", "update_the_filter", "touch", "upsert", "upsert_in_place", "overwrite_in_place", "delete",
        "compact", "add_a_column", "drop_a_column", "backfill", "restore", "mark", "clean_the_source_up",
    )  # fmt: skip
    VIEW = (
        "compact_the_view", "restore_the_view", "add_placeholders", "write_into_the_view", "add_a_column_to_the_view",
        "clean_the_view_up", "collect_garbage",
    )  # fmt: skip

    @rule(name=st.sampled_from(SOURCE), number=PICK)
    def something_happens_to_the_source(self, name: str, number: int) -> None:
        self.act(name, number)

    @rule(name=st.sampled_from(SOURCE), number=PICK)
    def something_else_happens_to_the_source(self, name: str, number: int) -> None:
        self.act(name, number)

    @rule(name=st.sampled_from(VIEW), number=PICK)
    def something_happens_to_the_view(self, name: str, number: int) -> None:
        self.act(name, number)

    # Refreshes.

    def rows(self) -> list[Row]:
        names = list(self.asked.values({"id": 0, "x": 0, "y": 0}, 1))
        found = self.view.to_arrow().select([self.named.get(name, name) for name in names])
        return found.rename_columns(names).to_pylist()

    def check(self, result: Any, source_version: int, before: dict[int, tuple[Any, ...]] | None, behind: bool) -> None:
        """The judge: equality with the query, and rows run against rows due."""
        chosen = self.asked.chosen(self.table.location.open(source_version))
        codes = range(1, self.code + 1)
        now = Counter(tuple(row.values()) for row in self.rows())
        right = Counter(tuple(self.asked.values(row, self.code).values()) for row in chosen.values())
        if self.mixed:
            now = Counter((row[0], row[1], row[2] if self.asked.with_y else None) for row in now.elements())
            right = Counter((row[0], row[1], row[2] if self.asked.with_y else None) for row in right.elements())
            every = [self.asked.values(row, code) for row in chosen.values() for code in codes]
            assert {tuple(row.values()) for row in self.rows()} <= {tuple(row.values()) for row in every}
        assert now == right, f"extra {list(now - right)[:4]}, missing {list(right - now)[:4]}"
        assert self.view.lance.count_rows() == len(chosen)
        due = {row_id for row_id, row in chosen.items() if (before or {}).get(row_id) != self.asked.reads(row)}
        run = self.trace.counts()
        selected = {row["id"] for row in chosen.values()}
        ids = {chosen[row_id]["id"] for row_id in due}
        if self.asked.refusing:
            # What failed is tried again, twice.
            ids |= {row["id"] for row in chosen.values() if udfs.is_bad(row["x"])}
        assert max(run.values(), default=1) == 1, f"run twice: {run}"
        assert set(run) <= (selected if behind or before is None else ids | (selected if self.loose else set()))
        processed = result.rows_computed + result.rows_reused + result.rows_failed
        if not self.asked.refusing and not behind and before is not None and not self.loose:
            assert processed == len(due)
            assert self.reused or len(run) == len(due)
        assert result.rows_computed + result.rows_failed == len(run) or self.asked.refusing
        self.shown = {row_id: self.asked.reads(row) for row_id, row in chosen.items()}
        self.target = source_version
        self.loose = self.loose and not result.commits
        self.torn = False

    def refresh(self, **options: Any) -> Any:
        self.trace.clear()
        before, version = self.shown, self.view.version
        source_version = options.get("src_version") or self.table.version
        behind = source_version < self.target or options.get("on_code_change") == "recompute"
        same = before is not None and before == {
            row_id: self.asked.reads(row)
            for row_id, row in self.asked.chosen(self.table.location.open(source_version)).items()
        }
        result = self.view.refresh(runner="inline", **options)
        assert result.state == "DONE"
        self.check(result, source_version, before, behind)
        if same and not behind and not (self.loose or self.spare or self.mixed or self.asked.refusing):
            assert (result.commits, self.view.version) == ((), version)
        assert self.view.version - version <= 3
        self.spare = False
        self.views[self.view.version] = self.shown
        return result

    @rule(max_rows=st.sampled_from([None, None, 5]))
    def refresh_and_refresh_again(self, max_rows: int | None) -> None:
        self.refresh(max_rows_per_fragment=max_rows, **self.new_code())
        if not self.asked.refusing:
            version = self.view.version
            self.trace.clear()
            result = self.view.refresh(runner="inline")
            assert (result.state, result.commits, self.view.version) == ("DONE", (), version)
            assert len(self.trace) == 0

    def new_code(self) -> dict[str, str]:
        # A view that was restored may hold values of older code.
        return {"on_code_change": "new_rows"} if self.code > 1 else {}

    @rule(number=PICK)
    def refresh_to_some_version(self, number: int) -> None:
        versions = [found["version"] for found in self.table.lance.versions()]
        first = self.view.view_definition.reads
        version = versions[number % len(versions)]
        fields = {field.name() for field in self.table.location.open(version).lance_schema.fields()}
        if {column.name for column in first} <= fields:
            self.reused = True
            self.refresh(src_version=version, **self.new_code())

    @rule(recompute=st.booleans())
    def the_code_changes(self, recompute: bool) -> None:
        self.code += 1
        udfs.first = udfs.first_of(self.code)
        self.mixed = self.mixed or not recompute
        was, self.mixed = self.mixed, self.mixed or not recompute or not self.shown
        self.refresh(on_code_change="recompute" if recompute else "new_rows")
        self.mixed = was

    @rule(
        first=st.lists(st.tuples(st.sampled_from(SOURCE + VIEW), PICK), max_size=2),
        second=st.lists(st.tuples(st.sampled_from(SOURCE + VIEW), PICK), max_size=2),
    )
    @precondition(lambda self: self.code == 1)
    def refresh_while_things_happen(self, first: list[tuple[str, int]], second: list[tuple[str, int]]) -> None:
        self.trace.clear()
        before, version, behind = self.shown, self.table.version, self.table.version < self.target
        self.torn = False
        taken = Refresh(self.view).plan()
        loose, self.loose = self.loose, False
        result = None
        try:
            for name, number in first:
                self.act(name, number)
            taken.apply()
            for name, number in second:
                self.act(name, number)
            rows, unlike = self.rows(), self.shown is not before and self.shown != before
            result = taken.finish()
        except BaseException as error:
            if not self.torn or not (is_engine_error(error) or isinstance(error, InvalidInput)):
                raise
        later, self.loose = self.loose, loose
        self.reused = True
        if result is not None and result.state == "DONE":
            # Where nobody knows what is shown, everything is taken out, whatever it is.
            assert not unlike or taken.made.swap.gone == ALL_ROW_IDS
            try:
                self.check(result, version, before, behind)
            except ValueError:
                # The version that was refreshed to is gone.
                assert self.torn
                self.shown = None
        else:
            assert self.torn or unlike or [name for name, _ in first + second if name in self.VIEW]
            assert result is None or (result.state, self.rows()) == ("PARTIAL", rows)
        self.loose = self.loose or later
        self.views[self.view.version] = self.shown

    @rule(happens=st.lists(st.tuples(st.sampled_from(SOURCE), PICK), max_size=2))
    def promote_a_column_and_refresh_and_go_back(self, happens: list[tuple[str, int]]) -> None:
        loosely = {"require_complete": False, "require_index": False}
        version, rows = self.view.version, self.rows()
        self.view.promote_column("c", to="p", keep_as="before", **loosely)
        self.named = {"p": "before", "c": "p"}
        assert (self.view.version, self.rows()) == (version + 1, rows)
        assert self.view.view_definition.column("q").inputs == ("before",)
        for name, number in happens:
            self.act(name, number)
        # Checkpoints are not found under other names: what died before runs again, and only that.
        self.refresh(**self.new_code())
        rows, last = self.rows(), self.view.version
        self.view.promote_column("before", to="p", keep_as="c", **loosely)
        self.named = {}
        assert (self.view.version, self.rows()) == (last + 1, rows)
        # The versions between have other names, and are not restored.
        self.views = {one: shown for one, shown in self.views.items() if one <= version}
        self.views[self.view.version] = self.shown
        self.reused = True

    @rule()
    def refresh_the_view_on_the_view(self) -> None:
        result = self.upper.refresh(runner="inline")
        assert result.state == "DONE"
        rows = [row for row in self.rows() if (row["twice"] or 0) > 20]
        right = Counter((row["id"], 2 * row["twice"], row["q"]) for row in rows)
        now = Counter((row["id"], row["four"], row["q"]) for row in self.upper.to_arrow().to_pylist())
        assert now == right
        version = self.upper.version
        assert self.upper.refresh(runner="inline").commits == ()
        assert self.upper.version == version


FIRST = udfs.first


class LongViewHistories(ViewHistories):
    """More of them, and longer ones."""


TestViewHistories: Callable[..., Any] = ViewHistories.TestCase
ViewHistories.TestCase.settings = settings(max_examples=10, stateful_step_count=15, deadline=None)
TestLongViewHistories: Callable[..., Any] = pytest.mark.slow(LongViewHistories.TestCase)
LongViewHistories.TestCase.settings = settings(
    max_examples=1_000 if SOAK else 25, stateful_step_count=40 if SOAK else 20, deadline=None
)
