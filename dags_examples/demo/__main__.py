"""Three backfills by Airflow (all rows, nothing to do, new rows), and the refreshes of a view that they trigger."""

from __future__ import annotations

import argparse
import fcntl
import logging
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pyarrow as pa
from rich.console import Console

from airflow_geneva import connect
from airflow_geneva.errors import GenevaError
from dags_examples.demo.report import show_nearest, show_runs, show_versions
from dags_examples.demo.rest import AirflowApi
from dags_examples.demo.runs import wait_for_dag
from dags_examples.demo.stack import (
    COMPONENTS,
    AirflowStopped,
    DemoHome,
    run_airflow,
    run_spark_server,
    write_spark_conf,
)
from dags_examples.demo.upkeep import BACKFILL, REFRESH, DemoRuns
from dags_examples.demo.verses import COLUMN, VIEW, append_books, create_verses, read_books

CHECKOUT = Path(__file__).parents[2]
DAGS = CHECKOUT / "dags_examples"
QUERY = "all tears and pain will be gone"
HELD_BACK = 6


class InUse(Exception):
    """Another demo or its Airflow uses the folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, or open Airflow on what it left."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--query", default=QUERY, help="find the verses nearest to this sentence")
    parser.add_argument("--spark", choices=("submit", "connect"), default="submit", help="how Airflow reaches Spark")
    parser.add_argument("--ui", action="store_true", help="start Airflow on what the last demo left")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    # On import wordllama sets the log level of the whole process, unless it is set already.
    logging.basicConfig(level=logging.WARNING)
    home = DemoHome(CHECKOUT / ".demo")
    console = Console()
    # Airflow has the DAGs folder on its path; import the UDFs in it in the same way.
    sys.path.insert(0, str(DAGS))
    try:
        with claim(home):
            if options.ui:
                serve(home, console)
                return 0
            problems = run_demo(home, read_books(), HELD_BACK, options.query, console, options.spark == "connect")
    except KeyboardInterrupt:
        console.print("Stopped; nothing is left running.")
        return 130
    except (AirflowStopped, GenevaError, InUse, TimeoutError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    except httpx.HTTPError as error:
        console.print(
            f"Airflow did not answer well: {error!r}. Its logs are in {home.logs}.", style="red", markup=False
        )
        return 1
    for problem in problems:
        console.print(problem, style="bold red", markup=False, highlight=False)
    if problems:
        console.print(f"The tasks' logs are in {home.logs}; the UI shows them: [bold]make demo-ui[/]", soft_wrap=True)
    return 1 if problems else 0


def run_demo(
    home: DemoHome, books: Sequence[pa.Table], held_back: int, query: str, console: Console, on_server: bool = False
) -> list[str]:
    """Run the backfill three times, with the refreshes that it triggers; return the problems.

    Args:
        home: the demo's folder; files of an earlier demo are removed.
        books: one table per book.
        held_back: number of last books that are appended before the third run.
        query: a sentence, to find the nearest verses.
        on_server: start a Spark Connect server and use it, instead of spark-submit.
    """
    from embedding_udfs.counted import counted_embed

    began = time.monotonic()
    _clear(home)
    home.counts.mkdir()
    first, late = books[:-held_back], books[-held_back:]
    database = connect(home.database)
    table = create_verses(database, first)
    table.add_columns({COLUMN: counted_embed})
    write_spark_conf(home, _variables(home))
    console.print(
        f"Table [bold]{table.name}[/]: {len(first)} books with {_count(first):,} verses, one fragment each. A DAG "
        f"computes the column [bold]{COLUMN}[/] three times: all rows, nothing, and the {_count(late):,} verses of "
        f"{len(late)} books that are added. When it has new values, another DAG refreshes the view [bold]{VIEW}[/]."
    )
    upkeep = DemoRuns(database, home.counts, console)
    problems: list[str] = []
    with _airflow(home, console, on_server) as api:
        for name, what, new in (
            ("run 1", "the column is empty", first),
            ("run 2", "nothing has changed", []),
            ("run 3", "some books are new", late),
        ):
            console.rule(f"{name}: {what}", align="left")
            if new is late:
                append_books(table, late)
                console.print(f"Appended: {', '.join(_titles(late))}.")
            problems = upkeep.run(api, name, new)
            if problems:
                break
    console.rule()
    show_runs(f"Backfills of column {COLUMN}", upkeep.backfills, console)
    show_runs(f"Refreshes of view {VIEW}", upkeep.refreshes, console)
    if problems:
        return problems
    if empty := table.count_rows(f"{COLUMN} IS NULL"):
        return [f"{empty} verses have no {COLUMN}."]
    show_versions(table, upkeep.backfills, console)
    show_nearest(table, query, console)
    console.print(
        f"In every run, the rows counted inside the UDF are the rows reported. {time.monotonic() - began:.0f} s in all."
    )
    command = f"{Path(sys.executable).with_name('airflow-geneva')} jobs {home.database}"
    console.print("Next:")
    console.print("  [bold]make demo-ui[/]  opens Airflow on it: the tab Geneva job of a task has its rows and speed")
    console.print(f"  [bold]{command}[/]  lists the jobs", soft_wrap=True)
    console.print("  [bold]docs/quickstart.md[/]  has the same for a table of your own")
    return []


def serve(home: DemoHome, console: Console) -> None:
    """Keep Airflow up until Ctrl-C."""
    if not (home.airflow / "airflow.db").exists():
        raise AirflowStopped(f"There is no demo in {home.root} yet. Run one first: make demo")
    console.print("Starting Airflow ...")
    with run_airflow(home, DAGS, _variables(home)) as airflow:
        console.print(f"Airflow is at [bold]{airflow.url}/dags/{BACKFILL}[/], without a login. Ctrl-C ends it.")
        airflow.wait()


@contextmanager
def claim(home: DemoHome) -> Iterator[None]:
    """Lock the folder against other demos.

    Raises:
        InUse: another demo has the lock.
    """
    home.root.mkdir(parents=True, exist_ok=True)
    with open(home.lock, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(f"Another demo, or its Airflow, is using {home.root}. End it first (Ctrl-C).") from None
        yield


@contextmanager
def _airflow(home: DemoHome, console: Console, on_server: bool) -> Iterator[AirflowApi]:
    began = time.monotonic()
    with ExitStack() as stack:
        with console.status("Airflow starts"):
            variables = _variables(home)
            if on_server:
                variables["AIRFLOW_CONN_SPARK_DEFAULT"] = stack.enter_context(run_spark_server(home, variables))
            airflow = stack.enter_context(run_airflow(home, DAGS, variables))
            api = stack.enter_context(AirflowApi(airflow.url, airflow.check))
            for dag_id in (BACKFILL, REFRESH):
                wait_for_dag(api, dag_id)
        console.print(
            f"Airflow is up at {airflow.url} after {time.monotonic() - began:.0f} s: {', '.join(COMPONENTS)}."
        )
        yield api


def _variables(home: DemoHome) -> dict[str, str]:
    from embedding_udfs.counted import COUNTS

    return {COUNTS: str(home.counts)}


def _clear(home: DemoHome) -> None:
    for entry in home.root.iterdir():
        if entry == home.lock:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _count(books: Sequence[pa.Table]) -> int:
    return sum(book.num_rows for book in books)


def _titles(books: Sequence[pa.Table]) -> list[str]:
    return [book["book"][0].as_py() for book in books]


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
