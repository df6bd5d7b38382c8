"""Which fragments the versions of a table have, and which data files nothing references."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.checkpoint.records import read_staged
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.lance_io.engine_errors import EngineError, engine_errors
from airflow_geneva.lance_io.fragments import Columns, fields_present, read_manifest
from airflow_geneva.storage.files import Storage

if TYPE_CHECKING:
    import lance

_OURS = re.compile(r"data/[0-9a-f]{32}\.lance")
_FROM_LANCE = re.compile(r"data/[01]{24}[0-9a-f]{26}\.lance")
_MOST_LOOKED_AT = 32


def is_named_like_ours(name: str) -> bool:
    """Whether a file name has the form of this package's staged data files."""
    return bool(_OURS.fullmatch(name))


def may_be_staged(name: str) -> bool:
    """Whether a file may be a staged data file; Lance names those with blobs."""
    return is_named_like_ours(name) or bool(_FROM_LANCE.fullmatch(name))


def sidecar_folder(name: str) -> str:
    """Return the folder with the external blobs of a data file."""
    return f"{name.removesuffix('.lance')}/"


def without_referenced(dataset: lance.LanceDataset, names: Iterable[str], since: int | None = None) -> set[str]:
    """Return those of the given files that no existing version, tag or branch references.

    Args:
        dataset: the table at its newest version.
        names: relative to the table's folder.
        since: check only versions from this one on, and all branches.

    Raises:
        LookupError: a version or branch cannot be read.
    """
    left = set(names)
    with engine_errors(lambda error: LookupError(str(error))):
        if since is None and left:
            # Most staged files were committed and are in the newest version: check it before all versions.
            left -= set(_referenced(dataset, left, dataset.version))
        if left:
            left -= set(_referenced(dataset, left, since))
        for branch in dataset.branches.list() if left else ():
            left -= set(_referenced(dataset.checkout_version((branch, None)), left, None))
    return left


def _referenced(dataset: lance.LanceDataset, names: set[str], since: int | None) -> Iterator[str]:
    wanted = pa.array(sorted(names))
    for batch in dataset.tracked_files(min_version=since):
        paths = batch.column("path")
        yield from pc.filter(paths, pc.is_in(paths, wanted)).to_pylist()


@dataclass(frozen=True)
class ReferencedFiles:
    """The staged data files that checkpoints name.

    Args:
        folders: by file name, the checkpoint folder (UDF, version and column) that names it.
        complete: whether all checkpoints could be read.
    """

    folders: dict[str, str]
    complete: bool


def read_referenced(checkpoints: Storage, keys: Iterable[str]) -> ReferencedFiles:
    """Read from fragment checkpoints which files they name.

    Args:
        keys: keys of fragment checkpoints.
    """
    store = CheckpointStore(checkpoints)
    folders: dict[str, str] = {}
    complete = True
    for key in keys:
        staged = read_staged(store, key)
        if staged is None:
            complete = False
        else:
            folders[f"data/{staged.file}"] = key.partition("_where-")[0]
    return ReferencedFiles(folders, complete)


@dataclass(frozen=True)
class ExistingVersions:
    """The existing versions of a table, tagged ones included.

    Args:
        dataset: the table at its newest version.
        numbers: the versions.
    """

    dataset: lance.LanceDataset
    numbers: frozenset[int]

    @staticmethod
    def of(dataset: lance.LanceDataset) -> ExistingVersions:
        return ExistingVersions(dataset, frozenset(int(ref["version"]) for ref in dataset.version_refs()))

    def signatures(self, field_id: int, inputs: Iterable[str]) -> set[str] | None:
        """Return the signatures of existing fragments whose facts may be older than every existing version.

        A fragment keeps its files until it is removed. So it is in the oldest version of each unbroken series, or in a
        version that brought it back: a restore, or a commit based on a removed version. Only these versions are read.

        Args:
            field_id: the column's field.
            inputs: field ids of the inputs, in the form of facts.

        Returns:
            The signatures; None if a version cannot be read, or there are too many.
        """
        found: set[str] = set()
        try:
            with engine_errors():
                versions = self._to_look_at()
                if len(versions) > _MOST_LOOKED_AT:
                    return None
                for version in versions:
                    dataset = self.dataset.checkout_version(version)
                    output = fields_present(dataset, (field_id,))
                    for text in inputs if output else ():
                        fields = tuple(fields_present(dataset, (int(part),)) for part in text.split(","))
                        manifest = read_manifest(dataset, Columns(fields, (), output))
                        found.update(fragment.signature for fragment in manifest.values())
        except EngineError:
            return None
        return found

    def _to_look_at(self) -> list[int]:
        import lance

        found = {max(self.numbers)}
        for version in self.numbers:
            if version - 1 not in self.numbers:
                found.add(version)
                continue
            transaction = self.dataset.read_transaction(version)
            if (
                transaction is None
                or isinstance(transaction.operation, lance.LanceOperation.Restore)
                or transaction.read_version not in self.numbers
            ):
                found.add(version)
        return sorted(found)
