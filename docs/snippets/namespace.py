"""The same in one process: a namespace of Lance that computes what it is asked for."""

from __future__ import annotations

# --8<-- [start:inline]
import time

import lance
import lance_namespace
from lance_namespace import AlterTableBackfillColumnsRequest, DescribeTransactionRequest

catalog = lance_namespace.connect(
    "airflow_geneva.namespace.GenevaNamespace", {"impl": "dir", "root": "library", "runner": "inline"}
)
job_id = catalog.alter_table_backfill_columns(AlterTableBackfillColumnsRequest(id=["docs"], column="n")).job_id
while catalog.describe_transaction(DescribeTransactionRequest(id=[job_id])).status in ("Queued", "Running"):
    time.sleep(0.1)
print(lance.dataset(namespace_client=catalog, table_id=["docs"]).to_table()["n"])
# --8<-- [end:inline]
