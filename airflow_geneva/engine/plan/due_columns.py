"""Decide which UDF columns of a view run on unchanged rows: those that failed, were added, or have other code now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from airflow_geneva.engine.checkpoint.provenance import MOST_RUNS
from airflow_geneva.engine.checkpoint.view_snapshot import Origin, SourceFragment
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.views.definition import OutputColumn, filled_by


@dataclass(frozen=True)
class DueColumns:
    """Compares the code of a view's values with its code now.

    Args:
        columns: those of the query.
        now: the code versions of the columns.
        before: the versions in the view's snapshot; a column without one was added since.
        recompute: whether values of other code are computed again. Columns that were added are in any case.
        errors_only: whether only columns run that failed, however often.
    """

    columns: Sequence[OutputColumn]
    now: Mapping[str, str]
    before: Mapping[str, str]
    recompute: bool = False
    errors_only: bool = False

    @staticmethod
    def unchanged(columns: Sequence[OutputColumn], before: Mapping[str, str]) -> DueColumns:
        """Compare with the code that the view has, whatever it is now."""
        now = {column.name: "" for column in columns if column.udf or (column.since and column.kind != "sibling")}
        return DueColumns(columns, {**now, **before}, before)

    @property
    def asks(self) -> bool:
        """Whether code changed since the snapshot, so that rows of earlier code need a decision."""
        return any(self.before.get(name, version) != version for name, version in self.now.items())

    @property
    def strict(self) -> DueColumns:
        """The same columns, which run on all rows of earlier code."""
        return replace(self, recompute=True, errors_only=False)

    def of_other_code(self, origin: Origin) -> list[tuple[str, str]]:
        """Return the columns whose values have other code in rows with an origin, with the version of that code."""
        held = ((name, self._held(name, origin)) for name in self.now if name in self.before)
        return [(name, version) for name, version in held if version != self.now[name]]

    def of(self, origin: Origin) -> tuple[str, ...]:
        """Return the columns that run on rows with an origin, in the order of the query.

        They include the columns that read one of them. Without any, the rows stay as they are.
        """
        due = set[str]() if self.errors_only else {name for name in self.now if name not in self.before}
        if self.recompute and not self.errors_only:
            due |= {name for name, _ in self.of_other_code(origin)}
        for name, runs in origin.failed:
            if runs < MOST_RUNS or self.errors_only or self._is_repaired(name, origin):
                due.add(name)
        return self._with_readers(due)

    def after(self, origin: Origin, run: tuple[str, ...]) -> Origin:
        """Return the origin of rows after some columns ran on them without a failure.

        It also has the earlier failures of these columns, for those that fail again.
        """
        recoded = {name for name in run if self._held(name, origin) != self.now.get(name)}
        new = {*self._with_readers(recoded)}  # they have other code now, or other inputs
        again = tuple(one for one in origin.failed if one[0] in run and one[0] not in new)
        others = {name for name in self.now if name in self.before} - set(run)
        held = ((name, self._held(name, origin)) for name in sorted(others))
        made = tuple((name, version) for name, version in held if version != self.now[name])
        return Origin(made, tuple(one for one in origin.failed if one[0] in others), again)

    def _held(self, name: str, origin: Origin) -> str:
        return dict(origin.made).get(name, self.before.get(name, ""))

    def _is_repaired(self, name: str, origin: Origin) -> bool:
        """Whether a column that failed has other code now."""
        return self._held(name, origin) != self.now.get(name)

    def _with_readers(self, due: set[str]) -> tuple[str, ...]:
        found, filled, earlier = set(due), filled_by(self.columns), dict[str, str]()
        for column in self.columns:
            if column.udf is not None and any(earlier.get(name) in found for name in column.columns):
                found.add(column.name)
            earlier[column.name] = filled.get(column.name, column.name)
        return tuple(column.name for column in self.columns if column.name in found)


class Decisions:
    """What `DueColumns` decides about the rows of fragments, of which many have the same origin.

    Args:
        shown: returns the ids of the source rows that the view shows; called only if columns are due.
        explode: the exploded column of the query.
    """

    def __init__(self, due: DueColumns, shown: Callable[[], Ranges], explode: str | None) -> None:
        self.due = due
        self.shown = shown
        self.columns: Callable[[Origin], tuple[str, ...]] = cache(due.of)
        self.after: Callable[[Origin, tuple[str, ...]], Origin] = cache(due.after)
        self.exploded = None if explode is None else filled_by(due.columns).get(explode)

    @staticmethod
    def none() -> Decisions:
        """Decide that no column runs on rows that the view reflects, and that these keep their origin."""
        found = Decisions(DueColumns((), {}, {}), Ranges.empty, None)
        found.columns, found.after = lambda origin: (), lambda origin, run: origin
        return found

    def runs_all(self, columns: tuple[str, ...]) -> bool:
        """Whether these are all columns that UDFs compute, so that no value is worth carrying."""
        return {column.name for column in self.due.columns if column.udf} <= set(columns)

    def keeps_part(self, origin: Origin) -> bool:
        """Whether what the view has of rows with an origin is of use: values, or the number of runs that failed."""
        columns = self.columns(origin)
        return columns == () or not self.runs_all(columns) or bool(self.after(origin, columns).tried)

    def runs_on(self, fragment: SourceFragment) -> bool:
        """Whether a column runs on rows of a fragment."""
        return any(self.columns(origin) != () for origin in (_USUAL, *(origin for origin, _ in fragment.unusual)))

    def left(self, fragment: SourceFragment) -> SourceFragment:
        """Describe a fragment for the next snapshot, if no column runs on its rows."""
        if not fragment.unusual and not self.after(_USUAL, ()):
            return fragment
        return fragment.with_origins((self.after(origin, ()), rows) for origin, rows in fragment.origins)


_USUAL = Origin()
