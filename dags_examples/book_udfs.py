"""A function of the rows of a group, for `profiles.py`."""

from __future__ import annotations

import re

import pyarrow as pa

from airflow_geneva import udf


@udf(data_type=pa.int64())
def vocabulary(text: list[str]) -> int:
    """Count the different words of a book, given all of its verses."""
    return len({word.lower() for verse in text for word in re.findall(r"\w+", verse)})
