"""A deduplicated view keeps one row of each cluster, and a refresh compares and computes what changed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import lance
import pyarrow as pa
import pytest

from airflow_geneva import connect, connect_namespace
from airflow_geneva.engine.cleanup import clean_up, collect, find_garbage
from airflow_geneva.engine.commit import group_table
from airflow_geneva.engine.duplicates import clusters as search
from airflow_geneva.engine.duplicates.vectors import Corners
from airflow_geneva.engine.plan.freshness import FreshnessCount
from airflow_geneva.engine.views.hidden import hidden_tables
from airflow_geneva.errors import InvalidInput, UnknownValues
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.counting import Trace
from tests.support.duplicates import Clean, text_of, vector_of
from tests.udfs_for_tests import views as udfs

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("text", pa.string()),
        ("x", pa.int64()),
        ("score", pa.float64()),
        ("other", pa.int64()),
        ("vector", pa.list_(pa.float32(), 8)),
    ]
)


def rows(numbers: range) -> pa.Table:
    data = [
        {"id": at, "text": text_of(at * 17), "x": at, "score": None if at % 9 == 0 else float(at * 37 % 11), "other": 0}
        | {"vector": vector_of(at * 17)}
        for at in numbers
    ]
    return pa.Table.from_pylist(data, SCHEMA)


@pytest.fixture
def docs(tmp_path: Path) -> Table:
    return connect(tmp_path / "db").create_table("docs", rows(range(60)), max_rows_per_file=20)


def make(table: Table, clean: Clean, name: str = "clean", columns: tuple[str, ...] = ("id", "x")) -> View:
    query = table.query().select(columns).add_columns({"p": (udfs.plus, ["x"])})
    return clean.of(query).create_materialized_view(name=name)


def wanted(table: Table, clean: Clean) -> list[int]:
    found = {row["_rowid"]: row for row in table.lance.to_table(with_row_id=True).to_pylist()}
    passes = (lambda row: row["x"] % 3 != 0) if clean.where else (lambda row: True)
    return [found[row_id]["id"] for row_id in clean.kept(found, passes)]


def shown(view: View) -> list[int]:
    found = view.to_arrow().to_pylist()
    assert all(row["p"] == row["x"] + 1 for row in found)
    return sorted(row["id"] for row in found)


CLEAN = [
    Clean(),
    Clean(threshold=0.5, keep="min(score)"),
    Clean(keep="max(score)", where="x % 3 != 0"),
    Clean(("text",), None),
    Clean(("score", "other"), None, "max(id)"),
    Clean(("vector",), 0.95),
    Clean(("vector",), 0.9, "max(score)", "x % 3 != 0"),
]


@pytest.mark.parametrize("clean", CLEAN, ids=str)
def test_a_view_keeps_one_row_of_each_cluster(docs: Table, clean: Clean) -> None:
    view = make(docs, clean)
    assert shown(view) == []
    result = view.refresh(runner="inline")
    kept = wanted(docs, clean)
    assert 1 < len(kept) < 60
    assert (result.state, result.rows_computed) == ("DONE", len(kept))
    assert shown(view) == sorted(kept)
    assert clean.of(docs.query()).to_arrow()["id"].to_pylist() == kept
    version = view.version
    assert view.refresh(runner="inline").commits == ()
    assert view.version == version


CHANGES: dict[str, Callable[[Table], Any]] = {
    "append": lambda table: table.add(rows(range(1_000, 1_020))),
    "update": lambda table: table.lance.update({"text": "'something else'"}, where="id % 7 = 0"),
    "update vectors": lambda table: table.lance.update({"vector": f"{[0.5, 0.1] * 4}"}, where="id % 7 = 0"),
    "update the filter": lambda table: table.lance.update({"x": "x + 1000"}, where="id % 5 = 0"),
    "update what decides": lambda table: table.lance.update({"score": "100 - score"}, where="id % 2 = 0"),
    "update something else": lambda table: table.lance.update({"other": "other + 1"}, where="id % 2 = 0"),
    "delete": lambda table: table.lance.delete("id % 4 = 1"),
    "compact": lambda table: table.lance.optimize.compact_files(),
    "restore": lambda table: table.lance.checkout_version(1).restore(),
}


@pytest.mark.parametrize("clean", CLEAN, ids=str)
def test_a_refresh_follows_every_change(docs: Table, clean: Clean) -> None:
    view = make(docs, clean)
    view.refresh(runner="inline")
    for change in CHANGES.values():
        change(docs)
        view.refresh(runner="inline")
        assert shown(view) == sorted(wanted(docs, clean))
        assert told(view) == duplicates(docs, clean)
        assert view.refresh(runner="inline").commits == ()
    shutil.rmtree(Path(view.uri) / "_duplicates")
    assert told(view) == duplicates(docs, clean)


def told(view: View) -> list[tuple[int, int, int | None]]:
    return [(row["row_id"], row["cluster"], row["duplicate_of"]) for row in view.duplicates().to_pylist()]


def duplicates(table: Table, clean: Clean) -> list[tuple[int, int, int | None]]:
    found = {row["_rowid"]: row for row in table.lance.to_table(with_row_id=True).to_pylist()}
    return clean.duplicates(found, (lambda row: row["x"] % 3 != 0) if clean.where else (lambda row: True))


def test_a_view_says_which_rows_it_leaves_out_at_the_version_that_it_shows(docs: Table) -> None:
    view = make(docs, Clean())
    with pytest.raises(InvalidInput, match="Refresh it first"):
        view.duplicates()
    view.refresh(runner="inline")
    before = view.duplicates(["id", "text"])
    assert before.num_rows > 20
    texts = dict(zip(before["row_id"].to_pylist(), before["text"].to_pylist(), strict=True))
    ids = docs.lance.to_table(columns=["id", "text"], with_row_id=True).to_pylist()
    assert texts == {row["_rowid"]: row["text"] for row in ids if row["_rowid"] in texts}
    files = sorted(Path(view.uri).rglob("*"))
    docs.lance.delete("id % 4 = 1")
    assert view.duplicates(["id", "text"]).equals(before)
    assert sorted(Path(view.uri).rglob("*")) == files
    for columns, message in ((["missing"], "no column 'missing'"), (["cluster"], "no column 'cluster'")):
        with pytest.raises(InvalidInput, match=message):
            view.duplicates(columns)
    for wrong in ("id", [1]):
        with pytest.raises(InvalidInput, match=r"columns=.* is not valid: give names in a list"):
            view.duplicates(cast(Any, wrong))
    with pytest.raises(InvalidInput, match="keeps all rows"):
        docs.query().create_materialized_view(name="all").duplicates()


def test_no_rows_are_told_if_none_is_left_out_and_those_before_a_refresh_until_it_ends(docs: Table) -> None:
    view = make(docs, Clean())
    docs.lance.delete("true")
    view.refresh(runner="inline")
    assert view.duplicates(["id"]).schema.names == ["row_id", "cluster", "duplicate_of", "id"]
    assert view.duplicates(["id"]).num_rows == 0
    docs.add(rows(range(20)))
    view.refresh(runner="inline")
    before = view.duplicates(["id"])
    docs.add(rows(range(20, 60)))
    assert view.refresh(runner="inline", max_rows=1).state == "PARTIAL"
    assert view.duplicates(["id"]).equals(before)
    view.refresh(runner="inline")
    assert told(view) == duplicates(docs, Clean())
    assert view.duplicates().num_rows > before.num_rows


def test_a_row_takes_the_place_of_a_deleted_one_and_is_computed(tmp_path: Path, trace: Trace) -> None:
    table = connect(tmp_path / "db").create_table("docs", rows(range(1, 4)).append_column("n", pa.array([1, 1, 2])))
    query = table.query().select(["id", "x"]).add_columns({"p": (udfs.plus, ["x"])})
    view = query.deduplicate("n").create_materialized_view(name="clean")
    view.refresh(runner="inline")
    assert shown(view) == [1, 3]
    trace.clear()
    table.lance.delete("id = 1")
    result = view.refresh(runner="inline")
    assert (shown(view), result.rows_computed, trace.counts()) == ([2, 3], 1, {2: 1})


def test_the_functions_run_on_kept_rows_only(docs: Table, trace: Trace) -> None:
    view = make(docs, Clean())
    view.refresh(runner="inline")
    assert sorted(trace.counts()) == shown(view)
    assert max(trace.counts().values()) == 1
    trace.clear()
    docs.lance.update({"other": "5"}, where="true")
    docs.lance.optimize.compact_files()
    view.refresh(runner="inline")
    assert len(trace) == 0


def test_a_refresh_compares_texts_with_changed_ones_only(docs: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    view = make(docs, Clean())
    compared: list[int] = []
    compare = search._Search._compare

    def counting(self: Any, left: Any, right: Any) -> None:
        compared.extend(self.rows.ids[left].tolist() + self.rows.ids[right].tolist())
        compare(self, left, right)

    monkeypatch.setattr(search._Search, "_compare", counting)
    view.refresh(runner="inline")
    first = len(compared)
    compared.clear()
    docs.add([{"id": 1_000, "text": "a time to embrace", "x": 1_000}])
    view.refresh(runner="inline")
    assert compared == []
    docs.add([{"id": 1_001, "text": f"{text_of(1)}, and more", "x": 1_001}])
    view.refresh(runner="inline")
    newest = max(docs.lance.to_table(columns=[], with_row_id=True)["_rowid"].to_pylist())
    assert 0 < len(compared) < first / 4
    assert compared.count(newest) == len(compared) / 2


def test_a_refresh_hashes_new_and_changed_vectors_only(docs: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    hashes = Corners.hashes

    def counting(self: Corners, units: Any) -> Any:
        hashed.append(len(units))
        return hashes(self, units)

    monkeypatch.setattr(Corners, "hashes", counting)
    view = make(docs, Clean(("vector",), 0.95))
    view.refresh(runner="inline")
    assert sum(hashed) == 60
    docs.add(rows(range(1_000, 1_007)))
    docs.lance.update({"vector": f"{[0.5, 0.1] * 4}"}, where="id % 20 = 0")
    docs.lance.update({"text": "'other'"}, where="id % 3 = 0")
    docs.lance.optimize.compact_files()
    hashed.clear()
    view.refresh(runner="inline")
    assert sum(hashed) == 7 + 3


def test_a_plan_writes_nothing_and_counts_the_most_that_may_be_computed(docs: Table) -> None:
    view = make(docs, Clean())
    files = sorted(Path(view.uri).rglob("*"))
    plan = view.plan_refresh()
    assert plan.rows_pending == 60
    assert "which of the changed rows are duplicates is found when the refresh runs" in str(plan)
    assert sorted(Path(view.uri).rglob("*")) == files
    view.refresh(runner="inline")
    files = sorted(Path(view.uri).rglob("*"))
    assert view.plan_refresh().rows_pending == 0
    docs.add(rows(range(1_000, 1_007)))
    assert view.plan_refresh().rows_pending == 7
    assert sorted(Path(view.uri).rglob("*")) == files


def test_what_is_kept_beside_a_view_is_no_table_and_goes_with_the_view(docs: Table, tmp_path: Path) -> None:
    db = connect(tmp_path / "db")
    view = make(docs, Clean())
    view.refresh(runner="inline")
    assert (Path(view.uri) / "_duplicates" / "hashes.lance").is_dir()
    assert db.table_names() == ["clean", "docs"]
    assert [job.table for job in db.jobs()] == ["clean"]
    db.copy_table("clean", "copy")
    copy = db.open_table("copy")
    assert copy.refresh(runner="inline").rows_computed == 0
    docs.add(rows(range(1_000, 1_020)))
    copy.refresh(runner="inline")
    assert shown(copy) == sorted(wanted(docs, Clean()))
    db.drop_table("clean")
    assert not Path(view.uri).exists()


@pytest.mark.parametrize("lost", [".", "hashes.lance", "hashes.lance/_checkpoints"])
def test_what_is_kept_beside_a_view_is_made_again_if_it_is_lost(docs: Table, lost: str) -> None:
    view = make(docs, Clean())
    view.refresh(runner="inline")
    before = view.duplicates(["id"])
    shutil.rmtree(Path(view.uri) / "_duplicates" / lost)
    assert view.duplicates(["id"]).equals(before)
    assert view.refresh(runner="inline").commits == ()
    assert view.duplicates(["id"]).equals(before)
    docs.lance.delete("id % 4 = 1")
    result = view.refresh(runner="inline")
    assert shown(view) == sorted(wanted(docs, Clean()))
    assert result.rows_computed < 10


def test_a_damaged_record_of_clusters_counts_as_missing(docs: Table) -> None:
    view = make(docs, Clean())
    view.refresh(runner="inline")
    (record,) = (Path(view.uri) / "_duplicates").rglob("clusters.lance")
    record.write_bytes(record.read_bytes()[:-20] + b"x" * 20)
    docs.lance.delete("id % 4 = 1")
    view.refresh(runner="inline")
    assert shown(view) == sorted(wanted(docs, Clean()))


def test_the_rows_that_are_kept_are_limited_and_shuffled(docs: Table) -> None:
    clean = Clean()
    query = clean.of(docs.query().select(["id"])).shuffle(3)
    whole = query.to_arrow()["id"].to_pylist()
    assert sorted(whole) == sorted(wanted(docs, clean))
    view = query.limit(5).offset(2).create_materialized_view(name="some")
    view.refresh(runner="inline")
    assert view.to_arrow()["id"].to_pylist() == whole[2:7] == query.limit(5).offset(2).to_arrow()["id"].to_pylist()
    docs.lance.delete(f"id IN ({whole[0]}, {whole[3]})")
    view.refresh(runner="inline")
    assert view.to_arrow()["id"].to_pylist() == query.limit(5).offset(2).to_arrow()["id"].to_pylist()


def test_only_kept_documents_are_cut_into_chunks(docs: Table, trace: Trace) -> None:
    query = docs.query().select({"id": "id"}).add_columns({"part": (udfs.digits, ["x"])}).explode("part")
    view = Clean().of(query).create_materialized_view(name="chunks")
    view.refresh(runner="inline")
    ids = {row["id"] for row in view.to_arrow().to_pylist()}
    kept = wanted(docs, Clean())
    assert ids <= set(kept)
    assert sorted(trace.counts()) == sorted(kept)
    trace.clear()
    docs.lance.update({"other": "9"}, where="true")
    assert view.refresh(runner="inline").commits == ()
    assert len(trace) == 0
    docs.add(rows(range(1_000, 1_020)))
    view.refresh(runner="inline")
    assert {row["id"] for row in view.to_arrow().to_pylist()} <= set(wanted(docs, Clean()))


def test_a_view_of_a_view_is_deduplicated(docs: Table) -> None:
    upper = make(docs, Clean(threshold=None), "upper", ("id", "x", "text"))
    view = Clean().of(upper.query().select(["id", "x", "p"])).create_materialized_view(name="clean")
    for change in (lambda table: None, *CHANGES.values()):
        change(docs)
        upper.refresh(runner="inline")
        view.refresh(runner="inline")
        rows_of = {row["_rowid"]: row for row in upper.lance.to_table(with_row_id=True, filter="__is_set").to_pylist()}
        assert shown(view) == sorted(rows_of[one]["id"] for one in Clean().kept(rows_of))


VALUES: list[tuple[pa.DataType, list[Any], int]] = [
    (pa.float64(), [0.0, -0.0, float("nan"), -float("nan"), None, None, 1.5], 4),
    (pa.float16(), [0.0, -0.0, 1.5, 1.5], 2),
    (pa.string(), ["a", "a ", "", None, "", None], 4),
    (pa.bool_(), [True, False, None, True], 3),
    (pa.decimal128(9, 2), [Decimal("1.50"), Decimal("1.5"), None], 2),
    (pa.timestamp("us", "UTC"), [datetime(2026, 1, 1), datetime(2026, 1, 1), None], 2),
    (pa.binary(), [b"a", b"a", b"\0"], 2),
]


@pytest.mark.parametrize(
    ("kind", "values", "left"), VALUES, ids=lambda one: str(one) if isinstance(one, pa.DataType) else ""
)
def test_values_of_any_plain_type_are_compared(tmp_path: Path, kind: pa.DataType, values: list[Any], left: int) -> None:
    import numpy as np

    numbers = np.array(values, np.float16) if kind == pa.float16() else values
    data = pa.table({"id": pa.array(range(len(values)), pa.int64()), "v": pa.array(numbers, kind)})
    table = connect(tmp_path / "db").create_table("docs", data)
    assert len(table.query().deduplicate("v").to_arrow()) == left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": []}, "give the name of a column, or several"),
        ({"on": 3}, "give the name of a column, or several"),
        ({"on": ["x", "x"]}, "names 'x' twice"),
        ({"on": "missing"}, "has no column 'missing'"),
        ({"on": "x", "keep": "min(missing)"}, "has no column 'missing'"),
        ({"on": "x", "method": "minhash"}, "only texts have shingles"),
        ({"on": ["text", "x"], "method": "minhash"}, "the texts of one column"),
        ({"on": "text", "method": "euclid"}, 'or "cosine", which compares vectors'),
        ({"on": "text", "method": "cosine"}, "Give one of lists of one size"),
        ({"on": "numbers", "method": "cosine"}, "Give one of lists of one size"),
        ({"on": ["vector", "x"], "method": "cosine"}, "the vectors of one column"),
        ({"on": "vector", "method": "cosine", "threshold": 0.7}, "from 0.8 to 1"),
        ({"on": "text", "threshold": 0.8}, 'method="equal" compares values'),
        ({"on": "text", "method": "minhash", "threshold": 0.2}, "from 0.3 to 1"),
        ({"on": "text", "method": "minhash", "threshold": True}, "from 0.3 to 1"),
        ({"on": "text", "keep": "least(x)"}, 'give "first", "min(column)" or "max(column)"'),
        ({"on": "vector"}, "which is not compared"),
        ({"on": "text", "keep": "min(vector)"}, "whose values have no order"),
    ],
    ids=lambda one: "" if isinstance(one, str) else str(one),
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    numbers = pa.FixedSizeListArray.from_arrays(pa.array([1] * 120, pa.int32()), 2)
    table = connect(tmp_path / "db").create_table("docs", rows(range(60)).append_column("numbers", numbers))
    with pytest.raises(InvalidInput, match=message.replace("(", r"\(").replace(")", r"\)")):
        table.query().deduplicate(**arguments).create_materialized_view(name="clean")
    assert connect(tmp_path / "db").table_names() == ["docs"]


def test_texts_that_are_alike_in_all_rows_are_one_cluster(tmp_path: Path) -> None:
    data = pa.table({"id": range(5_000), "text": ["the same text, again and again"] * 5_000})
    table = connect(tmp_path / "db").create_table("docs", data)
    assert table.query().deduplicate("text", "minhash").to_arrow()["id"].to_pylist() == [0]


def test_other_parameters_hash_the_rows_again(docs: Table, tmp_path: Path) -> None:
    view = make(docs, Clean())
    view.refresh(runner="inline")
    hashes = Path(view.uri) / "_duplicates" / "hashes.lance"
    assert len(lance.dataset(str(hashes)).schema) == 2 + 2 + 16
    db = connect(tmp_path / "db")
    db.drop_table("clean")
    view = make(docs, Clean(threshold=0.9))
    view.refresh(runner="inline")
    assert len(lance.dataset(str(hashes)).schema) == 2 + 2 + 11
    assert shown(view) == sorted(wanted(docs, Clean(threshold=0.9)))


def test_a_cleanup_reaches_what_is_kept_beside_a_view(docs: Table) -> None:
    view = make(docs, Clean())
    for number in range(3):
        docs.add(rows(range(100 + number, 101 + number)))
        view.refresh(runner="inline")
    (hashes,) = hidden_tables(view.location)
    assert hashes.name == "hashes"
    garbage = find_garbage(hashes, "1s", now=time.time() + 400 * 86_400)
    assert garbage.count
    collect(hashes, garbage)
    assert clean_up(view.location, "1s", dry_run=False).table == "clean"
    docs.lance.delete("id % 4 = 1")
    view.refresh(runner="inline")
    assert shown(view) == sorted(wanted(docs, Clean()))


def test_the_hashes_of_many_small_changes_are_compacted(docs: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_table, "_MOST_FRAGMENTS", 2)
    view = make(docs, Clean())
    for number in range(4):
        docs.add(rows(range(100 + number, 101 + number)))
        view.refresh(runner="inline")
        assert shown(view) == sorted(wanted(docs, Clean()))
        (hashes,) = hidden_tables(view.location)
        assert len(hashes.open().get_fragments()) <= 2


def test_a_view_in_a_catalog_is_refused(tmp_path: Path) -> None:
    db = connect_namespace("dir", {"root": str(tmp_path)})
    table = db.create_table("docs", rows(range(5)))
    with pytest.raises(InvalidInput, match="its database is a catalog"):
        table.query().deduplicate("text").create_materialized_view(db, "clean")
    assert db.table_names() == ["docs"]
    assert len(table.query().deduplicate("id").to_arrow()) == 5


@pytest.mark.spark
def test_the_columns_of_kept_rows_are_computed_on_spark(docs: Table, spark: Any, trace: Trace) -> None:
    view = make(docs, Clean())
    assert view.refresh(runner="spark").state == "DONE"
    assert shown(view) == sorted(wanted(docs, Clean()))
    docs.lance.delete("id % 4 = 1")
    docs.add(rows(range(100, 120)))
    view.refresh(runner="spark")
    assert shown(view) == sorted(wanted(docs, Clean()))


def test_groups_are_not_deduplicated_and_duplicates_are_not_grouped(docs: Table) -> None:
    with pytest.raises(InvalidInput, match="make a view of this"):
        docs.query().group_by("x").agg({"n": "count(*)"}).deduplicate("x")
    with pytest.raises(InvalidInput, match="cannot be grouped"):
        docs.query().deduplicate("x").group_by("x")


def test_other_code_and_more_columns_run_on_kept_rows_only(docs: Table, trace: Trace) -> None:
    view = make(docs, Clean())
    view.refresh(runner="inline")
    kept = sorted(wanted(docs, Clean()))
    trace.clear()
    view.add_columns({"q": (udfs.plus, ["x"])})
    assert view.refresh(runner="inline").rows_computed == len(kept)
    assert sorted(trace.counts()) == kept
    trace.clear()
    view.alter_columns({"p": (udfs.fussy, ["x"])})
    view.refresh(runner="inline", on_code_change="recompute")
    found = view.to_arrow().to_pylist()
    assert sorted(row["id"] for row in found) == kept
    assert all((row["p"], row["q"]) == (row["x"], row["x"] + 1) for row in found)
    docs.lance.delete("id % 4 = 1")
    view.refresh(runner="inline")
    assert sorted(row["id"] for row in view.to_arrow().to_pylist()) == sorted(wanted(docs, Clean()))


def test_failed_rows_run_again_and_no_row_enters_with_them(docs: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    query = docs.query().select(["id", "x"]).add_columns({"f": (udfs.picky, ["x"])})
    view = Clean().of(query).create_materialized_view(name="clean")
    kept = wanted(docs, Clean())
    bad = [at for at in kept if at % 10 == 7]
    assert bad
    assert view.refresh(runner="inline").rows_failed == len(bad)
    docs.add(rows(range(1_000, 1_010)))
    again = view.refresh(runner="inline", errors_only=True)
    assert (again.rows_failed, again.rows_computed) == (len(bad), 0)
    assert sorted(row["id"] for row in view.to_arrow().to_pylist()) == sorted(kept)
    view.refresh(runner="inline")
    assert sorted(row["id"] for row in view.to_arrow().to_pylist()) == sorted(wanted(docs, Clean()))


def test_a_view_without_a_record_of_its_rows_is_written_again(docs: Table) -> None:
    view = make(docs, Clean())
    view.refresh(runner="inline")
    shutil.rmtree(Path(view.uri) / "_checkpoints" / "state")
    with pytest.raises(UnknownValues, match="is not known any more"):
        view.refresh(runner="inline", on_unknown_values="adopt")
    view.refresh(runner="inline", on_unknown_values="recompute")
    assert shown(view) == sorted(wanted(docs, Clean()))


def test_a_table_without_stable_row_ids_is_deduplicated_once(tmp_path: Path) -> None:
    options = {"new_table_enable_stable_row_ids": "false"}
    table = connect(tmp_path / "db").create_table("docs", rows(range(60)), storage_options=options)
    with pytest.warns(UserWarning, match="has no stable row ids"):
        view = make(table, Clean())
    view.refresh(runner="inline")
    assert shown(view) == sorted(wanted(table, Clean()))


def test_a_capped_refresh_swaps_nothing(docs: Table) -> None:
    view = make(docs, Clean())
    assert view.refresh(runner="inline", max_rows=3).state == "PARTIAL"
    assert shown(view) == []
    view.refresh(runner="inline")
    assert shown(view) == sorted(wanted(docs, Clean()))


def test_a_comparison_with_other_code_samples_kept_rows(docs: Table) -> None:
    view = make(docs, Clean())
    view.refresh(runner="inline")
    found = view.compare("p", replace(udfs.fussy, version="9"))
    assert found.rows == len(wanted(docs, Clean()))


def test_a_refresh_and_the_freshness_say_which_clusters_are_touched_and_which_is_the_largest(tmp_path: Path) -> None:
    words = "a quick brown fox jumps over one lazy dog and runs away from all of them"
    texts = [f"{words} {end}" for end in ("now", "then", "soon")] + ["nothing", "like", "this", "this"]
    docs = connect(tmp_path / "db").create_table("docs", pa.table({"id": range(len(texts)), "text": texts}))
    view = docs.query().deduplicate("text", method="minhash").create_materialized_view(name="v")

    def told() -> str:
        (note,) = view.refresh(runner="inline").notes
        assert note == FreshnessCount.of_view(view.location).count().touched + "."
        return note

    assert told() == (
        "touched clusters: 2 new clusters, 0 with other rows; the largest of 2 clusters, that of row id 0, has 3 of 7 "
        "rows (42.9%)."
    )
    assert view.refresh(runner="inline").notes == ()
    docs.lance.update({"id": "70"}, where="id = 3")
    assert view.refresh(runner="inline").notes == ()
    docs.add(pa.table({"id": [7, 8, 9], "text": [f"{words} once", "like", "else"]}))
    docs.lance.delete("id = 6")
    assert told() == (
        "touched clusters: 1 new cluster, 1 with other rows, 1 no longer there; the largest of 2 clusters, that of row "
        "id 0, has 4 of 9 rows (44.4%)."
    )
    docs.lance.update({"text": "CAST(id AS STRING)"}, where="id < 9")
    assert told() == "touched clusters: 0 new clusters, 0 with other rows, 2 no longer there."
