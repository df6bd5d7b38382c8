"""``python -m bench.idle``: how long slots are idle at the end of Spark jobs with slower rows at one end."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from airflow_geneva import connect, udf
from airflow_geneva.spark.installation import java_environment

_SLOTS, _ROWS, _SLOT_SECONDS = 4, 16_000, 240.0
_CASES = {
    "even": np.ones(_ROWS),
    "ascending": np.linspace(1, 20, _ROWS),
    "ten times as much in the last eighth": np.where(np.arange(_ROWS) >= _ROWS * 7 // 8, 10.0, 1.0),
    "random": np.random.default_rng(0).lognormal(0, 1, _ROWS),
}


@udf(data_type=pa.int64(), version="1", batch_size=50, num_gpus=0.25)
def sleeps(seconds: pa.DoubleArray, log: pa.StringArray) -> pa.Array:
    began = time.time()
    time.sleep(sum(seconds.to_pylist()))
    with open(log[0].as_py(), "a") as file:
        file.write(f"{began} {time.time()}\n")
    return pa.array([1] * len(seconds))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="geneva-bench-") as folder:
        os.environ.update(java_environment(Path(folder) / "java"))
        os.environ["PYSPARK_PYTHON"] = sys.executable
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(f"local[{_SLOTS}]").config("spark.ui.enabled", "false")
        builder.config("spark.log.level", "ERROR").config("spark.ui.showConsoleProgress", "false").getOrCreate()
        for fragments in (64, 8):
            for name, costs in _CASES.items():
                log = Path(folder) / f"{fragments} {name}.log"
                seconds = costs * (_SLOT_SECONDS / costs.sum())
                rows = pa.table({"seconds": seconds, "log": [str(log)] * _ROWS})
                table = connect(Path(folder) / "db").create_table(
                    f"t{fragments}_{name.replace(' ', '_')}", rows, max_rows_per_file=_ROWS // fragments
                )
                table.add_columns({"y": sleeps})
                table.backfill("y", udf=sleeps, runner="spark", concurrency=_SLOTS)
                calls = np.loadtxt(log)
                busy, span = (calls[:, 1] - calls[:, 0]).sum(), calls[:, 1].max() - calls[:, 0].min()
                idle = 1 - busy / _SLOTS / span
                print(f"{fragments} fragments, {name}: idle {100 * idle:.1f} % of {_SLOTS} x {span:.1f} s", flush=True)


if __name__ == "__main__":
    main()
