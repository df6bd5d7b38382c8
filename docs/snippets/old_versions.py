from datetime import timedelta

import pyarrow as pa

from airflow_geneva import connect

db = connect("library")
db.create_table("docs", pa.table({"text": ["a", "bb"]}))
db.open_table("docs").add(pa.table({"text": ["ccc"]}))
# --8<-- [start:example]
for name in db.table_names():
    dataset = db.open_table(name).lance
    dataset.cleanup_old_versions(older_than=timedelta(days=14), error_if_tagged_old_versions=False)
# --8<-- [end:example]
