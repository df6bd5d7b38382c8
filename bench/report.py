"""Render the results as Markdown, and write them and their charts to the page."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from airflow_geneva.engine.job.spark_start import SparkStart
from bench import aims, charts, planning
from bench.cases import CASES
from bench.duplicates import NUMBERS, SHARE_FOR_LSH
from bench.estimate import ON_SPARK

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def render(results: Mapping[str, Any]) -> str:
    """Return what a run measured: how the cases stand to their aims, and the tables."""
    return "\n\n".join([summary(results), tables(results)])


def summary(results: Mapping[str, Any]) -> str:
    """Return the charts, and how the cases stand to their aims."""
    parts = [_machine(results), *(f"![{chart.title}]({chart.file})" for chart in charts.draw(results))]
    if rows := [_standing(one) for one in aims.stand(results)]:
        parts.append(f"## How the cases stand to their aims\n\n{_table(('case', 'figure', 'aim', ''), rows)}")
    return "\n\n".join(parts)


def tables(results: Mapping[str, Any]) -> str:
    """Return a table for each kind of measurement."""
    found = ((heading, table(results[name])) for name, heading, table in _SECTIONS if results.get(name))
    return "\n\n".join(f"## {heading}\n\n{text}" for heading, text in found)


def write(page: Path, behind: Path, results: Mapping[str, Any]) -> None:
    """Replace what two pages have between their markers, and the charts, by what a run measured."""
    _replace(page, summary(results))
    _replace(behind, tables(results))
    for chart in charts.draw(results):
        (page.parent / chart.file).write_text(chart.image)


def write_sections(behind: Path, results: Mapping[str, Any]) -> None:
    """Replace the tables of the cases that a run measured, and say that they were measured apart from the others."""
    _, measured, _ = _parts(behind)
    there = dict(_cut(measured))
    apart = {heading: f"{text}\n\n{_machine(results)}" for heading, text in _cut(tables(results))}
    merged = {**there, **apart}
    in_order = [(heading, merged[heading]) for _, heading, _ in _SECTIONS if heading in merged]
    _replace(behind, "\n\n".join(f"## {heading}\n\n{text}" for heading, text in in_order))


def _cut(text: str) -> list[tuple[str, str]]:
    """Cut tables into their headings and what stands below these."""
    sections = (section.partition("\n\n") for section in f"\n\n{text}".split("\n\n## ")[1:])
    return [(heading, below) for heading, _, below in sections]


def _replace(page: Path, measured: str) -> None:
    before, _, after = _parts(page)
    page.write_text(f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}")


def _parts(page: Path) -> tuple[str, str, str]:
    """Return what a page has before, between and after its markers."""
    before, _, rest = page.read_text().partition(BEGIN)
    measured, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no lines {BEGIN} and {END}. Put them where the figures belong.")
    return before, measured.strip(), after


def _standing(one: aims.Standing) -> tuple[str, ...]:
    unit = {"times": " times pylance alone", "%": " %"}.get(one.aim.unit, f" {one.aim.unit}")
    far = "" if one.met else f"missed by {100 * abs(one.figure / one.aim.aim - 1):.0f} %"
    most = "at least" if one.aim.unit == "%" else "at most"
    return one.aim.case, f"{one.figure:.3g}{unit}", f"{most} {one.aim.aim:g}", far or "met"


def _machine(results: Mapping[str, Any]) -> str:
    load = os.getloadavg()[0]
    names = ("airflow-geneva", "pylance", "pyarrow", "pyspark", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime(results["began"]))
    return (
        f"Measured in one run of {sum(results['took'].values()) / 60:.0f} minutes, which began on {began} UTC, on "
        f"{os.cpu_count()} cores "
        f"({platform.machine()}), {psutil.virtual_memory().total / (1 << 30):.0f} GB of memory, "
        f"{platform.system()}, Python {platform.python_version()}: {versions}. "
        f"Load average at the end: {load:.1f}."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _compared(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ("case", "runner", "ours, s", "pylance alone, s", "ratio", "CPU ratio", "rows run", "files", "KB", "peer, s")
    rows = [
        (
            CASES[run["case"]].title,
            run["runner"],
            _best_median(run["ours"]),
            _best_median(run["floor"]),
            f"{min(run['ours']) / min(run['floor']):.1f} / {_median_ratio(run['ours'], run['floor']):.1f}",
            f"{_median_ratio(run['ours_cpu'], run['floor_cpu']):.1f}",
            f"{run['rows']:,}",
            f"{run['files']:,}",
            f"{run['bytes'] / 1e3:,.0f}",
            CASES[run["case"]].peer,
        )
        for run in runs
    ]
    return _table(head, rows)


def _cold(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ("case", "side", "since process start, s", "of it the run, s", "peak MB, itself", "peak MB, children")
    rows = [
        (
            CASES[run["case"]].title,
            "pylance alone" if run["side"] == "floor" else run["side"],
            f"{run['seconds']:.1f}",
            f"{run['inside']:.2f}",
            f"{run['peak_self'] / 1e6:,.0f}",
            f"{run['peak_children'] / 1e6:,.0f}",
        )
        for run in runs
    ]
    return _table(head, rows)


def _slow(run: Mapping[str, Any]) -> str:
    head = ("checkpoints", "s", "over pylance alone", "CPU, s", "files", "MB", "rows run")
    without = run["sides"]["none"]["seconds"]
    rows = []
    for name, side in run["sides"].items():
        took = side["seconds"]
        best = 100 * (min(took) / min(without) - 1)
        median = 100 * (_median_ratio(took, without) - 1)
        rows.append(
            (
                "none: pylance alone" if name == "none" else f"every {name}" + (" (default)" if name == "10 s" else ""),
                _best_median(took),
                "" if name == "none" else f"{best:+.1f} % / {median:+.1f} %",
                _best_median(side["cpu"]),
                f"{side['files']:,}",
                f"{side['bytes'] / 1e6:,.1f}",
                f"{side['rows']:,}",
            )
        )
    about = f"A UDF of 1 ms a row -> 384 x float32, {run['rows']:,} rows in {run['fragments']} fragments, inline."
    return about + "\n\n" + _table(head, rows)


def _planned(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ("fragments", "columns", "state", "plan, s", "pylance alone, s", "ratio")
    head = (*head, "whole backfill, s", "peak MB", "of pylance alone", "plan stored, MB", "in s", "shards", "commits")
    rows = [
        (
            f"{run['fragments']:,}",
            f"{run['columns']:,}",
            "nothing to do" if run["computed"] else "everything to do",
            _best_median(run["plan"]),
            _best_median(run["floor"]),
            f"{min(run['plan']) / min(run['floor']):.1f}",
            _best_median(run["backfill"]) if "backfill" in run else "",
            f"{run['peak_plan'] / 1e6:,.0f}",
            f"{run['peak_floor'] / 1e6:,.0f}",
            f"{run['plan_bytes'] / 1e6:,.1f}",
            f"{run['save']:.2f}",
            f"{run['shards']:,}",
            f"{run['commits']:,}",
        )
        for run in runs
    ]
    about = (
        f"Fragments of {planning.ROWS:,} rows. pylance alone opens the table and lists its fragments as the bytes of "
        "the manifest, which is its cheapest way."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _wide(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ("rows, in and out", "data", "side", "s", "ratio", "CPU ratio", "peak MB", "peak MB of the JVM")
    alone = {(run["rows"], run["width"], run["kind"]): run for run in runs if run["side"] == "floor"}
    rows = []
    for run in runs:
        other = alone[run["rows"], run["width"], run["kind"]]
        rows.append(
            (
                f"{run['rows']:,} of {run['width'] / 1e6:g} MB",
                run["kind"],
                "pylance alone" if run is other else run["side"],
                f"{run['seconds']:.1f}",
                "" if run is other else f"{run['seconds'] / other['seconds']:.1f}",
                "" if run is other else f"{run['cpu'] / other['cpu']:.1f}",
                f"{run['python'] / 1e6:,.0f}",
                f"{run['jvm'] / 1e6:,.0f}" if run["jvm"] else "",
            )
        )
    return _table(head, rows)


def _changed(run: Mapping[str, Any]) -> str:
    head = ("change since the last backfill", "fragments then", "plan, s", "rows due", "rows run", "versions written")
    rows = [
        (
            change["change"],
            f"{change['fragments']:,}",
            _best_median(change["plan"]),
            f"{change['due']:,}",
            f"{change['run']:,}",
            f"{change['versions']:,}",
        )
        for change in run["changes"]
    ]
    size = f"{run['rows']:,} rows in {run['fragments']:,} fragments, one change after another, inline."
    return f"{size}\n\n{_table(head, rows)}"


def _aged(run: Mapping[str, Any]) -> str:
    head = ("every hour", "first, s", "last, s", "ratio", "CPU ratio")
    rows = [
        (
            name,
            _seconds(took["first"]),
            _seconds(took["last"]),
            f"{took['last'] / took['first']:.2f}",
            f"{took['last_cpu'] / took['first_cpu']:.2f}",
        )
        for name, took in run["seconds"].items()
    ]
    size = (
        f"{run['cycles']:,} hours of 100 rows appended, 10 updated, 5 deleted, and a compaction of table and view "
        f"every tenth, nothing cleaned up; {run['versions']:,} versions at the end. Medians of the first and last "
        f"{run['ends']} hours, and of the first and last {run['ends_compacted']} compactions, inline."
    )
    files = ", ".join(
        f"{about}: {run[kind]['files']:,} files, {run[kind]['bytes'] / 1e6:,.1f} MB"
        for kind, about in (("ours", "ours"), ("lances", "Lance's versions"), ("data", "data"))
    )
    return f"{size}\n\n{_table(head, rows)}\n\nFiles of the table and its view in the end: {files}."


def _hourly(run: Mapping[str, Any]) -> str:
    head = ("DAG run", "best, s", "median, s", "to two empty tasks")
    empty = statistics.median(next(iter(run["seconds"].values())))
    rows = [
        (name, f"{min(took):.1f}", f"{statistics.median(took):.1f}", f"{statistics.median(took) / empty:.1f}")
        for name, took in run["seconds"].items()
    ]
    about = (
        f"{run['hours']} hours with {run['rows']} new rows each, from trigger to end in a real Airflow on this machine."
    )
    applied = " and ".join(f"{took:.1f} s through {way}" for way, took in run["applied"].items())
    large = f"The apply task that embeds {run['verses']:,} verses like the demo takes {applied}."
    return f"{about}\n\n{_table(head, rows)}\n\n{large}"


def _far(found: Mapping[str, Any]) -> str:
    first, *others = found["at"]
    head = ("run", f"{first['ms']} ms: s", "requests", "depth", *(f"{at['ms']} ms: s" for at in others))
    rows = [
        (
            name,
            f"{run['seconds']:.1f}",
            f"{run['requests']:,}",
            f"{run['depth']:,}",
            *(f"{at['runs'][name]['seconds']:.1f}" for at in others),
        )
        for name, run in first["runs"].items()
    ]
    busy = ", ".join(f"{100 * at['busy']:.0f} % at {at['ms']} ms" for at in found["at"])
    about = (
        "An S3 server on this machine, behind a proxy that delays each request. *Depth* is the number of requests that "
        f"had to wait for another. {found['fragments']} fragments of {found['rows']:,} rows, `x * 2`, one process, "
        "inline; pylance alone has eight threads. *Staged fragments*: "
        f"{found['staged']:,} of one row, which another process plans and commits. "
        f"Images: {found['image_fragments']} fragments of {found['images']} images of 20 KB, "
        "and a function that takes 4 ms an image. It ran for this part of the time between its first "
        f"call and its last: {busy}."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _busy(found: Mapping[str, Any]) -> str:
    where, limit = list(found["at"]), found["limit"]
    head = ("side", *(f"{place}: s, device busy" for place in where))
    shown = lambda run: f"{run['seconds']:.1f}, {100 * run['busy']:.1f} %"  # noqa: E731
    rows = [("a bare loop over decoded rows in memory", *[shown(limit)] * len(where))]
    for side in dict.fromkeys(name for sides in found["at"].values() for name in sides):  # Spark's only from afar
        at = (found["at"][place].get(side) for place in where)
        rows.append((side, *("" if run is None else shown(run) for run in at)))
    about = (
        f"{found['fragments']} fragments of {found['images']} images of 20 KB. An image takes 4 ms of CPU to decode "
        "and 4 ms on the device, one call of 25 images at a time. *Busy* is the fraction of the time from the first to "
        "the last call in which the device worked; on Spark each of two slots has a device. A bare loop over decoded "
        "rows in memory is the limit of one device."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _links(found: Mapping[str, Any]) -> str:
    head = ("function", "runner", "rows of a fragment", "s", "function busy")
    rows = [
        (run["function"], run["runner"], f"{run['rows']:,}", f"{run['seconds']:.1f}", f"{100 * run['busy']:.1f} %")
        for run in found["runs"]
    ]
    about = (
        f"{found['links']:,} links to files of 10 KB on a web server that answers after {found['ms']} ms, with "
        "`preprocess=read_file()`. The function takes 50 files in a call and waits for a device. *Busy* is as above. "
        "By default 16 files of a server are read at a time, which 50 ms limit to 320 per second; the faster function "
        "reads 64."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _gpu(found: Sequence[Mapping[str, Any]]) -> str:
    def row(run: Mapping[str, Any]) -> tuple[str, ...]:
        busy = f"{100 * run['device_busy']:.0f} %" if "device_busy" in run else ""
        return (run["case"], run["side"], f"{run['seconds']:.1f}", f"{run['rows'] / run['seconds']:,.0f}", busy)

    return _table(("case", "side", "seconds", "rows/s", "device busy (NVML)"), [row(run) for run in found])


def _time_left(found: Mapping[str, Any]) -> str:
    head = ("run", "took, s", "said at half time, s", "was left, s", "error")
    rows, near, early = [], 0, 0
    for run in found["runs"]:
        error = run["said"] / run["left"] - 1
        near += run["known"] and abs(error) <= 0.3
        early += not run["known"]
        said = f"{'' if run['known'] else 'at least '}{run['said']:.1f}"
        how = f"{100 * error:+.0f} %" if run["known"] else ""
        rows.append((run["shape"], f"{run['took']:.1f}", said, f"{run['left']:.1f}", how))
    about = (
        "The remaining time that a job reports at half of its duration: 240 rows in 6 fragments, whose calls wait "
        f"{found['seconds']} s in total; on Spark, two at a time, with a new session for each shard. "
        f"{near} of {len(rows) - early} are within 30 % of the actual time."
    )
    if early:
        about += f" Of {early}, Spark was still starting; without an earlier job, no row was measured yet."
    return f"{about}\n\n{_table(head, rows)}"


def _limits(found: Mapping[str, Any]) -> str:
    head = ("requests", "answered 429", "rows paid again", "of the limit used", "seconds")
    used = f"{100 * found['used']:.1f} % in {found['warm_seconds']} s"
    rows = [tuple(map(str, (found["requests"], found["refused"], found["paid_again"], used, round(found["seconds"]))))]
    about = (
        f"{found['processes']} processes compute {found['rows']:,} rows of their tables, ten in a request, within "
        f"`RateLimit(requests_per_minute={found['per_minute']:,})`. A server on loopback enforces it in any minute. "
        f"Processes are killed {found['kills']} times, and started again. The use of the limit is measured from ten "
        "seconds after the first request until 90 % of the requests are made."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _async(found: Sequence[Mapping[str, Any]]) -> str:
    sides = {"script": "a plain asyncio script, s", "inline": "inline, s", "spark": "Spark, warm, s"}
    shown = {side: words for side, words in sides.items() if side in found[0]}
    rows = [(f"{run['calls']:,}", *(f"{run[side]:.2f}" for side in shown)) for run in found]
    about = (
        "Calls of an async function of single rows, which wait 0.1 s each, 100 in flight: `max_in_flight=100` inline, "
        "and 50 in each of two slots on Spark. The script stores nothing; the others write and commit four data files."
    )
    return f"{about}\n\n{_table(('calls', *shown.values()), rows)}"


def _paid_once(found: Mapping[str, Any]) -> str:
    head = ("runner", "job", "calls", "from the task's memory", "from the cache", "called by two tasks at a time")
    rows = [
        (job["runner"], job["job"], *(f"{job[name]:,}" for name in ("calls", "shared", "cached", "raced")))
        for job in found["jobs"]
    ]
    plain, looked_up = (1e6 * found["seconds"][name] / found["alone"] for name in ("plain", "looked_up"))
    about = (
        f"{found['rows']:,} texts, of which {found['distinct']:,} are distinct, mixed over 20 fragments in 4 shards; "
        "on Spark two tasks run at a time. A later job fills another column with the same function. Looking up inputs "
        f"that are all new costs {looked_up - plain:.1f} µs of CPU per row: {looked_up:.1f} instead of {plain:.1f} "
        f"without `dedup`, for {found['alone']:,} distinct numbers, inline."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _services(found: Mapping[str, Any]) -> str:
    head = (
        "",
        "quota used",
        "s",
        "requests",
        "in flight",
        "rows due",
        "new texts",
        "texts paid",
        "paid again",
        "refused",
    )
    rows = [
        (
            name,
            f"{100 * run['used']:.0f} %" if "used" in run else "",
            f"{run['seconds']:,}" if "seconds" in run else "",
            *(f"{run[key]:,}" for key in ("requests", "in_flight", "due", "new", "paid")),
            f"{run['paid'] - run['new']:,}" + (f" of {run['allowed']:,}" if "allowed" in run else ""),
            f"{run['refused']:,}",
        )
        for name, run in found.items()
    ]
    about = (
        "A view of passages of documents and, on it, a view of their embeddings. A server on loopback allows 600,000 "
        "tokens per minute, and a tenth of them in any six seconds; an answer takes 0.25 s, a request has up to 64 "
        "texts, and 16 are in flight. The plain script is that of [Call a model](how-to/call-a-model.md#without-it). "
        "Kills happen within the first ten seconds' quota. Each may cause calls in flight, and one second's quota, to "
        "be paid again."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _groups(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the rows of the table of estimates in which a job counts."""
    if job["by"] == ON_SPARK:
        return (ON_SPARK,)
    return (job["by"], "both", "of these, on Spark" if job["runner"] == "spark" else "")


def _estimate(jobs: Sequence[Mapping[str, Any]]) -> str:
    head = ("what", "by", "jobs", "inside", "upper end at most three times the lower", "median upper / lower")
    rows = []
    for what, words in (("seconds", "seconds"), ("slot_seconds", "slot-seconds")):
        for by in ("history", "sample", "both", "of these, on Spark", ON_SPARK):
            found = [job[what] for job in jobs if by in _groups(job)]
            if not found:
                continue
            inside = sum(one["inside"] for one in found)
            narrow = sum(one["high"] <= 3 * one["low"] for one in found)
            middle = statistics.median(one["high"] / max(one["low"], 1e-9) for one in found)
            rows.append((words, by, str(len(found)), str(inside), str(narrow), f"{middle:.1f}"))
    drawn = [job for job in jobs if job["by"] != ON_SPARK]
    least, most = (end(job["rows"] for job in drawn) for end in (min, max))
    spark = sum(job["runner"] == "spark" for job in drawn)
    about = (
        f"{len(drawn)} backfills of {least:,} to {most:,} rows at 0.05 to 10 ms, in 1 to 12 fragments; {spark} of them "
        "on local Spark with two slots, started for each job, and the others inline. Functions take a row or an array; "
        "for some, a tenth of the rows takes ten times as long, and some load for 0.3 s. The table counts the jobs "
        "whose cost was in the interval of their plan: half of the estimates are based on one earlier job of another "
        "size, half on a sample of 20 rows. The margins were chosen with jobs of other seeds. "
        f"{len(jobs) - len(drawn)} more jobs, of up to 2,000 rows at 1 to 10 ms, ran on an open Spark session after an "
        "earlier job."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _indexes(found: Mapping[str, Any]) -> str:
    head = (f"{found['ends']} hours", "wall clock, s", "CPU, s")
    ends = [(name, *(f"{value:.1f}" for value in found[name])) for name in ("first", "last")]
    ratios = [f"{last / first:.2f}" for first, last in zip(found["first"], found["last"], strict=True)]
    about = (
        f"{found['hours']} hours in which {found['added']:,} vectors are appended to {found['rows']:,} and computed "
        f'inline with `indexes="update"`. At the end of each, {found["unindexed"]:,} rows are not in the IVF_PQ index, '
        f"which has at most {found['segments']} segments. At last recall@10 is {found['recall']:.3f}, and "
        f"{found['rebuilt']:.3f} with an index made again."
    )
    return f"{about}\n\n{_table(head, [*ends, ('last / first', *ratios)])}"


def _beside(runs: Sequence[Mapping[str, Any]]) -> str:
    sides = {"peer": "LanceDB", "ours": "ours", "floor": "pylance alone"}
    head = ("rows", "after", *(f"{side}, s" for side in sides.values()))
    rows = [
        (
            f"{run['rows']:,}",
            name,
            *("" if (taken := change.get(side)) is None else _best_median(taken) for side in sides),
        )
        for run in runs
        for name, change in run["changes"].items()
    ]
    return f"16 fragments; all in turn, inline.\n\n{_table(head, rows)}"


def _small(run: Mapping[str, Any]) -> str:
    head = ("", "ours, ms a fragment", "pylance alone, ms a fragment")
    sides = ("ours", "floor")
    rows = [
        (kind, *(f"{1e3 * min(taken[side]) / run['fragments']:.1f}" for side in sides))
        for kind, taken in run["seconds"].items()
    ]
    about = f"{run['fragments']:,} fragments of {run['rows']} rows, all of them computed for the first time, inline."
    return f"{about}\n\n{_table(head, rows)}"


def _loaded(runs: Sequence[Mapping[str, Any]]) -> str:
    kinds = ("driver's Python", "driver's JVM", "executor", "python workers", "all")
    head = ("keys", "runner", "s", *(f"{kind}, MB" for kind in kinds), "files written for 40 fragments")
    rows = [
        (
            f"{run['keys']:,}",
            run["runner"],
            f"{run['seconds']:.1f}",
            *(f"{run['peaks_mb'][kind]:,}" if kind in run["peaks_mb"] else "" for kind in kinds),
            f"{run['files_written']:,}",
        )
        for run in runs
    ]
    about = (
        "Vectors of 384 floats from eight Parquet files, whose rows have another order than the table's, are loaded "
        "into 40 fragments. Spark has one executor with a heap of 1 GB. All processes of its load are killed with "
        "SIGKILL when half of the fragments are staged; seconds and memory are those of the run that goes on. Every "
        "value was compared."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _started(run: Mapping[str, Any]) -> str:
    starts = [SparkStart.from_json(start) for start in run["starts"]]
    rows = [(f"spark-submit, {turn}", f"{start.seconds:.1f}", str(start)) for turn, start in enumerate(starts, 1)]
    warm = [SparkStart.from_json(start) for start in run["warm"]]
    rows += [(f"Spark Connect, {turn}", f"{start.seconds:.1f}", str(start)) for turn, start in enumerate(warm, 1)]
    about = (
        "From the start of a task to the first call of its function, in a new spark-submit with two slots each time, "
        "and in a new client of a Spark Connect server that runs already. In a new process, importing what a worker "
        "needs of this package from its zip takes "
        f"{_best_median(run['imports'])} s beyond the import of pyarrow and pylance."
    )
    return f"{about}\n\n{_table(('task', 's', 'by part, s'), rows)}" if rows else about


_PEER_VIEW = {"first refresh": "6.9-12", "nothing to do": "2.4-4.6", "10 % more rows": "7.9-16.7"}


def _viewed(run: Mapping[str, Any]) -> str:
    head = ("f: after", "ours, s", "pylance alone, s", "ratio", "LanceDB, s", "rows run", "versions", "peer, s")
    rows = [
        (
            name,
            _best_median(change["ours"]),
            _best_median(change["floor"]),
            f"{min(change['ours']) / min(change['floor']):.1f} / {_median_ratio(change['ours'], change['floor']):.1f}",
            _best_median(change["peer"]) if "peer" in change else "",
            f"{change['rows']:,}",
            f"{change['versions']:,}",
            _PEER_VIEW.get(name, "") if run["rows"] == 1_000_000 else "",
        )
        for name, change in run["changes"].items()
    ]
    about = f"A view of every other of {run['rows']:,} rows in {run['fragments']} fragments, one column computed"
    return f"{about}, {run['runner']}.\n\n{_table(head, rows)}"


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of paired runs, which other load on the machine affects equally."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _best_median(seconds: Sequence[float]) -> str:
    return f"{_seconds(min(seconds))} / {_seconds(statistics.median(seconds))}"


def _seconds(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def _all_viewed(runs: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(_viewed(run) for run in runs)


def _paged(run: Mapping[str, Any]) -> str:
    rows = [(page["path"], f"{page['bytes'] / 1e3:.0f}", _best_median(page["seconds"])) for page in run["pages"]]
    size = f"{run['jobs']} jobs, a table of {run['columns']} columns, {run['nodes']} nodes in the graph"
    return f"{size}:\n\n{_table(('page', 'kB', 's'), rows)}"


def _grouped(runs: Sequence[Mapping[str, Any]]) -> str:
    others = ("DuckDB, all rows, s", "plain Spark, all rows, s")
    head = ("computed by", "keys", "runner", "change", "ours, s", *others, "groups computed")
    keys = {"even": "drawn evenly", "hot": "one of half of all rows"}
    rows = [
        (
            run["side"],
            keys[run["keys"]],
            run["runner"],
            name,
            _best_median(change["ours"]),
            _best_median(change["duckdb"]) if change["duckdb"] else "",
            _best_median(change["spark"]) if change.get("spark") else "",
            f"{change['groups_computed']:,}",
        )
        for run in runs
        for name, change in run["changes"].items()
    ]
    about = (
        f"{runs[0]['rows']:,} rows with {runs[0]['groups']:,} keys at first. The aggregates are count, sum, max and "
        "avg; the function takes two columns of a group as Arrow arrays. DuckDB reads the same table of Lance, "
        "aggregates all of its rows each time, and writes nothing. The plain job of Spark reads Parquet files of the "
        "same rows, computes all groups each time, and writes them to Parquet files."
    )
    return f"{about}\n\n{_table(head, rows)}"


def _without_duplicates(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            run["side"],
            name,
            _best_median(change["ours"]),
            _best_median(change["anew"]),
            _best_median(change["duckdb"]) if change["duckdb"] else "",
            _best_median(change["spark"]) if change["spark"] else "",
            f"{change['rows_kept']:,}",
        )
        for run in runs
        for name, change in run["changes"].items()
    ]
    about = (
        f"{runs[0]['rows']:,} texts of 139 bytes at first, a tenth of them copies, of which two thirds have another "
        f"word; {runs[-1]['rows']:,} vectors of {NUMBERS} numbers, the sums of those of their words. The query that "
        "is evaluated anew hashes all rows, and writes nothing. DuckDB reads the same table of Lance, groups all "
        "texts, and writes nothing. A plain job of Spark reads Parquet files and writes what it finds: the first of "
        f"equal texts, or by MinHashLSH the pairs of similar texts among one in {SHARE_FOR_LSH} of the rows, without "
        "connecting them to clusters."
    )
    head = ("compares", "change", "refresh, s", "query anew, s", "DuckDB, s", "plain Spark, s", "rows kept")
    return f"{about}\n\n{_table(head, rows)}"


_SECTIONS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("compare", "Filling a column", _compared),
    ("once", "From a cold start, and memory", _cold),
    ("small", "Small fragments", _small),
    ("start", "The start of Spark", _started),
    ("slow", "What checkpoints cost", _slow),
    ("plan", "Planning", _planned),
    ("changes", "After changes", _changed),
    ("wide", "Wide rows", _wide),
    ("aging", "Growing old", _aged),
    ("view", "Refreshing a view", _all_viewed),
    ("peer", "Beside LanceDB", _beside),
    ("far", "Far from the data", _far),
    ("busy", "A device that waits for its rows", _busy),
    ("links", "A function that waits for files behind links", _links),
    ("gpu", "Networks on an accelerator", _gpu),
    ("hourly", "An hourly DAG run", _hourly),
    ("time_left", "The time left, at half time", _time_left),
    ("estimate", "The cost that a plan states", _estimate),
    ("indexes", "A vector index that is kept up to date", _indexes),
    ("limits", "The limit of a service", _limits),
    ("async", "Calls that wait for a service", _async),
    ("paid_once", "Equal inputs", _paid_once),
    ("services", "Services", _services),
    ("load", "Values by key", _loaded),
    ("pages", "The pages of a large database", _paged),
    ("groups", "Views of groups", _grouped),
    ("duplicates", "Views without duplicates", _without_duplicates),
)
