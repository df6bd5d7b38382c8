"""Prune a column's state: documents that a fold covers, and facts that can never match again."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.checkpoint.facts import load_state, new_fold_key, state_store
from airflow_geneva.checkpoint.provenance import Provenance
from airflow_geneva.lance_io.arrays import single_batch
from airflow_geneva.storage.files import Storage

_WORTH_IT = 0.25

Present = Callable[[set[str]], Collection[str] | None]
"""Takes the inputs that facts name; returns all signatures that versions of the table have or may have again."""


def covered_documents(checkpoints: Storage, field_id: int, folds: Sequence[str]) -> set[str]:
    """Return the ledgers and folds that one of the given folds covers; unreadable folds do not count.

    Args:
        folds: keys of folds, newest first.
    """
    store = state_store(checkpoints, field_id)
    covered: set[str] = set()
    for key in folds:
        if key in covered:
            continue
        try:
            # Read the fold completely: documents may be removed only if the fold can replace them.
            metadata = store[key].schema.metadata or {}
        except KeyError:
            continue
        covered.update(set(json.loads(metadata.get(b"covers", b"[]"))) - {key})
    return covered


def prune_state(checkpoints: Storage, field_id: int, existing: Collection[int], present: Present) -> int:
    """Fold a column's documents without the facts that can never match again; return the number of dropped facts.

    A fact matches fragments made of the same files. If no existing version has these files, no restore can bring them
    back, and the fact never matches again. Facts recorded at an existing version are kept without this check.

    Args:
        existing: versions of the table that exist.
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
