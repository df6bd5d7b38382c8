"""Describe a plan for the user."""

from __future__ import annotations

from airflow_geneva.plan.model import Plan
from airflow_geneva.plan.previous_inputs import version_label

_LISTED = 8


def explain(plan: Plan) -> str:
    """Say what would run, what would not, and why; a few lines for a table of any size."""
    work = plan.work
    where = f" where {work.where}" if work.where else ""
    lines = [
        f"Refresh of view {work.target} to version {work.version} of its source"
        if plan.swap is not None
        else f"Backfill of {work.target} with {work.udf_name} (version {work.udf_version}){where}, "
        f"table version {work.version}",
        f"  {plan.rows_total:,} rows: {plan.rows_pending:,} pending, {plan.rows_skipped:,} with nothing to do",
    ]
    for tally in plan.reason_counts:
        lines.append(f"    {tally.rows:>14,} rows  {tally.fragments:>8,} fragments  {tally.reason}")
    if not plan.shards and plan.swap is not None and plan.swap.gone:
        lines.append("  Nothing to compute, no Spark; rows that are no longer in the query's result leave the view.")
    elif not plan.shards:
        lines.append("  Nothing to do: no Spark, no new version.")
    else:
        held = plan.rows_pending - plan.rows_to_run
        kept = f" ({held:,} rows come from checkpoints)" if held else ""
        lines.append(f"  {len(plan.fragments):,} fragments in {len(plan.shards)} shard(s){kept}")
        for fragment in plan.fragments[:_LISTED]:
            gaps = ", ".join(_span(a, b) for a, b in list(fragment.missing)[:4])
            more = " ..." if len(fragment.missing.starts) > 4 else ""
            lines.append(
                f"    fragment {fragment.id}: {fragment.status}, {fragment.reason}; rows missing: {gaps or '-'}{more}"
            )
        if len(plan.fragments) > _LISTED:
            lines.append(f"    and {len(plan.fragments) - _LISTED:,} more fragments")
    for version, rows in plan.rows_by_other_version:
        lines.append(f"  {rows:,} rows hold values of UDF version {version_label(version)}")
    lines.extend(f"  Note: {note}" for note in plan.notes)
    return "\n".join(lines)


def _span(start: int, end: int) -> str:
    """Format offsets ``[start, end)`` with an inclusive end."""
    return f"{start} to {end - 1}" if end - start > 1 else f"{start}"
