"""The pages of a large database: bytes and seconds of each, as the API server answers a browser."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def measure(folder: str, jobs: int, columns: int, nodes: int, repeats: int) -> dict[str, Any]:
    """Open each page of a database with a table of many columns, many nodes in its graph, and many jobs.

    The seconds are those of repeated visits, once its rows have been counted.
    """
    size = {"jobs": jobs, "columns": columns, "nodes": nodes}
    os.environ |= {"AIRFLOW_HOME": folder, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    subprocess.run([sys.executable, "-m", "airflow", "db", "migrate"], check=True, capture_output=True)
    # Airflow reads its configuration when it is imported.
    from tests.support.browsing import browsing, make_large, shelf_at, whole
    from tests.support.rights import Rights

    found = list[dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        get = next(opened := browsing(patch))
        paths = make_large(shelf_at(Path(folder, "shelf"), patch), **size)
        Rights.give("reader", connections=["shelf"])
        for path in paths:
            page, took = whole(get, path), list[float]()
            for _ in range(repeats):
                began = time.perf_counter()
                get(path)
                took.append(time.perf_counter() - began)
            found.append({"path": path, "bytes": len(page.encode()), "seconds": took})
        opened.close()
    return {**size, "pages": found}
