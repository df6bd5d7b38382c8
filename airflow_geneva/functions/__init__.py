"""Ready-made UDFs. Each library is imported where its function runs, not here."""

from __future__ import annotations

from airflow_geneva.functions.audio import transcribe
from airflow_geneva.functions.files import read_file
from airflow_geneva.functions.images import clip_embeddings, images
from airflow_geneva.functions.openai import batch_chat, batch_embeddings, chat, embeddings, extraction
from airflow_geneva.functions.pdf import pages
from airflow_geneva.functions.sentences import sentence_embeddings
from airflow_geneva.functions.text import text_chunks

__all__ = [
    "batch_chat",
    "batch_embeddings",
    "chat",
    "clip_embeddings",
    "embeddings",
    "extraction",
    "images",
    "pages",
    "read_file",
    "sentence_embeddings",
    "text_chunks",
    "transcribe",
]
