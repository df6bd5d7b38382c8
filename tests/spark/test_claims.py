"""The tasks of a stage claim groups of units: none is computed twice, and none is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.spark import claims
from airflow_geneva.spark.claims import Claims, Share


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[], Claims]:
    """Open the claims of five groups, as another process does."""
    return lambda: Claims(Storage.at(str(tmp_path / "claims")), 5)


def take_all(share: Share) -> None:
    while share.next():
        pass


def test_tasks_take_every_group_once(opened: Callable[[], Claims]) -> None:
    shares = [Share(opened(), task, False) for task in range(2)]
    order = [share.next() for share in (shares[0], shares[1], shares[1], shares[0], shares[1], shares[0], shares[1])]
    assert sorted(order) == [[], [], [0], [1], [2], [3], [4]]
    assert not shares[0].claims.free


def test_a_group_that_two_tasks_claim_at_once_is_left_to_the_driver(
    opened: Callable[[], Claims], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, met = Storage.write_json, [9]

    def writing(storage: Storage, name: str, document: object) -> None:
        write(storage, name, document)
        if met:
            write(storage, f"{name.partition('-')[0]}-{met.pop():06}", document)

    monkeypatch.setattr(Storage, "write_json", writing)
    share = Share(opened(), 0, False)
    take_all(share)
    assert share.taken == [1, 2, 3, 4]
    assert Share(opened(), 9, True).next() == [], "the other task may have seen both claims, too"


def test_tasks_at_work_at_once_share_the_groups(opened: Callable[[], Claims]) -> None:
    shares = [Share(opened(), task, False) for task in range(4)]
    threads = [threading.Thread(target=partial(take_all, share)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = [group for share in shares for group in share.taken]
    assert len(taken) == len(set(taken))


def test_a_task_that_runs_again_keeps_its_groups(opened: Callable[[], Claims]) -> None:
    first = Share(opened(), 1, False)
    assert [first.next(), first.next(), Share(opened(), 2, False).next()] == [[1], [2], [4]]
    again = Share(opened(), 1, True)
    assert [again.next(), again.next(), again.next()] == [[1, 2], [3], [0]]


def test_a_task_that_took_long_leaves_groups_to_the_next_one(
    opened: Callable[[], Claims], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = opened()
    monkeypatch.setattr(claims, "_TASK_SECONDS", -1.0)
    share = Share(known, 0, False)
    assert [share.next(), share.next()] == [[0], []]
    assert Share(known, 1, False).next() == [2]


def test_files_that_are_no_claims_are_ignored(opened: Callable[[], Claims]) -> None:
    known = opened()
    for name in ("readme", "000009-000001", "1-x", "00000000000-1"):
        known.storage.write_json(name, {})
    known.look()
    assert known.of(1) == []
    assert known.free == [0, 1, 2, 3, 4]
