"""Random histories of columns and views that LanceDB declares: this package and LanceDB compute the same values."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.table import Table

ROOT = Path(__file__).parents[2]
LANCEDB = ROOT / ".venv-lancedb" / "bin" / "python"
HISTORIES = int(os.environ.get("GENEVA_LANCEDB_HISTORIES", "500"))
EXPRESSIONS = [
    "x * 2", "x + n", "coalesce(n, x)", "upper(t)", "concat(t, '-', t)", "x % 3 = 0", "abs(x - 10)", "s.a * x", "s",
    "cast(x as double) / 4", "nullif(t, 'a')", "array_length(l)", "length(t) + x", "n is null",
    "round(cast(x as double) / 3, 2)", "l[1]", "X + 1", "date_trunc('day', d)", "'constant'",
]  # fmt: skip
SCHEMA = pa.schema([
    ("id", pa.int64()), ("x", pa.int64()), ("n", pa.int64()), ("t", pa.string()), ("s", pa.struct([("a", pa.int64())])),
    ("l", pa.list_(pa.int64())), ("d", pa.timestamp("us")),
])  # fmt: skip

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not LANCEDB.exists(), reason="needs LanceDB: make .venv-lancedb/.installed"),
]


class LanceDB:
    """A process in LanceDB's environment."""

    def __init__(self) -> None:
        command = [str(LANCEDB), str(ROOT / "tests/support/lancedb_side.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, folder: Path, what: Any) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([str(folder), what]) + "\n")
        self.process.stdin.flush()
        told = self.process.stdout.readline().strip()
        assert told
        return told


@contextmanager
def lancedb() -> Iterator[LanceDB]:
    peer = LanceDB()
    try:
        yield peer
    finally:
        peer.process.kill()
        peer.process.wait()


def rows(chance: random.Random, start: int, count: int) -> pa.Table:
    def some(values: Callable[[], Any]) -> list[Any]:
        return [None if chance.random() < 0.2 else values() for _ in range(count)]

    values = {
        "id": list(range(start, start + count)), "x": [chance.randrange(30) for _ in range(count)],
        "n": some(lambda: chance.randrange(9)), "t": some(lambda: chance.choice(["a", "Bc", "", "äß"])),
        "s": some(lambda: {"a": chance.randrange(5)}), "l": some(lambda: [chance.randrange(3)] * chance.randrange(4)),
        "d": some(lambda: chance.randrange(10**12)),
    }  # fmt: skip
    return pa.table(values, SCHEMA)


def changes(chance: random.Random, start: int) -> list[Callable[[Table], object]]:
    """A few changes, to be made to both tables alike."""
    more, divisor = rows(chance, start, chance.randint(1, 8)), chance.randint(2, 7)
    possible: list[Callable[[Table], object]] = [
        lambda table: table.add(more),
        lambda table: table.lance.update({"x": "x + 7"}, where=f"id % {divisor} = 0"),
        lambda table: table.lance.update({"t": "'new'", "n": "4"}, where=f"id % {divisor} = 1"),
        lambda table: table.lance.delete(f"id % {divisor + 4} = 2"),
        lambda table: table.lance.optimize.compact_files(),
    ]
    return chance.sample(possible, chance.randint(0, 3))


def values(table: Table, columns: list[str]) -> list[dict[str, Any]]:
    return table.lance.to_table(columns=["id", *columns]).sort_by("id").to_pylist()


def test_values_equal_those_of_lancedb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared = 0
    with lancedb() as peer:
        for seed in range(HISTORIES):
            chance, folder = random.Random(seed), tmp_path / str(seed)
            first = rows(chance, 0, chance.randint(1, 30))
            theirs, ours = (
                connect(folder / name).create_table("docs", first, max_rows_per_file=7) for name in ("theirs", "ours")
            )
            declared = dict(zip(("y", "z"), chance.sample(EXPRESSIONS, 2), strict=True))
            if chance.random() < 0.3:
                declared["after"] = "y is null"
            for name in ("theirs", "ours"):
                peer(folder / name, declared)
            names, start = list(declared), 1_000
            for _ in range(chance.randint(1, 4)):
                for change in changes(chance, start):
                    for table in (theirs, ours):
                        change(table)
                start += 1_000
                for name in names:
                    peer(folder / "theirs", name)
                ours.backfill(names, runner="inline")
                found = values(ours, names)
                assert found == values(theirs, names), (seed, declared)
                compared += len(found) * len(names)
            # LanceDB finds nothing to change in what was computed here.
            for name in names:
                peer(folder / "ours", name)
            assert values(ours, names) == found, (seed, declared)
            shutil.rmtree(folder)
    with capsys.disabled():
        print(f"\n{HISTORIES} histories, {compared:,} values compared")


FILTERS = [None, "x % 2 = 0", "n IS NOT NULL AND t <> ''", "x BETWEEN 5 AND 20", "t IN ('a', 'it''s') OR x > 10"]


def test_views_equal_those_of_lancedb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared, modes = 0, Counter[str]()
    with lancedb() as peer:
        for seed in range(HISTORIES):
            chance, folder = random.Random(seed), tmp_path / str(seed)
            first = rows(chance, 0, chance.randint(0, 30))
            expressions = dict(zip(("y", "Z z"), chance.sample(EXPRESSIONS, 2), strict=True))
            query = {"select": {"id": "id", **expressions}, "where": chance.choice(FILTERS)}
            databases = {name: connect(folder / name) for name in ("theirs", "ours")}
            tables = [one.create_table("docs", first, max_rows_per_file=7) for one in databases.values()]
            for name in databases:
                peer(folder / name, ["v", query])
            theirs, ours = (one.open_view("v") for one in databases.values())
            start, names = 1_000, list(expressions)
            for _ in range(chance.randint(1, 5)):
                for change in changes(chance, start):
                    for table in tables:
                        change(table)
                compacted = chance.random() < 0.2
                if compacted:
                    ours.lance.optimize.compact_files()
                start += 1_000
                mode = peer(folder / "theirs", ["v"])
                if chance.random() < 0.3:
                    found_by = peer(folder / "ours", ["v"])
                    modes[found_by] += 1
                    # LanceDB goes on from a refresh here as from its own.
                    assert compacted or found_by == mode, (seed, query)
                else:
                    ours.refresh()
                    # LanceDB finds nothing to do after a refresh here.
                    assert peer(folder / "ours", ["v"]) == "no_op", (seed, query)
                found = values(ours, names)
                assert found == values(theirs, names), (seed, query)
                compared += len(found) * len(names)
            shutil.rmtree(folder)
    with capsys.disabled():
        print(
            f"\n{HISTORIES} histories of views, {compared:,} values compared, refreshed by LanceDB meanwhile: {modes}"
        )
