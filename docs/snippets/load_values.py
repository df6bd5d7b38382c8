# --8<-- [start:deliver]
import pyarrow as pa
import pyarrow.parquet as pq

from airflow_geneva import connect

table = connect("library").create_table("docs", pa.table({"id": [1, 2, 3], "text": ["a", "bb", "ccc"]}))
pq.write_table(pa.table({"id": [1, 3], "caption": ["first", "third"], "score": [0.5, 0.25]}), "delivery.parquet")

result = table.load_columns("delivery.parquet", on="id")
print(result.rows_loaded, result.rows_missing)  # 2 1
print(table.to_arrow().select(["id", "caption", "score"]))
# --8<-- [end:deliver]

# --8<-- [start:again]
pq.write_table(pa.table({"id": [1, 2, 3], "caption": ["first", "second", "third"]}), "delivery-2.parquet")
print(table.load_columns("delivery-2.parquet", on="id", columns=["caption"]).rows_loaded)  # 1
# --8<-- [end:again]
