"""Case duplicates: views without duplicates, beside the same query over all rows again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import airflow_geneva
from airflow_geneva import Query

SIDES: dict[str, Callable[[Query], Query]] = {
    "equal texts": lambda query: query.deduplicate("text"),
    "similar texts": lambda query: query.deduplicate("text", method="minhash", threshold=0.8),
}
_FRAGMENTS, _SEED, _WORDS, _OF_A_TEXT, _COPIES = 16, 7, 20_000, 20, 0.1
_SPELLED = pa.array([f"{number * 7_919 % 1_000_003:06x}" for number in range(_WORDS)])
_Words = npt.NDArray[np.int64]


def measure(folder: str, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Change a source in several ways; after each, refresh a view without duplicates, and evaluate its query anew.

    Args:
        rows: the rows of the source at first; a tenth of them are copies, most with another word.
        repeats: number of measured rounds, each on new tables; one more round is a warm-up.
    """
    found = []
    for side, deduplicated in SIDES.items():
        changes: dict[str, dict[str, Any]] = {}
        for turn in range(repeats + 1):
            place = Path(folder) / f"duplicates-{turn}"
            for name, ours, anew, kept in _round(place, rows, deduplicated):
                one = changes.setdefault(name, {"ours": [], "anew": []}) | {"rows_kept": kept}
                if turn:
                    one["ours"].append(ours)
                    one["anew"].append(anew)
                changes[name] = one
            shutil.rmtree(place)
        found.append({"side": side, "rows": rows, "changes": changes})
    return found


def _round(
    place: Path, rows: int, deduplicated: Callable[[Query], Query]
) -> Iterator[tuple[str, float, float, int]]:  # fmt: skip
    draw = np.random.default_rng(_SEED)
    words = _with_copies(_drawn(rows, draw), draw)
    table = airflow_geneva.connect(place).create_table(
        "docs", _docs(words, 0), max_rows_per_file=-(-rows // _FRAGMENTS)
    )
    query = deduplicated(table.query().select(["id"]))
    view = query.create_materialized_view(name="clean")
    more = max(rows // 100, 1)
    copied = _changed(words[draw.integers(0, rows, more)], draw)
    changes: list[tuple[str, Callable[[], object]]] = [
        ("first refresh", lambda: None),
        ("nothing to do", lambda: None),
        ("1 % more rows, new ones", lambda: table.add(_docs(_drawn(more, draw), rows))),
        ("1 % more rows, similar to old ones", lambda: table.add(_docs(copied, rows + more))),
        ("1 % of the rows deleted", lambda: table.lance.delete("id % 100 = 7")),
    ]
    for name, change in changes:
        change()
        began = time.perf_counter()
        view.refresh(runner="inline")
        ours = time.perf_counter() - began
        began = time.perf_counter()
        expected = query.to_arrow()["id"].to_pylist()
        anew = time.perf_counter() - began
        if sorted(view.to_arrow()["id"].to_pylist()) != sorted(expected):
            raise SystemExit(f"Case duplicates, {name}: the view differs from its query.")
        yield name, ours, anew, len(expected)


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
