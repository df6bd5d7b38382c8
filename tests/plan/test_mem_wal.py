"""Tables with a MemWAL, whose newest rows lie outside of all fragments."""

from __future__ import annotations

import os
import uuid
from datetime import datetime, timezone
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable

from airflow_geneva import connect, udf
from airflow_geneva.engine.watch.conditions import WaitCondition
from airflow_geneva.engine.watch.watcher import observe
from airflow_geneva.errors import InvalidInput

KEY = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
SCHEMA = pa.schema([KEY, pa.field("x", pa.int64())])
CALLED = list[int]()


@udf(data_type=pa.int64(), version="1")
def doubled(x: int) -> int:
    CALLED.append(x)
    return 2 * x


def test_a_table_with_rows_outside_of_fragments_is_refused_until_they_are_merged(tmp_path: Path) -> None:
    db = connect(tmp_path / "db")
    table = db.create_table("docs", pa.table({"id": [1, 2, 3], "x": [1, 2, 3]}, schema=SCHEMA))
    table.add_columns({"y": doubled})
    view = table.query().select(["id", "x"]).create_materialized_view(db, "view")
    before = lance.dataset(table.location.uri)
    before.initialize_mem_wal()
    with lance.dataset(before.uri).mem_wal_writer(str(uuid.uuid4())) as writer:
        writer.put(pa.table({"id": [3, 4], "x": [30, 40], "y": pa.nulls(2, pa.int64())}, schema=before.schema))

    CALLED.clear()
    for refused in (
        lambda: table.backfill("y", runner="inline"),
        lambda: table.plan_backfill("y"),
        lambda: table.load_columns(pa.table({"id": [1], "z": [1]}), on="id", runner="inline"),
        lambda: view.refresh(runner="inline"),
        lambda: table.query().create_materialized_view(db, "other"),
        lambda: observe(db, WaitCondition("docs", "column:y"), None, datetime.now(timezone.utc)),
    ):
        with pytest.raises(InvalidInput, match=r"^Table 'docs' has a MemWAL .* would be left out\. Flush them"):
            refused()
    assert (CALLED, db.jobs(), db.table_names()) == ([], [], ["docs", "view"])

    # The remedy, as the message says.
    folder = Path(before.uri, "_mem_wal", writer.shard_id)
    [generation] = [name for name in os.listdir(folder) if "_gen_" in name]
    dataset = lance.dataset(before.uri)
    merge = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.mark_sstables_as_compacted([CompactedSsTable(writer.shard_id, int(generation.rpartition("_")[2]))])
    merge.execute(lance.dataset(folder / generation).to_table(columns=["id", "x", "y"]))
    lance.dataset(before.uri).drop_index("__lance_mem_wal")
    assert table.backfill("y", runner="inline").rows_computed == 4
    assert {row["id"]: row["y"] for row in table.to_arrow().to_pylist()} == {1: 2, 2: 4, 3: 60, 4: 80}
    assert view.refresh(runner="inline").rows_computed == 4
