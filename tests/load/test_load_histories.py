"""Random histories of a table with loaded columns, and loads that are killed, against a dict."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_geneva import connect
from airflow_geneva.table import Table
from tests.support.forge import forge
from tests.support.harness import Fault
from tests.support.iceberg import make_iceberg

SIZES: dict[str, Any] = {"shard_size": 2, "commit_granularity": 1, "runner": "inline"}
Model = dict[int, tuple[str | None, int | None]]


def deliver(folder: Path, number: int, values: dict[int, tuple[str, int]]) -> Path:
    place = folder / f"delivery-{number}.parquet"
    rows = [{"id": key, "caption": caption, "score": score} for key, (caption, score) in values.items()]
    schema = pa.schema([("id", pa.int64()), ("caption", pa.string()), ("score", pa.int64())])
    pq.write_table(pa.Table.from_pylist(rows, schema), place)
    return place


def deliver_somehow(
    dice: random.Random, folder: Path, number: int, values: dict[int, tuple[str, int]], spark: Any
) -> Any:
    """Return a file, or a table of Iceberg; with a session of Spark also a DataFrame."""
    place = deliver(folder, number, values)
    kind = dice.choice(["file", "iceberg", *(["frame"] if spark else [])])
    if kind == "iceberg":
        return make_iceberg(folder, pq.read_table(place), f"delivery_{number}", files=2)
    return place if kind == "file" else spark.read.parquet(str(place))


def rows(table: Table) -> Model:
    found = table.lance.to_table(columns=["id", "caption", "score"]).to_pylist()
    return {row["id"]: (row["caption"], row["score"]) for row in found}


def step(
    table: Table, model: Model, dice: random.Random, folder: Path, number: int, sizes: dict[str, Any], spark: Any
) -> None:
    """Change the table and the model in the same way."""
    what = dice.choice(["load", "load", "load", "append", "update", "delete", "compact", "restore"])
    some = sorted(dice.sample(sorted(model), min(len(model), dice.randint(1, 12))))
    if what == "load":
        keys = [*some, 10_000 + number]
        values = {key: (f"{number}-{key}", number * 1_000 + key) for key in keys}
        missing, where = dice.choice(["keep", "null"]), dice.choice([None, "id % 2 = 0"])
        source = deliver_somehow(dice, folder, number, values, spark)
        table.load_columns(source, on="id", on_missing=missing, where=where, **sizes)
        for key in model:
            if where is None or key % 2 == 0:
                model[key] = values.get(key, model[key] if missing == "keep" else (None, None))
    elif what == "append":
        first = max(model, default=0) + 1
        table.add([{"id": key, "x": key} for key in range(first, first + 7)])
        model |= dict.fromkeys(range(first, first + 7), (None, None))
    elif what == "update":
        table.lance.update({"score": "-1"}, where=f"id in ({', '.join(map(str, some))})")
        model |= {key: (model[key][0], -1) for key in some}
    elif what == "delete":
        table.lance.delete(f"id in ({', '.join(map(str, some[:3]))})")
        for key in some[:3]:
            del model[key]
    elif what == "compact":
        table.lance.optimize.compact_files(target_rows_per_fragment=dice.choice([30, 1_000]))
    else:
        then = dice.randint(3, table.version)
        table.location.open(then).restore()
        model.clear()
        model.update(rows(table))


def make(folder: Path) -> Table:
    data = {"id": pa.array(range(60), pa.int64()), "x": pa.array(range(60), pa.int64())}
    table = connect(folder / "db").create_table("docs", pa.table(data), max_rows_per_file=15)
    table.load_columns(deliver(folder, 0, {5: ("0-5", 5)}), on="id", **SIZES)
    return table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "runner"), [*((seed, "inline") for seed in range(6)), pytest.param(6, "spark", marks=pytest.mark.spark)]
)
def test_a_table_has_what_a_dict_has(tmp_path: Path, seed: int, runner: str, request: pytest.FixtureRequest) -> None:
    spark = request.getfixturevalue("spark") if runner == "spark" else None
    table, dice = make(tmp_path), random.Random(f"load-{seed}")
    model = rows(table)
    assert model[5] == ("0-5", 5)
    for number in range(1, 12):
        step(table, model, dice, tmp_path, number, SIZES | {"runner": runner}, spark)
        assert rows(table) == model, number


def load_and_die(folder: str, fault: str, sizes: dict[str, Any]) -> None:
    """Run in a process of its own, which is killed at a fault point."""
    table = connect(Path(folder) / "db").open_table("docs")
    Fault(fault).arm()
    table.load_columns(Path(folder) / "delivery-1.parquet", on="id", **sizes)


ON_SPARK = pytest.param("staged.written:3", 2, {"shard_size": 4, "runner": "spark"}, marks=pytest.mark.spark)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("point", "kept", "then"),
    [
        ("plan.saved:1", 0, {}),
        ("staged.write:3", 2, {}),
        ("staged.written:2", 1, {}),
        ("commit.before:2", 2, {}),
        ("commit.after:1", 2, {}),
        ("finish.begin:1", 4, {}),
        ON_SPARK,
    ],
)
def test_a_load_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, point: str, kept: int, then: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if then:
        request.getfixturevalue("spark")
    table, sizes = make(tmp_path), {**SIZES, **then}
    values = {key: (f"1-{key}", key) for key in range(0, 60, 2)}
    place = deliver(tmp_path, 1, values)
    arguments = {"folder": str(tmp_path), "fault": point, "sizes": {**sizes, "runner": "inline"}}
    assert forge().run("tests.load.test_load_histories:load_and_die", arguments, {}) == -signal.SIGKILL
    staged = {path.name for path in (Path(table.uri) / "data").iterdir()}
    result = table.load_columns(place, on="id", **sizes)
    model: Model = dict.fromkeys(range(60), (None, None)) | {5: ("0-5", 5)} | values
    assert rows(table) == model
    assert result.state == "DONE"
    written = {path.name for path in (Path(table.uri) / "data").iterdir()} - staged
    assert len(written) == 4 - kept
    again = table.load_columns(place, on="id", **sizes)
    assert (again.rows_loaded, again.commits) == (0, ())
