"""Hash the rows of a table, so that duplicates share a hash: the functions of the columns of a hidden view."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.duplicates.minhash import CHOICES, Bands, bands_for
from airflow_geneva.engine.duplicates.texts import normalized
from airflow_geneva.engine.lance_io.row_keys import row_keys
from airflow_geneva.engine.udf import UDF, udf
from airflow_geneva.engine.views.deduplication import Deduplication

HIGH, LOW = "high", "low"
"""The columns with the two halves of a hash of what is compared; NULL for a row that is compared with none."""

_VERSION = "1"
"""Has to change with the values: then the hidden views of all deduplicated views are computed again."""


def names_of(bands: Bands | None) -> tuple[str, ...]:
    """Return the columns with the hashes of the bands."""
    return tuple(f"band_{at}" for at in range(bands.bands)) if bands else ()


def bands_of(deduplicate: Deduplication) -> Bands | None:
    """Return the bands in which a query looks for similar texts; None if it compares values."""
    return None if deduplicate.threshold is None else bands_for(deduplicate.threshold)


def signature_of(deduplicate: Deduplication) -> UDF:
    """Return the UDF that hashes the columns that a query compares."""
    bands = bands_of(deduplicate)
    return EQUAL if bands is None else dict(zip(CHOICES.values(), _MINHASH, strict=True))[bands]


def _halves(columns: Sequence[pa.Array]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    names = [str(at) for at in range(len(columns))]
    keys = b"".join(row_keys(pa.record_batch([_comparable(column) for column in columns], names)))
    halves = np.frombuffer(keys, np.int64).reshape(-1, 2)
    return halves[:, 0].copy(), halves[:, 1].copy()


def _comparable(column: pa.Array) -> pa.Array:
    """Return values that are equal bit by bit if they are equal: there is one zero, and one NaN."""
    if pt.is_float16(column.type):
        column = column.cast(pa.float32())
    if not pt.is_floating(column.type):
        return column
    one = pc.add(column, pa.scalar(0.0, column.type))
    return pc.if_else(pc.is_nan(one), pa.scalar(float("nan"), column.type), one)


def _struct(bands: Bands | None) -> pa.DataType:
    return pa.struct([pa.field(name, pa.int64()) for name in (HIGH, LOW, *names_of(bands))])


@udf(data_type=_struct(None), name="equal_values", version=_VERSION)
def EQUAL(batch: pa.RecordBatch) -> pa.Array:
    """Hash the values of rows; NULL is a value like others."""
    return pa.StructArray.from_arrays([pa.array(half) for half in _halves(batch.columns)], fields=list(_struct(None)))


def _minhash(bands: Bands) -> UDF:
    @udf(data_type=_struct(bands), name=f"minhash_{bands.rows}x{bands.bands}", version=_VERSION)
    def minhash(batch: pa.RecordBatch) -> pa.Array:
        (texts,) = batch.columns
        missing = texts.is_null().to_numpy(zero_copy_only=False)
        texts = normalized(texts.drop_null())
        found = [*_halves([texts]), *bands.hashes(texts)]
        return pa.StructArray.from_arrays([_spread(one, missing) for one in found], fields=list(_struct(bands)))

    return minhash


def _spread(values: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_]) -> pa.Array:
    if not missing.any():
        return pa.array(values)
    found = np.zeros(len(missing), np.int64)
    found[~missing] = values
    return pa.array(found, mask=missing)


# A view names its UDFs by import paths.
MINHASH_2X49, MINHASH_3X35, MINHASH_4X17, MINHASH_6X16, MINHASH_10X11, MINHASH_16X8 = map(_minhash, CHOICES.values())
_MINHASH = (MINHASH_2X49, MINHASH_3X35, MINHASH_4X17, MINHASH_6X16, MINHASH_10X11, MINHASH_16X8)
