"""``python -m bench.batches``: rows per CPU second of backfills that embed texts in table order, and by length.

Set OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and RAYON_NUM_THREADS to 1.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from airflow_geneva import connect
from airflow_geneva.functions import sentence_embeddings
from dags_examples.demo.verses import read_books

_MIXED, _WORDS = 1_500, (10, 2_000)
_REPEATS = 3

sorted_texts = sentence_embeddings(name="sorted_texts")
texts_as_they_come = sentence_embeddings(name="texts_as_they_come", batch_by=None)


def main() -> None:
    verses = [verse for book in read_books() for verse in book["text"].to_pylist()]
    words, pick = " ".join(verses).split(), random.Random(0)
    mixed = [" ".join(pick.choices(words, k=pick.randint(*_WORDS))) for _ in range(_MIXED)]
    for name, texts in {"verses": verses, f"texts of {_WORDS[0]} to {_WORDS[1]:,} words": mixed}.items():
        compare(name, texts)


def compare(name: str, texts: list[str]) -> None:
    """Embed texts both ways in turn, and print the best result of each; SystemExit if a vector differs."""
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="geneva-bench-") as folder:
        for repeat in range(_REPEATS):
            table = connect(Path(folder) / "db").create_table(f"texts{repeat}", pa.table({"text": texts}))
            for udf in (texts_as_they_come, sorted_texts):
                udf.function.loaded.embed(["loaded"])  # type: ignore[attr-defined]
                table.add_columns({udf.name: udf})
                began = time.process_time()
                table.backfill(udf.name, runner="inline")
                best[udf.name] = min(best.get(udf.name, 1e9), time.process_time() - began)
            found = table.to_arrow()
            if not found[sorted_texts.name].equals(found[texts_as_they_come.name]):
                raise SystemExit(f"{name}: a vector differs.")
    plain, ours = (len(texts) / best[udf.name] for udf in (texts_as_they_come, sorted_texts))
    print(f"{name}: {plain:,.0f} rows per CPU second, sorted {ours:,.0f}: {ours / plain:.2f} times; vectors bit-equal")


if __name__ == "__main__":
    main()
