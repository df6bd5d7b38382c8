"""The actors of a world: the real engine, each call in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva import connect, udf
from airflow_geneva.engine.limits.budget import LATENESS, TICK_SECONDS, seconds_each
from airflow_geneva.engine.limits.rate_limit import RateLimit
from airflow_geneva.errors import CommitConflict, InvalidInput
from tests.simulation import others, store
from tests.simulation.kernel import KERNEL
from tests.simulation.others import ROWS, SCHEMA
from tests.simulation.store import stamp_times

SIZES: dict[str, Any] = {"runner": "inline", "checkpoint_interval": 0.0, "commit_granularity": 1}
PER_FRAGMENT = 3


def value_of(x: int) -> int:
    return 2 * x + 1


@udf(data_type=pa.int64(), version="1")
def f(x: pa.Array) -> pa.Array:
    with open(os.environ["SIMULATION_CALLS"], "a", encoding="utf-8") as log:
        log.write("".join(f"{value}\n" for value in x.to_pylist()))
    return pc.add(pc.multiply(x, 2), 1)


@udf(data_type=pa.int64(), version="1", max_in_flight=2)
async def slow(x: int) -> int:
    await asyncio.sleep(x % 3)
    with open(os.environ["SIMULATION_CALLS"], "a", encoding="utf-8") as log:
        log.write(f"{x}\n")
    return value_of(x)


@udf(data_type=pa.int64(), version="1")
def g(x: pa.Array) -> pa.Array:
    return pc.multiply(x, 3)


@udf(data_type=pa.int64(), version="1")
def total(x: list[int]) -> int:
    return 2 * sum(x) + 1


PER_MINUTE = 60


@udf(data_type=pa.int64(), version="1", batch_size=1, limit=RateLimit("service", requests_per_minute=PER_MINUTE))
def limited(x: pa.Array) -> pa.Array:
    with open(os.environ["SIMULATION_CALLS"], "a", encoding="utf-8") as log:
        log.write(f"{KERNEL.now}\n")
    return pc.add(pc.multiply(x, 2), 1)


FUNCTIONS = {function.name: function for function in (f, g, slow, total, limited)}


def make_table(folder: str, rows: int = ROWS) -> Any:
    table = pa.table({"id": range(rows), "x": range(rows), "z": [row % 4 for row in range(rows)]}).cast(SCHEMA)
    return connect(folder).create_table("t", table, max_rows_per_file=PER_FRAGMENT)


def make_column(folder: str, given: Any = None) -> None:
    make_table(folder).add_columns({"n": (f, ["x"])})


def make_slow(folder: str, given: Any = None) -> None:
    make_table(folder).add_columns({"n": (slow, ["x"])})


def make_chain(folder: str, given: Any = None) -> None:
    made = make_table(folder)
    made.add_columns({"a": (f, ["x"])})
    made.add_columns({"n": (g, ["a"])})


def make_limited(folder: str, given: Any = None) -> None:
    make_table(folder).add_columns({"n": (limited, ["x"])})


def make_candidate(folder: str, given: Any = None) -> None:
    made = make_table(folder)
    made.add_columns({"n": (f, ["x"])})
    made.add_columns({"m": (g, ["x"])})


def make_view(folder: str, given: Any = None) -> None:
    query = make_table(folder).query().where("x % 2 = 0").select({"id": "id", "x": "x", "y": (f, ["x"])})
    query.create_materialized_view(connect(folder), "v")


def filled(folder: str, make: str) -> None:
    """What a run left, and changes since then; `computed` has the inputs of that run."""
    globals()[make](folder)
    began = len(calls())
    if make in ("make_view", "make_groups", "make_duplicates"):
        refresh(folder, None)
    else:
        for column in ("a", "n") if make == "make_chain" else ("n",):
            backfill(folder, column)
    table = lance.LanceDataset(f"{folder}/t.lance")
    Path(store.FOLDER, "computed").write_text("\n".join(map(str, calls()[began:])))
    if make != "make_view":  # there, a swap that only adds rows is to meet another
        table.update({"x": "x + 100"}, where="id = 1 or id = 4")
    rows = pa.table({"id": [20, 21], "x": [20, 21], "z": [0, 9]}).cast(SCHEMA)
    lance.write_dataset(rows, table, mode="append")


def died(folder: str, make: str) -> None:
    """What a job left that died between its last values and its first commit, days ago."""
    globals()[make](folder)
    apply(folder, plan(folder, "v" if make == "make_view" else None))


def make_groups(folder: str, given: Any = None) -> None:
    query = make_table(folder).query().group_by("z").agg({"k": "count(*)", "y": (total, ["x"])}, order_by=["id"])
    query.create_materialized_view(connect(folder), "v")


def make_duplicates(folder: str, given: Any = None) -> None:
    query = make_table(folder).query().deduplicate(on="z", method="equal", keep="min(id)")
    query.select({"id": "id", "z": "z", "y": (f, ["x"])}).create_materialized_view(connect(folder), "v")


def backfill(folder: str, given: Any) -> Any:
    return connect(folder).open_table("t").backfill(given or "n", **SIZES).to_json()


def refresh(folder: str, given: Any) -> Any:
    since = lance.LanceDataset(f"{folder}/t.lance").version
    return {**connect(folder).open_view("v").refresh(**SIZES).to_json(), "since": since}


def load(folder: str, given: Any) -> Any:
    return connect(folder).open_table("t").load_columns(LOADED, on="id", **SIZES).to_json()


LOADED = pa.table({"id": range(0, ROWS + 2, 2), "w": [10 * row for row in range(0, ROWS + 2, 2)]})


def promote(folder: str, given: Any) -> Any:
    table = connect(folder).open_table("t")
    with suppress(CommitConflict, InvalidInput):  # it is refused while a job of the columns runs
        table.promote_column("m", to="n", keep_as="n_old", require_complete=False, require_index=False)


def plan(folder: str, given: Any) -> Any:
    """What the plan task of a backfill or a refresh does."""
    from airflow_geneva.engine.plan.request import RefreshRequest
    from airflow_geneva.engine.run.record import record_plan

    sizes = {name: value for name, value in SIZES.items() if name != "runner"} | {"shard_size": 2}
    since = lance.LanceDataset(f"{folder}/t.lance").version
    if given == "v":
        table = connect(folder).open_view("v")
        made = table._plan_refresh_to_run(RefreshRequest.of({}, sizes), "inline")[0]
    else:
        table = connect(folder).open_table("t")
        made = table.plan_backfill("n", **sizes)
    saved = record_plan(made, table.location)
    return {"table": given or "t", "job": saved.spec.job_id, "plan": saved.fingerprint, "since": since}


def find_plan(folder: str, given: Any) -> Any:
    """What a task of a job has that was planned long ago; of a new job, if its plan is gone."""
    from airflow_geneva.engine.job.folder import JobFolder
    from airflow_geneva.engine.job.status import job_ids

    checkpoints = connect(folder).location("t").checkpoints
    for job in job_ids(checkpoints):
        with suppress(FileNotFoundError, InvalidInput):
            record = JobFolder.of(checkpoints, job).storage.read_json("job.json")
            if record.get("plan") and not record.get("ended"):
                found = {"table": "t", "job": job, "plan": record["plan"], "since": 1}
                _, saved, storage = saved_of(folder, found)
                # A cleanup that died may have removed a part of the plan only, and no task of it would ever end.
                if all(os.path.exists(storage.path(str(shard["file"]))) for shard in saved.shards):
                    return found
    return plan(folder, None)


def append_and_plan(folder: str, given: Any) -> Any:
    """Plan after a row was added; the run before, if any, left all right."""
    table = given if isinstance(given, str) else given["table"]
    if table != given:
        assert given["state"] == "DONE", given
        if table == "v":
            check_view(folder, "rows", given["since"])
    lance.LanceDataset(f"{folder}/t.lance").update({"x": "x + 100"}, where="id = 4")
    others.change(folder, "append", random.Random(str(given)))
    return plan(folder, table)


def append_and_backfill(folder: str, given: Any) -> Any:
    """Backfill after a row was added."""
    others.change(folder, "append", KERNEL.dice)
    return backfill(folder, "n")


def saved_of(folder: str, given: Any) -> tuple[Any, Any, Any]:
    from airflow_geneva.engine.job.folder import JobFolder
    from airflow_geneva.engine.plan.saved_plan import load_plan

    location = connect(folder).location(given["table"])
    storage = JobFolder.of(location.checkpoints, given["job"]).storage
    return location, load_plan(storage, given["plan"]), storage


def apply(folder: str, given: Any) -> Any:
    """What the driver of a spark-submit does."""
    from airflow_geneva.engine.run.inline import apply_inline
    from airflow_geneva.engine.run.prepare import Udfs

    location, saved, storage = saved_of(folder, given)
    functions = Udfs({column: FUNCTIONS[made.name] for column, made in saved.spec.udfs.items()})
    for index in range(len(saved.shards)):
        apply_inline(location, saved.spec, saved.load_shard(storage, index), functions)
    return given


def commit(folder: str, given: Any) -> Any:
    from airflow_geneva.engine.run.pipeline import PlannedJob

    location, saved, storage = saved_of(folder, given)
    job = PlannedJob(location, saved)
    found = [job.commit(saved.load_shard(storage, index)).to_json() for index in range(len(saved.shards))]
    return {**given, "committed": found}


BESIDE_A_RESULT = ("since", "table")


def finish(folder: str, given: Any) -> Any:
    from airflow_geneva.engine.results import ShardResult
    from airflow_geneva.engine.run.pipeline import PlannedJob

    location, saved, _ = saved_of(folder, given)
    result = PlannedJob(location, saved).finish([ShardResult.from_json(one) for one in given["committed"]])
    return {**result.to_json(), **{name: given[name] for name in BESIDE_A_RESULT}}


def change(folder: str, given: Any) -> Any:
    """What others do to the table: one change a step, of the kinds that the seed gave."""
    dice = random.Random(given["seed"])
    done = []
    for kind in given["kinds"]:
        KERNEL.step(f"others {kind}")
        try:
            others.change(folder, kind, dice)
            done.append(kind)
        except Exception as error:
            # Others meet conflicts too, and files that their own cleanup removed, and leave it at that.
            if "conflict" not in str(error).lower() and not ("vacuum" in done and "Not found" in str(error)):
                raise
        stamp_times()
    return done


def read_view(folder: str, given: Any) -> Any:
    """Read the view all the time: what a reader sees equals the query at some version of the source."""
    for number in range(given["times"]):
        KERNEL.step(f"reader {number}")
        check_view(folder, given["shape"])
    return None


def check_view(folder: str, shape: str, since: int = 1) -> None:
    """A view shows what its query selects from some version of its source, from `since` on."""
    columns, due = SHAPES[shape]
    seen = sorted(tuple(row[name] for name in columns) for row in connect(folder).open_view("v").to_arrow().to_pylist())
    newest = lance.LanceDataset(f"{folder}/t.lance").version
    versions = [lance.LanceDataset(f"{folder}/t.lance", version=version) for version in range(newest, since - 1, -1)]
    if not any(seen == due(version) for version in versions) and (seen or since > 1):
        now = {version.version: due(version) for version in versions[:3]}
        raise AssertionError(f"a reader saw {seen}, which the query never selected since version {since}, but {now}")


def read_column(folder: str, given: Any) -> Any:
    """Read the column all the time: a value is that of what its row holds or held, or none."""
    for number in range(given["times"]):
        KERNEL.step(f"reader {number}")
        newest = lance.LanceDataset(f"{folder}/t.lance")
        held: dict[int, set[int]] = {}
        for version in range(1, newest.version + 1):
            for row in lance.LanceDataset(f"{folder}/t.lance", version=version).to_table(["id", "x"]).to_pylist():
                held.setdefault(row["id"], set()).add(value_of(row["x"]))
        for row in newest.to_table(["id", "x", "n"]).to_pylist() if "n" in newest.schema.names else ():
            if row["n"] is not None and row["n"] not in held[row["id"]]:
                raise AssertionError(f"a reader saw {row}, whose x was never that")
    return None


Rows = list[tuple[int, ...]]


def rows_of_view(table: lance.LanceDataset) -> Rows:
    rows = table.to_table(columns=["id", "x"], filter="x % 2 = 0").to_pylist()
    return sorted((row["id"], row["x"], value_of(row["x"])) for row in rows)


def groups_of_view(table: lance.LanceDataset) -> Rows:
    found: dict[int, list[int]] = {}
    for row in table.to_table(["x", "z"]).to_pylist():
        found.setdefault(row["z"], []).append(row["x"])
    return sorted((z, len(of), 2 * sum(of) + 1) for z, of in found.items())


def kept_of_view(table: lance.LanceDataset) -> Rows:
    found: dict[int, tuple[int, ...]] = {}
    for row in sorted(table.to_table(["id", "x", "z"]).to_pylist(), key=lambda row: row["id"]):
        found.setdefault(row["z"], (row["id"], row["z"], value_of(row["x"])))
    return sorted(found.values())


def shown_since(folder: str, since: int) -> set[int]:
    """The inputs of the rows that the view selects now, and selected at an earlier version of its source."""
    now, then = (rows_of_view(lance.LanceDataset(f"{folder}/t.lance", version=one)) for one in (None, since))
    return {x for _, x, _ in set(now).intersection(then)}


SHAPES: dict[str, tuple[tuple[str, ...], Callable[[lance.LanceDataset], Rows]]] = {
    "rows": (("id", "x", "y"), rows_of_view),
    "groups": (("z", "k", "y"), groups_of_view),
    "kept": (("id", "z", "y"), kept_of_view),
}


def clean(folder: str, given: Any) -> Any:
    from airflow_geneva.engine import api

    for _ in range(given["times"]):
        KERNEL.step("cleanup begins")
        for name in given["tables"]:
            api.clean_up(connect(folder).location(name), given["ttl"], False)
    return None


FOLLOWED = {"append", "touch", "nudge", "compact", "column", "say"}
"""Changes after which a run makes all rows visible that it computed, wherever they are now."""
TAKEN_BACK = {"restore", "upsert", "vacuum"}
"""After these, rows that a run made right may be due again."""


def judge_column(folder: str, given: Any) -> Any:
    """After the last fault: a quiet run makes all rows right, and the one after it has nothing to do."""
    table = connect(folder).open_table("t")
    functions = {"n": value_of}
    if "n_old" in table.lance.schema.names:
        functions = {"n": lambda x: 3 * x, "n_old": value_of}
    elif "m" in table.lance.schema.names:
        functions["m"] = lambda x: 3 * x
    kinds = {kind for name, changes in given if name == "others" for kind in changes}
    runs = [result for name, result in given if name in ("A", "B") and result and "rows_computed" in result]
    settled: set[int] = set()
    (tries,) = (counts for name, counts in given if name == "world")
    for result in [] if "vacuum" in kinds else runs:
        # An orphan may commit after its job has told what it committed.
        if not tries.get("stopped"):
            honest(table, result)
        # A cleanup may remove values of a job that died, which a plan has just found. A ledger that cannot be read
        # counts as damaged, and nobody knows whose values are those that another job has committed.
        if functions.keys() == {"n"} and kinds <= FOLLOWED and not cleaned(given) and not tries.get("ledgers not read"):
            assert result["state"] == "DONE", f"{result} after {kinds}"
        if functions.keys() == {"n"} and result["state"] == "DONE" and not kinds & TAKEN_BACK:
            settled |= right(table, result)
            if not tries.get("stopped"):
                commits_are_right(table, result["commits"])
    if functions.keys() == {"n"} and "vacuum" not in kinds and not tries.get("disk fails"):
        commits_are_needed(table)
    began = calls()
    # A cleanup takes a job for dead of which it has seen no sign for a day, and removes its values.
    if functions.keys() == {"n"} and not kinds & TAKEN_BACK and not (cleaned(given) and tries.get("late")):
        # A checkpoint that a disk does not read counts as damaged, and its rows are computed once more.
        once_a_process(sum(tries.get(name, 0) for name in ("backfill", "append_and_backfill", "apply", "disk fails")))
    for column, function in functions.items():
        quiet(lambda column=column: table.backfill(column, **SIZES))  # type: ignore[misc]
        wrong = [row for row in table.to_arrow().to_pylist() if row[column] != function(row["x"])]
        assert not wrong, f"{len(wrong)} rows of {column} are wrong after a quiet run, such as {wrong[:2]}"
    again = settled.intersection(calls()[len(began) :])
    assert not again, f"{again} were computed again although a run was done with them"


def once_a_process(processes: int) -> None:
    """Each process computed an input once at most, and none an input whose value was there when the world began."""
    often = {x: times for x, times in Counter(calls()).items() if times > processes}
    assert not often, f"{often} were computed again, and {processes} processes computed"
    again = set(calls()).intersection(numbers_in(f"{store.FOLDER}/computed"))
    assert not again, f"{again} were computed again although the world began with their values"


def commits_are_right(table: Any, versions: Sequence[int]) -> None:
    """A run that is done has made no value visible that was not that of its row then."""
    for version in versions:
        for fragment in replaced_by(table, version):
            rows = lance.LanceDataset(table.lance.uri, version=version).get_fragment(fragment)
            held = rows.to_table(columns=["id", "x", "n"]).to_pylist()
            wrong = [row for row in held if row["n"] not in (None, value_of(row["x"]))]
            if wrong:  # others may have replaced the inputs of rows that the run has not planned
                before = lance.LanceDataset(table.lance.uri, version=version - 1).to_table(["id", "x", "n"]).to_pylist()
                wrong = [row for row in wrong if row not in before]
            assert not wrong, f"the run was done, and its version {version} has {wrong}"


def commits_are_needed(table: Any) -> None:
    """No commit of a job replaces the values of a fragment that had all of them, in the rows that it has."""
    newest = table.lance
    for version in range(2, newest.version + 1):
        for at in replaced_by(table, version):
            before = lance.LanceDataset(newest.uri, version=version - 1).get_fragment(at)
            files = before.metadata.files
            if field_of(table) not in {field for file in files for field in file.fields}:
                continue
            # A cleanup may remove what a job that died had staged, while somebody lets it commit: it looks afterwards.
            if not all(os.path.exists(f"{newest.uri}/data/{file.path}") for file in files):
                continue
            rows = before.to_table(columns=["x", "n"]).to_pylist()
            wrong = [row for row in rows if row["n"] != value_of(row["x"])]
            assert wrong or not rows, f"version {version} replaces {rows}, which were right"


def replaced_by(table: Any, version: int) -> list[int]:
    """Return the fragments whose values of `n` a job has committed in a version."""
    transaction = table.lance.read_transaction(version)
    if "geneva.job_id" not in ((transaction and transaction.transaction_properties) or {}):
        return []
    groups, n = getattr(transaction.operation, "replacements", ()), field_of(table)
    return [group.fragment_id for group in groups if n in group.new_file.fields]


def field_of(table: Any) -> int:
    (found,) = (int(field.id()) for field in table.lance.lance_schema.fields() if field.name() == "n")
    return found


def cleaned(given: Any) -> bool:
    """Tell whether a cleanup was there."""
    return any(name == "cleaner" for name, _ in given)


def calls() -> list[int]:
    """Return what `f` was called with, in order."""
    return numbers_in(os.environ["SIMULATION_CALLS"])


def numbers_in(path: str) -> list[int]:
    with suppress(FileNotFoundError), open(path, encoding="utf-8") as log:
        return [int(line) for line in log if line.strip().isdigit()]
    return []


def judge_chain(folder: str, given: Any) -> Any:
    """Of a column that is computed from a computed one."""
    table = connect(folder).open_table("t")
    for column in ("a", "n"):
        quiet(lambda column=column: table.backfill(column, **SIZES))  # type: ignore[misc]
    wrong = [row for row in table.to_arrow().to_pylist() if row["n"] != 3 * value_of(row["x"])]
    assert not wrong, f"{len(wrong)} rows are wrong after a quiet run, such as {wrong[:2]}"


def quiet(run: Callable[[], Any]) -> None:
    first, second = run(), run()
    assert first.state == "DONE", f"the quiet run is {first.state}"
    assert (second.rows_run, second.changed) == (0, False), f"the run after it ran {second.rows_run} rows"


def right(table: Any, result: Any) -> set[int]:
    """Rows that a finished run read, and that have not changed since, have their value; return their inputs."""
    before = table.location.open(result["from_version"]).to_table(["id", "x"]).to_pylist()
    read = {(row["id"], row["x"]) for row in before}
    now = table.lance.to_table(["id", "x", "n"]).to_pylist()
    same = [row for row in now if (row["id"], row["x"]) in read]
    wrong = [row for row in same if row["n"] != value_of(row["x"])]
    assert not wrong, f"{wrong[:3]} after a run from version {result['from_version']} that was {result['state']}"
    return {row["x"] for row in same}


def honest(table: Any, result: Any) -> None:
    from airflow_geneva.engine.results import BackfillResult
    from tests.support.invariants import assert_honest

    assert_honest(
        BackfillResult.from_json({name: value for name, value in result.items() if name not in BESIDE_A_RESULT}), table
    )


def judge_promotion(folder: str, given: Any) -> Any:
    """Also what others said of the table stays."""
    kinds = {kind for name, changes in given if name == "others" for kind in changes}
    said = [kind for name, changes in given if name == "others" for kind in changes].count("say")
    if "restore" not in kinds:
        found = lance.LanceDataset(f"{folder}/t.lance").schema.metadata or {}
        there = sum(name.startswith(b"theirs") for name in found)
        assert there == said, f"others wrote {said} times into the metadata: {sorted(found)}"
    return judge_column(folder, given)


def judge_load(folder: str, given: Any) -> Any:
    table = connect(folder).open_table("t")
    quiet(lambda: table.load_columns(LOADED, on="id", **SIZES))
    values = dict(zip(LOADED["id"].to_pylist(), LOADED["w"].to_pylist(), strict=True))
    for row in table.to_arrow().to_pylist():
        if row["id"] in values:
            assert row["w"] == values[row["id"]], f"{row} was loaded wrong"
    return judge_column(folder, given)


def judge_limited(folder: str, given: Any) -> Any:
    """No time has more calls than the intervals of the limit that begin in it, or right before it."""
    with suppress(FileNotFoundError), open(os.environ["SIMULATION_CALLS"], encoding="utf-8") as log:
        times = sorted(map(float, log))
        for number, began in enumerate(times):
            for count, ended in enumerate(times[number:], 1):
                most = (ended - began + LATENESS + 2 * TICK_SECONDS) / seconds_each(PER_MINUTE) + 1
                assert count <= most, f"{count} calls from {began:.1f} to {ended:.1f}"
    return judge_column(folder, given)


def judge_view(folder: str, given: Any, shape: str = "rows") -> Any:
    runs = [result for name, result in given if name in ("A", "B")]
    kinds = {kind for name, changes in given if name == "others" for kind in changes}
    (tries,) = (counts for name, counts in given if name == "world")
    # A cleanup may remove values of a job that died, which a retry counts on.
    alone = len(runs) == 1 and not tries.get("stopped") and not cleaned(given)
    if alone and not any(kind.startswith("view ") for kind in kinds):
        assert runs[0]["state"] == "DONE", f"{runs[0]}, and nobody else changed the view"
    if "view copy" not in kinds:
        check_view(folder, shape, max((result["since"] for result in runs if result["state"] == "DONE"), default=1))
    # A row runs whole if a column changes that the view reads. Of those that change, "rows" reads only the input.
    view, exact, began = connect(folder).open_view("v"), shape == "rows" and not kinds & TAKEN_BACK, len(calls())
    if exact:
        once_a_process(tries.get("refresh", 0) + tries.get("apply", 0))
    quiet(lambda: view.refresh(**SIZES))
    for result in runs if exact else ():
        read = shown_since(folder, result["since"]) if result["state"] == "DONE" else set()
        again = read.intersection(calls()[began:])
        assert not again, f"{again} were computed again although a refresh was done with them"
    columns, due = SHAPES[shape]
    seen = sorted(tuple(row[name] for name in columns) for row in view.to_arrow().to_pylist())
    wanted = due(lance.LanceDataset(f"{folder}/t.lance"))
    assert seen == wanted, f"after a quiet refresh the view has {seen}, and its query selects {wanted}"


def judge_in_turn(folder: str, given: Any) -> Any:
    assert given, "the runs did not come to their end"
    return judge_view(folder, given) if given[0][1]["table"] == "v" else judge_column(folder, given)


def judge_groups(folder: str, given: Any) -> Any:
    return judge_view(folder, given, "groups")


def judge_duplicates(folder: str, given: Any) -> Any:
    return judge_view(folder, given, "kept")


def no_judge(folder: str, given: Any) -> Any:
    return None
