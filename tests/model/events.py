"""The events of a column as a state machine: runs commit, and each commit is announced by one event, whoever is killed.

A run has the tasks plan, commit and finish. A killed task is tried again, unless its run is given up. Airflow records
the event of a finish together with its success.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explore import Check, Step

READS = {"ask": "reads the marks, then the versions of the table and the newest event"}
OTHERS = {
    "kill": "ends a process",
    "clear": "lets a run plan again that has committed",
    "give up": "ends a run for good, at any of its tasks",
    "event": "Airflow records that a finish has succeeded, with its event",
}
LAST = "C"
"""The run that comes when the others have ended, finds nothing to compute, and that nothing stops."""


@dataclass(frozen=True)
class Rules:
    """What the protocol does; a mutant lacks one of these."""

    marks_before_it_commits: bool = True
    keeps_the_first_mark: bool = True
    removes_marks_of_announced_jobs_only: bool = True
    removes_marks_of_ended_jobs_only: bool = True
    keeps_marks_of_later_commits: bool = True
    one_finish_at_a_time: bool = True


RULES = Rules()


class Mark(NamedTuple):
    """A job whose commits after a version may not be announced."""

    job: str
    since: int


class Event(NamedTuple):
    """All commits after `since`, up to `to`."""

    since: int
    to: int


class Process(NamedTuple):
    """A run, at the fault point that it passed last, with what its finish has found."""

    name: str
    at: str = "start"
    marks: frozenset[Mark] = frozenset()
    versions: int = 0
    event: Event | None = None


class State(NamedTuple):
    """The versions of the table by the run that committed each, the marks, what Airflow knows, and the runs."""

    versions: tuple[str, ...]
    marks: frozenset[Mark]
    events: tuple[Event, ...]
    ended: frozenset[str]
    processes: tuple[Process, ...]
    cleared: bool = False

    def with_process(self, process: Process) -> State:
        return self._replace(processes=tuple(process if one.name == process.name else one for one in self.processes))


FINISHING = ("commit.after", "finish.end", "ask", "file.removed (mark)")
RUNS = {"start": "plan", "plan.saved": "commit", **dict.fromkeys(FINISHING, "finish")}
BEGINS = {"plan": "start", "commit": "plan.saved", "finish": "commit.after"}
"""Where a task begins again after a kill."""
OVER = {"ended", "given up"}


def start() -> State:
    return State((), frozenset(), (), frozenset(), (Process("A"), Process("B"), Process(LAST)))


class Events:
    """The steps of the machine."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step[State]]:
        others_are_over = all(one.at in OVER for one in state.processes if one.name != LAST)
        for process in state.processes:
            name, at = process.name, process.at
            if at in OVER or (name == LAST and not others_are_over):
                continue
            for action, after in self.next_of(state, process):
                yield Step(name, action, after)
            if at != "start":
                again = Process(name, BEGINS[RUNS.get(at, "finish")])
                yield Step(name, "kill", state.with_process(again), fair=False)
            if name != LAST:
                yield Step(name, "give up", state.with_process(Process(name, "given up")), fair=False)
            if name != LAST and at == "commit.after" and not state.cleared:
                cleared = state.with_process(Process(name))._replace(cleared=True)
                yield Step(name, "clear", cleared, fair=False)

    def next_of(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        name, at = process.name, process.at
        newest = len(state.versions)
        if at == "start":
            before = self.rules.marks_before_it_commits and name != LAST
            marked = state._replace(marks=self.marked(state, name, newest)) if before else state
            marked = marked._replace(ended=state.ended - {name})  # the record of the new plan has no end
            at = "commit.after" if name == LAST else "plan.saved"
            yield "plan.saved", marked.with_process(Process(name, at))
        elif at == "plan.saved":
            after = state._replace(versions=(*state.versions, name))
            at = "commit.after" if self.rules.marks_before_it_commits else "commit.after (unmarked)"
            yield "commit.after", after.with_process(process._replace(at=at))
        elif at == "commit.after (unmarked)":
            marked = state._replace(marks=self.marked(state, name, newest - 1))
            yield "plan.saved", marked.with_process(process._replace(at="commit.after"))
        elif at == "commit.after":
            after = state._replace(ended=state.ended | {name})
            yield "finish.end", after.with_process(process._replace(at="finish.end"))
        elif at == "finish.end":
            finishing = any(one.at in FINISHING[2:] for one in state.processes if one.name != name)
            if not (finishing and self.rules.one_finish_at_a_time):
                yield "ask", self.asked(state, process)
        elif at == "ask" and (gone := self.done(state, process)):
            less = state._replace(marks=state.marks - gone)
            yield "file.removed (mark)", less.with_process(process._replace(at="file.removed (mark)"))
        else:
            events = state.events if process.event is None else (*state.events, process.event)
            yield "event", state._replace(events=events).with_process(Process(name, "ended"))

    def marked(self, state: State, name: str, since: int) -> frozenset[Mark]:
        own = frozenset(mark for mark in state.marks if mark.job == name)
        if own and self.rules.keeps_the_first_mark:
            return state.marks
        return state.marks - own | {Mark(name, since)}

    def asked(self, state: State, process: Process) -> State:
        known = announced(state)
        jobs = {mark.job: mark.since for mark in state.marks}
        after = max(known, min(jobs.values(), default=len(state.versions)))
        found = [at for at, by in enumerate(state.versions, 1) if at > after and by in jobs]
        since = known or min((jobs[state.versions[at - 1]] for at in found), default=0)
        event = Event(since, max(found)) if found else None
        return state.with_process(
            process._replace(at="ask", marks=state.marks, versions=len(state.versions), event=event)
        )

    def done(self, state: State, process: Process) -> frozenset[Mark]:
        """The marks that a finish removes."""
        return frozenset(mark for mark in process.marks & state.marks if self.is_done(state, process, mark))

    def is_done(self, state: State, process: Process, mark: Mark) -> bool:
        """Whether a finish removes a mark."""
        if self.rules.removes_marks_of_ended_jobs_only and mark.job not in state.ended:
            return False
        if self.rules.keeps_marks_of_later_commits and mark.job in state.versions[process.versions :]:
            return False
        event = process.event
        told = event is not None and mark.job in state.versions[event.since : event.to]
        return not (told and self.rules.removes_marks_of_announced_jobs_only)


def announced(state: State) -> int:
    """The version up to which the newest event says what was committed; 0 if there is no event."""
    return state.events[-1].to if state.events else 0


def no_commit_is_announced_twice(state: State) -> str:
    for at, by in enumerate(state.versions, 1):
        told = sum(event.since < at <= event.to for event in state.events)
        if told > 1:
            return f"version {at} of {by} is in {told} events"
    return ""


def no_event_is_about_nothing(state: State) -> str:
    return "an event has no commit" if any(event.since >= event.to for event in state.events) else ""


INVARIANTS: dict[str, Check[State]] = {
    "no commit is announced twice": no_commit_is_announced_twice,
    "no event is about nothing": no_event_is_about_nothing,
}


def at_the_end(state: State) -> str:
    if any(process.at not in OVER for process in state.processes):
        return "a run does not end"
    told = {version for event in state.events for version in range(event.since + 1, event.to + 1)}
    return "" if len(told) == len(state.versions) else "a commit is not announced"
