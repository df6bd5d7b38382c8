"""A column's state: the union of immutable ledgers, whoever wrote them and whatever happened to some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from airflow_geneva.engine.checkpoint.facts import (
    ColumnState,
    Fact,
    Facts,
    append_ledger,
    filter_evaluated,
    fold_ledgers,
    load_state,
    seen,
)
from airflow_geneva.engine.checkpoint.provenance import Provenance
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.storage.files import Storage

OFFSETS = st.sets(st.integers(0, 20), max_size=12)
FACTS = st.lists(
    st.builds(
        lambda signature, version, rows: Fact(
            signature, Provenance(version).kind, Ranges.from_offsets(sorted(rows)), 3
        ),
        st.sampled_from(["s1", "s2"]),
        st.sampled_from(["v1", "v2"]),
        OFFSETS,
    ),
    max_size=8,
)


def checkpoints(folder: Path) -> Storage:
    return Storage.at(str(folder))


def ledger_files(folder: Path) -> list[Path]:
    return sorted((folder / "state").rglob("ledger*.lance"))


@given(FACTS)
def test_what_is_known_is_the_union_of_the_facts(facts: list[Fact]) -> None:
    state = ColumnState(Facts.of(facts))
    for signature in ("s1", "s2"):
        found = state.known(signature, 21)
        for version in ("v1", "v2"):
            wanted = {
                offset
                for fact in facts
                if (fact.signature, fact.kind) == (signature, Provenance(version).kind) and fact.rows is not None
                for offset in fact.rows.offsets().tolist()
            }
            assert set(found.get(Provenance(version), Ranges.empty()).offsets().tolist()) == wanted


def test_facts_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    facts = [
        Fact("s1", Provenance("v1").kind, None, 4),
        Fact("s1", Provenance("v2").kind, Ranges.from_pairs([(0, 5), (9, 12)]), 5, "deletion-1"),
        Fact("s2", filter_evaluated("hash", "v1"), Ranges.of(3, 4), 6),
        Fact("s2", Provenance("v1").kind, Ranges.empty(), 7),
    ]
    append_ledger(checkpoints(tmp_path), 7, "job", facts)
    state = load_state(checkpoints(tmp_path), 7)
    assert [fact for group in state.facts.values() for fact in group] == facts
    assert not load_state(checkpoints(tmp_path), 8).facts


def test_a_whole_fragment_is_known_without_its_rows() -> None:
    state = ColumnState(Facts.of([Fact("s", Provenance("v1").kind, None, 1)]))
    assert Provenance("v1") in state.of_all_rows("s", "")
    assert Provenance("v2") not in state.of_all_rows("s", "")
    assert Provenance("v1") not in state.of_all_rows("other", "")
    assert state.known("s", 10) == {Provenance("v1"): Ranges.of(0, 10)}


def test_rows_that_were_all_alive_under_one_deletion_file_are_not_all_under_another() -> None:
    state = ColumnState(Facts.of([Fact("s", Provenance("v1").kind, Ranges.of(0, 9), 1, "deletion-1")]))
    assert Provenance("v1") in state.of_all_rows("s", "deletion-1")
    assert Provenance("v1") not in state.of_all_rows("s", "deletion-2")
    assert Provenance("v1") not in state.of_all_rows("s", "")


def test_rows_looked_at_count_for_their_filter_and_version_only() -> None:
    state = ColumnState(Facts.of([Fact("s", filter_evaluated("h1", "v1"), Ranges.of(0, 4), 1)]))
    assert state.filter_evaluated("s", "h1", "v1", 10) == Ranges.of(0, 4)
    assert not state.filter_evaluated("s", "h2", "v1", 10)
    assert not state.filter_evaluated("s", "h1", "v2", 10)
    assert state.known("s", 10) == {}


def test_nothing_to_say_writes_nothing(tmp_path: Path) -> None:
    append_ledger(checkpoints(tmp_path), 7, "job", [])
    assert not list(tmp_path.rglob("*"))


def write_many(folder: Path, count: int) -> None:
    for at in range(count):
        append_ledger(checkpoints(folder), 7, f"job{at}", [Fact("s", Provenance("v").kind, Ranges.of(at, at + 1), at)])


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_folding_changes_nothing_but_the_number_of_documents_to_read(tmp_path: Path, rounds: int) -> None:
    for _ in range(rounds):
        write_many(tmp_path, 20)
        before = load_state(checkpoints(tmp_path), 7)
        fold_ledgers(checkpoints(tmp_path), 7)
        after = load_state(checkpoints(tmp_path), 7)
        assert after.known("s", 20) == before.known("s", 20) == {Provenance("v"): Ranges.of(0, 20)}
        assert len(after.ledgers) == 1


def test_folds_name_the_jobs_that_have_not_finished(tmp_path: Path) -> None:
    for _ in range(3):
        write_many(tmp_path, 20)
        append_ledger(checkpoints(tmp_path), 7, "job3", [seen(4)])
        before = load_state(checkpoints(tmp_path), 7)
        fold_ledgers(checkpoints(tmp_path), 7)
        after = load_state(checkpoints(tmp_path), 7)
        assert after.open_jobs == before.open_jobs == {f"job{at}": at for at in range(1, 20) if at != 3}
        assert after.facts.table.equals(before.facts.table)
    append_ledger(checkpoints(tmp_path), 7, "job9", [seen(10)])
    assert "job9" not in load_state(checkpoints(tmp_path), 7).open_jobs


def test_however_often_it_is_folded_few_documents_are_there(tmp_path: Path) -> None:
    for _ in range(12):
        write_many(tmp_path, 16)
        fold_ledgers(checkpoints(tmp_path), 7)
    assert len(list((tmp_path / "state").rglob("*.lance"))) <= 34
    assert load_state(checkpoints(tmp_path), 7).known("s", 16) == {Provenance("v"): Ranges.of(0, 16)}


def test_who_listed_ledgers_that_are_then_folded_and_removed_reads_the_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_many(tmp_path, 16)
    listed = CheckpointStore.list_keys

    def overtaken(store: CheckpointStore, prefix: str | None = None) -> list[str]:
        keys = listed(store, prefix)
        monkeypatch.setattr(CheckpointStore, "list_keys", listed)
        for at in range(2):
            fold_ledgers(checkpoints(tmp_path), 7)
            write_many(tmp_path, 16 * (1 - at))
        assert not set(keys) & set(listed(store, prefix))
        return keys

    monkeypatch.setattr(CheckpointStore, "list_keys", overtaken)
    assert load_state(checkpoints(tmp_path), 7).known("s", 16) == {Provenance("v"): Ranges.of(0, 16)}


def test_few_ledgers_are_left_alone(tmp_path: Path) -> None:
    write_many(tmp_path, 3)
    fold_ledgers(checkpoints(tmp_path), 7)
    assert len(load_state(checkpoints(tmp_path), 7).ledgers) == 3


def test_a_fold_that_is_damaged_leaves_the_ledgers_it_was_made_of(tmp_path: Path) -> None:
    write_many(tmp_path, 20)
    fold_ledgers(checkpoints(tmp_path), 7)
    (fold,) = (tmp_path / "state").rglob("ledger._compacted-*.lance")
    fold.write_bytes(b"")
    assert load_state(checkpoints(tmp_path), 7).known("s", 20) == {Provenance("v"): Ranges.of(0, 20)}


def test_a_damaged_ledger_costs_its_own_facts_only(tmp_path: Path) -> None:
    write_many(tmp_path, 3)
    ledger_files(tmp_path)[1].write_bytes(b"half")
    found = load_state(checkpoints(tmp_path), 7).known("s", 3)[Provenance("v")]
    assert len(found) == 2


def test_two_folds_at_once_agree(tmp_path: Path) -> None:
    write_many(tmp_path, 20)
    fold_ledgers(checkpoints(tmp_path), 7)
    (first,) = (tmp_path / "state").rglob("ledger._compacted-*.lance")
    hidden = first.rename(tmp_path / "hidden")
    fold_ledgers(checkpoints(tmp_path), 7)
    hidden.rename(first)
    write_many(tmp_path, 1)
    assert load_state(checkpoints(tmp_path), 7).known("s", 20) == {Provenance("v"): Ranges.of(0, 20)}
