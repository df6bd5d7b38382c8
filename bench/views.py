"""Case f: a view of every other row with one computed column, against pylance alone with the same work."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lance
import lance.commit
import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter
from lance.fragment import DataFile, FragmentMetadata

import airflow_geneva
from airflow_geneva import Table
from bench import udfs
from bench.peer import LanceDB

FILTER = "x % 2 = 0"
_ROWS = 16_384
_SCHEMA = pa.schema([("source", pa.int64()), ("x", pa.int64()), ("y", pa.int64())])


class Floor:
    """The same view by hand: a filtered scan, the function, one file per fragment, and the same kind of commit.

    Args:
        source: the source's folder.
        uri: the view's folder.
    """

    def __init__(self, source: str, uri: str) -> None:
        self.source, self.uri = source, uri
        self.seen, self.fragments = 0, set[int]()
        lance.write_dataset(_SCHEMA.empty_table(), uri, enable_stable_row_ids=True)

    def fill(self) -> int:
        """Add the rows of new fragments."""
        source = lance.dataset(self.source)
        new = [f for f in source.get_fragments() if f.fragment_id not in self.fragments]
        rows = self._swap_in([fragment.scanner(**_READ) for fragment in new]) if new else 0
        self.seen, self.fragments = source.version, {f.fragment_id for f in source.get_fragments()}
        return rows

    def update(self) -> int:
        """Replace updated rows, found by Lance's row versions; they stay in the view."""
        source = lance.dataset(self.source)
        changed = f"_row_last_updated_at_version > {self.seen} AND {FILTER}"
        ids = source.to_table(columns=[], filter=changed, with_row_id=True)["_rowid"].to_pylist()
        lance.dataset(self.uri).delete(f"source IN ({','.join(map(str, ids))})")
        rows = self._swap_in([source.scanner(**{**_READ, "filter": changed})])
        self.seen, self.fragments = source.version, {f.fragment_id for f in source.get_fragments()}
        return rows

    def nothing(self) -> int:
        """Check whether there is a new fragment."""
        source = lance.dataset(self.source)
        return len({f.fragment_id for f in source.get_fragments()} - self.fragments)

    def compacted(self) -> int:
        """After a compaction only: just record the new fragments."""
        source = lance.dataset(self.source)
        self.seen, self.fragments = source.version, {f.fragment_id for f in source.get_fragments()}
        return 0

    def _swap_in(self, scanners: list[lance.LanceScanner]) -> int:
        view = lance.dataset(self.uri)
        made = []
        for scanner in scanners:
            name, rows = f"{uuid.uuid4().hex}.lance", 0
            with LanceFileWriter(f"{self.uri}/data/{name}", _SCHEMA, version=view.data_storage_version) as writer:
                for batch in scanner.to_batches():
                    x, ids = batch.column("x"), pa.array(batch.column("_rowid").to_numpy().view(np.int64))
                    writer.write_batch(pa.record_batch([ids, x, udfs.double.func(x)], schema=_SCHEMA))
                    rows += batch.num_rows
            made.append((name, rows))
        # Not an append: two concurrent appends would both be committed, and the rows would be in the view twice.
        swap = lance.LanceOperation.Update(
            new_fragments=[FragmentMetadata(0, [DataFile.create(view, name)], rows) for name, rows in made if rows],
            updated_fragments=[fragment.metadata for fragment in view.get_fragments()[:1]],
            update_mode="rewrite_rows",
        )
        lance.LanceDataset.commit(self.uri, swap, read_version=view.version)
        return sum(rows for _, rows in made)


_READ: dict[str, Any] = {"columns": ["x"], "filter": FILTER, "with_row_id": True, "batch_size": _ROWS}


def measure(folder: str, rows: int, fragments: int, runner: str, repeats: int, lancedb: str = "") -> dict[str, Any]:
    """Apply several kinds of changes to a source; after each, refresh the view and the baseline's view.

    Args:
        rows, fragments: initial size of the source.
        repeats: number of measured rounds, each on new tables; one more round is a warm-up.
        lancedb: the interpreter of LanceDB's environment, to measure it as well.
    """
    found: dict[str, dict[str, Any]] = {}
    for turn in range(repeats + 1):
        place = Path(folder) / str(turn)
        table = airflow_geneva.connect(place).create_table(
            "docs", pa.table({"x": pa.array(np.arange(rows))}), max_rows_per_file=rows // fragments
        )
        query = table.query().where(FILTER).select(["x"]).add_columns({"y": (udfs.double, ["x"])})
        view = query.create_materialized_view(name="evens")
        floor = Floor(table.uri, str(place / "floor.lance"))
        with LanceDB(lancedb, place / "peer", rows, fragments) if lancedb else nullcontext() as peer:
            for name, change, theirs in _changes(table, floor, rows):
                change()
                version = view.version
                began = time.perf_counter()
                result = view.refresh(runner=runner)
                taken = {"ours": time.perf_counter() - began}
                began = time.perf_counter()
                floor_rows = theirs()
                taken["floor"] = time.perf_counter() - began
                if peer is not None:
                    taken["peer"] = peer.seconds(name)
                about = found.setdefault(name, {side: [] for side in taken})
                about |= {"rows": result.rows_computed, "floor_rows": floor_rows, "versions": view.version - version}
                for side, seconds in taken.items():
                    about[side].extend([seconds] if turn else [])
        mine, other = view.to_arrow(), lance.dataset(floor.uri).to_table(columns=["x", "y"])
        if not mine.select(["x", "y"]).sort_by("x").equals(other.sort_by("x")):
            raise SystemExit("Our view differs from the baseline's view.")
    return {"rows": rows, "fragments": fragments, "runner": runner, "changes": found}


def _changes(table: Table, floor: Floor, rows: int) -> list[tuple[str, Callable[[], Any], Callable[[], int]]]:
    more = pa.table({"x": pa.array(np.arange(rows, rows + rows // 10))})
    return [
        ("first refresh", lambda: None, floor.fill),
        ("nothing to do", lambda: None, floor.nothing),
        ("10 % more rows", lambda: table.add(more), floor.fill),
        ("update of 1 %, in every fragment", lambda: _update(table), floor.update),
        ("compaction", lambda: table.lance.optimize.compact_files(), floor.compacted),
        ("nothing again", lambda: None, floor.nothing),
    ]


def _update(table: Table) -> None:
    # Half of the updated rows are in the view, before and after.
    table.lance.update({"x": "x + 20000000000"}, where="x % 100 < 1")
