# --8<-- [start:define]
import pyarrow as pa
from spelling import count_words, split_sentences

from airflow_geneva import connect

db = connect("library")
docs = db.create_table("docs", pa.table({"id": [1, 2, 3], "text": ["One two. Three.", "Four five six.", "Seven."]}))
docs.add_columns({"words": (count_words, ["text"])})
long_docs = docs.query().where("words > 2").select(["id", "text", "words"]).create_materialized_view(db, "long_docs")
sentences = (
    long_docs.query()
    .select({"id": "id", "sentence": (split_sentences, ["text"])})
    .explode("sentence")
    .create_materialized_view(db, "sentences")
)
# --8<-- [end:define]
# --8<-- [start:refresh]
docs.backfill("words", runner="inline")
long_docs.refresh(runner="inline")
sentences.refresh(runner="inline")
# --8<-- [end:refresh]
# --8<-- [start:all]
print(db.plan())  # what runs now, and what becomes due when it has run
db.plan().run(runner="inline")
# --8<-- [end:all]
