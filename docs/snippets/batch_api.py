import io
import json

import openai
import pyarrow as pa

from airflow_geneva import BatchFailed, connect, udf

db = connect("library")
table = db.create_table("docs", pa.table({"text": ["a", "bb", "ccc"] * 20}))


# --8<-- [start:class]
@udf(
    data_type=pa.list_(pa.float32(), 8),
    input_columns=["text"],
    batch_size=40_000,
    poll_interval=300,
    version="1",
)
class EmbedLater:
    def __init__(self) -> None:
        self.client = openai.OpenAI()

    def submit(self, batch: pa.RecordBatch, key: str) -> str:
        lines = [
            {
                "custom_id": str(row),
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": "text-embedding-3-small", "input": text},
            }
            for row, text in enumerate(batch["text"].to_pylist())
        ]
        data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
        file = self.client.files.create(file=("rows.jsonl", data), purpose="batch")
        made = self.client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/embeddings",
            completion_window="24h",
            metadata={"key": key},
            extra_headers={"Idempotency-Key": key},
        )
        return made.id

    def find(self, key: str) -> str | None:
        batches = self.client.batches.list(limit=100)
        return next((one.id for one in batches if (one.metadata or {}).get("key") == key), None)

    def poll(self, handle: str) -> bool:
        found = self.client.batches.retrieve(handle)
        if found.status in ("failed", "cancelled"):
            raise BatchFailed(f"batch {handle} is {found.status}: {found.errors}")
        return found.status in ("completed", "expired")

    def fetch(self, handle: str) -> list[list[float] | Exception]:
        found = self.client.batches.retrieve(handle)
        files = [name for name in (found.output_file_id, found.error_file_id) if name]
        lines = [line for name in files for line in self.client.files.content(name).text.splitlines()]
        answers = {int(line["custom_id"]): line["response"] for line in map(json.loads, lines)}
        sent = self.client.files.content(found.input_file_id).text.splitlines()
        return [value_of(answers.get(row)) for row in range(len(sent))]


def value_of(answer: dict | None) -> list[float] | Exception:
    if answer is None:
        return BatchFailed("the batch ended before this row")
    if answer["status_code"] != 200:
        return RuntimeError(str(answer["body"]))
    return answer["body"]["data"][0]["embedding"]


# --8<-- [end:class]
EmbedLater = udf(data_type=EmbedLater.data_type, input_columns=["text"], batch_size=25, poll_interval=0.1, version="1")(
    EmbedLater.func
)
# --8<-- [start:run]
table.add_columns({"vector": EmbedLater})
result = table.backfill("vector")
# --8<-- [end:run]
