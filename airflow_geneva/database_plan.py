"""Plan all computed columns and views of a database: what runs now, and what becomes due when columns above it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_geneva.engine import api
from airflow_geneva.engine.display import Described, counted
from airflow_geneva.engine.results import BackfillResult
from airflow_geneva.engine.storage.engine_errors import is_failure
from airflow_geneva.engine.udf import UDF, load_udf
from airflow_geneva.engine.udf.definition import columns_to_take, definition_in
from airflow_geneva.errors import GenevaError, InvalidInput, JobFailed
from airflow_geneva.view import View

if TYPE_CHECKING:
    from airflow_geneva.database import Database
    from airflow_geneva.engine.api import Interval, Plan, Ranges
    from airflow_geneva.table import Table

RowSet: TypeAlias = "dict[int, Ranges]"
"""Rows of a table by fragment, as physical offsets."""

_SHOWN_REASONS = 3


@dataclass(frozen=True, repr=False)
class TargetPlan(Described):
    """What one run of everything does to a column, or to a view.

    Args:
        name: ``table.column``, or the name of the view.
        key: the table and the column, or the view alone.
        above: the keys of the columns and views from which it is computed.
        blocked: why it cannot be computed; "" if it can.
        rows: rows that its functions would run on now; for a view without functions, rows that enter it.
        least, most: the bounds of this number after everything above it has run; `most` is None if it is not known.
        seconds, cost: for `least` to `most` rows, by earlier jobs; None if nothing is known.
        reasons: number of rows that are due now, by reason.
        because: the names above it whose runs may make more rows due.
        plan: its plan as of now; None if it is blocked.
    """

    name: str
    key: tuple[str, ...]
    above: tuple[tuple[str, ...], ...]
    blocked: str = ""
    rows: int = 0
    least: int = 0
    most: int | None = 0
    seconds: Interval | None = None
    cost: Interval | None = None
    reasons: Mapping[str, int] = field(default_factory=dict)
    because: tuple[str, ...] = ()
    plan: Plan | None = field(default=None, compare=False)

    @property
    def table(self) -> str:
        """The table, or the view."""
        return self.key[0]

    @property
    def due(self) -> bool:
        """Whether a job has something to do now: rows to run, or checkpoints or rows that left to make visible."""
        return self.plan is not None and (bool(self.plan.shards) or bool(self.plan.swap and not self.plan.swap.idle))

    @property
    def exact(self) -> bool:
        """Whether the number of rows is known."""
        return not self.blocked and self.least == self.most

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "plan"}
        return {**plain, "reasons": dict(self.reasons)}

    def __str__(self) -> str:
        if self.blocked:
            return f"{self.name}: blocked: {self.blocked}"
        reasons = sorted(self.reasons.items(), key=lambda item: -item[1])[:_SHOWN_REASONS]
        why = f" ({', '.join(f'{rows:,} {reason}' for reason, rows in reasons)})" if self.rows and reasons else ""
        parts = [f"{counted(self.rows, 'row')} now{why}"]
        if not self.exact:
            bound = "an unknown number" if self.most is None else f"at most {self.most:,}"
            least = f"at least {self.least:,} and " if self.least < self.rows else ""
            why = f"after {', '.join(self.because)}" if self.because else "because equal inputs are called once"
            parts.append(f"{least}{bound} {why}")
        parts += [f"{self.seconds} s"] if self.seconds is not None and self.most else []
        parts += [f"cost {self.cost}"] if self.cost is not None and self.most else []
        return f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, repr=False)
class DatabasePlan(Described):
    """What one run of all computed columns and views would do, in order of their dependencies; writes nothing.

    Args:
        changed: the columns for which other code was given; such a plan cannot be run.
    """

    database: Database
    targets: tuple[TargetPlan, ...]
    changed: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TargetPlan:
        for target in self.targets:
            if target.name == name:
                return target
        raise KeyError(
            f"{name!r} is not in the plan. It has: {', '.join(one.name for one in self.targets) or 'nothing'}."
        )

    @property
    def seconds(self) -> Interval | None:
        """Seconds of all jobs, one after another; None if one of them is not known."""
        return self._sum(target.seconds for target in self.targets if not target.blocked and target.most != 0)

    @property
    def cost(self) -> Interval | None:
        """Cost of all jobs; None if no function or slot has a price."""
        known = [target.cost for target in self.targets if target.cost is not None]
        return self._sum(known) if known else None

    @staticmethod
    def _sum(parts: Iterable[Interval | None]) -> Interval | None:
        whole = api.Interval(0, 0)
        for part in parts:
            if part is None:
                return None
            whole = whole + part
        return whole

    def to_json(self) -> dict[str, Any]:
        targets = [target.to_json() for target in self.targets]
        whole = {"seconds": self.seconds, "cost": self.cost, "changed": list(self.changed)}
        return {"database": self.database.uri, **whole, "targets": targets}

    def __str__(self) -> str:
        blocked = sum(bool(target.blocked) for target in self.targets)
        what = counted(len(self.targets), "computed column or view", "computed columns and views")
        lines = [f"Plan of {self.database.uri}: {what}{f', {blocked} blocked' if blocked else ''}"]
        lines += [f"  if {name} had the given code" for name in self.changed]
        lines += [f"  {target}" for target in self.targets]
        seconds, cost = self.seconds, self.cost
        whole = [f"{seconds} s one after another"] if seconds is not None and seconds.high else []
        whole += [f"cost {cost}"] if cost is not None and cost.high else []
        return "\n".join(lines + ([f"  All: {', '.join(whole)}"] if whole else []))

    def run(
        self, runner: str = "auto", on_result: Callable[[str, BackfillResult], object] | None = None
    ) -> dict[str, BackfillResult]:
        """Compute everything in this order, one job after another in this process, and return the results by name.

        What is blocked, and what is computed from it, is left out, as is what was up to date and stays so. If a job
        fails, what is computed from its column or view is left out, and the others run.

        Args:
            runner: as for :meth:`airflow_geneva.Table.backfill`.
            on_result: is called with the name and the result of each job when it ends, also of one that fails.

        Raises:
            InvalidInput: other code was given to `Database.plan`; nothing was started.
            JobFailed: jobs failed, after the others have run.
        """
        if self.changed:
            raise InvalidInput(
                f"This plan is what would happen if {', '.join(self.changed)} had other code, and cannot be run. Give "
                "the columns that code with alter_columns(), and plan again."
            )
        results: dict[str, BackfillResult] = {}
        failed: dict[tuple[str, ...], str] = {}
        ran = set[tuple[str, ...]]()
        for target in self.targets:
            if target.plan is None or not (target.due or any(key in ran for key in target.above)):
                continue
            if below := [".".join(key) for key in target.above if key in failed]:
                failed[target.key] = f"not run, because {', '.join(below)} failed"
                continue
            try:
                table = self.database.open_table(target.table)
                if isinstance(table, View):
                    done = table.refresh(runner=runner)
                else:
                    done = table.backfill(target.key[-1], runner=runner)
            except GenevaError as error:
                failed[target.key] = str(error).partition("\n")[0]
                if isinstance(error, JobFailed) and error.result is not None and on_result is not None:
                    on_result(target.name, error.result)
                continue
            ran.add(target.key)
            results[target.name] = done
            if on_result is not None:
                on_result(target.name, done)
        if failed:
            listed = "\n".join(f"  {'.'.join(key)}: {why}" for key, why in failed.items())
            raise JobFailed(f"{len(failed)} of {counted(len(self.targets), 'target')} failed:\n{listed}")
        return results


@dataclass(frozen=True)
class _Target:
    """A column, with those that its function fills too, or a view; `reads` are columns of the table `source`.

    `error` says why the table, the view or the column cannot be read; then nothing else is known.
    """

    table: Table | str
    columns: tuple[str, ...] = ()
    source: str = ""
    reads: tuple[str, ...] = ()
    error: str = ""

    @property
    def table_name(self) -> str:
        return self.table if isinstance(self.table, str) else self.table.name

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies it: a view may be named as a column is."""
        return (self.table_name, *self.columns[:1])

    @property
    def name(self) -> str:
        return ".".join(self.key)

    @property
    def names(self) -> Iterator[str]:
        """The names under which other code may be given for it."""
        yield from (f"{self.table_name}.{column}" for column in self.columns)
        if isinstance(self.table, View):
            computed = (column for column in self.table.view_definition.columns if column.udf)
            yield from (f"{self.table_name}.{column.name}" for column in computed)


def _targets(database: Database) -> Iterator[_Target]:
    for name in database.table_names():
        with _as_blocked() as failed:
            table = database.open_table(name)
            if isinstance(table, View):
                definition = table.view_definition
                inside = definition.source_database == database.uri
                reads = tuple(column.name.partition(".")[0] for column in definition.source_reads)
                yield _Target(table, (), definition.source_table if inside else "", reads)
            else:
                yield from _columns_of(table)
        if failed:
            yield _Target(name, error=failed[0])


def _columns_of(table: Table) -> Iterator[_Target]:
    schema, found = table.schema, set[str]()
    for name in schema.names:
        columns: tuple[str, ...] = (name,)
        with _as_blocked() as failed:
            if name in found or (udf := definition_in(schema.field(name))) is None:
                continue
            columns = api.Output.in_schema(schema, name).columns
            reads = udf.input_columns or columns_to_take(schema, name)
            yield _Target(table, columns, table.name, tuple(path.partition(".")[0] for path in reads))
        found.update(columns)
        if failed:
            yield _Target(table.name, columns, error=failed[0])


@contextmanager
def _as_blocked() -> Iterator[list[str]]:
    """Collect why something cannot be read or planned."""
    failed: list[str] = []
    try:
        yield failed
    except BaseException as error:
        if not is_failure(error):
            raise
        failed.append(" ".join(str(error).split()) or type(error).__name__)


def _in_order(targets: Iterable[_Target]) -> list[tuple[_Target, tuple[_Target, ...]]]:
    """Sort targets by dependency, each with those from which it is computed."""
    found = {one.key: one for one in targets}
    makers = {(one.table_name, column): one for one in found.values() for column in one.columns}
    above: dict[tuple[str, ...], tuple[_Target, ...]] = {}
    for key, one in found.items():
        made = [makers[one.source, column] for column in one.reads if (one.source, column) in makers]
        made += [found[one.source,]] if (one.source,) in found else []
        above[key] = tuple(dict.fromkeys(other for other in made if other is not one))
    order = TopologicalSorter({key: [other.key for other in others] for key, others in above.items()})
    try:
        return [(found[key], above[key]) for key in order.static_order()]
    except CycleError as error:
        names = " -> ".join(map(".".join, error.args[1]))
        raise InvalidInput(f"Columns or views are computed from each other: {names}.") from None


@dataclass(frozen=True)
class _Changes:
    """What a run changes in a table: `rows` at their places now, and `others` rows at new places, None if unknown."""

    rows: RowSet = field(default_factory=dict)
    others: int | None = 0

    @property
    def count(self) -> int | None:
        return None if self.others is None else sum(map(len, self.rows.values())) + self.others


def plan_database(database: Database, what_if: Mapping[str, UDF | str] | None = None) -> DatabasePlan:
    """Plan a run of everything; see `Database.plan`."""
    ordered = _in_order(_targets(database))
    wanted = {name: load_udf(udf) if isinstance(udf, str) else udf for name, udf in (what_if or {}).items()}
    _check_names(wanted, ordered)
    named = Counter(target.name for target, _ in ordered)
    planned: dict[tuple[str, ...], TargetPlan] = {}
    changes: dict[tuple[str, ...], _Changes] = {}
    for target, above in ordered:
        name = f"view {target.name}" if named[target.name] > 1 and not target.columns else target.name
        found = TargetPlan(name, target.key, tuple(one.key for one in above), target.error)
        if held := [planned[one.key].name for one in above if planned[one.key].blocked]:
            found = replace(found, blocked=found.blocked or f"{', '.join(held)}, from which it is computed, is blocked")
        if not found.blocked:
            with _as_blocked() as failed:
                plan = _plan(target, wanted)
            running = [one for one in above if not failed and changes[one.key].count != 0]
            if failed:
                found = replace(found, blocked=failed[0])
            else:
                because = tuple(one.name for one in running)
                found = replace(found, rows=plan.rows_to_run, reasons=_reasons(plan), because=because, plan=plan)
                changed = [changes[one.key] for one in running]
                found, changes[target.key] = _within_cascade(target, found, plan, changed, running)
        planned[target.key] = found
    return DatabasePlan(database, tuple(planned.values()), tuple(wanted))


def _check_names(wanted: Mapping[str, object], ordered: Iterable[tuple[_Target, object]]) -> None:
    known = Counter(name for target, _ in ordered for name in target.names)
    for name, udf in wanted.items():
        if known[name] != 1:
            what = "is the name of two columns" if known[name] else "is no computed column: name it as table.column"
            raise InvalidInput(f"{name!r} {what}. Those are: {sorted(known)}.")
        if not isinstance(udf, UDF):
            raise InvalidInput(f"{udf!r:.100} is not a UDF. Give a function made with @udf(...), or its import path.")


def _reasons(plan: Plan) -> dict[str, int]:
    found = Counter[str]()
    for task in plan.fragments:
        found[task.reason] += task.rows
    return dict(found)


def _plan(target: _Target, wanted: Mapping[str, UDF]) -> Plan:
    given = {name[len(target.table_name) + 1 :]: wanted[name] for name in target.names if name in wanted}
    if isinstance(target.table, View):
        return target.table._plan_with(given) if given else target.table.plan_refresh()
    assert not isinstance(target.table, str)
    udf = next(iter(given.values()), None)
    return target.table.plan_backfill(target.columns[0], udf, on_code_change="recompute" if udf else "error")


def _within_cascade(
    target: _Target, found: TargetPlan, plan: Plan, changed: list[_Changes], above: list[_Target]
) -> tuple[TargetPlan, _Changes]:
    """Bound the rows that run after everything above has run, and say what the run of this target changes."""
    due: RowSet = {task.id: task.chosen for task in plan.fragments}
    missing: RowSet = {task.id: task.missing_selected for task in plan.fragments}
    coming: RowSet = {}
    others: int | None = 0
    for one in changed:
        for fragment, rows in one.rows.items():
            coming[fragment] = coming.get(fragment, api.Ranges.empty()) | rows
        others = None if others is None or one.others is None else others + one.others
    if isinstance(target.table, View) and target.table.view_definition.grouping is not None:
        coming, others = {}, None if changed else 0  # the rows come into groups, which only a refresh finds
    more = sum(len(rows - missing.get(fragment, api.Ranges.empty())) for fragment, rows in coming.items())
    least, most = found.rows, None if others is None else found.rows + more + others
    definition = None if not isinstance(target.table, View) else target.table.view_definition
    if definition is not None and changed:
        filtered = definition.filter_columns(target.reads)
        if others != 0 or definition.compares_rows or set(filtered) & {name for one in above for name in one.columns}:
            least = 0
        if definition.limit is not None:
            most = definition.limit
    seconds, cost = plan.estimate_between(least, most) if most is not None else (None, None)
    if any(udf.dedup for udf in plan.spec.udfs.values()):
        least = 0
    for fragment, rows in coming.items():
        due[fragment] = due.get(fragment, api.Ranges.empty()) | rows
    if definition is None:
        made = _Changes(due)
    elif definition.explode is not None and (due or others != 0):
        made = _Changes({}, None)
    else:
        made = _Changes({}, None if others is None else sum(map(len, due.values())) + others)
    return replace(found, least=least, most=most, seconds=seconds, cost=cost), made
