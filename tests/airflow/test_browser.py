"""The pages in a real browser."""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from airflow.sdk import DAG

from airflow_geneva import Database, udf
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.task_groups import BackfillTaskGroup
from tests.support.browser import DRIVER, Browser, open_browser
from tests.support.browsing import PRINT, Get, make_table, of_job, running_job
from tests.support.commands import run as command
from tests.support.counting import double, triple
from tests.support.driving import register
from tests.support.rights import Rights
from tests.support.served import ServedPages

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.slow,
    pytest.mark.skipif(DRIVER is None, reason="needs Chromium: apt-get install chromium-driver"),
]


@pytest.fixture
def site(reader: Get) -> Iterator[ServedPages]:
    made = ServedPages()
    yield made
    made.stop()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path) as opened:
        yield opened


def test_a_page_says_since_when_the_server_is_gone_and_is_right_soon_after_it_is_back(
    site: ServedPages, browser: Browser, database: Database
) -> None:
    table = make_table(database)
    job_id = running_job(table, time.time())
    browser.open(site.url(of_job("docs", job_id)))
    assert browser.run("return document.getElementById('away').hidden")
    age = "return document.querySelector('time[data-age]').textContent"
    first = browser.run(age)
    browser.wait_for(lambda: re.fullmatch(r"\d+ s ago", browser.run(age)) and browser.run(age) != first)
    site.stop()
    said = browser.wait_for(lambda: browser.run("return document.getElementById('away').innerText"))
    assert re.fullmatch(r"Airflow does not answer: this page was last updated \d+ s ago, and may be wrong since.", said)
    browser.wait_for(lambda: browser.run("return document.getElementById('away').innerText") != said)
    site.start()
    browser.wait_for(lambda: browser.run("return document.getElementById('away').hidden"))


def test_the_button_cancel_cancels_once_and_keeps_saying_so(
    site: ServedPages, browser: Browser, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "airflow_geneva.pages")
    with DAG("writes_docs", schedule=None) as dag:
        BackfillTaskGroup(table="docs", column="y", lance_conn_id="shelf")
    register(dag)
    Rights.give("reader", dags=["writes_docs"], triggers=["writes_docs"])
    table = make_table(database)
    job_id = running_job(table, time.time())
    folder = JobFolder.of(table.location.checkpoints, job_id)
    browser.open(site.url(of_job("docs", job_id)))
    assert folder.canceled_by() is None
    browser.press("[data-trigger]")
    said = "return document.querySelector('[data-trigger] + output').textContent"
    browser.wait_for(lambda: str(browser.run(said)).startswith("The job ends after its current calls, and keeps"))
    assert folder.canceled_by() == "reader, in Airflow"
    rows = folder.read_shard(PRINT, 0)["applying"]
    folder.update_shard(PRINT, 0, applying={**rows, "rows_failed": 21})
    browser.wait_for(lambda: "41 failed" in browser.text())
    browser.press("[data-trigger]")
    assert str(browser.run(said)).startswith("The job ends after its current calls")
    assert caplog.text.count("reader, in Airflow canceled job") == 1


@udf(data_type=pa.int64(), version="1", name="picky", on_error="skip")
def picky(x: int) -> int:
    return 10 // (x - 30)


def test_the_questions_of_the_person_on_call_take_two_clicks_and_a_command(
    site: ServedPages, browser: Browser, database: Database
) -> None:
    table = make_table(database)
    table.backfill("y", udf=triple, runner="inline")
    table.add_columns({"z": (double, ["y"])})
    table.backfill("z", udf=double, runner="inline", price_per_slot_hour=3.6e6)
    table.query().select(["z"]).create_materialized_view(database, "v").refresh(runner="inline")
    table.add_columns({"p": (picky, ["x"])})
    failing = table.backfill("p", udf=picky, runner="inline")
    other = make_table(database, "busy")
    table.add({"x": [100]})
    database.open_table("v").refresh(runner="inline")  # type: ignore[union-attr]
    hanging = running_job(other, time.time())
    JobFolder.of(other.location.checkpoints, hanging).update_record(table="busy")

    def ask(*clicks: str) -> str:
        """Open the page of the database, follow links, and return what is shown once everything is counted."""
        assert len(clicks) <= 2
        browser.open(site.url("/databases/shelf"))
        for link in clicks:
            browser.wait_for(lambda link=link: link in browser.run(LINKS))
            before = browser.run("return location.href")
            browser.run(f"[...document.links].find(link => (link.textContent || '').trim() === {link!r}).click()")
            browser.wait_for(lambda before=before: browser.run("return location.href") != before)
        browser.wait_for(browser.is_complete)
        return shown()

    def shown() -> str:
        return " ".join(browser.text().split())

    # Where does it hang?
    assert "RUNNING" in (page := ask(hanging))
    assert re.search(r"Last heartbeat .* ago, in step apply", page)
    # Why is it computed, what did it cost, and who started it?
    job = database.jobs(1, "docs")[0]
    assert job.id == failing.job_id
    assert "101 never computed" in (page := ask(job.id)) or "100 never computed" in page
    assert f"Started by {getpass.getuser()}@" in page
    assert re.search(r"Cost .* DONE docs.z .* \d", ask())
    # Which rows failed, and why?
    assert "ZeroDivisionError" in ask(job.id)
    # Is it fresh all the way up?
    assert "source is stale" in (page := ask())
    assert re.search(r"up to date with docs\.[yz], which is stale", page)
    # What reads this column?
    page = ask("docs")
    assert re.search(r"double \(version \w+\) of y", page)
    assert "z of docs" in page
    # What will happen if its function changes?
    assert re.search(r"docs\.z 1 at most 2", page := ask("Plan"))
    assert "airflow-geneva plan --conn-id shelf --all --what-if" in page
    planned = command("plan", database.uri, "--all", "--what-if", "docs.y=tests.support.counting:double")
    assert "docs.y: 101 rows now" in planned
    assert "docs.z: 1 row now" in planned


def test_the_graph_is_drawn_larger_and_smaller_and_stays_so(
    site: ServedPages, browser: Browser, database: Database
) -> None:
    table = make_table(database, "a_table_of_documents_with_a_long_name")
    for number in range(13):
        table.add_columns({f"a_column_{number}": triple})
    for number in range(25):
        name = f"a_view_of_documents_that_is_number_{number}"
        table.query().select([f"a_column_{number % 13}"]).create_materialized_view(database, name)
    browser.open(site.url("/databases/shelf/graph"))
    nodes = "return document.querySelectorAll('svg.graph a').length"
    browser.wait_for(lambda: browser.run(nodes) == 40)
    too_wide = """return [...document.querySelectorAll('svg.graph a')].filter(
        node => [...node.querySelectorAll('text')].some(text => text.getBBox().width > 196 - 14)).length"""
    assert browser.run(too_wide) == 0, "each text lies inside its node"
    width = "return document.querySelector('svg.graph').getBoundingClientRect().width"
    frame = "return document.querySelector('svg.graph').parentElement.clientWidth"
    full = browser.run(width)

    def press(label: str) -> float:
        browser.press(f"[data-zoom='{label}']")
        return float(browser.run(width))

    assert press("1.25") == pytest.approx(1.25 * full, abs=1)
    browser.run("document.querySelector('svg.graph').id = 'old'")
    browser.run("const live = document.getElementById('live'); live.dataset.after = '0'; follow(live)")
    browser.wait_for(lambda: browser.run("return document.getElementById('old') === null"))
    assert browser.run(width) == pytest.approx(1.25 * full, abs=1), "an update keeps the size"
    assert press("reset") == pytest.approx(full, abs=1)
    assert press("0.8") == pytest.approx(0.8 * full, abs=1)
    assert press("fit") == pytest.approx(min(browser.run(frame), full), abs=1)


LINKS = "return [...document.links].map(link => (link.textContent || '').trim())"
