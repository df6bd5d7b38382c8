import os

import httpx
import pyarrow as pa

from airflow_geneva import RateLimit, connect, report, udf


# --8<-- [start:limit]
@udf(
    data_type=pa.list_(pa.float32(), 8),
    batch_size=16,
    limit=RateLimit("embeddings", requests_per_minute=3_000, tokens_per_minute=1_000_000, concurrent=64),
    cost=0.00002,
)
class Embedding:
    def __init__(self) -> None:
        key = os.environ["EMBEDDING_API_KEY"]
        self.client = httpx.Client(base_url=os.environ["EMBEDDING_URL"], headers={"Authorization": f"Bearer {key}"})

    def __call__(self, text: pa.StringArray) -> pa.Array:
        answer = self.client.post("embeddings", json={"model": "small", "input": text.to_pylist()})
        document = answer.raise_for_status().json()
        tokens = document["usage"]["total_tokens"]
        report(tokens=tokens, cost=tokens * 0.02 / 1e6)
        return pa.array([one["embedding"] for one in document["data"]], pa.list_(pa.float32(), 8))


# --8<-- [end:limit]


table = connect("library").create_table("docs", pa.table({"text": [f"page {number}" for number in range(100)]}))
table.add_columns({"embedding": Embedding})
# --8<-- [start:run]
result = table.backfill("embedding", max_cost=5.0)
print(result.usage)  # 7 calls of a service, 200 tokens, cost 4e-06
# --8<-- [end:run]
