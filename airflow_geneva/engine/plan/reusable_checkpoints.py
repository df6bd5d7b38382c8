"""Find the checkpoints that a plan can reuse: staged data files, and checkpoints of other code versions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_geneva.engine.checkpoint.keys import key_part
from airflow_geneva.engine.checkpoint.provenance import rows_that
from airflow_geneva.engine.checkpoint.records import StagedFragment
from airflow_geneva.engine.checkpoint.reuse import CheckpointIndex, ReusableRows
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.fragments import FragmentFiles, output_ids, row_ids
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.lance_io.siblings import Output
from airflow_geneva.engine.lance_io.staged_files import StagedFiles
from airflow_geneva.engine.lance_io.table_key import RowNames, key_columns
from airflow_geneva.engine.plan.shard import FragmentTask, FragmentTasks
from airflow_geneva.engine.storage.files import AT_A_TIME, Storage, in_threads
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.plan.model import BackfillSpec, ColumnSpec, JobSpec, RefreshSpec


_Spec = TypeVar("_Spec", "BackfillSpec", "RefreshSpec")
_MOST_SHOWN = 5
_MOST_FILES = 8


def staged_fits(
    dataset: lance.LanceDataset,
    staged: StagedFragment,
    files: FragmentFiles,
    live: Ranges,
    due: Ranges,
    output_fields: tuple[int, ...],
    settled: Ranges,
    data: StagedFiles,
) -> bool:
    """Whether a commit may replace a fragment's column with a staged file; its `settled` rows are done."""
    if staged.output_field_ids != output_fields or staged.output_files != files.output:
        return False
    if staged.physical_rows != files.physical_rows or not settled.contains(due):
        return False
    if staged.deletion != files.deletion and not staged.live.contains(live):
        return False
    return is_staged_complete(dataset, staged, data)


def is_staged_complete(dataset: lance.LanceDataset, staged: StagedFragment, data: StagedFiles) -> bool:
    """Whether the data file exists, is readable, and has the expected number of rows, or none is needed."""
    if staged.leaves_unchanged:
        return True
    return data.count_rows(dataset, staged.file, staged.physical_rows, staged.size_bytes) == staged.physical_rows


@dataclass(frozen=True)
class Reusable(ABC):
    """The reusable checkpoints of a column or a view, whose rows are computed from `source`."""

    source: lance.LanceDataset
    spec: JobSpec
    data: StagedFiles = field(default_factory=StagedFiles, kw_only=True, compare=False)

    @property
    def names(self) -> RowNames:
        """The keys of the source's rows."""
        return RowNames(self.source, key_columns(self.source.schema))

    @abstractmethod
    def staged(self, fragment: FragmentTask, index: CheckpointIndex, live: Ranges) -> StagedFragment | None:
        """Return the fragment's staged data file if it can be made visible as it is."""

    @abstractmethod
    def has_single_rows(self, staged: StagedFragment) -> bool:
        """Whether the values of single rows can be read from a staged data file."""

    def held(self, fragment: FragmentTask, index: CheckpointIndex, wanted: Ranges) -> ReusableRows:
        """Return the fragment's computed rows in the store."""
        ids, tried = partial(row_ids, self.source, fragment.id), self.spec.tried(fragment)
        return index.held(fragment.place, fragment.ancestors, wanted, ids, self.has_single_rows, tried)

    def look_up(self, fragment: FragmentTask, index: CheckpointIndex, live: Ranges) -> FragmentTask:
        """Return the fragment; its `missing` rows are the due rows that the store does not have."""
        if not fragment.ancestors and fragment.place not in index:
            return fragment
        staged = self.staged(fragment, index, live)
        done = fragment.due if staged else self.held(fragment, index, fragment.due).done
        return replace(fragment, missing=fragment.due - done, staged=staged is not None)

    def look_up_all(
        self, fragments: Iterable[tuple[FragmentTask, Ranges]], index: CheckpointIndex
    ) -> list[FragmentTask]:  # fmt: skip
        """Call `look_up` for fragments, which are given with their live rows."""
        threads = 1 if index.store.storage.local else AT_A_TIME
        return in_threads(lambda one: self.look_up(one[0], index, one[1]), fragments, threads)


@dataclass(frozen=True)
class ReusableColumn(Reusable):
    spec: ColumnSpec

    @cached_property
    def output(self) -> Output:
        """The columns at the version that is read."""
        return self.spec.output_at(self.source)

    @cached_property
    def output_ids(self) -> tuple[int, ...]:
        return output_ids(self.source, self.output)

    def staged(self, fragment: FragmentTask, index: CheckpointIndex, live: Ranges) -> StagedFragment | None:
        staged = index.staged_at(fragment.place)
        if staged is None:
            return None
        settled = index.reuse_rules.done_rows(staged, self.spec.tried(fragment))
        due = fragment.due & live
        fits = staged_fits(self.source, staged, fragment.files, live, due, self.output_ids, settled, self.data)
        return staged if fits else None

    def has_single_rows(self, staged: StagedFragment) -> bool:
        # A data file alone holds only references to blobs. A file with a column that was dropped since is not read.
        blobs = is_blob(self.source.schema.field(self.spec.column))
        others = bool(self.output.fields) and staged.output_field_ids != self.output_ids
        return not (blobs or others or staged.leaves_unchanged) and is_staged_complete(self.source, staged, self.data)


@dataclass(frozen=True)
class ReusableView(Reusable):
    spec: RefreshSpec
    view: lance.LanceDataset

    @property
    def names(self) -> RowNames:
        return RowNames(self.source, self.spec.definition.key_in_source(self.view.schema, self.source.schema))

    def staged(self, fragment: FragmentTask, index: CheckpointIndex, live: Ranges) -> StagedFragment | None:
        staged = index.staged_at(fragment.place)
        if staged is None or staged.computed != fragment.due:
            return None
        done = index.reuse_rules.done_rows(staged, self.spec.tried(fragment)).contains(fragment.due)
        return staged if done and self._is_complete(staged) else None

    def has_single_rows(self, staged: StagedFragment) -> bool:
        # A data file alone holds only references to blobs.
        blobs = not self.spec.plain_blobs and any(is_blob(field) for field in self.view.schema)
        return not blobs and self._is_complete(staged)

    def _is_complete(self, staged: StagedFragment) -> bool:
        return staged.dense and is_staged_complete(self.view, staged, self.data)


def look_beside(checkpoints: Storage, spec: _Spec, *looks: Callable[[], Any]) -> tuple[list[Any], _Spec]:
    """Run lookups for a job that has work to do, and read the stamps of the planned versions at the same time.

    Return the results of the lookups, and the work with the stamps.
    """
    stamps = (partial(table.stamped, checkpoints.options) for table in spec.tables)
    found = checkpoints.side_by_side(*looks, *stamps)
    return found[: len(looks)], replace(spec, tables=tuple(found[len(looks) :]))


def check_continue_from(checkpoints: Storage, spec: BackfillSpec) -> None:
    """Refuse versions without a recorded job, and those whose values must not be mixed with the current version's."""
    if not spec.continue_from:
        return
    jobs = list(_jobs_of(checkpoints, spec.column))
    for version in spec.continue_from:
        then = [job for job in jobs if job.get("udf_version") == version]
        if version == spec.udf_version or not then:
            why = "that is the current version" if version == spec.udf_version else "no job of that version is recorded"
            found = ", ".join(sorted({str(job.get("udf_version")) for job in jobs} - {spec.udf_version})) or "none"
            raise InvalidInput(
                f"continue_from={version!r}: {why}. Other versions that worked on column {spec.column!r} of table "
                f"{spec.table_name!r}: {found}."
            )
        differences = [_differences(job, spec) for job in then]
        if all(differences):
            raise InvalidInput(
                f"continue_from={version!r}: values of that version cannot be mixed with those of version "
                f"{spec.udf_version}: {'; '.join(differences[0])}. Leave continue_from out to compute the rows again."
            )


def _jobs_of(checkpoints: Storage, column: str) -> Iterator[dict[str, Any]]:
    """Yield the job records of a column, newest first."""
    names, _ = checkpoints.list_folder("jobs")
    for name in reversed(names):
        job = checkpoints.folder("jobs", name).read_document("job.json")
        if job is not None and column in (job.get("column"), *job.get("siblings", ())):
            yield job


def _differences(job: dict[str, Any], spec: BackfillSpec) -> list[str]:
    then: list[tuple[str, Any, Any]] = [
        ("name", job.get("udf"), spec.udf_name),
        ("inputs", job.get("inputs"), list(spec.inputs)),
        ("where", job.get("where"), spec.where),
    ]
    found = [f"its {what} was {before!r} and is {now!r}" for what, before, now in then if before != now]
    if job.get("agreement") != spec.agreement:
        found.append("its output type or its declared deps were different")
    return found


def continue_from_savings(
    dataset: lance.LanceDataset,
    store: CheckpointStore,
    spec: BackfillSpec,
    fragments: Sequence[FragmentTask],
    versions: Sequence[str],
) -> Iterator[str]:
    """Yield a sentence for each of `versions` (from `other_versions`) that has checkpoints of rows that would run."""
    if not versions:
        return
    open_rows = {
        f.place: (f, f.missing - rows_that(f.known, lambda p: not p.failures)) for f in fragments if not f.staged
    }
    for version in versions:
        reuse_rules = replace(spec, continue_from=(version,)).reuse_rules
        index = CheckpointIndex(store, replace(reuse_rules, prefixes=reuse_rules.prefixes[1:]))
        rows = 0
        for place in index.places() & set(open_rows):
            fragment, wanted = open_rows[place]
            alone = replace(fragment, ancestors=(), kept=())
            rows += len(ReusableColumn(dataset, spec).held(alone, index, wanted).computed)
        if rows:
            named = _named(store, spec.column, version)
            saved = counted(rows, "row")
            yield f'checkpointed by UDF version {named}: {saved}, which continue_from="{named}" would save.'


def other_versions(store: CheckpointStore, spec: BackfillSpec) -> list[str]:
    """Return the versions of a UDF that have checkpoints, without those that the job already uses."""
    if spec.ignore_checkpoints:
        return []
    head, tail = f"udf-{key_part(spec.udf_name)}_ver-", f"_col-{key_part(spec.key_column)}"
    folders, _ = store.storage.list_folder()
    named = [name for name in folders if name.startswith(head) and name.endswith(tail)]
    found = [name[len(head) : len(name) - len(tail)] for name in named]
    known = {key_part(version) for version in (spec.udf_version, *spec.continue_from)}
    return [version for version in found if version not in known]


def _named(store: CheckpointStore, column: str, part: str) -> str:
    """Return the UDF version that is encoded in a part of a folder's name."""
    versions = (str(job.get("udf_version")) for job in _jobs_of(store.storage, column))
    return next((version for version in versions if key_part(version) == part), part)


@dataclass(frozen=True)
class Mismatch:
    """A fragment checkpoint that was computed from other data files than the fragment has now.

    Both lists leave out the files in common; `found` is None if the checkpoint cannot be read.
    """

    fragment: int
    expected: tuple[str, ...]
    found: tuple[str, ...] | None

    def __str__(self) -> str:
        return f"fragment {self.fragment}: {self._difference()}"

    def _difference(self) -> str:
        if self.found is None:
            return f"expected {_listed(self.expected)}, found a checkpoint that cannot be read"
        if self.expected and self.found:
            return f"expected {_listed(self.expected)}, found {_listed(self.found)}"
        if self.expected:
            return f"expected {_listed(self.expected)} as well"
        if self.found:
            return f"found {_listed(self.found)}, which the fragment no longer has"
        return "expected other columns in the same data files"


@dataclass(frozen=True)
class Mismatches:
    """The mismatches of a plan: the first few, and the number of the others."""

    shown: tuple[Mismatch, ...] = ()
    more: int = 0


def find_mismatches(index: CheckpointIndex | None, tasks: FragmentTasks) -> Mismatches:
    """Find the planned fragments that have a checkpoint only for other data files; read the first few checkpoints."""
    if index is None:
        return Mismatches()
    by_id = {task.id: task for task in tasks.with_ids(fragment for _, fragment in index.places())}
    stale: dict[int, tuple[str, int]] = {}
    for place in index.places():
        task = by_id.get(place[1])
        followed = () if task is None else (task.place, *(ancestor.place for ancestor in task.ancestors))
        if task is not None and place not in followed and index.is_staged(place):
            stale[task.id] = max(place, stale.get(task.id, place))
    numbers = sorted(number for number in stale if not index.is_staged(by_id[number].place))
    shown: list[Mismatch] = []
    for number in numbers[:_MOST_SHOWN]:
        staged = index.staged_at(stale[number])
        now, then = set(by_id[number].files.source_paths()), set(staged.src_data_files if staged else ())
        found = tuple(sorted(then - now)) if staged else None
        shown.append(Mismatch(number, tuple(sorted(now - then)), found))
    return Mismatches(tuple(shown), len(numbers) - len(shown))


def _listed(paths: tuple[str, ...]) -> str:
    rest = len(paths) - _MOST_FILES
    return f"[{', '.join(paths[:_MOST_FILES])}{f' and {rest} more' if rest > 0 else ''}]"
