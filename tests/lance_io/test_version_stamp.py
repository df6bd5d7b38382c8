from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from airflow_geneva.engine.lance_io.table_versions import newest_stamp, stamp_of
from airflow_geneva.engine.storage.files import Storage
from airflow_geneva.engine.storage.location import TableLocation


@pytest.mark.parametrize("new_names", [True, False])
def test_the_newest_version_is_known_by_its_name_and_its_commit(tmp_path: Path, new_names: bool) -> None:
    docs = TableLocation(str(tmp_path / "docs.lance"), "docs")
    assert newest_stamp(docs) is None
    uri = tmp_path / "docs.lance"
    seen = []
    for number in range(12):
        rows = pa.table({"x": [number]})
        lance.write_dataset(rows, uri, mode="append" if number else "create", enable_v2_manifest_paths=new_names)
        seen.append(newest_stamp(docs))
    assert [stamp.version for stamp in seen if stamp] == list(range(1, 13))
    assert len({stamp.commit for stamp in seen if stamp}) == 12
    assert [stamp_of(docs, version) for version in range(1, 13)] == seen
    assert stamp_of(docs, 13) is None
    (uri / "_versions" / ".tmp_99.manifest").touch()
    (uri / "_versions" / "99.manifest-half").touch()
    assert newest_stamp(docs) == seen[-1]


def test_a_table_that_was_made_again_has_another_stamp_of_the_same_version(tmp_path: Path) -> None:
    docs = TableLocation(str(tmp_path / "docs.lance"), "docs")
    stamps = set()
    for _ in range(3):
        lance.write_dataset(pa.table({"x": [1]}), tmp_path / "docs.lance")
        stamps.add(newest_stamp(docs))
        lance.LanceDataset.drop(str(tmp_path / "docs.lance"))
        assert newest_stamp(docs) is None
    assert len(stamps) == 3
    assert {stamp.version for stamp in stamps if stamp} == {1}


def test_a_part_of_a_file_is_read_and_a_file_that_is_gone_is_told_apart(tmp_path: Path) -> None:
    place = Storage.at(str(tmp_path))
    (tmp_path / "a").write_bytes(b"0123456789")
    assert place.read_part("a", 0, 4) == b"0123"
    assert place.read_part("a", 7, 3) == b"789"
    with pytest.raises(FileNotFoundError):
        place.read_part("b", 0, 4)
