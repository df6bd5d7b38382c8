"""Random histories, with kills, of a view: functions fail, are repaired and change, and columns come and go."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine import faults
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.views.state import CommittedViewState
from airflow_geneva.errors import CodeChanged, GenevaError
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.marks import slow_after
from tests.support.queries import POINTS
from tests.udfs_for_tests.columns import IN_FLIGHT, deploy, is_bad, value

HISTORIES = int(os.environ.get("GENEVA_HISTORIES", "1000" if os.environ.get("GENEVA_SOAK") == "1" else "25"))
FIRST = int(os.environ.get("GENEVA_FIRST_HISTORY", "0"))
"""`GENEVA_SOAK=1` tries 1,000 histories, which take half an hour. `GENEVA_FIRST_HISTORY=412 GENEVA_HISTORIES=1` tries
one of them again."""
SIZES: dict[str, Any] = {"checkpoint_size": 5, "batch_size": 5, "checkpoint_interval": 0.0}
INPUTS = {"ocr": "x", "language": "ocr", "words": "x", "chars": "x"}
OF_UPPER = {"tags": "words", "names": "tags"}
MOST_RUNS, FAST = 3, 4
SLACK = 10 + 4 * IN_FLIGHT
"""Calls that a kill may cost a function: of an interval, and of an async function those in flight."""


class Died(BaseException):
    """Stands for the end of the process."""


@dataclass
class Cell:
    """A value of the view: the code that computed it, and the runs in which that code failed on the row."""

    code: int
    value: int | None
    runs: int = 0


@dataclass
class Model:
    """What a view holds, and what a refresh has to call.

    `inputs` names what each function reads: the value in `source`, or another function's. `known` is the code at the
    last refresh.
    """

    inputs: dict[str, str]
    code: dict[str, int]
    fails: dict[str, bool]
    source: dict[Any, int | None] = field(default_factory=dict)
    shown: dict[Any, tuple[int | None, dict[str, Cell]]] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)

    def refresh(self, recompute: bool, errors_only: bool) -> tuple[Counter[str], int]:
        """Bring the model up to date; return the calls of each function, and the number of rows that failed."""
        calls, failed = Counter[str](), 0
        if not errors_only:
            self.shown = {i: row for i, row in self.shown.items() if self._is_current(i)}
        for i, x in self.source.items() if not errors_only else [(i, x) for i, (x, _) in self.shown.items()]:
            x, cells = self.shown.setdefault(i, (x, {}))
            due = {
                name for name in self.code if self._is_due(name, cells.get(name), bool(cells), recompute, errors_only)
            }
            for name in self.code:
                if name in due or self.inputs[name] in due:
                    due.add(name)
                    calls[name] += 1
                    failed += not self._run(name, x, cells)
        if calls or not errors_only:
            self.known = {name: code for name, code in self.code.items() if name in self.known or not errors_only}
        return calls, failed

    def of_earlier_code(self) -> int:
        """Count the rows whose values a plan asks about; 0 if no code changed since the last refresh."""
        if all(self.known.get(name, code) == code for name, code in self.code.items()):
            return 0
        cells = (cells for i, (_, cells) in self.shown.items() if self._is_current(i))
        return sum(any(cell.code != self.code[name] for name, cell in row.items()) for row in cells)

    def _is_current(self, i: Any) -> bool:
        return i in self.source and self.source[i] == self.shown[i][0]

    def _is_due(self, name: str, cell: Cell | None, known: bool, recompute: bool, errors_only: bool) -> bool:
        if cell is None:
            return not (errors_only and known)
        if cell.runs and (errors_only or cell.runs < MOST_RUNS or cell.code != self.code[name]):
            return True
        return recompute and not errors_only and cell.code != self.code[name]

    def _run(self, name: str, x: int | None, cells: dict[str, Cell]) -> bool:
        given = cells[self.inputs[name]].value if self.inputs[name] in self.code else x
        code, before = self.code[name], cells.get(name)
        if self.fails[name] and is_bad(given):
            runs = before.runs if before is not None and before.code == code else 0
            cells[name] = Cell(code, None, runs + 1)
            return False
        cells[name] = Cell(code, value(name, code, given))
        return True

    def values(self) -> dict[Any, list[int | None]]:
        return {
            i: [cells[name].value if name in cells else None for name in self.code]
            for i, (_, cells) in self.shown.items()
        }

    def trial(self) -> Model:
        return deepcopy(self)


@dataclass
class History:
    """A table, a view of it, and a view of that view; the first one may have a row for each of two pages."""

    dice: random.Random
    folder: Path

    def __post_init__(self) -> None:
        self.version = 1
        code, fails = dict.fromkeys(("ocr", "language", "words"), 1), dict.fromkeys(INPUTS, False)
        self.model = Model(INPUTS, code, {**fails, "ocr": True, "words": True}, {i: i for i in range(40)})
        self.above = Model(OF_UPPER, dict.fromkeys(OF_UPPER, 1), {"tags": True, "names": False})
        db, self.newest = connect(self.folder / "db"), 40
        self.pages = range(self.dice.choice([1, 2]))
        self.exploded = len(self.pages) == 2
        self.table: Table = db.create_table("docs", self.new_rows(0), max_rows_per_file=15)
        query = self.table.query().select(["id", *["page"] * self.exploded]).add_columns(self.functions(self.model))
        query = query.explode("page") if self.exploded else query
        self.view = query.create_materialized_view(db, "v")
        # Without the page, both rows of a document are alike for the upper view.
        self.names_page = self.exploded and self.dice.random() < 0.5
        query = self.view.query().select(["id", *["page"] * self.names_page]).add_columns(self.functions(self.above))
        self.upper = query.create_materialized_view(db, "upper")

    def new_rows(self, start: int) -> pa.Table:
        rows = [{"id": i, "x": i, "page": [*self.pages]} for i in range(start, self.newest)]
        schema = {"id": pa.int64(), "x": pa.int64(), "page": pa.list_(pa.int64())}
        return pa.Table.from_pylist(rows, pa.schema([*schema.items()]))

    def functions(self, model: Model) -> dict[str, Any]:
        return {name: self.deploy(model, name) for name in model.code}

    def deploy(self, model: Model, name: str) -> Any:
        return deploy(name, model.code[name], model.inputs[name], model.fails[name])

    def change(self) -> None:
        """Change the source, the code or the columns."""
        table, view, model, dice = self.table, self.view, self.model, self.dice
        what = dice.choice(["add", "update", "delete", "compact", "compact view", "code", "code", "fix", "column"])
        if what == "add":
            start, self.newest = self.newest, self.newest + dice.randint(1, 8)
            table.add(self.new_rows(start))
            model.source |= {i: i for i in range(start, self.newest)}
        elif what == "update":
            step, by = dice.randint(3, 9), dice.randint(1, 3)
            table.lance.update({"x": f"x + {by}"}, where=f"id % {step} = 0")
            model.source = {i: x + by if i % step == 0 else x for i, x in model.source.items()}
        elif what == "delete":
            step = dice.randint(7, 13)
            table.lance.delete(f"id % {step} = 1")
            model.source = {i: x for i, x in model.source.items() if i % step != 1}
        elif what == "compact":
            table.lance.optimize.compact_files()
        elif what == "compact view":
            dice.choice([view, self.upper]).lance.optimize.compact_files()
        elif what in ("code", "fix"):
            model = dice.choice([model, model, self.above])
            name = dice.choice(list(model.code))
            self.version += 1
            model.code[name] = self.version
            model.fails[name] = dice.random() < 0.3 if what == "code" and name != "language" else False
            self.deploy(model, name)
        elif "chars" in model.code:
            view.drop_columns(["chars"])
            del model.code["chars"]
            model.known.pop("chars", None)
            for _, cells in model.shown.values():
                cells.pop("chars", None)
        else:
            self.version += 1
            model.code["chars"], model.fails["chars"] = self.version, dice.random() < 0.5
            view.add_columns({"chars": self.deploy(model, "chars")})

    def refresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refresh_one(self.view, self.model, monkeypatch)
        if self.dice.random() < 0.7:
            words = {i: cells["words"].value for i, (_, cells) in self.model.shown.items()}
            self.above.source = {(i, page): given for i, given in words.items() for page in self.pages}
            self.refresh_one(self.upper, self.above, monkeypatch)

    def refresh_one(self, view: View, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        dice = self.dice
        how = dice.choice(["new_rows", "recompute", "recompute", "errors_only"])
        if not model.shown:
            how = "new_rows"
        options: dict[str, Any] = {"errors_only": True} if how == "errors_only" else {"on_code_change": how}
        asked, expected, slack = (how == "recompute", how == "errors_only"), Counter[str](), 0
        if dice.random() < 0.4:
            before = state(view)
            if not self.dies(view, monkeypatch, options) or state(view) != before:
                # The next refresh is another run of what failed.
                expected += model.refresh(*asked)[0]
            else:
                # Rows that failed run again, beside those of an interval.
                slack = SLACK + model.trial().refresh(*asked)[1]
        else:
            self.plan(view, model, asked, options)
        view.refresh(runner="inline", **SIZES, **options)
        expected += model.refresh(*asked)[0]
        found = self.calls()
        names = {*INPUTS, *OF_UPPER}
        assert all(expected[name] <= found[name] <= expected[name] + slack for name in names), (found, expected, how)
        assert rows(view) == self.expected(view)

    def expected(self, view: View) -> list[tuple[Any, ...]]:
        if view is self.view:
            found = [
                (i, *[page] * self.exploded, *row) for i, row in self.model.values().items() for page in self.pages
            ]
        else:
            found = [(i, *[page] * self.names_page, *row) for (i, page), row in self.above.values().items()]
        return sorted(found, key=_nulls_first)

    def plan(self, view: View, model: Model, asked: tuple[bool, bool], options: dict[str, Any]) -> None:
        """A plan counts the calls that then follow, and asks about the rows that hold values of earlier code."""
        asks = (
            re.escape(f"Values of the old code: {counted(stake, 'row')} of")
            if (stake := model.of_earlier_code())
            else ""
        )
        with pytest.raises(CodeChanged, match=asks) if asks else nullcontext():
            view.plan_refresh()
        plan = view.plan_refresh(**options)
        planned = Counter(plan.calls_to_run if plan.shards else {})
        assert planned == model.trial().refresh(*asked)[0], (planned, options)

    def dies(self, view: View, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> bool:
        """Run a refresh that may end at some point, in a process of its own or as if; return whether it did."""
        if self.dice.random() < 0.5:
            return self.is_killed(view, f"{self.dice.choice([*POINTS, 'any'])}:{self.dice.randint(1, 9)}", options)

        def die(_process: int, _signal: int) -> None:
            faults._ARMED = ""
            raise Died

        with monkeypatch.context() as patched:
            patched.setattr(faults.os, "kill", die)
            faults._hits, faults._ARMED = 0, f"any:{self.dice.randint(1, 60)}"
            try:
                view.refresh(runner="inline", **SIZES, **options)
            except (Died, GenevaError):
                return True
            finally:
                faults._ARMED = ""
        return False

    def is_killed(self, view: View, fault: str, options: dict[str, Any]) -> bool:
        """Refresh a view in another process, which dies at a fault point; return whether it did."""
        models = (self.model, self.above)
        code = [(name, m.code[name], m.inputs[name], m.fails[name]) for m in models for name in m.code]
        arguments = {"database": view.location.database_uri, "view": view.name, "fault": fault, "options": options}
        environment = {TRACE: str(self.folder / "trace")}
        function = "tests.promises.test_view_columns:refresh_and_die"
        ended = forge().run(function, {**arguments, "code": code}, environment)
        assert ended in (0, -signal.SIGKILL)
        return ended != 0

    def calls(self) -> Counter[str]:
        found = Counter[str]()
        for name in (*INPUTS, *OF_UPPER):
            trace = Trace(self.folder / f"trace.{name}")
            found[name] = len(trace)
            trace.clear()
        return found


def state(view: View) -> Any:
    found = CommittedViewState(view.location, view.lance)
    return found.newest.identity, found.snapshot and found.snapshot.to_batch()


def rows(view: View) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in view.to_arrow().to_pylist()), key=_nulls_first)


def _nulls_first(row: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    return [(one is not None, one or 0) for one in row]


def refresh_and_die(database: str, view: str, fault: str, options: dict[str, Any], code: list[Any]) -> None:
    """Refresh a view in this process, which may not live to see the end; called in a forked one."""
    for name, version, inputs, fails in code:
        deploy(name, version, inputs, fails)
    Fault(fault).arm()
    connect(database).open_table(view).refresh(runner="inline", **SIZES, **options)


@pytest.mark.crash
@pytest.mark.parametrize(
    "point", ["apply.step:4", "checkpoint.written:2", "staged.written:1", "swap.before:1", "swap.after:1"]
)
def test_a_changed_column_whose_refresh_is_killed_runs_an_interval_again_at_most(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path / "trace"))
    history = History(random.Random(0), tmp_path)
    view, model = history.view, history.model
    model.fails = dict.fromkeys(INPUTS, False)
    for name in model.code:
        history.deploy(model, name)
    view.refresh(runner="inline", **SIZES)
    history.calls()
    model.code["words"] = 2
    assert history.is_killed(view, point, {"on_code_change": "recompute"})
    assert {row[-1] for row in rows(view)} in ({value("words", code, x) for x in range(40)} for code in (1, 2))
    history.deploy(model, "words")
    view.refresh(runner="inline", on_code_change="recompute", **SIZES)
    model.refresh(True, False)
    found = history.calls()
    assert (found["ocr"], found["language"]) == (0, 0)
    assert 40 <= found["words"] <= 40 + SLACK
    assert rows(view) == history.expected(view)


@pytest.mark.parametrize("seed", slow_after(FAST, range(FIRST, FIRST + HISTORIES)))
def test_a_history_calls_each_function_on_the_rows_that_lack_its_value(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path / "trace"))
    history = History(random.Random(seed), tmp_path)
    history.refresh(monkeypatch)
    for _ in range(4):
        for _ in range(history.dice.randint(0, 3)):
            history.change()
        history.refresh(monkeypatch)
