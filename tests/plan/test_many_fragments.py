"""A plan of very many fragments makes no Python object for each, and what it leaves behind stays small."""

from __future__ import annotations

from pathlib import Path

import lance
import pytest

from airflow_geneva.engine.checkpoint.facts import Facts
from airflow_geneva.engine.lance_io.manifest import Manifest
from airflow_geneva.engine.lance_io.messages import Numbers
from airflow_geneva.engine.plan.shard import (
    FRAGMENTS_PER_COMMIT,
    FRAGMENTS_PER_SHARD,
    SHARDS_UNASKED,
    fragments_per_commit,
)
from airflow_geneva.engine.storage import location
from bench import planning, udfs
from bench.cases import open_table
from tests.support.plans import save_plan

FRAGMENTS = 300


@pytest.mark.parametrize("computed", [False, True])
def test_no_object_is_made_for_each_fragment(computed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning.make_many(str(tmp_path), FRAGMENTS, computed, columns=5)
    table = open_table(tmp_path)
    made: list[int] = []
    at = Manifest.at

    def counted(manifest: Manifest, positions: Numbers) -> object:
        made.append(len(positions))
        return at(manifest, positions)

    with monkeypatch.context() as patched:
        patched.setattr(Manifest, "at", counted)
        patched.setattr(Facts, "_fact", None)
        plan = table.plan_backfill("y", udf=udfs.double)
        assert plan.rows_total == planning.FIRST_ROWS + (FRAGMENTS - 1) * planning.ROWS
        assert plan.rows_pending == (0 if computed else plan.rows_total)
        assert len(str(plan).splitlines()) < 20
        # pylance's own word on the first and the last, and the few that are printed.
        assert sum(made) <= 12
        found = planning.sizes(plan, table)
    assert (found["shards"], found["commits"]) == ((0, 0) if computed else (1, -(-FRAGMENTS // FRAGMENTS_PER_COMMIT)))
    assert found["plan_bytes"] < 200 * FRAGMENTS
    assert found["xcom_bytes"] < 16_384
    if not computed:
        saved = save_plan(plan, table.location.checkpoints)
        assert saved.load_shard(table.location.checkpoints, 0) == plan.shards[0]


@pytest.mark.parametrize("fragments", [100, 5_000, 100_000, 300_000, 1_000_000, 10_000_000])
def test_a_backfill_of_any_number_of_fragments_makes_about_a_hundred_commits(fragments: int) -> None:
    size = max(FRAGMENTS_PER_SHARD, -(-fragments // SHARDS_UNASKED))
    shards = -(-fragments // size)
    assert shards * -(-size // fragments_per_commit(size, shards)) <= 100


def test_a_manifest_of_100_000_fragments_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning.make_many(str(tmp_path), 1_000, False)
    cache = lance.Session(metadata_cache_size_bytes=location._CACHE_BYTES // 100)
    monkeypatch.setattr(location, "_session", lambda process: cache)
    open_table(tmp_path)
    assert cache.size_bytes() > 500 * 1_000, "the next opening finds it in the cache"
