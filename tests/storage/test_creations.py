"""Tables that are created on a store that answers 409 to a conditional write, as S3 does while another one goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from airflow_geneva import RateLimit, Skip, connect, udf
from airflow_geneva.database import Database
from airflow_geneva.engine.lance_io.conflicts import VARIABLE
from airflow_geneva.engine.limits.store import BudgetTable
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import CommitConflict, InvalidInput, StorageError
from tests.support.latency import SlowProxy, Trouble
from tests.support.object_store import Bucket, numbers

pytestmark = pytest.mark.slow


class Conflicts:
    """Answers 409 to the first `times` commits of tables whose path has `part`; acts before the first answer.

    Args:
        before: what another writer does meanwhile.
    """

    def __init__(self) -> None:
        self.part, self.times, self.before = "", 0, lambda: None

    def __call__(self, method: str, path: str) -> Trouble:
        if not (self.times and method == "PUT" and f"{self.part}.lance/_versions/" in path):
            return ""
        self.times -= 1
        before, self.before = self.before, lambda: None
        before()
        return "conflict"


@contextmanager
def _store(endpoint: str, bucket: Bucket, options: dict[str, str]) -> Iterator[tuple[Database, Conflicts]]:
    conflicts = Conflicts()
    with SlowProxy(endpoint, 0.0, trouble=conflicts).running() as proxy:
        yield connect(f"{bucket.uri}/db", storage_options={**options, "aws_endpoint": proxy.url}), conflicts


@pytest.fixture
def store(endpoint: str, bucket: Bucket, options: dict[str, str]) -> Iterator[tuple[Database, Conflicts]]:
    with _store(endpoint, bucket, options) as found:
        yield found


@udf(data_type=pa.int64(), version="1")
def same(x: int) -> int:
    return x


def _table(db: Database) -> int:
    return db.create_table("made", numbers(1, 2, 3)).lance.count_rows()


def _view(db: Database) -> int:
    view = db.open_table("docs").query().select({"y": same}).create_materialized_view(db, "made")
    view.refresh(runner="inline")
    return view.to_arrow().num_rows


def _limit(db: Database) -> int:
    return BudgetTable(TableLocation(f"{db.uri}/docs.lance", "docs", db.options).limits, "made").read().version


CREATIONS: dict[str, tuple[Callable[[Database], int], int]] = {
    "a table": (_table, 3),
    "a view": (_view, 3),
    "the table of a limit": (_limit, 1),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", CREATIONS)
def test_what_a_store_refuses_while_another_write_goes_on_is_created_again(
    store: tuple[Database, Conflicts], kind: str, times: int
) -> None:
    (db, conflicts), (create, expected) = store, CREATIONS[kind]
    db.create_table("docs", numbers(1, 2, 3))
    conflicts.part, conflicts.times = "made", times
    assert create(db) == expected
    assert conflicts.times == 0


@pytest.mark.parametrize("kind", CREATIONS)
def test_a_store_that_always_refuses_is_given_up_after_the_retries(
    store: tuple[Database, Conflicts], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (db, refusals), (create, _) = store, CREATIONS[kind]
    db.create_table("docs", numbers(1, 2, 3))
    monkeypatch.setenv(VARIABLE, "2")
    refusals.part, refusals.times = "made", 100
    with pytest.raises(CommitConflict, match="at every one of 3 tries to create it"):
        create(db)
    assert refusals.times == 97
    assert "made" not in [name for name in db.table_names() if db.has_table(name)]


@pytest.mark.parametrize("kind", CREATIONS)
def test_what_another_writer_created_meanwhile_stays(
    store: tuple[Database, Conflicts], kind: str, bucket: Bucket, options: dict[str, str]
) -> None:
    (db, conflicts), (create, _) = store, CREATIONS[kind]
    db.create_table("docs", numbers(1, 2, 3))
    directly = connect(db.uri, storage_options=options)
    other: Callable[[], Any] = (
        (lambda: _limit(directly))
        if kind == "the table of a limit"
        else (lambda: directly.create_table("made", numbers(7)))
    )
    conflicts.part, conflicts.times, conflicts.before = "made", 1, other
    if kind == "the table of a limit":
        assert create(db) == 1
        return
    with pytest.raises(InvalidInput, match="Table 'made' already exists"):
        create(db)
    assert directly.open_table("made").to_arrow() == numbers(7)


def test_a_table_that_another_writer_created_meanwhile_is_opened_if_it_may_exist(
    store: tuple[Database, Conflicts], options: dict[str, str]
) -> None:
    db, conflicts = store
    directly = connect(db.uri, storage_options=options)
    for name, rows in (("made", numbers(7)), ("other", pa.table({"z": [1.5]}))):
        conflicts.part, conflicts.times = name, 1
        conflicts.before = lambda name=name, rows=rows: directly.create_table(name, rows)
        if name == "made":
            assert db.create_table(name, numbers(1, 2, 3), exist_ok=True).to_arrow() == numbers(7)
        else:
            with pytest.raises(InvalidInput, match="with other columns"):
                db.create_table(name, numbers(1, 2, 3), exist_ok=True)


@pytest.mark.parametrize("others", [None, numbers(7)])
def test_a_table_to_overwrite_that_another_writer_created_meanwhile_is_overwritten(
    store: tuple[Database, Conflicts], options: dict[str, str], others: pa.Table | None
) -> None:
    db, conflicts = store
    directly = connect(db.uri, storage_options=options)
    conflicts.part, conflicts.times = "made", 1
    if others is not None:
        conflicts.before = lambda: directly.create_table("made", others)
    table = db.create_table("made", numbers(1, 2, 3), mode="overwrite")
    assert table.to_arrow() == numbers(1, 2, 3)
    assert table.lance.has_stable_row_ids


def test_a_stream_that_was_read_is_not_written_again_without_its_rows(store: tuple[Database, Conflicts]) -> None:
    db, conflicts = store
    conflicts.part, conflicts.times = "made", 1
    with pytest.raises(StorageError, match=r"Table 'made' was not created.*Give the stream again"):
        db.create_table("made", numbers(1, 2, 3).to_reader())
    assert not db.has_table("made")


def test_no_row_is_given_up_because_the_table_of_a_limit_met_a_conflict(store: tuple[Database, Conflicts]) -> None:
    @udf(data_type=pa.int64(), limit=RateLimit("service", requests_per_minute=60_000), on_error=[Skip(Exception)])
    def counted(x: int) -> int:
        return x

    db, conflicts = store
    table = db.create_table("docs", numbers(1, 2, 3))
    table.add_columns({"y": counted})
    conflicts.part, conflicts.times = "service", 2
    result = table.backfill("y", runner="inline")
    assert (result.rows_computed, result.rows_failed, conflicts.times) == (3, 0, 0)
