"""Which snapshots of a view somebody may still ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from airflow_geneva.commit.contents import named_by_metadata, named_by_swap, read_intents, read_note
from airflow_geneva.job.shard import in_parallel
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.location import TableLocation
from airflow_geneva.uri import is_local

if TYPE_CHECKING:
    import lance


def named_snapshots(location: TableLocation, dataset: lance.LanceDataset, since: int = 0) -> set[str]:
    """The snapshots that versions of a view name, tagged ones included, and the notes beside it.

    Args:
        dataset: the view at its newest version.
        since: look at versions from this one on only.

    Raises:
        LookupError: a version cannot be read, so nothing can be said.
    """

    def named(version: int) -> str:
        # Of a swap, the metadata still names the one before.
        return named_by_swap(dataset, version) or named_by_metadata(dataset.checkout_version(version))

    found = set(_noted(location))
    with engine_errors(lambda error: LookupError(str(error))):
        versions = [number for ref in dataset.version_refs() if (number := int(ref["version"])) >= since]
        found.update(in_parallel(named, versions, is_local(location.uri)))
    return found - {""}


def _noted(location: TableLocation) -> Iterator[str]:
    yield from read_intents(location)
    note = read_note(location)
    if note is not None:
        yield note.snapshot
