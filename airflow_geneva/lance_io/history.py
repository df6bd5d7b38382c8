"""Read the commits of a table, newest first."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.storage.uri import is_local

if TYPE_CHECKING:
    import lance

_MOST_AT_ONCE = 16


@dataclass(frozen=True)
class Commit:
    """One commit.

    Args:
        version: the table version that the commit wrote.
        operation: the operation, one of ``lance.LanceOperation``; None if Lance recorded none.
        properties: the transaction properties that the writer set.
        gone: the version was cleaned up, so nothing is known about the commit.
    """

    version: int
    operation: Any = None
    properties: Mapping[str, str] = field(default_factory=dict)
    gone: bool = False


def read_commit(dataset: lance.LanceDataset, version: int) -> Commit:
    """Read the commit that wrote a version."""
    try:
        with engine_errors():
            transaction = dataset.read_transaction(version)
    except EngineError:
        return Commit(version, gone=True)
    if transaction is None:
        return Commit(version)
    return Commit(version, transaction.operation, transaction.transaction_properties or {})


def commits_newest_first(dataset: lance.LanceDataset, newest: int, oldest: int = 1) -> Iterator[Commit]:
    """Read the commits of a range of versions, newest first.

    On an object store, the number of parallel reads doubles from one: most callers need only the first commits.
    """
    most, at_once = 1 if is_local(dataset.uri) else _MOST_AT_ONCE, 1
    while newest >= oldest:
        versions = range(newest, max(newest - at_once, oldest - 1), -1)
        if len(versions) == 1:
            yield read_commit(dataset, newest)
        else:
            with ThreadPoolExecutor(len(versions)) as pool:
                # pylance refuses two concurrent reads of one dataset object, so each thread gets a copy.
                yield from list(pool.map(lambda version: read_commit(copy.copy(dataset), version), versions))
        newest, at_once = newest - len(versions), min(2 * at_once, most)


def files_written(operation: Any) -> list[lance.fragment.DataFile]:
    """Return the data files that an operation added with new or changed values; a compaction changes no value."""
    import lance

    made = lance.LanceOperation
    if isinstance(operation, (made.Append, made.Overwrite)):
        return [file for fragment in operation.fragments for file in fragment.files]
    if isinstance(operation, made.DataReplacement):
        return [group.new_file for group in operation.replacements]
    if isinstance(operation, made.Update):
        fields = set(operation.fields_modified)
        added = [file for fragment in operation.new_fragments for file in fragment.files]
        in_place = (file for fragment in operation.updated_fragments for file in fragment.files)
        return added + [file for file in in_place if fields & set(file.fields)]
    return []
