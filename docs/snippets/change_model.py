# --8<-- [start:candidate]
import pyarrow as pa

from airflow_geneva import connect, udf

VECTOR = pa.list_(pa.float32(), 2)


@udf(data_type=VECTOR)
def embed(text: str) -> list[float]:
    return [len(text), text.count("e")]


@udf(data_type=VECTOR)
def embed_v2(text: str) -> list[float]:
    return [len(text.split()), text.lower().count("e")]


table = connect("library").create_table("docs", pa.table({"text": ["one", "Three eggs", "seventeen"]}))
table.add_columns({"embedding": embed, "embedding_v2": embed_v2})
table.backfill(["embedding", "embedding_v2"], runner="inline")
for column in ("embedding", "embedding_v2"):
    table.lance.create_index(column, "IVF_FLAT", num_partitions=1)
# --8<-- [end:candidate]

# --8<-- [start:compare]
print(table.compare("embedding", "embedding_v2", neighbors=1, queries=["an egg", "ten"]))
# --8<-- [end:compare]

# --8<-- [start:plan]
plan = table.plan_promotion("embedding_v2", to="embedding", keep_as="embedding_v1")
print(plan)  # due and failed rows, indexes, and the rows of views and columns that it makes due
# --8<-- [end:plan]

# --8<-- [start:promote]
table.promote_column("embedding_v2", to="embedding", keep_as="embedding_v1")
# --8<-- [end:promote]


# --8<-- [start:search]
class Search:
    """A search service: all that it uses is of one version, and so of one model."""

    def __init__(self, table):
        self.table = table
        self.open()

    def open(self):
        self.version = self.table.version
        self.dataset = self.table.location.open(self.version)
        self.embed = self.table.column_function("embedding", self.version)

    def find(self, query, k=1):
        if self.table.version != self.version:
            self.open()
        near = {"column": "embedding", "q": self.embed(query), "k": k}
        return self.dataset.to_table(columns=["text"], nearest=near)["text"].to_pylist()


search = Search(table)
found = search.find("ten eels")
# --8<-- [end:search]

# --8<-- [start:back]
table.promote_column("embedding_v1", to="embedding", keep_as="embedding_v2")
# --8<-- [end:back]
before = search.find("ten eels")
