import pyarrow as pa

from airflow_geneva import connect, udf


@udf(data_type=pa.int64(), cost=0.0004)
def length(text: str) -> int:
    return len(text)


db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a", "bb", "ccc"]}))
table.add_columns({"n": length})
# --8<-- [start:sample]
plan = table.plan_backfill("n", udf=length, price_per_slot_hour=0.05)
print(plan.estimate(sample=20))  # calls the function on at most 20 rows, shows them, and keeps nothing
# --8<-- [end:sample]
table.backfill("n", udf=length, runner="inline")
table.add([{"text": "dddd"}, {"text": "eeeee"}])
# --8<-- [start:history]
plan = table.plan_backfill("n", udf=length, price_per_slot_hour=0.05)
print(plan)  # its line `Estimate: ...` is made of earlier jobs, and calls nothing
print(plan.estimate().seconds, plan.estimate().slot_seconds, plan.estimate().cost)
# --8<-- [end:history]
table.add(pa.table({"text": [str(number) for number in range(50)]}))
# --8<-- [start:caps]
result = table.backfill("n", udf=length, runner="inline", max_rows=40)
print(result)  # PARTIAL: 40 rows computed, 12 left
result = table.backfill("n", udf=length, runner="inline", max_cost=0.01)
print(result)  # DONE: the other 12
# --8<-- [end:caps]
