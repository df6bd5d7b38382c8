"""What a program needs that asks Airflow to compute a column and a view: Lance, and nothing of this package."""

from __future__ import annotations

# --8<-- [start:ask]
import json
import os
import time

import lance
import lance_namespace
from lance_namespace import (
    AlterTableBackfillColumnsRequest,
    CreateMaterializedViewRequest,
    DescribeTransactionRequest,
    RefreshMaterializedViewRequest,
)

properties = {
    "uri": os.environ["GENEVA_NAMESPACE"],  # https://airflow.example/geneva/namespace/lance_default
    "headers.Authorization": f"Bearer {os.environ['AIRFLOW_TOKEN']}",
}
catalog = lance_namespace.connect("rest", properties)


def wait_for(job_id: str) -> dict[str, str]:
    while True:
        found = catalog.describe_transaction(DescribeTransactionRequest(id=[job_id]))
        if found.status not in ("Queued", "Running"):
            return {"status": found.status, **(found.properties or {})}
        time.sleep(1)


asked = AlterTableBackfillColumnsRequest(id=["docs"], column="n", where="day >= date '2026-01-01'")
print(wait_for(catalog.alter_table_backfill_columns(asked).job_id))

query = {"source": "docs", "select": {"day": "day", "n": ["my_project.udfs:measure", ["text"]]}}
view = CreateMaterializedViewRequest(
    id=["docs_view"], kind="query", source_query=json.dumps(query), output_schema="", with_no_data=False
)
print(wait_for(catalog.create_materialized_view(view).job_id))

refresh = RefreshMaterializedViewRequest(id=["docs_view"])
print(wait_for(catalog.refresh_materialized_view(refresh).job_id))

for name in ("docs", "docs_view"):
    rows = lance.dataset(namespace_client=catalog, table_id=[name]).to_table()
    print(name, rows.num_rows, rows["n"].null_count)
# --8<-- [end:ask]
