"""Which rows of a query are duplicates of each other, and which of them it keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.lance_io.arrays import is_string
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.errors import InvalidInput

Method: TypeAlias = Literal["equal", "minhash", "cosine"]

FIRST = "first"

_THRESHOLDS = {"minhash": (0.3, 0.8), "cosine": (0.8, 0.95)}
"""The least threshold, below which most pairs would have to be compared, and the one that is meant if none is given."""

_OF_ONE_COLUMN = {
    "minhash": "the texts of one column, not of {on}. Join them into a column of the table",
    "cosine": "the vectors of one column, not of {on}. Join them into a column of the table",
}
_KEEP = re.compile(r"(min|max)\(\s*(`?)(.+?)\2\s*\)")


@dataclass(frozen=True)
class Deduplication:
    """A query keeps one row of each cluster of duplicates; see :meth:`airflow_geneva.query.Query.deduplicate`.

    Args:
        on: the columns that are compared.
        threshold: the least similarity of two texts or vectors; None: rows with equal values are duplicates.
        keep: `first`, `min(column)` or `max(column)`.
    """

    on: tuple[str, ...]
    method: Method
    threshold: float | None
    keep: str

    @staticmethod
    def of(on: Any, method: Any, threshold: Any, keep: Any) -> Deduplication:
        """Check the arguments of a query; the columns are checked when they are known."""
        names = [on] if isinstance(on, str) else on
        if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
            raise InvalidInput(f"deduplicate(on={on!r:.200}) is not valid: give the name of a column, or several.")
        if twice := sorted({name for name in names if list(names).count(name) > 1}):
            raise InvalidInput(f"deduplicate(on={list(names)!r:.200}) names {twice[0]!r} twice.")
        if method not in get_args(Method):
            raise InvalidInput(
                f'method={method!r:.200} is not known. Give "equal", which compares values, "minhash", which '
                'compares texts by their shingles, or "cosine", which compares vectors.'
            )
        if method == "equal" and threshold is not None:
            raise InvalidInput(
                f'threshold={threshold!r} is for texts and vectors: method="equal" compares values. Leave it out, or '
                'give method="minhash" or "cosine".'
            )
        if method in _THRESHOLDS:
            least, usual = _THRESHOLDS[method]
            threshold = usual if threshold is None else threshold
            number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
            if not number or not least <= threshold <= 1:
                raise InvalidInput(
                    f"threshold={threshold!r} is not valid: with method={method!r}, give a number from {least} to 1."
                )
            threshold = float(threshold)
            if len(names) > 1:
                compares = _OF_ONE_COLUMN[method].format(on=f"{list(names)!r:.200}")
                raise InvalidInput(f'method={method!r} compares {compares}, or give method="equal".')
        if not isinstance(keep, str) or (keep != FIRST and not _KEEP.fullmatch(keep.strip())):
            raise InvalidInput(f'keep={keep!r:.200} is not valid: give "first", "min(column)" or "max(column)".')
        return Deduplication(tuple(names), method, threshold, keep.strip())

    @staticmethod
    def arguments(given: Any) -> dict[str, Any]:
        """Return the arguments of :meth:`airflow_geneva.query.Query.deduplicate` that are given as an object."""
        names = ("on", "method", "threshold", "keep")
        if not isinstance(given, Mapping) or "on" not in given or not given.keys() <= set(names):
            raise InvalidInput(
                f'deduplicate={given!r:.200} is not valid: give "on" by name, and perhaps {", ".join(names[1:])}.'
            )
        return dict(given)

    @property
    def keep_column(self) -> str | None:
        """The column whose smallest or largest value is kept; None: the smallest row id is."""
        found = _KEEP.fullmatch(self.keep)
        return found[3] if found else None

    @property
    def keeps_largest(self) -> bool:
        return self.keep.startswith("max")

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns of the source on which it depends which rows are kept."""
        return tuple(dict.fromkeys([*self.on, *([self.keep_column] if self.keep_column else [])]))

    def check(self, schema: pa.Schema, visible: Sequence[str], table: str) -> None:
        """Check the columns against those of a table; `InvalidInput` if one is missing, or cannot be compared."""
        for name in self.reads:
            if name not in visible:
                raise InvalidInput(f"deduplicate: table {table!r} has no column {name!r}, only {', '.join(visible)}.")
        for name in self.on:
            found = schema.field(name)
            if self.method == "minhash" and not is_string(found.type):
                raise InvalidInput(
                    f'deduplicate(on={name!r}, method="minhash"): the column is {found.type}, and only texts have '
                    "shingles."
                )
            if self.method == "cosine":
                if not _is_vector(found.type):
                    raise InvalidInput(
                        f'deduplicate(on={name!r}, method="cosine"): the column is {found.type}. Give one of lists of '
                        "one size of floating-point numbers, such as pa.list_(pa.float32(), 768)."
                    )
                continue
            if is_blob(found) or pt.is_nested(found.type):
                raise InvalidInput(
                    f"deduplicate(on={name!r}): the column is {'a blob' if is_blob(found) else found.type}, which is "
                    "not compared. Give columns of plain values, such as a hash of it that a computed column holds."
                )
        decides = self.keep_column
        if decides is not None and not _is_ordered(schema.field(decides)):
            raise InvalidInput(
                f"deduplicate(keep={self.keep!r}): the column is {schema.field(decides).type}, whose values have no "
                "order. Give a column of numbers, texts or times."
            )

    def __str__(self) -> str:
        least = "" if self.threshold is None else f", similarity of at least {self.threshold:g}"
        return f"{self.method} {', '.join(self.on)}{least}, keep {self.keep}"

    def to_document(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def of_document(document: Mapping[str, Any]) -> Deduplication:
        """Parse what `to_document` returned; LookupError, TypeError or `InvalidInput` for anything else."""
        about = (document["method"], document.get("threshold"), document["keep"])
        return Deduplication.of(list(document["on"]), *about)


def _is_ordered(field: pa.Field) -> bool:
    kind = field.type
    plain = pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind) or pt.is_boolean(kind)
    return not is_blob(field) and (plain or pt.is_temporal(kind) or is_string(kind)) and not pt.is_interval(kind)


def _is_vector(kind: pa.DataType) -> bool:
    return bool(pt.is_fixed_size_list(kind) and pt.is_floating(kind.value_type))
