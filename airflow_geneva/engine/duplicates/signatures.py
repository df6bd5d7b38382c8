"""Hash the rows of a table, so that duplicates share a hash: the functions of the columns of a hidden view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from airflow_geneva.engine.duplicates import minhash, vectors
from airflow_geneva.engine.duplicates.texts import normalized
from airflow_geneva.engine.lance_io.row_keys import row_keys
from airflow_geneva.engine.udf import UDF, udf
from airflow_geneva.engine.views.deduplication import Deduplication

HIGH, LOW = "high", "low"
"""The columns with the two halves of a hash of what is compared; NULL for a row that is compared with none."""

_VERSION = "1"
"""Has to change with the values: then the hidden views of all deduplicated views are computed again."""


@dataclass(frozen=True)
class Signature:
    """How a query hashes the rows that it compares.

    Args:
        bands: the number of bands in which it looks for similar rows; 0: only equal rows are duplicates.
        words: the number of columns with the words of a sketch.
    """

    function: UDF
    bands: int = 0
    words: int = 0

    @staticmethod
    def of(deduplicate: Deduplication) -> Signature:
        """Return what hashes the columns that a query compares."""
        threshold = deduplicate.threshold
        if threshold is None:
            return Signature(EQUAL)
        if deduplicate.method == "minhash":
            bands = minhash.bands_for(threshold)
            return Signature(dict(zip(minhash.CHOICES.values(), _MINHASH, strict=True))[bands], bands.bands)
        corners = vectors.corners_for(threshold)
        function = dict(zip(vectors.CHOICES.values(), _COSINE, strict=True))[corners]
        return Signature(function, corners.bands, vectors.WORDS)

    @property
    def band_names(self) -> tuple[str, ...]:
        return _band_names(self.bands)

    @property
    def word_names(self) -> tuple[str, ...]:
        return _word_names(self.words)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that the function makes."""
        return tuple(field.name for field in self.function.data_type)


def _band_names(bands: int) -> tuple[str, ...]:
    return tuple(f"band_{at}" for at in range(bands))


def _word_names(words: int) -> tuple[str, ...]:
    return tuple(f"sketch_{at}" for at in range(words))


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


def _struct(bands: int = 0, words: int = 0) -> pa.DataType:
    return pa.struct([pa.field(name, pa.int64()) for name in (HIGH, LOW, *_band_names(bands), *_word_names(words))])


@udf(data_type=_struct(), name="equal_values", version=_VERSION)
def EQUAL(batch: pa.RecordBatch) -> pa.Array:
    """Hash the values of rows; NULL is a value like others."""
    return pa.StructArray.from_arrays([pa.array(half) for half in _halves(batch.columns)], fields=list(_struct()))


def _minhash(bands: minhash.Bands) -> UDF:
    struct = _struct(bands.bands)

    @udf(data_type=struct, name=f"minhash_{bands.rows}x{bands.bands}", version=_VERSION)
    def hashed(batch: pa.RecordBatch) -> pa.Array:
        (texts,) = batch.columns
        missing = texts.is_null().to_numpy(zero_copy_only=False)
        texts = normalized(texts.drop_null())
        found = [*_halves([texts]), *bands.hashes(texts)]
        return pa.StructArray.from_arrays([_spread(one, missing) for one in found], fields=list(struct))

    return hashed


def _cosine(corners: vectors.Corners) -> UDF:
    struct = _struct(corners.bands, vectors.WORDS)

    @udf(data_type=struct, name=f"cosine_{corners.joined}x{corners.bands}", version=_VERSION)
    def hashed(batch: pa.RecordBatch) -> pa.Array:
        (column,) = batch.columns
        parts = [
            pa.StructArray.from_arrays(_of_vectors(corners, column[part]), fields=list(struct))
            for part in vectors.pieces(len(column), column.type.list_size)
        ]
        return pa.concat_arrays(parts) if parts else pa.array([], struct)

    return hashed


def _of_vectors(corners: vectors.Corners, column: pa.Array) -> list[pa.Array]:
    """Hash vectors, which fit into a piece."""
    units, directed = vectors.unit_vectors(column)
    hashes, words = corners.hashes(units)
    data = pa.py_buffer(units.astype("<i4"))
    rounded = pa.Array.from_buffers(pa.binary(4 * column.type.list_size), len(column), [None, data])
    return [pa.array(one, mask=~directed) for one in (*_halves([rounded]), *hashes, *words)]


def _spread(values: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_]) -> pa.Array:
    if not missing.any():
        return pa.array(values)
    found = np.zeros(len(missing), np.int64)
    found[~missing] = values
    return pa.array(found, mask=missing)


# A view names its UDFs by import paths.
MINHASH_2X49, MINHASH_3X35, MINHASH_4X17, MINHASH_6X16, MINHASH_10X11, MINHASH_16X8 = map(
    _minhash, minhash.CHOICES.values()
)
_MINHASH = (MINHASH_2X49, MINHASH_3X35, MINHASH_4X17, MINHASH_6X16, MINHASH_10X11, MINHASH_16X8)
COSINE_3X48, COSINE_4X35, COSINE_6X42, COSINE_7X20, COSINE_9X17 = map(_cosine, vectors.CHOICES.values())
_COSINE = (COSINE_3X48, COSINE_4X35, COSINE_6X42, COSINE_7X20, COSINE_9X17)
