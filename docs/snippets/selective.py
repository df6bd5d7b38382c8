from datetime import datetime

import pyarrow as pa

from airflow_geneva import connect, udf


@udf(data_type=pa.int64())
def length(text: str) -> int:
    return len(text)


days = [datetime(2026, 1, 1), datetime(2026, 6, 1), datetime(2026, 6, 2)]
db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a", "bb", "ccc"], "created_at": days}))
table.add_columns({"n": length})
# --8<-- [start:recent]
r = table.backfill("n", udf=length, where="created_at >= TIMESTAMP '2026-06-01'", runner="inline")
print(r)  # 2 rows computed
# --8<-- [end:recent]
# --8<-- [start:given]
table.add(pa.table({"text": ["dddd", "eeeee"], "created_at": days[:2], "n": [4, None]}))
table.backfill("n", udf=length, where="n IS NULL", runner="inline")  # not the row that came with a value
# --8<-- [end:given]
# --8<-- [start:version]
version = table.version
table.add(pa.table({"text": ["ffffff"], "created_at": days[2:]}))
answer = {"on_unknown_values": "fill"}  # still not the row that came with a value
table.backfill("n", udf=length, read_version=version, runner="inline", **answer)  # only rows of that version
# --8<-- [end:version]
