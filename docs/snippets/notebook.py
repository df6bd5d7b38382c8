# --8<-- [start:define]
import pyarrow as pa

from airflow_geneva import connect, udf


@udf(data_type=pa.int64())
def length(text: str) -> int:
    return len(text)


db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a", "bb", "ccc"]}))
table.add_columns({"n": length})
# --8<-- [end:define]
# --8<-- [start:backfill]
plan = table.plan_backfill("n")
print(plan)
r = table.backfill("n")
print(r, table.to_arrow().column("n"))
# --8<-- [end:backfill]
