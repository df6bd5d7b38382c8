"""The baseline: pylance alone with the same reads, the same function and the same commit, in one process."""

from __future__ import annotations

import uuid
from typing import Any

import lance
import lance.commit
import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter
from lance.fragment import DataFile, LanceFragment

from airflow_geneva.udf import UDF

_ROWS = 16_384


def add_column(uri: str, column: str, udf: UDF) -> None:
    lance.dataset(uri).add_columns(pa.schema([pa.field(column, udf.data_type)]))


def fill_column(uri: str, source: str, column: str, udf: UDF, batch_rows: int = _ROWS) -> int:
    """Compute a column in all fragments that have no file for it; return the number of rows.

    It uses `LanceFileWriter`, which is faster than `write_fragments`, so the baseline is strict.
    """
    dataset = lance.dataset(uri)
    todo = empty_fragments(dataset, column)
    if not todo:
        return 0
    schema = pa.schema([dataset.schema.field(column)])
    groups, rows = [], 0
    for fragment in todo:
        name = f"{uuid.uuid4().hex}.lance"
        writer = LanceFileWriter(f"{uri}/data/{name}", schema, version=dataset.data_storage_version)
        for batch in fragment.scanner(columns=[source], batch_size=batch_rows).to_batches():
            rows += batch.num_rows
            writer.write_batch(pa.record_batch([_apply(udf, batch.column(0))], schema=schema))
        writer.close()
        groups.append(
            lance.LanceOperation.DataReplacementGroup(fragment.fragment_id, DataFile.create(dataset, name))
        )  # fmt: skip
    lance.LanceDataset.commit(uri, lance.LanceOperation.DataReplacement(groups), read_version=dataset.version)
    return rows


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
