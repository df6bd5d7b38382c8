import os

import pyarrow as pa

from airflow_geneva import connect, udf


@udf(data_type=pa.int64())
def length(text: str) -> int:
    return len(text)


# --8<-- [start:options]
db = connect(
    "s3://lake/db",
    storage_options={
        "aws_region": "eu-central-1",
        "aws_access_key_id": os.environ["LAKE_KEY"],
        "aws_secret_access_key": os.environ["LAKE_SECRET"],
        "aws_endpoint": os.environ["LAKE_ENDPOINT"],  # of a store that is not Amazon's
        "allow_http": "true",  # if its endpoint has no TLS
    },
)
# --8<-- [end:options]
table = db.create_table("docs", pa.table({"text": ["a", "bb"]}))
table.add_columns({"n": length})
r = table.backfill("n", udf=length, runner="inline")
