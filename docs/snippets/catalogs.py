import os

import pyarrow as pa

from airflow_geneva import connect, connect_namespace, udf


@udf(data_type=pa.int64())
def length(text: str) -> int:
    return len(text)


# --8<-- [start:open]
db = connect_namespace(
    "rest",
    {
        "uri": os.environ["CATALOG_URL"],
        "headers.Authorization": f"Bearer {os.environ['CATALOG_TOKEN']}",
    },
)
# --8<-- [end:open]
# --8<-- [start:use]
table = db.create_table("prod.docs", pa.table({"text": ["a", "bb"]}))
table.add_columns({"n": length})
table.backfill("n")
db.table_names(namespace=["prod"])  # ["prod.docs"]
# --8<-- [end:use]
table.query().where("n > 1").create_materialized_view(connect("views"), "long_docs")
# --8<-- [start:views]
views = connect("views")
view = views.open_view("long_docs", sources=[db])
view.refresh()
# --8<-- [end:views]
