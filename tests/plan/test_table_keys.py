"""Keys of tables name rows in errors: recorded with each failure, bounded, and read only when a row fails."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import Database, connect, expect, udf
from airflow_geneva.engine.lance_io import table_key
from airflow_geneva.errors import InvalidInput, JobFailed
from airflow_geneva.table import Table
from airflow_geneva.view import View
from tests.support.marks import slow_after

PRIMARY = {"lance-schema:unenforced-primary-key": "true"}
_CUT = f"{'ä' * 98}…"


@udf(data_type=pa.int64(), version="1", on_error="skip")
def picky(x: int) -> int:
    if x < 0:
        raise ValueError(f"not {x}")
    return x


@udf(data_type=pa.int64(), version="1")
def strict(x: int) -> int:
    return picky.function(x)


@pytest.fixture
def db(tmp_path: Any) -> Database:
    return connect(tmp_path / "db")


def make(db: Database, keys: pa.Array, key: Any = "path", **options: Any) -> Table:
    """A table whose last row fails."""
    rows = pa.table({"path": keys, "x": [*range(len(keys) - 1), -1]})
    table = db.create_table("docs", rows, key=key, **options)
    table.add_columns({"n": picky})
    return table


def failed_keys(table: Table, **options: Any) -> list[str]:
    if isinstance(table, View):
        table.refresh(runner="inline", **options)
    else:
        table.backfill("n", runner="inline", **options)
    return [record.key for record in table.get_errors()]


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (pa.array(["a.pdf", "b.pdf"]), "b.pdf"),
        (pa.array(["a", "b"], pa.large_string()), "b"),
        (pa.array(["a", "b"]).dictionary_encode(), "b"),
        (pa.array([1, 2], pa.uint8()), "2"),
        (pa.array([b"a", b"\x00\xff"]), "00ff"),
        (pa.array([datetime(2026, 1, 2, 3, 4, 5)] * 2, pa.timestamp("ns")), "2026-01-02 03:04:05.000000000"),
        (pa.array([uuid.UUID(int=0).bytes, uuid.UUID(int=1).bytes], pa.uuid()), str(uuid.UUID(int=1))),
        (pa.array(["a", None]), "NULL"),
        (pa.array(["a", "ä" * 1_000]), _CUT),
        (pa.array(["a", "two\nlines\x1b[31m"]), "two\\nlines\\x1b[31m"),
        (pa.array(["a", "https://x/?token=abcdefgh"]), "https://x/?token=***"),
        (pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"b\xff"]).buffers()), "b\ufffd"),
    ],
)
def test_a_key_is_shown_as_one_short_line_without_secrets(keys: pa.Array, shown: str) -> None:
    names = table_key.RowNames(Keyed(keys), ("path",))  # type: ignore[arg-type]
    assert names.of([1]) == [shown]
    assert len(shown.encode()) <= table_key.MOST_BYTES


class Keyed:
    """A dataset with two rows, of which the second is read."""

    def __init__(self, keys: pa.Array) -> None:
        self.keys = keys

    def _take_rows(self, ids: list[int], columns: list[str]) -> pa.Table:
        return pa.table({"path": self.keys.slice(1, 1), "_rowid": pa.array(ids, pa.uint64())})


@pytest.mark.parametrize("stable", slow_after(1, ["true", "false"]))
def test_keys_are_recorded_with_a_failure_and_follow_the_column(db: Database, stable: str) -> None:
    options = {"new_table_enable_stable_row_ids": stable}
    table = make(db, pa.array(["a.pdf", "b.pdf"]), storage_options=options)
    assert table.key == ("path",)
    assert failed_keys(table) == ["b.pdf"]
    [record], [group] = table.get_errors(), table.group_errors()
    assert str(record).startswith("key b.pdf, row address 1 (fragment 0, offset 1): ValueError: not -1")
    assert "for example key b.pdf, row address 1" in str(group)
    assert "path  string  key" in str(table)
    table.rename_column("path", "place")
    assert table.key == ("place",)
    assert failed_keys(table, errors_only=True) == ["b.pdf"]
    with pytest.raises(InvalidInput, match=r"Columns \['place'\] of 'docs' cannot be dropped: they are its key"):
        table.drop_columns(["place"])
    table.lance.drop_columns(["place"])
    assert (table.key, failed_keys(table, errors_only=True)) == ((), [""])
    assert str(table.get_errors()[0]).startswith("row address 1 (fragment 0")


def test_a_key_has_several_columns_or_is_lances_own(db: Database) -> None:
    fields = [pa.field("path", pa.string(), nullable=False, metadata=PRIMARY), ("page", pa.int64()), ("x", pa.int64())]
    rows = pa.table({"path": ["a", "b"], "page": [3, 4], "x": [0, -1]}, schema=pa.schema(fields))
    table = db.create_table("docs", rows)
    table.add_columns({"n": picky})
    assert (table.key, failed_keys(table)) == (("path",), ["b"])
    table.set_key(["page", "path"])
    assert (table.key, failed_keys(table)) == (("page", "path"), ["4, b"])
    copy = db.create_table("copy", table.to_arrow())
    assert copy.key == ("page", "path")
    table.set_key(None)
    assert table.key == ("path",)
    version = table.version
    table.set_key(None)
    assert table.version == version


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("none", r"Table 'docs' has no columns \['none'\]\. It has: path, x, v"),
        (["path", "path"], "names a column twice"),
        ("v", r"Column 'v' of table 'docs' is list<.*> and cannot be a key"),
    ],
)
def test_what_cannot_be_a_key_is_refused(db: Database, key: Any, message: str) -> None:
    rows = pa.table({"path": ["a"], "x": [1], "v": [[1.0]]})
    with pytest.raises(InvalidInput, match=message):
        db.create_table("docs", rows, key=key)
    table = db.create_table("docs", rows, key="path")
    with pytest.raises(InvalidInput, match=message):
        table.set_key(key)
    assert table.key == ("path",)


def test_a_table_that_exists_keeps_its_key(db: Database) -> None:
    rows = pa.table({"path": ["a"], "x": [1]})
    db.create_table("docs", rows, key="path")
    assert db.create_table("docs", rows, exist_ok=True).key == ("path",)
    assert db.create_table("docs", rows, exist_ok=True, key="path").key == ("path",)
    with pytest.raises(InvalidInput, match=r"its key is \['path'\], not 'x'.*table\.set_key\('x'\)"):
        db.create_table("docs", rows, exist_ok=True, key="x")
    assert db.create_table("docs", rows, mode="overwrite").key == ()


def test_the_error_that_ends_a_job_names_the_row(db: Database) -> None:
    table = make(db, pa.array(["a.pdf", "b.pdf"]))
    with pytest.raises(JobFailed, match=r"failed at row 1 of fragment 0 \(row address 1, key b\.pdf\)"):
        table.backfill("n", udf=strict, runner="inline")
    assert [record.key for record in table.get_errors()] == ["b.pdf"]


def test_a_value_that_is_not_as_expected_is_named_by_its_key(db: Database) -> None:
    @udf(data_type=pa.int64(), version="1", expect=[expect.between(0, 10)])
    def plain(x: int) -> int:
        return x

    table = db.create_table("docs", pa.table({"path": ["a", "b"], "x": [1, -1]}), key="path")
    table.add_columns({"n": plain})
    view = table.query().select({"place": "path", "n": (plain, ["x"])}).create_materialized_view(db, "v")
    for run in (lambda: table.backfill("n", runner="inline"), lambda: view.refresh(runner="inline")):
        with pytest.raises(JobFailed, match=r"1 of 2 rows, for example row 1 \(key b\): -1"):
            run()


SELECT = {"place": "path", "n": (picky, ["x"])}


@pytest.mark.parametrize(
    ("of_table", "select", "key", "of_view", "shown"),
    slow_after(
        2,
        [
            ("path", SELECT, None, ("place",), "b"),
            ("path", SELECT, "place", ("place",), "b"),
            ("path", {**SELECT, "x": "x"}, "x", ("x",), "-1"),
            ("path", {"n": (picky, ["x"])}, None, (), ""),
            (None, SELECT, None, (), ""),
            (None, SELECT, "place", ("place",), "b"),
        ],
    ),
)
def test_a_view_has_its_own_key_or_that_of_its_source(
    db: Database, of_table: str | None, select: Any, key: str | None, of_view: tuple[str, ...], shown: str
) -> None:
    table = make(db, pa.array(["a", "b"]), key=of_table)
    view = table.query().select(select).create_materialized_view(db, "v", key=key)
    assert (view.key, failed_keys(view)) == (of_view, [shown])
    above = view.query().create_materialized_view(db, "above")
    assert above.key == of_view


def test_a_view_follows_a_key_that_its_source_gets_later(db: Database) -> None:
    table = make(db, pa.array(["a", "b"]), key=None)
    view = table.query().select(SELECT).create_materialized_view(db, "v")
    assert failed_keys(view) == [""]
    table.set_key("path")
    assert (view.key, failed_keys(view)) == (("place",), ["b"])
    for wrong, message in (("n", "Choose one that the query takes as it is: place"), ("path", "has no columns")):
        with pytest.raises(InvalidInput, match=message):
            view.set_key(wrong)
    view.set_key("place")
    table.set_key(None)
    assert (view.key, failed_keys(view, errors_only=True)) == (("place",), ["b"])
    with pytest.raises(InvalidInput, match=r"Columns \['place'\] of 'v' cannot be dropped.*set_key\(None\)"):
        view.drop_columns(["place"])
    view.set_key(None)
    view.drop_columns(["place"])
    assert (view.key, failed_keys(view, errors_only=True)) == ((), [""])


def test_keys_are_read_only_for_rows_that_fail_and_fail_no_job(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(db, pa.array(["a", "b"]))
    reads = list[Any]()

    def read(dataset: Any, ids: Any, columns: Any) -> Any:
        reads.append(ids.tolist())
        raise OSError("away")

    monkeypatch.setattr(table_key, "rows_in_batches", read)
    assert table.backfill("n", where="x >= 0", runner="inline").rows_computed == 1
    assert reads == []
    assert (failed_keys(table), reads) == ([""], [[1]])
