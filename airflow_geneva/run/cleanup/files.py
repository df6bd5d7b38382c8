"""Which data files of a table nobody references."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.checkpoint.fragment import read_staged
from airflow_geneva.checkpoint.store import LanceCheckpointStore
from airflow_geneva.lance_io.engine_errors import engine_errors
from airflow_geneva.storage import Storage

if TYPE_CHECKING:
    import lance

_OURS = re.compile(r"data/[0-9a-f]{32}\.lance")
_FROM_LANCE = re.compile(r"data/[01]{24}[0-9a-f]{26}\.lance")


def is_named_like_ours(name: str) -> bool:
    """Whether a file below a table's folder has the form of name that staged data files get."""
    return bool(_OURS.fullmatch(name))


def may_be_staged(name: str) -> bool:
    """Whether a file may be a staged one; those that hold blobs get their names from Lance."""
    return is_named_like_ours(name) or bool(_FROM_LANCE.fullmatch(name))


def sidecar_folder(name: str) -> str:
    """Where the blobs of a data file lie that it does not hold itself."""
    return f"{name.removesuffix('.lance')}/"


def without_referenced(dataset: lance.LanceDataset, names: Iterable[str], since: int | None = None) -> set[str]:
    """The files among the given ones that no existing version, tag or branch references.

    Args:
        dataset: the table at its newest version.
        names: relative to the table's folder.
        since: look at versions from this one on only, and at all branches.

    Raises:
        LookupError: a version or branch cannot be read, so nothing can be said.
    """
    left = set(names)
    with engine_errors(lambda error: LookupError(str(error))):
        if since is None and left:
            # Most of what was staged was committed, and is found in the newest version, without the long walk.
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
class Named:
    """Staged data files that checkpoints name.

    Args:
        folders: by name below the table's folder, the folder of the checkpoint's work.
        complete: whether all checkpoints could be read.
    """

    folders: dict[str, str]
    complete: bool


def named_by(checkpoints: Storage, keys: Iterable[str]) -> Named:
    """Read fragment checkpoints for the files they name.

    Args:
        keys: of fragment checkpoints.
    """
    store = LanceCheckpointStore(checkpoints)
    folders: dict[str, str] = {}
    complete = True
    for key in keys:
        staged = read_staged(store, key)
        if staged is None:
            complete = False
        else:
            folders[f"data/{staged.file}"] = key.partition("_where-")[0]
    return Named(folders, complete)
