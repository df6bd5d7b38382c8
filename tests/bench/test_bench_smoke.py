"""The bench measures two ways to the same values; how fast they are is for a person to judge."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest

import airflow_geneva
from bench import charts, floor, report, udfs
from bench.__main__ import OTHERS, BenchmarkRun, main
from bench.cases import CASES, Case, open_table
from bench.measure import MEASUREMENTS
from bench.planning import FIRST_ROWS, ROWS
from tests.support.s3_server import WEED


@pytest.mark.parametrize("name", sorted({case.udf.name: case.name for case in CASES.values()}.values()))
def test_the_floor_and_a_backfill_give_the_same_values(name: str, tmp_path: Path) -> None:
    case = CASES[name].small()
    case.make(tmp_path)
    table = open_table(tmp_path)
    table.add_columns({"ours": (case.udf, [case.column])})
    floor.add_column(table.uri, "theirs", case.udf)
    computed = table.backfill("ours", runner="inline").rows_computed
    assert floor.fill_column(table.uri, case.column, "theirs", case.udf) == computed == case.rows
    values = table.to_arrow()
    assert values.column("ours").equals(values.column("theirs"))
    assert values.column("ours").null_count == 0


def test_the_floor_fills_only_fragments_without_values(tmp_path: Path) -> None:
    table = airflow_geneva.connect(tmp_path).create_table("docs", pa.table({"x": pa.array(range(40))}))
    floor.add_column(table.uri, "y", udfs.double)
    assert floor.fill_column(table.uri, "x", "y", udfs.double) == 40
    assert floor.fill_column(table.uri, "x", "y", udfs.double) == 0
    assert Case("grow", "", 40, 1, udfs.double).grow(table) == 4
    assert floor.fill_column(table.uri, "x", "y", udfs.double) == 4
    values = table.to_arrow()
    assert values.column("y").to_pylist() == [2 * x for x in values.column("x").to_pylist()]


@pytest.mark.slow
def test_a_quick_run_measures_every_case_and_finds_the_rows_that_were_due(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 40 measurements, each without a process of its own, which the run on Spark has.
    monkeypatch.setattr(BenchmarkRun, "_measure", lambda _, name, **keywords: MEASUREMENTS[name](**keywords))
    # But hourly runs and pages, which need an Airflow of their own, and limits, which tests/limits measures.
    others = [name for name in OTHERS if name not in ("hourly", "limits", "pages")]
    results = main(["--quick", "--cases", ",".join([*CASES, *others])])
    compared = {run["case"]: run for run in results["compare"]}
    assert set(compared) == {name for name, case in CASES.items() if case.repeats}
    assert all(run["agree"] for run in compared.values())
    small = {name: CASES[name].small().rows for name in compared}
    due = {name: {"fill": rows, "again": 0, "grow": rows // 10}[CASES[name].kind] for name, rows in small.items()}
    assert {name: run["rows"] for name, run in compared.items()} == due
    assert {name: run["floor_rows"] for name, run in compared.items()} == due
    pending = {(run["fragments"], run["columns"], run["computed"]): run["rows_pending"] for run in results["plan"]}
    assert pending == {
        (fragments, columns, computed): 0 if computed else FIRST_ROWS + (fragments - 1) * ROWS
        for fragments, columns, computed in (
            *((50, columns, computed) for columns in (3, 30) for computed in (False, True)),
            (200, 3, True),
        )
    }
    assert set(results["slow"]["sides"]) == {"none", "10 s", "1 s"}
    assert {about["files"] > 0 for about in (results["aging"]["ours"], results["aging"]["lances"])} == {True}
    assert {job["by"] for job in results["estimate"]} == {"history", "sample"}
    assert [run["calls"] for run in results["async"]] == [50]
    assert {(job["job"], job["calls"]) for job in results["paid_once"]["jobs"]} == {("first", 120), ("later", 0)}
    services = results["services"]
    assert {name for name, run in services.items() if run["refused"]} <= {"plain script"}
    unpaid = {"10 % moved": 0, "30 copies": 0}
    assert {name: services[name]["paid"] for name in unpaid} == unpaid
    assert services["10 % moved"]["due"] == 0
    for change in ("first load, inline", "10 % edited at the start", "10 % edited at the end"):
        assert services[change]["paid"] == services[change]["new"] > 0
    assert services["five kills"]["paid"] - services["five kills"]["new"] <= services["five kills"]["allowed"]
    assert services["a cut answer"]["paid"] - services["a cut answer"]["new"] <= services["a cut answer"]["new"] / 2
    if WEED.exists():
        first, nothing = (results["far"]["at"][0]["runs"][f"column, {run}"] for run in ("first", "nothing to do"))
        assert 0 < nothing["depth"] <= nothing["requests"] < first["requests"]
        assert 0 < results["far"]["at"][0]["busy"] <= 1
    busy = results["busy"]
    assert set(busy["at"]) == ({"disk", "1 ms"} if WEED.exists() else {"disk"})
    assert all(0 < run["busy"] <= 1 and run["devices"] == 1 for sides in busy["at"].values() for run in sides.values())
    assert len(busy["at"]["disk"]) == 5
    assert [(run["rows"], run["devices"]) for run in results["links"]["runs"]] == [(60, 1)] * 2 + [(20, 1)] * 2
    assert results["load"][0]["rows_loaded"] == 2_000
    assert set(results["took"]) == {*CASES, *others}
    indexed = results["indexes"]
    assert (indexed["unindexed"], indexed["segments"]) == (0, 8)
    assert indexed["recall"] >= indexed["rebuilt"] - 0.01
    (view,) = results["view"][:1]
    assert {name: change["rows"] for name, change in view["changes"].items()} == {
        name: change["floor_rows"] for name, change in view["changes"].items()
    }
    assert view["changes"]["nothing again"]["versions"] == view["changes"]["compaction"]["versions"] == 0
    assert {(run["width"], run["kind"], run["side"]) for run in results["wide"]} == {
        (width, kind, side)
        for width in (100_000, 1_000_000)
        for kind in ("random", "repetitive")
        for side in ("floor", "inline")
    }
    assert all(run["agree"] for run in results["wide"])
    assert "## Planning" in capsys.readouterr().out


NOTHING = {"compare": [], "once": [], "view": [], "began": 1_790_000_000.0, "took": {"a": 90.0, "b": 60.0}}


def test_lancedb_stands_beside_us_where_pylance_alone_does_other_work() -> None:
    sides = {"peer": [0.5, 0.7], "ours": [0.25, 0.25]}
    text = report.render({**NOTHING, "peer": [{"rows": 32_000, "changes": {"column: compaction": sides}}]})
    assert "| rows | after | LanceDB, s | ours, s | pylance alone, s |" in text
    assert "| 32,000 | column: compaction | 0.50 / 0.60 | 0.25 / 0.25 |  |" in text


@pytest.mark.spark
def test_a_quick_run_on_spark_agrees_with_the_floor() -> None:
    results = main(["--quick", "--cases", "c", "--runners", "spark"])
    (run,) = results["compare"]
    assert run["agree"]
    assert run["rows"] == run["floor_rows"] == CASES["c"].small().rows


def test_cases_that_are_measured_apart_replace_their_own_tables_and_say_when(tmp_path: Path) -> None:
    behind = tmp_path / "tables.md"
    old = "## Planning\n\nof another run\n\n## The pages of a large database\n\nold\n\n## Services\n\nkept"
    behind.write_text(f"before\n{report.BEGIN}\n\n{old}\n\n{report.END}\nafter\n")
    pages = {"jobs": 1, "columns": 2, "nodes": 3, "pages": [{"path": "/x", "bytes": 1e4, "seconds": [0.1]}]}
    for _ in range(2):
        report.write_sections(behind, {**NOTHING, "pages": pages})
        before, text, after = re.split(f"{report.BEGIN}|{report.END}", behind.read_text())
        assert (before, after) == ("before\n", "\nafter\n")
        headings = re.findall("^## (.*)$", text, re.MULTILINE)
        assert headings == ["Planning", "Services", "The pages of a large database"]
        assert text.count("of another run") == text.count("kept") == text.count("| /x | 10 |") == 1
        assert text.rstrip().count("Measured in one run") == 1
        assert "old" not in text


def test_a_page_has_one_date_and_says_how_each_case_stands_to_its_aim(tmp_path: Path) -> None:
    page, behind = tmp_path / "page.md", tmp_path / "tables.md"
    for one in (page, behind):
        one.write_text(f"before\n{report.BEGIN}\n\n## Planning\n\nof another run\n\n{report.END}\nafter\n")
    seconds = {"column": {"ours": [0.009, 0.008], "floor": [0.004, 0.003]}, "view": {"ours": [0.014], "floor": [0.004]}}
    once = [{"case": "20k", "side": "inline", "seconds": 2.0, "inside": 10, "peak_self": 5e8, "peak_children": 0}]
    small = {"fragments": 2, "rows": 10, "seconds": seconds}
    report.write(page, behind, {**NOTHING, "once": once, "small": small})
    before, text, after = re.split(f"{report.BEGIN}|{report.END}", page.read_text())
    assert (before, after) == ("before\n", "\nafter\n")
    assert text.startswith("\n\nMeasured in one run of 2 minutes, which began on 2026-09-21 14:13 UTC, on ")
    assert len(re.findall(r"20\d\d-", text)) == 1
    assert "| column, a fragment of 10 rows | 4 ms | at most 4 | met |" in text
    assert "| view, a fragment of 10 rows | 7 ms | at most 5 | missed by 40 % |" in text
    assert "| memory for these 20,000 fragments | 500 MB | at most 400 | missed by 25 % |" in text
    assert "| column | 4.0 | 1.5 |" in behind.read_text()
    assert "of another run" not in text + behind.read_text()


def test_charts_draw_the_best_seconds_of_each_side() -> None:
    names = ("pylance alone", "column, first", "view, first", "column, one new row", "column, nothing to do")
    runs = {ms: {name: {"seconds": ms / 10, "requests": 127, "depth": 19} for name in names} for ms in (50, 25, 100)}
    far = {"at": [{"ms": ms, "runs": found} for ms, found in runs.items()]}
    sides = {"ours": [0.2, 0.1], "floor": [0.01], "peer": [1.0]}
    sizes = (10_000, 16_000_000)
    view = [{"rows": rows, "runner": "inline", "changes": {"first refresh": sides}} for rows in sizes]
    peer = [{"rows": rows, "changes": {"column: first": sides}} for rows in sizes]
    compare = [{"case": "a", "runner": "inline", "ours": [0.2, 0.1], "floor": [0.1]}]
    drawn = list(charts.draw({**NOTHING, "far": far, "view": view, "peer": peer, "compare": compare}))
    assert [chart.file.removeprefix("images/") for chart in drawn] == [
        "alone.svg",
        "lancedb.svg",
        "geneva.svg",
        "far.svg",
        "size.svg",
    ]
    images = {chart.file: ElementTree.fromstring(chart.image) for chart in drawn}
    space = "{http://www.w3.org/2000/svg}"
    points = [line.attrib["points"] for line in images["images/far.svg"].iter(f"{space}polyline")]
    assert [[float(point.partition(",")[0]) for point in line.split()] for line in points] == [
        [162.5, 285.0, 530.0]
    ] * 5
    widths = [float(bar.attrib["width"]) for bar in images["images/size.svg"].iter(f"{space}rect")][1:]
    # From 0.01 s, a tenfold time is one half of the axis further.
    assert widths == [190.0, 1.0, 380.0] * 4
