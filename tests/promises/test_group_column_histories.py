"""Random histories of the columns of a view of groups: dropped, added, altered, and brought back by restores."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from airflow_geneva import connect
from airflow_geneva.engine.plan.freshness import FreshnessCount
from airflow_geneva.engine.run import groups as groups_run
from airflow_geneva.engine.views.group_tables import SETTLED, GroupTables
from airflow_geneva.engine.views.grouping import TABLE_ID, rows_table
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.histories import run_histories
from tests.udfs_for_tests import folded, group_histories as udfs

SOAK = os.environ.get("GENEVA_SOAK") == "1"
PICK = st.integers(0, 1 << 30)
KINDS = ["sum", "largest", "bag"]

Row = dict[str, Any]


def spec(kind: str, of: str) -> Any:
    """What computes a column of some kind from a column of the source."""
    return {"sum": f"sum({of})", "largest": (udfs.largest, [of]), "bag": (folded.bag, ["id", of])}[kind]


def value(kind: str, of: str, rows: list[Row]) -> Any:
    numbers = [row[of] for row in rows]
    if kind == "bag":
        return folded.bag_value([row["id"] for row in rows], sum(numbers))
    return sum(numbers) if kind == "sum" else max(numbers)


class GroupColumnHistories(RuleBasedStateMachine):
    """After a refresh, each column has the values of the source, whatever columns there were in between.

    A refresh runs no group if nothing changed that the view reads.
    """

    table: Table
    view: View

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory(prefix="geneva-group-columns-")
        self.next_id, self.was_restored, self.hidden = 0, False, b""
        self.marks: list[int] = []
        self.is_same = self.was_moved = self.was_altered = False

    def teardown(self) -> None:
        self.scratch.cleanup()

    def new_rows(self, number: int) -> pa.Table:
        ids = list(range(self.next_id, self.next_id + 1 + number % 4))
        self.next_id += len(ids)
        keys, others = [(number + at) % 3 for at in ids], [0] * len(ids)
        return pa.table({"id": ids, "k": keys, "x": ids, "y": [(number + 7 * at) % 50 for at in ids], "other": others})

    @initialize(kind=st.sampled_from(KINDS), there=st.booleans(), number=PICK)
    def make(self, kind: str, there: bool, number: int) -> None:
        self.kind = kind
        self.table = connect(Path(self.scratch.name) / "db").create_table("rows", self.new_rows(number))
        columns = {"n": "count(*)", **({"value": spec(kind, "x")} if there else {})}
        self.view = self.table.query().group_by("k").agg(columns).create_materialized_view(name="v")
        self.refresh()

    @property
    def of(self) -> str | None:
        """The column of the source of which the view shows something, beside its numbers of rows."""
        found = [one for one in self.view.view_definition.columns if one.name == "value"]
        return found[0].inputs[-1] if found and found[0].udf else "x" if found else None

    @rule(
        of_view=st.sampled_from([*["drop_or_add"] * 4, *["restore"] * 3, "alter", "nothing"]),
        of_source=st.sampled_from([*["x"] * 5, "y", "k", *["other"] * 3, "append", "restore", "clean", "nothing"]),
        then=st.sampled_from([*["refresh"] * 7, "refresh_to_some_version", "die", "nothing"]),
        number=PICK,
    )
    def change(self, of_view: str, of_source: str, then: str, number: int) -> None:
        """Change the view, change its source, and refresh: in this order something can be missed."""
        self.change_view(of_view, number)
        self.change_source(of_source, number)
        if then == "refresh":
            self.refresh()
        elif then == "refresh_to_some_version":
            self.refresh_to(self.version(number))
        elif then == "die":
            self.die()

    def version(self, number: int) -> int:
        """Pick a version of the source."""
        versions = [int(one["version"]) for one in self.table.lance.versions()]
        return versions[number % len(versions)]

    def change_view(self, how: str, number: int) -> None:
        self.is_same = self.is_same and how == "nothing"
        if how == "restore":
            self.view.location.open(self.marks[number % len(self.marks)]).restore()
            self.was_restored = True
        elif how == "drop_or_add" and self.of:
            self.view.drop_columns(["value"])
        elif how == "drop_or_add":
            self.view.add_columns({"value": spec(self.kind, "x")})
        elif how == "alter" and self.of and self.kind != "sum":
            self.view.alter_columns({"value": spec(self.kind, "xy"[number % 2])})
            self.was_altered = True

    def change_source(self, how: str, number: int) -> None:
        self.was_moved = self.was_moved or how == "other"
        # Whether rows that an update moved have other values is seen as long as their earlier version is there.
        self.is_same = self.is_same and (how in ("other", "nothing") or (how == "clean" and not self.was_moved))
        if how == "append":
            self.table.add(self.new_rows(number))
        elif how == "restore":
            self.table.location.open(self.version(number)).restore()
        elif how == "clean":
            self.table.lance.cleanup_old_versions(older_than=timedelta(0))
        elif how != "nothing":
            new = number % 3 if how == "k" else number % 1_000
            self.table.lance.update({how: str(new)}, where=f"id % 3 = {number % 3}")

    def refresh(self) -> None:
        self.check_what_is_said()
        self.refresh_to(self.table.version)
        assert self.pending == 0
        assert self.view.refresh(runner="inline").commits == ()

    def refresh_to(self, version: int) -> None:
        result = self.view.refresh(runner="inline", src_version=version, on_code_change="recompute")
        assert result.state == "DONE"
        assert self.shown() == self.right(version)
        hidden = rows_table(self.view.location).open().schema.metadata[TABLE_ID.encode()]
        assert self.was_restored or hidden == self.hidden or not self.hidden, "all groups were found anew"
        assert result.rows_run == 0 or not self.is_same
        assert GroupTables.open(self.view.location).state == SETTLED
        self.was_restored, self.hidden = False, hidden
        self.is_same, self.was_moved, self.was_altered = version == self.table.version, False, False
        self.marks.append(self.view.version)

    def die(self) -> None:
        def dies(*_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as dying:
            dying.setattr(groups_run, "_refresh_rows", dies)
            self.is_same = False
            try:
                self.view.refresh(runner="inline", on_code_change="recompute")
            except KeyboardInterrupt:
                self.was_restored = True  # the next refresh may find that others changed the tables

    def check_what_is_said(self) -> None:
        """A view of which nothing is said to be pending has the values of its source.

        Rows whose values come from another function than the column has now do not count as pending.
        """
        planned = self.view.plan_refresh(on_code_change="recompute")
        if not planned.rows_pending or not (self.pending or self.was_altered):
            assert self.shown() == self.right(self.table.version)

    @property
    def pending(self) -> int:
        found = FreshnessCount.of_view(self.view.location).count()
        return found.pending + found.gone

    def shown(self) -> dict[int, Row]:
        return {row.pop("k"): row for row in self.view.to_arrow().to_pylist()}

    def right(self, version: int) -> dict[int, Row]:
        groups: dict[int, list[Row]] = {}
        for row in self.table.location.open(version).to_table().to_pylist():
            groups.setdefault(row["k"], []).append(row)
        return {
            key: {"n": len(rows), **({"value": value(self.kind, self.of, rows)} if self.of else {})}
            for key, rows in groups.items()
        }


GroupColumnHistories.TestCase.settings = settings(max_examples=500 if SOAK else 8, stateful_step_count=10)
TestGroupColumnHistories = GroupColumnHistories.TestCase


@pytest.mark.slow
class TestManyGroupColumnHistories(GroupColumnHistories.TestCase):
    settings = settings(max_examples=60, stateful_step_count=10)


if __name__ == "__main__":
    sys.exit(run_histories([GroupColumnHistories]))
