"""Remove the files beside a table that are not needed any more.

Everything that may be in use is kept: the files of open jobs, and of jobs that ended within the TTL; data files that a
version, tag, branch or remaining checkpoint references; and all files if the jobs cannot be read. After a kill, run the
cleanup again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial

from airflow_geneva.engine.checkpoint.facts import fields_with_state, prune_state
from airflow_geneva.engine.checkpoint.view_snapshot import (
    packed_snapshots,
    prune_packed_snapshots,
    snapshot_job,
    snapshot_key,
)
from airflow_geneva.engine.choices import parse_age
from airflow_geneva.engine.cleanup.garbage import FileKind, Garbage, group_files
from airflow_geneva.engine.cleanup.in_use import (
    ActiveJobs,
    ExistingVersions,
    may_use_folder,
    named_snapshots,
    read_active_jobs,
    sidecar_folder,
    without_referenced,
)
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.job.status import job_ids
from airflow_geneva.engine.runtime import time
from airflow_geneva.engine.storage.engine_errors import engine_errors
from airflow_geneva.engine.storage.files import FileEntry, Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import StorageError

_FILES_PER_CHECK = 200
_LEAST_AGE = timedelta(days=1)


def collect(location: TableLocation, garbage: Garbage) -> Garbage:
    """Remove the garbage that no job has started to use since the search; return the removed files.

    Raises:
        StorageError: the jobs can no longer be read, or a file cannot be removed.
    """
    return _Collector(location, garbage).collect()


def remove_old_versions(location: TableLocation, ttl: timedelta | str) -> None:
    """Remove the versions of a hidden table that are older than `ttl`, but at least a day, with their files.

    Raises:
        StorageError: pylance cannot remove them.
    """

    def failed(error: BaseException) -> StorageError:
        return StorageError(f"Old versions of {location.uri} cannot be removed: {error}")

    with engine_errors(failed):
        location.open().cleanup_old_versions(older_than=max(parse_age("ttl", ttl), _LEAST_AGE))


class _Collector:
    def __init__(self, location: TableLocation, garbage: Garbage) -> None:
        self.location = location
        self.garbage = garbage
        self.storage = Storage(location.uri, location.options)
        self._since = time.monotonic()
        self.jobs = self._look_around()

    def collect(self) -> Garbage:
        removed: dict[FileKind, Iterable[FileEntry]] = {
            FileKind.LEDGERS: self._remove(self.garbage.file_group(FileKind.LEDGERS).files),
            FileKind.VALUES: self._remove(self.garbage.file_group(FileKind.VALUES).files),
            FileKind.MARKS: self._marks(),
            FileKind.SNAPSHOTS: self._snapshots(),
            FileKind.TEMPORARY: self._remove(self.garbage.file_group(FileKind.TEMPORARY).files),
            # Before the data files: a job that has already read a checkpoint has a record by then, so its files stay.
            FileKind.CHECKPOINTS: self._checkpoints(),
            FileKind.STAGED: self._staged(),
            FileKind.JOBS: self._job_folders(),
        }
        self._prune()
        return Garbage(
            self.garbage.table, group_files(removed), self.garbage.notes, self.garbage.jobs, self.garbage.version
        )

    def _remove(self, files: Iterable[FileEntry]) -> list[FileEntry]:
        removed = []
        for file in files:
            self.storage.delete(file.name)
            fault_point("cleanup.removed")
            removed.append(file)
        return removed

    def _look_around(self) -> ActiveJobs:
        # Jobs that were running at the time of the search, and newer ones, count as running.
        settled = self.garbage.jobs
        now = self.garbage.found + time.monotonic() - self._since
        jobs = read_active_jobs(self.location.checkpoints, now, lambda job: job not in settled)
        self.jobs = jobs.without_old(settled)
        return self.jobs

    def _began(self) -> bool:
        """Whether any job is running, or started since the search."""
        return self.jobs.any_open or bool(set(self.jobs.ended) - self.garbage.jobs)

    def _used(self, work_folder: str) -> bool:
        new = (job for name, job in self.jobs.ended.items() if name not in self.garbage.jobs)
        return self.jobs.use(work_folder) or any(may_use_folder(job, work_folder) for job in new)

    def _marks(self) -> list[FileEntry]:
        busy = {job.id for job in self.jobs.open}
        files = self.garbage.file_group(FileKind.MARKS).files
        return self._remove(f for f in files if f.name.rsplit("/", 1)[-1].removesuffix(".json") not in busy)

    def _snapshots(self) -> list[FileEntry]:
        keys = {
            key: file
            for file in self.garbage.file_group(FileKind.SNAPSHOTS).files
            if (key := snapshot_key(file.name.removeprefix("_checkpoints/")))
        }
        dataset = self.location.open()
        if not keys or dataset.version < self.garbage.version:
            return []
        self._look_around()
        try:
            named = named_snapshots(self.location, dataset, since=self.garbage.version)
        except LookupError:
            return []
        return self._remove(f for key, f in keys.items() if key not in named and not self.jobs.at(snapshot_job(key)))

    def _checkpoints(self) -> list[FileEntry]:
        files = self.garbage.file_group(FileKind.CHECKPOINTS).files
        removed: list[FileEntry] = []
        names: list[str] | None = None
        for at in range(0, len(files), _FILES_PER_CHECK):
            # Listing the job ids is cheaper than reading thousands of jobs.
            if names != (names := job_ids(self.location.checkpoints)):
                self._look_around()
            batch = files[at : at + _FILES_PER_CHECK]
            removed += self._remove(file for file in batch if not self._used(file.name.split("/")[1]))
        for folder in {file.name.split("/")[1] for file in removed}:
            self.storage.remove_empty_folders(f"_checkpoints/{folder}")
        return removed

    def _staged(self) -> list[FileEntry]:
        files = {file.name: file for file in self.garbage.file_group(FileKind.STAGED).files}
        self._look_around()
        owners = dict(self.garbage.owners)
        names = [name for name, folder in owners.items() if not (self._used(folder) if folder else self._began())]
        if not names:
            return []
        dataset = self.location.open()
        if dataset.version < self.garbage.version:
            return []
        try:
            loose = without_referenced(dataset, names, since=self.garbage.version)
        except LookupError:
            return []
        sidecars = tuple(sidecar_folder(name) for name in loose)
        beside = [file for name, file in files.items() if name.startswith(sidecars)]
        removed = self._remove([*beside, *(files[name] for name in sorted(loose))])
        for folder in sidecars:
            self.storage.remove_empty_folders(folder.rstrip("/"))
        return removed

    def _job_folders(self) -> list[FileEntry]:
        self._look_around()
        busy = {job.id for job in self.jobs.open} | self.jobs.unreadable
        folders: dict[str, list[FileEntry]] = {}
        for file in self.garbage.file_group(FileKind.JOBS).files:
            folders.setdefault(file.name.split("/")[2], []).append(file)
        removed: list[FileEntry] = []
        for name, files in folders.items():
            if name not in busy:
                # Remove the record last: after a kill the rest of the folder is still a job.
                removed += self._remove(sorted(files, key=lambda file: file.name.endswith("/job.json")))
                self.storage.remove_empty_folders(f"_checkpoints/jobs/{name}")
        return removed

    def _prune(self) -> None:
        """Fold the column states without facts about fragments that no version contains any more."""
        self._thin_snapshots()
        if not (fields := fields_with_state(self.location.checkpoints)):
            return
        versions = ExistingVersions.of(self.location.open())
        for field_id in fields:
            prune_state(self.location.checkpoints, field_id, versions.numbers, partial(versions.signatures, field_id))

    def _thin_snapshots(self) -> None:
        """Remove packed snapshots that no version references any more."""
        if not packed_snapshots(self.location.checkpoints):
            return
        with suppress(LookupError):
            prune_packed_snapshots(self.location.checkpoints, named_snapshots(self.location, self.location.open()))
