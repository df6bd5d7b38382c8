"""What came into a table since a version, held against the rows of both versions, and since when."""

from __future__ import annotations

import random
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from airflow_geneva.engine.watch.new_rows import NewRows, all_rows_as_new, committed_at, first_version, new_rows_since

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def make(uri: Path, rows: int = 20, stable: bool = True) -> lance.LanceDataset:
    values = pa.table({"x": range(rows)})
    return lance.write_dataset(values, uri, enable_stable_row_ids=stable, max_rows_per_file=7)


def contents(dataset: lance.LanceDataset) -> dict[int, int]:
    rows = dataset.to_table(columns=["x", "_rowid"])
    return dict(zip(rows["_rowid"].to_pylist(), rows["x"].to_pylist(), strict=True))


def change(uri: Path, dice: random.Random) -> None:
    dataset = lance.dataset(uri)
    number = dice.randrange(1_000, 1_000_000)
    kind = dice.choice(["append", "append", "update", "update", "delete", "upsert", "compact", "restore", "config"])
    chosen = f"x % {dice.randrange(2, 6)} = 1"
    if kind == "append":
        lance.write_dataset(pa.table({"x": range(number, number + dice.randrange(1, 9))}), uri, mode="append")
    elif kind == "update":
        dataset.update({"x": f"x + {number}"}, where=chosen)
    elif kind == "delete":
        dataset.delete(chosen)
    elif kind == "upsert":
        some = list(contents(dataset).values())[:3]
        merge = dataset.merge_insert("x").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.table({"x": [*dict.fromkeys(some), number]}))
    elif kind == "compact":
        dataset.optimize.compact_files()
    elif kind == "restore":
        dataset.checkout_version(dice.randrange(1, dataset.version + 1)).restore()
    else:
        dataset.update_config({"some": str(number)})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_rows_that_came_changed_and_went_are_those_that_two_versions_differ_in(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    uri = tmp_path / "t.lance"
    make(uri)
    for _ in range(14):
        change(uri, dice)
    now = lance.dataset(uri)
    after = contents(now)
    for version in range(1, now.version):
        before = contents(now.checkout_version(version))
        found = new_rows_since(now, version, changed_rows=True)
        said = f"seed {seed}, since version {version} of {now.version}"
        assert found.new_rows == len(after.keys() - before.keys()), said
        assert found.deleted_rows == len(before.keys() - after.keys()), said
        changed = sum(before[id] != after[id] for id in before.keys() & after.keys())
        # An upsert may write a value that was there already.
        assert changed <= found.changed_rows <= len(before.keys() & after.keys()), said
        assert bool(found) == bool(found.new_rows or found.changed_rows or found.deleted_rows), said
        assert located(now, found) >= {id for id in after if before.get(id) != after[id]}, said
        less = new_rows_since(now, version, changed_rows=False)
        assert (less.new_rows, less.changed_rows, less.deleted_rows) == (found.new_rows, 0, 0), said
        assert located(now, less) == after.keys() - before.keys(), said


def located(dataset: lance.LanceDataset, found: NewRows) -> set[int]:
    """Row ids of the rows that are said to be unseen."""
    ids: set[int] = set()
    for fragment, rows in found.rows.items():
        given: Any = dataset.get_fragment(fragment)
        table = given.scanner(columns=[], with_row_id=True, with_row_address=True).to_table()
        chosen = rows.mask(table["_rowaddr"].to_numpy().astype("int64") & 0xFFFFFFFF)
        ids |= set(table["_rowid"].to_numpy()[chosen].tolist())
    return ids


def test_of_a_version_that_was_cleaned_up_rows_say_when_they_came_but_not_which_are_gone(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    make(uri)
    lance.write_dataset(pa.table({"x": [100, 101]}), uri, mode="append")
    lance.dataset(uri).update({"x": "x + 1000"}, where="x < 3")
    lance.dataset(uri).delete("x = 4")
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))
    now = lance.dataset(uri)
    found = new_rows_since(now, 1, changed_rows=True)
    assert (found.new_rows, found.changed_rows, found.deleted_rows) == (2, 3, None)
    assert not new_rows_since(now, 2, changed_rows=False)
    assert new_rows_since(now, 3, changed_rows=True)


def test_a_table_that_was_made_again_has_a_lower_version_and_is_new_as_a_whole(tmp_path: Path) -> None:
    dataset = make(tmp_path / "t.lance")
    assert new_rows_since(dataset, 5, changed_rows=False).new_rows == 20
    dataset.delete("true")
    assert not new_rows_since(dataset, 9, changed_rows=True)
    assert not all_rows_as_new(dataset)


def test_it_is_known_since_when_rows_wait(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    began = datetime.now(timezone.utc)
    make(uri)
    lance.dataset(uri).update_config({"a": "b"})
    time.sleep(0.1)
    between = datetime.now(timezone.utc)
    lance.write_dataset(pa.table({"x": [100, 101]}), uri, mode="append")
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).update({"x": "x + 1000"}, where="x < 3")
    now = lance.dataset(uri)

    appended = new_rows_since(now, 1, changed_rows=False)
    assert first_version(now, appended) == 3
    assert between <= committed_at(now, 3) <= datetime.now(timezone.utc)
    assert began <= committed_at(now, 1) <= between
    changed = new_rows_since(now, 3, changed_rows=True)
    assert (changed.changed_rows, first_version(now, changed)) == (3, 6 if now.version == 6 else now.version)
    assert first_version(now, all_rows_as_new(now)) == 1
    now.delete("x = 101")
    assert first_version(now, new_rows_since(now, 3, changed_rows=True)) == 4  # a row that is gone says nothing

    now.cleanup_old_versions(older_than=timedelta(0))
    now = lance.dataset(uri)
    assert committed_at(now, 1) == committed_at(now, now.version)


def test_without_stable_row_ids_nobody_knows_since_when(tmp_path: Path) -> None:
    uri = tmp_path / "t.lance"
    make(uri, stable=False)
    lance.write_dataset(pa.table({"x": [100, 101]}), uri, mode="append")
    now = lance.dataset(uri)
    found = new_rows_since(now, 1, changed_rows=False)
    assert (found.new_rows, first_version(now, found)) == (2, 2)
    assert first_version(now, all_rows_as_new(now)) == 1
