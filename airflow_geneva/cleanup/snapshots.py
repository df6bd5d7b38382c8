"""Which snapshots of a view are still referenced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from airflow_geneva.commit.view_state import read_advance_note, read_intents, snapshot_in_metadata, snapshot_of_version
from airflow_geneva.job.shard_status import in_parallel
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.storage.uri import is_local

if TYPE_CHECKING:
    import lance


def named_snapshots(location: TableLocation, dataset: lance.LanceDataset, since: int = 0) -> set[str]:
    """Return the snapshots that the versions of a view (tagged ones included) and its stored notes reference.

    Args:
        dataset: the view at its newest version.
        since: check only versions from this one on.

    Raises:
        LookupError: a version cannot be read.
    """

    def named(version: int) -> str:
        # In the version that a swap wrote, the metadata still names the snapshot before it.
        return snapshot_of_version(dataset, version) or snapshot_in_metadata(dataset.checkout_version(version))

    found = set(_noted(location))
    with engine_errors(lambda error: LookupError(str(error))):
        versions = [number for ref in dataset.version_refs() if (number := int(ref["version"])) >= since]
        found.update(in_parallel(named, versions, is_local(location.uri)))
    return found - {""}


def _noted(location: TableLocation) -> Iterator[str]:
    yield from read_intents(location)
    note = read_advance_note(location)
    if note is not None:
        yield note.snapshot
