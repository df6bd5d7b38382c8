"""Ages as text, files with sizes and times, what is told of garbage, and the commands about checkpoints."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from airflow_geneva import connect
from airflow_geneva.cli.checkpoints import checkpoints_app
from airflow_geneva.engine.checkpoint.facts import Fact, append_ledger, filter_evaluated, load_state, prune_state, seen
from airflow_geneva.engine.checkpoint.listing import list_checkpoints
from airflow_geneva.engine.checkpoint.provenance import Provenance
from airflow_geneva.engine.choices import parse_age
from airflow_geneva.engine.cleanup.garbage import FileKind, Garbage, group_files
from airflow_geneva.engine.display import readable_bytes
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.storage.files import FileEntry, Storage
from airflow_geneva.errors import InvalidInput, StorageError
from airflow_geneva.table import Table
from tests.support.counting import triple


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("7d", timedelta(days=7)),
        ("12h", timedelta(hours=12)),
        (" 30M ", timedelta(minutes=30)),
        ("90s", timedelta(seconds=90)),
        ("2w", timedelta(weeks=2)),
        ("800000d", timedelta(days=365_000)),
        ("999999999d", timedelta(days=365_000)),
        ("999999999w", timedelta(days=364_994)),
        (timedelta(microseconds=1), timedelta(microseconds=1)),
    ],
)
def test_ages_are_numbers_with_a_unit(text: str, span: timedelta) -> None:
    assert parse_age("ttl", text) == span


@pytest.mark.parametrize(
    "nonsense", ["", "7", "d", "-7d", "0d", "7 days", "1.5h", "7d12h", "7y", None, 7, timedelta(0), timedelta(-1)]
)
def test_what_is_no_age_is_refused(nonsense: Any) -> None:
    with pytest.raises(InvalidInput, match=r"is not an age\. Give a number with a unit"):
        parse_age("ttl", nonsense)


def test_files_are_listed_with_sizes_and_times_and_links_are_left_out(tmp_path: Path) -> None:
    folder = Storage.at(str(tmp_path / "inside"))
    folder.write_bytes("a/b.bin", b"12345")
    folder.write_bytes("c.bin", b"1")
    (tmp_path / "inside" / ".tmphalf").write_bytes(b"12")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")
    (tmp_path / "inside" / "way_out").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside" / "secret")
    os.utime(tmp_path / "inside" / "c.bin", (1_000, 1_000))
    found = {entry.name: entry for entry in folder.list_entries()}
    assert sorted(found) == ["a/b.bin", "c.bin"]
    assert found["c.bin"] == FileEntry("c.bin", 1, 1_000.0)
    assert found["a/b.bin"].size_bytes == 5
    assert abs(found["a/b.bin"].modified - time.time()) < 60
    assert [entry.name for entry in folder.folder("a").list_entries()] == ["b.bin"]
    half = {entry.name for entry in folder.list_entries(half_written=True)} - set(found)
    assert half == {".tmphalf"}
    assert Storage.at(str(tmp_path / "nowhere")).list_entries() == []


def test_only_tables_can_be_listed_with_sizes_on_an_object_store() -> None:
    with pytest.raises(StorageError, match=r"s3://bucket/db cannot be listed with their sizes.*inside a Lance table"):
        Storage.at("s3://bucket/db").list_entries()


def test_only_empty_folders_are_removed(tmp_path: Path) -> None:
    folder = Storage.at(str(tmp_path))
    (tmp_path / "jobs" / "a" / "progress").mkdir(parents=True)
    (tmp_path / "jobs" / "b").mkdir()
    folder.write_bytes("jobs/b/job.json", b"{}")
    (tmp_path / "jobs" / "link").symlink_to(tmp_path / "jobs" / "a")
    folder.remove_empty_folders("jobs")
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == ["b", "link"]
    folder.remove_empty_folders("nowhere")


def garbage() -> Garbage:
    files = {
        FileKind.CHECKPOINTS: [FileEntry("b", 1_500, 1.0), FileEntry("a", 500, 1.0)],
        FileKind.JOBS: [FileEntry("c", 10, 1.0)],
    }
    return Garbage("docs", group_files(files), ("something stays.",))


def test_garbage_is_told_by_kind() -> None:
    told = str(garbage())
    assert told.splitlines()[0] == "docs: 3 files, 2.0 kB"
    assert "2 range and fragment checkpoints: 2.0 kB" in told
    assert "Note: something stays." in told
    assert "staged" not in told
    assert garbage().file_group(FileKind.CHECKPOINTS).names == ["a", "b"]
    added = Garbage.add_up([garbage(), garbage()])
    assert (added["files"], added["bytes"], added["notes"]) == (6, 4_020, ["docs: something stays."] * 2)
    assert set(added["kinds"]) == {kind.value for kind in FileKind}
    assert added["kinds"][FileKind.JOBS.value] == {"files": 2, "bytes": 20}
    assert json.loads(json.dumps(garbage().to_json()))["table"] == "docs"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (2.5e9, "2.5 GB"), (7e15, "7,000.0 TB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable_bytes(size) == text


def facts_of(checkpoints: Storage) -> set[tuple[str, str]]:
    state = load_state(checkpoints, 7)
    return {(fact.signature, fact.kind) for group in state.facts.values() for fact in group}


def value(signature: str, at: int, inputs: str = "1") -> Fact:
    return Fact(signature, Provenance("v").kind, Ranges.of(0, 5), at, None, inputs)


def test_only_facts_that_can_never_match_are_dropped(tmp_path: Path) -> None:
    checkpoints = Storage.at(str(tmp_path))
    unknown = Fact("somewhere", "kind-of-a-later-version:x", None, 1)
    kept = [value("there", 1), value("recent", 9), value("of unknown inputs", 1, inputs=""), unknown, seen(1)]
    append_ledger(checkpoints, 7, "a", kept)
    append_ledger(checkpoints, 7, "b", [value("gone", 2), Fact("filtered", filter_evaluated("h", "v"), None, 2)])
    asked: list[set[str]] = []

    def present(inputs: set[str]) -> set[str]:
        asked.append(inputs)
        return {"there"}

    assert prune_state(checkpoints, 7, [8, 9], present) == 2
    assert asked == [{"1"}]
    assert {signature for signature, _ in facts_of(checkpoints)} == {
        "there",
        "recent",
        "of unknown inputs",
        "somewhere",
    }
    state = load_state(checkpoints, 7)
    assert (state.seen, len(state.ledgers)) == ([1], 1)
    assert prune_state(checkpoints, 7, [8, 9], present) == 0


def test_nothing_is_dropped_when_the_history_cannot_be_read_or_little_is_gained(tmp_path: Path) -> None:
    checkpoints = Storage.at(str(tmp_path))
    old = [value(f"there {at}", 1) for at in range(9)]
    append_ledger(checkpoints, 7, "a", [*old, value("gone", 1), value("recent", 8)])
    assert prune_state(checkpoints, 7, [8], lambda inputs: None) == 0
    assert prune_state(checkpoints, 8, [8], lambda inputs: set()) == 0  # a column of which there is no fact
    assert prune_state(checkpoints, 7, [8], lambda inputs: {f"there {at}" for at in range(9)}) == 0
    assert len(facts_of(checkpoints)) == 11


def test_what_a_ledger_says_that_cannot_be_read_now_is_not_dropped(tmp_path: Path) -> None:
    checkpoints = Storage.at(str(tmp_path))
    append_ledger(checkpoints, 7, "a", [value("recent", 8), value("gone", 1)])
    append_ledger(checkpoints, 7, "b", [value("there", 1)])
    (ledger,) = tmp_path.rglob("ledger.b.*")
    whole = ledger.read_bytes()
    ledger.write_bytes(b"")
    assert prune_state(checkpoints, 7, [8], lambda inputs: set()) == 1
    ledger.write_bytes(whole)
    assert {signature for signature, _ in facts_of(checkpoints)} == {"recent", "there"}


def test_every_fact_of_a_fragment_that_exists_is_read_back_as_it_was(tmp_path: Path) -> None:
    checkpoints = Storage.at(str(tmp_path))
    fact = Fact("there", Provenance("v").kind, Ranges.from_pairs([(0, 3), (7, 9)]), 1, "deletion", "1,2")
    append_ledger(checkpoints, 7, "a", [fact, value("gone", 1)])
    assert prune_state(checkpoints, 7, [8], lambda inputs: {"there"}) == 1
    assert dict(load_state(checkpoints, 7).facts) == {"there": [fact]}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A table whose column was computed, beside another one."""
    db = connect(tmp_path / "db")
    for name in ("docs", "other"):
        table = db.create_table(name, pa.table({"x": pa.array(range(20), pa.int64())}), max_rows_per_file=10)
        table.add_columns({"y": triple})
        table.backfill("y", runner="inline")
    return db.open_table("docs")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(checkpoints_app, list(arguments))
    return result.exit_code, result.output


def grow_old(table: Table) -> None:
    for base, _, files in os.walk(Path(table.uri).parent):
        for name in files:
            os.utime(Path(base, name), (1_000_000_000, 1_000_000_000))


def files_below(table: Table) -> set[Path]:
    return {path for path in Path(table.uri).parent.rglob("*") if path.is_file()}


def test_checkpoints_are_listed_by_udf_version_and_column(table: Table) -> None:
    db = str(Path(table.uri).parent)
    (group,) = list_checkpoints(table.location.checkpoints)
    assert (group.udf, group.column, group.where, group.fragments) == ("triple", "y", None, 2)
    code, told = run("list", db, "docs")
    assert code == 0
    assert "triple" in told
    code, told = run("list", db, "docs", "--json")
    (listed,) = json.loads(told)
    assert (listed["column"], listed["fragments"], listed["size_bytes"]) == ("y", 2, group.size_bytes)
    assert run("list", db, "docs", "--column", "z") == (0, "No checkpoints.\n")
    code, told = run("list", db, "nothing")
    assert code == 1
    assert "There is no table 'nothing'" in told


def test_a_dry_run_of_the_command_tells_what_the_command_then_removes(table: Table) -> None:
    db = str(Path(table.uri).parent)
    grow_old(table)
    before = files_below(table)
    code, told = run("gc", db, "--dry-run", "--json")
    assert code == 0
    document = json.loads(told)
    assert files_below(table) == before
    assert [item["table"] for item in document["tables"]] == ["docs", "other"]
    assert "Would remove" in run("gc", db, "--dry-run")[1]
    code, told = run("gc", db, "docs")
    assert code == 0
    assert f"Removed {document['tables'][0]['files']:,} files" in told
    assert len(before - files_below(table)) == document["tables"][0]["files"]
    assert not [path for path in before - files_below(table) if "other.lance" in str(path)]


@pytest.mark.parametrize("arguments", [["--ttl", "soon"], ["nothing"], ["docs", "--ttl", "0d"]])
def test_the_command_refuses_what_makes_no_sense(table: Table, arguments: list[str]) -> None:
    grow_old(table)
    before = files_below(table)
    code, told = run("gc", str(Path(table.uri).parent), *arguments)
    assert code == 1
    assert told.startswith("Error: ")
    assert files_below(table) == before
