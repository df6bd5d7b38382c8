"""LanceDB's side of a comparison; runs in an environment of its own, without this package.

Reads one order per line: a JSON list of a folder, and what to do there. That is a mapping of columns to declare, or the
name of one to refresh; or a list: a view's name and its query to create it, or its name to refresh it, which tells how.
"""

from __future__ import annotations

import json
import sys

import lancedb  # type: ignore[import-not-found]

for line in sys.stdin:
    folder, what = json.loads(line)
    database, told = lancedb.connect(folder), "done"
    if isinstance(what, dict):
        database.open_table("docs").add_columns(computed=what)
    elif isinstance(what, str):
        database.open_table("docs").refresh_column(what)
    elif len(what) == 2:
        database.create_materialized_view(what[0], "docs", with_no_data=True, **what[1])
    else:
        told = str(database.open_materialized_view(what[0]).refresh().mode)
    print(told, flush=True)
