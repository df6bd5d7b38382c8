"""All uses of private names of pylance, each with what it must do and why no public name does it.

If a name is gone, its users raise AttributeError, and nothing is computed again. Each assumption has a test in
`tests/lance_io/test_pylance_internals.py`, so that a new version of pylance shows which one no longer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import lance
    import pyarrow as pa
    from lance.fragment import DataFile

NEWEST_TESTED = "14.0.2"
"""The newest pylance with which all tests have passed, as in `requirements/`."""

path_of: Callable[[DataFile], str] = attrgetter("_path")
"""Returns the path of a data file below the table's folder `data`; the public `path` warns at each use."""


def take_rows(dataset: lance.LanceDataset, ids: Any, columns: Sequence[str] | Mapping[str, str]) -> pa.Table:
    """Read rows by id in one call, in the order of `ids`, without ids that the version does not have.

    The public `take` selects rows by position.

    Args:
        columns: names, or SQL or a quoted column for each output name; `_rowid` and `_rowaddr` are columns, too.
    """
    return dataset._take_rows(ids, columns=dict(columns) if isinstance(columns, Mapping) else list(columns))


def written_at(dataset: lance.LanceDataset) -> int:
    """Return the time of the open version in nanoseconds, from its manifest; `versions()` would open every version."""
    return cast(int, dataset._ds.current_version()["timestamp"])


def count_fragments(dataset: lance.LanceDataset) -> int:
    """Return the number of fragments, from the manifest; `get_fragments()` makes an object of each."""
    return dataset._ds.count_fragments()


def serialized_manifest(dataset: lance.LanceDataset) -> bytes:
    """Return the manifest of the open version as protobuf; no public name returns it."""
    return dataset._ds.serialized_manifest()


def access_of(dataset: lance.LanceDataset) -> tuple[Any, list[str] | None, dict[str, str] | None]:
    """Return how a dataset was opened: the client of its catalog and its id there, or its storage options; else None.

    The public `initial_storage_options` has no catalog, and credentials of a catalog expire.
    """
    return dataset._namespace_client, dataset._table_id, dataset._storage_options
