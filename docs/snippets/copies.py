import pyarrow as pa

from airflow_geneva import connect, udf

db = connect("library")
table = db.create_table("docs", pa.table({"id": [1, 2, 3], "text": ["one", "two three", "four"]}))


@udf(data_type=pa.int64())
def words(text: str) -> int:
    return len(text.split())


table.add_columns({"words": words})
table.backfill("words")
view = table.query().where("words > 1").select(["id", "text"]).create_materialized_view(db, "long_docs")
view.refresh()

# --8<-- [start:copy]
staging = db.copy_table("docs", "docs_staging")
print(staging.plan_backfill("words").rows_pending)  # 0
# --8<-- [end:copy]

# --8<-- [start:move]
new = connect("new_library")
for name in ("docs", "long_docs"):  # a view after the table that it reads
    new.copy_table(db.open_table(name))
print(new.open_view("long_docs").plan_refresh().rows_pending)  # 0
# --8<-- [end:move]

# --8<-- [start:clone]
table.lance.shallow_clone(f"{db.uri}/experiment.lance", table.version)
experiment = db.open_table("experiment")
print(experiment.plan_backfill("words").rows_pending)  # 0
# --8<-- [end:clone]

restored = db.create_table("restored", table.to_arrow())

# --8<-- [start:adopt]
r = restored.backfill("words", on_unknown_values="adopt")
print(r.notes)  # adopted: 3 rows, with values that no job of this table computed, count as version ...
# --8<-- [end:adopt]
