import pyarrow as pa

from airflow_geneva import connect, udf
from airflow_geneva.errors import JobFailed

db = connect("shop")
table = db.create_table("offers", pa.table({"text": ["1.50", "2.25", "call us"]}))


@udf(data_type=pa.float64())
def price(text: str) -> float:
    return float(text)


table.add_columns({"price": price})
try:
    table.backfill("price", udf=price, runner="inline")
except JobFailed as error:
    message = str(error)
# --8<-- [start:look]
print(table.lance.to_table(filter="_rowaddr = 2"))
# --8<-- [end:look]
left = table.lance.to_table(filter="_rowaddr = 2").to_pylist()


@udf(data_type=pa.float64(), name="price")
def mended(text: str) -> float:
    return float(text) if text[0].isdigit() else 0.0


# --8<-- [start:continue]
plan = table.plan_backfill("price", udf=mended)
print(plan)  # Note: checkpointed by UDF version ...: 2 rows, which continue_from="..." would save.
r = table.backfill("price", udf=mended, continue_from=price.code_version, runner="inline")  # runs on one row
# --8<-- [end:continue]
