"""The operations that put computed or loaded columns into fragments."""

from __future__ import annotations

import pytest
from lance.bitmap import Bitmap

from airflow_geneva.engine.lance_io.fragments import bitmap_of_all


@pytest.mark.parametrize("rows", [1, 10, 1 << 16, (1 << 16) + 1, 3 << 16, (3 << 16) + 1, 10 << 16])
def test_the_bitmap_of_all_rows_is_what_pylance_reads(rows: int) -> None:
    found = Bitmap._from_bytes(bitmap_of_all(rows))
    assert len(found) == rows
    assert found == Bitmap(range(rows))
