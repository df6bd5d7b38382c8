"""A column's state: which rows hold values of which UDF version, as facts about immutable data files.

A fact says "in a fragment made of exactly these input and output files, these physical rows hold the value of this UDF
version". Data files never change, so a fact never becomes wrong: it only stops matching. A job therefore writes its
ledger of facts before it commits. The state is the union of all ledgers, and a job that died needs no recovery.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.checkpoint.provenance import MOST_RUNS, Provenance, add_rows, newest_failures
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.arrays import single_batch
from airflow_geneva.engine.lance_io.row_ranges import Ranges, to_lists
from airflow_geneva.engine.runtime import time, uuid
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.files import Storage, in_threads

if TYPE_CHECKING:
    from airflow_geneva.engine.lance_io.fragments import FragmentFiles

_FOLD_AFTER = 16
_OF_A_JOB = 3
"""The number of ledgers that a job writes: facts from its plan, facts of a commit, and the marker at its end."""
_FOLD = "ledger._compacted-"
"""Prefix of the keys of folds (combined ledgers); no job id begins with an underscore."""
_SEEN_KEPT = 8
_WORTH_IT = 0.25
Present = Callable[[set[str]], Collection[str] | None]
"""Takes the inputs that facts name; returns all signatures in versions that exist or may return."""


@dataclass(frozen=True)
class Fact:
    """A statement about every fragment with a given signature.

    Args:
        signature: hash of the relevant data files, see :mod:`airflow_geneva.engine.lance_io.fragments`.
        kind: text of a :class:`Provenance`; or ``where:<md5>:<udf version>`` for rows on which a job evaluated a
            filter: it computed those that the filter selected.
        rows: physical offsets; None: all physical rows.
        at: table version at which the fact was recorded.
        live_under: identity of a deletion file under which ``rows`` holds every live row, so that a plan need not
            read the deletion file; None if unknown.
        inputs: field ids of the inputs from which the value was computed, as text; "" if they are irrelevant.
    """

    signature: str
    kind: str
    rows: Ranges | None
    at: int
    live_under: str | None = None
    inputs: str = ""

    def covers(self, deletion: str) -> bool:
        """Whether the fact covers every live row of a fragment with the given deletion file."""
        return self.rows is None or self.live_under == deletion


def filter_evaluated(where_hash: str, version: str) -> str:
    return f"where:{where_hash}:{version}"


SEEN = "seen"
"""Text of a fact that marks a table version at which the facts were complete; plans compare rows by value with it."""


STALE = "stale"
"""Text of a fact about rows that hold values of a job although their inputs changed, which no history shows."""


_DEFINED = "defined"
"""Text of a fact that marks the table version whose successor defined the column; facts up to it, and what is seen at
such versions, are about a dropped column that had the same field id."""


_OPEN = "open:"
"""Begins the text of a fact in a fold that names an open job, with the newest version of its facts."""


_MOST_OPEN = 1_000
_MOVED = "moved"


def seen(version: int, moved: bool = False) -> Fact:
    """Make the fact that marks a table version as one with which plans may compare rows.

    Args:
        moved: others moved rows before it, and no plan has looked where to.
    """
    return Fact("", SEEN, None, version, _MOVED if moved else None)


def _defined(version: int) -> Fact:
    return Fact("", _DEFINED, None, version)


_SCHEMA = pa.schema(
    [
        pa.field("signature", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("rows", pa.list_(pa.uint32())),
        pa.field("at", pa.int64()),
        pa.field("live_under", pa.string()),
        pa.field("inputs", pa.string()),
    ]
)


class Facts(Mapping[str, list[Fact]]):
    """Facts by signature, stored as Arrow data: there may be a million, and objects are created on access only."""

    def __init__(self, table: pa.Table | None = None) -> None:
        self.table = _SCHEMA.empty_table() if table is None else table

    @staticmethod
    def of(facts: Sequence[Fact]) -> Facts:
        return Facts(pa.Table.from_batches([_batch(facts, {})]))

    def __bool__(self) -> bool:
        return len(self.table) > 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, signature: object) -> bool:
        return bool(self) and signature in self._rows

    def __getitem__(self, signature: str) -> list[Fact]:
        return [self._fact(signature, at) for at in self._rows[signature]]

    def _fact(self, signature: str, at: int) -> Fact:
        kind, version, live_under, inputs = (
            self.table[name][at].as_py() for name in ("kind", "at", "live_under", "inputs")
        )
        rows = self.table["rows"][at]
        bounds = rows.values.to_numpy().astype(np.int64) if rows.is_valid else None
        ranges = None if bounds is None else Ranges.from_bounds(bounds[0::2], bounds[1::2])
        return Fact(signature, kind, ranges, version, live_under, inputs)

    @cached_property
    def _rows(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for at, signature in enumerate(self.table["signature"].to_pylist()):
            found.setdefault(signature, []).append(at)
        return found

    def until(self, version: int) -> Facts:
        """Return the facts that were recorded up to a version."""
        return Facts(self.table.filter(pc.less_equal(self.table["at"], version)))

    def about(self, inputs: str) -> Facts:
        """Return the facts about values that were computed from the given inputs."""
        return Facts(self.table.filter(pc.is_in(self.table["inputs"], pa.array(["", inputs]))))

    def cover(
        self, kinds: Sequence[str], signatures: pa.StringArray, deletions: pa.StringArray
    ) -> npt.NDArray[np.bool_]:
        """Return for each of many fragments whether a fact with one of the texts covers all of its live rows."""
        said = self.table.filter(pc.is_in(self.table["kind"], pa.array(kinds, pa.string())))
        whole, part = said.filter(pc.is_null(said["rows"])), said.filter(pc.is_valid(said["live_under"]))
        covered = pc.is_in(signatures, whole["signature"])
        if part.num_rows:
            under = pc.binary_join_element_wise(part["signature"], part["live_under"], " ")
            covered = pc.or_(covered, pc.is_in(pc.binary_join_element_wise(signatures, deletions, " "), under))
        found: npt.NDArray[np.bool_] = covered.to_numpy(zero_copy_only=False)
        return found

    def know(self, signatures: pa.StringArray) -> npt.NDArray[np.bool_]:
        """Return for each of many fragments whether any fact is about it."""
        found: npt.NDArray[np.bool_] = pc.is_in(signatures, self.table["signature"]).to_numpy(zero_copy_only=False)
        return found

    def say(self, kind: str, signatures: pa.StringArray) -> npt.NDArray[np.bool_]:
        """Return for each of many fragments whether a fact with this text is about it."""
        said = self.table["signature"].filter(pc.equal(self.table["kind"], kind))
        found: npt.NDArray[np.bool_] = pc.is_in(signatures, said).to_numpy(zero_copy_only=False)
        return found

    def oldest_apart_from(self, signatures: pa.StringArray) -> int | None:
        """Return the oldest version at which a fact about other fragments was recorded."""
        others = pc.invert(pc.is_in(self.table["signature"], signatures))
        oldest: int | None = pc.min(self.table["at"].filter(others)).as_py()
        return oldest


@dataclass
class ColumnState:
    """All facts about one column, by signature.

    Args:
        seen: versions at which the facts were complete.
        moved: those of them at which rows that others had moved may hold a value of a job without a fact.
        open_jobs: jobs that may have committed but have not finished, so that they recorded no complete version, with
            the newest version of their facts.
        defined: facts up to this version are about a dropped column that had the same field id. They match its files
            only, which a restore brings back.
    """

    facts: Facts = field(default_factory=Facts)
    ledgers: list[str] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    moved: set[int] = field(default_factory=set)
    folded: set[str] = field(default_factory=set)
    open_jobs: dict[str, int] = field(default_factory=dict)
    defined: int = 0

    @cached_property
    def holds_values(self) -> bool:
        """Whether a job recorded anything about values of this column."""
        newest: int = pc.max(self.facts.table["at"]).as_py() or 0
        return newest > self.defined

    def at_files(self, files: Iterable[FragmentFiles]) -> ColumnState:
        """Return the state for a version with these files: of its column, or of a dropped one that a restore returned.

        Facts up to `defined` that match a file show that the dropped column is back.
        """
        if not self.defined:
            return self
        known = (fact for one in files if one.output for fact in self.facts.get(one.signature, ()))
        if any(fact.at <= self.defined for fact in known):
            return replace(self, defined=0)
        return replace(self, seen=[version for version in self.seen if version > self.defined])

    def known(self, signature: str, physical_rows: int) -> dict[Provenance, Ranges]:
        """Return the rows of a fragment on which a UDF ran, by provenance (UDF version and failed runs)."""
        found: dict[Provenance, Ranges] = {}
        for fact in self.facts.get(signature, ()):
            provenance = Provenance.of(fact.kind)
            if provenance is not None:
                add_rows(found, [(provenance, Ranges.of(0, physical_rows) if fact.rows is None else fact.rows)])
        return newest_failures(found)

    def shared_provenance(self, signature: str, deletion: str, physical_rows: int) -> frozenset[Provenance]:
        """Return the provenance that all live rows of a fragment share; empty if they differ."""
        every, some = set[Provenance](), set[Provenance]()
        for fact in self.facts.get(signature, ()):
            provenance = Provenance.of(fact.kind)
            if provenance is not None and (fact.rows is None or fact.rows):
                whole = fact.covers(deletion) or (fact.rows is not None and len(fact.rows) == physical_rows)
                (every if whole else some).add(provenance)
        return frozenset() if some - every else frozenset(every)

    def about(self, inputs: str) -> ColumnState:
        """Return the state with only the facts about values that were computed from the given inputs."""
        return replace(self, facts=self.facts.about(inputs)) if self.other_inputs(inputs) else self

    def stale(self, signature: str, physical_rows: int) -> Ranges:
        """Return the rows of a fragment that hold values of a job whose inputs changed."""
        rows = [fact.rows for fact in self.facts.get(signature, ()) if fact.kind == STALE]
        return Ranges.union(Ranges.of(0, physical_rows) if some is None else some for some in rows)

    def given_up(self, signature: str, version: str) -> Ranges:
        """Return the rows of a fragment that failed in the maximum number of runs, deleted rows included."""
        wanted = Provenance(version, failures=MOST_RUNS).kind
        rows = [fact.rows for fact in self.facts.get(signature, ()) if fact.kind == wanted and fact.rows is not None]
        return Ranges.union(rows)

    def other_inputs(self, inputs: str) -> set[str]:
        """Return the inputs of facts about values that were computed from other inputs than the given ones."""
        return set(self.facts.table["inputs"].unique().to_pylist()) - {"", inputs}

    def filter_evaluated(self, signature: str, where_hash: str, version: str, physical_rows: int) -> Ranges:
        """Return the rows of a fragment for which a job evaluated a filter."""
        wanted = filter_evaluated(where_hash, version)
        found = Ranges.empty()
        for fact in self.facts.get(signature, ()):
            if fact.kind == wanted:
                found = found | (Ranges.of(0, physical_rows) if fact.rows is None else fact.rows)
        return found

    def failed_too_often(self, version: str) -> pa.ChunkedArray:
        """Return the signatures of fragments with rows that failed in the maximum number of runs."""
        said = pc.equal(self.facts.table["kind"], Provenance(version, failures=MOST_RUNS).kind)
        return self.facts.table["signature"].filter(said)

    def of_all_rows(self, signature: str, deletion: str) -> list[Provenance]:
        """Return the provenances in facts that cover all live rows of a fragment."""
        whole = [fact.kind for fact in self.facts.get(signature, ()) if fact.covers(deletion)]
        return [provenance for kind in whole if (provenance := Provenance.of(kind)) is not None]


def state_store(checkpoints: Storage, field_id: int) -> CheckpointStore:
    """Open the store of one column's ledgers, below ``_checkpoints``."""
    return CheckpointStore(checkpoints.folder("state", f"field-{field_id}"))


def fields_with_state(checkpoints: Storage) -> set[int]:
    """Return the numbers of the outputs that have ledgers."""
    folders = checkpoints.list_folder("state")[0]
    return {int(number) for name in folders if (number := name.removeprefix("field-")).isdecimal()}


def load_state(checkpoints: Storage, field_id: int) -> ColumnState:
    """Read and combine all ledgers of a column; damaged ones count as absent, so that rows are computed again."""
    store = state_store(checkpoints, field_id)
    keys = set(store.list_keys())
    while True:
        read: dict[str, pa.Table] = {}
        covered: set[str] = set()
        missed: set[str] = set()
        for group in _by_age(keys):
            group = [key for key in group if key not in covered]
            for key, found in zip(group, in_threads(partial(_read_ledger, store), group), strict=True):
                if found is None:
                    missed.add(key)
                else:
                    read[key], covers = found
                    covered |= covers
        # A ledger that another job folded and removed after the listing is in a newer fold: list and read again.
        if missed <= (now := set(store.list_keys()) if missed else set()):
            break
        keys = now
    state = ColumnState(ledgers=[key for key in read if key not in covered], folded=covered & keys)
    announced, marked, looked_at = dict[str, int](), dict[str, int](), set[int]()
    for key in state.ledgers:
        ledger = read[key]
        said = ledger.filter(pc.equal(ledger["kind"], SEEN))
        marks = said["at"].to_pylist()
        state.seen += marks
        looked_at.update(said["at"].filter(pc.is_null(said["live_under"])).to_pylist())
        defined = ledger["at"].filter(pc.equal(ledger["kind"], _DEFINED)).to_pylist()
        state.defined = max([state.defined, *defined])
        if is_fold(key):
            opened = ledger.filter(pc.starts_with(ledger["kind"], _OPEN))
            for kind, at in zip(opened["kind"].to_pylist(), opened["at"].to_pylist(), strict=True):
                job = kind.removeprefix(_OPEN)
                announced[job] = max(announced.get(job, 0), at)
        else:
            # A plan records the version that it read; finish records a version after those of the job's commits.
            about, job = marked if marks else announced, key.split(".")[1]
            about[job] = max(about.get(job, 0), pc.max(ledger["at"]).as_py() or 0)
    state.moved = {*state.seen} - looked_at
    ledgers = pa.concat_tables([_SCHEMA.empty_table(), *(read[key] for key in state.ledgers)])
    marks = pc.or_(pc.is_in(ledgers["kind"], pa.array([SEEN, _DEFINED])), pc.starts_with(ledgers["kind"], _OPEN))
    state.facts = Facts(ledgers.filter(pc.invert(marks)).combine_chunks())
    state.open_jobs = {job: at for job, at in announced.items() if at >= max(marked.get(job, 0), state.defined + 1)}
    return state


def _read_ledger(store: CheckpointStore, key: str) -> tuple[pa.Table, set[str]] | None:
    """Return the facts of a ledger, and the ledgers that it covers; None if it is missing or damaged."""
    try:
        batch = store[key]
        if [batch.schema.field(name).type for name in _SCHEMA.names] != _SCHEMA.types:
            return None
        return pa.Table.from_batches([batch.select(_SCHEMA.names)]).cast(_SCHEMA), _covered_by(batch)
    except (KeyError, TypeError, ValueError):
        return None


def append_ledger(checkpoints: Storage, field_id: int, job_id: str, facts: Sequence[Fact]) -> None:
    """Write one immutable ledger, unless there are no facts."""
    if facts:
        store = state_store(checkpoints, field_id)
        store[f"ledger.{job_id}.{uuid.uuid4().hex[:12]}"] = _batch(facts, {"job_id": job_id})


def mark_defined(checkpoints: Storage, field_ids: Iterable[int], version: int) -> None:
    """Record that no function computes columns at a version, whose successor gives them one.

    Lance gives the field id of a dropped column to another one, once no data file has a column of that id.
    """
    for field_id in field_ids:
        append_ledger(checkpoints, field_id, "_defined", [_defined(version)])


def may_fold(ledgers: int | None) -> bool:
    """Whether a column may have enough ledgers to fold, given their number when its job was planned (None: unknown)."""
    return ledgers is None or ledgers + _OF_A_JOB >= _FOLD_AFTER


def fold_ledgers(checkpoints: Storage, field_id: int) -> bool:
    """Combine many ledgers into one, the fold, if there are enough; return whether there were.

    The ledgers of the newest fold stay until the next one, in case the fold is damaged.
    """
    store = state_store(checkpoints, field_id)
    if len(_not_folded(store)) < _FOLD_AFTER:
        return False
    state = load_state(checkpoints, field_id)
    if len(state.facts.table) or state.seen:
        _write_fold(store, state, state.facts.table)
        fault_point("fold.written")
        store.remove(state.folded)
    return True


def _write_fold(store: CheckpointStore, state: ColumnState, facts: pa.Table) -> None:
    versions = sorted(set(state.seen))[-_SEEN_KEPT:]
    marks = [seen(version, version in state.moved) for version in versions]
    marks += [_defined(state.defined)] if state.defined else []
    newest = sorted(state.open_jobs.items(), key=lambda one: one[1])[-_MOST_OPEN:]
    marks += [Fact("", f"{_OPEN}{job}", None, at) for job, at in newest]
    # Also name the ledgers that earlier folds cover, so that a reader of this fold skips them.
    covers = json.dumps(sorted(state.folded.union(state.ledgers)))
    whole = pa.concat_tables([facts, pa.Table.from_batches([_batch(marks, {})])])
    store[new_fold_key()] = single_batch(whole.replace_schema_metadata({"covers": covers}))


def save_facts(checkpoints: Storage, field_id: int, facts: Facts, version: int, defined: int = 0) -> None:
    """Write facts of another table about a column as one ledger; nothing if there are none.

    Args:
        version: the table version that they are about.
        defined: as in the state of the other table.
    """
    if facts:
        _write_fold(state_store(checkpoints, field_id), ColumnState(seen=[version], defined=defined), facts.table)


def new_fold_key() -> str:
    """Make a key that sorts by time: readers start with the newest fold and skip the ledgers that it covers."""
    return f"{_FOLD}{time.time_ns():020}.{uuid.uuid4().hex[:12]}"


def is_fold(key: str) -> bool:
    """Whether a ledger covers others."""
    return key.startswith(_FOLD)


def _by_age(keys: Collection[str]) -> list[list[str]]:
    """Group keys that may be read at once: each fold alone, newest first, then all other ledgers."""
    folds = sorted(filter(is_fold, keys), reverse=True)
    return [*([fold] for fold in folds), sorted(set(keys).difference(folds))]


def _not_folded(store: CheckpointStore) -> list[str]:
    """Return the keys that no fold covers, without reading facts."""
    keys = store.list_keys()
    covered: set[str] = set()
    for key in sorted(filter(is_fold, keys), reverse=True):
        if key not in covered:
            with suppress(KeyError, TypeError, ValueError):
                covered |= _covered_by(store.read(key, ["at"]))
    return [key for key in keys if key not in covered]


def _covered_by(fold: pa.RecordBatch) -> set[str]:
    return set(parse((fold.schema.metadata or {}).get(b"covers", b"[]")))


def _batch(facts: Sequence[Fact], metadata: dict[str, str]) -> pa.RecordBatch:
    columns: dict[str, Any] = {name: [getattr(fact, name) for fact in facts] for name in _SCHEMA.names}
    columns["rows"] = to_lists(columns["rows"], _SCHEMA.field("rows").type)
    return pa.record_batch(columns, schema=_SCHEMA.with_metadata(metadata))


def covered_documents(checkpoints: Storage, field_id: int, folds: Sequence[str]) -> set[str]:
    """Return the documents that the given folds (keys, newest first) cover; unreadable folds do not count."""
    store = state_store(checkpoints, field_id)
    covered: set[str] = set()
    for key in folds:
        if key in covered:
            continue
        # Read the fold completely: documents may be removed only if the fold can replace them.
        with suppress(KeyError, TypeError, ValueError):
            covered |= _covered_by(store[key]) - {key}
    return covered


def prune_state(checkpoints: Storage, field_id: int, existing: Collection[int], present: Present) -> int:
    """Fold a column's documents without the facts that can never match again; return the number of dropped facts.

    A fact matches fragments made of the same files. If no existing version has these files, no restore can bring them
    back, and the fact never matches again. Facts recorded at an existing version are kept without this check, and at a
    later one: a job writes them before its commit.

    Args:
        existing: the versions of the table, read before its facts are.
        present: called at most once, and only if there may be facts to drop.
    """
    state = load_state(checkpoints, field_id)
    facts = state.facts.table
    recent = pc.is_in(facts["at"], pa.array(sorted(existing), pa.int64()))
    recent = pc.or_(recent, pc.greater(facts["at"], max(existing, default=0)))
    # A dropped fact about a filter costs one more evaluation of the filter, and no UDF call.
    values, filters = _about_values(facts), pc.starts_with(facts["kind"], "where:")
    about_rows = pc.or_(values, filters)
    keep = pc.or_(recent, pc.invert(about_rows))
    if pc.all(keep, min_count=0).as_py():
        return 0
    signatures = present(set(facts.filter(pc.and_(values, pc.invert(keep)))["inputs"].to_pylist()))
    if signatures is None:
        return 0
    keep = pc.or_(keep, pc.and_(values, pc.is_in(facts["signature"], pa.array(sorted(signatures), pa.string()))))
    kept = facts.filter(keep)
    dropped = len(facts) - len(kept)
    if dropped < _WORTH_IT * pc.sum(about_rows).as_py() or not (len(kept) or state.seen):
        return 0
    _write_fold(state_store(checkpoints, field_id), state, kept)
    return dropped


def _about_values(facts: pa.Table) -> pa.ChunkedArray:
    """Select the facts about rows that hold values of a job, if they name their inputs."""
    kinds = facts["kind"].unique().to_pylist()
    ran = pa.array([kind for kind in kinds if kind == STALE or Provenance.of(kind) is not None], pa.string())
    return pc.and_(pc.is_in(facts["kind"], ran), pc.not_equal(facts["inputs"], ""))
