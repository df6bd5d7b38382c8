"""Compare the stored values of two columns: which rows have values, how much these differ, and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from airflow_geneva.engine.display import Described, counted
from airflow_geneva.engine.job.speed import read_history
from airflow_geneva.engine.lance_io.blobs import is_blob
from airflow_geneva.engine.lance_io.fragments import ids_by_name
from airflow_geneva.engine.lance_io.indexes import Index
from airflow_geneva.engine.lance_io.reading import check_columns
from airflow_geneva.engine.plan.freshness import Freshness, column_freshness
from airflow_geneva.engine.plan.model import BackfillSpec
from airflow_geneva.engine.plan.value_diff import same_values
from airflow_geneva.engine.run.column_function import ColumnFunction
from airflow_geneva.engine.run.estimate import check_rows
from airflow_geneva.engine.storage.location import TableLocation
from airflow_geneva.engine.udf.definition import former_names, stored_definition
from airflow_geneva.engine.views.definition import IS_SET, is_view, view_columns
from airflow_geneva.errors import InvalidInput

if TYPE_CHECKING:
    import lance

    from airflow_geneva.engine.udf.settings import UdfDefinition

_QUERIES = 100
"""The number of sampled rows that are used as queries if the user gives none."""
_SHOWN = 5
_SEED = 0
Vectors = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Side:
    """One of the two columns.

    Args:
        call: how it is computed; "" for plain values.
        freshness: of a computed column, over the whole table.
        norms: least, median and largest length of the sampled vectors; None for other types.
        seconds_per_row, cost_per_row: from the newest job that computed it; None if unknown.
    """

    name: str
    call: str
    freshness: Freshness | None
    norms: tuple[float, float, float] | None
    seconds_per_row: float | None
    cost_per_row: float | None

    def __str__(self) -> str:
        parts = []
        if self.freshness is not None:
            parts.append(f"{self.freshness.pending:,} of {self.freshness.rows:,} rows due")
            parts.append(f"{self.freshness.failed:,} failed")
        if self.norms is not None:
            least, median, most = self.norms
            parts.append(f"norms {least:.4g} to {most:.4g}, median {median:.4g}")
        if self.seconds_per_row is not None:
            parts.append(f"{1_000 * self.seconds_per_row:.3g} ms a row")
        if self.cost_per_row is not None:
            parts.append(f"cost {self.cost_per_row:.3g} a row")
        return f"{self.name!r}: {', '.join([*parts, self.call or 'plain values'])}"


@dataclass(frozen=True)
class Overlap:
    """The fraction of nearest neighbors that two columns have in common.

    Args:
        neighbors: number of neighbors of each query.
        queries: number of queries.
        share: mean fraction of the neighbors by one column that are neighbors by the other.
        by: how the neighbors were found.
    """

    neighbors: int
    queries: int
    share: float
    by: str

    def __str__(self) -> str:
        asked = counted(self.queries, "query", "queries")
        return f"{100 * self.share:.0f} % of the {self.neighbors} nearest neighbors are the same, of {asked}, {self.by}"


@dataclass(frozen=True, eq=False, repr=False)
class ColumnComparison(Described):
    """Stored values of two columns.

    Args:
        version: the version that was read.
        rows_total: rows of the table.
        table: the sampled rows: `_rowid`, both columns, and `difference`: the distance of two numbers, 1 minus the
            cosine similarity of two vectors, and otherwise 0 for equal values and 1 for others.
        measure: a sentence about the kind and the size of the differences.
        overlap: for vectors.
    """

    name: str
    version: int
    rows_total: int
    table: pa.Table
    measure: str
    sides: tuple[Side, Side]
    overlap: Overlap | None

    @staticmethod
    def of(
        location: TableLocation,
        dataset: lance.LanceDataset,
        first: str,
        second: str,
        function: Callable[[str], ColumnFunction],
        neighbors: int = 10,
        queries: Sequence[Any] | None = None,
        sample: int = 1_000,
    ) -> ColumnComparison:
        """Compare the stored values of two columns on random rows; see `Table.compare`.

        Args:
            function: returns the function of a column, for queries.
        """
        names = _check(location.name, dataset, first, second, neighbors, queries)
        rows = _shown_rows(dataset)
        total = len(rows)
        chosen = np.random.default_rng(_SEED).permutation(total)[: check_rows("sample", sample)]
        found = dataset.take(rows[np.sort(chosen)].tolist(), columns=["_rowid", *names])
        columns = [found.column(name).combine_chunks() for name in names]
        vectors = [_vectors(column) for column in columns]
        difference, measure = _difference(columns, vectors, names)
        table = found.append_column("_difference" if "difference" in names else "difference", pa.array(difference))
        overlap = None
        if neighbors and vectors[0] is not None and vectors[1] is not None:
            finder = _Finder(dataset, function, names, found.column("_rowid").to_numpy(), (vectors[0], vectors[1]))
            overlap = finder.overlap(neighbors, queries)
        elif queries is not None:
            raise InvalidInput(f"queries are for columns of vectors; {first!r} and {second!r} are not both.")
        sides = tuple(_side(location, dataset, name, of) for name, of in zip(names, vectors, strict=True))
        version, both = int(dataset.version), (sides[0], sides[1])
        return ColumnComparison(location.name, version, total, table, measure, both, overlap)

    @property
    def rows(self) -> int:
        """Number of sampled rows."""
        return int(self.table.num_rows)

    @cached_property
    def _valid(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        first, second = (_valid(self.table.column(side.name)) for side in self.sides)
        return first, second

    @property
    def in_both(self) -> int:
        first, second = self._valid
        return int((first & second).sum())

    @property
    def only_in_first(self) -> int:
        """Sampled rows with a value in the first column only."""
        first, second = self._valid
        return int((first & ~second).sum())

    @property
    def only_in_second(self) -> int:
        """Sampled rows with a value in the second column only."""
        first, second = self._valid
        return int((second & ~first).sum())

    def to_arrow(self) -> pa.Table:
        """Return the sampled rows."""
        return self.table

    def __str__(self) -> str:
        return "\n".join([self.without_values(), *self._farthest()])

    def without_values(self) -> str:
        """Describe the comparison without the values of rows."""
        first, second = self.sides
        neither = self.rows - self.in_both - self.only_in_first - self.only_in_second
        lines = [
            f"Comparison of {first.name!r} and {second.name!r} of table {self.name!r}, version {self.version}, on "
            f"{self.rows:,} of {counted(self.rows_total, 'row')}",
            f"  value in both: {self.in_both:,}, only in {first.name!r}: {self.only_in_first:,}, only in "
            f"{second.name!r}: {self.only_in_second:,}, in neither: {neither:,}",
            f"  {self.measure}",
        ]
        lines += [] if self.overlap is None else [f"  {self.overlap}"]
        lines += [f"  {side}" for side in self.sides]
        return "\n".join(lines)

    def _farthest(self) -> list[str]:
        """Show the rows that differ most."""
        apart = self.table.columns[-1].to_numpy()
        order = [
            at for at in np.argsort(-np.nan_to_num(apart, nan=0.0), kind="stable")[:_SHOWN].tolist() if apart[at] > 0
        ]
        lines = ["  farthest apart:"] if order else []
        for at in order:
            (row,) = self.table.slice(at, 1).to_pylist()
            values = ", ".join(f"{side.name}={row[side.name]!r:.60}" for side in self.sides)
            lines.append(f"    row {row['_rowid']}: {values}")
        return lines


def _shown_rows(dataset: lance.LanceDataset) -> npt.NDArray[np.int64]:
    """Return the positions of a table's rows; of a view, without those that no refresh has computed."""
    if not is_view(dataset.schema.metadata):
        return np.arange(dataset.count_rows())
    is_set = dataset.to_table(columns=[IS_SET]).column(IS_SET).fill_null(False).to_numpy()
    return np.flatnonzero(is_set)


def _check(
    table: str, dataset: lance.LanceDataset, first: str, second: str, neighbors: int, queries: Sequence[Any] | None
) -> tuple[str, str]:
    check_columns(table, dataset.schema.names, [first, second])
    if first == second:
        raise InvalidInput(f"compare({first!r}, {second!r}) names one column twice. Name two.")
    for name in (first, second):
        if is_blob(dataset.schema.field(name)):
            raise InvalidInput(f"Column {name!r} of table {table!r} holds blobs, which compare() does not read.")
    if not isinstance(neighbors, int) or isinstance(neighbors, bool) or neighbors < 0:
        raise InvalidInput(f"neighbors={neighbors!r} is not valid: give a number of neighbors, or 0 for none.")
    if queries is not None and (isinstance(queries, str) or not isinstance(queries, Sequence) or not queries):
        raise InvalidInput(f"queries={queries!r:.80} is not valid: give a list of values that both functions take.")
    return first, second


def _valid(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = np.asarray(column.is_valid())
    return valid


def _vectors(column: pa.Array) -> Vectors | None:
    """Return one vector per row, NaN for NULL; None if the values are not vectors of the same length."""
    kind = column.type
    is_list = pt.is_fixed_size_list(kind) or pt.is_list(kind) or pt.is_large_list(kind)
    if not is_list or not (pt.is_floating(kind.value_type) or pt.is_integer(kind.value_type)):
        return None
    rows = column.to_pylist()
    width = kind.list_size if pt.is_fixed_size_list(kind) else max((len(row) for row in rows if row), default=0)
    if not width or any(row is not None and len(row) != width for row in rows):
        return None
    empty = [None] * width
    return np.array([empty if row is None else row for row in rows], np.float64).reshape(len(rows), width)


def _difference(
    columns: Sequence[pa.Array], vectors: Sequence[Vectors | None], names: Sequence[str]
) -> tuple[npt.NDArray[np.float64], str]:
    """Return the difference of two columns in each row, NaN where one has no value, and a sentence about it."""
    first, second = columns
    both = _valid(first) & _valid(second)
    found = np.full(len(first), np.nan)
    if vectors[0] is not None and vectors[1] is not None:
        widths = [of.shape[1] for of in vectors if of is not None]
        if widths[0] != widths[1]:
            return found, f"vectors of {widths[0]} and {widths[1]} numbers cannot be compared one by one"
        a, b = vectors[0][both], vectors[1][both]
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = np.divide((a * b).sum(axis=1), lengths, out=np.zeros(len(a)), where=lengths > 0)
        found[both] = np.where((a == b).all(axis=1), 0.0, np.maximum(1 - cosine, 0.0))
        return found, f"cosine similarity {_spread(cosine)}"
    if all(pt.is_integer(of.type) or pt.is_floating(of.type) for of in columns):
        a, b = (of.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)[both] for of in columns)
        found[both] = np.abs(a - b)
        return found, f"distance {_spread(found[both])}, values of {_differing(found[both])} differ"
    if first.type != second.type:
        return found, f"{names[0]!r} is {first.type} and {names[1]!r} is {second.type}, which cannot be compared"
    found[both] = 1.0 - same_values(first, second)[both]
    text = f"values of {_differing(found[both])} differ"
    if pt.is_string(first.type) or pt.is_large_string(first.type):
        lengths = [np.mean([len(value) for value in of.to_pylist() if value is not None] or [0]) for of in columns]
        text += f", texts of {lengths[0]:.4g} and {lengths[1]:.4g} characters on average"
    return found, text


def _differing(apart: npt.NDArray[np.float64]) -> str:
    return f"{int((apart > 0).sum()):,} of {counted(len(apart), 'row')}"


def _spread(values: npt.NDArray[np.float64]) -> str:
    if not len(values):
        return "of no row"
    return f"{values.mean():.4g} on average, from {values.min():.4g} to {values.max():.4g}"


def _side(location: TableLocation, dataset: lance.LanceDataset, name: str, vectors: Vectors | None) -> Side:
    definition = stored_definition(dataset.schema, name)
    norms: tuple[float, float, float] | None = None
    if vectors is not None:
        lengths = np.linalg.norm(vectors[~np.isnan(vectors).any(axis=1)], axis=1)
        if len(lengths):
            norms = float(lengths.min()), float(np.median(lengths)), float(lengths.max())
    if definition is None:
        origins = {one.name: one.origin for one in view_columns(dataset.schema)}
        return Side(name, origins.get(name, ""), None, norms, None, None)
    found = column_freshness(dataset, location.checkpoints, definition.input_columns or (), name)
    return Side(name, definition.call, found, norms, *_cost(location, dataset, name, definition, found))


def _cost(
    location: TableLocation, dataset: lance.LanceDataset, name: str, definition: UdfDefinition, found: Freshness
) -> tuple[float | None, float | None]:
    """Return the seconds and the cost per row of the newest job that computed the column."""
    version = max(found.versions, key=lambda made: found.versions[made], default=definition.version)
    for called in (name, *reversed(former_names(dataset.schema, name))):
        described = {"kind": BackfillSpec.kind, "column": called, "udf": definition.name, "udf_version": version}
        for job in read_history(location.checkpoints, described, 1).measured:
            return job.speed.seconds / job.speed.rows, job.cost_per_row(definition.cost)
    return None, definition.cost


@dataclass(frozen=True, eq=False)
class _Finder:
    """Finds neighbors by two columns: by their indexes, or, if one has none, among the sampled rows."""

    dataset: lance.LanceDataset
    function: Callable[[str], ColumnFunction]
    names: tuple[str, str]
    row_ids: npt.NDArray[np.uint64]
    vectors: tuple[Vectors, Vectors]

    @cached_property
    def indexed(self) -> bool:
        ids = ids_by_name(self.dataset)
        return all(any(one.of_vectors for one in Index.read(self.dataset, ids[name][0])) for name in self.names)

    def overlap(self, neighbors: int, queries: Sequence[Any] | None) -> Overlap | None:
        asked: list[tuple[int | None, Vectors, Vectors]] = []
        if queries is not None:
            functions = [self.function(name) for name in self.names]
            for query in queries:
                given = query if isinstance(query, tuple) else (query,)
                first, second = (np.array(function(*given), np.float64) for function in functions)
                asked.append((None, first, second))
        else:
            complete = ~(np.isnan(self.vectors[0]).any(axis=1) | np.isnan(self.vectors[1]).any(axis=1))
            for at in np.flatnonzero(complete)[:_QUERIES].tolist():
                asked.append((int(self.row_ids[at]), self.vectors[0][at], self.vectors[1][at]))
        shares = []
        for own, first, second in asked:
            near = [self._nearest(side, vector, own, neighbors) for side, vector in enumerate((first, second))]
            if most := max(map(len, near)):
                shares.append(len(near[0] & near[1]) / most)
        if not shares:
            return None
        by = "by their indexes" if self.indexed else f"by brute force among the {len(self.row_ids):,} sampled rows"
        return Overlap(neighbors, len(shares), float(np.mean(shares)), by)

    def _nearest(self, side: int, vector: Vectors, own: int | None, neighbors: int) -> set[int]:
        wanted = neighbors + (own is not None)
        if self.indexed:
            name = self.names[side]
            near = {"column": name, "q": vector.astype(np.float32), "k": wanted}
            found = self.dataset.scanner(columns=[], with_row_id=True, nearest=near).to_table()
            ids = found.column("_rowid").to_pylist()
        else:
            apart = ((self.vectors[side] - vector) ** 2).sum(axis=1)
            order = np.argsort(apart, kind="stable")
            ids = self.row_ids[order[~np.isnan(apart[order])][:wanted]].tolist()
        return set([one for one in ids if one != own][:neighbors])
