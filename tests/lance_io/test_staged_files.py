"""What a commit knows of staged data files without opening them again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.fragment import DataFile

from airflow_geneva.engine.lance_io import staged_files
from airflow_geneva.engine.lance_io.data_file import DataFileWriter
from airflow_geneva.engine.lance_io.staged_files import StagedFiles

VALUES = {
    "int": [1, None, 3],
    "text": ["a", "b" * 5_000, None],
    "list": [[1, 2], None, []],
    "struct": [{"a": 1, "b": "x"}, {"a": None, "b": "y"}, {"a": 3, "b": "z"}],
    "vector": pa.array([[0.5, 1.5]] * 3, pa.list_(pa.float32(), 2)),
}


def write(dataset: lance.LanceDataset, values: pa.Array, times: int = 1) -> str:
    writer = DataFileWriter(dataset, pa.schema([pa.field("c", values.type)]))
    for _ in range(times):
        writer.write(pa.record_batch([values], names=["c"]))
    return writer.finish()


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_files_are_described_as_pylance_describes_them(tmp_path: Path, kind: str, version: str) -> None:
    values = pa.array(VALUES[kind])
    dataset = lance.write_dataset(pa.table({"c": values}), str(tmp_path / "t.lance"), data_storage_version=version)
    names = [write(dataset, values, times) for times in (1, 7, 400)]
    data = StagedFiles()
    assert [data.count_rows(dataset, name) for name in names] == [3, 21, 1_200]
    found = data.data_files(dataset, names)
    assert found == [DataFile.create(dataset, name) for name in names]
    assert [file.file_size_bytes for file in found] == [os.path.getsize(tmp_path / "t.lance/data" / n) for n in names]


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_is_gone_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool) -> None:
    monkeypatch.setattr(staged_files, "_LISTED_FROM", 2)
    if remote:
        monkeypatch.setattr(staged_files.LanceFile, "of_table", of_memory())
    dataset = lance.write_dataset(pa.table({"c": [1, 2]}), str(tmp_path / "t.lance"))
    kept, gone = (write(dataset, pa.array([1, 2])) for _ in range(2))
    data = StagedFiles()
    assert [data.count_rows(dataset, name) for name in (kept, gone)] == [2, 2]
    os.unlink(tmp_path / "t.lance/data" / gone)
    assert data.count_rows(dataset, gone) == 2
    data.look_again(dataset, [kept, gone])
    assert [data.count_rows(dataset, name) for name in (kept, gone)] == [2, None]
    monkeypatch.setattr(staged_files, "_FRESH_SECONDS", 0.0)
    os.unlink(tmp_path / "t.lance/data" / kept)
    assert data.count_rows(dataset, kept) is None


def of_memory() -> Callable[..., object]:
    """Return what opens files of a local table as those of a store."""
    from airflow_geneva.engine.lance_io.data_file import LanceFile
    from airflow_geneva.engine.storage.files import Storage

    def of_table(dataset: lance.LanceDataset, name: str) -> LanceFile:
        return LanceFile(Storage(f"file-object-store://{dataset.uri}/data"), name)

    return of_table


def test_many_files_of_a_while_ago_are_looked_for_in_one_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_files, "_LISTED_FROM", 2)
    monkeypatch.setattr(staged_files.LanceFile, "of_table", of_memory())
    monkeypatch.setattr(staged_files.LanceFile, "exists", lambda file: pytest.fail(f"{file.name} is looked for alone"))
    dataset = lance.write_dataset(pa.table({"c": [1, 2]}), str(tmp_path / "t.lance"))
    names = [write(dataset, pa.array([1, 2])) for _ in range(2)]
    data = StagedFiles()
    assert [data.count_rows(dataset, name) for name in names] == [2, 2]
    os.unlink(tmp_path / "t.lance/data" / names[1])
    data.look_if_old(dataset, names)
    assert data.count_rows(dataset, names[1]) == 2
    monkeypatch.setattr(staged_files, "_FRESH_SECONDS", 0.0)
    data.look_if_old(dataset, names)
    monkeypatch.setattr(staged_files, "_FRESH_SECONDS", 60.0)
    assert [data.count_rows(dataset, name) for name in names] == [2, None]
