"""The baseline: pylance alone with the same reads, the same function and the same commit, in one process."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lance
import lance.commit
import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter
from lance.fragment import DataFile, LanceFragment

from airflow_geneva.engine.udf import UDF

_ROWS = 16_384


def add_column(uri: str, column: str, udf: UDF, options: Mapping[str, str] | None = None) -> None:
    lance.dataset(uri, storage_options=options).add_columns(pa.schema([pa.field(column, udf.data_type)]))


def fill_column(
    uri: str,
    source: str,
    column: str,
    udf: UDF,
    batch_rows: int = _ROWS,
    options: Mapping[str, str] | None = None,
    threads: int = 1,
) -> int:
    """Compute a column in all fragments that have no file for it; return the number of rows.

    It uses `LanceFileWriter`, which is faster than `write_fragments`, so the baseline is strict.
    """
    dataset = lance.dataset(uri, storage_options=options)
    todo = empty_fragments(dataset, column)
    if not todo:
        return 0
    schema = pa.schema([dataset.schema.field(column)])

    def fill(fragment: LanceFragment) -> tuple[int, lance.LanceOperation.DataReplacementGroup]:
        name, rows = f"{uuid.uuid4().hex}.lance", 0
        writer = LanceFileWriter(
            f"{uri}/data/{name}", schema, version=dataset.data_storage_version, storage_options=options
        )
        for batch in fragment.scanner(columns=[source], batch_size=batch_rows).to_batches():
            rows += batch.num_rows
            writer.write_batch(pa.record_batch([_apply(udf, batch.column(0))], schema=schema))
        writer.close()
        file = DataFile.create(dataset, name)
        return rows, lance.LanceOperation.DataReplacementGroup(fragment.fragment_id, file)

    if threads == 1:
        filled = [fill(fragment) for fragment in todo]
    else:
        with ThreadPoolExecutor(threads) as pool:
            filled = list(pool.map(fill, todo))
    replacement = lance.LanceOperation.DataReplacement([group for _, group in filled])
    lance.LanceDataset.commit(uri, replacement, read_version=dataset.version, storage_options=options)
    return sum(rows for rows, _ in filled)


def empty_fragments(dataset: lance.LanceDataset, column: str) -> list[LanceFragment]:
    """Return the fragments without a data file of a column, according to the manifest."""
    (field_id,) = (field.id() for field in dataset.lance_schema.fields() if field.name() == column)
    return [
        fragment
        for fragment in dataset.get_fragments()
        if not any(field_id in file.fields for file in fragment.metadata.files)
    ]


def _apply(udf: UDF, values: pa.Array) -> pa.Array:
    function: Any = udf.func
    if udf.form == "array":
        return function(values)
    results = [function(value) for value in values.to_pylist()]
    if pa.types.is_fixed_size_list(udf.data_type):
        return pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(results)), type=udf.data_type)
    return pa.array(results, udf.data_type)
