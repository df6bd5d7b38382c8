from typing import NamedTuple

import pyarrow as pa

from airflow_geneva import connect, udf

table = connect("library").create_table("texts", pa.table({"text": ["a word", "another word", "words"]}))


# --8<-- [start:several]
class Counted(NamedTuple):
    words: int
    vowels: int


@udf
def count(text: str) -> Counted:
    return Counted(len(text.split()), sum(letter in "aeiou" for letter in text))


table.add_columns({("words", "vowels"): count})
table.backfill("words")
print(table.to_arrow().select(["words", "vowels"]))
# --8<-- [end:several]
