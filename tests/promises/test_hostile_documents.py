"""Documents of those who may write a table's folder: readers take them or say what is wrong, and go nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from typer.testing import CliRunner

from airflow_geneva import View
from airflow_geneva.cli.app import app
from airflow_geneva.engine.cleanup import collect, find_garbage
from airflow_geneva.errors import GenevaError
from tests.support.broken_off import age
from tests.support.hostile import MARK, Damage, Site, damages

PROGRAMS = ("pyspark.shell", "this", "antigravity")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def view(site: Site) -> View:
    found = site.database.open_table("v")
    assert isinstance(found, View)
    return found


def clean(site: Site) -> None:
    table = site.database.open_table("docs")
    age(table)
    collect(table.location, find_garbage(table.location, "1s"))


def command(*arguments: str) -> Callable[[Site], Any]:
    def run(site: Site) -> str:
        name, *rest = arguments
        result = CliRunner().invoke(app, [name, str(site.uri), *rest])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return str(result.output)

    return run


READERS: dict[str, Callable[[Site], Any]] = {
    "the list of jobs": lambda site: [str(job) for job in site.database.jobs()],
    "a job": lambda site: [str(site.database.job(job.id)) for job in site.database.jobs()],
    "what is in it": lambda site: f"{site.database!r} {site.database.open_table('docs')!r} {view(site)!r}",
    "errors": lambda site: str(site.database.open_table("docs").get_errors()),
    "all errors": lambda site: str(site.database.open_table("docs").get_errors(history=True)),
    "failed rows": lambda site: site.database.open_table("docs").get_failed_row_addresses(),
    "failed rows of a view": lambda site: view(site).get_failed_row_addresses(),
    "a plan": lambda site: str(site.database.open_table("docs").plan_backfill("p")),
    "a plan of failed rows": lambda site: str(site.database.open_table("docs").plan_backfill("k", errors_only=True)),
    "a plan of a view": lambda site: str(view(site).plan_refresh()),
    "a backfill": lambda site: str(site.database.open_table("docs").backfill("p", runner="inline")),
    "a refresh": lambda site: str(view(site).refresh(runner="inline")),
    "a cleanup": clean,
    "the command jobs": command("jobs"),
    "the command errors": command("errors"),
    "the command checkpoints": command("checkpoints", "docs"),
}


def look(site: Site, damage: Damage) -> None:
    for what, read in READERS.items():
        try:
            told = str(read(site))
        except GenevaError as error:
            told = str(error)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}") from error
        assert MARK not in told, what
        assert not any(name in sys.modules for name in PROGRAMS)


@pytest.mark.slow
@given(st.data())
def test_no_document_makes_a_reader_fail_or_leads_it_elsewhere(site: Site, data: st.DataObject) -> None:
    damage = data.draw(damages(site))
    with site.damaged(damage):
        look(site, damage)


@pytest.mark.slow
@given(st.data())
def test_what_is_written_into_the_folder_of_a_view_fails_no_job_of_its_source(site: Site, data: st.DataObject) -> None:
    damage = data.draw(damages(site).filter(lambda one: one.kind == "definition" or one.name.startswith("v.lance/")))
    with site.damaged(damage):
        table = site.database.open_table("docs")
        result = table.backfill("p", runner="inline")
        assert (result.state, table.count_rows("p IS NULL")) == ("DONE", 0)
        assert "DONE" in {job.state for job in site.database.jobs()}
