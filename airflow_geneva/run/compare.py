"""Compare the values of a column with those of other code, on a sample of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from airflow_geneva.plan.model import BackfillSpec, Plan
from airflow_geneva.run.inline import Udfs
from airflow_geneva.run.sample import ERROR, check_rows, sample_plan
from airflow_geneva.storage.location import TableLocation
from airflow_geneva.udf import UDF

_SHOWN = 8


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Old and new values of sampled rows of a column.

    Args:
        target: the column.
        version: the UDF version of the new values.
        table: the inputs, ``<column>.old``, ``<column>.new``, and ``error`` for rows on which the new code fails.
        differing: positions of the rows whose values differ, or that fail.
    """

    target: str
    version: str
    table: pa.Table
    differing: tuple[int, ...]

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def failed(self) -> int:
        return self.rows - int(self.table.column(ERROR).null_count)

    def to_arrow(self) -> pa.Table:
        """Return the sampled rows."""
        return self.table

    def __repr__(self) -> str:
        if not self.rows:
            return f"Comparison of {self.target} with UDF version {self.version}: no row holds a value of other code"
        failed = f", {self.failed:,} of these fail" if self.failed else ""
        head = f"Comparison of {self.target} with UDF version {self.version}"
        lines = [f"{head}: {len(self.differing):,} of {self.rows:,} rows differ{failed}"]
        for at in self.differing[:_SHOWN]:
            (row,) = self.table.slice(at, 1).to_pylist()
            lines.append("  " + ", ".join(f"{name}={value!r:.60}" for name, value in row.items() if value is not None))
        if len(self.differing) > _SHOWN:
            lines.append(f"  and {len(self.differing) - _SHOWN:,} more")
        return "\n".join(lines)


def compare(plan: Plan, udf: UDF, location: TableLocation, rows: int) -> Comparison:
    """Compute a sample of the rows that a plan would compute again; keep nothing."""
    work = plan.work
    assert isinstance(work, BackfillSpec)
    column, version = work.column, work.udf_version
    found = sample_plan(plan, location, Udfs({column: udf}), check_rows("sample", rows), also=(column,))
    if not found.inputs:
        return Comparison(work.target, version, found.table(), ())
    computed = found.table()
    before = pa.Table.from_batches(found.inputs).column(column)
    names = [name for name in computed.column_names if name not in (column, ERROR)]
    parts = {name: computed.column(name) for name in names}
    parts |= {f"{column}.old": before, f"{column}.new": computed.column(column), ERROR: computed.column(ERROR)}
    after, errors = (computed.column(name).to_pylist() for name in (column, ERROR))
    pairs = zip(before.to_pylist(), after, errors, strict=True)
    # A float that is not a number equals no other one, but is written as it.
    differing = tuple(at for at, (old, new, error) in enumerate(pairs) if error or repr(old) != repr(new))
    return Comparison(work.target, version, pa.table(parts), differing)
