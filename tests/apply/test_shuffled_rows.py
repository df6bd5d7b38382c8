"""Rows of groups that a shuffle brings together: each comes once, in order, and is taken once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from airflow_geneva import connect
from airflow_geneva.engine.apply.shuffled_rows import GroupPlaces, Sender, ShuffleColumns, ShuffledRows, pieces_of
from airflow_geneva.engine.views.definition import OutputColumn
from airflow_geneva.engine.views.group_keys import Keys, hash_keys
from airflow_geneva.engine.views.grouping import GROUP, Grouping

ROWS, GROUPS = 3_000, 40
COLUMNS = {"at": "`at`", "text": "`text`"}


@pytest.fixture
def source(tmp_path: Path) -> lance.LanceDataset:
    numbers = np.arange(ROWS)
    data = pa.table(
        {
            "k": [None if n % GROUPS == 5 else n % GROUPS for n in range(ROWS)],
            "at": numbers * 7919 % 100,
            "text": [f"row {n}" for n in range(ROWS)],
        }
    )
    table = connect(tmp_path / "db").create_table("source", data, max_rows_per_file=700)
    table.lance.delete("text = 'row 12'")
    return table.lance


@pytest.mark.parametrize("limit", [4_000, 1 << 20], ids=["through a file", "in memory"])
def test_the_rows_of_each_group_come_in_order_and_are_taken_once(
    source: lance.LanceDataset, tmp_path: Path, limit: int
) -> None:
    keys = pa.array([None if key == 5 else key for key in range(GROUPS)], pa.int64())
    hashes = pa.array(hash_keys(Keys.of([keys])))
    groups = lance.write_dataset(pa.table({GROUP: hashes}), str(tmp_path / "groups"), max_rows_per_file=25)
    grouping = Grouping(("k",), ("at desc",), None, "text <> 'row 53'", ())
    columns = tuple(OutputColumn(name, "aggregate", "int64", expression=f"max({name})") for name in COLUMNS)
    shuffled = ShuffleColumns.of(grouping, columns)
    wanted = {alias: text for alias, text in shuffled.columns.projection.items() if "text" in text}
    # The groups at the offsets 10 to 14 of the first fragment are of no interval.
    intervals = [((1 << 32), (1 << 32) + 15), (0, 10), (15, 25)]
    sender = Sender(source, shuffled, GroupPlaces.read(groups, intervals), limit)
    pieces = pieces_of(source, 9)
    assert len(pieces) >= 9
    messages = defaultdict[int, list[bytes]](list)
    for number, data in sender.send(pieces):
        messages[number].append(data)
    received = ShuffledRows(shuffled, limit)
    for number, interval in enumerate(intervals):
        received.receive(interval, messages[number])

    def expected(key: int) -> list[str]:
        mine = [n for n in range(ROWS) if n % GROUPS == key and n not in (12, 53)]
        return [f"row {n}" for n in sorted(mine, key=lambda n: (-(n * 7919 % 100), n))]

    def taken(fragment: int, offsets: list[int]) -> dict[int, list[str]] | None:
        found = received.take(np.array([(fragment << 32) + offset for offset in offsets]), wanted)
        if found is None:
            return None
        rows, ids, group = found
        assert rows.schema.names == list(wanted)
        assert rows.num_rows == len(ids) == len(group)
        texts = rows.column(0).to_pylist()
        return {offset: [texts[at] for at in np.flatnonzero(group == n)] for n, offset in enumerate(offsets)}

    assert taken(0, [2, 3, 7]) == {key: expected(key) for key in (2, 3, 7)}
    assert taken(0, [5]) is None
    assert taken(0, [9]) == {9: expected(9)}
    assert taken(1, list(range(15))) == {key - 25: expected(key) for key in range(25, 40)}
    assert taken(0, [15, 24]) == {key: expected(key) for key in (15, 24)}
    assert taken(0, [12]) is None
    assert taken(2, [0]) is None
