"""Versions that are cleaned up while a plan or a sensor reads them: said in words, or worth a few more rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lance
import pytest
from lance.fragment import LanceFragment

from airflow_geneva import connect
from airflow_geneva.engine.watch.conditions import WaitCondition
from airflow_geneva.engine.watch.watcher import observe
from airflow_geneva.errors import StorageError
from airflow_geneva.view import View
from tests.support.counting import triple
from tests.support.processes import as_another_process
from tests.udfs_for_tests import views as udfs

SOAK = os.environ.get("GENEVA_SOAK") == "1"
CALLS = [
    (lance.LanceDataset, "scanner"),
    (lance.LanceDataset, "_take_rows"),
    (lance.LanceDataset, "checkout_version"),
    (lance.LanceDataset, "read_transaction"),
    (lance.LanceDataset, "get_fragments"),
    (LanceFragment, "scanner"),
]


def clean(uri: str) -> None:
    """Leave the newest version only, in other files than all before it."""
    dataset = lance.dataset(uri)
    dataset.update({"x": "x"})
    dataset.optimize.compact_files()
    dataset.cleanup_old_versions(timedelta(0), delete_unverified=True)


def clean_at(patch: pytest.MonkeyPatch, call: int, uri: str) -> list[str]:
    """Clean before a call of pylance, counted from the first; gives the calls that there were."""
    calls: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            if not calls or calls[-1] != "cleaning":
                calls.append(name)
                if len(calls) == call:
                    calls.append("cleaning")
                    clean(uri)
                    calls.pop()
            return real(*args, **more)

        return counted

    for kind, name in CALLS:
        patch.setattr(kind, name, watched(name, getattr(kind, name)))
    return calls


def backfill(database: Path) -> object:
    return connect(database).open_table("docs").plan_backfill("y")


def backfill_where(database: Path) -> object:
    return connect(database).open_table("docs").plan_backfill("y", where="id >= 0")


def refresh(database: Path) -> object:
    view = connect(database).open_table("v")
    assert isinstance(view, View)
    return view.plan_refresh()


def sensor(database: Path) -> object:
    wanted = WaitCondition("docs", since="view:v", max_wait=1.0)
    return observe(connect(database), wanted, None, datetime.now(timezone.utc))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with a column and a view that were filled, and rows that were changed and compacted since."""
    folder = tmp_path_factory.mktemp("cleaned") / "db"
    db = connect(folder)
    table = db.create_table("docs", [{"id": i, "x": i} for i in range(40)], max_rows_per_file=10)
    table.add_columns({"y": triple})
    query = table.query().where("x >= 0").select({"id": "id"}).add_columns({"p": (udfs.plus, ["x"])})
    view = query.create_materialized_view(db, "v")
    table.backfill("y", runner="inline")
    view.refresh(runner="inline")
    table.lance.update({"x": "x + 100"}, where="id < 3")
    table.lance.optimize.compact_files(target_rows_per_fragment=20)
    table.lance.update({"x": "x + 100"}, where="id > 36")
    shutil.copytree(folder, folder.with_name("as it was"))
    return folder


@pytest.mark.parametrize("asked", [backfill, backfill_where, refresh, sensor], ids=lambda asked: asked.__name__)
def test_versions_may_be_cleaned_up_at_any_point_of_a_plan(database: Path, asked: Callable[[Path], object]) -> None:
    """There is a plan all the same, or it is said what happened."""

    def cleaned_before(call: int) -> tuple[int, str]:
        """How many calls of pylance there were, and what was said."""
        shutil.rmtree(database)
        shutil.copytree(database.with_name("as it was"), database)
        as_another_process()
        with pytest.MonkeyPatch.context() as patch:
            calls = clean_at(patch, call, str(database / "docs.lance"))
            try:
                asked(database)
            except StorageError as error:
                return len(calls), str(error)
        return len(calls), ""

    calls, _ = cleaned_before(0)
    step = 1 if SOAK else -(-calls // 6)
    told = {words for call in range(1, calls + 1, step) if (words := cleaned_before(call)[1])}
    assert told
    assert all("was cleaned up while it was being read" in words and "run again" in words for words in told)
