import pyarrow as pa

from airflow_geneva import connect, udf
from airflow_geneva.errors import CodeChanged

db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a b", "c", "d  e"]}))


@udf(data_type=pa.int64(), name="words")
def first_words(text: str) -> int:
    return text.count(" ") + 1


table.add_columns({"words": first_words})
table.backfill("words", udf=first_words, runner="inline")


# --8<-- [start:changed]
@udf(data_type=pa.int64(), name="words")
def words(text: str) -> int:
    return len(text.split())


try:
    table.backfill("words", udf=words, runner="inline")
except CodeChanged as error:
    print(error)  # both versions, and how many rows hold a value of the old one
# --8<-- [end:changed]
# --8<-- [start:compare]
print(table.compare("words", words, sample=100))  # 1 of 3 rows differ: text='d  e', words.old=3, words.new=2
# --8<-- [end:compare]
table.add(pa.table({"text": ["f g h"]}))
# --8<-- [start:new_rows]
r = table.backfill("words", udf=words, on_code_change="new_rows", runner="inline")  # runs on the rows without a value
# --8<-- [end:new_rows]
computed = [r.rows_computed]
# --8<-- [start:recompute]
r = table.backfill("words", udf=words, on_code_change="recompute", runner="inline")  # runs on the others, too
# --8<-- [end:recompute]
computed.append(r.rows_computed)
