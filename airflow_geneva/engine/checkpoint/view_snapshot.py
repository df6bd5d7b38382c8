"""Record the source fragments, data files and rows that a view reflects since a swap.

Facts about a column accumulate, but a view's state is replaced with every swap. So each swap has one snapshot, which
the job writes before the swap and names in the swap's transaction.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from airflow_geneva.engine.checkpoint.facts import ColumnState, Fact, Facts
from airflow_geneva.engine.checkpoint.keys import path_to_key
from airflow_geneva.engine.checkpoint.packs import Packs
from airflow_geneva.engine.checkpoint.provenance import Provenance, add_rows
from airflow_geneva.engine.checkpoint.store import CheckpointStore
from airflow_geneva.engine.faults import fault_point
from airflow_geneva.engine.lance_io.row_ranges import Ranges, from_lists, to_lists
from airflow_geneva.engine.runtime import uuid
from airflow_geneva.engine.storage.documents import parse
from airflow_geneva.engine.storage.files import Storage

Code = tuple[tuple[str, str], ...]
"""UDF versions by column."""


@dataclass(frozen=True, order=True)
class Origin:
    """How some rows of a view differ from its other rows; nothing for most of them.

    Args:
        made: the columns whose values have other code than the snapshot names, with the version of that code.
        failed: the columns whose UDF failed on the rows, with the number of runs under the version of their value.
        tried: in a plan, the columns that run on the rows and failed on them before, with the number of runs.
    """

    made: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, int], ...] = ()
    tried: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.made or self.failed or self.tried)

    @property
    def runs(self) -> int:
        """The largest number of runs in which a UDF failed on the rows; 0 if none did."""
        return max((runs for _, runs in self.failed), default=0)

    def renamed(self, names: Mapping[str, str]) -> Origin:
        """Return the origin with other names of the columns, without the columns that have none."""
        made, failed, tried = (
            tuple(sorted((names[name], what) for name, what in part if name in names))
            for part in (self.made, self.failed, self.tried)
        )
        return Origin(made, failed, tried)  # type: ignore[arg-type]

    def ran(self, failed: Iterable[str]) -> Origin:
        """Return the origin of rows after columns ran on them, some of which failed."""
        before = dict(self.tried)
        again = ((name, 1 + before.get(name, 0)) for name in failed)
        return Origin(self.made, tuple(sorted({**dict(self.failed), **dict(again)}.items())))

    @property
    def provenance(self) -> Provenance:
        """The provenance of the rows in the facts that a snapshot converts to."""
        return Provenance(f"{SHOWN} {self.to_json()}" if self else SHOWN, failures=self.runs)

    @staticmethod
    def of(provenance: Provenance) -> Origin:
        text = provenance.version.removeprefix(SHOWN)
        return Origin.from_json(text) if text else _USUAL

    def to_json(self) -> str:
        parts = [self.made, self.failed, *([self.tried] if self.tried else [])]
        return json.dumps(parts, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Origin:
        made, *others = parse(text)
        failed, tried = (tuple((str(name), int(runs)) for name, runs in part) for part in [*others, ()][:2])
        return Origin(tuple((str(name), str(version)) for name, version in made), failed, tried)


_USUAL = Origin()


@dataclass(frozen=True, eq=False)
class SourceFragment:
    """One fragment of the source, as a view reflects it; `unusual` are its rows with an origin, which are disjoint."""

    signature: str
    deletion: str
    live: Ranges
    ids: Ranges
    unusual: tuple[tuple[Origin, Ranges], ...] = ()

    @property
    def origins(self) -> list[tuple[Origin, Ranges]]:
        """All live rows, by origin."""
        usual = self.live - Ranges.union(rows for _, rows in self.unusual)
        return [*([(_USUAL, usual)] if usual else []), *self.unusual]

    @property
    def failed(self) -> Ranges:
        """The rows on which a UDF failed."""
        return Ranges.union(rows for origin, rows in self.unusual if origin.failed)

    def with_origins(self, origins: Iterable[tuple[Origin, Ranges]]) -> SourceFragment:
        """Return the fragment with these origins of its rows."""
        joined: dict[Origin, Ranges] = {}
        add_rows(joined, ((origin, rows) for origin, rows in origins if origin and rows))
        return replace(self, unusual=tuple(sorted(joined.items(), key=lambda item: item[0])))

    def failing(self, failed: Iterable[tuple[str, Ranges]]) -> SourceFragment:
        """Return the fragment after its rows ran, with those that failed, by column."""
        if not self.unusual and not failed:
            return self
        parts: list[tuple[tuple[str, ...], Ranges, Origin]] = [((), rows, origin) for origin, rows in self.origins]
        for name, rows in failed:
            split = [((*names, name), held & rows, origin) for names, held, origin in parts]
            parts = split + [(names, held - rows, origin) for names, held, origin in parts]
        return self.with_origins((origin.ran(names), held) for names, held, origin in parts if held)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The whole source as one swap reflects it.

    Args:
        code: the code of the columns' values, in all rows but those with another origin.
        matching: for a query with limit or offset, the row ids that the filter selected; of a deduplicated query, those
            that it keeps; else empty.
        reads: the columns of the source that the query read: their names, and their field ids as in facts.
        dropped: the keys of columns that left the query since the swap, whose inputs this no longer describes.
    """

    source_version: int
    code: Code
    fragments: tuple[SourceFragment, ...]
    matching: Ranges
    reads: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()

    @property
    def older(self) -> Code:
        """Earlier code versions, by column, whose values some rows keep."""
        return tuple(sorted({made for origin in self.every_origin for made in origin.made}))

    @property
    def every_origin(self) -> set[Origin]:
        return {_USUAL, *(origin for fragment in self.fragments for origin, _ in fragment.unusual)}

    def renamed(self, names: Mapping[str, str]) -> Snapshot:
        """Return the snapshot with other names of the columns, without the columns that have none."""
        code = tuple(sorted((names[name], version) for name, version in self.code if name in names))
        fragments = (
            one.with_origins((origin.renamed(names), rows) for origin, rows in one.unusual) if one.unusual else one
            for one in self.fragments
        )
        return replace(self, code=code, fragments=tuple(fragments))

    def state(self, inputs: str) -> ColumnState:
        """Convert the snapshot to facts; the origins of rows are their provenances."""
        facts = [
            Fact(
                fragment.signature, origin.provenance.kind, rows, self.source_version,
                None if fragment.unusual else fragment.deletion, inputs,
            )
            for fragment in self.fragments
            for origin, rows in fragment.origins
        ]  # fmt: skip
        return ColumnState(Facts.of(facts), seen=[self.source_version])

    def to_batch(self) -> pa.RecordBatch:
        *texts, bounds = zip(*self._rows(), strict=True)
        arrays = [*(pa.array(values, pa.string()) for values in texts), to_lists(bounds, _SCHEMA.field("bounds").type)]
        metadata = {"source_version": str(self.source_version), "code": json.dumps(self.code)}
        metadata["reads"] = json.dumps(self.reads)
        metadata["dropped"] = json.dumps(self.dropped)
        return pa.record_batch(arrays, schema=_SCHEMA.with_metadata(metadata))

    def _rows(self) -> Iterator[tuple[str, str, str, Ranges]]:
        yield "", "matching", "", self.matching
        for fragment in self.fragments:
            yield fragment.signature, "live", fragment.deletion, fragment.live
            yield fragment.signature, "ids", "", fragment.ids
            for origin, rows in fragment.unusual:
                yield fragment.signature, f"origin:{origin.to_json()}", "", rows

    @staticmethod
    def from_batch(batch: pa.RecordBatch) -> Snapshot:
        """Read a snapshot; KeyError, ValueError or IndexError if the batch is not a snapshot."""
        metadata = batch.schema.metadata or {}
        version = int(metadata[b"source_version"])
        code, reads = _pairs(metadata[b"code"]), _pairs(metadata[b"reads"])
        texts: Sequence[list[str]] = [batch.column(name).to_pylist() for name in ("signature", "kind", "deletion")]
        fragments: list[SourceFragment] = []
        matching = live = Ranges.empty()
        deletion_of_live = ""
        for signature, kind, deletion, rows in zip(*texts, from_lists(batch.column("bounds")), strict=True):
            if kind == "matching":
                matching = rows
            elif kind == "live":
                live, deletion_of_live = rows, deletion
            elif kind == "ids":
                fragments.append(SourceFragment(signature, deletion_of_live, live, rows))
            else:
                origin = Origin.from_json(kind.partition(":")[2])
                fragments[-1] = replace(fragments[-1], unusual=(*fragments[-1].unusual, (origin, rows)))
        dropped = tuple(str(key) for key in parse(metadata[b"dropped"]))
        return Snapshot(version, code, tuple(fragments), matching, reads, dropped)


def _pairs(text: bytes) -> tuple[tuple[str, str], ...]:
    return tuple((str(a), str(b)) for a, b in parse(text))


SHOWN = "view"
"""The version of all facts about the rows that a view shows."""
_SCHEMA = pa.schema(
    [("signature", pa.string()), ("kind", pa.string()), ("deletion", pa.string()), ("bounds", pa.list_(pa.int64()))]
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
