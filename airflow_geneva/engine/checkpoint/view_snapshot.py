"""Record the source fragments, data files and rows that a view reflects since a swap.

Facts about a column accumulate, but a view's state is replaced with every swap. So each swap has one snapshot, which
the job writes before the swap and names in the swap's transaction.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_geneva.engine.checkpoint.facts import ColumnState, Fact, Facts
from airflow_geneva.engine.checkpoint.keys import path_to_key
from airflow_geneva.engine.checkpoint.packs import Packs
from airflow_geneva.engine.checkpoint.provenance import PriorFailures, Provenance
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.row_ranges import Ranges, from_lists, to_lists
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.files import Storage


@dataclass(frozen=True, eq=False)
class SourceFragment:
    """One fragment of the source, as a view reflects it; `failed` has rows by the number of runs that failed."""

    signature: str
    deletion: str
    live: Ranges
    ids: Ranges
    failed: PriorFailures = ()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The whole source as one swap reflects it.

    Args:
        matching: for a query with limit or offset, the row ids that the filter selected; else empty.
        older: earlier code versions, by column, whose values a refresh with ``on_code_change="new_rows"`` may have kept
            in some rows.
    """

    source_version: int
    code: tuple[tuple[str, str], ...]
    fragments: tuple[SourceFragment, ...]
    matching: Ranges
    older: tuple[tuple[str, str], ...] = ()

    def state(self, inputs: str) -> ColumnState:
        """Convert the snapshot to facts of one version; the planner compares the code of a view's UDFs separately."""
        facts: list[Fact] = []
        for fragment in self.fragments:
            failed = Ranges.union(rows for _, rows in fragment.failed)
            found = [(Provenance(SHOWN), fragment.live - failed)]
            found += [(Provenance(SHOWN, failures=runs), rows) for runs, rows in fragment.failed]
            facts += [
                Fact(
                    fragment.signature, provenance.what, rows, self.source_version,
                    None if failed else fragment.deletion, inputs,
                )
                for provenance, rows in found if rows
            ]  # fmt: skip
        return ColumnState(Facts.of(facts), seen=[self.source_version])

    def to_batch(self) -> pa.RecordBatch:
        *texts, bounds = zip(*self._rows(), strict=True)
        arrays = [*(pa.array(values, pa.string()) for values in texts), to_lists(bounds, _SCHEMA.field("bounds").type)]
        metadata = {"source_version": str(self.source_version), "code": json.dumps(self.code)}
        metadata["older"] = json.dumps(self.older)
        return pa.record_batch(arrays, schema=_SCHEMA.with_metadata(metadata))

    def _rows(self) -> Iterator[tuple[str, str, str, Ranges]]:
        yield "", "matching", "", self.matching
        for fragment in self.fragments:
            yield fragment.signature, "live", fragment.deletion, fragment.live
            yield fragment.signature, "ids", "", fragment.ids
            for runs, rows in fragment.failed:
                yield fragment.signature, f"failed:{runs}", "", rows

    @staticmethod
    def from_batch(batch: pa.RecordBatch) -> Snapshot:
        """Read a snapshot; KeyError, ValueError or IndexError if the batch is not a snapshot."""
        metadata = batch.schema.metadata or {}
        version = int(metadata[b"source_version"])
        code, older = (tuple((str(a), str(b)) for a, b in parse(metadata[name])) for name in (b"code", b"older"))
        texts: Sequence[list[str]] = [batch.column(name).to_pylist() for name in ("signature", "what", "deletion")]
        fragments: list[SourceFragment] = []
        matching = live = Ranges.empty()
        deletion_of_live = ""
        for signature, what, deletion, rows in zip(*texts, from_lists(batch.column("bounds")), strict=True):
            if what == "matching":
                matching = rows
            elif what == "live":
                live, deletion_of_live = rows, deletion
            elif what == "ids":
                fragments.append(SourceFragment(signature, deletion_of_live, live, rows))
            else:
                failed = (*fragments[-1].failed, (int(what.partition(":")[2]), rows))
                fragments[-1] = replace(fragments[-1], failed=failed)
        return Snapshot(version, code, tuple(fragments), matching, older)


SHOWN = "view"
"""The version of all facts about the rows that a view shows."""
_SCHEMA = pa.schema(
    [("signature", pa.string()), ("what", pa.string()), ("deletion", pa.string()), ("bounds", pa.list_(pa.int64()))]
)
_FOLDER, _KIND = "state/view", "swap"
_KEPT_UNPACKED = 4


def _store(checkpoints: Storage) -> CheckpointStore:
    return CheckpointStore(checkpoints.folder(_FOLDER))


def snapshot_key(name: str) -> str | None:
    """Return the key of the snapshot at a path; None if the path is not that of a snapshot."""
    start = f"{_FOLDER}/{_KIND}."
    return path_to_key(name.removeprefix(f"{_FOLDER}/")) if name.startswith(start) and name.endswith(".lance") else None


def snapshot_job(key: str) -> str:
    """Return the id of the job that wrote a snapshot."""
    return key.removeprefix(f"{_KIND}.").rpartition(".")[0]


def new_snapshot_key(job_id: str) -> str:
    return f"{_KIND}.{job_id}.{uuid.uuid4().hex[:12]}"


def save_snapshot(checkpoints: Storage, key: str, snapshot: Snapshot) -> None:
    _store(checkpoints)[key] = snapshot.to_batch()
    fault_point("snapshot.written")


def unpacked_snapshots(checkpoints: Storage) -> list[str]:
    """Return the keys of the snapshots that are not packed, oldest first."""
    names = checkpoints.list_folder(_FOLDER)[1]
    return sorted(key for name in names if (key := snapshot_key(f"{_FOLDER}/{name}")))


def pack_snapshots(checkpoints: Storage) -> None:
    """Pack all but the newest snapshots: a snapshot that only a note names is removed with the next note."""
    _store(checkpoints).pack(unpacked_snapshots(checkpoints)[:-_KEPT_UNPACKED])


def packed_snapshots(checkpoints: Storage) -> set[str]:
    """Return the keys of the packed snapshots."""
    return Packs(checkpoints.folder(_FOLDER)).keys()


def prune_packed_snapshots(checkpoints: Storage, named: Collection[str]) -> None:
    """Remove packed snapshots that are not in `named`."""
    packs = Packs(checkpoints.folder(_FOLDER))
    packs.drop(packs.keys() - set(named))


def remove_snapshot(checkpoints: Storage, key: str) -> None:
    """Remove an unreferenced snapshot; do nothing if it does not exist."""
    del _store(checkpoints)[key]


def load_snapshot(checkpoints: Storage, key: str) -> Snapshot | None:
    """Read a snapshot; None if it is missing or damaged, so that rows are computed again and results stay correct."""
    try:
        return Snapshot.from_batch(_store(checkpoints)[key])
    except (LookupError, TypeError, ValueError):
        return None
