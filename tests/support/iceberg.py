"""Tables of Iceberg in a folder, with a catalog in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.typedef import Record


def catalog_at(folder: Path) -> SqlCatalog:
    catalog = SqlCatalog("tests", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/iceberg")
    catalog.create_namespace_if_not_exists("sold")
    return catalog


def make_iceberg(folder: Path, rows: pa.Table, name: str = "features", files: int = 1) -> Table:
    """Make a table whose rows lie in some files."""
    table = catalog_at(folder).create_table(f"sold.{name}", rows.schema)
    size = -(-len(rows) // files)
    for at in range(files):
        table.append(rows.slice(at * size, size))
    return table


def delete_by(table: Table, folder: Path, **columns: Any) -> None:
    """Commit a delete file, which pyiceberg itself never writes: of positions, or of values if there is no `pos`."""
    by_position, place = "pos" in columns, folder / f"delete-{'-'.join(columns)}.parquet"
    pq.write_table(pa.table(columns), place)
    file = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES if by_position else DataFileContent.EQUALITY_DELETES,
        file_path=f"file://{place}",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(next(iter(columns.values()))),
        file_size_in_bytes=place.stat().st_size,
        **{name: {} for name in ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")},
        lower_bounds={},
        upper_bounds={},
        equality_ids=None if by_position else [1],
    )
    file.spec_id = 0
    with table.transaction() as change, change.update_snapshot().fast_append() as files:
        files.append_data_file(file)
