"""Memory follows batches, not fragments: four times the rows in one fragment take about the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Below some millions of rows the buffers of checkpoints and reads are not full yet.
SMALL, LARGE = 4_000_000, 12_000_000
MARGIN_MB = 160

# A writer of its own, so that the measured process starts with nothing but an open table.
MAKE = """
import sys
import numpy as np
import pyarrow as pa
from airflow_geneva import connect
rows = int(sys.argv[2])
step = 1_000_000
def batches():
    for at in range(0, rows, step):
        x = np.arange(at, at + step)
        yield pa.record_batch({"id": x, "x": x})
schema = pa.schema({"id": pa.int64(), "x": pa.int64()})
import lance
reader = pa.RecordBatchReader.from_batches(schema, batches())
lance.write_dataset(reader, sys.argv[1] + "/docs.lance", enable_stable_row_ids=True, max_rows_per_file=1 << 30,
                    max_rows_per_group=1 << 20)
assert len(lance.dataset(sys.argv[1] + "/docs.lance").get_fragments()) == 1
if sys.argv[3] == "deleted":
    lance.dataset(sys.argv[1] + "/docs.lance").delete("id % 1000 = 3")
"""

MEASURE = """
import json
import resource
import sys
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from airflow_geneva import connect, udf

@udf(data_type=pa.list_(pa.float32(), 8), version="1")
def widen(x: pa.Int64Array) -> pa.Array:
    flat = np.repeat(x.to_numpy().astype(np.float32), 8)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), 8)

table = connect(sys.argv[1]).open_table("docs")
table.add_columns({"y": widen})
where = json.loads(sys.argv[2])
result = table.backfill("y", udf=widen, runner="inline", where=where, checkpoint_interval=0.5)
assert result.rows_left == 0
print(result.rows_computed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def run(script: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("filtered", [False, True], ids=["whole", "deleted rows and a filter"])
def test_peak_memory_does_not_grow_with_the_fragment(tmp_path: Path, filtered: bool) -> None:
    where = "id % 1000 < 900" if filtered else None
    peaks = []
    for rows in (SMALL, LARGE):
        folder = tmp_path / str(rows)
        folder.mkdir()
        run(MAKE, str(folder), str(rows), "deleted" if filtered else "none")
        computed, peak = run(MEASURE, str(folder), json.dumps(where)).split()
        assert int(computed) == rows * (899 if filtered else 1_000) // 1_000
        peaks.append(int(peak))
    assert peaks[1] - peaks[0] < MARGIN_MB, f"{peaks[0]} MB for {SMALL:,} rows, {peaks[1]} MB for {LARGE:,}"
