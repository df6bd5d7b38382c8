"""Find the files beside a table that its jobs, views, versions and checkpoints still use."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.keys import key_part
from airflow_geneva.engine.checkpoint.records import read_staged
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.job.folder import JobFolder
from airflow_geneva.engine.job.status import DAMAGED, Job, job_ids, read_job
from airflow_geneva.engine.lance_io.fragments import columns_in, fields_present, fragment_files
from airflow_geneva.engine.lance_io.manifest import read_manifest
from airflow_geneva.engine.lance_io.table_versions import manifest_of, read_transaction
from airflow_geneva.engine.plan.saved_plan import job_spec_from_json
from airflow_geneva.engine.plan.shard import Shard
from airflow_geneva.engine.storage.documents import LARGEST_BYTES, MOST_VALUES
from airflow_geneva.engine.storage.engine_errors import EngineError, engine_errors
from airflow_geneva.engine.storage.files import Storage, in_parallel
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.storage.uri import is_local
from airflow_geneva.engine.views.state import (
    read_advance_note,
    read_intents,
    snapshot_in_metadata,
    snapshot_of_version,
)
from airflow_geneva.errors import DamagedRecord

if TYPE_CHECKING:
    import lance

_OURS = re.compile(r"data/[0-9a-f]{32}\.lance")
_FROM_LANCE = re.compile(r"data/[01]{24}[0-9a-f]{26}\.lance")
_MOST_LOOKED_AT = 32
CheckpointPlace = tuple[str, str, int]
"""Identifies the checkpoints of one fragment: key prefix, hash of the source files, fragment id."""


@dataclass(frozen=True)
class ActiveJobs:
    """The jobs of a table at the time of reading: open ones, which are running or may be resumed, and the others.

    `unreadable` jobs have a damaged record in their folder, `bare` jobs have no record.
    """

    open: tuple[Job, ...]
    ended: Mapping[str, Job]
    unreadable: frozenset[str]
    bare: frozenset[str]

    @property
    def any_open(self) -> bool:
        return bool(self.open or self.unreadable)

    def use(self, work_folder: str) -> bool:
        """Whether an open job may use the checkpoints in a folder ``udf-..._ver-..._col-...``.

        All versions of a UDF count: a job may reuse what another version computed.
        """
        return bool(self.unreadable) or any(may_use_folder(job, work_folder) for job in self.open)

    def at(self, job_id: str) -> bool:
        """Whether a job is open or may be open."""
        return job_id in self.unreadable or any(job.id == job_id for job in self.open)

    def without_old(self, old: Collection[str]) -> ActiveJobs:
        """Return these jobs without the `old` ones that have a damaged record."""
        return ActiveJobs(self.open, self.ended, self.unreadable - set(old), self.bare | (self.unreadable & set(old)))


def may_use_folder(job: Job, work_folder: str) -> bool:
    """Whether a job may use a folder ``udf-..._ver-..._col-...``: it has the same column, or no column."""
    column = job.key_column or job.column
    return column is None or work_folder.endswith(f"_col-{key_part(column)}")


def read_active_jobs(checkpoints: Storage, now: float, is_touched: Callable[[str], bool]) -> ActiveJobs:
    """Read all jobs of a table; if that fails with a StorageError, nothing may be removed.

    `is_touched` returns whether the files of an unfinished job changed recently; its heartbeats may use another clock.
    """
    opened: list[Job] = []
    ended: dict[str, Job] = {}
    unreadable: set[str] = set()
    bare: set[str] = set()
    names = job_ids(checkpoints)
    for name, found in zip(
        names, in_parallel(lambda n: _read(checkpoints, n, now), names, checkpoints.local), strict=True
    ):
        if isinstance(found, Job):
            if found.open or (found.ended is None and is_touched(name)):
                opened.append(found)
            else:
                ended[name] = found
        else:
            (unreadable if found else bare).add(name)
    return ActiveJobs(tuple(opened), ended, frozenset(unreadable), frozenset(bare))


def _read(checkpoints: Storage, job_id: str, now: float) -> Job | bool:
    """Return the job; False if its folder has no record, True if the record is damaged."""
    try:
        return read_job(JobFolder.of(checkpoints, job_id), with_shards=False, now=now) or False
    except DamagedRecord:
        return True


def planned_places(job: Storage, plans: Iterable[str], wanted: Collection[str]) -> set[CheckpointPlace] | None:
    """Return the checkpoint places that the plans of a job may use; None if a plan cannot be read.

    Shards of plans without a `wanted` key prefix are not read.
    """
    found: set[CheckpointPlace] = set()
    try:
        for name in plans:
            header = job.read_json(name)
            spec = job_spec_from_json(header["spec"])
            prefixes = {prefix for prefix, _ in spec.reuse_rules.prefixes}
            if prefixes.isdisjoint(wanted):
                continue
            for entry in header["shards"]:
                for fragment in _read_shard(job, str(entry["file"])).fragments:
                    places = [fragment.place, *(ancestor.place for ancestor in fragment.ancestors)]
                    found |= {(prefix, *place) for prefix in prefixes for place in places}
    except (FileNotFoundError, *DAMAGED):
        return None
    return found


def _read_shard(job: Storage, name: str) -> Shard:
    """Read a shard that no XCom names, so it may be as large as other documents only."""
    return Shard.load(job.read_bytes(name), LARGEST_BYTES, MOST_VALUES)


def named_snapshots(location: TableLocation, dataset: lance.LanceDataset, since: int = 0) -> set[str]:
    """Return the snapshots that the versions of a view (tagged ones included) and its stored notes reference.

    Checks only versions from `since` on. LookupError: a version cannot be read.
    """

    def named(version: int) -> str:
        # In the version that a swap wrote, the metadata still names the snapshot before it.
        return snapshot_of_version(dataset, version) or snapshot_in_metadata(manifest_of(dataset, version))

    note = read_advance_note(location)
    found = read_intents(location) | ({note.snapshot} if note is not None else set())
    with engine_errors(lambda error: LookupError(str(error))):
        versions = [number for ref in dataset.version_refs() if (number := int(ref["version"])) >= since]
        found.update(in_parallel(named, versions, is_local(location.uri)))
    return found - {""}


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
    """Return the given files that no existing version, tag or branch references.

    Checks only versions from `since` on, and all branches. LookupError: a version or branch cannot be read.
    """
    left = set(names)
    with engine_errors(lambda error: LookupError(str(error))):
        if since is None and left:
            # Most staged files were committed and are in the newest version: check it before all versions.
            left -= set(_referenced(dataset, left, dataset.version))
        if left:
            left -= set(_referenced(dataset, left, since))
        for branch in dataset.branches.list() if left else ():
            left -= set(_referenced(manifest_of(dataset, (branch, None)), left, None))
    return left


def _referenced(dataset: lance.LanceDataset, names: set[str], since: int | None) -> Iterator[str]:
    wanted = pa.array(sorted(names))
    for batch in dataset.tracked_files(min_version=since):
        paths = batch.column("path")
        yield from pc.filter(paths, pc.is_in(paths, wanted)).to_pylist()


@dataclass(frozen=True)
class ReferencedFiles:
    """The staged data files that checkpoints name, with the folder of each; `complete` if all could be read."""

    folders: dict[str, str]
    complete: bool


def read_referenced(checkpoints: Storage, keys: Iterable[str]) -> ReferencedFiles:
    """Read the names of staged files from fragment checkpoints."""
    store = CheckpointStore(checkpoints)
    folders: dict[str, str] = {}
    complete = True
    for key in keys:
        staged = read_staged(store, key)
        if staged is None:
            complete = False
        else:
            for one in (staged, *staged.earlier):
                folders[f"data/{one.file}"] = key.partition("_where-")[0]
    return ReferencedFiles(folders, complete)


@dataclass(frozen=True)
class ExistingVersions:
    """The numbers of the existing versions of a table, tagged ones included."""

    dataset: lance.LanceDataset
    numbers: frozenset[int]

    @staticmethod
    def of(dataset: lance.LanceDataset) -> ExistingVersions:
        return ExistingVersions(dataset, frozenset(int(ref["version"]) for ref in dataset.version_refs()))

    def signatures(self, field_id: int, inputs: Iterable[str]) -> set[str] | None:
        """Return the signatures of fragments, existing or compacted, whose facts may be older than all versions.

        A fragment keeps its files until it is removed. So it is in the oldest version of each unbroken series, or in a
        version that brought it back: a restore, or a commit based on a removed version. Only these versions are read.
        If such a version is a compaction, its transaction tells plans which fragments it replaced.

        Args:
            inputs: field ids of the inputs, as facts store them.

        Returns:
            None if a version cannot be read, or if there are too many.
        """
        import lance

        found: set[str] = set()
        try:
            with engine_errors():
                versions = self._to_look_at()
                if len(versions) > _MOST_LOOKED_AT:
                    return None
                for version, operation in versions.items():
                    dataset = manifest_of(self.dataset, version)
                    output = fields_present(dataset, (field_id,))
                    groups = operation.groups if isinstance(operation, lance.LanceOperation.Rewrite) else ()
                    replaced = [fragment for group in groups for fragment in group.old_fragments]
                    for text in inputs if output else ():
                        columns, _ = columns_in(dataset, text, output)
                        found.update(read_manifest(dataset, columns).signatures.to_pylist())
                        found.update(fragment_files(fragment, columns).signature for fragment in replaced)
        except EngineError:
            return None
        return found

    def _to_look_at(self) -> dict[int, Any]:
        """Return the versions to read, each with the operation that made it."""
        import lance

        found = {}
        for version in sorted(self.numbers):
            transaction = read_transaction(self.dataset, version)
            operation = None if transaction is None else transaction.operation
            if (
                transaction is None
                or isinstance(operation, lance.LanceOperation.Restore)
                or not {version - 1, transaction.read_version} <= self.numbers
                or version == max(self.numbers)
            ):
                found[version] = operation
        return found
