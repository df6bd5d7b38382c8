"""A column's state: which rows hold values of which UDF version, as facts about immutable data files.

A fact says "in a fragment made of exactly these input and output files, these physical rows hold the value of this UDF
version". Data files never change, so a fact never becomes wrong: it only stops matching. A job therefore writes its
ledger of facts before it commits. The state is the union of all ledgers, and a job that died needs no recovery.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.checkpoint.provenance import MOST_RUNS, Provenance, add_rows
from airflow_geneva.checkpoint.store import CheckpointStore
from airflow_geneva.faults import fault_point
from airflow_geneva.lance_io.arrays import single_batch
from airflow_geneva.lance_io.row_ranges import Ranges, from_lists, to_lists
from airflow_geneva.storage.files import Storage

_FOLD_AFTER = 16
_FOLDS = ("ledger._fold-", "fold.")
"""What the keys of folds begin with: now, and in databases of before."""
_SEEN_KEPT = 8
_WORTH_IT = 0.25
Present = Callable[[set[str]], Collection[str] | None]
"""Takes the inputs that facts name; returns all signatures that versions of the table have or may have again."""


@dataclass(frozen=True)
class Fact:
    """A statement about every fragment with a given signature.

    Args:
        signature: hash of the relevant data files, see :mod:`airflow_geneva.lance_io.fragments`.
        what: text of a :class:`Provenance`; or ``where:<md5>:<udf version>`` for rows on which a job evaluated a
            filter: it computed those that the filter selected.
        rows: physical offsets; None: all physical rows.
        at: table version at which the fact was recorded.
        live_under: identity of a deletion file under which ``rows`` holds every live row, so that a plan need not
            read the deletion file; None if unknown.
        inputs: field ids of the inputs that the value was computed from, as text; "" if they do not matter.
    """

    signature: str
    what: str
    rows: Ranges | None
    at: int
    live_under: str | None = None
    inputs: str = ""

    def covers(self, deletion: str) -> bool:
        """Whether it is about every live row of a fragment with the given deletion file."""
        return self.rows is None or self.live_under == deletion


def looked_at(where_hash: str, version: str) -> str:
    return f"where:{where_hash}:{version}"


SEEN = "seen"
"""Text of a fact that marks a table version at which the facts were complete; plans compare rows by value with it."""


def seen(version: int) -> Fact:
    """Make the fact that marks a table version as one to compare with."""
    return Fact("", SEEN, None, version)


_SCHEMA = pa.schema(
    [
        pa.field("signature", pa.string()),
        pa.field("what", pa.string()),
        pa.field("rows", pa.list_(pa.uint32())),
        pa.field("at", pa.int64()),
        pa.field("live_under", pa.string()),
        pa.field("inputs", pa.string()),
    ]
)


def _newest_failures(known: dict[Provenance, Ranges]) -> dict[Provenance, Ranges]:
    """Keep, for each row that failed in several runs, only the highest number of runs."""
    numbers = sorted({provenance.failures for provenance in known if provenance.failures}, reverse=True)
    if len(numbers) < 2:
        return known
    later: dict[str, Ranges] = {}
    for number in numbers:
        for provenance in [p for p in known if p.failures == number]:
            rows = known[provenance] - later.get(provenance.version, Ranges.empty())
            later[provenance.version] = later.get(provenance.version, Ranges.empty()) | rows
            known[provenance] = rows
    return {provenance: rows for provenance, rows in known.items() if rows}


@dataclass
class ColumnState:
    """All facts about one column, by signature.

    Args:
        seen: versions at which the facts were complete.
        open_jobs: jobs that may have committed but have not finished, so they marked no version as seen.
    """

    facts: dict[str, list[Fact]] = field(default_factory=dict)
    ledgers: list[str] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    folded: set[str] = field(default_factory=set)
    open_jobs: set[str] = field(default_factory=set)

    def known(self, signature: str, physical_rows: int) -> dict[Provenance, Ranges]:
        """Return the rows of a fragment that a UDF ran on, by provenance."""
        found: dict[Provenance, Ranges] = {}
        for fact in self.facts.get(signature, ()):
            provenance = Provenance.of(fact.what)
            if provenance is not None:
                add_rows(found, [(provenance, Ranges.of(0, physical_rows) if fact.rows is None else fact.rows)])
        return _newest_failures(found)

    def shared_provenance(self, signature: str, deletion: str, physical_rows: int) -> frozenset[Provenance]:
        """Return the provenance that all live rows of a fragment share; empty if they differ."""
        every, some = set[Provenance](), set[Provenance]()
        for fact in self.facts.get(signature, ()):
            provenance = Provenance.of(fact.what)
            if provenance is not None and (fact.rows is None or fact.rows):
                whole = fact.covers(deletion) or (fact.rows is not None and len(fact.rows) == physical_rows)
                (every if whole else some).add(provenance)
        return frozenset() if some - every else frozenset(every)

    def about(self, inputs: str) -> ColumnState:
        """Return the state with only the facts about values that were computed from the given inputs."""
        if not self.other_inputs(inputs):
            return self
        facts = {
            signature: kept
            for signature, group in self.facts.items()
            if (kept := [fact for fact in group if fact.inputs in ("", inputs)])
        }
        return replace(self, facts=facts)

    def given_up(self, signature: str, version: str) -> Ranges:
        """Return the rows of a fragment that failed in the maximum number of runs, deleted rows included."""
        wanted = Provenance(version, failures=MOST_RUNS).what
        rows = [fact.rows for fact in self.facts.get(signature, ()) if fact.what == wanted and fact.rows is not None]
        return Ranges.union(rows)

    def other_inputs(self, inputs: str) -> set[str]:
        """Return the inputs, as facts name them, of values that were not computed from the given inputs."""
        return {fact.inputs for group in self.facts.values() for fact in group if fact.inputs} - {inputs}

    def looked_at(self, signature: str, where_hash: str, version: str, physical_rows: int) -> Ranges:
        """Return the rows of a fragment for which a job evaluated a filter."""
        wanted = looked_at(where_hash, version)
        found = Ranges.empty()
        for fact in self.facts.get(signature, ()):
            if fact.what == wanted:
                found = found | (Ranges.of(0, physical_rows) if fact.rows is None else fact.rows)
        return found

    def is_complete(self, signature: str, deletion: str, version: str) -> bool:
        """Whether every live row is computed by a version, or failed in the maximum number of runs, by facts alone."""
        wanted = Provenance(version).what
        return any(fact.what == wanted and fact.covers(deletion) for fact in self.facts.get(signature, ()))

    def of_all_rows(self, signature: str, deletion: str) -> list[Provenance]:
        """Return what facts say about all live rows of a fragment at once."""
        whole = [fact.what for fact in self.facts.get(signature, ()) if fact.covers(deletion)]
        return [provenance for what in whole if (provenance := Provenance.of(what)) is not None]


def state_store(checkpoints: Storage, field_id: int) -> CheckpointStore:
    """Open the store of one column's ledgers, below ``_checkpoints``."""
    return CheckpointStore(checkpoints.folder("state", f"field-{field_id}"))


def load_state(checkpoints: Storage, field_id: int) -> ColumnState:
    """Read and combine all ledgers of a column; damaged ones count as absent, which only computes rows again."""
    store = state_store(checkpoints, field_id)
    keys = set(store.list_keys())
    while True:
        read: dict[str, list[Fact]] = {}
        covered: set[str] = set()
        missed: set[str] = set()
        for key in _by_age(sorted(keys)):
            if key in covered:
                continue
            try:
                batch = store[key]
                covers = _covered_by(batch)
                read[key] = list(_read(batch))
            except (KeyError, ValueError):
                missed.add(key)
                continue
            covered |= covers
        # A ledger that another job folded and removed after the listing is in a newer fold: list and read again.
        if missed <= (now := set(store.list_keys()) if missed else set()):
            break
        keys = now
    state = ColumnState(ledgers=[key for key in read if key not in covered], folded=covered & keys)
    announced, marked = dict[str, int](), dict[str, int]()
    for key in state.ledgers:
        marks, newest = len(state.seen), 0
        for fact in read[key]:
            newest = max(newest, fact.at)
            if fact.what == SEEN:
                state.seen.append(fact.at)
            else:
                state.facts.setdefault(fact.signature, []).append(fact)
        if not is_fold(key):
            # A plan marks the version that it read; finish marks a version after those of the job's commits.
            about = announced if marks == len(state.seen) else marked
            job = key.split(".")[1]
            about[job] = max(about.get(job, 0), newest)
    state.open_jobs = {job for job, at in announced.items() if at >= marked.get(job, 0)}
    return state


def append_ledger(checkpoints: Storage, field_id: int, job_id: str, facts: Sequence[Fact]) -> None:
    """Write one immutable ledger, unless there are no facts."""
    if facts:
        store = state_store(checkpoints, field_id)
        store[f"ledger.{job_id}.{uuid.uuid4().hex[:12]}"] = _batch(facts, {"job_id": job_id})


def fold_ledgers(checkpoints: Storage, field_id: int) -> bool:
    """Combine many ledgers into one, the fold, if there are enough; say whether there were.

    The ledgers of the newest fold stay until the next one, in case the fold is damaged.
    """
    store = state_store(checkpoints, field_id)
    if len(_not_folded(store)) < _FOLD_AFTER:
        return False
    state = load_state(checkpoints, field_id)
    facts = [fact for group in state.facts.values() for fact in group]
    facts += [seen(version) for version in sorted(set(state.seen))[-_SEEN_KEPT:]]
    if facts:
        # Also name what earlier folds cover, so that a reader of this fold skips them.
        covers = json.dumps(sorted(state.folded.union(state.ledgers)))
        store[new_fold_key()] = _batch(facts, {"covers": covers})
        fault_point("fold.written")
        store.remove(state.folded)
    return True


def new_fold_key() -> str:
    """Make a key that sorts by time: readers start with the newest fold and skip the documents that it covers."""
    return f"{_FOLDS[0]}{time.time_ns():020}.{uuid.uuid4().hex[:12]}"


def is_fold(key: str) -> bool:
    """Whether a ledger covers others. No job id begins with an underscore."""
    return key.startswith(_FOLDS)


def _by_age(keys: Iterable[str]) -> list[str]:
    """Sort keys: folds, newest first, then the other ledgers."""
    found = list(keys)
    folds = {key.removeprefix(_FOLDS[0]).removeprefix(_FOLDS[1]): key for key in found if is_fold(key)}
    return [folds[time] for time in sorted(folds, reverse=True)] + [key for key in found if not is_fold(key)]


def _not_folded(store: CheckpointStore) -> list[str]:
    """Return the keys that no fold covers, without reading facts."""
    keys = store.list_keys()
    covered: set[str] = set()
    for key in _by_age(keys):
        if is_fold(key) and key not in covered:
            with suppress(KeyError):
                covered |= _covered_by(store.read(key, ["at"]))
    return [key for key in keys if key not in covered]


def _covered_by(fold: pa.RecordBatch) -> set[str]:
    return set(json.loads((fold.schema.metadata or {}).get(b"covers", b"[]")))


def _batch(facts: Sequence[Fact], metadata: dict[str, str]) -> pa.RecordBatch:
    columns: dict[str, Any] = {name: [getattr(fact, name) for fact in facts] for name in _SCHEMA.names}
    columns["rows"] = to_lists(columns["rows"], _SCHEMA.field("rows").type)
    return pa.record_batch(columns, schema=_SCHEMA.with_metadata(metadata))


def _read(batch: pa.RecordBatch) -> Iterator[Fact]:
    columns = {name: batch.column(name) for name in _SCHEMA.names}
    rows = from_lists(columns.pop("rows"))
    values = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    for sets, (signature, what, at, live_under, inputs) in zip(rows, values, strict=True):
        yield Fact(signature, what, sets, at, live_under, inputs)


def covered_documents(checkpoints: Storage, field_id: int, folds: Sequence[str]) -> set[str]:
    """Return what the given folds (keys, newest first) cover; unreadable folds do not count."""
    store = state_store(checkpoints, field_id)
    covered: set[str] = set()
    for key in folds:
        if key in covered:
            continue
        # Read the fold completely: documents may be removed only if the fold can replace them.
        with suppress(KeyError):
            covered |= _covered_by(store[key]) - {key}
    return covered


def prune_state(checkpoints: Storage, field_id: int, existing: Collection[int], present: Present) -> int:
    """Fold a column's documents without the facts that can never match again; return the number of dropped facts.

    A fact matches fragments made of the same files. If no existing version has these files, no restore can bring them
    back, and the fact never matches again. Facts recorded at an existing version are kept without this check.

    Args:
        present: called at most once, and only if there may be something to drop.
    """
    store = state_store(checkpoints, field_id)
    state = load_state(checkpoints, field_id)
    batches = []
    for key in state.ledgers:
        try:
            batches.append(store[key].replace_schema_metadata(None))
        except KeyError:
            return 0
    if not batches or any(batch.schema != batches[0].schema for batch in batches):
        return 0
    facts = pa.Table.from_batches(batches)
    recent = pc.is_in(facts["at"], pa.array(sorted(existing), pa.int64()))
    # A dropped fact about a filter costs one more evaluation of the filter, and no UDF call.
    values, filters = _about_values(facts), pc.starts_with(facts["what"], "where:")
    about_rows = pc.or_(values, filters)
    keep = pc.or_(recent, pc.invert(about_rows))
    if pc.all(keep).as_py():
        return 0
    signatures = present(set(facts.filter(pc.and_(values, pc.invert(keep)))["inputs"].to_pylist()))
    if signatures is None:
        return 0
    keep = pc.or_(keep, pc.and_(values, pc.is_in(facts["signature"], pa.array(sorted(signatures), pa.string()))))
    kept = facts.filter(keep)
    dropped = len(facts) - len(kept)
    if dropped < _WORTH_IT * pc.sum(about_rows).as_py() or not len(kept):
        return 0
    covers = json.dumps(sorted(state.folded.union(state.ledgers)))
    store[new_fold_key()] = single_batch(kept.replace_schema_metadata({"covers": covers}))
    return dropped


def _about_values(facts: pa.Table) -> pa.ChunkedArray:
    """Select the facts about rows that the UDF ran on, if they name their inputs."""
    whats = facts["what"].unique()
    ran = pa.array([what for what in whats.to_pylist() if Provenance.of(what) is not None], pa.string())
    return pc.and_(pc.is_in(facts["what"], ran), pc.not_equal(facts["inputs"], ""))
