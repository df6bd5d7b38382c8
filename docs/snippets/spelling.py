# --8<-- [start:udfs]
from collections.abc import Iterator

from airflow_geneva import udf


@udf
def count_words(text: str) -> int:
    return len(text.split())


@udf
def split_sentences(text: str) -> Iterator[str]:
    yield from (part.strip() for part in text.split(".") if part.strip())


# --8<-- [end:udfs]
