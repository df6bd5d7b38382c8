"""Draw the pictures of docs/pages.md: pages of a database that is made for them, in headless Chromium.

``python -m scripts.pictures``, or with the names of some pictures. That of Airflow's own page takes some minutes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_geneva import Database, Table, connect, udf

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_WORDS = "in the beginning was a word and light shone on waters of deep under firmament"
_ROWS, _ROUNDS = 1_000, 7


@udf(data_type=pa.int64(), version="1")
def words(text: str) -> int:
    return len(text.split())


@udf(data_type=pa.string(), version="1", on_error="skip")
def caption(text: str) -> str:
    if len(text) % 9 == 0:
        raise ValueError(f"the model has no answer for {text[:24]!r}")
    return text[:20].title()


@udf(data_type=pa.float64(), version="1", on_error="skip")
def score(text: str) -> float:
    time.sleep(0.02 + len(text) / 10_000)
    if len(text) % 11 == 0:
        raise TimeoutError("no answer within 30 seconds")
    return len(text) / 100


@dataclass(frozen=True)
class Picture:
    """A part of a page.

    Args:
        path: its address; JOB is the running job, and FAILING one with failed rows.
        above: a CSS selector of the element at the upper edge.
    """

    path: str
    width: int = 1_100
    height: int = 640
    above: str = "body"
    dark: bool = False


_VERSES = "/databases/shelf/tables/verses"
PICTURES = {
    "database-narrow": Picture("/databases/shelf", width=390, height=600),
    "database": Picture("/databases/shelf"),
    "graph": Picture("/databases/shelf/graph", height=700),
    "table": Picture(_VERSES, height=1_000),
    "job-errors-dark": Picture(f"{_VERSES}/jobs/FAILING?order=key", above="#errors", dark=True),
    "job-narrow": Picture(f"{_VERSES}/jobs/JOB", width=390, height=700),
    "speed": Picture(f"{_VERSES}/jobs/JOB"),
}
IN_AIRFLOW = "job-in-airflow"
_DAG = """
from airflow.sdk import DAG

from airflow_geneva.task_groups import BackfillTaskGroup

with DAG("score_verses", schedule=None):
    BackfillTaskGroup(table="verses", column="score", concurrency=2, checkpoint_interval=5.0)
"""
_UDFS = """
import time

import pyarrow as pa

from airflow_geneva import udf


@udf(data_type=pa.float64(), on_error="skip")
def score(text: str) -> float:
    time.sleep(0.02 + len(text) / 10_000)
    if len(text) % 11 == 0:
        raise TimeoutError("no answer within 30 seconds")
    return len(text) / 100
"""


def _rows(dice: random.Random, first: int, count: int) -> pa.Table:
    texts = [" ".join(dice.choices(_WORDS.split(), k=dice.randrange(4, 20))) for _ in range(count)]
    return pa.table({"id": [f"verse-{first + row:05}" for row in range(count)], "text": texts})


def make_lake(database: Database) -> tuple[Table, str]:
    """Make tables and views in every state; return the table of a job that will run, and a job with failed rows."""
    dice = random.Random(1)
    rows = partial(_rows, dice)
    verses = database.create_table("verses", rows(0, _ROWS), key="id")
    verses.add_columns({"words": words, "caption": caption, "score": score})
    long_verses = verses.query().where("words > 9").select(["id", "text", "words"])
    view = long_verses.create_materialized_view(database, "long_verses")
    for turn in range(1, _ROUNDS):
        verses.backfill("words", runner="inline")
        failing = verses.backfill("caption", runner="inline").job_id
        view.refresh(runner="inline")
        verses.add(rows(turn * _ROWS, _ROWS - 100 * dice.randrange(8)))
    for number in range(12):
        events = database.create_table(f"events_{number:02}", rows(0, 100 + 37 * number))
        if number % 3:
            events.add_columns({"words": words})
        if number % 4:
            daily = events.query().select(["id"]).create_materialized_view(database, f"daily_{number:02}")
        if number % 5:
            if number % 3:
                events.backfill("words", runner="inline")
            if number % 4:
                daily.refresh(runner="inline")
        if number % 7 == 3:
            events.add(rows(9_000, 50))
    return verses, failing


@contextmanager
def lake(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Serve the pages of the database while a job runs; yields the address, this job, and one with failed rows."""
    # Airflow reads its configuration when it is imported.
    from airflow.sdk import DAG

    from airflow_geneva.task_groups import BackfillTaskGroup
    from tests.support.browsing import browsing, shelf_at
    from tests.support.driving import register
    from tests.support.rights import Rights
    from tests.support.served import ServedPages

    with pytest.MonkeyPatch.context() as patch:
        opened = browsing(patch)
        next(opened)
        verses, failing = make_lake(shelf_at(folder / "lake", patch))
        with DAG("words_of_verses", schedule=None) as dag:
            BackfillTaskGroup(table="verses", column="words", lance_conn_id="shelf")
        register(dag)
        Rights.give("reader", connections=["shelf"], triggers=["words_of_verses"])
        pages = ServedPages()
        running = verses.backfill_async("score", runner="inline", shard_size=4, checkpoint_interval=2.0)
        try:
            yield pages.url(""), running.job_id, failing
        finally:
            running.cancel()
            running.result()
            pages.stop()
            opened.close()


def draw_in_airflow(folder: Path) -> None:
    """Draw the tab of a task in Airflow's own page, while its job runs on Spark."""
    from dags_examples.demo.rest import AirflowApi
    from dags_examples.demo.runs import wait_for_dag
    from dags_examples.demo.stack import DemoHome, run_airflow, write_spark_conf
    from tests.support.browser import open_browser

    home, dags = DemoHome(folder), folder / "dags"
    dags.mkdir(parents=True)
    (dags / "verses.py").write_text(_DAG)
    (dags / "verses_udfs.py").write_text(_UDFS)
    (dags / ".airflowignore").write_text("verses_udfs.py\n")
    write_spark_conf(home, {})
    sys.path.insert(0, str(dags))
    from verses_udfs import score  # type: ignore[import-not-found]

    verses = connect(home.database).create_table("verses", _rows(random.Random(1), 0, 7_034), max_rows_per_file=500)
    verses.add_columns({"score": score})
    with (
        run_airflow(home, dags, {"AIRFLOW__GENEVA__INLINE_BELOW_SECONDS": "0"}) as running,
        AirflowApi(running.url, running.check) as api,
        open_browser(folder) as browser,
    ):
        wait_for_dag(api, "score_verses")
        run = api.trigger("score_verses")
        browser.resize(1_400, 917)
        tab = f"{running.url}/dags/score_verses/runs/{run}/tasks/backfill.plan/plugin/geneva_job"
        text = "return document.querySelector('iframe')?.contentDocument?.body?.innerText ?? ''"

        def is_half_done() -> bool:
            browser.open(tab)
            time.sleep(5)
            return "ready to commit" in browser.run(text)

        browser.wait_for(is_half_done, 300)
        browser.picture(IMAGES / f"{IN_AIRFLOW}.png")


def main(names: Sequence[str]) -> None:
    names = names or (*PICTURES, IN_AIRFLOW)
    if IN_AIRFLOW in names:
        with tempfile.TemporaryDirectory(prefix="pictures-") as scratch:
            draw_in_airflow(Path(scratch))
    if not (drawn := [name for name in names if name != IN_AIRFLOW]):
        return
    with tempfile.TemporaryDirectory(prefix="pictures-") as scratch:
        os.environ |= {"AIRFLOW_HOME": scratch, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
        subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], check=True, capture_output=True)
        from tests.support.browser import open_browser

        with lake(Path(scratch)) as (address, job, failing), open_browser(Path(scratch)) as browser:
            for name in drawn:
                picture = PICTURES[name]
                browser.resize(picture.width, picture.height, picture.dark)
                browser.open(address + picture.path.replace("JOB", job).replace("FAILING", failing))
                browser.wait_for(browser.is_complete)
                browser.picture(IMAGES / f"{name}.png", picture.above)


if __name__ == "__main__":
    main(sys.argv[1:])
