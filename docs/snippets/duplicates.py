import pyarrow as pa

from airflow_geneva import connect

db = connect("library")
table = pa.table(
    {
        "id": [1, 2, 3, 4],
        "url": ["https://a.org/1", "https://a.org/2", "https://b.org/1", "https://b.org/1"],
        "text": [
            "To every thing there is a season, and a time to every purpose under the heaven",
            "To every thing there is a season, and a time to every purpose under heaven",
            "A time to weep, and a time to laugh; a time to mourn, and a time to dance",
            "A time to cast away stones, and a time to gather stones together",
        ],
    }
)
embeddings = pa.table(
    {
        "id": [1, 2, 3],
        "embedding": pa.array([[0.9, 0.1, 0.3], [1.8, 0.2, 0.7], [0.1, 0.9, 0.3]], pa.list_(pa.float32(), 3)),
    }
)
# --8<-- [start:texts]
docs = db.create_table("docs", table)
clean = docs.query().deduplicate(on="text", method="minhash", threshold=0.8, keep="min(id)")
view = clean.create_materialized_view(db, "clean_docs")
view.refresh()
print(view.to_arrow()["id"].to_pylist())  # [1, 3, 4]: 2 is almost the text of 1
# --8<-- [end:texts]
# --8<-- [start:left out]
print(view.duplicates(["id"]).to_pylist())
# [{'row_id': 0, 'cluster': 0, 'duplicate_of': None, 'id': 1}, {'row_id': 1, 'cluster': 0, 'duplicate_of': 0, 'id': 2}]
# --8<-- [end:left out]
# --8<-- [start:values]
newest = docs.query().deduplicate(on="url", keep="max(id)")
print(newest.to_arrow()["id"].to_pylist())  # [1, 2, 4]: 3 and 4 have one URL
# --8<-- [end:values]
# --8<-- [start:vectors]
pictures = db.create_table("pictures", embeddings)
clean = pictures.query().deduplicate(on="embedding", method="cosine", threshold=0.95)
print(clean.to_arrow()["id"].to_pylist())  # [1, 3]: 2 points where 1 does
# --8<-- [end:vectors]
