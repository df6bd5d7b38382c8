"""What this package needs of private names of pylance: a new version of pylance shows which assumption fell."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.fragment import DataFile
from lance.namespace import DirectoryNamespace

import airflow_geneva
from airflow_geneva.engine.lance_io import pylance_internals
from airflow_geneva.engine.run.inline import apply_inline
from airflow_geneva.engine.run.prepare import Udfs
from airflow_geneva.engine.run.record import record_plan
from airflow_geneva.engine.watch.new_rows import committed_at
from tests.support.counting import Trace, triple
from tests.support.tables import MakeTable


def private_attributes(texts: Iterable[str]) -> set[str]:
    """The private attributes of other objects in all modules that import lance."""
    found = set[str]()
    for text in texts:
        if "import lance" not in text and "from lance" not in text:
            continue
        nodes = list(ast.walk(ast.parse(text)))
        used = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | {
            "_asdict"
        }  # public, of named tuples
        own |= {node.attr for node in used if ast.unparse(node.value) in ("self", "cls", "os", "super()")}
        found |= {node.attr for node in used if not node.attr.endswith("__")} - own
    return found


PRIVATE = ("_ds", "_namespace_client", "_path", "_storage_options", "_table_id", "_take_rows")


def hide(patch: pytest.MonkeyPatch, name: str) -> None:
    """An attribute as it is after pylance gave it another name: gone for everyone but pylance."""
    for kind in (lance.LanceDataset, DataFile):

        def get(this: Any, wanted: str, found: Callable[[Any, str], Any] = kind.__getattribute__) -> Any:
            if wanted == name and sys._getframe(1).f_globals["__name__"].startswith("airflow_geneva"):
                raise AttributeError(f"no {name}")
            return found(this, wanted)

        patch.setattr(kind, "__getattribute__", get)


def test_private_attributes_of_pylance_are_used_in_one_module_and_known_here() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in Path(airflow_geneva.__file__).parent.rglob("*.py")}
    internals = texts.pop(Path(str(pylance_internals.__file__)))
    assert private_attributes(texts.values()) == set()
    assert all(f'"{name}"' in internals or f"._{name[1:]}" in internals for name in PRIVATE)
    assert private_attributes([internals]) <= set(PRIVATE)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_attribute_that_is_gone_stops_the_plan_and_has_nothing_computed_again(
    make_table: MakeTable, trace: Trace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    table = make_table(100)
    table.add_columns({"y": triple})
    table.backfill("y", runner="inline")
    table.lance.update({"id": "id"}, where="id < 3")
    table.add([{"id": 100, "x": 100}])
    plan = table.plan_backfill("y")
    record_plan(plan, table.location)
    for shard in plan.shards:
        apply_inline(table.location, plan.spec, shard, Udfs({plan.spec.column: triple}))
    hide(monkeypatch, name)
    asked = {"_ds": lambda: committed_at(table.lance, 1)}.get(name, lambda: table.plan_backfill("y"))
    with pytest.raises(AttributeError, match=name):
        asked()


@pytest.fixture
def dataset(tmp_path: Path) -> lance.LanceDataset:
    rows = pa.table({"x": pa.array(range(100), pa.int64())})
    return lance.write_dataset(rows, str(tmp_path / "t.lance"), enable_stable_row_ids=True, max_rows_per_file=30)


def test_paths_of_data_files_lie_below_the_folder_data(dataset: lance.LanceDataset) -> None:
    files = [file for fragment in dataset.get_fragments() for file in fragment.metadata.files]
    assert len(files) == 4
    for file in files:
        path = pylance_internals.path_of(file)
        assert type(path) is str
        assert (Path(dataset.uri) / "data" / path).is_file()


def test_rows_are_taken_by_id_in_the_order_of_the_ids_and_ids_that_are_gone_are_left_out(
    dataset: lance.LanceDataset,
) -> None:
    dataset.delete("x = 50")
    rows = pylance_internals.take_rows(dataset, [70, 3, 50, 70], ["x", "_rowid", "_rowaddr"])
    assert rows["x"].to_pylist() == rows["_rowid"].to_pylist() == [70, 3, 70]
    assert rows["_rowaddr"].to_pylist() == [(2 << 32) + 10, 3, (2 << 32) + 10]
    assert pylance_internals.take_rows(dataset, [5], {"twice": "x * 2"}).to_pydict() == {"twice": [10]}


def test_the_time_of_a_version_is_that_of_its_manifest_in_nanoseconds(dataset: lance.LanceDataset) -> None:
    (version,) = dataset.versions()
    shown = version["timestamp"].timestamp() * 1e9
    assert abs(pylance_internals.written_at(dataset) - shown) <= 2_000, "pylance shows it rounded to microseconds"


def test_the_manifest_counts_and_lists_the_fragments(dataset: lance.LanceDataset) -> None:
    assert pylance_internals.count_fragments(dataset) == 4
    manifest = pylance_internals.serialized_manifest(dataset)
    assert type(manifest) is bytes
    for fragment in dataset.get_fragments():
        (file,) = fragment.metadata.files
        assert pylance_internals.path_of(file).encode() in manifest


def test_a_dataset_knows_how_it_was_opened(dataset: lance.LanceDataset, tmp_path: Path) -> None:
    assert pylance_internals.access_of(dataset)[:2] == (None, None)
    opened = lance.dataset(dataset.uri, storage_options={"some": "option"})
    assert pylance_internals.access_of(opened.checkout_version(1))[2] == {"some": "option"}
    catalog = DirectoryNamespace(root=str(tmp_path), manifest_enabled="false")
    through = lance.dataset(namespace_client=catalog, table_id=["t"])
    assert pylance_internals.access_of(through.checkout_version(1))[:2] == (catalog, ["t"])
