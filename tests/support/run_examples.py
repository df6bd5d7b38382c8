"""Run example DAGs on the table `verses` in a separate process, because a process has only one Spark session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import airflow_geneva

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "dags_examples"


def run_examples(database: Path, spark: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Run the DAGs in a new process; return by DAG its state, how many rows it computed, and its errors.

    Args:
        database: created by this function.
        spark: the Spark connection of all DAGs.
    """
    connections = {"LANCE": {"conn_type": "lance", "host": str(database)}, "SPARK": spark, "SPARK_CONNECT": spark}
    environment = {f"AIRFLOW_CONN_{name}_DEFAULT": json.dumps(found) for name, found in connections.items()}
    command = [sys.executable, "-m", "tests.support.run_examples", str(database), *names]
    done = subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Airflow 3.4 logs to stdout when the process ends.
    return dict(json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))))


def main(database: str, names: list[str]) -> None:
    """Add a row before each DAG, run it, and print its result."""
    from tests.support.driving import DagBag, Driver

    sys.path.insert(0, str(EXAMPLES))
    from embedding_udfs import embed  # type: ignore[import-not-found]

    table = airflow_geneva.connect(database).create_table("verses", [{"text": "In the beginning"}])
    table.add_columns({"embedding": embed})
    ended = {}
    for name in names:
        table.add([{"text": name}])
        bag = DagBag(EXAMPLES / f"{name}.py")
        assert not bag.import_errors, bag.import_errors
        run = Driver.trigger(bag.dags[name]).go()
        finished = run.xcom("backfill.finish") or {}
        errors = {f"{task} {index}": str(error) for (task, index), error in run.errors.items()}
        ended[name] = [run.state, finished.get("rows_computed"), errors]
    print(json.dumps(ended))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
