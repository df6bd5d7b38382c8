"""The notebook about flights: every cell runs, its values are those of pandas, and what it shows can be read."""

from __future__ import annotations

import ast
import json
import linecache
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "snippets" / "flights.ipynb"


def run_cells(main: ModuleType) -> list[Any]:
    """Run the cells in a module as a kernel does; return what the last line of each one gives."""
    shown = []
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        body = ast.parse(source, name).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), name, "exec"), vars(main))
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), vars(main)))
    return shown


@pytest.mark.parametrize("rows", [3_000, pytest.param(None, marks=pytest.mark.slow)])
def test_the_values_are_those_of_pandas_and_the_counts_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(pd, "read_csv", partial(pd.read_csv, nrows=rows))
    table, plan, results, view, head, again, db = run_cells(main)
    flights, found = main.flights, main.found
    count, missing = len(flights), int(flights["dep_time"].isna().sum())
    assert (count, missing) == ((336_776, 8_255) if rows is None else (rows, missing))
    assert missing

    delay, arrival = flights["dep_delay"], flights["arr_delay"]
    late = pd.cut(delay, [-np.inf, 0, 15, np.inf], right=False, labels=["early", "on time", "late"])
    assert list(found["how_late"].fillna("-")) == list(late.astype(object).fillna("-"))
    np.testing.assert_array_equal(found["speed"], flights["distance"] * 60.0 / flights["air_time"])
    both = [value for value in found["in_the_air"] if value is not None]
    known = delay.notna() & arrival.notna()
    assert list(found["in_the_air"].notna()) == list(known)
    assert [value["caught_up"] for value in both] == list((delay - arrival)[known])
    assert [value["in_time"] for value in both] == list((arrival <= 0)[known])
    names = pd.Series(main.names).str.removesuffix(" Inc.")
    assert list(found["airline"]) == list(flights["carrier"].map(names))
    departure = flights["dep_time"]
    np.testing.assert_array_equal(found["minutes"], departure // 100 * 60 + departure % 100)
    angle = flights["hour"].to_numpy() * (2 * np.pi / 24)
    np.testing.assert_array_equal(
        np.stack(found["clock"]), np.stack([np.cos(angle), np.sin(angle)], 1).astype("float32")
    )

    computed = {
        name: (result.rows_computed, result.rows_failed) for name, result in zip(main.columns, results, strict=True)
    }
    assert computed == dict.fromkeys(computed, (count, 0)) | {"minutes": (count - missing, missing)}
    assert plan.rows_pending == count
    assert (again.rows_computed, again.rows_failed) == (0, missing)  # once more, of three runs
    assert len(table.get_errors(results[4].job_id)) == missing

    chosen = flights[delay > 60]
    shown = view.to_pandas()
    assert (len(view), main.refreshed.rows_computed) == (len(chosen), len(chosen))
    assert list(shown["flight"]) == list(chosen["flight"])
    np.testing.assert_array_equal(shown["hours"], chosen["dep_delay"] / 60)
    assert list(shown["airline"]) == list(chosen["carrier"].map(names))

    assert f"{count:,} rows" in repr(table)
    assert "minutes" in table._repr_html_()
    assert "computed by AirlineName(carrier)" in repr(view)
    assert f"{len(view):,} rows, a view of &#x27;flights&#x27;" in db._repr_html_()
    assert all(len(line) < 200 for one in (table, plan, view, db, again) for line in repr(one).splitlines())
    assert len(head) == 5
