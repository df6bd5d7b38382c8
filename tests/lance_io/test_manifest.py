"""The fragments that are read from a manifest's bytes are those that pylance hands out one by one."""

from __future__ import annotations

import json
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva.engine.lance_io import manifest as module
from airflow_geneva.engine.lance_io.fragments import (
    Columns,
    FragmentFiles,
    columns_of,
    consecutive_row_ids,
    fragment_files,
    row_ids,
)
from airflow_geneva.engine.lance_io.manifest import Manifest, read_manifest
from airflow_geneva.engine.lance_io.messages import parts_of


@pytest.fixture(autouse=True)
def no_table_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", 0)


def one_by_one(dataset: lance.LanceDataset, columns: Columns) -> dict[int, FragmentFiles]:
    return {fragment.fragment_id: fragment_files(fragment.metadata, columns) for fragment in dataset.get_fragments()}


def rows(begin: int, end: int) -> pa.Table:
    pairs = [{"a": x, "b": {"c": str(x)}} for x in range(begin, end)]
    return pa.table({"x": list(range(begin, end)), "pair": pairs, "z": [float(x) for x in range(begin, end)]})


def make(uri: str) -> lance.LanceDataset:
    dataset = lance.write_dataset(rows(0, 300), uri, enable_stable_row_ids=True, max_rows_per_file=20)
    dataset.delete("x >= 40 and x < 60 or x % 50 = 7")
    dataset.add_columns({"y": "x * 2"})
    dataset.add_columns(pa.schema([("empty", pa.int32())]))
    dataset.drop_columns(["z"])
    dataset.merge_insert("x").when_matched_update_all().execute(
        rows(100, 130)
        .drop_columns("z")
        .append_column("y", pa.array(range(30), pa.int64()))
        .append_column("empty", pa.nulls(30, pa.int32()))
    )
    dataset.optimize.compact_files(target_rows_per_fragment=40, max_rows_per_group=40)
    return lance.write_dataset(rows(300, 310).drop_columns("z"), uri, mode="append")


@pytest.mark.parametrize(
    ("inputs", "where", "output"),
    [
        (["x"], [], "y"),
        (["x", "pair"], ["y", "x"], "empty"),
        (["empty"], [], None),
        (["pair"], [], None),
        ([], [], "y"),
    ],
)
def test_it_is_what_pylance_says(inputs: list[str], where: list[str], output: str | None, tmp_path: Path) -> None:
    source = make(str(tmp_path / "docs.lance"))
    clone = source.shallow_clone(str(tmp_path / "clone.lance"), source.version)
    clone = lance.write_dataset(rows(0, 5).drop_columns("z"), clone, mode="append")
    for dataset in (source, clone):
        columns = columns_of(dataset, inputs, where, output)
        expected = one_by_one(dataset, columns)
        found = read_manifest(dataset, columns)
        assert found._refs.owner.max() < len(found)
        assert dict(found) == expected == {files.id: files for files in found.values()}
        assert found.signatures.to_pylist() == [files.signature for files in expected.values()]
        assert found.has_deletion.tolist() == [bool(files.deletion) for files in expected.values()]
        whole = [at for at, files in enumerate(expected.values()) if not files.deletion]
        documents = [json.loads(text) for part in found.documents(np.array(whole)) for text in part.to_pylist()]
        assert [FragmentFiles.from_json(document) for document in documents] == [
            list(expected.values())[at] for at in whole
        ]
        assert dict(Manifest.of(expected.values())) == expected


@pytest.mark.parametrize("name", ["it's.lance", 'a "b".lance', "back\\slash.lance", "ümlaut.lance", "tab\there", ""])
def test_any_name_of_a_file_is_hashed_and_stored_as_of_a_single_fragment(name: str) -> None:
    single = [
        FragmentFiles(3, 10, "", 0, ((0, -1, name), (2, 1, "plain.lance")), (), ((1, 0, name),), 5),
        FragmentFiles(5, 10, "", 0, (), ((4, -1, name),), (), 5),
    ]
    found = Manifest.of(single)
    assert found.signatures.to_pylist() == [files.signature for files in single]
    (documents,) = found.documents(np.array([0, 1]))
    assert documents.to_pylist() == [json.dumps(files.to_json(), separators=(",", ":")) for files in single]


@pytest.mark.parametrize("damage", ["truncated", "other", "without files"])
def test_what_is_not_such_a_manifest_is_asked_for_one_by_one(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make(str(tmp_path / "docs.lance"))
    columns = columns_of(dataset, ["x"], [], "y")
    data = dataset._ds.serialized_manifest()
    if damage == "truncated":
        begins, _ = parts_of(data, 2)
        data = data[: int(begins[-1]) + 3]
    elif damage == "other":
        data = b"not a manifest"
    else:
        monkeypatch.setattr(module, "_FILES", 31)
    monkeypatch.setattr(module, "serialized_manifest", lambda _: data)
    assert dict(read_manifest(dataset, columns)) == one_by_one(dataset, columns)


def test_a_deletion_file_is_named_as_pylance_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = lance.write_dataset(rows(0, 300), tmp_path / "docs.lance", max_rows_per_file=20)
    # Each of the 15 files gets a random number of 64 bits, and half of them are no signed ones.
    dataset.delete("x % 20 = 7")
    columns = columns_of(dataset, ["x"], [], "z")
    assert dict(read_manifest(dataset, columns)) == one_by_one(dataset, columns)
    assert not caplog.records


@pytest.mark.parametrize("stable", [True, False])
def test_row_ids_are_those_that_a_scan_reads(stable: bool, tmp_path: Path) -> None:
    dataset = lance.write_dataset(
        rows(0, 200), tmp_path / "docs.lance", max_rows_per_file=50, enable_stable_row_ids=stable
    )
    dataset.update({"x": "x + 1000"}, where="x % 2 = 0 and x < 90")
    dataset.delete("x = 130")
    dataset.optimize.compact_files(target_rows_per_fragment=60)
    dataset.delete("x = 150")
    dataset.update({"x": "x + 1000"}, where="x IN (111, 113, 118)")
    dataset.insert(rows(200, 300))
    known = 0
    for fragment in dataset.get_fragments():
        scanned = fragment.scanner(columns=[], with_row_id=True, with_row_address=True).to_table()
        offsets, ids = row_ids(dataset, fragment.fragment_id)
        assert (offsets == scanned["_rowaddr"].to_numpy() % (1 << 32)).all()
        assert (ids == scanned["_rowid"].to_numpy()).all()
        if (physical := consecutive_row_ids(fragment)) is not None:
            known += 1
            assert [physical[at] for at in offsets.tolist()] == ids.tolist()
    assert (0 < known < len(dataset.get_fragments())) if stable else not known
