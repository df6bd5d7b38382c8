# --8<-- [start:imports]
import os

import pyarrow as pa

from airflow_geneva import connect, udf
from airflow_geneva.functions import read_file

# --8<-- [end:imports]
WEB = os.environ["WEB"]  # such as https://images.example

# --8<-- [start:places]
db = connect("media", allowed_places=[WEB, os.path.abspath("scans")])
# --8<-- [end:places]
links = [f"{WEB}/1.png", os.path.abspath("scans/2.png"), f"{WEB}/missing.png"]
table = db.create_table("photos", pa.table({"id": [1, 2, 3], "link": links}))


# --8<-- [start:ahead]
@udf(data_type=pa.int64(), preprocess=read_file(), on_error="skip", version="1")
def size(file: bytes) -> int:
    return len(file)


table.add_columns({"size": (size, ["link"])})
result = table.backfill("size")
print(table.group_errors(column_name="size"))  # FileNotFoundError: .../missing.png answered 404
# --8<-- [end:ahead]
# --8<-- [start:column]
table.add_columns({"file": (read_file(on_error="skip"), ["link"])})
table.backfill("file")
# --8<-- [end:column]
