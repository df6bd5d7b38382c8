# --8<-- [start:index]
import pyarrow as pa

from airflow_geneva import connect, udf


@udf(data_type=pa.list_(pa.float32(), 2))
def embed(text: str) -> list[float]:
    return [len(text), text.count("e")]


table = connect("library").create_table("docs", pa.table({"text": ["one", "three", "seventeen"]}))
table.add_columns({"v": embed})
table.backfill("v", runner="inline")
table.lance.create_index("v", "IVF_FLAT", num_partitions=1)
# --8<-- [end:index]

# --8<-- [start:update]
table.add([{"text": "eleven"}])
result = table.backfill("v", runner="inline", indexes="update")
assert result.unindexed_rows == 0
near = {"column": "v", "q": [6.0, 3.0], "k": 1}
found = table.lance.to_table(columns=["text", "_distance"], nearest=near)
# --8<-- [end:update]
