import os

import httpx
import pyarrow as pa

from airflow_geneva import Retry, Skip, connect, udf

db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a", "bb", "ccc"] * 20}))


# --8<-- [start:one]
@udf(
    data_type=pa.list_(pa.float32(), 8),
    max_in_flight=32,
    timeout=20,
    on_error=[Retry(httpx.HTTPError, attempts=4), Skip(httpx.HTTPError)],
    cost=0.00002,
)
class Embedding:
    def __init__(self) -> None:
        key = os.environ["EMBEDDING_API_KEY"]
        self.client = httpx.AsyncClient(
            base_url=os.environ["EMBEDDING_URL"], headers={"Authorization": f"Bearer {key}"}
        )

    async def __call__(self, text: str) -> list[float]:
        answer = await self.client.post("embeddings", json={"model": "small", "input": text})
        return answer.raise_for_status().json()["data"][0]["embedding"]


# --8<-- [end:one]
table.add_columns({"vector": Embedding})
result = table.backfill("vector", runner="inline")


# --8<-- [start:many]
@udf(data_type=pa.list_(pa.float32(), 8), batch_size=16, max_in_flight=8)
class Embeddings(Embedding.func):
    async def __call__(self, text: pa.StringArray) -> pa.Array:
        answer = await self.client.post("embeddings", json={"model": "small", "input": text.to_pylist()})
        found = answer.raise_for_status().json()["data"]
        return pa.array([one["embedding"] for one in found], pa.list_(pa.float32(), 8))


# --8<-- [end:many]
table.add_columns({"vector_of_batch": Embeddings})
of_batch = table.backfill("vector_of_batch", runner="inline")
