# --8<-- [start:define]
import pyarrow as pa

from airflow_geneva import Fail, Retry, Skip, connect, udf


@udf(
    data_type=pa.float64(),
    on_error=[Retry(ConnectionError, attempts=3), Skip(ValueError, max_fraction=0.5), Fail()],
    timeout=30.0,
)
def price(text: str) -> float:
    return float(text)


# --8<-- [end:define]
db = connect("shop")
# --8<-- [start:key]
offers = pa.table({"offer": ["a-1", "a-2", "b-7"], "text": ["1.50", "2.25", "call us"]})
table = db.create_table("offers", offers, key="offer")
# --8<-- [end:key]
table.add_columns({"price": price})
# --8<-- [start:read]
r = table.backfill("price", udf=price, runner="inline")
print(r)  # DONE: 2 rows computed, ... 1 failed

for group in table.group_errors():
    print(group)  # how many rows fail now for one cause, and one of them with the function's own traceback
for error in table.get_errors(r.job_id):
    print(error.key, error.row_address, error.exception, error.message)  # each row of one job
table.get_failed_row_addresses(column_name="price")  # rows that hold no value today
# --8<-- [end:read]


@udf(data_type=pa.float64(), name="price")
def lenient_price(text: str) -> float:
    return float(text) if text[0].isdigit() else 0.0


# --8<-- [start:again]
table.backfill("price", udf=lenient_price, errors_only=True, runner="inline")
# --8<-- [end:again]
# --8<-- [start:jobs]
future = table.backfill_async("price", udf=lenient_price, on_code_change="new_rows", runner="inline")
print(future.status())
print(future.result())
for job in db.jobs():
    print(job)
# --8<-- [end:jobs]
