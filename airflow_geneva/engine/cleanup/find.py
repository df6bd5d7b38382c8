"""Find the files beside a table that are not needed any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta

from airflow_geneva.engine.checkpoint.facts import covered_documents, is_fold
from airflow_geneva.engine.checkpoint.keys import parse_key, path_to_key
from airflow_geneva.engine.checkpoint.packs import keys_of_pack
from airflow_geneva.engine.checkpoint.submissions import FOLDER as BATCHES
from airflow_geneva.engine.checkpoint.value_cache import FOLDER as VALUE_CACHE, MOST_AGE
from airflow_geneva.engine.checkpoint.view_snapshot import snapshot_job, snapshot_key
from airflow_geneva.engine.choices import parse_age
from airflow_geneva.engine.cleanup.garbage import DEFAULT_TTL, FileKind, Garbage, group_files
from airflow_geneva.engine.cleanup.in_use import (
    CheckpointPlace,
    is_named_like_ours,
    may_be_staged,
    may_use_folder,
    named_snapshots,
    planned_places,
    read_active_jobs,
    read_referenced,
    sidecar_folder,
    without_referenced,
)
from airflow_geneva.engine.job.heartbeat import WAITING_TIMEOUT
from airflow_geneva.engine.job.outbox import find_commits, read_outbox
from airflow_geneva.engine.runtime import time, uuid
from airflow_geneva.engine.storage.files import FileEntry, Storage
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.errors import StorageError

# Within this time, a job has written its record, and a reader has read the documents that it listed.
_SETTLE_SECONDS = timedelta(minutes=10).total_seconds()
# Data files that no checkpoint names may belong to another writer that is about to commit.
_FOREIGN_MIN_AGE = timedelta(days=1).total_seconds()


def find_garbage(location: TableLocation, ttl: timedelta | str = DEFAULT_TTL, now: float | None = None) -> Garbage:
    """Find what could be removed; changes nothing.

    Args:
        location: the table.
        ttl: minimum age of what may be removed, such as ``7d``.
        now: the current time in seconds since the epoch; by default the store's clock, which also dates the files,
            because this machine's clock may differ.

    Raises:
        InvalidInput: the table does not exist, or the TTL is not valid.
        StorageError: the files or jobs cannot be listed.
    """
    return _Search(location, ttl, now).garbage()


class _Search:
    def __init__(self, location: TableLocation, ttl: timedelta | str, now: float | None) -> None:
        seconds = parse_age("ttl", ttl).total_seconds()
        self.location = location
        self.dataset = location.open()
        self.checkpoints = location.checkpoints
        # List the files first: they do not include files of jobs that start later.
        files, clock = _list_with_clock(Storage(location.uri, location.options))
        self.now = clock if now is None else now
        self.cutoff = self.now - seconds
        self.files = {parts: file for file in files if (parts := tuple(file.name.split("/")))[0] in _OURS}
        self.folders = self._job_folders()
        untouched = [name for name, inside in self.folders.items() if _newest(inside) < self.cutoff]
        self.jobs = read_active_jobs(location.checkpoints, self.now, self._is_touched).without_old(untouched)
        self.old_jobs = self._old_jobs(untouched)
        self.table = location.name
        self.notes: list[str] = []
        self.owners: dict[str, str] = {}

    def garbage(self) -> Garbage:
        checkpoints = self._checkpoints()
        found: dict[FileKind, Iterable[FileEntry]] = {
            FileKind.CHECKPOINTS: checkpoints,
            FileKind.STAGED: self._staged({file.name for file in checkpoints}),
            FileKind.JOBS: [file for name in self.old_jobs for file in self.folders[name]],
            FileKind.TEMPORARY: self._temporary(),
            FileKind.MARKS: self._marks(),
            FileKind.LEDGERS: self._ledgers(),
            FileKind.SNAPSHOTS: self._snapshots(),
            FileKind.VALUES: self._values(),
        }
        if self.jobs.unreadable:
            self.notes.append(
                f"the record of job {min(self.jobs.unreadable)!r} is damaged, so checkpoints and data files are kept "
                "until its folder is older than the TTL."
            )
        return Garbage(
            self.table,
            group_files(found),
            tuple(self.notes),
            frozenset(self.jobs.ended) | self.jobs.bare,
            int(self.dataset.version),
            tuple(sorted(self.owners.items())),
            self.now,
        )

    def _is_touched(self, job: str) -> bool:
        """Whether a job's folder changed recently by the store's clock, so that the job may be running."""
        return job not in self.folders or self.now - _newest(self.folders[job]) <= WAITING_TIMEOUT

    def _below(self, *start: str) -> dict[tuple[str, ...], FileEntry]:
        """Return the finished files below a path, by the rest of their path."""
        cut = len(start)
        return {
            parts[cut:]: file
            for parts, file in self.files.items()
            if parts[:cut] == start and len(parts) > cut and not file.half_written
        }

    def _job_folders(self) -> dict[str, list[FileEntry]]:
        found: dict[str, list[FileEntry]] = {}
        for parts, file in self.files.items():
            if parts[:2] == ("_checkpoints", "jobs") and len(parts) > 3:
                found.setdefault(parts[2], []).append(file)
        return found

    def _old_jobs(self, untouched: list[str]) -> list[str]:
        """Return the job folders to remove."""
        settled = self.now - _SETTLE_SECONDS
        return sorted(
            name
            for name in untouched
            if name in self.jobs.ended or (name in self.jobs.bare and _newest(self.folders[name]) < settled)
        )

    def _checkpoints(self) -> list[FileEntry]:
        """Return checkpoints of fragments that no job wrote, planned or used within the TTL."""
        groups: dict[str, list[FileEntry]] = {}
        for parts, file in self._below("_checkpoints").items():
            if parts[0].startswith("udf-") and len(parts) > 1 and not self.jobs.use(parts[0]):
                key = parse_key(path_to_key("/".join(parts)))
                group = str(key.fragment) if key else file.name
                groups.setdefault(group, []).append(file)
        old = {group for group, files in groups.items() if _newest(files) < self.cutoff}
        places = {group: self._places(groups[group][0]) for group in old}
        prefixes = {place[0] for found in places.values() for place in found}
        planned: set[CheckpointPlace] = set()
        unclear: set[str] = set()
        for name, job in self.jobs.ended.items() if old else ():
            if name in self.old_jobs:
                continue
            plans = [p for file in self.folders.get(name, ()) if (p := file.name.split("/")[-1]).startswith("plan-")]
            found = planned_places(self.checkpoints.folder("jobs", name), plans, prefixes)
            if found is None:
                unclear.add(name)
                old -= {group for group in old if may_use_folder(job, _folder(groups[group]))}
            else:
                planned |= found
        if unclear:
            self.notes.append(f"the plan of job {min(unclear)!r} cannot be read, so its column's checkpoints are kept.")
        return [file for group in old if planned.isdisjoint(places[group]) for file in groups[group]]

    def _places(self, file: FileEntry) -> set[CheckpointPlace]:
        """Return the places (fragments) of a checkpoint; a pack has several."""
        path = file.name.removeprefix("_checkpoints/")
        keys = [parse_key(key) for key in keys_of_pack(self.checkpoints, path) or [path_to_key(path)]]
        return {(key.fragment.prefix, key.fragment.srcfiles, key.fragment.fragment) for key in keys if key}

    def _staged(self, going: set[str]) -> list[FileEntry]:
        """Return unreferenced staged data files, with their external blobs."""
        data = {f"data/{'/'.join(parts)}": file for parts, file in self._below("data").items()}
        names = {name for name, file in data.items() if file.modified < self.cutoff and may_be_staged(name)}
        try:
            loose = without_referenced(self.dataset, names)
        except LookupError as error:
            self.notes.append(f"a version or branch of the table cannot be read, so data files are kept: {error}.")
            return []
        if not loose:
            return []
        fragments: list[tuple[str, str]] = []
        for parts, file in self._below("_checkpoints").items():
            path = "/".join(parts)
            for key in keys_of_pack(self.checkpoints, path) or [path_to_key(path)]:
                if (parsed := parse_key(key)) is not None and parsed.range is None:
                    fragments.append((file.name, key))
        kept = read_referenced(self.checkpoints, (key for name, key in fragments if name not in going))
        gone = read_referenced(self.checkpoints, (key for name, key in fragments if name in going))
        self.owners = {name: folder for name, folder in gone.folders.items() if name in loose - kept.folders.keys()}
        if kept.complete and not self.jobs.any_open:
            strange = {name for name in loose if is_named_like_ours(name) and name not in gone.folders}
            strange -= kept.folders.keys()
            self.owners |= {name: "" for name in strange if data[name].modified < self.now - _FOREIGN_MIN_AGE}
        sidecars = tuple(sidecar_folder(name) for name in self.owners)
        return [file for name, file in data.items() if name in self.owners or name.startswith(sidecars)]

    def _temporary(self) -> list[FileEntry]:
        """Return temporary files that no process is writing any more."""
        began = [
            min(file.modified for file in self.folders[job.id]) for job in self.jobs.open if job.id in self.folders
        ]
        if self.jobs.unreadable or len(began) < len(self.jobs.open):
            return []
        before = min([self.cutoff, *began])
        old = []
        for parts, file in self.files.items():
            min_age = _FOREIGN_MIN_AGE if parts[0] == "data" else _SETTLE_SECONDS
            of_old_job = parts[:2] == ("_checkpoints", "jobs") and len(parts) > 3 and parts[2] in self.old_jobs
            if file.half_written and not of_old_job and file.modified < min(before, self.now - min_age):
                old.append(file)
        return old

    def _marks(self) -> list[FileEntry]:
        """Return announcement marks of jobs that ended without a commit."""
        going = []
        for outbox, files in _by_folder(self._below("_checkpoints", "outbox")).items():
            old = {
                job: file
                for name, file in files.items()
                if file.modified < self.cutoff and self._has_no_commits(job := name.removesuffix(".json"))
            }
            marks = read_outbox(self.checkpoints, outbox) if old else []
            since = [mark.since for mark in marks if mark.job_id in old]
            if since:
                committed = set(find_commits(self.dataset, min(since), old).values())
                going += [file for job, file in old.items() if job not in committed]
        return going

    def _has_no_commits(self, job_id: str) -> bool:
        job = self.jobs.ended.get(job_id)
        return not job.commits if job is not None else job_id not in self.folders

    def _ledgers(self) -> list[FileEntry]:
        going = []
        settled = min(self.cutoff, self.now - _SETTLE_SECONDS)
        for folder, files in _by_folder(self._below("_checkpoints", "state")).items():
            if not (number := folder.removeprefix("field-")).isdecimal():
                continue
            keys = {path_to_key(name): file for name, file in files.items()}
            folds = sorted(
                (key for key, file in keys.items() if is_fold(key) and file.modified < settled),
                key=lambda key: -keys[key].modified,
            )
            covered = covered_documents(self.checkpoints, int(number), folds) if folds else set()
            going += [keys[key] for key in covered if key in keys and keys[key].modified < self.cutoff]
        return going

    def _snapshots(self) -> list[FileEntry]:
        """Return snapshots of a view that no version references."""
        settled = min(self.cutoff, self.now - _SETTLE_SECONDS)
        old = {
            key: file
            for parts, file in self._below("_checkpoints").items()
            if file.modified < settled
            and (key := snapshot_key("/".join(parts)))
            and not self.jobs.at(snapshot_job(key))
        }
        try:
            named = named_snapshots(self.location, self.dataset) if old else set()
        except LookupError as error:
            self.notes.append(f"a version of the view cannot be read, so its snapshots are kept: {error}.")
            return []
        return [file for key, file in old.items() if key not in named]

    def _values(self) -> list[FileEntry]:
        """Return expired files of the value cache, and expired records of submitted batches."""
        old, folders = min(self.cutoff, self.now - MOST_AGE), (VALUE_CACHE, BATCHES)
        files = (file for folder in folders for file in self._below("_checkpoints", folder).values())
        return [file for file in files if file.modified < old]


_OURS = ("_checkpoints", "data")


def _list_with_clock(storage: Storage) -> tuple[list[FileEntry], float]:
    """List all files of a table, and get the current time of the store's clock."""
    probe = f"data/.tmp-clock-{uuid.uuid4().hex}"  # after a kill, a cleanup removes it as a temporary file
    try:
        storage.write_bytes(probe, b"{}")
        files = storage.list_entries(half_written=True)
    except StorageError:
        # A store that is not writable cannot remove files either.
        return storage.list_entries(half_written=True), time.time()
    finally:
        with suppress(StorageError):
            storage.delete(probe)
    clock = next((file.modified for file in files if file.name == probe), time.time())
    return [file for file in files if file.name != probe], clock


def _newest(files: Iterable[FileEntry]) -> float:
    return max(file.modified for file in files)


def _folder(files: list[FileEntry]) -> str:
    return files[0].name.split("/")[1]


def _by_folder(files: Mapping[tuple[str, ...], FileEntry]) -> dict[str, dict[str, FileEntry]]:
    """Return the files directly in folders, by folder and name."""
    found: dict[str, dict[str, FileEntry]] = {}
    for parts, file in files.items():
        if len(parts) == 2:
            found.setdefault(parts[0], {})[parts[1]] = file
    return found
