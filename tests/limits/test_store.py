"""The table of a budget, on a real store."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import lance
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.limits import store as store_module
from airflow_geneva.engine.limits.budget import LATENESS
from airflow_geneva.engine.limits.limiter import Limiter, Pass
from airflow_geneva.engine.limits.rate_limit import RateLimit
from airflow_geneva.engine.limits.store import BudgetTable
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.outages import with_patience
from airflow_geneva.errors import InvalidInput, StorageError
from tests.support.object_store import Bucket, options_of
from tests.support.outage import Proxy


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read too long ago is not written over, and a busy machine takes long for anything."""
    monkeypatch.setattr(store_module, "own_seconds", lambda: 0.0)


@pytest.fixture
def table(tmp_path: Path) -> BudgetTable:
    return BudgetTable(Storage.at(str(tmp_path)).folder("_geneva/limits"), "openai")


def test_a_write_in_place_of_an_older_budget_is_refused(table: BudgetTable, tmp_path: Path) -> None:
    first, second = table.read(), table.read()
    assert table.write(replace(first.budget, clock=1.0), first)
    assert not table.write(replace(second.budget, clock=2.0), second)
    third = table.read()
    assert third.budget.clock == 1.0
    assert not table.write(third.budget, replace(third, read_at=-LATENESS - 1))
    assert connect(tmp_path).table_names() == []


def test_old_versions_are_removed(table: BudgetTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_KEPT_VERSIONS", 5)
    for number in range(20):
        found = table.read()
        assert table.write(replace(found.budget, clock=float(number)), found)
    assert len(list(Path(table.uri, "_versions").iterdir())) <= 10


def test_a_damaged_or_newer_table_says_what_to_do(table: BudgetTable) -> None:
    found = table.read()
    budget = replace(found.budget, clock=1.0)
    newer = budget.to_json().replace('"format":1', '"format":2')
    assert table.write(type("Newer", (), {"to_json": lambda self: newer})(), found)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="Upgrade airflow-geneva"):
        table.read()
    for manifest in Path(table.uri, "_versions").iterdir():
        manifest.write_bytes(b"broken")
    with pytest.raises(StorageError, match="Cannot read the limit 'openai'"):
        table.read()


def test_who_leaves_gives_back_the_end_of_what_it_reserved(table: BudgetTable) -> None:
    limiter = Limiter(table, RateLimit("openai", requests_per_minute=600))
    assert limiter.step(Pass(0.0)) <= 0
    limiter.step(Pass(0.0))
    reserved = table.read().budget.requests
    limiter.leave()
    left = table.read().budget
    assert left.requests <= reserved
    assert not left.present


@pytest.mark.slow
def test_who_leaves_does_not_wait_for_a_store_that_is_away(bucket: Bucket, endpoint: str) -> None:
    proxy = Proxy(endpoint)
    options = with_patience(bucket.uri, tuple(sorted(options_of(proxy.endpoint).items())), 3_600)
    limiter = Limiter(
        BudgetTable(Storage(f"{bucket.uri}/_geneva/limits", options), "openai"),
        RateLimit("openai", requests_per_minute=600),
    )
    assert limiter.step(Pass(0.0)) <= 0
    proxy.down()
    try:
        left = threading.Thread(target=limiter.leave, daemon=True)
        left.start()
        left.join(60)
        assert not left.is_alive()
    finally:
        proxy.up()
        proxy.close()


def test_a_table_that_lies_elsewhere_or_names_another_folder_is_not_used(table: BudgetTable, tmp_path: Path) -> None:
    other = connect(tmp_path / "other").create_table("people", {"id": [1]})
    table.read()
    named = lance.DatasetBasePath(other.uri, is_dataset_root=True)
    lance.dataset(table.uri).add_bases([named])
    linked = replace(table, key="linked")
    os.symlink(other.uri, linked.uri)
    for one in (table, linked):
        with pytest.raises(StorageError, match=rf"The limit '{one.key}' at .* leads to another folder.*Remove it"):
            one.read()
    assert not other.lance.config()
