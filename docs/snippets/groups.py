# --8<-- [start:define]
import pyarrow as pa
from profiling import profile_of

from airflow_geneva import connect

db = connect("shop")
rows = [
    {"customer": 1, "at": 1, "kind": "visit", "amount": None},
    {"customer": 2, "at": 2, "kind": "buy", "amount": 5.0},
    {"customer": 1, "at": 3, "kind": "buy", "amount": 3.5},
    {"customer": None, "at": 4, "kind": "test", "amount": None},
]
schema = pa.schema([("customer", pa.int64()), ("at", pa.int64()), ("kind", pa.string()), ("amount", pa.float64())])
events = db.create_table("events", pa.Table.from_pylist(rows, schema))
profiles = (
    events.query()
    .where("kind <> 'test'")
    .group_by("customer")
    .agg({"n": "count(*)", "last": "max(at)", "profile": (profile_of, ["kind", "amount"])}, order_by=["at"])
    .create_materialized_view(db, "profiles")
)
profiles.refresh(runner="inline")
# --8<-- [end:define]
# --8<-- [start:touch]
events.add([{"customer": 2, "at": 5, "kind": "buy", "amount": 1.0}])
print(profiles.plan_refresh())  # one group: profile_of is called for customer 2 only
r = profiles.refresh(runner="inline")
# --8<-- [end:touch]
# --8<-- [start:folds]
from averages import Mean

means = events.query().group_by("customer").agg({"mean": (Mean, ["amount"])}).create_materialized_view(db, "means")
means.refresh(runner="inline")
events.add([{"customer": 1, "at": 6, "kind": "buy", "amount": 7.0}])
r = means.refresh(runner="inline")
print(r)  # 1 call folded: it gets the new row only
# --8<-- [end:folds]
