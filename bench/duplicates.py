"""Case duplicates: views without duplicates, beside the same query over all rows again, DuckDB and plain Spark.

DuckDB and Spark keep the first of equal texts. For similar ones, `MinHashLSH` of Spark finds the pairs of a part of
the rows, and does not connect them to clusters. Spark reads Parquet files, which are written before and not measured.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import airflow_geneva
from airflow_geneva import Query, Table

EQUAL, TEXTS, VECTORS = "equal texts", "similar texts", "similar vectors"
SIDES: dict[str, Callable[[Query], Query]] = {
    EQUAL: lambda query: query.deduplicate("text"),
    TEXTS: lambda query: query.deduplicate("text", method="minhash", threshold=0.8),
    VECTORS: lambda query: query.deduplicate("vector", method="cosine", threshold=0.9),
}
SHARE_WITH_VECTORS, NUMBERS = 10, 256
"""Of so many rows, one is compared by its vector, of so many numbers."""
SHARE_FOR_LSH = 100
_SHINGLE, _HASH_TABLES = 7, 4

_FRAGMENTS, _SEED, _WORDS, _OF_A_TEXT, _COPIES = 16, 7, 20_000, 20, 0.1
_SPELLED = pa.array([f"{number * 7_919 % 1_000_003:06x}" for number in range(_WORDS)])
_Words = npt.NDArray[np.int64]
_TIMED = ("ours", "anew", "duckdb", "spark")


def measure(folder: str, rows: int, repeats: int, on_spark: bool) -> list[dict[str, Any]]:
    """Change a source in several ways; after each, refresh a view without duplicates, and evaluate its query anew.

    Args:
        rows: the rows of the source at first; a tenth of them are copies, most with another word.
        repeats: number of measured rounds, each on new tables; one more round is a warm-up.
        on_spark: also run the jobs of Spark, after the first refresh.
    """
    found = []
    for side in SIDES:
        count = rows // SHARE_WITH_VECTORS if side == VECTORS else rows
        changes: dict[str, dict[str, Any]] = {}
        for turn in range(repeats + 1):
            place = Path(folder) / f"duplicates-{turn}"
            for name, seconds, kept in _round(place, count, side, on_spark):
                one = changes.setdefault(name, {key: [] for key in _TIMED}) | {"rows_kept": kept}
                for key, taken in seconds.items() if turn else ():
                    one[key].append(taken)
                changes[name] = one
            shutil.rmtree(place)
        found.append({"side": side, "rows": count, "changes": changes})
    return found


def _round(place: Path, rows: int, side: str, on_spark: bool) -> Iterator[tuple[str, dict[str, float], int]]:
    docs = _with_vectors if side == VECTORS else _docs
    draw = np.random.default_rng(_SEED)
    words = _with_copies(_drawn(rows, draw), draw)
    table = airflow_geneva.connect(place).create_table("docs", docs(words, 0), max_rows_per_file=-(-rows // _FRAGMENTS))
    query = SIDES[side](table.query().select(["id"]))
    view = query.create_materialized_view(name="clean")
    more = max(rows // 100, 1)
    copied = _changed(words[draw.integers(0, rows, more)], draw)
    changes: list[tuple[str, Callable[[], object]]] = [
        ("first refresh", lambda: None),
        ("nothing to do", lambda: None),
        ("1 % more rows, new ones", lambda: table.add(docs(_drawn(more, draw), rows))),
        ("1 % more rows, similar to old ones", lambda: table.add(docs(copied, rows + more))),
        ("1 % of the rows deleted", lambda: table.lance.delete("id % 100 = 7")),
    ]
    for name, change in changes:
        change()
        began = time.perf_counter()
        view.refresh(runner="inline")
        seconds = {"ours": time.perf_counter() - began}
        began = time.perf_counter()
        expected = query.to_arrow()["id"].to_pylist()
        seconds["anew"] = time.perf_counter() - began
        others = [expected]
        if side == EQUAL and find_spec("duckdb"):
            seconds["duckdb"], theirs = _duckdb(table)
            others.append(theirs)
        if on_spark and side != VECTORS and name == changes[0][0]:
            seconds["spark"], found = _spark(table, place / "plain", side)
            others.extend([found] if side == EQUAL else [])
        kept = sorted(view.to_arrow()["id"].to_pylist())
        if any(kept != sorted(other) for other in others):
            raise SystemExit(
                f"Case duplicates, {name}: the view differs from its query, or from what DuckDB or Spark keeps."
            )
        yield name, seconds, len(kept)


def _duckdb(table: Table) -> tuple[float, list[int]]:
    """Keep the first of equal texts; return the seconds, with those to read the table, and the rows that are kept."""
    import duckdb

    began = time.perf_counter()
    rows = table.lance.scanner(columns=["id", "text"]).to_reader()
    with duckdb.connect() as connection:
        connection.register("docs", rows)
        found = connection.sql("SELECT min(id) AS id FROM docs GROUP BY text").to_arrow_table()
    return time.perf_counter() - began, found["id"].to_pylist()


def _spark(table: Table, place: Path, side: str) -> tuple[float, list[int]]:
    """Run a job of Spark; return the seconds, and the rows it keeps or, of similar texts, the first of each pair."""
    import pyarrow.parquet as pq
    from pyspark.ml.feature import HashingTF, MinHashLSH
    from pyspark.sql import SparkSession

    place.mkdir()
    fewer = None if side == EQUAL else f"id % {SHARE_FOR_LSH} = 0"
    for number, fragment in enumerate(table.lance.get_fragments()):
        pq.write_table(fragment.to_table(columns=["id", "text"], filter=fewer), place / f"{number}.parquet")
    session = SparkSession.builder.getOrCreate()
    began = time.perf_counter()
    frame = session.read.parquet(str(place))
    if side == EQUAL:
        found = frame.groupBy("text").agg({"id": "min"}).withColumnRenamed("min(id)", "id").select("id")
    else:
        starts = f"sequence(1, greatest(length(text) - {_SHINGLE - 1}, 1))"
        shingles = frame.selectExpr("id", f"transform({starts}, at -> substring(text, at, {_SHINGLE})) AS shingles")
        hashing = HashingTF(inputCol="shingles", outputCol="hashed", numFeatures=1 << 20, binary=True)
        hashed = hashing.transform(shingles).select("id", "hashed")
        model = MinHashLSH(inputCol="hashed", outputCol="bands", numHashTables=_HASH_TABLES, seed=_SEED).fit(hashed)
        pairs = model.approxSimilarityJoin(hashed, hashed, 0.2).where("datasetA.id < datasetB.id")
        found = pairs.selectExpr("datasetA.id AS id")
    found.write.parquet(f"{place}-found")
    seconds = time.perf_counter() - began
    return seconds, pq.read_table(f"{place}-found")["id"].to_pylist()


def _drawn(rows: int, draw: np.random.Generator) -> _Words:
    return draw.integers(0, _WORDS, (rows, _OF_A_TEXT))


def _changed(words: _Words, draw: np.random.Generator) -> _Words:
    """Give two of three texts another word."""
    found = words.copy()
    some = np.flatnonzero(draw.random(len(found)) < 2 / 3)
    found[some, draw.integers(0, _OF_A_TEXT, len(some))] = draw.integers(0, _WORDS, len(some))
    return found


def _with_copies(words: _Words, draw: np.random.Generator) -> _Words:
    copies = np.flatnonzero(draw.random(len(words)) < _COPIES)
    words[copies] = _changed(words[draw.integers(0, len(words), len(copies))], draw)
    return words


def _docs(words: _Words, first: int) -> pa.Table:
    columns = [_SPELLED.take(pa.array(words[:, at])) for at in range(_OF_A_TEXT)]
    ids = np.arange(first, first + len(words))
    return pa.table({"id": ids, "text": pc.binary_join_element_wise(*columns, " ")})


def _with_vectors(words: _Words, first: int) -> pa.Table:
    """Return texts with vectors: the sum of one for each word, so another word changes the cosine to about 0.95."""
    of_words = np.random.default_rng(_SEED).standard_normal((_WORDS, NUMBERS), np.float32)
    vectors = np.zeros((len(words), NUMBERS), np.float32)
    for at in range(_OF_A_TEXT):
        vectors += of_words[words[:, at]]
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), NUMBERS)
    return _docs(words, first).append_column("vector", column)
