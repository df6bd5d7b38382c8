"""Decide from their provenance which rows are due, and stop a plan that would recompute values of other code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_geneva.engine.checkpoint.provenance import (
    MOST_RUNS,
    Provenance,
    by_code_version,
    failed_rows,
    rows_that,
    version_label,
)
from airflow_geneva.engine.choices import OnCodeChange, OnUnknownValues, undecided
from airflow_geneva.engine.display import counted
from airflow_geneva.engine.lance_io.row_ranges import Ranges
from airflow_geneva.engine.plan.model import BackfillSpec
from airflow_geneva.errors import CodeChanged

if TYPE_CHECKING:
    from airflow_geneva.engine.udf.settings import UdfDefinition

BEFORE = "were computed from the column that was there before"


@dataclass(frozen=True)
class DueRules:
    """The user's choice of the rows that a backfill computes, besides the filter and the read version.

    `errors_only`: rows that failed, in any number of runs and under any version; values of other code stay.
    `recompute_mixed`: rows whose value counts as this version's although another version computed it.
    """

    on_code_change: str = "error"
    on_unknown_values: str = "error"
    errors_only: bool = False
    recompute_mixed: bool = False

    @property
    def named_rows(self) -> bool:
        """Whether only rows with a certain history are computed."""
        return self.errors_only or self.recompute_mixed

    @property
    def asks_about_values(self) -> bool:
        """Whether values that no job computed are not to be computed again without a question."""
        return self.on_unknown_values != OnUnknownValues.RECOMPUTE and not self.named_rows


@dataclass(frozen=True)
class RowStatus:
    """The live rows of one fragment, classified.

    `others` are rows with another version's value, by that version; the `accepted` ones among them keep it. `given_up`
    rows failed in the maximum number of runs.
    """

    due: Ranges
    others: Mapping[str, Ranges]
    accepted: Mapping[str, Ranges]
    given_up: Ranges


def classify_rows(
    known: Mapping[Provenance, Ranges], live: Ranges, version: str, continue_from: tuple[str, ...], wanted: DueRules
) -> RowStatus:
    match OnCodeChange(wanted.on_code_change):
        case OnCodeChange.RECOMPUTE:
            strict, keeps_others = True, False
        case OnCodeChange.NEW_ROWS:
            strict, keeps_others = False, True
        case OnCodeChange.ERROR:  # other rows are at stake, and stop the plan
            strict, keeps_others = False, wanted.errors_only
        case other:
            undecided(other)
    done = rows_that(known, lambda p: _is_done(p, version, continue_from, strict)) & live
    failed = failed_rows(known) & (live - done)
    given_up = rows_that(known, lambda p: p.failures >= MOST_RUNS and p.version == version) & failed
    others = by_code_version(known, live - done)
    left_alone = {maker: rows for maker, rows in others.items() if keeps_others or maker in continue_from}
    if wanted.errors_only:
        return RowStatus(failed, others, left_alone, Ranges.empty())
    if wanted.recompute_mixed:
        mixed = rows_that(known, lambda p: p.version == version and bool(p.made_by)) & live
        return RowStatus(mixed, others, {}, given_up)
    due = live - done - given_up - Ranges.union(left_alone.values())
    return RowStatus(due, others, left_alone, given_up)


def _is_done(provenance: Provenance, version: str, continue_from: tuple[str, ...], strict: bool) -> bool:
    """Whether rows are done; ``recompute`` also recomputes rows that keep another version's value."""
    if strict and provenance.maker not in (version, *continue_from):
        return False
    return provenance.is_value_of(version)


def check_code_change(
    spec: BackfillSpec,
    rows_by_other_version: Mapping[str, int],
    on_code_change: str,
    own: UdfDefinition | None,
    again: Mapping[str, str],
) -> None:
    """Stop a backfill if rows hold values of other UDF versions and the user did not say what to do with them.

    Args:
        own: the column's definition.
        again: of versions with the code of now, what happened to their inputs.
    """
    at_stake = {maker: rows for maker, rows in rows_by_other_version.items() if maker not in spec.continue_from}
    if at_stake and on_code_change == OnCodeChange.ERROR:
        rows = sum(at_stake.values())
        choices = (
            f'Recompute {counted(rows, "row")} with on_code_change="recompute", or leave the old values and compute '
            'only new rows with on_code_change="new_rows".'
        )
        if at_stake.keys() <= again.keys():
            said = "; ".join(sorted({again[maker] for maker in at_stake}))
            raise CodeChanged(
                f"{said[0].upper()}{said[1:]}: {counted(rows, 'row')} of table {spec.table_name!r} {BEFORE}. {choices}"
            )
        versions = ", ".join(f"{counted(n, 'row')} of version {version_label(v)}" for v, n in sorted(at_stake.items()))
        is_own = own is not None and own.version == spec.udf_version
        other = (
            f"Version {spec.udf_version} is the column's own code now. To go on with the other, bring back its code, "
            f"or, if it was passed as udf=, make it the column's: table.alter_columns({{{spec.column!r}: udf}}). "
        )
        raise CodeChanged(
            f"The code of UDF {spec.udf_name!r} changed behind column {spec.column!r} of "
            f"table {spec.table_name!r}: it is version {spec.udf_version} now, and the column holds "
            f"{versions}. {other if is_own else ''}"
            f"{choices} table.compare({spec.column!r}, udf) shows values of both on a sample of rows."
        )


@dataclass(frozen=True)
class OtherCode:
    """Rows of a view whose values earlier code computed.

    Args:
        rows: their number.
        by_version: their number by the version of that code; a row may count for several.
        columns: the columns that hold such values, with the version.
    """

    rows: int
    by_version: tuple[tuple[str, int], ...]
    columns: Collection[tuple[str, str]]

    def check(self, view: str, now: Mapping[str, str]) -> None:
        """Stop the plan of a view if there are such rows, as for a backfill."""
        if self.rows:
            changes = ", ".join(
                f"column {name!r} from version {old} to {now[name]}" for name, old in sorted(self.columns)
            )
            raise CodeChanged(
                f"The code of UDFs changed behind view {view!r}: {changes}. Values of the old code: "
                f'{counted(self.rows, "row")} of the view. Recompute with on_code_change="recompute", or leave the old '
                'values and compute only new and changed rows with on_code_change="new_rows". '
                f"view.compare({min(self.columns)[0]!r}) shows values of both on a sample of rows."
            )
