"""The notebook about flights in a real kernel: its values are those of pandas, and what its cells show can be read."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from airflow_geneva import connect

NOTEBOOK = Path(__file__).parents[2] / "docs" / "snippets" / "flights.ipynb"
FEWER = """
from functools import partial
import pandas as pd
pd.read_csv = partial(pd.read_csv, nrows={rows})
"""
KEEP = """
import pickle
kept = {name: globals()[name] for name in ("flights", "found", "names", "results", "refreshed")}
pickle.dump({**kept, "columns": list(columns)}, open("kept", "wb"))
"""


def run_notebook(folder: Path, rows: int | None) -> tuple[SimpleNamespace, list[list[Any]]]:
    """Run the notebook in a kernel; return its variables, and what its cells show."""
    notebook = nbformat.read(NOTEBOOK, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells = [new_code_cell(FEWER.format(rows=rows)), *notebook.cells, new_code_cell(KEEP)]
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return SimpleNamespace(**pickle.loads((folder / "kept").read_bytes())), [cell.outputs for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [20_000, pytest.param(None, marks=pytest.mark.soak)])
def test_the_values_are_those_of_pandas_and_the_counts_are_true(tmp_path: Path, rows: int | None) -> None:
    main, outputs = run_notebook(tmp_path, rows)
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
        name: (result.rows_computed, result.rows_failed)
        for name, result in zip(main.columns, main.results, strict=True)
    }
    assert computed == dict.fromkeys(computed, (count, 0)) | {"minutes": (count - missing, missing)}
    db = connect(tmp_path / "library")
    assert len(db.open_table("flights").get_errors(main.results[4].job_id)) == missing

    chosen = flights[delay > 60]
    (name,) = {name for name in db.table_names() if name.startswith("late_")}
    view = db.open_table(name)
    shown = view.to_pandas()
    assert (len(view), main.refreshed.rows_computed) == (len(chosen), len(chosen))
    assert list(shown["flight"]) == list(chosen["flight"])
    np.testing.assert_array_equal(shown["hours"], chosen["dep_delay"] / 60)
    assert list(shown["airline"]) == list(chosen["carrier"].map(names))

    # Nothing but what a cell ends with, and a bar where a job takes its time: no warning, no log.
    assert {output.output_type for cell in outputs for output in cell} <= {"execute_result", "display_data"}
    bars = [output.data["text/html"] for cell in outputs for output in cell if output.output_type == "display_data"]
    assert all("<progress" in bar and " done, " in bar for bar in bars)
    results = [[output.data for output in cell if output.output_type == "execute_result"] for cell in outputs]
    table, plan, several, of_view, head, again, database = (data for cell in results for data in cell)
    assert f"{count:,} rows, version 1" in table["text/html"]
    assert f"{count:,} pending, 0 with nothing to do" in plan["text/html"]
    assert several["text/plain"].count(f": DONE: {count:,} rows computed") == len(main.columns) - 1
    assert "computed by AirlineName(carrier)" in of_view["text/html"]
    assert head["text/html"].count("<tr") == 1 + 5
    assert (
        f"DONE: 0 rows computed, 0 taken from checkpoints, {count - missing:,} skipped, {missing:,} failed"
        in again["text/html"]
    )
    assert f"{len(view):,} rows, a view of &#x27;flights&#x27;" in database["text/html"]
    ours = (table, plan, of_view, again, database)
    assert all(len(line) < 200 for data in ours for line in data["text/plain"].splitlines())
