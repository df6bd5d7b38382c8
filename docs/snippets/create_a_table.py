"""Write a table where Airflow's connection says: with Lance, and nothing of this package."""

from __future__ import annotations

import os

import lance_namespace

properties = {
    "uri": os.environ["GENEVA_NAMESPACE"],
    "headers.Authorization": f"Bearer {os.environ['AIRFLOW_TOKEN']}",
}
catalog = lance_namespace.connect("rest", properties)

# --8<-- [start:create]
from datetime import date

import lance
import pyarrow as pa

docs = pa.table({"text": [f"docs-{row:02}" for row in range(40)], "day": [date(2026, 1, 1)] * 40})
lance.write_dataset(docs, namespace_client=catalog, table_id=["docs"], enable_stable_row_ids=True)
# --8<-- [end:create]
