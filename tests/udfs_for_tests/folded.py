"""Functions that can be folded, and leave the ids of the rows that they read in a trace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from airflow_geneva import udaf
from tests.support.counting import leave_trace

IDS = pa.struct([("ids", pa.list_(pa.int64())), ("total", pa.int64())])
READ, REMOVED = ".added", ".removed"


class _Bag:
    """The rows of a group, as a bag: their ids and the sum of `x`."""

    def init(self) -> dict[str, Any]:
        return {"ids": [], "total": 0}

    def add(self, state: dict[str, Any], id: list[int], x: list[int | None]) -> dict[str, Any]:
        leave_trace(id, READ)
        return {"ids": [*state["ids"], *id], "total": state["total"] + sum(one or 0 for one in x)}

    def merge(self, state: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return {"ids": state["ids"] + other["ids"], "total": state["total"] + other["total"]}

    def finish(self, state: dict[str, Any]) -> str:
        return bag_value(state["ids"], state["total"])


def bag_value(ids: list[int], total: int, code: int = 1) -> str:
    return f"{code}: {sorted(ids)} {total}"


class _BagThatLoses(_Bag):
    """The same, from which rows can be removed."""

    def remove(self, state: dict[str, Any], id: list[int], x: list[int | None]) -> dict[str, Any]:
        leave_trace(id, REMOVED)
        left = Counter(state["ids"])
        left.subtract(id)
        assert min(left.values()) >= 0, "a row was removed that was not there"
        return {"ids": [*left.elements()], "total": state["total"] - sum(one or 0 for one in x)}


bag = udaf(data_type=pa.string(), state=IDS, version="1", name="bag")(_Bag)
losing_bag = udaf(data_type=pa.string(), state=IDS, version="1", name="losing_bag")(_BagThatLoses)
refusing_bag = udaf(data_type=pa.string(), state=IDS, version="1", name="refusing_bag", on_error="skip")(
    type("_Refusing", (_BagThatLoses,), {"finish": lambda self, state: 1 // (state["total"] % 2) and self.shown(state),
                                         "shown": _Bag.finish})
)  # fmt: skip


@udaf(data_type=pa.float64(), state=pa.struct([("total", pa.float64()), ("rows", pa.int64())]))
class Mean:
    """The mean of a column, of which NULLs are no part."""

    def init(self) -> tuple[float, int]:
        return 0.0, 0

    def add(self, state: Any, x: pa.Array) -> dict[str, Any]:
        total, rows = state.values() if isinstance(state, dict) else state
        known = x.drop_null()
        return {"total": total + sum(known.to_pylist()), "rows": rows + len(known)}

    def merge(self, state: Any, other: Any) -> dict[str, Any]:
        return {name: state[name] + other[name] for name in state}

    def finish(self, state: dict[str, Any]) -> float | None:
        return state["total"] / state["rows"] if state["rows"] else None


WIDE = 4_096


@udaf(data_type=pa.int64(), state=pa.binary())
class Wide:
    """The number of rows, in a state of some kilobytes."""

    def init(self) -> bytes:
        return bytes(WIDE)

    def add(self, state: bytes, id: list[int]) -> bytes:
        return (int.from_bytes(state, "big") + len(id)).to_bytes(WIDE, "big")

    def merge(self, state: bytes, other: bytes) -> bytes:
        return (int.from_bytes(state, "big") + int.from_bytes(other, "big")).to_bytes(WIDE, "big")

    def finish(self, state: bytes) -> int:
        return int.from_bytes(state, "big")


@udaf(data_type=pa.int64(), state=pa.binary())
class Hoarder:
    """A state that grows with the rows."""

    def init(self) -> bytes:
        return b""

    def add(self, state: bytes, rows: pa.RecordBatch) -> bytes:
        return state + b"x" * 300_000 * rows.num_rows

    def merge(self, state: bytes, other: bytes) -> bytes:
        return state + other

    def finish(self, state: bytes) -> int:
        return len(state)
