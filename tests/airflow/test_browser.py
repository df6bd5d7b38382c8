"""The pages in a real browser."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from airflow.api_fastapi.app import create_auth_manager, purge_cached_app
from fastapi import FastAPI, Request

from airflow_geneva import Database
from airflow_geneva.pages import access
from airflow_geneva.pages.app import app
from tests.support.browser import DRIVER, Browser, open_browser
from tests.support.browsing import make_table, of_job, running_job
from tests.support.rights import Rights

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.slow,
    pytest.mark.skipif(DRIVER is None, reason="needs Chromium: apt-get install chromium-driver"),
]


class Site:
    """The pages on a port of this machine, opened by a user who may read the connection `shelf`."""

    def __init__(self) -> None:
        token = Rights.token("reader", create_auth_manager())
        self._whole = FastAPI()
        self._whole.mount("/geneva", app)

        @self._whole.middleware("http")
        async def log_in(request: Request, go_on: Any) -> Any:
            request.scope["headers"].append((b"authorization", f"Bearer {token}".encode()))
            return await go_on(request)

        self.port = 0
        self.start()

    def start(self) -> None:
        self._server = uvicorn.Server(uvicorn.Config(self._whole, port=self.port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}/geneva{path}"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, airflow_db: Path, database: Database) -> Iterator[Site]:
    monkeypatch.setenv("AIRFLOW__CORE__AUTH_MANAGER", "tests.support.rights.Rights")
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "s" * 64)
    for name in ("dags", "connections", "triggers", "xcoms"):
        monkeypatch.setattr(Rights, name, {})
    monkeypatch.setattr(access, "_KEPT_SECONDS", 1e-9)
    Rights.give("reader", connections=["shelf"])
    made = Site()
    yield made
    made.stop()
    purge_cached_app()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path) as opened:
        yield opened


def test_a_page_says_since_when_the_server_is_gone_and_is_right_soon_after_it_is_back(
    site: Site, browser: Browser, database: Database
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
