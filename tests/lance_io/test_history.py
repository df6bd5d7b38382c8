"""What was written by which version: cleaned up, or only out of reach."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from airflow_geneva.engine.lance_io.history import read_commit
from airflow_geneva.engine.lance_io.table_versions import open_version_or_none
from airflow_geneva.engine.storage.engine_errors import EngineError

BUSY = "503 Service Unavailable: please reduce your request rate"


def test_a_version_that_is_out_of_reach_is_not_a_cleaned_up_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = lance.write_dataset(pa.table({"x": [1]}), str(tmp_path / "t.lance"))
    assert isinstance(read_commit(dataset, 1).operation, lance.LanceOperation.Overwrite)
    assert read_commit(dataset, 9).gone
    assert open_version_or_none(dataset, 9) is None

    def busy(self: lance.LanceDataset, version: int) -> None:
        raise OSError(BUSY)

    for method in ("read_transaction", "checkout_version"):
        monkeypatch.setattr(lance.LanceDataset, method, busy)
    with pytest.raises(EngineError, match="503"):
        read_commit(dataset, 1)
    with pytest.raises(EngineError, match="503"):
        open_version_or_none(dataset, 1)
