"""LanceDB's side of a comparison; runs in an environment of its own, without this package.

Reads one order per line: a JSON list of a folder, and a mapping of columns to declare, or the name of one to refresh.
"""

from __future__ import annotations

import json
import sys

import lancedb  # type: ignore[import-not-found]

for line in sys.stdin:
    folder, what = json.loads(line)
    table = lancedb.connect(folder).open_table("docs")
    if isinstance(what, dict):
        table.add_columns(computed=what)
    else:
        table.refresh_column(what)
    print("done", flush=True)
