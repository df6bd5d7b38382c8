"""Random histories, with kills, of a view: functions fail, are repaired and change, and columns come and go."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine import faults
from airflow_geneva.engine.commit.view_state import CommittedViewState
from airflow_geneva.errors import GenevaError
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import TRACE, Trace
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.udfs_for_tests.columns import IN_FLIGHT, deploy, is_bad, value

SOAK = os.environ.get("GENEVA_SOAK") == "1"
HISTORIES = int(os.environ.get("GENEVA_HISTORIES", "1000" if SOAK else "25"))
SIZES: dict[str, Any] = {"checkpoint_size": 5, "batch_size": 5, "checkpoint_interval": 0.0}
INPUTS = {"ocr": "x", "language": "ocr", "words": "x", "chars": "x"}
MOST_RUNS, FAST = 3, 6
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
    """What the view holds, and what a refresh has to call."""

    code: dict[str, int]
    fails: dict[str, bool]
    source: dict[int, int] = field(default_factory=dict)
    shown: dict[int, tuple[int, dict[str, Cell]]] = field(default_factory=dict)

    def refresh(self, recompute: bool, errors_only: bool) -> tuple[Counter[str], int]:
        """Bring the model up to date; return the calls of each function, and the number of rows that failed."""
        calls, failed = Counter[str](), 0
        if not errors_only:
            self.shown = {i: row for i, row in self.shown.items() if self.source.get(i) == row[0]}
        for i, x in self.source.items() if not errors_only else [(i, x) for i, (x, _) in self.shown.items()]:
            x, cells = self.shown.setdefault(i, (x, {}))
            due = {
                name for name in self.code if self._is_due(name, cells.get(name), bool(cells), recompute, errors_only)
            }
            due |= {"language"} if "ocr" in due else set()
            for name in self.code:
                if name in due:
                    calls[name] += 1
                    failed += not self._run(name, x, cells)
        return calls, failed

    def _is_due(self, name: str, cell: Cell | None, known: bool, recompute: bool, errors_only: bool) -> bool:
        if cell is None:
            return not (errors_only and known)
        if cell.runs and (errors_only or cell.runs < MOST_RUNS or cell.code != self.code[name]):
            return True
        return recompute and not errors_only and cell.code != self.code[name]

    def _run(self, name: str, x: int, cells: dict[str, Cell]) -> bool:
        given = x if INPUTS[name] == "x" else cells["ocr"].value
        code, before = self.code[name], cells.get(name)
        if self.fails[name] and is_bad(given):
            runs = before.runs if before is not None and before.code == code else 0
            cells[name] = Cell(code, None, runs + 1)
            return False
        cells[name] = Cell(code, value(name, code, given))
        return True

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(
            (i, *(cells[name].value if name in cells else None for name in self.code))
            for i, (_, cells) in self.shown.items()
        )


@dataclass
class History:
    dice: random.Random
    folder: Path

    def __post_init__(self) -> None:
        self.version = 1
        self.model = Model(dict.fromkeys(("ocr", "language", "words"), 1), dict.fromkeys(INPUTS, False))
        self.model.fails["ocr"] = self.model.fails["words"] = True
        db = connect(self.folder / "db")
        self.model.source = {i: i for i in range(40)}
        data = {"id": pa.array(range(40), pa.int64()), "x": pa.array(range(40), pa.int64())}
        self.table: Table = db.create_table("docs", pa.table(data), max_rows_per_file=15)
        columns = {name: self.deploy(name) for name in self.model.code}
        query = self.table.query().select(["id"]).add_columns(columns)
        self.view: View = query.create_materialized_view(db, "v")
        self.newest = 40

    def deploy(self, name: str) -> Any:
        return deploy(name, self.model.code[name], INPUTS[name], self.model.fails[name])

    def change(self) -> None:
        """Change the source, the code or the columns."""
        table, view, model, dice = self.table, self.view, self.model, self.dice
        what = dice.choice(["add", "update", "delete", "compact", "compact view", "code", "code", "fix", "column"])
        if what == "add":
            new = range(self.newest, self.newest + dice.randint(1, 8))
            self.newest = new.stop
            table.add([{"id": i, "x": i} for i in new])
            model.source |= {i: i for i in new}
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
            view.lance.optimize.compact_files()
        elif what in ("code", "fix"):
            name = dice.choice(list(model.code))
            self.version += 1
            model.code[name] = self.version
            model.fails[name] = dice.random() < 0.3 if what == "code" and name != "language" else False
            self.deploy(name)
        elif "chars" in model.code:
            view.drop_columns(["chars"])
            del model.code["chars"]
            for _, cells in model.shown.values():
                cells.pop("chars", None)
        else:
            self.version += 1
            model.code["chars"], model.fails["chars"] = self.version, dice.random() < 0.5
            view.add_columns({"chars": self.deploy("chars")})

    def refresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        dice, model = self.dice, self.model
        how = dice.choice(["new_rows", "recompute", "recompute", "errors_only"])
        if not model.shown:
            how = "new_rows"
        options: dict[str, Any] = {"errors_only": True} if how == "errors_only" else {"on_code_change": how}
        asked, expected, slack = (how == "recompute", how == "errors_only"), Counter[str](), 0
        if dice.random() < 0.4:
            before = self.state()
            if not self.dies(monkeypatch, options) or self.state() != before:
                # The next refresh is another run of what failed.
                expected += model.refresh(*asked)[0]
            else:
                # Rows that failed run again, beside those of an interval.
                _, failed = Model(model.code, model.fails, model.source, copy(model.shown)).refresh(*asked)
                slack = SLACK + failed
        self.view.refresh(runner="inline", **SIZES, **options)
        expected += model.refresh(*asked)[0]
        found = self.calls()
        assert all(expected[name] <= found[name] <= expected[name] + slack for name in INPUTS), (found, expected, how)
        assert self.rows() == model.rows()

    def dies(self, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> bool:
        """Run a refresh that may end at some point; return whether it did."""

        def die(_process: int, _signal: int) -> None:
            faults._ARMED = ""
            raise Died

        with monkeypatch.context() as patched:
            patched.setattr(faults.os, "kill", die)
            faults._hits, faults._ARMED = 0, f"any:{self.dice.randint(1, 60)}"
            try:
                self.view.refresh(runner="inline", **SIZES, **options)
            except (Died, GenevaError):
                return True
            finally:
                faults._ARMED = ""
        return False

    def state(self) -> Any:
        found = CommittedViewState(self.view.location, self.view.lance)
        return found.newest.identity, found.snapshot and found.snapshot.to_batch()

    def calls(self) -> Counter[str]:
        found = Counter[str]()
        for name in INPUTS:
            trace = Trace(self.folder / f"trace.{name}")
            found[name] = len(trace)
            trace.clear()
        return found

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(tuple(row.values()) for row in self.view.to_arrow().to_pylist())


def refresh_and_die(database: str, fault: str) -> None:
    """Recompute a changed column in this process, which may not live to see the end; called in a forked one."""
    for name, code in {"ocr": 1, "language": 1, "words": 2}.items():
        deploy(name, code, INPUTS[name])
    Fault(fault).arm()
    connect(database).open_table("v").refresh(runner="inline", on_code_change="recompute", **SIZES)


@pytest.mark.crash
@pytest.mark.parametrize(
    "point", ["apply.step:4", "checkpoint.written:2", "staged.written:1", "swap.before:1", "swap.after:1"]
)
def test_a_changed_column_whose_refresh_is_killed_runs_an_interval_again_at_most(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path / "trace"))
    history = History(random.Random(0), tmp_path)
    history.model.fails = dict.fromkeys(INPUTS, False)
    for name in history.model.code:
        history.deploy(name)
    history.view.refresh(runner="inline", **SIZES)
    history.calls()
    arguments = {"database": history.view.location.database_uri, "fault": point}
    environment = {TRACE: str(tmp_path / "trace")}
    assert forge().run("tests.promises.test_view_columns:refresh_and_die", arguments, environment) == -signal.SIGKILL
    assert {row[3] for row in history.rows()} in ({value("words", code, x) for x in range(40)} for code in (1, 2))
    history.model.code["words"] = 2
    history.deploy("words")
    history.view.refresh(runner="inline", on_code_change="recompute", **SIZES)
    history.model.refresh(True, False)
    found = history.calls()
    assert (found["ocr"], found["language"]) == (0, 0)
    assert 40 <= found["words"] <= 40 + SLACK
    assert history.rows() == history.model.rows()


def copy(shown: dict[int, tuple[int, dict[str, Cell]]]) -> dict[int, tuple[int, dict[str, Cell]]]:
    return {
        i: (x, {name: Cell(cell.code, cell.value, cell.runs) for name, cell in cells.items()})
        for i, (x, cells) in shown.items()
    }


@pytest.mark.parametrize("seed", [pytest.param(at, marks=[pytest.mark.slow] * (at >= FAST)) for at in range(HISTORIES)])
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
