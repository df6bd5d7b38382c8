"""What somebody may do who may write the folder of a table, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from airflow_geneva import Table
from airflow_geneva.views.definition import QUERY_KEY


def edit_definition(view: Table, **changes: Any) -> None:
    """Change the stored definition of a view."""
    found = json.loads(view.lance.schema.metadata[QUERY_KEY.encode()])
    write_definition(view, json.dumps({**found, **changes}))


def write_definition(view: Table, text: str) -> None:
    view.lance.update_schema_metadata({QUERY_KEY: text})
