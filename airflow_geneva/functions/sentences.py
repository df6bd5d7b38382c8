"""Embed sentences with a model that runs where the function runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_geneva.engine.choices import check_whole
from airflow_geneva.engine.udf import UDF
from airflow_geneva.errors import InvalidInput
from airflow_geneva.functions.made import filled, library, make

WORDLLAMA = "wordllama"
_OF_WORDLLAMA = (64, 128, 256)
_MOST_PADDED = 8_192
"""Bytes per call of wordllama, padding included: larger calls exceed a CPU's cache, smaller ones add overhead."""
_UNSORTED = 32


def bytes_of(text: pa.Array) -> pa.Array:
    """Return the weight of each text for `batch_by`: a model pads the texts of a call to the longest one."""
    return pc.binary_length(text)


class _SentenceEmbeddings:
    """Embed texts with a local model, which is loaded once per process."""

    name = "sentence_embeddings"
    revision = 1
    model: str
    dimensions: int
    normalize: bool

    def __init__(self) -> None:
        if self.model == WORDLLAMA:
            wordllama = library("wordllama", "airflow-geneva[embeddings]")
            folder = Path(wordllama.__file__).parent
            # wordllama before 0.4 (which needs numpy 2) searches for the tokenizer in the user's cache only.
            where = staticmethod(
                lambda is_tokenizer_config=False: folder / "tokenizers" if is_tokenizer_config else folder
            )
            loader: Any = type("WordLlama", (wordllama.WordLlama,), {"get_cache_dir": where})
            self.loaded = loader.load(
                cache_dir=folder, disable_download=True, trunc_dim=None if self.dimensions == 256 else self.dimensions
            )
        else:
            loader = library("sentence_transformers", "sentence-transformers")
            self.loaded = loader.SentenceTransformer(self.model, truncate_dim=self.dimensions)

    def __call__(self, text: pa.Array) -> pa.Array:
        texts = text.to_pylist()
        at = [row for row, one in enumerate(texts) if one is not None]
        given = [texts[row] for row in at]
        if not given:
            return filled([], at, len(texts), self.dimensions)
        if self.model == WORDLLAMA:
            # wordllama pads each batch to its longest text, so unsorted texts are padded less in small batches.
            fits = len(text) * (pc.max(bytes_of(text)).as_py() or 0) <= _MOST_PADDED
            found = self.loaded.embed(given, batch_size=len(given) if fits else _UNSORTED)
            if self.normalize:  # the vector of a text without words is 0, and wordllama would normalize it to NaN
                lengths = np.linalg.norm(found, axis=1, keepdims=True)
                found = found / np.where(lengths > 0, lengths, 1)
        else:
            found = self.loaded.encode(given, normalize_embeddings=self.normalize, show_progress_bar=False)
        return filled(found, at, len(texts), self.dimensions)


def sentence_embeddings(
    model: str = WORDLLAMA, dimensions: int = 256, *, normalize: bool = False, **settings: Any
) -> UDF:
    """Make a UDF that embeds texts on the machine where it runs. NULL has no embedding.

    Args:
        model: `"wordllama"`, which runs on any CPU and has its weights in its package (`airflow-geneva[embeddings]`);
            or the name or folder of a model for `sentence-transformers`, which you install yourself. Pin the model: new
            weights under the same name do not change the function's version.
        dimensions: length of the vectors; 64, 128 or 256 for wordllama. Vectors of other models are truncated to it.
        normalize: return vectors of length 1; the vector of an empty text stays 0.
        settings: arguments of the decorator `udf`, such as `batch_limit`, `num_gpus` and `memory`. A call gets texts of
            similar length in bytes (`batch_by`); wordllama gets at most 8,192 bytes per call, padding included.
    """
    check_whole("dimensions", dimensions)
    if model == WORDLLAMA and dimensions not in _OF_WORDLLAMA:
        raise InvalidInput(f"dimensions={dimensions}: the vectors of wordllama have 64, 128 or 256 numbers.")
    given = {"model": model, "dimensions": dimensions, "normalize": normalize}
    chosen = {"batch_by": bytes_of, **settings}
    if model == WORDLLAMA and chosen["batch_by"] is bytes_of:
        chosen.setdefault("batch_limit", _MOST_PADDED)
    return make(_SentenceEmbeddings, pa.list_(pa.float32(), dimensions), given, chosen)
