# --8<-- [start:define]
import pyarrow as pa
from spelling import count_words, split_sentences

from airflow_geneva import connect

db = connect("library")
docs = db.create_table("docs", pa.table({"id": [1, 2, 3], "text": ["One. Two.", "Three", ""]}))

view = (
    docs.query()
    .where("length(text) > 0")
    .select({"id": "id", "letters": "length(text)"})
    .add_columns({"words": (count_words, ["text"])})
    .create_materialized_view(db, "words")
)
# --8<-- [end:define]
# --8<-- [start:refresh]
print(view.plan_refresh())
r = view.refresh(runner="inline")  # runner="spark" for more than a notebook can take
print(r, view.to_arrow())

docs.add(pa.table({"id": [4], "text": ["Four five six."]}))
docs.lance.delete("id = 2")
r = view.refresh(runner="inline")  # runs the function on one row, and takes one out
# --8<-- [end:refresh]
# --8<-- [start:explode]
sentences = (
    docs.query()
    .select({"id": "id", "sentence": (split_sentences, ["text"])})
    .explode("sentence")
    .create_materialized_view(db, "sentences")
)
sentences.refresh(runner="inline")
# --8<-- [end:explode]
# --8<-- [start:back]
view.refresh(src_version=1, runner="inline")
# --8<-- [end:back]
# --8<-- [start:columns]
view.add_columns({"sentences": (split_sentences, ["text"]), "capitals": "upper(text)"})
r = view.refresh(runner="inline")  # runs split_sentences only

view.drop_columns(["capitals"])
# --8<-- [end:columns]
