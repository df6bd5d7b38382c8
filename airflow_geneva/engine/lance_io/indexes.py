"""The indexes of a table: which rows they cover, and how to add the other rows to an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from airflow_geneva.engine.lance_io.fragments import Columns, fields_present
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.storage.engine_errors import engine_errors

if TYPE_CHECKING:
    import lance

MOST_SEGMENTS = 8
"""The number of segments of a vector index before they are merged. Each segment is searched separately: nine take about
three times as long as one, and a merge takes about as long as three additions."""


@dataclass(frozen=True)
class Index:
    """One index at a version of its table.

    Args:
        kind: its type, as Lance names it.
        segments: number of its parts.
        rows: live rows of the table that it covers.
        unindexed_rows: live rows that it does not cover; Lance scans them in every search.
    """

    name: str
    columns: tuple[str, ...]
    kind: str
    segments: int
    rows: int
    unindexed_rows: int

    @staticmethod
    def read(dataset: lance.LanceDataset, field_id: int | None = None) -> list[Index]:
        """Return the indexes on a column, given by its field id, or all indexes of a table; reads manifests only."""
        with engine_errors():
            found = [index for index in dataset.describe_indices() if index.fields]
            if field_id is not None:
                wanted = set(fields_present(dataset, (field_id,)))
                found = [index for index in found if wanted & set(index.fields)]
            if not found:
                return []
            fragments = read_manifest(dataset, Columns((), (), ()))
            indexes = []
            for index in found:
                covered = {fragment for segment in index.segments for fragment in segment.fragment_ids or ()}
                inside = np.isin(fragments.ids, np.fromiter(covered, np.int64, len(covered)))
                rows = int(fragments.live_rows[inside].sum())
                unindexed = int(fragments.live_rows.sum()) - rows
                columns = tuple(index.field_names)
                indexes.append(Index(index.name, columns, index.index_type, len(index.segments), rows, unindexed))
            return indexes

    @property
    def of_vectors(self) -> bool:
        return self.kind.startswith("IVF")

    def options_to_update(self) -> dict[str, Any]:
        """Return the arguments with which Lance indexes the other rows, and a search returns no outdated values.

        A rewritten or moved row leaves its old value in the existing segments. Vector search ignores it there. An index
        of any other kind returns the old value as soon as another segment covers the row, unless all segments are
        merged (pylance 14.0.2, its issue 7795).
        """
        if not self.of_vectors:
            return {"num_indices_to_merge": self.segments}
        if self.unindexed_rows > self.rows:
            # The centroids were trained on other vectors, or on a few only.
            return {"retrain": True}
        return {"num_indices_to_merge": self.segments if self.segments >= MOST_SEGMENTS else 0}
