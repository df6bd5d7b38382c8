"""LanceDB's side of a test; runs in an environment of its own, without this package.

Arguments: the folder of a database with a table `docs`, to which it adds a column `y` and a view `v`.
"""

from __future__ import annotations

import sys

import lancedb  # type: ignore[import-not-found]

database = lancedb.connect(sys.argv[1])
database.open_table("docs").add_columns(computed={"y": "id * 2"})
database.create_materialized_view("v", "docs", select={"id": "id", "d": "x * 2"}, where="x % 2 = 0", with_no_data=True)
