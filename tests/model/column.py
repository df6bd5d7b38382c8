"""A column as a state machine: two jobs, an orphan, a writer and a cleanup at one table of two rows.

A process stands at the fault point that it passed last; a kill there forgets what it holds in memory, and nothing else.
An action named like a fault point does what the engine does between the point before and this one: it reads, and then
writes one thing. Reads that others may come in between are actions of their own (`READS`), and change nothing on disk.

The value of a row is the input that it was computed from: 0 at first, 1 after the writer has changed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.explore import Check, Step

READS = {
    "plan": "reads the table, the facts and the checkpoints, and decides which rows are due",
    "resume": "reads the saved plan of a job that was killed",
    "open": "reads the checkpoints of a fragment whose rows need not be computed",
    "verify": "compares the staged files with the newest version",
    "look": "compares what it committed with the version that it wrote",
}
OTHERS = {
    "kill": "ends a process",
    "unsure": "a commit lands, and the store says that it conflicts: its own retry met it",
    "replace": "starts a job again whose process is thought to be dead, and goes on as an orphan",
    "presume": "counts a job whose process gives no sign of life as dead, so that its files may be old",
    "change": "another writer replaces the input of a row in place",
    "compact": "another writer compacts both fragments into one",
    "find": "a cleanup finds files that no version and no job needs",
    "vacuum": "pylance removes every data file that no version names (delete_unverified)",
}
ROWS = {0: (0,), 1: (1,), 2: (0, 1)}
"""The rows of each fragment; fragment 2 is what a compaction makes of the others."""


@dataclass(frozen=True)
class Rules:
    """What the protocol does; a mutant lacks one of these."""

    verifies: bool = True
    looks_after_the_commit: bool = True
    records_facts_first: bool = True
    facts_name_the_inputs: bool = True
    asks_unfinished_jobs_for_their_values: bool = True
    checks_files_of_unfinished_jobs: bool = True
    replaces_removed_files: bool = True
    file_before_its_checkpoint: bool = True
    cleanup_looks_at_jobs_again: bool = True
    cleanup_looks_at_versions_again: bool = True
    follows_moved_rows: bool = True


RULES = Rules()


@dataclass(frozen=True)
class Scope:
    """What takes part in one exploration."""

    kills: bool = True
    two_jobs: bool = False
    orphan: bool = False
    changes: bool = False
    compacts: bool = False
    vacuums: bool = False
    cleans: bool = False
    intervals: bool = False
    """Whether a process may write its rows in a checkpoint before it stages the fragment."""


class File(NamedTuple):
    """A data file of the column: whose, and of each row the input that its value was computed from."""

    fragment: int
    by: str
    values: tuple[int | None, ...]


class Signature(NamedTuple):
    fragment: int
    inputs: tuple[int, ...]
    output: File | None


class Fragment(NamedTuple):
    """A fragment of the newest version; `made` has what it was compacted into and of."""

    id: int
    inputs: tuple[int, ...]
    output: File | None
    made: tuple[Signature, ...] = ()

    @property
    def signature(self) -> Signature:
        return Signature(self.id, self.inputs, self.output)

    def value(self, row: int) -> int | None:
        return None if self.output is None else self.output.values[ROWS[self.id].index(row)]

    def input(self, row: int) -> int:
        return self.inputs[ROWS[self.id].index(row)]


class Fact(NamedTuple):
    """Rows of a fragment hold the function's value; none if it only says that the values are a job's (STALE)."""

    about: Signature
    rows: frozenset[int]


class Staged(NamedTuple):
    """A fragment checkpoint: the staged file of a fragment with these inputs, and the output that it replaces."""

    fragment: int
    inputs: tuple[int, ...]
    file: File
    replaces: File | None


class Work(NamedTuple):
    """The due rows of a fragment as it was planned, and rows whose values stay; these are read from `old`."""

    fragment: int
    inputs: tuple[int, ...]
    output: File | None
    due: frozenset[int]
    stay: frozenset[int]
    old: File | None

    def input(self, row: int) -> int:
        return self.inputs[ROWS[self.fragment].index(row)]

    def planned_value(self, row: int) -> int | None:
        return None if self.old is None else self.old.values[ROWS[self.fragment].index(row)]


Pair = tuple[Work, File]


class Process(NamedTuple):
    """A process of a job, at the fault point that it passed last, with what it holds in memory.

    Of the pairs, `staged` are to be committed, and `replaced` are not, for others replaced their inputs.
    """

    name: str
    at: str = "start"
    read: tuple[int, ...] = ()
    works: tuple[Work, ...] = ()
    learned: frozenset[Fact] = frozenset()
    staged: tuple[Pair, ...] = ()
    replaced: tuple[Pair, ...] = ()
    file: File | None = None
    left: bool = False
    committed: bool = False

    @property
    def job(self) -> str:
        return "A" if self.name == "orphan" else self.name


class Job(NamedTuple):
    """The documents of a job: "", "open", "dead" or its end, and the plan with the inputs that it read."""

    state: str = ""
    read: tuple[int, ...] = ()
    plan: tuple[Work, ...] | None = None


class Cleanup(NamedTuple):
    """What a cleanup found; None before and after it."""

    files: frozenset[File] | None = None
    staged: frozenset[Staged] = frozenset()
    rows: frozenset[tuple[int, int]] = frozenset()


class State(NamedTuple):
    """Everything that lies on disk, then the processes, then what may still happen."""

    table: tuple[Fragment, ...]
    files: frozenset[File]
    rows: frozenset[tuple[int, int]]
    staged: frozenset[Staged]
    facts: frozenset[Fact]
    known_then: frozenset[tuple[int, int]]
    of_a_job: frozenset[int]
    unmarked: frozenset[File]
    jobs: tuple[tuple[str, Job], ...]
    processes: tuple[Process, ...]
    cleanup: Cleanup
    left: frozenset[str]
    quiet: bool

    def fragment_with(self, row: int) -> Fragment:
        return next(one for one in self.table if row in ROWS[one.id])

    def fragment(self, number: int) -> Fragment | None:
        return next((one for one in self.table if one.id == number), None)

    def job(self, name: str) -> Job:
        return dict(self.jobs)[name]

    def with_job(self, name: str, job: Job) -> State:
        return self._replace(jobs=tuple((one, job if one == name else other) for one, other in self.jobs))

    def with_process(self, process: Process) -> State:
        return self._replace(processes=tuple(process if one.name == process.name else one for one in self.processes))


def start(scope: Scope) -> State:
    names = ["A", *(["B"] if scope.two_jobs else []), *(["orphan"] if scope.orphan else [])]
    wanted = {"changes", "compacts", "vacuums", "orphan", "cleans"}
    left = {name for name, there in vars(scope).items() if there and name in wanted}
    empty: frozenset[object] = frozenset()
    processes = tuple(Process(name, "absent" if name == "orphan" else "start") for name in [*names, "quiet"])
    jobs = tuple((name, Job()) for name in [*names, "quiet"] if name != "orphan")
    table = Fragment(0, (0,), None), Fragment(1, (0,), None)
    return State(table, *[empty] * 7, jobs, processes, Cleanup(), frozenset(left), False)  # type: ignore[arg-type]


class Column:
    """The steps of the machine."""

    def __init__(self, scope: Scope, rules: Rules = RULES) -> None:
        self.scope = scope
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step[State]]:
        alive = [one for one in state.processes if one.name != "quiet" and one.at not in ("absent", "ended", "stopped")]
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
        if not alive and quiet.at not in ("ended", "stopped"):
            for action, after in self.next_of(state._replace(quiet=True), quiet):
                yield Step("quiet", action, tidied(after))

    # The protocol.

    def next_of(self, state: State, process: Process) -> Iterator[tuple[str, State]]:  # noqa: C901, one branch a point
        """What a process may do next."""
        job, at = state.job(process.job), process.at

        def moved(action: str, state: State = state, **memory: object) -> tuple[str, State]:
            return action, state.with_process(process._replace(at=action, **memory))

        if at == "start":
            # If rows moved into the fragment of a removed file, a retry with the plan fails; a new plan does not.
            fails = self.scope.vacuums and self.scope.compacts and "vacuums" not in state.left
            if job.plan is not None and not fails:
                yield "resume", state.with_process(process._replace(at="plan.saved", read=job.read, works=job.plan))
            yield self.plan(state, process)
        elif at == "plan" and self.scope.cleans:
            yield moved("plan.recorded", state.with_job(process.job, Job("open")))
        elif at in ("plan", "plan.recorded"):
            saved = state.with_job(process.job, Job(job.state, process.read, process.works))
            yield moved("plan.saved", saved._replace(facts=saved.facts | process.learned), learned=frozenset())
        elif at in ("plan.saved", "applied"):
            yield from self.apply(state, process)
        elif at == "apply.step":
            if self.scope.intervals:
                found = {(row, process.works[0].input(row)) for row in process.works[0].due}
                yield moved("checkpoint.written (rows)", state._replace(rows=state.rows | found))
            yield self.stage(state, process)
        elif at in ("open", "checkpoint.written (rows)"):
            yield self.stage(state, process)
        elif at == "staged.written":
            yield self.checkpoint(state, process)
        elif at == "verified":
            if self.rules.records_facts_first:
                yield moved("commit.before", self.with_facts(state, process), learned=frozenset())
            else:
                yield moved("commit.before")
        elif at == "commit.before":
            yield from self.commit(state, process)
        elif at == "unsure":
            yield "verify", self.verify(state, process)
        elif at == "commit.after":
            if self.rules.records_facts_first or (late := self.with_facts(state, process)).facts == state.facts:
                yield self.look(state, process)
            else:
                yield "checkpoint.written (ledger)", late
        elif at == "looked":
            if process.staged:
                lost = [*process.staged, *waiting(process)]
                after = self.learn(state, process)
                yield (
                    "checkpoint.written (stale)",
                    self.follow(after, process._replace(staged=(), learned=frozenset()), lost),
                )
            else:
                yield from self.end(state, process)
        elif at == "checkpoint.written (mark)":
            yield self.finish(state, process)

    def plan(self, state: State, process: Process) -> tuple[str, State]:
        works: list[Work] = []
        learned: set[Fact] = set()
        for one in state.table:
            known = self.known(state, one)
            due = frozenset(ROWS[one.id]) - known
            if one.output in state.files and state.facts:
                # What history and values tell is written down for later plans, with this one.
                learned |= {
                    Fact(one.signature, rows) for rows in (*[known] * bool(known), *[frozenset[int]()] * bool(due))
                }
            if one.output in state.files and any(
                one.value(row) is not None and self.of_no_job(state, one, row) for row in due
            ):
                return "plan", state.with_process(Process(process.name, "stopped"))  # UnknownValues
            if due:
                works.append(Work(one.id, one.inputs, one.output, due, known, one.output))
        read = tuple(state.fragment_with(row).input(row) for row in (0, 1))
        return "plan", state.with_process(
            Process(process.name, "plan", read, tuple(works), frozenset(learned - state.facts))
        )

    def apply(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        """Open the next fragment: compute what no checkpoint holds. After the last one, verify."""
        if not process.works:
            yield "verify", self.verify(state, process)
            return
        work = process.works[0]
        if (ready := staged_file(state, work)) is not None:
            done = process._replace(at="applied", works=process.works[1:], staged=(*process.staged, (work, ready)))
            yield "open", state.with_process(done)
        elif all(is_held(state, row, work.input(row)) for row in work.due):
            yield "open", state.with_process(process._replace(at="open"))
        else:
            yield "apply.step", state.with_process(process._replace(at="apply.step"))

    def stage(self, state: State, process: Process) -> tuple[str, State]:
        work = process.works[0]
        before = work.old if work.old in state.files else None
        values = [
            value if row in work.due else None if before is None else before.values[at]
            for at, (row, value) in enumerate(zip(ROWS[work.fragment], work.inputs, strict=True))
        ]
        used = {file for other in referenced(state) if (file := other)}
        file = next(
            new for n in range(9) if (new := File(work.fragment, f"{process.job}{n}", tuple(values))) not in used
        )
        stay = work.stay if before is not None or not work.stay else frozenset[int]()
        works = (work._replace(stay=stay), *process.works[1:])
        after = process._replace(at="staged.written", works=works, file=file)
        if not self.rules.file_before_its_checkpoint:
            return "staged.written", self.checkpoint(state, after)[1]
        return "staged.written", state._replace(files=state.files | {file}).with_process(after)

    def checkpoint(self, state: State, process: Process) -> tuple[str, State]:
        work, file = process.works[0], process.file
        assert file is not None
        others = {one for one in state.staged if (one.fragment, one.inputs) != (work.fragment, work.inputs)}
        kept = others | {Staged(work.fragment, work.inputs, file, work.output)}
        after = process._replace(
            at="applied", works=process.works[1:], staged=(*process.staged, (work, file)), file=None
        )
        return "checkpoint.written (file)", state._replace(staged=frozenset(kept)).with_process(after)

    def verify(self, state: State, process: Process) -> State:
        staged = [(self.over_a_removed_file(state, work, file), file) for work, file in process.staged]
        judged = [(judge(state, *pair), pair) for pair in staged]
        if not self.rules.verifies:
            there = {one.id for one in state.table}
            judged = [("fits" if said == "lost" and p[0].fragment in there else said, p) for said, p in judged]
        fits = tuple(pair for verdict, pair in judged if verdict == "fits")
        lost = [*(pair for verdict, pair in judged if verdict in ("lost", "removed")), *waiting(process)]
        inputs = {one.id: one.inputs for one in state.table}
        left = [pair for verdict, pair in judged if verdict == "lost"]
        replaced = [pair for pair in left if inputs.get(pair[0].fragment, pair[0].inputs) != pair[0].inputs]
        replaced = (*process.replaced, *replaced)
        process = process._replace(learned=stale(state, replaced))
        if fits:
            # Others wait for the round after the commit.
            process = process._replace(at="verified", staged=fits, works=(), replaced=replaced)
            return self.follow(state, process, lost, waits=True)
        process = process._replace(replaced=())
        if process.learned:
            return state.with_process(process._replace(at="looked", staged=tuple(lost), works=()))
        return self.follow(state, process._replace(staged=(), works=()), lost)

    def over_a_removed_file(self, state: State, work: Work, file: File) -> Work:
        """Let a staged file replace one that an earlier process of the job committed, and that is gone."""
        now = state.fragment(work.fragment)
        expected = now is None or now.inputs != work.inputs or now.output in (None, work.output, file)
        if expected or now is None or now.output in state.files or not self.rules.replaces_removed_files:
            return work
        return work._replace(output=now.output)

    def follow(self, state: State, process: Process, lost: Iterable[Pair], waits: bool = False) -> State:
        """Look for the rows that a commit did not make visible, in the fragments that hold them now."""
        again: dict[int, Work] = {}
        left = process.left
        for work, file in lost:
            if judge(state, work, file) == "removed":
                again[work.fragment] = work._replace(output=file)
                continue
            for row in work.due:
                now = state.fragment_with(row)
                in_place = now.id == work.fragment and now.inputs == work.inputs
                if in_place and now.output not in (None, file, *state.files):
                    return state.with_process(Process(process.name, "stopped"))  # it cannot be read
                if now.input(row) != work.input(row):
                    left = True
                elif row not in self.known(state, now):
                    if not self.rules.follows_moved_rows:
                        continue
                    if now.value(row) != work.planned_value(row):
                        left = True  # others wrote it since
                        continue
                    found = again.get(now.id)
                    due = (found.due if found else frozenset[int]()) | {row}
                    again[now.id] = Work(now.id, now.inputs, now.output, due, self.known(state, now), now.output)
        works = tuple(again[number] for number in sorted(again))
        at = process.at if waits else "applied" if works else "looked"
        return state.with_process(process._replace(at=at, works=works, left=left))

    def with_facts(self, state: State, process: Process) -> State:
        found: set[Fact] = set()
        for work, file in process.staged:
            now = state.fragment(work.fragment)
            inputs = work.inputs if self.rules.facts_name_the_inputs or now is None else now.inputs
            found.add(Fact(Signature(work.fragment, inputs, file), work.due | work.stay))
        files, after = {file for _, file in process.staged}, self.learn(state, process)
        return after._replace(facts=after.facts | found, unmarked=state.unmarked | files)

    def commit(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        """Replace the files at the newest version. Lance compares fragments and their outputs, and not their inputs."""
        files = {work.fragment: (work, file) for work, file in process.staged}
        there = [state.fragment(number) for number in files]
        fits = all(one is not None and one.output == files[one.id][0].output for one in there)
        if not self.rules.verifies:
            fits = all(one is not None for one in there)
        if not fits:
            yield "verify", self.verify(state, process)
            return
        table = tuple(one._replace(output=files[one.id][1]) if one.id in files else one for one in state.table)
        after = state._replace(table=table)
        then = {
            (row, value)
            for one in table
            for row in self.known(after, one)
            if (value := one.value(row)) is not None
        }  # fmt: skip
        after = after._replace(known_then=state.known_then | then)
        if self.rules.asks_unfinished_jobs_for_their_values:
            after = after._replace(of_a_job=state.of_a_job.union(*(work.due for work, _ in process.staged)))
        yield "commit.after", after.with_process(process._replace(at="commit.after", committed=True))
        # The store answered with a conflict although the commit had landed: its own retry met it.
        yield "unsure", after.with_process(process._replace(at="unsure"))

    def learn(self, state: State, process: Process) -> State:
        rows = state.of_a_job.union(*(ROWS[fact.about.fragment] for fact in process.learned))
        return state._replace(facts=state.facts | process.learned, of_a_job=rows)

    def look(self, state: State, process: Process) -> tuple[str, State]:
        process = process._replace(learned=frozenset(), replaced=())
        if not self.rules.looks_after_the_commit:
            return "look", state.with_process(process._replace(at="looked", staged=(), works=()))
        lost = [pair for pair in process.staged if judge(state, *pair) != "done"]
        if learned := stale(state, lost):
            return "look", state.with_process(process._replace(at="looked", staged=tuple(lost), learned=learned))
        return "look", self.follow(state, process._replace(staged=()), [*lost, *waiting(process)])

    def end(self, state: State, process: Process) -> Iterator[tuple[str, State]]:
        """Mark that what the job has committed is complete, and then record its end."""
        if process.committed:
            mine = {file for file in state.unmarked if file.by.startswith(process.job)}
            marked = Process(process.name, "checkpoint.written (mark)", read=process.read, left=process.left)
            yield marked.at, state._replace(unmarked=state.unmarked - mine).with_process(marked)
        else:
            yield self.finish(state, process)

    def finish(self, state: State, process: Process) -> tuple[str, State]:
        here = [state.fragment_with(row) for row in (0, 1)]
        wrong = [
            row
            for row, one in enumerate(here)
            if one.input(row) == process.read[row] and one.value(row) != one.input(row)
        ]
        end = "PARTIAL" if process.left else "DONE"
        told = "lied" if wrong and not process.left else "ended"
        after = Process(process.name, told, left=process.left)
        job = Job(end)
        if process.name == "orphan" and state.processes[0].at not in ("ended", "lied", "stopped"):
            job = state.job(process.job)._replace(state=end)  # the process that replaced it has the plan
        return "finish.end", state.with_job(process.job, job).with_process(after)

    # What facts, history and values say.

    def known(self, state: State, one: Fragment) -> frozenset[int]:
        """The rows that a plan takes for computed."""
        lost = one.output is not None and one.output not in state.files
        if lost and one.output in state.unmarked and self.rules.checks_files_of_unfinished_jobs:
            return frozenset()
        said = [fact.rows for fact in state.facts if fact.about == one.signature]
        if not said and one.made and one.made[0] == one.signature:
            said = [fact.rows for fact in state.facts if fact.about in one.made[1:]]
        found = frozenset[int]().union(*said)
        if one.output is None:
            return found
        same = {row for row in ROWS[one.id] if one.value(row) == one.input(row)}
        return found | {row for row in same if (row, one.value(row)) in state.known_then}

    def of_no_job(self, state: State, one: Fragment, row: int) -> bool:
        """Whether nothing says that a job wrote the value of a row."""
        of_a_job = state.of_a_job.union(known for known, _ in state.known_then)
        return row not in of_a_job and not any(fact.about == one.signature for fact in state.facts)

    # Others.

    def others(self, state: State) -> Iterator[tuple[str, str, State]]:
        left = state.left

        def without(name: str) -> State:
            return state._replace(left=left - {name})

        if "changes" in left:
            now = state.fragment_with(0)
            changed = now._replace(inputs=(1, *now.inputs[1:]))
            table = tuple(changed if one.id == now.id else one for one in state.table)
            yield "writer", "change", without("changes")._replace(table=table)
        if "compacts" in left:
            yield "writer", "compact", self.compacted(without("compacts"))
        if "vacuums" in left and (loose := state.files - visible(state) - read_by_jobs(state)):
            yield "writer", "vacuum", without("vacuums")._replace(files=state.files - loose)
        main = state.processes[0]
        if "orphan" in left and main.at not in ("start", "ended", "stopped"):
            orphan = main._replace(name="orphan")
            yield "A", "replace", without("orphan").with_process(orphan).with_process(Process("A"))
        if "cleans" in left:
            for name, document in state.jobs:
                if document.state == "open":
                    yield name, "presume", state.with_job(name, document._replace(state="dead"))
            if not any(document.state == "open" for _, document in state.jobs):
                found = Cleanup(state.files - visible(state), state.staged, state.rows)
                yield "cleanup", "find", without("cleans")._replace(cleanup=found)
        if state.cleanup.files is not None:
            yield from self.collect(state, state.cleanup)

    def collect(self, state: State, found: Cleanup) -> Iterator[tuple[str, str, State]]:
        """Remove what was found, checkpoints first, unless a job has begun since or a version names it."""
        after = state._replace(cleanup=Cleanup())
        if self.rules.cleanup_looks_at_jobs_again and any(job.state == "open" for _, job in state.jobs):
            yield "cleanup", "cleanup.removed", after
            return
        assert found.files is not None
        if found.staged or found.rows:
            rest = Cleanup(found.files)
            less = state._replace(staged=state.staged - found.staged, rows=state.rows - found.rows, cleanup=rest)
            yield "cleanup", "cleanup.removed", less
            return
        loose = found.files - (visible(state) if self.rules.cleanup_looks_at_versions_again else frozenset())
        yield "cleanup", "cleanup.removed", after._replace(files=state.files - loose)

    def compacted(self, state: State) -> State:
        inputs = tuple(state.fragment_with(row).input(row) for row in (0, 1))
        values = tuple(state.fragment_with(row).value(row) for row in (0, 1))
        if any(one.output is not None and one.output not in state.files for one in state.table):
            return state  # Lance cannot read the file
        output = None if values == (None, None) else File(2, "writer", values)
        made = Signature(2, inputs, output), *(one.signature for one in state.table)
        files = state.files if output is None else state.files | {output}
        return state._replace(table=(Fragment(2, inputs, output, made),), files=files)


def waiting(process: Process) -> list[Pair]:
    """The rows that verification found elsewhere, and that wait for the next round."""
    return [(work, File(work.fragment, "", ())) for work in process.works]


def judge(state: State, work: Work, file: File) -> str:
    """Compare a staged file with the newest version, as `verify` of `engine/commit/column.py` does."""
    now = state.fragment(work.fragment)
    if now is None:
        return "lost"
    if now.output == file and now.inputs == work.inputs:
        return "done" if file in state.files else "removed"
    if now.inputs != work.inputs or now.output != work.output or file not in state.files:
        return "lost"
    return "fits"


def stale(state: State, pairs: Iterable[Pair]) -> frozenset[Fact]:
    """What says that values are a job's whose commit landed after their inputs had been replaced."""
    there = [(work, file, state.fragment(work.fragment)) for work, file in pairs]
    return frozenset(
        Fact(now.signature, frozenset())
        for work, file, now in there
        if now is not None and now.output == file and now.inputs != work.inputs
    )


def is_held(state: State, row: int, value: int) -> bool:
    """Whether a checkpoint has the value of a row."""
    if (row, value) in state.rows:
        return True
    kept = [one.file for one in state.staged if row in ROWS[one.fragment] and one.file in state.files]
    return any(file.values[ROWS[file.fragment].index(row)] == value for file in kept)


def staged_file(state: State, work: Work) -> File | None:
    """The staged file of a fragment, if it can be committed as it is."""
    for one in state.staged:
        if (one.fragment, one.inputs, one.replaces) == (work.fragment, work.inputs, work.output):
            has_all = all(one.file.values[ROWS[work.fragment].index(row)] == work.input(row) for row in work.due)
            if one.file in state.files and has_all:
                return one.file
    return None


def visible(state: State) -> frozenset[File]:
    return frozenset(one.output for one in state.table if one.output is not None)


def read_by_jobs(state: State) -> frozenset[File]:
    """The files of the versions that jobs read, which are kept while they run."""
    works = [work for one in state.processes for work in (*one.works, *(work for work, _ in one.staged))]
    works += [work for _, job in state.jobs for work in job.plan or ()]
    return frozenset(work.old for work in works if work.old is not None)


def referenced(state: State) -> Iterator[File | None]:
    """The files that anything may still name."""
    yield from (one.output for one in state.table)
    yield from (made.output for one in state.table for made in one.made)
    yield from (one.file for one in state.staged)
    yield from (one.replaces for one in state.staged)
    for process in state.processes:
        yield process.file
        for work, file in (*process.staged, *process.replaced):
            yield from (file, work.output, work.old)
        yield from (one for work in process.works for one in (work.output, work.old))
    for _, job in state.jobs:
        yield from (one for work in job.plan or () for one in (work.output, work.old))
    yield from state.cleanup.files or ()


def tidied(state: State) -> State:
    """Forget what can have no effect any more, so that equal states are equal."""
    named = frozenset(file for file in referenced(state) if file is not None)
    facts = frozenset(fact for fact in state.facts if fact.about.output in named)
    return state._replace(files=state.files & named, facts=facts, unmarked=state.unmarked & named)


# The promises.


def invariants(machine: Column) -> dict[str, Check[State]]:
    """What holds in every state."""

    def what_counts_is_right(state: State) -> str:
        for one in state.table:
            for row in machine.known(state, one):
                if one.value(row) != one.input(row):
                    return f"row {row} counts as computed from {one.input(row)}, and holds {one.value(row)}"
                if one.output not in state.files:
                    return f"row {row} counts as computed, and its file is gone"
        return ""

    found: dict[str, Check[State]] = {
        "what counts as computed is right": what_counts_is_right,
        "who says DONE is right": who_says_done_is_right,
        "facts are there before the commit": facts_come_first,
    }
    return found if machine.scope.vacuums else {**found, "what a checkpoint keeps stays": checkpoints_stay}


def who_says_done_is_right(state: State) -> str:
    lied = [process.name for process in state.processes if process.at == "lied"]
    return f"{lied[0]} ended as DONE, and a row that did not change since its plan has no value" if lied else ""


def facts_come_first(state: State) -> str:
    outputs = [one.output for one in state.table if one.output is not None and one.output.by != "writer"]
    explained = {fact.about.output for fact in state.facts}
    return "" if explained.issuperset(outputs) else "a file is visible that no fact is about"


def checkpoints_stay(state: State) -> str:
    for process in state.processes:
        dead = state.job(process.job).state == "dead"
        for work, _ in () if dead else process.staged:
            if gone := [row for row in work.due if not is_held(state, row, work.input(row))]:
                return f"{process.name} staged row {gone[0]}, and no checkpoint has it"
    return ""


def at_the_end(machine: Column) -> Check[State]:
    """What holds when nobody can go on: a quiet run was DONE, all rows are right, and another run has nothing to do."""

    def check(state: State) -> str:
        if stuck := [one for one in state.processes if one.at not in ("ended", "absent")]:
            return f"{stuck[0].name} does not go on from {stuck[0].at!r}"
        quiet = state.processes[-1]
        if quiet.left:
            return "the quiet run is PARTIAL"
        if wrong := [row for one in state.table for row in ROWS[one.id] if one.value(row) != one.input(row)]:
            return f"row {wrong[0]} is wrong after the quiet run"
        if machine.plan(state, Process(quiet.name))[1].processes[-1].works:
            return "the run after the quiet one has something to do"
        return ""

    return check
