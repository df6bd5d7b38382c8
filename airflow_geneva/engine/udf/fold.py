"""Functions that can be folded: a group that was touched costs its change, and not all of its rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.counts import Folds, Usage
from airflow_geneva.engine.display import readable_bytes
from airflow_geneva.engine.lance_io.to_arrow import OutputMismatch, array_from_values
from airflow_geneva.engine.lance_io.to_python import NotInPython, numpy_items, python_values
from airflow_geneva.engine.limits.rate_limit import count
from airflow_geneva.engine.udf.signature import Signature
from airflow_geneva.errors import InvalidInput

LARGEST_STATE = 1 << 20
"""The most bytes of the state of a group, in Arrow's format."""

VALUE, STATE = "value", "state"
"""Fields of what a call on a group returns."""


@dataclass(frozen=True)
class Fold:
    """How the methods of a UDF that can be folded are called.

    Args:
        value, state: the types of its value and of its state.
        rows: how `add` and `remove` take rows after the state; the form is "scalar" for lists.
        removes: whether it has a method `remove`.
    """

    value: pa.DataType
    state: pa.DataType
    rows: Signature
    removes: bool

    @property
    def stored(self) -> pa.StructType:
        """The type of the hidden column of a view: the state, and which rows it is of.

        They are `rows` rows of the table `rows` at version `as_of`; `stamp` identifies that table and the code.
        """
        marks = [("rows", pa.int64()), ("as_of", pa.int64()), ("stamp", pa.int64())]
        return pa.struct([(STATE, self.state), *marks])

    @cached_property
    def has_fixed_size(self) -> bool:
        """Whether all states take the same number of bytes."""
        return _is_fixed(self.state)

    @property
    def result(self) -> pa.StructType:
        return pa.struct([(VALUE, self.value), (STATE, self.stored)])

    def check_count(self, columns: Sequence[str], name: str) -> None:
        """Raise InvalidInput if these are not the columns for the parameters of `add`."""
        if not self.rows.takes_batches and len(columns) != len(self.rows.required):
            raise InvalidInput(
                f"The method add of UDF {name!r} takes {list(self.rows.required)!r} after the state, and "
                f"{len(columns)} input columns are mapped to them: {list(columns)!r}. Name one column for each."
            )


@dataclass(frozen=True, eq=False)
class FoldedCall:
    """Computes the value of one group with the methods of an object."""

    fold: Fold
    name: str
    methods: Any

    def python(self, values: pa.Array) -> Sequence[Any]:
        """Return values of columns, or states, as Python values."""
        return self._readable(*python_values(values))

    def _readable(self, found: Sequence[Any], unreadable: Mapping[int, NotInPython]) -> Sequence[Any]:
        if unreadable:
            why = next(iter(unreadable.values()))
            raise InvalidInput(
                f"UDF {self.name!r} cannot take a value that is {why}. Correct the row, leave it out with where(...), "
                "or annotate the parameters of add as pa.Array."
            )
        return found

    def _rows(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the arguments of `add` and `remove` after the state."""
        if self.fold.rows.form == "record_batch":
            return [batch]
        if self.fold.rows.form == "array":
            return list(batch.columns)
        return [self._column(column, position) for position, column in enumerate(batch.columns)]

    def _column(self, column: pa.Array, position: int) -> Any:
        if not self.fold.rows.takes_numpy(position):
            return list(self.python(column))
        whole = pa.LargeListArray.from_arrays(pa.array([0, len(column)], pa.int64()), column)
        return self._readable(*numpy_items(whole))[0]

    def __call__(
        self,
        kept: Any,
        added: Iterator[pa.RecordBatch],
        removed: Iterator[pa.RecordBatch],
        marks: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the value, and the state with what it is of.

        Args:
            kept: the state of the group's rows, without those that were added and with those that were removed; not
                used if `marks` say why there is none.
            added, removed: these rows.
            marks: the fields `rows`, `as_of` and `stamp` of the new state, and `why` all rows are added.
        """
        methods, folded = self.methods, not marks["why"]
        state, some = methods.init(), False
        for batch in added:
            if batch.num_rows:
                state, some = methods.add(state, *self._rows(batch)), True
        if folded:
            state = methods.merge(kept, state) if some else kept
        for batch in removed:
            if batch.num_rows:
                state = methods.remove(state, *self._rows(batch))
        self._check_size(state)
        # What `finish` does to its argument must not change what is stored.
        value = methods.finish(copy.deepcopy(state))
        count(Usage(folds=Folds.of(marks["why"])))
        marked = {name: marks[name] for name in ("rows", "as_of", "stamp")}
        return {VALUE: value, STATE: {STATE: state, **marked}}

    def _check_size(self, state: Any) -> None:
        if self.fold.has_fixed_size:
            return
        try:
            size = array_from_values([state], self.fold.state).nbytes
        except OutputMismatch as mismatch:
            raise InvalidInput(
                f"The state of UDF {self.name!r} does not fit its type {self.fold.state}: {mismatch}. Got: "
                f"{type(state).__name__} {state!r:.200}."
            ) from mismatch
        if size > LARGEST_STATE:
            raise InvalidInput(
                f"The state of UDF {self.name!r} takes {readable_bytes(size)} for a group, and may take "
                f"{readable_bytes(LARGEST_STATE)}. Keep less in it, such as a sketch in place of all values, or give a "
                "function that takes the rows of a group."
            )


def _is_fixed(kind: pa.DataType) -> bool:
    if pt.is_struct(kind):
        return all(_is_fixed(field.type) for field in kind)
    if pt.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    return bool(pt.is_primitive(kind) or pt.is_decimal(kind) or pt.is_fixed_size_binary(kind))
