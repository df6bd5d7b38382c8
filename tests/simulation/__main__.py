"""``python -m tests.simulation --seeds 100``: run worlds, and print the steps of each that goes wrong.

A seed takes the scenarios in turn; with ``--scenario column`` all seeds are of one. See ``--help``.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import logging
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.simulation import chance, kernel, store
from tests.simulation.releases import Release, unpack

if TYPE_CHECKING:
    from tests.simulation.world import Move, Scenario, World


IMPORTED_LATER = (
    "airflow_geneva.bar",
    "airflow_geneva.query",
    "duckdb",
    "email.parser",
    "lance.commit",
    "lance.otel",
    "pyarrow.acero",
)
"""Modules that actors would import, each again."""


@dataclass
class Tally:
    """What worlds met; several processes add theirs."""

    seeds: int = 0
    bad: int = 0
    steps: int = 0
    cpu: float = 0.0
    orders: list[str] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.bad += other.bad
        self.steps += other.steps
        self.cpu += other.cpu
        self.orders = sorted({*self.orders, *other.orders})
        self.pairs = sorted({*self.pairs, *other.pairs})

    def __str__(self) -> str:
        points = {point for pair in self.pairs for point in pair.split(" x ")}
        return (
            f"{self.seeds} seeds, {self.bad} bad, {self.steps} steps, {len(self.orders)} distinct orders, "
            f"{len(self.pairs)} pairs of {len(points)} fault points, {self.cpu:.0f} s of CPU"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--scenario", default="", help="only this one; see scenarios.py")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no world after that time")
    parser.add_argument("--workers", type=int, default=1, help="how many processes share the seeds")
    parser.add_argument("--shrink", type=float, default=60, help="seconds in which to shorten a world that is bad")
    parser.add_argument("--mutant", default="", help="run with a defect of mutants.py, until a world goes wrong")
    parser.add_argument(
        "--beside", default="", help="a commit, or plan-format: each process runs its package or the present one"
    )
    parser.add_argument("--pairs", action="store_true", help="print the pairs of fault points that were met")
    parser.add_argument("-v", action="store_true", help="print each trace")
    parser.add_argument("--step", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--tally", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def prepare(folder: Path) -> None:
    """Import all that actors use, simulated; no thread of pylance may run before the forks."""
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    kernel.install()
    import airflow_geneva.engine

    for module in pkgutil.walk_packages(airflow_geneva.engine.__path__, "airflow_geneva.engine."):
        if "iceberg" not in module.name and not module.name.endswith("worker"):
            importlib.import_module(module.name)
    store.FOLDER = str(folder / "db")
    store.steps_of_storage()
    store.steps_of_lance()
    # A thread that looks at its progress 20 times a second would take most steps of a world in which calls wait.
    inline = importlib.import_module("airflow_geneva.engine.run.inline")
    inline._TICK_SECONDS = 1.0  # type: ignore[attr-defined]
    importlib.import_module("tests.simulation.actors")
    importlib.import_module("tests.support.invariants")
    for name in IMPORTED_LATER:
        importlib.import_module(name)
    logging.disable(logging.CRITICAL)
    os.environ["SIMULATION_CALLS"] = str(folder / "calls")
    # Actors share the memory of what was imported until they write to it, as the garbage collector would.
    gc.collect()
    gc.freeze()


class Worlds:
    """The worlds of one process."""

    def __init__(self, options: argparse.Namespace, folder: Path, earlier: Release | None) -> None:
        from tests.simulation import world
        from tests.simulation.scenarios import ALL, SCENARIOS

        self.options, self.folder, self.world, self.earlier = options, folder, world, earlier
        self.scenarios = [SCENARIOS[options.scenario]] if options.scenario else list(ALL.values())
        seeds = range(options.first, options.first + options.seeds)[:: options.step]
        self.seeds = [(seed, self.scenarios[seed % len(self.scenarios)]) for seed in seeds]
        for scenario in {scenario.name: scenario for _, scenario in self.seeds}.values():
            world.make(scenario, folder, earlier)

    def run(self) -> Iterator[tuple[str, World]]:
        """Yield what went wrong in each world, or "", and the world."""
        began = time.monotonic()
        for seed, scenario in self.seeds:
            if time.monotonic() - began > self.options.seconds:
                return
            one = self.again(scenario, seed)
            yield one.run(), one

    def again(self, scenario: Scenario, seed: int, moves: Sequence[Move] | None = None) -> World:
        self.world.renew(scenario, self.folder, seed)
        return self.world.World(scenario, seed, self.folder, self.world.Dice.of(seed), moves, self.earlier)

    def shorten(self, bad: World) -> str:
        """Return the shortest way that was found into what went wrong, in the words of the fault points."""
        from tests.simulation.shrink import shrink, told

        def fails(moves: Sequence[Move]) -> bool:
            return bool(self.again(bad.scenario, bad.seed, moves).run())

        until = time.monotonic() + self.options.shrink
        last = self.again(bad.scenario, bad.seed, shrink(bad.moves, fails, lambda: time.monotonic() < until))
        said = last.run()
        return f"{told(last.trace)}\n  {said.splitlines()[0]}" if said else told(bad.trace)


def work(options: argparse.Namespace) -> Tally:
    from tests.simulation.world import child, scratch

    tally, earlier = Tally(), None
    with scratch() as folder:
        if options.beside:
            earlier = Release(unpack(options.beside, folder), partial(prepare, folder), child)
        if options.mutant:
            from tests.simulation.mutants import mutate

            sys.path.insert(0, str(mutate(options.mutant, folder)))
        prepare(folder)
        worlds, began = Worlds(options, folder, earlier), os.times()
        for said, one in worlds.run():
            trace = "\n".join(one.trace)
            print(trace) if options.v else None
            order = hashlib.sha256(trace.encode()).hexdigest()
            print(f"seed {one.seed} took the way {order}") if options.v else None
            pairs = [" x ".join(pair) for pair in one.pairs]
            tally.add(Tally(1, bool(said), one.steps, 0.0, [order], pairs))
            if said:
                print(f"Seed {one.seed} ({one.scenario.name}) goes wrong: {said}")
                if options.shrink:
                    print(worlds.shorten(one))
                again = f"--scenario {one.scenario.name} --first {one.seed} --seeds 1"
                again += f" --beside {options.beside}" if options.beside else ""
                print(f"Run it again: python -m tests.simulation {again} -v")
                sys.stdout.flush()
                if options.mutant:
                    break
        if earlier is not None:
            earlier.end()
        spent = os.times()
        tally.cpu = sum(spent[:4]) - sum(began[:4])
    return tally


def share(arguments: Sequence[str], workers: int) -> Tally:
    """Let several processes each run every n-th seed."""
    options = parse(arguments)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        seeds = [(f"--first={options.first + at}", f"--seeds={options.seeds - at}") for at in range(workers)]
        own = [[*one, f"--step={workers}", f"--tally={folder}/{at}", "--workers=1"] for at, one in enumerate(seeds)]
        command = [sys.executable, "-m", "tests.simulation", *arguments]
        running = [subprocess.Popen([*command, *more]) for more in own]
        codes = [process.wait() for process in running]
        if any(code > 1 or code < 0 for code in codes):
            sys.exit(f"the processes ended with {codes}")
        for number in range(workers):
            tally.add(Tally(**json.loads(Path(folder, str(number)).read_text())))
    return tally


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    tally = share(arguments, options.workers) if options.workers > 1 else work(options)
    if options.tally:
        Path(options.tally).write_text(json.dumps(asdict(tally)))
    else:
        print("\n".join(tally.pairs)) if options.pairs else None
        print(tally)
    return 1 if tally.bad else 0


if __name__ == "__main__":
    chance.preload()
    sys.exit(main(sys.argv[1:]))
