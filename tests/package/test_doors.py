"""What others wrote comes in at one place of its kind: what that place uses, nothing else of the package uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import airflow_geneva

PACKAGE = Path(airflow_geneva.__file__).parent


@dataclass(frozen=True)
class Door:
    """What passes through, and what only `modules` may use.

    A use is `zlib`, `json.loads`, `.read_all` of any value, a call `lance.LanceDataset()`, or an argument `mode=`.
    `nowhere` is what no module may use, because the door has no use for it.
    `within` is the folder whose modules go through the door; by default those of the whole package do.
    """

    passes: str
    used: tuple[str, ...]
    modules: tuple[str, ...]
    nowhere: tuple[str, ...] = ()
    within: str = ""


# A line for what is used and where. A module below `modules` is a path below the package.
DOORS: tuple[Door, ...] = (
    Door(
        "tables that are opened, whose manifests name folders",
        ("lance.LanceDataset()",),
        ("engine/storage/location.py", "engine/storage/files.py", "engine/limits/store.py"),
    ),
    Door("versions that are opened", (".checkout_version",), ("engine/lance_io/table_versions.py",)),
    Door(
        "folders that a manifest names",
        (".base_paths",),
        ("engine/storage/places.py", "engine/lance_io/blobs.py"),
    ),
    Door("bytes of blobs, which may lie elsewhere", ("blob_handling=",), ("engine/lance_io/blobs.py",)),
    Door(
        "files of Iceberg's tables",
        (".new_input", "pyiceberg.io.pyarrow.PyArrowFileIO", "pyiceberg.catalog.load_catalog"),
        ("engine/load/iceberg.py",),
    ),
    Door("answers of model services", (".iter_bytes", ".iter_raw", ".aiter_raw"), ("functions/answers.py",)),
    Door(
        "code of UDFs",
        ("zipfile",),
        ("engine/udf/code_archive.py", "spark/code.py"),
        nowhere=("tarfile", "shutil.unpack_archive", ".extractall"),
    ),
    Door("text of files to load", ("pyarrow.csv", "pyarrow.json"), ("engine/load/parsing.py",)),
    Door(
        "Arrow arrays from outside",
        (".validate",),
        ("engine/lance_io/sound_arrays.py", "engine/storage/arrow_documents.py"),
    ),
    Door(
        "values that functions are called with",
        (".to_pylist", ".as_py"),
        ("engine/lance_io/to_python.py", "engine/apply/stages.py"),  # the second reads states that it wrote
        within="engine/apply/",
    ),
    Door(
        "rows that are written to tables",
        ("lance.write_dataset",),
        (
            "engine/lance_io/rows.py",
            # Small tables of their own: samples of types, decoded JSON, a limit's budget, hidden tables of views.
            *("engine/lance_io/arrays.py", "engine/lance_io/data_file.py", "engine/udf/lancedb_columns.py"),
            *("engine/limits/store.py", "engine/commit/group_table.py"),
        ),
    ),
    Door(
        "pickles",
        ("pickle.loads", "cloudpickle.loads", "pickle"),
        (
            "engine/udf/shipping.py",
            "spark/tasks.py",
            "pages/reader.py",  # values of this package's own processes, through a socket
        ),
    ),
    Door(
        "JSON documents",
        ("json.loads",),
        (
            "engine/storage/documents.py",
            "engine/apply/batch_api.py",  # a handle that this process has just written
            "engine/apply/isolation/process.py",  # orders of the process that started this one, through a pipe
            "engine/apply/isolation/worker.py",
            "engine/masking.py",  # connections in the environment of this process
            "functions/answers.py",  # the door of answers, which counts their bytes
        ),
        nowhere=("json.load",),
    ),
    Door(
        "compressed bytes",
        ("zlib.decompressobj", ".decompress"),
        ("engine/storage/documents.py",),
        nowhere=("zlib.decompress", "gzip", "bz2", "lzma", "zstandard", "lz4", "pa.decompress"),
    ),
    Door(
        "Arrow data",
        ("pa.ipc.open_stream", "pa.ipc.read_schema", "pa.ipc.MessageReader"),
        (
            "engine/storage/arrow_documents.py",
            "engine/lance_io/arrays.py",  # a schema that the caller has just serialized
            "engine/apply/isolation/worker.py",  # batches of the process that started this one, through a pipe
            "engine/apply/sorted_rows.py",  # batches of this process, through a temporary file without a name
        ),
        nowhere=("pa.ipc.open_file", "pa.ipc.read_message", "pa.ipc.read_record_batch", "pa.ipc.read_tensor"),
    ),
    Door(
        "all rows of what is read",
        (".read_all",),
        (
            "engine/storage/arrow_documents.py",
            "engine/storage/files.py",  # pylance's list of a table's files
            "engine/lance_io/data_file.py",  # Lance files, whose batches are counted
            "engine/lance_io/rows.py",  # rows that the caller gives
            "engine/load/source.py",
            "engine/load/join.py",  # what DuckDB found, of which there are a few examples
        ),
    ),
)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of names; what comes from a call or an index is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def list_uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            yield f"{dotted(node.func)}()"
        elif isinstance(node, ast.keyword):
            yield f"{node.arg}="
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}"
            yield dotted(node)


@cache
def uses_of_modules() -> dict[str, set[str]]:
    return {
        file.relative_to(PACKAGE).as_posix(): set(list_uses(ast.parse(file.read_text(encoding="utf-8"))))
        for file in sorted(PACKAGE.rglob("*.py"))
    }


# What goes around a door wherever it is used.
NOWHERE = ("pyiceberg.table.StaticTable", "pyiceberg.io.load_file_io", ".take_blobs", ".read_blobs")


@pytest.mark.parametrize("used", NOWHERE)
def test_what_has_no_door_is_not_used(used: str) -> None:
    assert [module for module, uses in uses_of_modules().items() if used in uses] == []


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.passes)
def test_nothing_goes_around_a_door(door: Door) -> None:
    around = [
        f"{module} uses {used}: only {', '.join(door.modules)} may"
        for module, uses in uses_of_modules().items()
        for used in (*door.used, *door.nowhere)
        if used in uses and module.startswith(door.within)
        if module not in door.modules or used in door.nowhere
    ]
    assert not around, "\n".join(around)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.passes)
def test_a_door_uses_what_it_keeps(door: Door) -> None:
    assert [used for used in door.used if not any(used in uses_of_modules()[module] for module in door.modules)] == []
