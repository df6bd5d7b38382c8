"""A view as a state machine: two refreshes, an orphan, a source that changes, a writer and a cleanup.

The source has version 0 and, after a change, 1. The view shows one of them as a whole, so its content is the version of
the source that its newest swap shows; `None` before the first. The history of the view is the list of its commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explore import Check, Step

READS = {
    "plan": "reads source and view, its newest swap and its snapshot, and decides what is due",
    "resume": "reads the saved plan of a job that was killed",
    "look": "reads the newest swap of the view, before its own",
}
OTHERS = {
    "kill": "ends a process",
    "unsure": "a swap lands, and the store says that it conflicts: its own retry met it",
    "find": "a cleanup finds snapshots that nothing names",
    "replace": "starts a job again whose process is thought to be dead, and goes on as an orphan",
    "change": "another writer changes the source",
    "note": "another writer changes rows of the source that the view does not show",
    "forget": "pylance removes the old versions of the view, with their transactions",
    "rewrite": "another writer changes rows of the view",
}


@dataclass(frozen=True)
class Rules:
    """What the protocol does; a mutant lacks one of these."""

    looks_before_the_swap: bool = True
    swaps_conflict: bool = True
    snapshot_first: bool = True
    intent_first: bool = True
    believes_metadata_without_other_intents_only: bool = True
    knows_its_own_swap: bool = True
    keeps_intents_of_unknown_outcome: bool = True
    note_names_its_swap: bool = True
    counts_what_came_since_it_looked: bool = True
    ignores_swaps_that_come_too_late: bool = True
    watermark_after_the_swap: bool = True
    cleanup_keeps_intents: bool = True


@dataclass(frozen=True)
class Scope:
    """What takes part in one exploration."""

    kills: bool = True
    two_jobs: bool = False
    orphan: bool = False
    changes: bool = False
    notes: bool = False
    forgets: bool = False
    rewrites: bool = False
    cleans: bool = False
    shown: bool = False
    """Whether the view shows its source at the start."""


RULES = Rules()


MIXED = -1
"""Content that is that of no version of the source."""


class Snapshot(NamedTuple):
    """A document of a job: the rows of a version of the source, whose content is a number."""

    by: str
    source: int
    content: int


class Commit(NamedTuple):
    """A version of the view, and what it shows.

    Args:
        kind: `swap`, `rows` of another writer, `compaction` or `metadata`.
        looked_at: how many versions there were when the swap was prepared.
        late: snapshot and plan of a swap that Lance accepted under the number of this version, which was removed.
    """

    kind: str
    snapshot: Snapshot | None = None
    plan: str = ""
    looked_at: int = 0
    content: int | None = None
    late: tuple[Snapshot | None, str] | None = None


class Shown(NamedTuple):
    """The newest swap; `changed` is the place after the newest change by another writer since, -1 if unknown."""

    snapshot: Snapshot | None
    changed: int = 0


UNKNOWN = Shown(None, -1)


class Plan(NamedTuple):
    """What a refresh will do.

    Args:
        rows: whether rows of the view are to be replaced; else only the version of the source is newer.
        whole: whether all rows are replaced, because nothing is known about those that are there.
    """

    key: str
    source: int
    content: int
    based_on: Shown
    rows: bool
    whole: bool
    idle: bool

    @property
    def base(self) -> int | None:
        return None if self.based_on.snapshot is None else self.based_on.snapshot.content


class Process(NamedTuple):
    """A process of a job, at the fault point that it passed last, with what it holds in memory."""

    name: str
    at: str = "start"
    plan: Plan | None = None
    snapshot: Snapshot | None = None
    looked: int = -1
    begun: frozenset[Snapshot] = frozenset()
    left: bool = False

    @property
    def job(self) -> str:
        return "A" if self.name == "orphan" else self.name


class State(NamedTuple):
    """Everything that lies on disk, then the processes, then what may still happen.

    `forgotten` is the number of commits, from the oldest, whose transactions were removed.
    """

    source: tuple[int, int]
    history: tuple[Commit, ...]
    forgotten: int
    mirrored: Snapshot | None
    intents: frozenset[Snapshot]
    snapshots: frozenset[Snapshot]
    note: tuple[Snapshot, Snapshot] | None
    staged: frozenset[int]
    plans: tuple[tuple[str, Plan | None], ...]
    processes: tuple[Process, ...]
    found: frozenset[Snapshot] | None
    left: frozenset[str]
    quiet: bool

    @property
    def content(self) -> int | None:
        """What a reader of the newest version sees."""
        return self.history[-1].content if self.history else None

    def with_process(self, process: Process) -> State:
        return self._replace(processes=tuple(process if one.name == process.name else one for one in self.processes))

    def with_plan(self, job: str, plan: Plan | None) -> State:
        return self._replace(plans=tuple((name, plan if name == job else other) for name, other in self.plans))


def start(scope: Scope) -> State:
    names = ["A", *(["B"] if scope.two_jobs else []), *(["orphan"] if scope.orphan else [])]
    wanted = {"orphan", "changes", "notes", "forgets", "rewrites", "cleans"}
    left = frozenset(name for name, there in vars(scope).items() if there and name in wanted)
    processes = tuple(Process(name, "absent" if name == "orphan" else "start") for name in [*names, "quiet"])
    plans: tuple[tuple[str, Plan | None], ...] = tuple((name, None) for name in [*names, "quiet"] if name != "orphan")
    new = State((0, 0), (), 0, None, *[frozenset()] * 2, None, frozenset(), plans, processes, None, left, False)  # type: ignore[arg-type]
    if not scope.shown:
        return new
    first = Snapshot("first", 0, 0)
    history = Commit("swap", first, "first", 0, 0), Commit("metadata", content=0)
    return new._replace(history=history, mirrored=first, snapshots=frozenset({first}), staged=frozenset({0}))


class View:
    """The steps of the machine."""

    def __init__(self, scope: Scope, rules: Rules = RULES) -> None:
        self.scope = scope
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step[State]]:
        alive = [one for one in state.processes if one.name != "quiet" and one.at not in ("absent", "ended")]
        for process in alive:
            for action, after in self.next_of(state, process):
                yield Step(process.name, action, tidied(after))
            if process.at != "start" and self.scope.kills:
                gone = Process(process.name, "absent" if process.name == "orphan" else "start")
                yield Step(process.name, "kill", tidied(state.with_process(gone)), fair=False)
        if not state.quiet:
            for actor, action, after in self.others(state):
                yield Step(actor, action, tidied(after), fair=False)
        quiet = state.processes[-1]
        if not alive and quiet.at != "ended":
            for action, after in self.next_of(state._replace(quiet=True), quiet):
                yield Step("quiet", action, tidied(after))

    # The protocol.

    def next_of(self, state: State, process: Process) -> Iterator[tuple[str, State]]:  # noqa: C901, one branch a point
        """What a process may do next."""
        at, plan = process.at, process.plan
        saved = dict(state.plans)[process.job]

        def moved(action: str, state: State = state, **memory: object) -> tuple[str, State]:
            return action, state.with_process(process._replace(at=action, **memory))  # type: ignore[arg-type]

        if at == "start":
            if saved is not None:
                yield "resume", state.with_process(process._replace(at="plan.saved", plan=saved))
            yield moved("plan", plan=self.plan(state, process))
            return
        assert plan is not None
        if at == "plan":
            yield moved("plan.saved", state.with_plan(process.job, plan))
        elif at == "plan.saved" and plan.rows and plan.content not in state.staged:
            yield moved("checkpoint.written (file)", state._replace(staged=state.staged | {plan.content}))
        elif at in ("plan.saved", "checkpoint.written (file)", "unsure"):
            yield self.finish(state, process) if plan.idle else self.look(state, process)
        elif at == "looked":
            if self.rules.snapshot_first:
                yield self.save_snapshot(state, process)
            else:
                action = "swap.before" if plan.rows else "snapshot.written"
                yield moved(action, snapshot=self.new_snapshot(state, process))
        elif at == "snapshot.written" and not plan.rows:
            assert process.snapshot is not None
            shown = plan.based_on.snapshot if self.rules.note_names_its_swap else self.newest(state).snapshot
            after = state._replace(note=(shown, process.snapshot)) if shown is not None else state
            yield moved("advance.written", after)
        elif at == "snapshot.written":
            intents = state.intents | ({process.snapshot} if process.snapshot and self.rules.intent_first else set())
            begun = frozenset(state.intents - {process.snapshot})
            early = state._replace(mirrored=process.snapshot) if not self.rules.watermark_after_the_swap else state
            yield moved("swap.before", early._replace(intents=frozenset(intents)), begun=begun)
        elif at == "swap.before":
            yield from self.swap(state, process)
        elif at == "swap.after":
            if not self.rules.snapshot_first and process.snapshot not in state.snapshots:
                yield self.save_snapshot(state, process, at="swap.after")
            else:
                yield moved("mirror.write")
        elif at in ("advance.written", "mirror.write"):
            newest = self.newest(state)
            if newest.snapshot is None or newest.changed == -1 or state.mirrored == newest.snapshot:
                yield moved("mirror.written")
            else:
                history = (*state.history, Commit("metadata", content=state.content))
                after = state._replace(mirrored=newest.snapshot, history=history)
                before = frozenset({state.mirrored} - {newest.snapshot, None})
                yield moved("mirror.written", after, begun=process.begun | before)
        elif at == "mirror.written":
            if process.begun & state.intents:
                yield moved("file.removed", state._replace(intents=state.intents - process.begun), begun=frozenset())
            else:
                yield self.finish(state, process)
        elif at == "file.removed":
            yield self.finish(state, process)

    def plan(self, state: State, process: Process) -> Plan:
        version, content = state.source
        newest = self.newest(state)
        snapshot = self.shown(state)
        used = {name for commit in state.history for name in (commit.plan, commit.late[1] if commit.late else "")}
        used |= {plan.key for _, plan in state.plans if plan}
        used |= {other.plan.key for other in state.processes if other.plan}
        key = next(key for n in range(9) if (key := f"{process.job}{n}") not in used)
        if snapshot is None:
            return Plan(key, version, content, newest, rows=True, whole=True, idle=False)
        settled = state.mirrored == newest.snapshot
        rows = snapshot.content != content
        return Plan(key, version, content, newest, rows, False, not rows and snapshot.source == version and settled)

    def look(self, state: State, process: Process) -> tuple[str, State]:
        plan = process.plan
        assert plan is not None
        newest, action = self.newest(state), "look"
        if newest != plan.based_on and self.rules.looks_before_the_swap:
            readable = {commit.plan for commit in state.history[state.forgotten :]}
            if not self.rules.ignores_swaps_that_come_too_late:
                readable |= {commit.late[1] for commit in state.history if commit.late}
            done = plan.key in readable and self.rules.knows_its_own_swap
            if not done and (newest.snapshot is not None or not self.rules.keeps_intents_of_unknown_outcome):
                own = frozenset({process.snapshot} - {None})
                action = "file.removed" if own & state.intents else action
                state = state._replace(intents=state.intents - own)
            after = process._replace(at="mirror.write", left=process.left or not done, begun=frozenset())
            return action, state.with_process(after)
        shown = self.shown(state)
        if not plan.rows and shown is not None and shown.source >= plan.source:
            return "look", state.with_process(process._replace(at="mirror.write"))
        return "look", state.with_process(process._replace(at="looked", looked=len(state.history)))

    def new_snapshot(self, state: State, process: Process) -> Snapshot:
        assert process.plan is not None
        used = set(referenced(state))
        source, content = process.plan.source, process.plan.content
        fresh = (Snapshot(f"{process.job}{n}", source, content) for n in range(9))
        return process.snapshot or next(one for one in fresh if one not in used)

    def save_snapshot(self, state: State, process: Process, at: str = "snapshot.written") -> tuple[str, State]:
        snapshot = self.new_snapshot(state, process)
        after = state._replace(snapshots=state.snapshots | {snapshot})
        return "snapshot.written", after.with_process(process._replace(at=at, snapshot=snapshot))

    def swap(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        """Replace rows at the newest version: Lance compares with the version that was looked at."""
        plan = process.plan
        assert plan is not None
        since = state.history[process.looked :]
        if plan.whole and process.looked < state.forgotten and since[0].late is None:
            late = since[0]._replace(late=(process.snapshot, plan.key))
            after = state._replace(history=(*state.history[: process.looked], late, *since[1:]))
            at = "unsure" if self.rules.ignores_swaps_that_come_too_late else "swap.after"
            yield "swap.after", after.with_process(process._replace(at=at))
            return
        conflicts = any(commit.kind == "swap" or plan.whole for commit in since)
        if conflicts and self.rules.swaps_conflict:
            yield self.look(state, process)
            return
        right = plan.whole or state.content == plan.base
        content = plan.content if right and not any(commit.kind == "rows" for commit in since) else MIXED
        commit = Commit("swap", process.snapshot, plan.key, process.looked, content)
        after = state._replace(history=(*state.history, commit))
        yield "swap.after", after.with_process(process._replace(at="swap.after"))
        # The store answered with a conflict although the swap had landed: its own retry met it.
        yield "unsure", after.with_process(process._replace(at="unsure"))

    def finish(self, state: State, process: Process) -> tuple[str, State]:
        plan = process.plan
        assert plan is not None
        after = Process(process.name, "ended", left=process.left)
        if process.name != "orphan" or state.processes[0].at == "ended":  # the process that replaced it has the plan
            state = state.with_plan(process.job, None)
        return "finish.end", state.with_process(after)

    # What a view is known to show.

    def newest(self, state: State) -> Shown:
        """The newest swap that the view's rows come from, as `newest_swap` of `engine/views/state.py` finds it."""
        changed = 0
        for at in range(len(state.history) - 1, -1, -1):
            commit = state.history[at]
            if at < state.forgotten and commit.late and not self.rules.ignores_swaps_that_come_too_late:
                return Shown(commit.late[0], changed)
            if at < state.forgotten:
                trusts = not self.rules.believes_metadata_without_other_intents_only
                if state.mirrored is None or (state.intents - {state.mirrored} and not trusts):
                    return UNKNOWN
                return Shown(state.mirrored, changed)
            if commit.kind == "rows":
                changed = changed or at + 1
            if commit.kind == "swap":
                since = range(commit.looked_at, at) if self.rules.counts_what_came_since_it_looked else ()
                others = [place + 1 for place in since if state.history[place].kind == "rows"]
                return Shown(commit.snapshot, changed or max(others, default=0))
        return Shown(None, changed)

    def shown(self, state: State) -> Snapshot | None:
        """The snapshot of what the view shows, with a later note; None if that is not known."""
        newest = self.newest(state)
        if newest.changed or newest.snapshot is None:
            return None
        noted = state.note[1] if state.note is not None and state.note[0] == newest.snapshot else newest.snapshot
        return next((one for one in (noted, newest.snapshot) if one in state.snapshots), None)

    # Others.

    def others(self, state: State) -> Iterator[tuple[str, str, State]]:
        left, (version, content) = state.left, state.source

        def without(name: str) -> State:
            return state._replace(left=left - {name})

        if "changes" in left:
            yield "writer", "change", without("changes")._replace(source=(version + 1, content + 1))
        if "notes" in left:
            yield "writer", "note", without("notes")._replace(source=(version + 1, content))
        if "rewrites" in left and state.history:
            rows = Commit("rows", content=MIXED)
            yield "writer", "rewrite", without("rewrites")._replace(history=(*state.history, rows))
        if "forgets" in left and state.history:
            history = (*state.history, Commit("compaction", content=state.content))
            yield "writer", "forget", without("forgets")._replace(history=history, forgotten=len(history) - 1)
        main = state.processes[0]
        if "orphan" in left and main.at not in ("start", "ended"):
            orphan = main._replace(name="orphan")
            yield "A", "replace", without("orphan").with_process(orphan).with_process(Process("A"))
        if "cleans" in left:
            found = state.snapshots - self.in_use(state)
            yield "cleanup", "find", without("cleans")._replace(found=found)
        if state.found is not None:
            loose = state.found - self.in_use(state)
            yield "cleanup", "cleanup.removed", state._replace(snapshots=state.snapshots - loose, found=None)

    def in_use(self, state: State) -> frozenset[Snapshot]:
        """The snapshots that a version, the metadata, an intent or the note names, and one that was just written."""
        named = {commit.snapshot for commit in state.history[state.forgotten :] if commit.snapshot}
        named |= {state.mirrored, *(state.note or ())} - {None}  # type: ignore[arg-type]
        named |= {one.snapshot for one in state.processes if one.snapshot and one.at == "snapshot.written"}
        return frozenset(named) | (state.intents if self.rules.cleanup_keeps_intents else frozenset())


def referenced(state: State) -> Iterator[Snapshot | None]:
    """The snapshots that a swap, the note or a process names."""
    yield from (commit.snapshot for commit in state.history)
    yield from (commit.late[0] for commit in state.history if commit.late)
    yield from state.note or ()
    yield state.mirrored
    yield from (process.snapshot for process in state.processes)
    yield from (process.plan.based_on.snapshot for process in state.processes if process.plan)
    yield from (plan.based_on.snapshot for _, plan in state.plans if plan)


def tidied(state: State) -> State:
    """Forget what can have no effect any more, so that equal states are equal."""
    named = frozenset(one for one in referenced(state) if one is not None)

    def tidy(intents: frozenset[Snapshot]) -> frozenset[Snapshot]:
        return frozenset(one if one in named else lost(state, one) for one in intents)

    found = None if state.found is None else state.found & named
    processes = tuple(one._replace(begun=tidy(one.begun & state.intents)) for one in state.processes)
    intents, snapshots = tidy(state.intents), state.snapshots & named
    return state._replace(intents=intents, snapshots=snapshots, found=found, processes=processes)


def lost(state: State, intent: Snapshot) -> Snapshot:
    """Stand for all intents of killed processes that the same processes will delete."""
    return Snapshot(" ".join(["lost", *(one.name for one in state.processes if intent in one.begun)]), -1, -1)


# The promises.


def invariants(machine: View) -> dict[str, Check[State]]:
    """What holds in every state."""

    def it_shows_what_it_is_known_to_show(state: State) -> str:
        newest = machine.newest(state)
        if not newest.changed and newest.snapshot is not None and state.content != newest.snapshot.content:
            return f"the view shows {state.content}, and its newest swap is known as {newest.snapshot.content}"
        noted = machine.shown(state)
        if noted is not None and noted.content != state.content:
            return f"the view shows {state.content}, and its note says {noted.content}"
        return ""

    def snapshots_are_there(state: State) -> str:
        newest = machine.newest(state)
        lost = not newest.changed and newest.snapshot is not None and newest.snapshot not in state.snapshots
        return "the snapshot of the newest swap is gone" if lost else ""

    return {
        "it shows what it is known to show": it_shows_what_it_is_known_to_show,
        "the snapshot of what it shows is there": snapshots_are_there,
        "a reader sees one version of the source": a_reader_sees_one_version,
    }


def a_reader_sees_one_version(state: State) -> str:
    last = next((at for at in reversed(range(len(state.history))) if state.history[at].kind == "swap"), None)
    if last is None or state.history[last].content != MIXED:
        return ""
    mine = any(commit.kind == "rows" for commit in state.history)
    return "" if mine else "the view shows rows of two versions of its source"


def at_the_end(machine: View) -> Check[State]:
    """What holds when nobody can go on: a quiet run was DONE, the view is its query, and another has nothing to do."""

    def check(state: State) -> str:
        if stuck := [one for one in state.processes if one.at not in ("ended", "absent")]:
            return f"{stuck[0].name} does not go on from {stuck[0].at!r}"
        quiet = state.processes[-1]
        if quiet.left:
            return "the quiet run is PARTIAL"
        if state.content != state.source[1]:
            return f"the view shows {state.content} of a source with {state.source[1]} after the quiet run"
        if not machine.plan(state, Process(quiet.name)).idle:
            return "the run after the quiet one has something to do"
        return ""

    return check
