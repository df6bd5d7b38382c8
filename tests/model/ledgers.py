"""The ledgers of a column as a state machine: jobs append facts, fold ledgers and remove them, while a plan reads.

A ledger is immutable. A fold is a ledger with the facts of all that it covers; readers skip what it covers. A damaged
fold counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explore import Check, Step

READS = {
    "list": "lists the ledgers of the column",
    "read": "reads the ledgers that it has listed, and lists again if one is missing",
}
OTHERS = {"kill": "ends a process", "damage": "damages the newest fold"}


@dataclass(frozen=True)
class Rules:
    """What the protocol does; a mutant lacks one of these."""

    covers_what_it_read: bool = True
    removes_what_earlier_folds_cover: bool = True
    lists_again_if_one_is_missing: bool = True


RULES = Rules()
FOLD_AFTER = 2
"""As many ledgers that no fold covers are folded."""
MOST_KILLS = 1
"""Without an end of kills two jobs may fold the folds of each other for ever."""


class Ledger(NamedTuple):
    """Facts, here numbers; a fold has a place in time from 1, and names what it covers."""

    name: str
    facts: frozenset[int]
    time: int = 0
    covers: frozenset[str] = frozenset()


class Process(NamedTuple):
    """A job that still has facts to record, or a plan, which has none and only reads."""

    name: str
    at: str = "start"
    facts: tuple[int, ...] = ()
    listed: frozenset[str] = frozenset()
    read: frozenset[Ledger] = frozenset()
    there: frozenset[int] = frozenset()


class State(NamedTuple):
    ledgers: frozenset[Ledger]
    damaged: frozenset[str]
    recorded: frozenset[int]
    processes: tuple[Process, ...]
    may_damage: bool
    kills: int

    def with_process(self, process: Process) -> State:
        return self._replace(processes=tuple(process if one.name == process.name else one for one in self.processes))


def start(kills: int = MOST_KILLS) -> State:
    processes = Process("A", facts=(1, 2)), Process("B", facts=(3,)), Process("plan")
    return State(frozenset(), frozenset(), frozenset(), processes, True, kills)


class Ledgers:
    """The steps of the machine."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step[State]]:
        for process in state.processes:
            for action, after in self.next_of(state, process):
                yield Step(process.name, action, after)
            if process.at not in ("start", "ended") and state.kills:
                again = state.with_process(Process(process.name, "start", process.facts))
                yield Step(process.name, "kill", again._replace(kills=state.kills - 1), fair=False)
        folds = [ledger for ledger in state.ledgers if ledger.time]
        if state.may_damage and folds:
            damaged = frozenset({max(folds, key=lambda one: one.time).name})
            yield Step("store", "damage", state._replace(damaged=damaged, may_damage=False), fair=False)

    def next_of(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        at = process.at
        if at == "start" and process.facts:
            fact = process.facts[0]
            ledger = Ledger(f"{process.name}{fact}", frozenset({fact}))
            after = state._replace(ledgers=state.ledgers | {ledger}, recorded=state.recorded | {fact})
            rest = process._replace(at="checkpoint.written (ledger)", facts=process.facts[1:])
            yield "checkpoint.written (ledger)", after.with_process(rest)
        elif at == "checkpoint.written (ledger)" and process.facts:
            yield from self.next_of(state, process._replace(at="start"))
        elif at in ("start", "checkpoint.written (ledger)"):
            listed = frozenset(ledger.name for ledger in state.ledgers)
            yield "list", state.with_process(process._replace(at="list", listed=listed, there=state.recorded))
        elif at == "list":
            yield self.read(state, process)
        elif at == "read" and (process.name == "plan" or len(current(process.read)) < FOLD_AFTER):
            yield "finish.end", state.with_process(Process(process.name, "ended"))
        elif at == "read":
            time = 1 + max((ledger.time for ledger in state.ledgers), default=0)
            read = current(process.read)
            everything = process.read if self.rules.covers_what_it_read else state.ledgers
            covers = frozenset(one.name for one in everything).union(*(one.covers for one in everything))
            fold = Ledger(f"{process.name} fold {time}", facts_of(read), time, covers)
            after = state._replace(ledgers=state.ledgers | {fold})
            yield "fold.written", after.with_process(process._replace(at="fold.written"))
        elif at == "fold.written":
            read = current(process.read)
            gone = {one.name for one in process.read - read}
            if not self.rules.removes_what_earlier_folds_cover:
                gone |= {one.name for one in read}
            left = frozenset(one for one in state.ledgers if one.name not in gone)
            yield "file.removed", state._replace(ledgers=left).with_process(Process(process.name, "ended"))

    def read(self, state: State, process: Process) -> tuple[str, State]:
        found = readable(state, process.listed)
        now = frozenset(ledger.name for ledger in state.ledgers)
        needed = process.listed - frozenset().union(*(ledger.covers for ledger in found))
        if needed - now and self.rules.lists_again_if_one_is_missing:
            return "list", state.with_process(process._replace(listed=now))
        return "read", state.with_process(process._replace(at="read", read=found))


def readable(state: State, names: frozenset[str]) -> frozenset[Ledger]:
    return frozenset(one for one in state.ledgers if one.name in names and one.name not in state.damaged)


def current(read: frozenset[Ledger]) -> frozenset[Ledger]:
    """The ledgers that no newer fold covers, as `load_state` of `engine/checkpoint/facts.py` finds them."""
    covered = set[str]()
    kept = set[Ledger]()
    for ledger in sorted(read, key=lambda one: -one.time):
        if ledger.name not in covered:
            kept.add(ledger)
            covered |= ledger.covers
    return frozenset(kept)


def facts_of(ledgers: frozenset[Ledger]) -> frozenset[int]:
    return frozenset[int]().union(*(one.facts for one in ledgers))


def no_fact_is_lost(state: State) -> str:
    found = facts_of(current(readable(state, frozenset(one.name for one in state.ledgers))))
    return f"facts {sorted(state.recorded - found)} are gone" if state.recorded - found else ""


def every_reader_finds_them(state: State) -> str:
    for process in state.processes:
        if process.at == "read" and (missed := process.there - facts_of(current(process.read))):
            return f"{process.name} misses facts {sorted(missed)}"
    return ""


INVARIANTS: dict[str, Check[State]] = {
    "no fact is lost": no_fact_is_lost,
    "every reader finds them": every_reader_finds_them,
}


def at_the_end(state: State) -> str:
    return "" if all(process.at == "ended" for process in state.processes) else "a process does not end"
