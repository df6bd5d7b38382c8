"""Run one history of a table twice, with and without kills, and compare everything that must be equal."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from airflow_geneva import UDF, connect
from airflow_geneva.database import Database
from airflow_geneva.engine import faults
from airflow_geneva.engine.checkpoint import value_cache
from airflow_geneva.engine.checkpoint.facts import load_state
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.engine.cleanup.garbage import FileKind
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.lance_io.fragments import columns_of
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.table_versions import read_transaction
from airflow_geneva.engine.plan.request import BackfillRequest
from airflow_geneva.engine.plan.saved_plan import load_plan
from airflow_geneva.engine.results import BackfillResult, ShardResult
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.pipeline import PlannedJob
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.errors import InvalidInput
from airflow_geneva.table import Table
from tests.support.counting import TRACE, Trace
from tests.support.forge import forge
from tests.support.invariants import assert_honest, job_of
from tests.udfs_for_tests.histories import BY_KIND, IN_FLIGHT, is_bad, negative, value_of, valued

ROWS, PER_FRAGMENT, CHECKPOINT = 120, 30, 10
SIZES: dict[str, Any] = {"checkpoint_size": CHECKPOINT, "batch_size": 5, "shard_size": 2, "commit_granularity": 1}
WHERE = "id % 3 = 0"
FOREIGN = -7
A_YEAR = timedelta(days=365).total_seconds()


@dataclass(frozen=True)
class Job:
    """The job that is run and killed.

    Args:
        kind: ``plain``, ``where``, ``skip`` (some rows fail, and calls have a limit), ``async`` (the same with
            concurrent calls), ``batch`` (the same with a batch API, which gets all rows before it answers), ``dedup``
            (values of equal inputs are cached), ``continue`` (values of older code are reused), ``indexed`` (an index
            on the column is updated), ``nested`` (the input is a field of a struct) or ``siblings`` (each call fills
            two columns).
        as_tasks: run four tasks, each of which is retried when it dies; else one call, which is repeated.
    """

    kind: str
    as_tasks: bool = False

    @property
    def fails(self) -> bool:
        """Whether some rows fail."""
        return self.kind in ("skip", "async", "batch")

    @property
    def udf(self) -> UDF:
        return BY_KIND[self.kind]

    @property
    def input(self) -> str:
        return "s" if self.kind == "nested" else "x"

    @property
    def options(self) -> dict[str, Any]:
        extra: dict[str, dict[str, Any]] = {
            "where": {"where": WHERE},
            "continue": {"continue_from": ["1"]},
            "indexed": {"indexes": "update"},
            "nested": {"on_code_change": "recompute"},
        }
        # Changes write values of their own, and facts are lost.
        return {**SIZES, "on_unknown_values": "recompute", **extra.get(self.kind, {})}

    def values(self, x: int | None) -> set[int | None]:
        """Return the possible values of the job for an input."""
        if self.kind == "continue":
            return {value_of(x, "1"), value_of(x, "2")}
        return {value_of(x, picky=self.fails)}

    def selects(self, row: int) -> bool:
        return self.kind != "where" or row % 3 == 0


@dataclass
class World:
    """One run of a history: a table, the trace of the UDF calls, and the differences allowed to the other run.

    Args:
        folder: folder of all its files.
        marks: versions that a restore may restore.
        spare: number of rows that may run again because a change removed their checkpoints.
        reshaped: whether the struct that the function reads got other fields, so that every row may be due.
        more: additional environment variables of its processes; may set another trace.
    """

    folder: Path
    table: Table
    next_id: int = ROWS
    steps: int = 0
    marks: list[int] = field(default_factory=list)
    spare: int = 0
    checked: int = 0
    reshaped: bool = False
    more: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def make(folder: Path, job: Job) -> World:
        folder.mkdir(parents=True, exist_ok=True)
        rows: dict[str, Any] = {"id": pa.array(range(ROWS), pa.int64()), "x": pa.array(range(ROWS), pa.int64())}
        if job.kind == "nested":
            rows["s"] = pa.array(
                [struct_of(FIELDS, x) for x in range(ROWS)], pa.struct(dict.fromkeys(FIELDS, pa.int64()))
            )
        table = database_in(folder).create_table("docs", pa.table(rows), max_rows_per_file=PER_FRAGMENT)
        filled: Any = ("y", "z") if job.kind == "siblings" else "y"
        table.add_columns({filled: valued if job.kind == "continue" else job.udf, "w": (negative, ["x"])})
        if job.kind == "indexed":
            table.lance.create_scalar_index("y", "BTREE")
        world = World(folder, table)
        world.marks.append(table.version)
        world.checked = table.version
        return world

    @property
    def trace(self) -> Trace:
        return Trace(Path(self.more.get(TRACE, self.folder / "trace")))

    @property
    def environment(self) -> dict[str, str]:
        return {TRACE: str(self.trace.path), **self.more}

    def ids(self) -> list[int]:
        return sorted(self.table.lance.to_table(columns=["id"])["id"].to_pylist())

    @property
    def fields(self) -> list[str]:
        """The fields of the struct that the function reads; none if it reads none."""
        schema = self.table.schema
        return [nested.name for nested in schema.field("s").type] if "s" in schema.names else []

    def with_struct(self, rows: list[dict[str, int]]) -> pa.Table:
        """Return the rows to write, with the struct around their inputs."""
        schema = pa.schema([("id", pa.int64()), ("x", pa.int64())])
        if fields := self.fields:
            schema = schema.append(self.table.schema.field("s"))
        return pa.Table.from_pylist([row | {"s": struct_of(fields, row["x"])} for row in rows], schema=schema)

    def new_rows(self, count: int) -> list[dict[str, int]]:
        """Return new rows whose ids and inputs were never used before."""
        first = self.next_id
        self.next_id += count
        return [{"id": row, "x": row} for row in range(first, first + count)]

    def inputs(self, rows: list[int]) -> list[int]:
        """Return new inputs for rows to change."""
        return [1_000 * (self.steps + 1) + row for row in rows]

    def rows(self) -> list[dict[str, Any]]:
        columns = [name for name in ("id", "x", "y", "z", "w") if name in self.table.schema.names]
        return sorted(rows_of(self.table.lance, columns), key=lambda row: row["id"])


def database_in(folder: Path) -> Database:
    """Open the database of a run, in its folder or on the object store that a file in the folder names."""
    store = folder / STORE
    if not store.exists():
        return connect(folder / "db")
    told = json.loads(store.read_text())
    return connect(told["uri"], storage_options=told["options"])


STORE = "store.json"
FIELDS = ("v", "u", "k")
"""Nested fields of the struct that a function reads: its input, another one, and one that stays."""


def struct_of(fields: Iterable[str], x: int) -> dict[str, int]:
    return {name: {"v": x, "u": -x}.get(name, 0) for name in fields}


def rows_of(source: Any, columns: list[str], **options: Any) -> list[dict[str, Any]]:
    """Return the rows of a version or fragment; ``x`` is the input of the function, possibly from a struct."""
    nested = "s" in source.schema.names
    names = [{"x": "s"}.get(name, name) if nested else name for name in columns]
    rows: list[dict[str, Any]] = source.to_table(columns=names, **options).to_pylist()
    return [{"x": row["s"].get("v"), **row} for row in rows] if nested else rows


def pick(world: World, dice: random.Random, most: int = 9) -> list[int]:
    ids = world.ids()
    return sorted(dice.sample(ids, min(len(ids), dice.randint(1, most))))


def listed(rows: list[int]) -> str:
    return f"id IN ({', '.join(map(str, rows))})"


def do_nothing(world: World, dice: random.Random) -> None:
    """Change nothing, so that the run is simply started again."""


def delete(world: World, dice: random.Random) -> None:
    world.table.lance.delete(listed(pick(world, dice)))


def append(world: World, dice: random.Random) -> None:
    world.table.add(world.with_struct(world.new_rows(dice.randint(1, 12))))


def update(world: World, dice: random.Random) -> None:
    rows, x = pick(world, dice), f"{1_000 * (world.steps + 1)} + id"
    change = {"x": x}
    if fields := world.fields:
        cells = [f"'{name}', {({'v': x, 'u': f'-({x})'}).get(name, 'cast(0 as bigint)')}" for name in fields]
        change["s"] = f"named_struct({', '.join(cells)})"
    world.table.lance.update(change, where=listed(rows))


def touch(world: World, dice: random.Random) -> None:
    """Move rows without changing their values."""
    world.table.lance.update({"w": "w"}, where=listed(pick(world, dice)))


def upsert(world: World, dice: random.Random) -> None:
    """Change and move some rows, and add new ones."""
    rows = pick(world, dice, most=5)
    changed = [{"id": row, "x": x} for row, x in zip(rows, world.inputs(rows), strict=True)]
    data = world.with_struct([*changed, *world.new_rows(3)])
    for name in [name for name in world.table.schema.names if name not in data.column_names]:
        data = data.append_column(name, pa.nulls(len(data), world.table.schema.field(name).type))
    merge = world.table.lance.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(data.select(world.table.schema.names))


def upsert_in_place(world: World, dice: random.Random) -> None:
    """Change the inputs of some rows in place, so that their fragments have other files."""
    rows = pick(world, dice, most=3)
    data = world.with_struct([{"id": row, "x": x} for row, x in zip(rows, world.inputs(rows), strict=True)])
    world.table.lance.merge_insert("id").when_matched_update_all().execute(data)


def compact(world: World, dice: random.Random) -> None:
    world.table.lance.optimize.compact_files(target_rows_per_fragment=dice.choice([40, 70, 1_000]))


def restore(world: World, dice: random.Random) -> None:
    world.table.location.open(dice.choice(world.marks)).restore()


def write_the_column(world: World, dice: random.Random) -> None:
    rows = pick(world, dice, most=4)
    world.table.lance.update({"y": str(FOREIGN)}, where=listed(rows))
    world.spare += len(rows)


def fill_another_column(world: World, dice: random.Random) -> None:
    assert world.table.backfill("w", runner="inline").state == "DONE"


def clean_versions(world: World, dice: random.Random) -> None:
    world.table.lance.cleanup_old_versions()


def collect_garbage(world: World, dice: random.Random) -> None:
    """Run a cleanup after a second; it may remove results of a killed run for fragments that were compacted since."""
    garbage = find_garbage(world.table.location, "1s")
    world.spare += ROWS * any(garbage.file_group(kind).count for kind in (FileKind.CHECKPOINTS, FileKind.STAGED))
    collect(world.table.location, garbage)


def collect_garbage_next_year(world: World, dice: random.Random) -> None:
    """Run a cleanup at a time when killed jobs count as dead, which removes their results."""
    garbage = find_garbage(world.table.location, "1s", now=time.time() + A_YEAR)
    collect(world.table.location, garbage)
    world.spare += ROWS


def die_collecting_garbage(world: World, dice: random.Random) -> None:
    arguments = {"folder": str(world.folder), "passage": dice.randint(1, 12)}
    code = forge().run("tests.support.harness:collect_and_die", arguments, world.environment)
    assert code in (0, -signal.SIGKILL)
    world.spare += ROWS


def forget_history(world: World, dice: random.Random) -> None:
    """Let Lance remove all versions but the newest, and all data files that it does not name, including staged ones."""
    world.table.lance.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    world.marks[:] = [world.table.version]
    world.checked = world.table.version
    world.spare += world.table.count_rows()


Change = Callable[[World, random.Random], None]
CHANGES: list[Change] = [
    do_nothing, delete, append, update, touch, upsert, upsert_in_place, compact, restore, write_the_column,
    fill_another_column, clean_versions, collect_garbage, collect_garbage_next_year, die_collecting_garbage,
    forget_history,
]  # fmt: skip
HARMLESS: list[Change] = [do_nothing, append, fill_another_column, clean_versions, collect_garbage]
"""The changes after which every fragment of an earlier plan still matches."""


@dataclass(frozen=True)
class Fault:
    """The moment at which a process dies.

    Args:
        point: a value of ``AIRFLOW_GENEVA_FAULT``, or ``after:<seconds>``.
    """

    point: str

    def arm(self) -> None:
        """Make this process die at that moment."""
        kind, _, when = self.point.partition(":")
        if kind != "after":
            faults._ARMED = self.point
            return
        timer = threading.Timer(float(when), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def run_and_die(folder: str, kind: str, run: str | None, fault: str) -> None:
    """Run a job in this process, which may die meanwhile; called in a forked process.

    Args:
        run: name of a run of tasks; None for one call.
    """
    table = database_in(Path(folder)).open_table("docs")
    # Its cache is too small for the values of two shards.
    value_cache.MOST_BYTES = 500
    Fault(fault).arm()
    if run is None:
        run_call(table, Job(kind))
    else:
        run_tasks(table, Job(kind, True), Path(folder), run)


def break_off(folder: str) -> None:
    """Run older code that dies before its third commit. Because of a cap it computes the same rows in both runs."""
    table = database_in(Path(folder)).open_table("docs")
    Fault("commit.before:3").arm()
    table.backfill("y", udf=valued, runner="inline", max_rows=2 * PER_FRAGMENT + 2 * CHECKPOINT, **SIZES)


def collect_and_die(folder: str, passage: int) -> None:
    """Run the cleanup as if a year had passed without jobs, and die at some file."""
    location = database_in(Path(folder)).location("docs")
    Fault(f"cleanup.removed:{passage}").arm()
    collect(location, find_garbage(location, "1s", now=time.time() + A_YEAR))


def run_call(table: Table, job: Job) -> BackfillResult:
    """Run the job in one call, as in a notebook."""
    return table.backfill("y", udf=job.udf, runner="inline", **job.options)


def run_tasks(table: Table, job: Job, folder: Path, run: str) -> BackfillResult:
    """Run the job task by task, as in Airflow: a succeeded task does not run again, and tasks get a plan's
    fingerprint."""
    location, states = table.location, States(folder / f"{run}.json")
    told = states.read()
    if "fingerprint" not in told:
        plan, _ = table._plan(BackfillRequest.of({**job.options, "column": "y", "job_id": run}), job.udf)
        told = states.add("fingerprint", record_plan(plan, location, run=run).fingerprint)
    storage = JobFolder.of(location.checkpoints, run).storage
    saved = load_plan(storage, told["fingerprint"])
    for index in range(len(saved.shards)):
        if f"apply-{index}" not in told:
            apply_inline(location, saved.spec, saved.load_shard(storage, index), Udfs({saved.spec.column: job.udf}))
            told = states.add(f"apply-{index}", True)
        if f"commit-{index}" not in told:
            result = PlannedJob(location, saved).commit(saved.load_shard(storage, index))
            told = states.add(f"commit-{index}", result.to_json())
    shards = [ShardResult.from_json(told[f"commit-{index}"]) for index in range(len(saved.shards))]
    return PlannedJob(location, saved).finish(shards)


@dataclass(frozen=True)
class States:
    """The results of succeeded tasks, as a scheduler stores them."""

    path: Path

    def read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def add(self, name: str, value: Any) -> dict[str, Any]:
        told = {**self.read(), name: value}
        half = self.path.with_suffix(".half")
        half.write_text(json.dumps(told))
        half.replace(self.path)
        return told


@dataclass(frozen=True)
class Round:
    """One run of the job.

    Args:
        faults: the points at which its attempts die, one after another.
        meanwhile: changes of the table after each of these attempts, and after the run.
    """

    faults: tuple[Fault, ...]
    meanwhile: tuple[Change, ...]


@dataclass(frozen=True)
class History:
    """A history: the runs of a job on a table, and the changes between them.

    Args:
        seed: seed of all random choices.
        before: changes before the first run; the first half of the rows is computed before that if ``begun``.
        begun: an earlier run made something visible.
    """

    seed: str
    job: Job
    rounds: tuple[Round, ...]
    before: tuple[Change, ...] = ()
    begun: bool = False

    def __str__(self) -> str:
        rounds = [
            f"{[f.point for f in each.faults]} {[change.__name__ for change in each.meanwhile]}" for each in self.rounds
        ]
        before = [change.__name__ for change in self.before]
        return f"{self.seed}: {self.job}, begun={self.begun}, before={before}, then {'; '.join(rounds)}"


@dataclass
class Figures:
    """The results of a number of histories."""

    histories: int = 0
    operations: int = 0
    kills: int = 0
    rows: int = 0
    values: int = 0
    rows_run: int = 0
    rows_due: int = 0
    again: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __str__(self) -> str:
        return (
            f"{self.histories:,} histories, {self.operations:,} operations, {self.kills:,} kills, {self.rows:,} rows, "
            f"{self.values:,} values looked at, 0 mismatches, {self.rows_due:,} rows due, {self.rows_run:,} rows run, "
            f"{self.again:,} of them again"
        )


def live(history: History, folder: Path, harmed: bool) -> tuple[World, Figures]:
    """Run a history, with or without its kills."""
    job, figures = history.job, Figures(histories=1)
    world = World.make(folder, job)
    os.environ.update(world.environment)
    if job.kind == "continue":
        assert forge().run("tests.support.harness:break_off", {"folder": str(folder)}, world.environment) != 0
    if history.begun:
        options = job.options if job.kind == "continue" else {**job.options, "where": "id < 40"}
        world.table.backfill("y", udf=job.udf, runner="inline", **options)
    change_it(world, history, history.before, figures)
    world.checked = world.table.version
    world.marks.append(world.table.version)
    for number, each in enumerate(history.rounds):
        run = f"round-{number}" if job.as_tasks else None
        if not harmed:
            carry_out(world, job, run)
        for fault in each.faults if harmed else ():
            arguments = {"folder": str(folder), "kind": job.kind, "run": run, "fault": fault.point}
            code = forge().run("tests.support.harness:run_and_die", arguments, world.environment)
            assert code in (0, -signal.SIGKILL), f"the run that was to die at {fault.point} ended with {code}"
            figures.kills += code != 0
            figures.values += assert_durable(world, job)
        change_it(world, history, each.meanwhile, figures)
        if harmed:
            result = carry_out(world, job, run)
            fits = set(each.meanwhile) <= set(HARMLESS)
            if fits:
                assert (result.state, result.rows_left) == ("DONE", 0)
            # With a plan from before the changes, each shard completes its own rows of a fragment.
            figures.values += assert_durable(world, job, whole=fits or not job.as_tasks)
        world.marks.append(world.table.version)
    # Plan the rows again that a plan from before the changes left.
    assert run_call(world.table, job).state == "DONE"
    figures.operations += 2 + 2 * len(history.rounds)
    figures.values += assert_durable(world, job)
    assert_complete(world, job)
    figures.rows = world.table.count_rows()
    figures.rows_run = len(world.trace)
    return world, figures


def change_it(world: World, history: History, changes: tuple[Change, ...], figures: Figures) -> None:
    for change in changes:
        change(world, random.Random(f"{history.seed}-{world.steps}"))
        world.steps += 1
        figures.operations += 1


def carry_out(world: World, job: Job, run: str | None) -> BackfillResult:
    """Run the job to its end; a task whose plan was cleaned up fails with that message, and is cleared with the
    plan."""
    if run is None:
        result = run_call(world.table, job)
    else:
        try:
            result = run_tasks(world.table, job, world.folder, run)
        except InvalidInput as error:
            if "Clear the plan task with its downstream tasks" not in str(error):
                raise
            States(world.folder / f"{run}.json").path.unlink()
            result = run_tasks(world.table, job, world.folder, run)
    if result.from_version in {found["version"] for found in world.table.lance.versions()}:
        assert_honest(result, world.table)
    return result


def assert_durable(world: World, job: Job, whole: bool = True) -> int:
    """Check that no version since the last check shows a wrong value, and that all facts are true.

    Args:
        whole: whether commits complete all fragments that they touch, as they do unless fragments are compacted
            meanwhile.
    """
    filter_evaluated = 0
    versions = {found["version"] for found in world.table.lance.versions()}
    before: dict[int, tuple[int, Any]] | None = None
    for version in range(world.checked, world.table.version + 1):
        if version not in versions:
            before = None
            continue
        columns = ["id", "x", "y", *(["z"] if job.kind == "siblings" else [])]
        rows = rows_of(world.table.location.open(version), columns, with_row_address=True)
        now = {row["id"]: (row["_rowaddr"] >> 32, row["y"]) for row in rows}
        if before is not None and job_of(world.table, version):
            filter_evaluated += len(rows)
            written = [row for row in rows if now[row["id"]] != before.get(row["id"])]
            verified = verified_inputs(world, version)
            for row in written:
                inputs = {row["x"], verified.get(row["id"], row["x"])}
                assert any(row["y"] in job.values(x) for x in inputs), f"version {version} shows {row}"
            touched = {row["_rowaddr"] >> 32 for row in written}
            torn = [row for row in rows if row["_rowaddr"] >> 32 in touched and row["y"] not in job.values(row["x"])]
            torn = [row for row in torn if job.selects(row["id"])]
            torn += apart(written)
            assert not (torn and whole), f"version {version} completes a fragment in part: {torn}"
        before = now
    world.checked = world.table.version
    return filter_evaluated + assert_facts(world, job)


def apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose two columns, if one call fills two, are not of one call."""
    return [row for row in rows if "z" in row and row["z"] != (None if row["y"] is None else -row["y"])]


def verified_inputs(world: World, version: int) -> dict[int, int | None]:
    """Return by row the inputs with which a commit was verified, if the fields of their struct changed since.

    Lance reports no conflict between a commit and a change of the schema. The run then verifies again, and reports
    these rows as left.
    """
    transaction = read_transaction(world.table.lance, version)
    if transaction is None or job_of(world.table, version) is None:
        return {}
    now, then = (world.table.location.open(at) for at in (version, transaction.read_version))
    if "s" not in now.schema.names or now.lance_schema.field("s") == then.lance_schema.field("s"):
        return {}
    return {row["id"]: row["x"] for row in rows_of(then, ["id", "x"])}


def assert_facts(world: World, job: Job) -> int:
    """Check that every row that a ledger records as computed or failed is so."""
    dataset = world.table.lance
    columns = columns_of(dataset, [job.input], [], "y")
    state = load_state(world.table.location.checkpoints, columns.output[0]).about(columns.inputs_text)
    filter_evaluated = 0
    for files in read_manifest(dataset, columns).values():
        rows = rows_of(dataset.get_fragment(files.id), ["x", "y"], with_row_address=True)
        for made, known in state.known(files.signature, files.physical_rows).items():
            for row in rows:
                if known & Ranges.of(row["_rowaddr"] & 0xFFFFFFFF, (row["_rowaddr"] & 0xFFFFFFFF) + 1):
                    filter_evaluated += 1
                    wanted = None if made.failures else value_of(row["x"], made.maker, picky=job.fails)
                    assert row["y"] == wanted, f"{made} is not true of {row} in fragment {files.id}"
    return filter_evaluated


def assert_complete(world: World, job: Job) -> None:
    """Check that every selected row holds its value, and that no row is due."""
    wrong = [row for row in world.rows() if job.selects(row["id"]) and row["y"] not in job.values(row["x"])]
    wrong += apart(world.rows())
    assert not wrong, f"{len(wrong)} rows are wrong, such as {wrong[:3]}"
    if job.kind == "indexed":
        rows, dataset = world.rows(), world.table.lance
        assert {row["y"]: 1 for row in rows} == {row["y"]: dataset.count_rows(f"y = {row['y']}") for row in rows}
        assert dataset.stats.index_stats("y_idx")["num_unindexed_rows"] == 0
    if not job.fails:
        version, run = world.table.version, len(world.trace)
        assert not run_call(world.table, job).changed
        assert (world.table.version, len(world.trace)) == (version, run)


def failures(world: World) -> set[tuple[str, int]]:
    """Return existing inputs that failed, by message, with the attempts in which they failed."""
    there = {f"cannot do {row['x']}" for row in world.rows()}
    found = {(record.message, record.attempt) for record in world.table.get_errors(column_name="y", history=True)}
    return {(message, attempt) for message, attempt in found if message in there}


def failed(world: World) -> set[int]:
    """Return the ids of rows that are recorded as failed."""
    addresses = set(world.table.get_failed_row_addresses(column_name="y"))
    rows = rows_of(world.table.lance, ["id"], with_row_address=True)
    return {row["id"] for row in rows if row["_rowaddr"] in addresses}


def assert_alike(history: History, harmed: World, unharmed: World, kills: int) -> int:
    """Check that kills changed nothing except that a few rows ran twice; return the number of these rows."""
    job = history.job
    # Which checkpoints of older code can still be used depends on whether they were used before their rows moved.
    changes = {change for each in history.rounds for change in each.meanwhile}
    if job.kind != "continue" or changes <= set(HARMLESS):
        assert harmed.rows() == unharmed.rows()
    again = sum((harmed.trace.counts() - unharmed.trace.counts()).values())
    # For an async function, the queue holds `max_in_flight` calls, and the same number may have finished out of order.
    interval = {"async": CHECKPOINT + 4 * IN_FLIGHT, "batch": 0}.get(job.kind, CHECKPOINT)
    allowed = kills * interval + harmed.spare
    if job.kind == "dedup" and restore in changes:
        # Runs that were to die keep few values for equal inputs, so rows that a restore took back may run again.
        allowed += ROWS
    if job.fails:
        if job.as_tasks and changes <= set(HARMLESS):
            assert failures(harmed) == failures(unharmed)
        else:
            # A repeated call is a new run, which retries failed rows.
            allowed += kills * sum(is_bad(row["x"]) for row in harmed.rows())
            if collect_garbage_next_year not in changes:
                assert {what for what, _ in failures(harmed)} == {what for what, _ in failures(unharmed)}
            # Kills cause further attempts, so a row may be given up earlier; its record is cleaned up a year later.
            assert failed(harmed) == failed(unharmed)
    assert again <= allowed, f"{again} rows ran again, {allowed} are allowed"
    return again


def check(history: History, folder: Path) -> Figures:
    """Run a history twice and compare; later tests of this process do not see its traces."""
    try:
        with patch.dict(os.environ):
            unharmed, _ = live(history, folder / "unharmed", harmed=False)
            harmed, figures = live(history, folder / "harmed", harmed=True)
        figures.rows_due = len(unharmed.trace)
        figures.again = assert_alike(history, harmed, unharmed, figures.kills)
    except BaseException as error:
        error.add_note(str(history)) if hasattr(error, "add_note") else print(history)
        raise
    return figures


KINDS = ("plain", "where", "skip", "async", "batch", "dedup", "continue", "siblings")


def random_history(seed: int) -> History:
    """Draw a random history."""
    dice = random.Random(f"history-{seed}")
    kind = dice.choices(KINDS, [3, 3, 1, 2, 2, 2, 2, 2])[0]

    # The cleanup removes a job that died a year ago with its record, and then nothing shows what its version computed.
    # A killed cleanup leaves different files of it in the two runs, because their names differ.
    lost = (collect_garbage_next_year, die_collecting_garbage) if kind == "continue" else ()
    possible = [change for change in CHANGES if change not in lost]

    def changes(most: int) -> tuple[Change, ...]:
        return tuple(dice.choices(possible, k=dice.randint(0, most)))

    def fault() -> Fault:
        if dice.random() < 0.3:
            return Fault(f"after:{dice.uniform(0.0, 0.25):.3f}")
        return Fault(f"any:{dice.randint(1, 75)}")

    rounds = tuple(
        Round(tuple(fault() for _ in range(dice.randint(1, 2))), changes(3)) for _ in range(dice.randint(1, 2))
    )
    return History(f"history-{seed}", Job(kind, dice.random() < 0.5), rounds, changes(2), dice.random() < 0.4)
