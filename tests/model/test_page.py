"""The page about the protocol has the steps and the states of the model."""

from __future__ import annotations

import re
from pathlib import Path

from tests.model import column, events, exploring, ledgers, view

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
STATES = {
    "table": column.State,
    "data files": column.State,
    "range checkpoints": column.State,
    "fragment checkpoints": column.State,
    "facts": column.State,
    "marks": column.State,
    "jobs": column.State,
    "view": view.State,
    "snapshots": view.State,
    "intents": view.State,
    "metadata": view.State,
    "note": view.State,
    "outbox": events.State,
}
"""The states of the page, with the machine that has them."""
FIELDS = {
    column.State: {"table", "files", "rows", "staged", "facts", "unmarked", "jobs"},
    view.State: {"history", "mirrored", "intents", "snapshots", "note"},
    events.State: {"marks"},
}
BESIDE_THE_DISK = {
    # What follows from versions, what may still happen, and what the machine of a column has.
    column.State: {"known_then", "of_a_job", "processes", "cleanup", "left", "quiet"},
    view.State: {"source", "forgotten", "staged", "plans", "processes", "found", "left", "quiet"},
    events.State: {"versions", "events", "ended", "processes", "cleared"},
}


def test_the_page_has_a_paragraph_for_each_step() -> None:
    taken = {action for graph in exploring.graphs() for _, action in graph.taken}
    others = {word for machine in (column, view, ledgers, events) for word in (*machine.READS, *machine.OTHERS)}
    parts = re.findall(r"^#### `([^`]+)`\n\n(.+?)(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in parts} == taken | others
    assert len(parts) == len({name for name, _ in parts})
    assert all(len(text) > 30 for _, text in parts)


def test_the_page_has_a_row_for_each_state_on_disk() -> None:
    table = PAGE.partition("## What is on disk")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == list(STATES)
    for machine, fields in FIELDS.items():
        assert fields | BESIDE_THE_DISK[machine] == set(machine._fields)
        assert len(fields) == sum(one is machine for one in STATES.values())
