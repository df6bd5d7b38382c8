"""Explore the machines whole: which scopes, and which mutant breaks which promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.model import column, events, ledgers, view
from tests.model.explore import Graph, check_ends, explore

COLUMN = column.Scope
VIEW = view.Scope


def explore_column(scope: column.Scope, rules: column.Rules = column.RULES) -> Graph[column.State]:
    machine = column.Column(scope, rules)
    graph = explore([column.start(scope)], machine.steps, column.invariants(machine))
    check_ends(graph, column.at_the_end(machine))
    return graph


def explore_view(scope: view.Scope, rules: view.Rules = view.RULES) -> Graph[view.State]:
    machine = view.View(scope, rules)
    graph = explore([view.start(scope)], machine.steps, view.invariants(machine))
    check_ends(graph, view.at_the_end(machine))
    return graph


def explore_ledgers(rules: ledgers.Rules = ledgers.RULES) -> Graph[ledgers.State]:
    graph = explore([ledgers.start()], ledgers.Ledgers(rules).steps, ledgers.INVARIANTS)
    check_ends(graph, ledgers.at_the_end)
    return graph


def explore_events(rules: events.Rules = events.RULES) -> Graph[events.State]:
    graph = explore([events.start()], events.Events(rules).steps, events.INVARIANTS)
    check_ends(graph, events.at_the_end)
    return graph


def graphs() -> Iterator[Graph[column.State] | Graph[view.State] | Graph[ledgers.State] | Graph[events.State]]:
    """Yield small explorations that take every action."""
    yield explore_column(COLUMN(changes=True, intervals=True))
    yield explore_column(COLUMN(kills=False, cleans=True))
    yield explore_view(VIEW(kills=False, shown=True, changes=True, notes=True, orphan=True))
    yield explore_view(VIEW(kills=False, shown=True, changes=True, cleans=True))
    yield explore([ledgers.start(kills=0)], ledgers.Ledgers().steps, ledgers.INVARIANTS)
    yield explore_events()


def without(rules: Any, name: str) -> Any:
    return replace(rules, **{name: False})


COLUMN_SCOPES = {
    "kills and a change": COLUMN(changes=True),
    "a vacuum": COLUMN(vacuums=True),
    "checkpoints of rows": COLUMN(changes=True, intervals=True),
    "a cleanup": COLUMN(cleans=True),
}
LARGE_COLUMN_SCOPES = {
    "a change and a compaction": COLUMN(changes=True, compacts=True),
    "two jobs, and nobody is killed": COLUMN(kills=False, two_jobs=True, changes=True),
    "two jobs": COLUMN(two_jobs=True),
    "an orphan": COLUMN(orphan=True),
    "a change, a compaction and a vacuum": COLUMN(changes=True, compacts=True, vacuums=True),
    "a change, a compaction, checkpoints of rows": COLUMN(changes=True, compacts=True, intervals=True),
    "a cleanup and a change": COLUMN(cleans=True, changes=True),
}
VIEW_SCOPES = {
    "kills and changes": VIEW(changes=True, notes=True),
    "a cleanup of snapshots": VIEW(changes=True, cleans=True),
    "two jobs, and nobody is killed": VIEW(kills=False, two_jobs=True, changes=True),
}
LARGE_VIEW_SCOPES = {
    "old versions are removed": VIEW(changes=True, forgets=True),
    "old versions are removed, and two jobs": VIEW(kills=False, two_jobs=True, changes=True, forgets=True),
    "two jobs": VIEW(two_jobs=True),
    "an orphan": VIEW(orphan=True),
    "others change rows of the view": VIEW(changes=True, rewrites=True),
}

# The rule that a mutant lacks, with a scope in which this is seen, and the promise that it breaks.
COLUMN_MUTANTS = {
    "verifies": (COLUMN(changes=True), "end"),
    "looks_after_the_commit": (COLUMN(vacuums=True), "what counts as computed is right"),
    "records_facts_first": (COLUMN(), "facts are there before the commit"),
    "facts_name_the_inputs": (COLUMN(changes=True), "what counts as computed is right"),
    "asks_unfinished_jobs_for_their_values": (COLUMN(changes=True), "end"),
    "checks_files_of_unfinished_jobs": (COLUMN(vacuums=True), "what counts as computed is right"),
    "replaces_removed_files": (COLUMN(vacuums=True), "end"),
    "file_before_its_checkpoint": (COLUMN(), "what a checkpoint keeps stays"),
    "cleanup_looks_at_jobs_again": (COLUMN(cleans=True), "what a checkpoint keeps stays"),
    "cleanup_looks_at_versions_again": (COLUMN(cleans=True), "what counts as computed is right"),
    "follows_moved_rows": (COLUMN(vacuums=True), "who says DONE is right"),
}
VIEW_MUTANTS = {
    "looks_before_the_swap": (VIEW(changes=True), "it shows what it is known to show"),
    "swaps_conflict": (VIEW(kills=False, shown=True, two_jobs=True, changes=True), "it shows what it is known to show"),
    "snapshot_first": (VIEW(), "the snapshot of what it shows is there"),
    "intent_first": (VIEW(changes=True, forgets=True), "it shows what it is known to show"),
    "believes_metadata_without_other_intents_only": (
        VIEW(changes=True, forgets=True),
        "it shows what it is known to show",
    ),
    "knows_its_own_swap": (VIEW(changes=True), "end"),
    "keeps_intents_of_unknown_outcome": (VIEW(changes=True, forgets=True), "it shows what it is known to show"),
    "note_names_its_swap": (
        VIEW(kills=False, shown=True, two_jobs=True, changes=True, notes=True),
        "it shows what it is known to show",
    ),
    "counts_what_came_since_it_looked": (VIEW(changes=True, rewrites=True), "it shows what it is known to show"),
    "ignores_swaps_that_come_too_late": (
        VIEW(kills=False, two_jobs=True, changes=True, forgets=True),
        "it shows what it is known to show",
    ),
    "watermark_after_the_swap": (VIEW(changes=True, forgets=True), "it shows what it is known to show"),
    "cleanup_keeps_intents": (VIEW(changes=True, cleans=True), "the snapshot of what it shows is there"),
}
LEDGER_MUTANTS = {
    "covers_what_it_read": "no fact is lost",
    "removes_what_earlier_folds_cover": "no fact is lost",
    "lists_again_if_one_is_missing": "every reader finds them",
}
EVENT_MUTANTS = {
    "marks_before_it_commits": "end",
    "keeps_the_first_mark": "no event is about nothing",
    "removes_marks_of_announced_jobs_only": "no event is about nothing",
    "removes_marks_of_ended_jobs_only": "end",
    "keeps_marks_of_later_commits": "end",
    "one_finish_at_a_time": "no commit is announced twice",
}
