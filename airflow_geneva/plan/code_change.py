"""Stop a plan that would recompute or mix rows of another code version, unless the user decided what to do."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_geneva.checkpoint.provenance import version_label
from airflow_geneva.errors import CodeChanged
from airflow_geneva.plan.model import BackfillSpec
from airflow_geneva.plan.view_state import ViewState


def check_code_change(work: BackfillSpec, rows_by_other_version: Mapping[str, int], on_code_change: str) -> None:
    """Stop a backfill if rows hold values of other UDF versions and the user did not say what to do with them.

    Args:
        rows_by_other_version: number of rows that hold values of other versions, by version.

    Raises:
        CodeChanged: there are such rows, and ``on_code_change`` is ``error``.
    """
    at_stake = {maker: rows for maker, rows in rows_by_other_version.items() if maker not in work.continue_from}
    if at_stake and on_code_change == "error":
        rows = sum(at_stake.values())
        versions = ", ".join(f"{n:,} rows of version {version_label(v)}" for v, n in sorted(at_stake.items()))
        raise CodeChanged(
            f"The code of UDF {work.udf_name!r} changed behind column {work.column!r} of "
            f"table {work.table_name!r}: it is version {work.udf_version} now, and the column holds "
            f"{versions}. "
            f'Recompute these {rows:,} rows with on_code_change="recompute", or leave them and compute only '
            'new rows with on_code_change="new_rows".'
        )


def check_view_code_change(
    view_state: ViewState, code: tuple[tuple[str, str], ...], on_code_change: str, view: str
) -> tuple[tuple[str, int], ...]:
    """Count the rows of a view that hold values of other code, by version.

    Args:
        code: the current version of each column's UDF.

    Raises:
        CodeChanged: there are such rows, and ``on_code_change`` is ``error``.
    """
    then = dict(view_state.snapshot.code if view_state.snapshot else ())
    changed = [(name, then[name], version) for name, version in code if then.get(name, version) != version]
    if not changed:
        return ()
    rows = len(view_state.shown)
    if on_code_change == "error":
        changes = ", ".join(f"column {name!r} from version {old} to {new}" for name, old, new in changed)
        raise CodeChanged(
            f"The code of UDFs changed behind view {view!r}: {changes}. {rows:,} rows of the view hold values of the "
            'old code. Recompute them with on_code_change="recompute", or leave them and compute only new and changed '
            'rows with on_code_change="new_rows".'
        )
    return tuple((old, rows) for _, old, _ in changed)
