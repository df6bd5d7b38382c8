"""Processes on a table whose live column changes its model: one promotes and reverts, one writes, some read.

`python -m tests.support.promoting ROLE FOLDER` runs one of them until the file `stop` is in the folder.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from airflow_geneva import connect
from airflow_geneva.engine.lance_io.table_versions import read_transaction
from airflow_geneva.engine.run.promotion import PROMOTION_PROPERTY
from airflow_geneva.errors import CommitConflict, InvalidInput
from airflow_geneva.table import Table
from tests.udfs_for_tests.models import TRACE, first_model, second_model

ROOT = Path(__file__).parents[2]
LIVE = "embedding"
ROWS = 60
THERE, BACK = ("embedding_v2", "embedding_v1"), ("embedding_v1", "embedding_v2")
"""The candidate and the new name of the live column, for a promotion and for its reversal."""
INDEXES = {"first": 1, "second": 2}


def make_table(folder: Path) -> Table:
    """A table with a live column of the first model, and a complete and indexed candidate of the second."""
    rows = pa.table({"id": pa.array(range(ROWS), pa.int64()), "x": pa.array(range(ROWS), pa.int64())})
    table = connect(folder / "db").create_table("docs", rows, max_rows_per_file=20)
    table.add_columns({LIVE: first_model, THERE[0]: second_model})
    for column, index in ((LIVE, "first"), (THERE[0], "second")):
        table.backfill(column, runner="inline")
        table.lance.create_index(column, "IVF_FLAT", num_partitions=1, name=index)
    return table


class Stage:
    """The folder of one test: its table, and the processes that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = patch.dict(os.environ, {TRACE: str(folder / "calls")})
        self._environment.start()
        self.table = make_table(folder)
        self.started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        self._environment.stop()

    def start(self, role: str, fault: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "AIRFLOW_GENEVA_FAULT": fault}
        command = [sys.executable, "-m", "tests.support.promoting", role, str(self.folder)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    def stop(self, processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
        """Let processes end, and return what each reports."""
        (self.folder / "stop").touch()
        outputs = [process.communicate(timeout=300)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
        return [json.loads(output.splitlines()[-1]) for output in outputs]

    def check(self, processes: list[subprocess.Popen[str]]) -> None:
        """Fail if a process has ended."""
        assert all(process.poll() is None for process in processes), "a process has ended"

    @property
    def done(self) -> list[str]:
        """Return the promotions that a process finished, oldest first."""
        log = self.folder / "promotions"
        return log.read_text().split() if log.exists() else []

    @property
    def commits(self) -> int:
        """Return the number of versions that are promotions."""
        dataset = self.table.lance
        found = (read_transaction(dataset, version) for version in range(1, int(dataset.version) + 1))
        return sum(PROMOTION_PROPERTY in ((one.transaction_properties if one else None) or {}) for one in found)

    def calls(self) -> Counter[str]:
        """How often each model computed each row; queries, which are negative, are left out."""
        return Counter(line for line in (self.folder / "calls").read_text().splitlines() if " -" not in line)


def promote_until_stopped(folder: Path) -> dict[str, Any]:
    """Promote and revert in turn. A call that was interrupted by a kill is repeated first."""
    table, log, longest = connect(folder / "db").open_table("docs"), folder / "promotions", 0.0
    while not (folder / "stop").exists():
        done = len(log.read_text().split()) if log.exists() else 0
        column, keep_as = BACK if done % 2 else THERE
        began = time.monotonic()
        try:
            table.promote_column(column, to=LIVE, keep_as=keep_as)
        except (InvalidInput, CommitConflict) as refused:
            # The writer has rows due, or a job runs.
            if not any(why in str(refused) for why in ("due", "covers", "job")):
                raise
            time.sleep(0.05)
            continue
        longest = max(longest, time.monotonic() - began)
        with log.open("a") as file:
            file.write(f"{column}\n")
    return {"longest": longest}


def write_until_stopped(folder: Path) -> dict[str, Any]:
    """Append, update, delete and compact, and compute the due rows of both columns, whatever their current names."""
    table, chance, following, rounds = (
        connect(folder / "db").open_table("docs"),
        random.Random(1),
        1_000,
        Counter[str](),
    )
    pause, promoted = 0.3, 0
    while not (folder / "stop").exists():
        kind = chance.choice(("append", "update", "compact", "delete"))
        dataset = table.lance
        try:
            if kind == "append":
                table.add([{"id": following + at, "x": following + at} for at in range(3)])
            elif kind == "update":
                # No other row ever has this input.
                some = chance.choice(dataset.to_table(columns=["id"])["id"].to_pylist())
                dataset.update({"x": f"{following + 500}"}, where=f"id = {some}")
            elif kind == "compact":
                dataset.optimize.compact_files(target_rows_per_fragment=200)
            elif dataset.count_rows() > ROWS:
                dataset.delete(f"id = {dataset.to_table(columns=['id'])['id'][0].as_py()}")
        except (OSError, InvalidInput) as conflict:
            # Lance reports a retryable conflict if a promotion was committed meanwhile, or finds earlier names.
            if not any(why in str(conflict) for why in ("Retryable commit conflict", "Append with different schema")):
                raise
        following += 1_000
        rounds[kind] += 1
        compute_both(table)
        # Longer and longer until there is a promotion, which needs a moment without due rows.
        before, promoted = promoted, size_of(folder / "promotions")
        pause = 0.3 if promoted > before else 2 * pause
        time.sleep(min(pause, 20.0))
    return dict(rounds)


def size_of(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def compute_both(table: Table) -> None:
    for column in (LIVE, THERE[0], BACK[0]):
        try:
            table.backfill(column, runner="inline", indexes="update")
        except InvalidInput as gone:
            # The column was just renamed, or was renamed since the last check.
            if "not defined" not in str(gone) and "no column" not in str(gone):
                raise


def read_until_stopped(folder: Path) -> dict[str, Any]:
    """Check for each version that values, index and function are of one model."""
    table, seen = connect(folder / "db").open_table("docs"), Counter[str]()
    while not (folder / "stop").exists():
        dataset = table.lance
        version = int(dataset.version)
        values = dataset.to_table(columns=["x", LIVE])
        made_by = {int(value[0]) for value in values[LIVE].to_pylist() if value is not None}
        function = table.column_function(LIVE, version)
        by_function = int(function(-1)[0])
        near = {"column": LIVE, "q": [float(by_function), 30.0], "k": 1}
        found = dataset.to_table(columns=[LIVE], nearest=near)[LIVE].to_pylist()
        indexes = {INDEXES[one.name] for one in dataset.describe_indices() if one.field_names == [LIVE]}
        said = {function.udf.name}
        expected = {1: "first_model", 2: "second_model"}[by_function]
        assert made_by == indexes == {by_function}, (version, made_by, indexes, by_function)
        assert int(found[0][0]) == by_function, (version, found)
        assert said == {expected}, (version, said)
        seen[str(by_function)] += 1
    return dict(seen)


ROLES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "promote": promote_until_stopped,
    "write": write_until_stopped,
    "read": read_until_stopped,
}

if __name__ == "__main__":
    print(json.dumps(ROLES[sys.argv[1]](Path(sys.argv[2]))))
