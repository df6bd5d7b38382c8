"""The protocol, checked whole: every reachable state, every promise, and that each rule of it is needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import airflow_geneva
from tests.model import column, events, exploring, ledgers, view
from tests.model.explore import Step, Violation, check_ends, explore

WITHOUT_A_WRITE = {
    "apply.step": "calls the function: nothing is on disk yet; of a view it is left to the machine of a column",
    "checkpoint.write": "comes before a document is written",
    "staged.write": "comes before a data file is written",
    "finish.begin": "comes before `finish` reads",
    "mirror.write": "comes before the metadata is written",
    "values.check": "comes before expectations are checked",
    "values.checked": "comes after expectations are checked",
    "note.write": "comes before a note is written for readers of the table, which no job reads",
    "ground.write": "comes before an empty view gets a placeholder, without which two swaps would not conflict",
}
OF_OTHER_STEPS = {
    "note.written": "is after a note for readers of the table, which no job reads",
    "swap.ground": "is after an empty view got a placeholder",
    "view.staged": "is in the creation of a view",
    "pack.written": "packs documents, which stay readable",
    "plans.removed": "reduces an old job to its record",
    **dict.fromkeys(("batch.submit", "batch.submitted", "batch.kept"), "talks to a batch API"),
    **dict.fromkeys(("cache.write", "cache.evict", "cache.evicted"), "keeps values of equal inputs"),
    **dict.fromkeys(("limit.before", "limit.after"), "shares a limit"),
    **dict.fromkeys(("index.before", "index.after"), "updates an index"),
    **dict.fromkeys(("promote.before", "promote.after"), "promotes a column"),
    **dict.fromkeys(("copy.cloned", "copy.recorded"), "copies a table"),
    **dict.fromkeys(("groups.create", "groups.before", "groups.after", "groups.rows"), "is of views of groups"),
    "duplicates.clustered": "is of deduplicated views",
}


def actions() -> set[str]:
    """The actions of all machines that are named like fault points."""
    found: set[str] = set()
    for graph in exploring.graphs():
        found |= {action.partition(" (")[0] for _, action in graph.taken}
    words = {word for machine in (column, view, ledgers, events) for word in (*machine.READS, *machine.OTHERS)}
    return found - words


def test_the_actions_are_the_fault_points_of_the_engine() -> None:
    sources = Path(airflow_geneva.__file__).parent.rglob("*.py")
    points = {
        name for path in sources for name in re.findall(r'(?:fault_point\(|before=|after=)"([^"]+)"', path.read_text())
    }
    found = actions()
    assert found <= points
    assert found & OF_OTHER_STEPS.keys() == set()
    assert points - found - WITHOUT_A_WRITE.keys() == set(OF_OTHER_STEPS)
    assert WITHOUT_A_WRITE.keys() | OF_OTHER_STEPS.keys() <= points


@pytest.mark.parametrize("name", exploring.COLUMN_SCOPES)
def test_a_column_keeps_its_promises_in_every_state(name: str) -> None:
    assert len(exploring.explore_column(exploring.COLUMN_SCOPES[name]).came_from) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", exploring.LARGE_COLUMN_SCOPES)
def test_a_column_keeps_its_promises_in_every_state_of_a_large_scope(name: str) -> None:
    assert len(exploring.explore_column(exploring.LARGE_COLUMN_SCOPES[name]).came_from) > 5_000


@pytest.mark.parametrize("name", exploring.VIEW_SCOPES)
def test_a_view_keeps_its_promises_in_every_state(name: str) -> None:
    assert len(exploring.explore_view(exploring.VIEW_SCOPES[name]).came_from) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", exploring.LARGE_VIEW_SCOPES)
def test_a_view_keeps_its_promises_in_every_state_of_a_large_scope(name: str) -> None:
    assert len(exploring.explore_view(exploring.LARGE_VIEW_SCOPES[name]).came_from) > 5_000


@pytest.mark.slow
def test_ledgers_keep_all_facts_in_every_state() -> None:
    assert len(exploring.explore_ledgers().came_from) > 10_000


def test_each_commit_is_announced_once_in_every_state() -> None:
    assert len(exploring.explore_events().came_from) > 1_000


def test_every_rule_has_a_mutant() -> None:
    assert set(exploring.COLUMN_MUTANTS) == set(vars(column.RULES))
    assert set(exploring.VIEW_MUTANTS) == set(vars(view.RULES))
    assert set(exploring.LEDGER_MUTANTS) == set(vars(ledgers.RULES))
    assert set(exploring.EVENT_MUTANTS) == set(vars(events.RULES))


@pytest.mark.parametrize("name", exploring.COLUMN_MUTANTS)
def test_a_column_without_a_rule_breaks_a_promise(name: str) -> None:
    scope, promise = exploring.COLUMN_MUTANTS[name]
    with pytest.raises(Violation, match=f"^{promise}:"):
        exploring.explore_column(scope, exploring.without(column.RULES, name))


@pytest.mark.parametrize("name", exploring.VIEW_MUTANTS)
def test_a_view_without_a_rule_breaks_a_promise(name: str) -> None:
    scope, promise = exploring.VIEW_MUTANTS[name]
    with pytest.raises(Violation, match=f"^{promise}:"):
        exploring.explore_view(scope, exploring.without(view.RULES, name))


@pytest.mark.parametrize("name", exploring.LEDGER_MUTANTS)
def test_ledgers_without_a_rule_lose_facts(name: str) -> None:
    with pytest.raises(Violation, match=f"^{exploring.LEDGER_MUTANTS[name]}:"):
        exploring.explore_ledgers(exploring.without(ledgers.RULES, name))


@pytest.mark.parametrize("name", exploring.EVENT_MUTANTS)
def test_events_without_a_rule_break_a_promise(name: str) -> None:
    with pytest.raises(Violation, match=f"^{exploring.EVENT_MUTANTS[name]}:"):
        exploring.explore_events(exploring.without(events.RULES, name))


def test_what_only_reads_leaves_the_disk_as_it_is() -> None:
    """So a kill needs no fault point there."""
    of_columns = exploring.explore_column(exploring.COLUMN(kills=False, changes=True, cleans=True))
    machine = column.Column(exploring.COLUMN(changes=True, cleans=True))
    for state in of_columns.came_from:
        for process in state.processes[:-1]:
            if process.at not in ("absent", "ended", "stopped"):
                for action, after in machine.next_of(state, process):
                    if action in column.READS:
                        assert after._replace(processes=()) == state._replace(processes=())
    of_views = exploring.explore_view(exploring.VIEW(changes=True))
    views = view.View(exploring.VIEW(changes=True))
    for other in of_views.came_from:
        for process in other.processes[:-1]:
            if process.at not in ("absent", "ended"):
                for action, then in views.next_of(other, process):
                    if action in view.READS:
                        assert then._replace(processes=()) == other._replace(processes=())


def test_the_explorer_finds_what_is_wrong_and_what_never_ends() -> None:
    def count(state: int) -> Iterator[Step[int]]:
        if state < 5:
            yield Step("one", "count", state + 1)

    check_ends(explore([0], count, {}), lambda state: "" if state == 5 else "short")
    with pytest.raises(Violation, match=r"small: 3\n(  one +count\n?){3}$"):
        explore([0], count, {"small": lambda state: "3" if state == 3 else ""})
    with pytest.raises(Violation, match="short"):
        check_ends(explore([0], count, {}), lambda state: "short")

    def round_and_round(state: int) -> Iterator[Step[int]]:
        yield Step("one", "turn", (state + 1) % 3)

    with pytest.raises(Violation, match="3 states from which a way goes round in a circle"):
        check_ends(explore([0], round_and_round, {}), lambda _: "")
