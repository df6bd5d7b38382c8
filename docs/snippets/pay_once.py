import pyarrow as pa

from airflow_geneva import connect, udf

calls = []


# --8<-- [start:udf]
@udf(data_type=pa.int64(), deterministic=True, dedup=True, cost=0.002)
def words(text: str) -> int:
    calls.append(text)
    return len(text.split())


# --8<-- [end:udf]
db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a b", "c", "a b", "a b", "d e f"]}))
table.add_columns({"n": words})
# --8<-- [start:run]
result = table.backfill("n", runner="inline")
print(result.rows_computed, result.rows_deduplicated)  # 5 and 2: the function was called three times
table.add([{"text": "a b"}, {"text": "new"}])
later = table.backfill("n", runner="inline")
print(later.rows_computed, later.rows_cached)  # 2 and 1: it was called for "new"
# --8<-- [end:run]
