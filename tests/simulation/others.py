"""What others do to a table or a view in a world: each change is one step."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta

import lance
import pyarrow as pa
from lance.fragment import write_fragments

ROWS = 9
SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.int64()), ("z", pa.int64())])


def append(opened: lance.LanceDataset, dice: random.Random) -> None:
    one = dice.randrange(10**6)
    rows = pa.table({"id": [one], "x": [one], "z": [0]}).cast(SCHEMA)
    lance.write_dataset(rows, opened, mode="append")


def update(opened: lance.LanceDataset, dice: random.Random) -> None:
    opened.update({"x": "x + 100"}, where=f"id % 3 = {dice.randrange(3)}")


def touch(opened: lance.LanceDataset, dice: random.Random) -> None:
    """Move rows, whose input stays."""
    opened.update({"z": "z + 1"}, where=f"id % 3 = {dice.randrange(3)}")


def nudge(opened: lance.LanceDataset, dice: random.Random) -> None:
    """Move one row, whose input stays."""
    opened.update({"z": "z + 1"}, where=f"id = {dice.randrange(ROWS)}")


def rekey(opened: lance.LanceDataset, dice: random.Random) -> None:
    """Let two rows take each other's key."""
    one, other = dice.sample(range(ROWS), 2)
    opened.update({"id": f"{one + other} - id"}, where=f"id in ({one}, {other})")


def upsert(opened: lance.LanceDataset, dice: random.Random) -> None:
    rows = pa.table({"id": [dice.randrange(ROWS + 2)], "x": [dice.randrange(100)], "z": [5]}).cast(SCHEMA)
    opened.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)


def delete(opened: lance.LanceDataset, dice: random.Random) -> None:
    opened.delete(f"id = {dice.randrange(ROWS)}")


def compact(opened: lance.LanceDataset, dice: random.Random) -> None:
    opened.optimize.compact_files(target_rows_per_fragment=dice.choice([6, 1000]))


def restore(opened: lance.LanceDataset, dice: random.Random) -> None:
    before = opened.version - dice.randrange(1, 4)
    if before > 2:
        lance.LanceDataset(opened.uri, version=before).restore()


def vacuum(opened: lance.LanceDataset, dice: random.Random) -> None:
    opened.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)


def replace(opened: lance.LanceDataset, dice: random.Random) -> None:
    """Replace the files of an input, as a job does that computes it: the rows stay where they are."""
    fragments = opened.get_fragments()
    groups = []
    for fragment in dice.sample(fragments, dice.choice([1, len(fragments)])):
        column = pa.array([dice.randrange(10**6) for _ in range(fragment.physical_rows)], pa.int64())
        (made,) = write_fragments(pa.table({"x": column}), opened, mode="append")
        groups.append(lance.LanceOperation.DataReplacementGroup(fragment.fragment_id, made.files[0]))
    lance.LanceDataset.commit(opened, lance.Transaction(opened.version, lance.LanceOperation.DataReplacement(groups)))


def say(opened: lance.LanceDataset, dice: random.Random) -> None:
    """Write metadata, each time of another name."""
    said = lance.LanceOperation.UpdateMap({f"theirs {dice.randrange(10**6)}": "said"}, False)
    operation = lance.LanceOperation.UpdateConfig(schema_metadata_updates=said)
    lance.LanceDataset.commit(opened, lance.Transaction(opened.version, operation))


def column(opened: lance.LanceDataset, dice: random.Random) -> None:
    opened.add_columns({f"c{dice.randrange(10**6)}": "z"})


def copy(opened: lance.LanceDataset, dice: random.Random) -> None:
    """Add a row as it is, so that a reader of a view sees it twice."""
    rows = opened.to_table(columns=[field.name for field in opened.schema], limit=1)
    lance.write_dataset(rows, opened, mode="append")


def tidy(opened: lance.LanceDataset, dice: random.Random) -> None:
    """Leave one version, whose transaction is no refresh's."""
    opened.optimize.compact_files()
    opened.update_config({"tidied": f"{dice.randrange(10**6)}"})
    opened.cleanup_old_versions(older_than=timedelta(0))


_ALL = (append, update, touch, nudge, rekey, upsert, delete, compact, restore, vacuum, replace, say, column, copy, tidy)
DO: dict[str, Callable[[lance.LanceDataset, random.Random], None]] = {one.__name__: one for one in _ALL}
"""The changes by name."""


def change(folder: str, kind: str, dice: random.Random) -> None:
    """Make a change to the table; to the view, if its kind begins with "view "."""
    name = "v" if kind.startswith("view ") else "t"
    DO[kind.removeprefix("view ")](lance.LanceDataset(f"{folder}/{name}.lance"), dice)
