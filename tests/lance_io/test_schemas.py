"""Names and metadata of columns change in one commit; fields, files and everything else stay."""

from __future__ import annotations

import re
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from airflow_geneva.engine.lance_io.messages import read_parts
from airflow_geneva.engine.lance_io.schemas import changed_schema


def make(folder: Path, version: str = "2.2") -> lance.LanceDataset:
    rows = pa.table(
        {
            "dropped": [1, 2],
            "pair": [{"a": 1, "b": {"c": "x"}}, None],
            "vector": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
            "word": pa.array(["a", "b"]).dictionary_encode(),
            "when": pa.array([0, 1], pa.timestamp("us", "UTC")),
            "n": pa.array([1, 2], pa.int32()),
        }
    ).replace_schema_metadata({"about": "ü"})
    dataset = lance.write_dataset(rows, folder / "t.lance", data_storage_version=version)
    dataset.update_field_metadata({"vector": {"long": "y" * 70_000, "gone": "1"}, "n": {"unit": "m"}})
    dataset.drop_columns(["dropped"])
    return lance.dataset(folder / "t.lance")


def ids(dataset: lance.LanceDataset) -> dict[str, int]:
    return {field.name(): field.id() for field in dataset.lance_schema.fields()}


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_two_columns_swap_names_and_metadata_follows(tmp_path: Path, version: str) -> None:
    dataset = make(tmp_path, version)
    before, rows = ids(dataset), dataset.to_table().to_pylist()
    names = {before["vector"]: "n", before["n"]: "vector", before["pair"]: "größer"}
    metadata = {
        before["vector"]: {"gone": None, "new": "z" * 300},
        before["when"]: {"zone": "here"},
        before["n"]: {"unit": "km"},
    }
    schema = changed_schema(dataset, names, metadata)
    now = lance.LanceDataset.commit(
        dataset.uri, lance.Transaction(dataset.version, lance.LanceOperation.Project(schema))
    )
    assert ids(now) == {"größer": before["pair"], "n": before["vector"], "word": before["word"],
                        "when": before["when"], "vector": before["n"]}  # fmt: skip
    assert now.schema.field("n").metadata == {b"long": b"y" * 70_000, b"new": b"z" * 300}
    assert now.schema.field("vector").metadata == {b"unit": b"km"}
    assert now.schema.field("when").metadata == {b"zone": b"here"}
    assert now.schema.metadata == {b"about": "ü".encode()}
    renamed = {"vector": "n", "n": "vector", "pair": "größer"}
    assert now.to_table().to_pylist() == [{renamed.get(k, k): v for k, v in row.items()} for row in rows]
    assert now.schema.field("größer").type == dataset.schema.field("pair").type


def test_without_changes_it_is_the_same_schema(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    assert changed_schema(dataset, {}, {}).to_pyarrow() == dataset.lance_schema.to_pyarrow()
    # Metadata is printed in an order that differs from one object to the next.
    changed, before = (
        re.split("[{},] ?", repr(schema)) for schema in (changed_schema(dataset, {}, {}), dataset.lance_schema)
    )
    assert sorted(changed) == sorted(before)


def test_what_is_no_message_is_refused() -> None:
    for data in (b"\x0a", b"\x0a\x05ab", b"\x80"):
        with pytest.raises(ValueError, match="the message ends in"):
            list(read_parts(data))
