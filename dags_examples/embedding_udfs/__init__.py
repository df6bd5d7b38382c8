"""A text-embedding UDF with wordllama's model, which is small, runs on any CPU, and is part of its package."""

from __future__ import annotations

# --8<-- [start:example]
from airflow_geneva.functions import sentence_embeddings

embed = sentence_embeddings(dimensions=256)
# --8<-- [end:example]
