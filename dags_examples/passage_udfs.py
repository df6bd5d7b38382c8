"""Functions that cut documents into passages and embed them at any service that speaks OpenAI's API."""

from __future__ import annotations

# --8<-- [start:example]
from airflow_geneva import RateLimit
from airflow_geneva.functions import embeddings, text_chunks

passages = text_chunks(size=1000, overlap=200)
embed = embeddings(
    "text-embedding-3-small",
    1536,
    price_per_million_tokens=0.02,
    cost=0.000005,  # US dollars per million tokens, and an estimate per row
    limit=RateLimit("openai", requests_per_minute=500),
)
# --8<-- [end:example]
