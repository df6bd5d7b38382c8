"""Pages of tables whose documents somebody damaged on purpose: each answers, with its headers, and alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from airflow.api_fastapi.app import create_auth_manager
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings, strategies as st

from airflow_geneva.pages.app import app
from tests.support.browsing import Get, assert_harmless, with_another_key
from tests.support.hostile import MARK, Damage, Site, damages
from tests.support.rights import Rights

pytestmark = pytest.mark.airflow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def visit(browse: Get, site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[Damage], None]:
    """Asks for every page of the database, as somebody who may read its connection."""
    options = {"aws_secret_access_key": "k"}
    connection = {"conn_type": "lance", "host": str(site.uri), "extra": {"storage_options": options}}
    monkeypatch.setenv("AIRFLOW_CONN_SHELF", json.dumps(connection))
    Rights.give("reader", connections=["shelf"])
    headers = {"Authorization": f"Bearer {Rights.token('reader', create_auth_manager())}"}
    client = TestClient(app, root_path="/geneva")

    def ask(damage: Damage) -> None:
        with_another_key(monkeypatch)
        for path in paths(site):
            answer = client.get(path, headers=headers)
            assert answer.status_code in (200, 404, 503), path
            assert_harmless(answer)
            assert MARK not in answer.text, path
            if path in ("/databases/shelf", "/databases/shelf/graph", "/databases/shelf/tables/docs"):
                assert answer.status_code == 200, path

    return ask


def paths(site: Site) -> list[str]:
    shelf = "/databases/shelf"
    found = ["/", shelf, f"{shelf}/live", f"{shelf}/graph"]
    for table in ("docs", "v"):
        home = f"{shelf}/tables/{table}"
        found += [home, f"{home}/standing", f"{home}/history", f"{home}/versions", f"{home}/compare?first=y&second=x"]
        jobs = Path(site.uri, f"{table}.lance", "_checkpoints", "jobs")
        found += [f"{home}/jobs/{job.name}" for job in sorted(jobs.iterdir())] if jobs.is_dir() else []
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_document_makes_a_page_fail(site: Site, visit: Callable[[Damage], None], data: st.DataObject) -> None:
    damage = data.draw(damages(site))
    with site.damaged(damage):
        visit(damage)
